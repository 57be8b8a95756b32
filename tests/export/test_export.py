"""Folders for serving: the codes of training, as transformers loads them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import stat
import warnings
from unittest import mock

import pytest
import torch
from deepspeed import comm as dist
from transformers import AutoConfig, AutoModelForCausalLM

import ds_fp8
from ds_fp8.casts import QuantizedTensor
from ds_fp8.cli import main
from ds_fp8.config.errors import UserError
from ds_fp8.config.fp8 import parse_fp8
from ds_fp8.engine.plans import group_plan
from ds_fp8.export import export_checkpoint, export_engine
from ds_fp8.export.plan import make_plan, plan_to_serve
from ds_fp8.layers.selection import unconverted
from tests.export.servers import assert_served
from tests.export.trained import gather_failing, logits, shape, tensors, train_and_export
from tests.integrations.programs import small_model
from tests.numerics import error
from tests.zero.models import config

LAYOUTS = ["fp8", "compressed-tensors", "bf16"]


@pytest.fixture(scope="module")
def trained(ranks, tmp_path_factory):
    """(folder with one export of each layout and a checkpoint, logits of the trained model, served weights)."""
    folder = tmp_path_factory.mktemp("trained")
    results = ranks(2, train_and_export, folder, {}, LAYOUTS, 300_000, {})
    assert results[0][1] == results[1][1]
    return folder, *results[0]


def loaded(folder) -> AutoModelForCausalLM:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


def test_transformers_computes_with_the_dequantised_codes(trained):
    folder, trained_logits, _ = trained
    by_hand = loaded(folder / "bf16")
    stored = tensors(folder / "fp8")
    state = by_hand.state_dict()
    for name, codes in stored.items():
        if codes.dtype == torch.float8_e4m3fn:
            state[name] = QuantizedTensor(codes, stored[f"{name}_scale_inv"], "128x128").dequantize(torch.bfloat16)
    by_hand.load_state_dict(state)
    assert torch.equal(logits(loaded(folder / "fp8")), logits(by_hand))
    # Training casts activations besides, which costs about 5% of the logits.
    assert error(logits(loaded(folder / "fp8")), trained_logits) < 0.08
    assert error(logits(loaded(folder / "bf16")), trained_logits) < 0.08


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "qwen2", "tie_word_embeddings": True, "num_attention_heads": 2},
        {"kind": "llama", "tie_word_embeddings": False},
        {"kind": "mistral", "sliding_window": None, "intermediate_size": 320},
        {"kind": "qwen3", "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 560},
    ],
    ids=["qwen2", "llama", "mistral of ragged sides", "quickstart"],
)
def test_other_models(ranks, tmp_path, changes):
    """Tied heads, biases, and sides that servers cannot take."""
    trained_logits, _ = ranks(2, train_and_export, tmp_path, {}, ["fp8"], 1 << 30, changes)[0]
    assert_served(tmp_path / "fp8")
    stored = tensors(tmp_path / "fp8")
    section = json.loads((tmp_path / "fp8/config.json").read_text())["quantization_config"]
    left = set(section["modules_to_not_convert"])
    assert ("lm_head.weight" in stored) != changes.get("tie_word_embeddings", False)
    ragged = {"gate_proj", "up_proj", "down_proj"} if changes.get("intermediate_size") == 320 else set()
    mlp = {f"model.layers.{layer}.mlp.{name}" for layer in range(2) for name in ragged}
    assert left == {"lm_head"} | mlp
    in_fp8 = {name for name, codes in stored.items() if codes.dtype == torch.float8_e4m3fn}
    assert len(in_fp8) == 14 - len(mlp)
    assert error(logits(loaded(tmp_path / "fp8")), trained_logits) < 0.08


@pytest.mark.parametrize("preset", ["rowwise", "tensorwise"])
def test_scales_by_row_or_tensor_are_those_that_servers_read(trained, tmp_path, preset):
    fp8 = parse_fp8({"fp8": {"preset": preset}})
    assert export_again(trained, tmp_path / "out", fp8=fp8, layout="compressed-tensors").quantized
    assert_served(tmp_path / "out")


def test_codes_are_those_of_training_and_served_alike(trained):
    folder, _, served = trained
    stored = tensors(folder / "fp8")
    assert {name: quantized for name, (_, quantized) in served.items()} == {
        name: f"{name}_scale_inv" in stored for name in stored if not name.endswith("_scale_inv")
    }
    for name, (total, _) in served.items():
        assert stored[name].float().sum().item() == pytest.approx(total, rel=1e-6, abs=1e-6)
    assert sum(quantized for _, quantized in served.values()) == 14


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_gives_the_same_bytes_without_ranks(trained, tmp_path, layout):
    folder, out = trained[0], tmp_path / "out"
    plan = export_again(trained, out, layout=layout, deepspeed_config=config({}), shard_bytes=300_000)
    assert_served(out)
    names = {path.name for path in out.iterdir()}
    assert names == {path.name for path in (folder / layout).iterdir()}
    assert len(list(out.glob("*.safetensors"))) > 1
    for path in out.glob("*.safetensors*"):
        assert path.read_bytes() == (folder / layout / path.name).read_bytes()
    assert json.loads((out / "config.json").read_text()) == json.loads((folder / layout / "config.json").read_text())
    assert len(plan.quantized) == (0 if layout == "bf16" else 14)


@pytest.mark.parametrize("threshold", [None, "auto", 10**9])
def test_weights_that_zero_kept_whole_are_those_of_the_training_whatever_a_file_says(trained, tmp_path, threshold):
    """Accelerate and Trainer replace "auto" by 10 times the hidden size, and DeepSpeed's default is another."""
    given = None if threshold is None else config({}, stage3_param_persistence_threshold=threshold)
    export_again(trained, tmp_path / "out", deepspeed_config=given)
    exported, again = tensors(trained[0] / "fp8"), tensors(tmp_path / "out")
    assert exported.keys() == again.keys()
    for name, tensor in exported.items():
        assert torch.equal(tensor.view(torch.uint8), again[name].view(torch.uint8)), name


