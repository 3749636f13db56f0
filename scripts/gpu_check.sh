#!/usr/bin/env bash
# What a GPU is needed for, in parts of at most twelve minutes, each complete in itself, without network:
#
#   bash scripts/gpu_check.sh [--part N] [FOLDER]      default: part 0, gpu_check
#
#   0  tests/gpu, the kernels' GB/s beside copy_, profiles of the models of gpu_check.py, plans for their budgets by the
#      local search, and their replays beside plain PyTorch
#   1  torch.compile beside plain PyTorch, checkpointing, ours and our plans in it, in bfloat16 autocast and channels-last
#   2  LoRA of a Llama of 8B: plans of blocks for 40 to 12 GB beside compiled layers and Liger's kernels
#   3  part 0's measurements of VGG-16 and the U-Net, with PyTorch's expandable segments and without
#   4  the zoo's schedules, replayed
#   5  LoRA of a Llama of 8B with frozen weights on the host, for 57 to 12 GB, beside FSDP2's policy and a swap by hand
#   6  small steps, which wait for the host: ours with CUDA graphs and without, beside torch.compile with them and our
#      plans in that; what is reserved counts there: the allocator's peak is without the graphs' pools
#
# Each builds csrc first. FOLDER then has the part's tables and rows and a log of each stage, and FOLDER.tar.gz all of it.
# Parts 1, 2 and 6 go on where they ended if FOLDER is the same. MINUTES (9), PYTHON (python3), SOLUTIONS (a folder of
# schedules to replay, too), MODELS (a regular expression: only these), STEPS, TESTS (tests/gpu), BUILD (1; 0: the kernels
# are there), PLANS (1; 0: no profiles and plans, only SOLUTIONS are replayed), SIZE (8b) and BUDGETS can be set.
set -uo pipefail
part=0
if [[ ${1:-} == --part ]]; then
  part=${2:?--part needs a number from 0 to 6}
  shift 2
fi
out=$(realpath -m "${1:-gpu_check}")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "not measured"
  exit 0
fi
limit=$((60 * ${MINUTES:-9}))
mkdir -p "$out"
failed=0
stage() { # NAME SECONDS COMMAND...: run it with its output in NAME.log, and say how it went
  local name=$1 seconds=$2 started=$SECONDS
  shift 2
  if timeout "$seconds" "$@" >"$out/$name.log" 2>&1; then
    echo "$name: passed, $((SECONDS - started)) s" | tee -a "$out/stages.txt"
  else
    echo "$name: failed with exit code $?, $((SECONDS - started)) s; the end of $name.log:" | tee -a "$out/stages.txt"
    tail -n 5 "$out/$name.log" | tee -a "$out/stages.txt"
    failed=1
  fi
}

measure() { # FOLDER SECONDS OPTIONS...: profiles, plans and replays
  local folder=$1 seconds=$2
  shift 2
  mkdir -p "$folder"
  stage measure "$seconds" "$python" scripts/gpu_check.py --out "$folder" --seconds $((seconds - 20)) \
    ${STEPS:+--steps "$STEPS"} "$@"
}
left() { echo $((limit - SECONDS - 10)); }
decoder() { # OPTIONS...
  stage decoder "$(left)" "$python" -m benchmarks.decoder_steps --model "${SIZE:-8b}" --out "$out" \
    --seconds $(($(left) - 60)) ${STEPS:+--steps "$STEPS"} "$@"
}
rivals() { # MODELS CONTENDERS
  stage rivals "$(left)" "$python" -m benchmarks.run --suite gpu16 --out "$out" --parts points --minutes $(($(left) / 60 - 1)) \
    --models "${MODELS:-$1}" --contenders "plain PyTorch,$2,torch.compile mode" ${STEPS:+--steps "$STEPS"}
}

: >"$out/stages.txt"
[[ ${BUILD:-1} == 0 ]] || stage build $((limit / 3)) env MONET_LIKE_CUDA=1 "$python" -m monet_like.build
case $part in
  0)
    stage tests $((limit / 4)) "$python" -m pytest -q -o addopts= ${TESTS:-tests/gpu}
    stage bandwidth $((limit / 8)) "$python" -m benchmarks.kernel_bandwidth --out "$out/kernel_bandwidth.md"
    measure "$out" "$(left)" ${SOLUTIONS:+--solutions "$SOLUTIONS"} ${MODELS:+--models "$MODELS"} \
      $([[ ${PLANS:-1} == 0 ]] && echo --no-plans)
    ;;
  1) rivals resnet50,gpt2,vgg16,vit_b_16,unet,mobilenet_v2,nnunet "torch.compile,monet_like,torch.compile budget,checkpoint per block,torch.compile planned" ;;
  2) decoder --budgets "${BUDGETS:-40 GB,28 GB,22 GB,18 GB,12 GB}" ;;
  3)
    PYTORCH_ALLOC_CONF=expandable_segments:True measure "$out/expandable" $(($(left) / 2)) --models "${MODELS:-vgg16|unet}"
    measure "$out" "$(left)" --models "${MODELS:-vgg16|unet}"
    ;;
  4) measure "$out" "$(left)" --solutions "${SOLUTIONS:-solutions}" --no-plans ${MODELS:+--models "$MODELS"} ;;
  5) decoder --weights --budgets "${BUDGETS:-57 GB,24 GB,16 GB,12 GB}" ;;
  6) rivals gpt2_short,resnet18 "torch.compile,monet_like,monet_like graphs,torch.compile planned graphs" ;;
  *) echo "there is no part $part; give a number from 0 to 6" >&2 && exit 2 ;;
esac
tar -czf "$out.tar.gz" -C "$(dirname "$out")" "$(basename "$out")"
cat "$out"/{gpu_check,rivals,decoder_steps}.md 2>/dev/null
exit "$failed"
