"""How much memory a stage takes on each GPU, FP8 beside BF16: no weights are loaded, no GPU is needed.

python scripts/estimate_memory.py --deepspeed_config ds_configs/infir2_1.5b/cpt.json --gpus 8 --memory 80
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ds_fp8.errors import UserError, main_entry


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deepspeed_config", required=True, type=Path, metavar="FILE", help="the stage's JSON")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a key of it")
    parser.add_argument("--gpus", type=int, default=1, help="data-parallel ranks (default 1)")
    parser.add_argument("--memory", type=float, metavar="GIB", help="of a GPU: also print what fits")
    parser.add_argument("--json", action="store_true", help="print JSON, in bytes")
    arguments = parser.parse_args()

    from deepspeed.utils.logging import set_log_level_from_string
    from rich.console import Console

    from ds_fp8.memory import Estimate, estimate_workload, largest_that_fits, read_workload
    from ds_fp8.memory.comparison import print_estimates
    from ds_fp8.memory.workload import bf16_twin
    from ds_fp8.schema import read_json
    from ds_fp8.train.stage import apply_override

    set_log_level_from_string("warning")
    if arguments.gpus < 1:
        raise UserError(f"--gpus {arguments.gpus} is no number of GPUs", remedy="--gpus 1")
    raw = read_json(arguments.deepspeed_config)
    for override in arguments.set:
        apply_override(raw, override)

    def estimated(stage: dict) -> Estimate:
        try:
            return estimate_workload(read_workload(stage, gpus=arguments.gpus))
        except UserError as error:
            raise error.located(arguments.deepspeed_config) from None

    estimates = {"as configured": estimated(raw)}
    if estimates["as configured"].workload.fp8.enabled:
        estimates["BF16, its own loss"] = estimated(bf16_twin(raw))
    memory = None if arguments.memory is None else round(arguments.memory * 2**30)
    if not arguments.json:
        print_estimates(estimates, memory, Console(highlight=False))
        return 0
    result = {name: value.as_json() for name, value in estimates.items()}
    if memory is not None:
        for name, value in estimates.items():
            sizes = ("micro_batch", "sequence_length")
            result[name]["largest"] = {what: largest_that_fits(value.workload, what, memory) for what in sizes}
    print(json.dumps(result, indent=2))
    return 0


if __name__ == "__main__":
    main_entry(main)