def test_the_configuration_names_layers_in_full_and_the_scales_type(trained):
    section = json.loads((trained[0] / "fp8/config.json").read_text())["quantization_config"]
    assert section == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
        "ignored_layers": ["lm_head"],
    }


def test_files_are_checksummed_and_readable_by_all(trained):
    folder = trained[0] / "fp8"
    sums = dict(reversed(line.split("  ")) for line in (folder / "checksums.sha256").read_text().splitlines())
    files = {path.name for path in folder.iterdir()} - {"checksums.sha256"}
    assert sums.keys() == files
    for path in folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o644
        assert path.name not in sums or hashlib.sha256(path.read_bytes()).hexdigest() == sums[path.name]


def export_again(trained, out, **changes):
    folder = trained[0]
    arguments = {
        "checkpoint": folder / "checkpoints/step_3",
        "folder": out,
        "config": AutoConfig.from_pretrained(folder / "bf16"),
        "fp8": parse_fp8({"fp8": {}}),
        **changes,
    }
    return export_checkpoint(**arguments)


def test_an_existing_folder_is_replaced_only_by_force(trained, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(trained[0] / "bf16", out)
    before = (out / "config.json").read_text()
    with pytest.raises(UserError, match="exists"):
        export_again(trained, out)
    assert (out / "config.json").read_text() == before
    export_again(trained, out, force=True)
    assert (out / "config.json").read_text() != before


WITH_BUFFERS = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "vocab_size": 64}
WITH_BUFFERS |= {"num_hidden_layers": 1, "first_k_dense_replace": 0, "n_routed_experts": 4, "n_group": 1}


@pytest.mark.parametrize(
    ("changes", "message", "remedy"),
    [
        ({"layout": "gguf"}, "unknown layout", "one of"),
        ({"fp8": parse_fp8({"fp8": {"preset": "rowwise"}})}, "128x128", "compressed-tensors"),
        ({"checkpoint": "absent"}, "complete", "every rank"),
        (
            {"config": AutoConfig.for_model("deepseek_v3", **WITH_BUFFERS, topk_group=1)},
            "another model: model.layers.0.mlp.gate.e_score_correction_bias is absent",
            "configuration of the model",
        ),
        ({"config": AutoConfig.for_model("vit")}, "no causal language model", "configuration"),
    ],
)
def test_what_cannot_be_exported_leaves_nothing(trained, tmp_path, changes, message, remedy):
    with pytest.raises(UserError, match=message) as caught:
        export_again(trained, tmp_path / "out", **changes)
    assert remedy in caught.value.remedy
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("fp8", "words"),
    [({"preset": "halo"}, "rotate"), ({"preset": "mxfp8"}, "one scale a 1x32"), ({"linear": {"skip": ["*"]}}, "skip")],
)
def test_servers_that_are_given_bf16_are_told_why(fp8, words):
    model, config = small_model(**shape()), parse_fp8({"fp8": fp8})
    with pytest.warns(UserWarning, match="all weights in BF16") as caught:
        assert plan_to_serve(model, unconverted(model, group_plan(config)), config.linear).layout == "bf16"
    assert len(caught) == 1
    assert words in str(caught[0].message)


