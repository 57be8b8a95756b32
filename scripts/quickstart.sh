#!/usr/bin/env bash
# Installs into .venv, then runs CPT -> SFT stage 1 -> SFT stage 2 in FP8 and again in BF16, and compares the two in
# runs/quickstart/report.html. Two CPU ranks, or the machine's GPUs. Run it again and it continues where it stopped.
set -euo pipefail
cd "$(dirname "$0")/.."
usage="usage: ./scripts/quickstart.sh [--steps N]
  --steps N  steps of every stage, to see that all of it runs (default: 200, 130 and 150)"
steps=
case "$# ${1-}" in
  "0 ") ;;
  "1 -h" | "1 --help") sed -n '/^# /s/^# //p;/^set/q' scripts/quickstart.sh; echo "$usage"; exit ;;
  "2 --steps") steps=$2 ;;
  *) printf 'error: unknown arguments: %s\n%s\n' "$*" "$usage" >&2; exit 2 ;;
esac
[[ $# = 0 || $steps =~ ^[1-9][0-9]*$ ]] || { printf 'error: --steps %s is no number of steps\n%s\n' "$steps" "$usage" >&2; exit 2; }
. scripts/environment.sh recipe

# A stage begins with the weights of the one before: what ran with other steps is no start, and is not continued.
runs=runs/quickstart
if [ -d $runs/fp8 ] && [ "$(cat $runs/steps 2>/dev/null)" != "$steps" ]; then
  fail "$runs has runs of other lengths (--steps)" "move the folder away, or give the steps that it was made with"
fi
mkdir -p $runs && echo "$steps" >$runs/steps

ranks=2
if have_gpu; then ranks=$(nvidia-smi -L | grep -c GPU); fi
export TOKENIZERS_PARALLELISM=false DS_FP8_CACHE=${DS_FP8_CACHE:-$runs/cache}

python examples/quickstart/make_data.py

run() {  # kind stage [--set key=value ...]
  echo; echo "== $2, $1"
  # Not `deepspeed`: the first line of that script names no interpreter whose path has spaces.
  python -m deepspeed.launcher.runner --num_gpus "$ranks" scripts/train.py \
    --deepspeed_config "ds_configs/quickstart/$2.json" ${steps:+--set "train.steps=$steps"} "${@:3}"
}

run fp8 cpt
run fp8 sft_stage1
run fp8 sft_stage2

bf16=$runs/bf16
run bf16 cpt --set fp8.enabled=false --set train.run_dir=$bf16/cpt
run bf16 sft_stage1 --set fp8.enabled=false --set train.run_dir=$bf16/sft_stage1 --set train.init_from=$bf16/cpt
run bf16 sft_stage2 --set fp8.enabled=false --set train.run_dir=$bf16/sft_stage2 --set train.init_from=$bf16/sft_stage1

echo
ds-fp8 report $runs --title "ds_fp8 quickstart: CPT, then two stages of SFT"
[ -n "$steps" ] || echo "Another seed moves BF16's own losses by 0.5 to 1.3% (docs/log/quickstart.md)."
