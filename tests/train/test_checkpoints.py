"""What a run folder says about the run in it."""

import json
from pathlib import Path

import pytest

from ds_fp8.train import checkpoints, load_stage
from ds_fp8.train.checkpoints import Manifest, SavedFile
from ds_fp8.train.resume import check_data, inspect_run
from ds_fp8.train.run_folder import lock
from tests.refusals import refused
from tests.train.tiny_stage import RESULT

ANOTHER = "train.run_dir=parent"
BELOW_3 = ['zero_optimization={"stage": 2}', "fp8.enabled=false"]


@pytest.fixture
def run_dir(tmp_path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def stage(tiny, write, run_dir):
    """Load the tiny stage with overrides, in the test's run folder."""
    tiny["train"]["run_dir"] = str(run_dir)
    file = write(tiny)
    return lambda *overrides: load_stage(file, overrides)


def manifest(stage, step: int, ranks: int = 1, **values) -> Manifest:
    fields = {"global_batch": stage.global_batch, "data_step": step, "losses": (), "versions": {}}
    fields["files"] = {f"{rank}_optim_states.pt": SavedFile(1, "0" * 32, rank) for rank in range(ranks)}
    return Manifest(step, ranks, config=stage.raw, **(fields | values))


def store(stage, steps: list[int], ranks: int = 1, **values) -> None:
    """What a run leaves behind that was stopped after the last of `steps`."""
    stage.run_dir.mkdir(exist_ok=True)
    (stage.run_dir / "config.json").write_text(json.dumps(stage.raw))
    for step in steps:
        folder = stage.run_dir / "checkpoints" / f"step_{step}"
        folder.mkdir(parents=True)
        manifest(stage, step, ranks, **values).write(folder)


COMPACT = ('fp8={"optimizer": {"exp_avg": "e4m3_expanded"}}', "train.compact_checkpoints=true")
# Of an optimizer that every rank has whole, as in ZeRO stage 0
WHOLE = {f"{rank}.pt": SavedFile(1, "0" * 32, rank) for rank in range(3)}


def saved(*overrides, steps=(4,), **values):
    """Prepare a run of a stage with these overrides that was stopped after the last of `steps`."""
    return lambda stage, run_dir: store(stage(*overrides), list(steps), **values)


def without_folder(stage, run_dir):
    store(stage(), [])
    (run_dir / "checkpoints").write_text("")


def of_another_start(stage, run_dir):
    """On other ranks, say: it rewrote config.json and failed before its first checkpoint."""
    store(stage(), [4])
    (run_dir / "config.json").write_text(json.dumps(stage().raw | {"gradient_accumulation_steps": 7}))


def spelt_otherwise(stage, run_dir):
    (run_dir.parent / "parent").mkdir()
    (run_dir.parent / "link").symlink_to("parent")
    store(stage("train.resume=parent"), [4])


def of_a_branch(stage, run_dir):
    store(stage(ANOTHER), [4])
    store(stage("train.resume=parent"), [2])


BRANCH = "train.resume=parent"
ADAPTERS = ['train.lora={"r": 4, "targets": ["q_proj", "k_proj"]}', *BELOW_3]
ALIKE = ['train.lora={"r": 4, "targets": ["k_proj", "q_proj"], "alpha": 8}', "zero_optimization.stage=1"]
ALIKE += ["data_types.grad_accum_dtype=bf16", BRANCH]
GOES_ON = {  # what is there: how it came there, overrides, the step that a run goes on from; of a branch its checkpoint
    "nothing": (lambda stage, run_dir: None, [], 0),
    "a folder with notes": (lambda stage, run_dir: (run_dir.mkdir(), (run_dir / "notes").touch()), [], 0),
    "a run before its first save": (saved(steps=()), [], 0),
    "of a start that saved nothing": (of_another_start, [], 4),
    "of other ranks": (saved(ranks=3, global_batch=6), ["train_micro_batch_size_per_gpu=6"], 4),
    "compact, of other ranks": (saved(*COMPACT, ranks=3), COMPACT, 4),
    "compact and whole, of other ranks": (saved(*COMPACT, ranks=3, files=WHOLE), COMPACT, 4),
    **{
        change: (saved(), [change], 4)
        for change in ("train.steps=90", "train.eval_every=3", "train.save_every=2", "train.log_every=4")
    },
    "monitors": (saved(), ['csv_monitor={"enabled": false}'], 4),
    "a path that is spelt otherwise": (spelt_otherwise, ["train.resume=link"], 4),
    **{
        f"another run's: {named}": (
            saved(ANOTHER, steps=(4, 6)), [f"train.resume={named}"], 0, f"parent/checkpoints/{of}"
        )
        for named, of in {
            **dict.fromkeys(("parent", "parent/checkpoints"), "step_6"),
            "parent/checkpoints/step_4": "step_4",
        }.items()
    },
    "other shards and adapters' settings": (
        saved(ANOTHER, *ADAPTERS), [*ADAPTERS, *ALIKE], 0, "parent/checkpoints/step_4"
    ),
    "a branch that has begun": (of_a_branch, [BRANCH], 2, "run/checkpoints/step_2"),
}  # fmt: skip


@pytest.mark.parametrize("case", GOES_ON)
def test_what_a_run_goes_on_from(case, stage, run_dir, tmp_path, monkeypatch):
    prepare, overrides, step, *checkpoint = GOES_ON[case]
    monkeypatch.chdir(tmp_path)
    prepare(stage, run_dir)
    state = inspect_run(stage(*overrides))
    assert state.step == step
    assert not checkpoint or state.checkpoint.absolute() == tmp_path / checkpoint[0]


LONG, DEEP = "x" * 300, "x/" * 3000
REFUSED = {  # what is wrong: how it came there, overrides, words, key
    **{
        change: (saved(), [change], "holds a run with", change.partition("=")[0])
        for change in (
            "train.seed=7",
            "fp8.enabled=false",
            "optimizer.params.lr=1",
            "data.seed=301",
            "model.config.hidden_size=66",
            "gradient_accumulation_steps=2",
            "train.schedule.min_ratio=0.2",
        )
    },
    "two changes": (saved(), ["train.seed=7", "data.seed=301"], r"\(also train.seed\)", "data.seed"),
    "fewer steps": (saved(), ["train.steps=3"], "already done 4", "train.steps"),
    "other batches": (saved(ranks=3, global_batch=6), [], "batches of 6", "train_batch_size"),
    "another run's, of another ZeRO stage": (
        saved(ANOTHER, *BELOW_3),
        [BRANCH],
        "is of ZeRO stage 2",
        "zero_optimization.stage",
    ),
    "another run's, of all weights": (
        saved(ANOTHER),
        [BRANCH, "train.lora.r=4"],
        "trains all weights, .* rank 4",
        "train.lora",
    ),
    "another run's, of other adapters": (
        saved(ANOTHER, "train.lora.r=8"),
        [BRANCH, "train.lora.r=4"],
        "of rank 8 on",
        "train.lora",
    ),
    "no run's": (lambda stage, run_dir: (run_dir / "model").mkdir(parents=True), [], "not the folder", "train.run_dir"),
    "a file for its checkpoints": (without_folder, [], "checkpoints is not a folder", "train.run_dir"),
    "a file": (lambda stage, run_dir: run_dir.write_text(""), [], "cannot be written to", "train.run_dir"),
    **{
        f"nothing to resume: {name[:30]}": (
            lambda stage, run_dir: (run_dir.parent / "parent" / "checkpoints" / "step_5").mkdir(parents=True),
            [f"train.resume={name}"],
            words,
            "train.resume",
        )
        for name, words in {
            **dict.fromkeys(("nowhere", LONG, DEEP, "loop"), "holds no checkpoint"),
            **dict.fromkeys(("parent", "parent/checkpoints/step_5"), "manifest.json is missing"),
        }.items()
    },
    **{
        f"run_dir {name[:30]}": (lambda stage, run_dir: None, [f"train.run_dir={name}"], words, "train.run_dir")
        for name, words in {
            **dict.fromkeys(("/", "//", "/tmp/..", "/."), "root folder"),
            **dict.fromkeys((LONG, DEEP, "loop"), "cannot be written to"),
        }.items()
    },
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_go_on_is_refused_with_key_and_remedy(case, stage, run_dir, tmp_path, monkeypatch):
    prepare, overrides, words, key = REFUSED[case]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    prepare(stage, run_dir)
    with refused(words, key):
        inspect_run(stage(*overrides))


@pytest.mark.parametrize("keep", [1, 2, 9])
def test_pruning_keeps_the_newest_complete_checkpoints_only(keep, stage, run_dir):
    store(stage(), [2, 10, 9])
    for leftover in ("step_11.part", "step_8.deleted"):
        (run_dir / "checkpoints" / leftover).mkdir()
    (run_dir / "checkpoints" / "universal").write_text("")
    (run_dir / "checkpoints" / "step_7.deleted").symlink_to(run_dir)
    checkpoints.prune(run_dir, keep)
    left = sorted(int(path.name.removeprefix("step_")) for path in (run_dir / "checkpoints").glob("step_*"))
    assert left == [2, 9, 10][-keep:]


@pytest.fixture
def moved(stage, tmp_path):
    """`moved(*overrides)`: a run of a stage in the folder `home`, which is then `moved`; "{}" stands for the folder."""

    def move(*overrides: str):
        def in_folder(name, *changes):
            changes = [change.replace("{}", str(tmp_path / name)) for change in changes or overrides]
            return stage("train.run_dir=" + str(tmp_path / name / "run"), *changes)

        for name in ("first", "second"):
            (tmp_path / "home" / name).mkdir(parents=True)
        store(in_folder("home"), [4])
        (tmp_path / "home").rename(tmp_path / "moved")
        return lambda *changes: in_folder("moved", *changes)

    return move


@pytest.mark.parametrize(
    ("given", "other"),
    [
        (["train.resume={}/first"], ["train.resume={}/second"]),
        (["model.config=null", "train.init_from={}/first"], ["model.config=null", "train.init_from={}/second"]),
        (["model.config=null", "model.path={}/first"], ["model.config=null", "model.path={}/second"]),
        (["data.path={}/first"], ["data.path={}/second"]),
        (
            ['data={"sources": [{"path": "{}/first"}], "tokenizer": "t", "sequence_length": 64}'],
            ['data={"sources": [{"path": "{}/second"}], "tokenizer": "t", "sequence_length": 64}'],
        ),
    ],
)
def test_a_run_that_was_moved_with_what_it_reads_goes_on(given, other, moved, tmp_path):
    stage = moved(*given)
    assert inspect_run(stage()).step == 4
    with refused("holds a run with"):
        inspect_run(stage(*other))
    (tmp_path / "home" / "first").mkdir(parents=True)  # not moved, then, but copied, and perhaps changed
    with refused("holds a run with"):
        inspect_run(stage())


def test_the_best_checkpoint_outlives_newer_ones(stage, run_dir):
    store(stage(), [2, 4, 6, 8])
    best = checkpoints.best_step(run_dir, {2: 3.0, 4: 2.0, 5: 1.0, 6: 2.5})
    assert best == 4  # there is no checkpoint of step 5
    checkpoints.prune(run_dir, 1, [best])
    assert sorted(path.name for path in (run_dir / "checkpoints").glob("step_*")) == ["step_4", "step_8"]
    assert checkpoints.best_step(run_dir, {}) is None


def test_a_branch_is_further_in_its_data_than_in_its_steps_where_batches_were_left_out(stage, tmp_path):
    parent = stage(f"train.run_dir={tmp_path / 'parent'}")
    store(parent, [4], data_step=9, losses=(3.0, 2.0))
    state = inspect_run(stage(f"train.resume={tmp_path / 'parent'}"))
    assert (state.step, state.data_step, state.losses) == (0, 9, (3.0, 2.0))


def test_a_finished_run_is_known_by_its_result_and_goes_on_with_more_steps(stage, run_dir):
    store(stage(), [12])
    (run_dir / "result.json").write_text(json.dumps(RESULT))
    assert inspect_run(stage()).result == RESULT
    longer = inspect_run(stage("train.steps=20"))
    assert (longer.step, longer.result) == (12, None)


@pytest.mark.parametrize(
    ("changed", "word"), [("tokens", "3,001 tokens in 10 examples"), ("digest", "digest cdef0123")]
)
def test_data_that_changed_are_refused_by_file_and_what_changed(changed, word, stage):
    data = [{"path": path, "examples": 10, "tokens": 3000, "digest": "01234567" * 4} for path in ("a.txt", "b.txt")]
    store(stage(), [4], data=data)
    state = inspect_run(stage())
    moved = [data[0], data[1] | {"path": "elsewhere/b.txt"}]
    check_data(stage(), state, moved)
    with refused(r"b\.txt has changed since") as caught:
        check_data(stage(), state, [data[0], data[1] | {changed: {"tokens": 3001, "digest": "cdef0123"}[changed]}])
    assert word in caught.value.problem
    assert "3,000 tokens in 10 examples (digest 01234567)" in caught.value.problem
    assert "train.run_dir" in caught.value.remedy


@pytest.mark.parametrize("what", ["a folder", "a link", "a link to itself", "a link to a device"])
def test_a_lock_that_is_no_file_is_refused_and_what_it_leads_to_left_alone(what, run_dir, tmp_path):
    run_dir.mkdir()
    file, other = run_dir / "run.lock", tmp_path / "other"
    other.write_text("mine")
    {
        "a folder": file.mkdir,
        "a link": lambda: file.symlink_to(other),
        "a link to itself": lambda: file.symlink_to(file),
        "a link to a device": lambda: file.symlink_to("/dev/zero"),
    }[what]()
    with refused("cannot be locked") as caught:
        lock(run_dir, print)
    assert caught.value.remedy == "remove it"
    assert other.read_text() == "mine"
