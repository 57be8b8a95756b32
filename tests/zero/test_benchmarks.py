"""The benchmarks of ZeRO-3: that they run, what they write, how they refuse."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import scaling
import step
import step_profile

from ds_fp8.config.errors import UserError

BENCH = Path(scaling.__file__).parent
ENVIRONMENT = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "LOG_LEVEL": "ERROR"}


def run_script(name, *arguments):
    """In a process of its own: the scripts join ranks."""
    return subprocess.run(
        [sys.executable, str(BENCH / name), *arguments], capture_output=True, text=True, env=ENVIRONMENT
    )


def steps_of(file, *arguments):
    """The rows that step.py writes, which starts processes of its own."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        assert step.main(["--quick", "--json", str(file), *arguments]) == 0
    rows = json.loads(file.read_text())["rows"]
    for row in rows:
        assert row["step_seconds"] > 0
        assert len(row["losses"]) == 6
        assert row["losses"][-1] < row["losses"][0]
    return [row["variant"] for row in rows]


@pytest.fixture(scope="module")
def collectives(tmp_path_factory):
    """The file that collectives.py writes."""
    file = tmp_path_factory.mktemp("bench") / "collectives.json"
    done = run_script("collectives.py", "--quick", "--json", str(file))
    assert done.returncode == 0, done.stderr
    return file


def test_a_step_is_measured(tmp_path):
    assert steps_of(tmp_path / "step.json", "--variants", "infir2") == ["infir2"]


def test_time_of_a_gpu_is_told_apart():
    kernels = [("gemm", 0, 10), ("ncclKernel", 5, 30), ("gemm<float>", 40, 50), ("cast", 42, 45)]
    found = step_profile.gpu_time([(name, 1e3 * start, 1e3 * end) for name, start, end in kernels])
    assert [found[kind] for kind in ("span", "compute", "communication", "communication alone", "idle")] == [
        50, 20, 25, 20, 10,
    ]  # fmt: skip
    assert found["kernels"][:2] == [("ncclKernel", 1, 25), ("gemm", 2, 20)]


def test_a_step_is_split_into_its_parts():
    kernels = [
        ("nvjet_qqtst", 0, 10),
        ("cudnn_sdpa_sm90_flash_fprop_wgmma", 10, 14),
        ("_cast_tiles", 14, 17),
        ("void at::native::elementwise_kernel<4>", 17, 19),
        ("ncclDevKernel_AllGather_RING", 15, 25),
        ("nvjet_hsh", 30, 35),
        ("ncclDevKernel_SendRecv", 35, 38),
        ("_adamw", 40, 43),
        ("unheard_of", 43, 44),
    ]
    marks = {"head and loss": [(28, 36)], "optimizer": [(40, 43)]}
    found = step_profile.split_of_step(
        [(name, 1e3 * start, 1e3 * end) for name, start, end in kernels],
        {part: [(1e3 * start, 1e3 * end) for start, end in ranges] for part, ranges in marks.items()},
    )
    assert found == {
        "span": 44, "attention": 4, "products": 10, "copies": 2, "casts, norms, rotary": 3, "head and loss": 5,
        "optimizer": 3, "other": 1, "exposed gather": 6, "exposed reduce": 3, "idle": 7,
    }  # fmt: skip


PEER = """
import json, sys
arguments = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if arguments["--mbs"] == "3":
    sys.exit("out of memory")
print("RESULT", json.dumps({"gpus": 1, "step_ms": 500, "tok_s_gpu": 8, "peak_gib": 2.5, "loss": 7.5}))
"""


def test_peers_are_measured_by_their_scripts_and_a_failing_one_is_said(tmp_path, capfd):
    (tmp_path / "zero3_baseline.py").write_text(PEER)
    file = tmp_path / "step.json"
    shape = ["--vocabulary", "152064", "--layers", "2", "--length", "64", "--steps", "6", "--variants", "deepspeed"]
    arguments = ["--quick", "--json", str(file), "--peers", str(tmp_path), *shape]
    assert step.main([*arguments, "--sequences", "2"]) == 0
    (row,) = json.loads(file.read_text())["rows"]
    assert (row["variant"], row["step_seconds"], row["peak_bytes"]) == ("deepspeed", 0.5, 2.5 * 2**30)
    assert step.main([*arguments, "--sequences", "3"]) == 1
    said = capfd.readouterr().err
    assert "out of memory" in said
    assert "not measured: deepspeed" in said


