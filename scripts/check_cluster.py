"""Check the hosts of a job without training: reachable, alike, and able to meet in a collective.

    python scripts/check_cluster.py --hostfile FILE [--deepspeed_config FILE [--set KEY=VALUE ...]]

With a stage's JSON its configuration, data and model files and its run folder are compared, too. Without --hostfile
any launcher can start it, as it starts train.py.
"""

from __future__ import annotations

import argparse
import os
import shlex
import warnings

from ds_fp8.cluster import watchdog
from ds_fp8.cluster.entry import rank_entry
from ds_fp8.cluster.launcher import add_launch_options, check_launch_options, launch
from ds_fp8.cluster.start_checks import Job, check_ranks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deepspeed_config", metavar="FILE", help="the stage to be trained")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as for train.py")
    parser.add_argument("--timeout", type=float, default=120, metavar="S", help="seconds without progress that end it")
    parser.add_argument("--local_rank", type=int, help="given by the launcher")
    add_launch_options(parser)
    arguments = parser.parse_args()
    check_launch_options(arguments)
    if arguments.hostfile:
        command = [__file__, "--timeout", str(arguments.timeout)]
        if arguments.deepspeed_config:
            command += ["--deepspeed_config", arguments.deepspeed_config]
        command += [part for change in arguments.set for part in ("--set", change)]
        options = shlex.split(arguments.launcher_options)
        return launch(arguments.hostfile, command, options, arguments.max_restarts)

    from deepspeed.utils.logging import set_log_level_from_string

    from ds_fp8.cluster.start_checks import versions
    from ds_fp8.commands.arguments import config_file
    from ds_fp8.train import load_stage, processes

    set_log_level_from_string("warning")
    # DeepSpeed calls collectives under names that newer versions of torch announce to rename.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    processes.set_single_process_env()
    store = watchdog.start(arguments.timeout)
    watchdog.beat("comparing the hosts")
    job = None
    if arguments.deepspeed_config:
        stage = load_stage(config_file(arguments.deepspeed_config), arguments.set)
        job = Job(stage.raw, stage.file, stage.paths(), stage.run_dir)
    first = os.environ["RANK"] == "0"
    if store is not None:
        same = check_ranks(store, job)
        if first:
            print(f"{same}: {', '.join(f'{name} {version}' for name, version in versions().items())}")
    watchdog.beat("joining the ranks")
    processes.init_distributed()
    return 0


if __name__ == "__main__":
    rank_entry(main)