def test_models_that_servers_are_not_given_at_all_are_an_error_alone():
    model = small_model(**shape())
    model.config.model_type = "munit_qwen3"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserError, match="is not a qwen3"):
            plan_to_serve(model, {}, parse_fp8({"fp8": {}}).linear)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_model_with_adapters_is_refused(wrapped):
    """Its weights have names that no server knows, and the adapters are in none of them."""
    peft = pytest.importorskip("peft")
    model, adapters = small_model(**shape()), peft.LoraConfig(r=8, target_modules=["q_proj"])
    if wrapped:
        model = peft.get_peft_model(model, adapters)
    else:
        model.add_adapter(adapters)
    linear = parse_fp8({"fp8": {}}).linear
    for planned in (lambda: make_plan(model, {}, linear, "bf16"), lambda: plan_to_serve(model, {}, linear)):
        with pytest.raises(UserError, match="adapters") as caught:
            planned()
        assert "merge_and_unload" in caught.value.remedy
    if wrapped:
        assert make_plan(model.merge_and_unload(), {}, linear, "fp8").quantized


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("generation_config.json", "{", "not a valid JSON"),
        ("config.json", {"hidden_size": "wide"}, "'hidden_size' expected int, got str"),
        ("config.json", {"num_attention_heads": 0}, "no causal language model"),
        ("config.json", '{"model_type": "nonesuch"}', "nonesuch"),
    ],
)
def test_the_command_names_a_wrong_file_of_the_model(trained, tmp_path, file, change, words):
    shutil.copytree(trained[0] / "bf16", tmp_path / "model")
    path = tmp_path / "model" / file
    path.write_text(change if isinstance(change, str) else json.dumps(json.loads(path.read_text()) | change))
    source, out = trained[0] / "checkpoints/step_3", tmp_path / "out"
    with pytest.raises(UserError, match=words):
        main(["export", str(source), str(out), "--model", str(tmp_path / "model"), "--format", "bf16"])
    assert not out.exists()


def test_a_folder_that_holds_the_checkpoint_is_not_replaced(trained):
    with pytest.raises(UserError, match="holds the checkpoint"):
        export_again(trained, trained[0], force=True)
    assert (trained[0] / "checkpoints/step_3").exists()


