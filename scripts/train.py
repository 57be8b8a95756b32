"""Train one stage: deepspeed scripts/train.py --deepspeed_config FILE [--set train.steps=50 ...]; as `ds-fp8 train`."""

from ds_fp8.cluster.entry import rank_entry
from ds_fp8.commands.train import main

if __name__ == "__main__":
    rank_entry(main)
