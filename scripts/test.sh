#!/usr/bin/env bash
# Makes .venv with the test extra, then runs the linter and the tests. Arguments go to pytest: ./scripts/test.sh tests/zero
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh test
ruff check .
ruff format --check .
# One thread a process: the tests start several ranks on few cores.
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1
exec python -m pytest "$@"
