#!/usr/bin/env bash
# Makes .venv with the test extra, then runs the linter and the tests. Arguments go to pytest: ./scripts/test.sh tests/zero
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh test
ruff check .
ruff format --check .
# Reports are opened in a real browser, and jobs on many hosts run in network namespaces; without the programs for these
# their tests are skipped.
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  missing=
  command -v chromium-headless-shell >/dev/null || command -v chromium >/dev/null || missing=chromium-headless-shell
  { command -v pdsh && command -v sshd && command -v ip; } >/dev/null || missing+=" openssh-server pdsh iproute2"
  if [ -n "$missing" ]; then
    apt-get -qq update >/dev/null 2>&1 || true
    for package in $missing; do  # one by one: those that are to be had
      apt-get -qq install -y --no-install-recommends "$package" >/dev/null 2>&1 ||
        echo "$package could not be installed: the tests that need it are skipped"
    done
  fi
fi
# One thread a process: the tests start several ranks on few cores. Three files of tests at a time, for many wait for
# processes that they started; in their own order, or the longest files, which have the fewest tests, would come last.
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1
# A process of tests that dies ends the run: put in its place, another can leave all of them waiting for each other.
exec python -m pytest -n 3 --max-worker-restart 0 --dist loadfile --no-loadscope-reorder --durations=10 "$@"
