"""Check a DeepSpeed JSON without running it: its "fp8" section, and for a stage all others.

ds-fp8 check my_stage.json --gpus 8
ds-fp8 check my_stage.json --data        reads its data, tokenizer and template, too, and shows an example
ds-fp8 check MODEL DATA                  what `ds-fp8 train MODEL DATA` would do
"""

from __future__ import annotations

from rich.console import Console

from ds_fp8.commands.arguments import add_stage, count, fp8_in_words, load_deepspeed, parser_of, read_stage, stage_file
from ds_fp8.commands.new_stage import add_new_stage, check_options, look_for_network, new_stage, read_data
from ds_fp8.config.errors import UserError


def main() -> int:
    parser = parser_of(__doc__)
    add_stage(parser)
    add_new_stage(parser)
    parser.add_argument("--data", action="store_true", dest="reads_data", help="read the stage's data, too")
    parser.add_argument("--gpus", type=count, default=1, help="data-parallel ranks (default 1)")
    arguments = parser.parse_args()
    check_options(arguments)
    console = Console(highlight=False, soft_wrap=True)
    if arguments.data:
        look_for_network(arguments.stage, arguments.data)
        new_stage(arguments, arguments.gpus, console)
        return 0
    file, raw = stage_file(arguments), read_stage(arguments)
    load_deepspeed()

    from ds_fp8.config.deepspeed_json import Configuration
    from ds_fp8.engine import preflight
    from ds_fp8.train import load_stage

    configuration = Configuration(raw, file)
    if "train" in raw or "data" in raw:
        stage = load_stage(file, arguments.set, arguments.gpus)
        print(f"{file}: a stage with {stage.global_batch} rows a step on {arguments.gpus} ranks")
        fp8 = stage.fp8
        if arguments.reads_data:
            from ds_fp8.data import build_tokenizer

            read_data(stage, build_tokenizer(stage.data), console)
    elif arguments.reads_data:
        raise UserError("this is no stage, and names no data", key="--data", file=file, remedy="leave --data out")
    else:
        preflight.check(configuration)
        fp8 = configuration.fp8
        print(f"{file}: a DeepSpeed configuration")
        if not configuration.has_optimizer:
            print('It has no "optimizer" section: pass an optimizer to initialize, or the engine can only evaluate')
    preflight.check_compiles(configuration)
    print(fp8_in_words(raw, fp8))
    return 0
