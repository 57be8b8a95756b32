"""Run a program with the "fp8" sections of its DeepSpeed configurations at work.

    torchrun --nproc-per-node 8 -m ds_fp8 train.py ...
    accelerate launch -m ds_fp8 train.py ...
    deepspeed --module ds_fp8 train.py ...

-m MODULE in the place of train.py runs a module. A DeepSpeed configuration without an "fp8" section, and without the
environment variable DS_FP8, trains as it is, and rank 0 says so; with --strict before the program that is an error.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from ds_fp8.config.errors import UserError, main_entry


def main() -> None:
    """Install, then run the program that the command line names as `python` itself would."""
    arguments = sys.argv[1:]
    # The deepspeed launcher gives this to the program, and puts it first.
    from_launcher = [a for a in arguments[:1] if a.startswith("--local_rank")]
    arguments = arguments[len(from_launcher) :]
    strict = arguments[:1] == ["--strict"]
    arguments = arguments[strict:]
    is_module = arguments[:1] == ["-m"]
    arguments = arguments[is_module:]
    if arguments[:1] in (["-h"], ["--help"]) and not is_module:
        sys.stdout.write(f"usage: python -m ds_fp8 [--strict] (PROGRAM.py | -m MODULE) ...\n\n{__doc__}")
        return
    if not arguments or arguments[0].startswith("-"):
        raise UserError(
            "no program to run", remedy="python -m ds_fp8 PROGRAM.py ..., or python -m ds_fp8 -m MODULE ..."
        )
    program, *rest = arguments
    if not is_module and not Path(program).is_file():
        raise UserError(f"the program {program} does not exist", remedy="check the path; -m MODULE runs a module")

    from ds_fp8.integrations.install import install

    install(without_section="refuse" if strict else "say")
    sys.argv = [program, *from_launcher, *rest]
    if is_module:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(program).resolve().parent)
        runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main_entry(main)