def test_an_export_that_fails_leaves_nothing_and_the_folder_before_it(trained, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(trained[0] / "bf16", out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}

    def failing(folder):
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space left"):
        export_again(trained, out, force=True, tokenizer=failing)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def failing_on_one_rank(folder, where):
    """Return what each rank is told of an export that one rank cannot do, and whether another export works after it."""
    from safetensors import SafetensorError

    model = small_model(**shape())
    engine = ds_fp8.initialize(model=model, model_parameters=model.parameters(), config=config({}))[0]
    own = folder / str(dist.get_rank())  # of each host, where no file system is shared
    own.mkdir()
    full = SafetensorError("I/O error: No space left on device (os error 28)")
    if where == "target" and dist.get_rank() == 1:
        (own / "out").mkdir()
    tokenizer = mock.Mock(side_effect=AttributeError("no such tokenizer")) if where == "tokenizer" else None
    full_disk = mock.patch("ds_fp8.export.folder.save_file", side_effect=full)
    failing = full_disk if where == "shard" else gather_failing(engine, where) if "gather" in where else None
    with failing or contextlib.nullcontext(), pytest.raises(Exception) as caught:  # noqa: PT011
        export_engine(engine, own / "out", tokenizer=tokenizer, shard_bytes=100_000)
    export_engine(engine, own / "again")
    return type(caught.value).__name__, str(caught.value), sorted(path.name for path in own.iterdir())


@pytest.mark.parametrize(
    ("where", "rank", "kind", "words"),
    [
        ("target", 1, "UserError", "out exists"),
        ("shard", 0, "UserError", "No space left"),
        ("tokenizer", 0, "AttributeError", "no such tokenizer"),
        *(
            (f"gather of {what} {when}", 1, "OutOfMemoryError", "out of memory in a gather")
            for what in ("codes", "bf16")
            for when in ("before", "after")
        ),
    ],
)
def test_what_one_rank_cannot_do_is_said_by_all(ranks, tmp_path, where, rank, kind, words):
    found = ranks(2, failing_on_one_rank, tmp_path, where)
    assert [type_of for type_of, *_ in found] == [kind if own == rank else "UserError" for own in range(2)]
    assert all(words in text for _, text, _ in found)
    assert found[0][2] == ["again"]


def test_a_checkpoint_without_a_ranks_file_is_incomplete(trained, tmp_path):
    checkpoint = tmp_path / "step_3"
    checkpoint.mkdir()
    for path in (trained[0] / "checkpoints/step_3").iterdir():
        if "rank_1_" not in path.name or "optim" not in path.name:
            (checkpoint / path.name).symlink_to(path)
    with pytest.raises(UserError, match="not a complete ZeRO checkpoint"):
        export_again(trained, tmp_path / "out", checkpoint=checkpoint)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", [b"", b"no checkpoint", None], ids=["empty", "other", "cut off"])
@pytest.mark.parametrize("kind", ["model", "optim"])
def test_a_damaged_file_is_no_complete_checkpoint(trained, tmp_path, kind, content):
    checkpoint = tmp_path / "step_3"
    shutil.copytree(trained[0] / "checkpoints/step_3", checkpoint)
    file = min(checkpoint.glob(f"*{kind}_states.pt"))
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2] if content is None else content)
    with pytest.raises(UserError, match="not a complete ZeRO checkpoint") as caught:
        export_again(trained, tmp_path / "out", checkpoint=checkpoint)
    assert caught.value.file == checkpoint
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("qwen3", {"vocab_size": 65}, "embed_tokens.weight is "),
        ("qwen3", {"num_hidden_layers": 3}, "layers.2.self_attn.q_proj.weight is absent"),
        ("qwen3", {"num_hidden_layers": 1}, "it has model.layers.1."),
        ("llama", {}, "it has model.layers.0.self_attn.q_norm.weight"),
    ],
)
def test_another_models_configuration_is_refused(trained, tmp_path, kind, changes, words):
    values = AutoConfig.from_pretrained(trained[0] / "bf16").to_dict()
    values = {key: value for key, value in values.items() if key not in ("model_type", "layer_types", "architectures")}
    other = AutoConfig.for_model(kind, **values | changes)
    with pytest.raises(UserError, match="another model") as caught:
        export_again(trained, tmp_path / "out", config=other)
    assert words in caught.value.problem
    assert not list(tmp_path.iterdir())


def test_a_layer_that_training_moved_to_bf16_and_another_model_lacks_is_named(trained, tmp_path):
    checkpoint = tmp_path / "step_3"
    shutil.copytree(trained[0] / "checkpoints/step_3", checkpoint)
    for file in checkpoint.glob("*_model_states.pt"):
        state = torch.load(file, weights_only=False)
        state["ds_fp8"] |= {
            "layers_in_bf16": ["model.layers.1"],
            "excluded_by_filter": ["model.layers.0.mlp.down_proj"],
        }
        torch.save(state, file)
    plan = export_again(trained, tmp_path / "out", checkpoint=checkpoint)
    assert plan.left["model.layers.1.mlp.up_proj"] == "moved to BF16 in training"
    assert plan.left["model.layers.0.mlp.down_proj"] == "excluded by the filter"
    assert "model.layers.0.mlp.up_proj" not in plan.left
    smaller = AutoConfig.from_pretrained(trained[0] / "bf16", num_hidden_layers=1)
    with pytest.raises(UserError, match="another model: it has a layer"):
        export_again(trained, tmp_path / "smaller", checkpoint=checkpoint, config=smaller)
