#!/usr/bin/env bash
# Installs into .venv, then runs CPT -> SFT stage 1 -> SFT stage 2 in FP8 and again in BF16, and compares the two in
# runs/quickstart/report.html. Two CPU ranks, or the machine's GPUs. Run it again and it continues where it stopped.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh recipe

ranks=2
if have_gpu; then ranks=$(nvidia-smi -L | grep -c GPU); fi
export TOKENIZERS_PARALLELISM=false

python examples/quickstart/make_data.py

run() {  # kind stage [--set key=value ...]
  echo; echo "== $2, $1"
  deepspeed --num_gpus "$ranks" scripts/train.py --deepspeed_config "ds_configs/quickstart/$2.json" "${@:3}"
}

run fp8 cpt
run fp8 sft_stage1
run fp8 sft_stage2

bf16=runs/quickstart/bf16
run bf16 cpt --set fp8.enabled=false --set train.run_dir=$bf16/cpt
run bf16 sft_stage1 --set fp8.enabled=false --set train.run_dir=$bf16/sft_stage1 --set train.init_from=$bf16/cpt
run bf16 sft_stage2 --set fp8.enabled=false --set train.run_dir=$bf16/sft_stage2 --set train.init_from=$bf16/sft_stage1

echo
ds-fp8 report runs/quickstart --title "ds_fp8 quickstart: CPT, then two stages of SFT"
echo
python -c 'import json; print("Conclusion:", json.load(open("runs/quickstart/summary.json"))["verdict"].split("\n")[0])'
