# Source this from a script in the project's folder: makes .venv beside README.md with the tested versions, and enters it.
#   . scripts/environment.sh [extra ...]      for example: . scripts/environment.sh test
# With an NVIDIA GPU the versions are those of constraints-gpu.txt, without one those of constraints-cpu.txt and the CPU
# build of torch. PYTHON chooses the interpreter (default python3).

fail() { printf '\nerror: %s\n  remedy: %s\n' "$1" "$2" >&2; exit 2; }

have_gpu() { command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU; }

install_torch() {
  local version
  version=$(sed -n 's/^torch==\([^ ]*\).*/\1/p' "$1")
  if have_gpu; then
    python -m pip install -q -c scripts/constraints.txt -c "$1" "torch==$version"
    return
  fi
  # "+cpu" admits the CPU build alone: from a folder or index that pip is configured with, or else through uv, which
  # knows where PyTorch publishes it. Never the default build, which brings gigabytes of CUDA.
  python -m pip install -q "torch==$version+cpu" 2>/dev/null && return
  python -m pip install -q uv && uv pip install -q --torch-backend=cpu "torch==$version" && return
  fail "no CPU build of torch $version for $(python --version) could be installed" \
    "install it into .venv by hand as pytorch.org says (Get Started, pip, CPU), then run this again"
}

make_environment() {
  local extras python=${PYTHON:-python3} stamp own=scripts/constraints-cpu.txt
  if have_gpu; then own=scripts/constraints-gpu.txt; fi
  extras=$(IFS=,; echo "$*")
  command -v "$python" >/dev/null || fail "no $python" "install Python 3.10 to 3.13, or set PYTHON to its path"
  "$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' ||
    fail "$("$python" --version) is not supported" "set PYTHON to a Python 3.10 to 3.13"

  # Installed once; again when the requirements or the interpreter change.
  stamp=".venv/installed-$(cat pyproject.toml scripts/constraints.txt "$own" scripts/environment.sh | cat - <("$python" --version) \
    | cksum | cut -d' ' -f1)-${extras:-base}"
  exec 9<pyproject.toml
  if [ ! -e "$stamp" ] && [ ! -e "${stamp%-*}-test" ]; then  # test brings all that recipe does
    # Packages must not change under a running script: each holds a shared lock on pyproject.toml until it ends.
    flock -n -x 9 || { echo "waiting for another script of this folder, which uses .venv ..."; flock -x 9; }
    echo "Installing into .venv (once, a few minutes): torch ..."
    [ -e .venv/bin/python ] || "$python" -m venv .venv ||
      fail "cannot make a virtual environment" "install the venv module of $python (Debian: apt install python3-venv)"
    (
      . .venv/bin/activate
      export PIP_DISABLE_PIP_VERSION_CHECK=1
      set -e
      python -m pip install -q -c "$own" "setuptools>=77" wheel packaging ninja
      python -c 'import torch' 2>/dev/null || install_torch "$own"
      echo "... DeepSpeed ..."
      # DeepSpeed's build looks at the installed torch, so it must not build in an environment of its own.
      python -m pip install -q --no-build-isolation -c scripts/constraints.txt -c "$own" deepspeed
      echo "... transformers and the others ..."
      python -m pip install -q --no-build-isolation -c scripts/constraints.txt -c "$own" -e ".${extras:+[$extras]}"
    ) || fail "the installation into .venv failed" "see above; remove .venv to begin anew"
    touch "$stamp"
  fi
  flock -s 9
  . .venv/bin/activate
  have_gpu || export DS_ACCELERATOR=cpu
}

drop_closed_folders() {
  # DeepSpeed asks for numactl, and ends where it is looked for in a folder of PATH that this user may not enter.
  local folder open=()
  while IFS= read -r -d : folder; do [ -x "$folder" ] && open+=("$folder"); done <<<"$PATH:"
  PATH=$(IFS=:; echo "${open[*]}")
}

drop_closed_folders
make_environment "$@"
