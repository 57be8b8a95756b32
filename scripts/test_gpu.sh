#!/usr/bin/env bash
# Runs the tests that need Hopper GPUs, on one or on two, in the Python environment that is active: ./scripts/test_gpu.sh
# [pytest arguments]. Failures are printed as they come. First all that fits beside others, then what fills a GPU.
set -uo pipefail
cd "$(dirname "$0")/.."
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore
gpus=$(python3 -c 'import torch; print(torch.cuda.device_count())')  # as CUDA_VISIBLE_DEVICES has them
processes=${PROCESSES:-8}  # each holds 3.4 GiB of both GPUs for its kernels and contexts, and ranks as much again
[ "$gpus" -gt 1 ] && export DS_FP8_TEST_GPUS=2
[ $# -gt 0 ] || set -- tests/gpu
status=0
python3 -m pytest -n "$processes" --dist loadgroup --durations=25 -m "gpu and not alone" "$@" || status=$?
python3 -m pytest --durations=5 -m "gpu and alone" "$@" || status=$?
exit $status
