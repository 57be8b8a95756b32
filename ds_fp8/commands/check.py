"""Check a DeepSpeed JSON without running it: its "fp8" section, and for a stage all others.

ds-fp8 check my_stage.json --gpus 8
"""

from __future__ import annotations

from ds_fp8.commands.arguments import add_stage, count, parser_of, stage_file


def main() -> int:
    """Print what the configuration asks for.

    Raises:
        UserError: For its first mistake.
    """
    parser = parser_of(__doc__)
    add_stage(parser)
    parser.add_argument("--gpus", type=count, default=1, help="data-parallel ranks (default 1)")
    arguments = parser.parse_args()

    from ds_fp8.config.deepspeed_json import Configuration
    from ds_fp8.config.files import apply_override, read_json
    from ds_fp8.engine.compatibility import check_deepspeed
    from ds_fp8.train import load_stage

    file = stage_file(arguments)
    raw = read_json(file)
    for override in arguments.set:
        apply_override(raw, override)
    if "train" in raw or "data" in raw:
        stage = load_stage(file, arguments.set, arguments.gpus)
        print(f"{file}: a stage with {stage.global_batch} rows a step on {arguments.gpus} ranks")
        fp8 = stage.fp8
    else:
        configuration = Configuration(raw, file)
        check_deepspeed(configuration)
        fp8 = configuration.fp8
        print(f"{file}: a DeepSpeed configuration")
    print(f"FP8 is on, preset {fp8.preset}" if fp8.enabled else "FP8 is off")
    return 0