@pytest.mark.parametrize(
    ("arguments", "key", "words"),
    [
        (["--variants", "infir3"], "--variants", "infir2"),
        (["--variants", "infir2/fp9-head"], "--variants", "fp8-head"),
        (["--variants", "hybrid_fast+coats"], "--variants", "coat"),
        (["--variants", "torchao"], "--peers", ""),
        (["--gpus", "2", "--global-tokens", "300"], "--global-tokens", ""),
    ],
)
def test_a_step_that_cannot_be_measured_is_refused(arguments, key, words):
    with pytest.raises(UserError) as caught:
        step.main(["--quick", *arguments])
    assert caught.value.key == key
    assert words in str(caught.value)


def test_every_collective_is_measured(collectives):
    rows = json.loads(collectives.read_text())["rows"]
    assert {(row["operation"], row["weights"]) for row in rows} >= {
        ("gather", "layer"), ("reduce", "layer"), ("reduce", "down"), ("refresh", "layer"),
    }  # fmt: skip
    assert all(row["fp8_milliseconds"] > 0 for row in rows)


def test_transports_are_measured_or_the_reason_is_said(tmp_path):
    file = tmp_path / "transports.json"
    assert run_script("collectives.py", "--quick", "--transports", "--json", str(file)).returncode == 0
    collectives, *others = json.loads(file.read_text())["rows"]
    assert collectives["right"]
    assert collectives["ms_beside_products"] > 0
    assert len(others) == 2
    assert all(row.get("ms") or row["why_not"] for row in others)


@pytest.mark.slow
def test_every_variant_is_measured_and_the_model_reproduces_the_step_it_was_fitted_to(collectives, tmp_path):
    """Steps are made longer than all that is sent in them: a busy machine may have measured otherwise."""
    file = tmp_path / "step.json"
    assert steps_of(file) == ["bf16", "infir2", "infir2/bf16-wire"]
    point = scaling.read_point(f"{file}:{collectives}")
    steps = {name: seconds + scaling.predicted(point, name, 0.0) for name, seconds in point.steps.items()}
    rows = scaling.check([point._replace(steps=steps)] * 2)
    assert [row["variant"] for row in rows] == ["bf16", "infir2", "infir2/bf16-wire"]
    for row in rows:
        assert row["predicted"] == pytest.approx(row["measured"], rel=1e-3)


def simulated(tmp_path, *arguments):
    file = tmp_path / "scaling.json"
    scaling.main(["--json", str(file), *arguments])
    return json.loads(file.read_text())["rows"]


def test_fp8_on_the_wire_helps_where_the_network_is_slow_and_only_there(tmp_path):
    fast, slow = (
        simulated(tmp_path, "--models", "7b", "--gpus", "64", "--ports", "8", "--network", network)[0]["step_seconds"]
        for network in ("100000", "10")
    )
    assert fast["fp8"] == pytest.approx(fast["fp8/bf16-wire"], rel=0.02)
    assert 1.7 < slow["fp8/bf16-wire"] / slow["fp8"] <= 2
    assert slow["bf16"] == pytest.approx(slow["fp8/bf16-wire"], rel=0.1)


def test_parameters_of_the_models():
    assert scaling.MODELS["7b"].parameters == pytest.approx(7.6e9, rel=0.01)
    assert scaling.MODELS["70b"].parameters == pytest.approx(70.6e9, rel=0.01)
    assert scaling.MODELS["405b"].parameters == pytest.approx(405.8e9, rel=0.01)


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["--models", "8b"], "--models"),
        (["--gpus", "12"], "--gpus"),
        (["--measured", "a.json:b.json"], "--measured"),
        (["--measured", "a.json,b.json"], "--measured"),
    ],
)
def test_wrong_arguments_are_explained(arguments, key):
    with pytest.raises(UserError) as caught:
        scaling.main(["--quick", *arguments])
    assert caught.value.key == key
