"""The benchmark of experts: what it measures, and that its kernels compile for the GPU that it is for."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ds_fp8.config.errors import UserError

# Scripts run with their own folder on the path, and find their neighbours there.
sys.path.insert(0, str(Path(__file__).parents[1] / "scripts" / "bench"))

import experts

FOLDER = Path(experts.__file__).parent
FP8_ERROR = 0.01, 0.15
"""What FP8 costs a layer: less would mean that nothing was cast."""


@pytest.mark.parametrize("preset", ["hybrid_fast", "precise"])
def test_quick_measures_products_parts_and_layer(preset, tmp_path, capsys):
    file = tmp_path / "experts.json"
    experts.main(["--quick", "--preset", preset, "--tokens", "16,48", "--json", str(file)])
    written = json.loads(file.read_text())
    assert written["shape"] == {"hidden": 256, "features": 128, "experts": 4, "choices": 2}
    assert [row["tokens"] for row in written["rows"]] == [16, 48]
    for row in written["rows"]:
        names = [product["product"] for product in row["products"]]
        assert names == [f"{weight} {pass_}" for weight in ("gate_up", "down") for pass_ in ("fprop", "dgrad", "wgrad")]
        for product in row["products"]:
            assert product["speedup"] == pytest.approx(product["grouped_mm"] / product["milliseconds"])
        flops = 2 * row["tokens"] * 2 * 256 * 256
        first = row["products"][0]
        assert first["teraflops"] == pytest.approx(flops / first["milliseconds"] / 1e9)
        assert sum(row["layer"]["shares"].values()) == pytest.approx(1)
        low, high = FP8_ERROR
        assert low < row["layer"]["error_vs_bf16"] < high
    assert "gate_up wgrad" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_mistakes_name_the_remedy():
    with pytest.raises(UserError, match="--quick"):
        experts.main([])
    with pytest.raises(UserError, match="--sweep"):
        experts.main(["--quick", "--sweep"])
    with pytest.raises(UserError, match="not row"):
        experts.main(["--quick", "--preset", "rowwise"])


def test_the_kernels_compile_for_hopper_with_its_fp8_units(tmp_path):
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "DS_ACCELERATOR": "cpu"}
    environment.pop("TRITON_INTERPRET", None)
    program = "import json, experts; print(json.dumps(experts.compiled_figures()))"
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, env=environment, cwd=FOLDER, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    figures = json.loads(done.stdout.splitlines()[-1])
    assert set(figures) == {"fprop", "wgrad 1x128", "wgrad 128x128"}
    for kernel in figures.values():
        assert kernel["wgmma.mma_async"] >= 4  # one for every 32 of a sum of 128
        assert kernel["cp.async.bulk.tensor"] >= 2
        assert kernel["st.local"] == 0  # no registers spilt
        assert kernel["shared bytes"] <= 227 * 1024
