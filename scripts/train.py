"""Train one stage: deepspeed scripts/train.py --deepspeed_config FILE [--set train.steps=50 ...]."""

from __future__ import annotations

import argparse
import os
import warnings

from ds_fp8.errors import main_entry


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--deepspeed_config", required=True, metavar="FILE", help="the stage's JSON")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change a key, such as train.steps=50"
    )
    parser.add_argument("--local_rank", type=int, help="given by the launcher")
    arguments = parser.parse_args()

    import torch
    import transformers
    from deepspeed.utils.logging import set_log_level_from_string

    from ds_fp8.train import load_stage, train
    from ds_fp8.train.interrupt import EXIT_INTERRUPTED, Interrupted

    if not torch.cuda.is_available() and "OMP_NUM_THREADS" not in os.environ:
        ranks_here = int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or 1)
        torch.set_num_threads(max(1, torch.get_num_threads() // ranks_here))
    set_log_level_from_string("warning")
    transformers.utils.logging.disable_progress_bar()
    # DeepSpeed calls collectives under names that newer versions of torch announce to rename.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    try:
        result = train(load_stage(arguments.deepspeed_config, arguments.set))
    except Interrupted:
        return EXIT_INTERRUPTED
    if int(os.environ["RANK"]) == 0:
        print(f"final validation loss {result['final_loss']:.4f} after {result['steps']} steps", flush=True)
    return 0


if __name__ == "__main__":
    main_entry(main)
