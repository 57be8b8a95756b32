"""How much host memory does an export from a ZeRO-3 checkpoint take?

    python scripts/experiments/export_memory.py [--model Qwen/Qwen2.5-7B]

Answer (2026-11-22): 3.5 GiB of its own and 5.6 GiB resident for 7.62 billion parameters, in each layout.

Writes the files of a checkpoint that `--ranks` ranks would have written after training a model of this shape, master
weights and both moments in FP32, all zeros and sparse: they take no room on the disk. Then exports it in each layout,
in a process of its own, into --folder (15 GB for 7B in BF16, removed again).

Two peaks are sampled. "anonymous" is memory that the kernel cannot take back. "resident" is that and the pages of the
checkpoint's files that the process has mapped.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import bench_path  # noqa: F401  (for `common` and its neighbours)
import torch
from common import begin, print_table, write_json
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from ds_fp8.config.errors import UserError, main_entry
from ds_fp8.export.layouts import LAYOUTS
from ds_fp8.memory.known_models import SHAPES

SUB_GROUP = 1_000_000_000
"""Elements of a part of the optimizer's state, DeepSpeed's default."""

GIB = 1 << 30
SAMPLE_SECONDS = 0.02


def main() -> int:
    """Write the checkpoint, export it in each layout, print the peaks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen/Qwen2.5-7B", help=f"one of {', '.join(SHAPES)}")
    parser.add_argument("--layers", type=int, help="decoder layers (default: all of the model's)")
    parser.add_argument("--ranks", type=int, default=8, help="that wrote the checkpoint (default 8)")
    parser.add_argument("--layouts", nargs="+", default=LAYOUTS, choices=LAYOUTS, help="default: all")
    parser.add_argument("--folder", type=Path, help="where to write (default: the folder for temporary files)")
    parser.add_argument("--json", metavar="FILE", help="also write the figures here")
    parser.add_argument("--export", nargs=2, metavar=("FOLDER", "LAYOUT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.export:
        print(json.dumps(_measure(Path(arguments.export[0]), arguments.export[1])))
        return 0
    if arguments.model not in SHAPES:
        raise UserError(f'no shape of "{arguments.model}" is known', remedy=f"one of {', '.join(SHAPES)}")
    facts = begin()
    shape = SHAPES[arguments.model] | ({"num_hidden_layers": arguments.layers} if arguments.layers else {})
    rows = []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as temporary:
        folder = Path(temporary)
        config = AutoConfig.for_model(**shape)
        config.save_pretrained(folder)
        parameters = write_checkpoint(folder / "checkpoints" / "step_1", config, arguments.ranks)
        for layout in arguments.layouts:
            command = [sys.executable, __file__, "--export", temporary, layout]
            result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            rows.append((layout, *(f"{result[name]:.2f}" for name in ("before", "anonymous", "resident", "files"))))
            rows[-1] += (f"{result['seconds']:.0f}",)
    columns = ("layout", "before, GiB", "peak anonymous", "peak resident", "written", "seconds")
    title = f"{arguments.model}, {shape['num_hidden_layers']} layers, {parameters / 1e9:.2f} billion parameters"
    print_table(f"{title}, checkpoint of {arguments.ranks} ranks", columns, rows)
    if arguments.json:
        write_json(arguments.json, banner=facts, rows=[dict(zip(columns, row, strict=True)) for row in rows])
    return 0


def write_checkpoint(folder: Path, config: PretrainedConfig, ranks: int) -> int:
    """Write the files of a ZeRO-3 checkpoint, full of zeros and sparse; return how many parameters the model has."""
    folder.mkdir(parents=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    groups = list(_sub_groups([math.ceil(shape.numel() / ranks) for shape in shapes.values()], SUB_GROUP // ranks))
    for rank in range(ranks):
        states = {
            "module": {},
            "buffer_names": [],
            "param_shapes": [shapes],
            "frozen_param_shapes": None,
            "frozen_param_fragments": None,
            "shared_params": {},
            "ds_version": "0.19.8",
        }
        torch.save(states, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        with FakeTensorMode(), torch.serialization.skip_data(materialize_fake_tensors=True):
            moments = {i: {key: torch.empty(n) for key in ("exp_avg", "exp_avg_sq")} for i, n in enumerate(groups)}
            optimizer = {
                "zero_stage": 3,
                "partition_count": ranks,
                "optimizer_state_dict": {"state": moments, "param_groups": []},
                "fp32_flat_groups": [torch.empty(n) for n in groups],
            }
            states = {"optimizer_state_dict": optimizer}
            torch.save(states, folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return sum(shape.numel() for shape in shapes.values())


def _sub_groups(sizes: list[int], limit: int) -> Iterator[int]:
    """Yield the sizes of the flat tensors: whole weights, until a tensor has `limit` elements or more."""
    total = 0
    for size in sizes:
        total += size
        if total >= limit:
            yield total
            total = 0
    if total:
        yield total


def _measure(folder: Path, layout: str) -> dict[str, float]:
    """Export the checkpoint in `folder`; return peaks and sizes in GiB, and seconds."""
    from ds_fp8.config.fp8 import parse_fp8
    from ds_fp8.export import export_checkpoint

    config, fp8 = AutoConfig.from_pretrained(folder), parse_fp8({"fp8": {}})
    out = folder / "exported"
    before = _memory()["anonymous"]
    start = time.perf_counter()
    with Peak() as peak:
        export_checkpoint(folder / "checkpoints/step_1", out, config, fp8, layout=layout)
    seconds = time.perf_counter() - start
    files = sum(path.stat().st_size for path in out.iterdir()) / GIB
    shutil.rmtree(out)
    return {"before": before, **peak.peak, "files": files, "seconds": seconds}


def _memory() -> dict[str, float]:
    """Return the memory of this process, in GiB."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    kib = {name: int(status[key].split()[0]) for name, key in (("anonymous", "RssAnon"), ("resident", "VmRSS"))}
    return {name: value * 1024 / GIB for name, value in kib.items()}


class Peak:
    """Samples the memory of this process, in GiB. A context manager.

    Attributes:
        peak: The most there was, "anonymous" and "resident".
        growth: By how much that exceeds what there was at the beginning.
    """

    def __enter__(self) -> Peak:
        self._before = self.peak = _memory()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._thread.join()

    @property
    def growth(self) -> dict[str, float]:
        return {name: value - self._before[name] for name, value in self.peak.items()}

    def _sample(self) -> None:
        while not self._done.wait(SAMPLE_SECONDS):
            self.peak = {name: max(self.peak[name], value) for name, value in _memory().items()}


if __name__ == "__main__":
    main_entry(main)
