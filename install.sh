#!/usr/bin/env bash
# Installs the package from this checkout, with its kernels, into the active virtual environment or a new one in .venv.
# Running it again is quick and changes nothing that is up to date.
#
#   ./install.sh          what is needed to plan and to train
#   ./install.sh --dev    also what is needed to test and to contribute
#
# PYTHON names the interpreter for a new environment (default: python3). MONET_LIKE_CUDA=1 or 0 compiles the CUDA
# kernels or leaves them out; by default they are compiled where PyTorch sees a GPU, for that GPU. If no nvcc is there,
# that of pip is installed (105 MB), which has it for CUDA 13; for CUDA 12 install NVIDIA's toolkit.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

extras=""
for argument in "$@"; do
  case "$argument" in
    --dev) extras="dev" ;;
    -h | --help) sed -n '2,10s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) echo "install.sh: unknown argument '$argument'; it takes --dev or --help" >&2; exit 2 ;;
  esac
done

if [[ -n "${VIRTUAL_ENV:-}" ]]; then
  python="$VIRTUAL_ENV/bin/python"
elif [[ -n "${CONDA_PREFIX:-}" && "${CONDA_DEFAULT_ENV:-base}" != base ]]; then
  python="$CONDA_PREFIX/bin/python"
else
  if [[ ! -x .venv/bin/python ]]; then
    interpreter="${PYTHON:-python3}"
    if ! command -v "$interpreter" >/dev/null; then
      echo "install.sh: '$interpreter' not found; install Python 3.10 or newer, or set PYTHON" >&2
      exit 1
    fi
    if ! "$interpreter" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
      echo "install.sh: Python 3.10 or newer is needed, '$interpreter' is $("$interpreter" -V 2>&1); set PYTHON" >&2
      exit 1
    fi
    if ! "$interpreter" -m venv .venv; then
      rm -rf .venv
      echo "install.sh: could not make .venv; on Debian and Ubuntu: apt-get install python3-venv" >&2
      exit 1
    fi
  fi
  python=".venv/bin/python"
fi

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
  echo "install.sh: Python 3.10 or newer is needed, '$python' is $("$python" -V 2>&1)" >&2
  exit 1
fi

# torch first, the build tools with it: the kernels are compiled against the torch that is installed, not a fresh one
# in an isolated build environment.
missing=()
for module in torch torchvision wheel ninja; do
  "$python" -c "import importlib.util as u, sys; sys.exit(u.find_spec('$module') is None)" || missing+=("$module")
done
"$python" -c 'import setuptools as s, sys; sys.exit(int(s.__version__.partition(".")[0]) < 77)' 2>/dev/null || missing+=("setuptools>=77")
if ((${#missing[@]})); then
  "$python" -m pip install "${missing[@]}"
fi

if "$python" -c 'import sys; from monet_like.toolchain import nvcc_is_wanted; sys.exit(not nvcc_is_wanted())'; then
  extras="${extras:+$extras,}kernels"
fi

# pip hides what happens to the kernels, so they are compiled after it, where progress can be seen. Only what is out of date is.
MONET_LIKE_KERNELS_LATER=1 "$python" -m pip install --no-build-isolation -e ".${extras:+[$extras]}"

echo "Compiling the kernels:"
if ! "$python" -m monet_like.build; then
  echo "The package works without compiled kernels, on slower plain-torch twins." >&2
fi

echo
echo "Installed into $("$python" -c 'import sys; print(sys.prefix)')."
if [[ "$python" == .venv/* ]]; then
  echo "Next: source .venv/bin/activate"
fi
echo "Then: python -c 'from monet_like import ops; print(ops.status())'"
