#!/usr/bin/env bash
# Makes .venv with the test extra, then runs the linter and the tests. Arguments go to pytest: ./scripts/test.sh tests/zero
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh test
ruff check .
ruff format --check .
# Reports are opened in a real browser, and jobs on several hosts run in network namespaces, which root alone can make.
browser() { for name in chromium-headless-shell chromium chromium-browser google-chrome; do type "$name" && return; done; }
hosts() { PATH=$PATH:/usr/sbin:/sbin type pdsh sshd ip tc; }
add() {  # one by one: those that are to be had
  [ "$(id -u)" = 0 ] && command -v apt-get || return 0
  apt-get -qq update || true
  for package in "$@"; do apt-get -qq install -y --no-install-recommends "$package" || true; done
}
{ browser || add chromium-headless-shell; hosts || add openssh-server pdsh iproute2; } >/dev/null 2>&1
browser >/dev/null 2>&1 || echo "no browser: tests that open reports are skipped (Debian: apt install chromium-headless-shell)"
if [ "$(id -u)" != 0 ]; then
  echo "not root: tests of jobs on several hosts are skipped (they need openssh-server, pdsh and iproute2, too)"
elif ! hosts >/dev/null 2>&1; then
  echo "no sshd, pdsh, ip or tc: tests of jobs on several hosts are skipped (Debian: apt install openssh-server pdsh iproute2)"
fi
# One thread a process: the tests start several ranks on few cores. Three files of tests at a time, for many wait for
# processes that they started; in their own order, or the longest files, which have the fewest tests, would come last.
# Two arenas of malloc a process: three files of ranks took 1.9 GiB, 3.0 with glibc's default (2 cores, 2026-11-28).
export MALLOC_ARENA_MAX=2 OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1
# Test modules are compiled, their assertions rewritten, once and not by each process of each run.
unset PYTHONDONTWRITEBYTECODE
# A process of tests that dies ends the run: put in its place, another can leave all of them waiting for each other.
exec python -m pytest -n 3 --max-worker-restart 0 --dist loadfile --no-loadscope-reorder --durations=10 "$@"
