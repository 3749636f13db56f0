#!/usr/bin/env bash
# What a GPU is needed for, in one call of about ten minutes, without network:
#
#   bash scripts/gpu_check.sh [FOLDER]      default: gpu_check
#
# Builds csrc, runs tests/gpu, measures the kernels' GB/s beside copy_, profiles the models of gpu_check.py, plans for their
# budgets by the local search, and replays the plans beside plain PyTorch. FOLDER then holds gpu_check.md, replays.csv,
# profiles/, schedules/ and a log of each stage, and FOLDER.tar.gz all of it. MINUTES (9), PYTHON (python3), SOLUTIONS (a
# folder of schedules to replay, too), MODELS (a regular expression: only these), STEPS, TESTS (tests/gpu), BUILD (1; 0:
# the kernels are there) and PLANS (1; 0: no profiles and plans, only SOLUTIONS are replayed) can be set.
set -uo pipefail
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

: >"$out/stages.txt"
[[ ${BUILD:-1} == 0 ]] || stage build $((limit / 3)) env MONET_LIKE_CUDA=1 "$python" -m monet_like.build
stage tests $((limit / 4)) "$python" -m pytest -q -o addopts= ${TESTS:-tests/gpu}
stage bandwidth $((limit / 8)) "$python" -m benchmarks.kernel_bandwidth --out "$out/kernel_bandwidth.md"
left=$((limit - SECONDS - 10))
stage measure "$left" "$python" scripts/gpu_check.py --out "$out" --seconds $((left - 20)) \
  ${SOLUTIONS:+--solutions "$SOLUTIONS"} ${MODELS:+--models "$MODELS"} ${STEPS:+--steps "$STEPS"} $([[ ${PLANS:-1} == 0 ]] && echo --no-plans)
tar -czf "$out.tar.gz" -C "$(dirname "$out")" "$(basename "$out")"
cat "$out/gpu_check.md" 2>/dev/null
exit "$failed"
