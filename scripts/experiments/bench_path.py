"""Put scripts/bench on the path when imported: the experiments share its helpers."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "bench"))
