#!/usr/bin/env bash
# Runs the tests that need Hopper GPUs, on one or on two, in the Python environment that is active: ./scripts/test_gpu.sh
# [pytest arguments]. Failures are printed as they come. First what one process does, then ranks, whose processes need the
# memory of those, then what fills a GPU.
set -uo pipefail
cd "$(dirname "$0")/.."
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore
read -r gpus cores < <(python3 -c 'import os, torch; print(torch.cuda.device_count(), os.cpu_count())')  # that are visible
[ "$gpus" -gt 1 ] && export DS_FP8_TEST_GPUS=2
[ $# -gt 0 ] || set -- tests  # those whose bodies run on the CPU elsewhere, too
status=0
run() {
  python3 -m pytest --dist loadgroup "${@:2}" -m "gpu and $1"
  local code=$?
  [ $code = 0 ] || [ $code = 5 ] || status=$code  # 5: none of the arguments' tests is of this kind
}
# A process holds 4 GiB of a GPU for kernels and contexts, a rank of two as much of both; a test and its ranks use three
# cores.
run "not ranks and not alone" -n "${PROCESSES:-$((4 + 4 * gpus))}" --durations=15 "$@"
run "ranks and not alone" -n $((cores < 12 ? 4 : cores < 30 ? cores / 3 : 10)) --durations=25 "$@"
run alone --durations=5 "$@"
exit $status
