"""Estimate a stage's memory on each GPU, FP8 beside BF16: no weights are loaded, no GPU is needed.

ds-fp8 estimate infir2_1.5b/cpt.json --gpus 8 --memory 80
"""

from __future__ import annotations

import json

from ds_fp8.commands.arguments import add_stage, amount, count, parser_of, stage_file
from ds_fp8.config.errors import UserError


def main() -> int:
    """Print the estimates."""
    parser = parser_of(__doc__)
    add_stage(parser)
    parser.add_argument("--gpus", type=count, default=1, help="data-parallel ranks (default 1)")
    parser.add_argument("--memory", type=amount, metavar="GIB", help="of a GPU: also print what fits")
    parser.add_argument("--json", action="store_true", help="print JSON, in bytes")
    arguments = parser.parse_args()

    from deepspeed.utils.logging import set_log_level_from_string
    from rich.console import Console

    from ds_fp8.config.files import apply_override, read_json
    from ds_fp8.memory import Estimate, estimate_workload, largest_that_fits, read_workload
    from ds_fp8.memory.comparison import print_estimates
    from ds_fp8.memory.known_models import with_known_model
    from ds_fp8.memory.workload import bf16_twin

    set_log_level_from_string("warning")
    file = stage_file(arguments)
    raw = read_json(file)
    for override in arguments.set:
        apply_override(raw, override)
    raw = with_known_model(raw, file)

    def estimated(stage: dict) -> Estimate:
        try:
            return estimate_workload(read_workload(stage, gpus=arguments.gpus))
        except UserError as error:
            raise error.located(file) from None

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
