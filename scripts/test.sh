#!/usr/bin/env bash
# Makes .venv with the test extra, then runs the linter and the tests. Arguments go to pytest: ./scripts/test.sh tests/zero
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh test
ruff check .
ruff format --check .
# Reports are opened in a real browser; without one those tests are skipped.
if ! command -v chromium-headless-shell >/dev/null && ! command -v chromium >/dev/null && [ "$(id -u)" = 0 ] &&
  command -v apt-get >/dev/null; then
  { apt-get -qq update && apt-get -qq install -y --no-install-recommends chromium-headless-shell; } >/dev/null 2>&1 ||
    echo "no headless browser could be installed: the tests of reports are skipped"
fi
# One thread a process: the tests start several ranks on few cores. Two files of tests at a time: many wait for processes
# that they started.
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1
exec python -m pytest -n 2 --dist loadfile --durations=10 "$@"
