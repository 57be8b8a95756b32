"""Fuzz hostfiles: each is read as DeepSpeed reads it, or refused in words. Prints how many of each there were.

python scripts/faults/hostfiles.py [--count 2000] [--seed 0]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path

import hypothesis
from hypothesis import HealthCheck, given, settings

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.cluster.test_hostfile import HOSTFILES, check


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    counted: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:

        @hypothesis.seed(arguments.seed)
        @settings(max_examples=arguments.count, deadline=2000, database=None, suppress_health_check=list(HealthCheck))
        @given(data=HOSTFILES)
        def fuzz(data: bytes) -> None:
            counted["read" if check(data, Path(folder) / "hostfile") else "refused"] += 1

        fuzz()
    total = sum(counted.values())
    print(f"{total} hostfiles: {counted['read']} read as DeepSpeed reads them, {counted['refused']} refused")
    return 0


if __name__ == "__main__":
    sys.exit(main())
