"""A rank that does no more than count with the others, so that a test waits for little but its launcher."""

from __future__ import annotations

import os
import sys
import time

from ds_fp8.cluster import watchdog
from ds_fp8.cluster.entry import rank_entry


def main() -> int:
    """Count together for ever, with the argument before DeepSpeed's own as the timeout in seconds."""
    store = watchdog.start(120)
    watchdog.set_timeout(float(sys.argv[-1]))
    rank = os.environ["RANK"]
    count = 0
    while True:
        store.set(f"{count}/{rank}", "")
        for other in range(int(os.environ["WORLD_SIZE"])):
            store.get(f"{count}/{other}")
        count += 1
        watchdog.beat(f"count {count}")
        print(f"counted {count}", flush=True)
        time.sleep(0.2)


if __name__ == "__main__":
    rank_entry(main)
