"""What the casts of parts of a model cost, and the overrides that are proposed."""

import json
import math
import shutil
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ds_fp8.casts import quantize
from ds_fp8.cli import main
from ds_fp8.config.fp8 import parse_fp8
from ds_fp8.engine.plans import convert
from ds_fp8.layers.linear.linear import FP8Linear
from ds_fp8.report.verdict import Mean, word_of
from ds_fp8.train import load_stage
from ds_fp8.train.sensitivity import CastSwitch, Judge, measure, parts_of, propose, shares_of
from tests.layers.hugging_face import causal_lm, tokens
from tests.refusals import refused
from tests.train.tiny_stage import TINY

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model whose head has learnt one sentence, its tokenizer, and the text."""
    path = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="one"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="ten").save_pretrained(path)
    (path / "text.txt").write_text("\n\n".join([" ".join(WORDS * 4)] * 6))
    model = causal_lm("llama", intermediate_size=256)
    ids = torch.arange(10).repeat(4)[None]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(15):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(path)
    return path


def rows(count=3):
    ids = tokens(count, 24)
    return [{"input_ids": row[None], "labels": row[None], "position_ids": torch.arange(len(row))[None]} for row in ids]


def model_in_fp32():
    return causal_lm("llama").float().eval()


def config(**section):
    return parse_fp8({"fp8": section})


def test_a_part_is_cast_and_nothing_else_and_the_model_given_back():
    """Against casts by hand of the operands of the one layer."""
    model = model_in_fp32()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    classes = [type(module) for module in model.modules()]
    plain = model(input_ids=tokens()).logits
    name = "model.layers.1.self_attn.o_proj"
    switch = CastSwitch(model, config())
    assert torch.equal(model(input_ids=tokens()).logits, plain)  # nothing is cast
    with switch.only([name]):
        found = model(input_ids=tokens()).logits
    switch.close()
    assert [type(module) for module in model.modules()] == classes
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert torch.equal(model(input_ids=tokens()).logits, plain)
    layer = model.get_submodule(name)
    layer.weight.data = quantize(layer.weight.data, "e4m3", "128x128", "pow2").dequantize(torch.float32)

    def by_hand(module, args):
        x = args[0]
        return (quantize(x.flatten(0, -2), "e4m3", "1x128", "pow2").dequantize(torch.float32).view(x.shape),)

    layer.register_forward_pre_hook(by_hand)
    assert torch.allclose(found, model(input_ids=tokens()).logits, atol=1e-5)


def test_all_parts_are_those_of_a_conversion():
    model, fp8 = model_in_fp32(), config(linear={"overrides": {"*.v_proj": "bf16"}, "backend": "reference"}, fuse="off")
    judge = Judge(model, rows())
    switch = CastSwitch(model, fp8)
    linears = list(switch.linears)
    parts, shares, left = parts_of(linears), shares_of(model, linears, 24), []
    kinds = [f"*.{kind}" for kind in ("q_proj", "k_proj", "o_proj", "gate_proj", "up_proj", "down_proj")]
    assert list(parts) == ["*", *kinds, "model.layers.0", "model.layers.1"]
    assert len(parts["*"]) == 12
    costs = measure(model, switch, judge, parts, shares, left.append)
    assert len(costs) == len(left) == left[0] == 7 + 2
    switch.close()
    convert(model, fp8)
    found = judge.measure(model)
    assert found.divergence == pytest.approx(costs[0]["divergence"], rel=1e-4)
    assert all(cost["divergence"] > 0 for cost in costs)
    assert max(costs, key=lambda cost: cost["divergence"])["pattern"] == "*"


def test_shares_are_of_the_flops_of_all_products():
    """hidden 256, 4 heads of 64 and 2 of keys, MLP of 384, 97 words, 2 layers; rows of 31 tokens."""
    model = model_in_fp32()
    linears = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    shares = shares_of(model, linears, 31)
    in_layer = {"q": 256 * 256, "k": 128 * 256, "v": 128 * 256, "o": 256 * 256, "mlp": 3 * 384 * 256}
    total = 2 * (sum(in_layer.values()) + 2 * 256 * 16) + 97 * 256
    assert shares["model.layers.0.self_attn.q_proj"] == pytest.approx(in_layer["q"] / total)
    in_first = [share for name, share in shares.items() if name.startswith("model.layers.0.")]
    assert sum(in_first) == pytest.approx(sum(in_layer.values()) / total)


def test_the_costliest_for_their_flops_are_proposed_within_the_budget():
    shares = {"a.q": 0.02, "a.k": 0.01, "b.q": 0.02, "b.k": 0.01}
    divergences = {"*": 9.0, "*.q": 4.0, "*.k": 3.0, "a": 2.5, "b": 0.0}
    parts, costs = parts_of(list(shares)) | {"a": ["a.q", "a.k"], "b": ["b.q", "b.k"]}, []
    for pattern, divergence in divergences.items():
        for_flops = divergence / sum(shares[name] for name in parts[pattern])
        costs.append({"pattern": pattern, "divergence": divergence, "divergence_per_percent_of_flops": for_flops})
    assert propose(costs, parts, shares, 0.02) == {"*.k": ["a.k", "b.k"]}
    # q does not fit any more, and of layer a only q is left
    assert propose(costs, parts, shares, 0.04) == {"*.k": ["a.k", "b.k"], "a": ["a.q"]}
    assert propose(costs, parts, shares, 0.06) == {"*.k": ["a.k", "b.k"], "*.q": ["a.q", "b.q"]}
    assert propose(costs, parts, shares, 0.005) == {}


@pytest.fixture
def run(folder, capsys):
    """`run(FILE, option, ...)`: figures of the command on a small model, what it prints, and the folder it wrote."""

    def command(file, *options):
        arguments = ["--rows", "2", "--length", "41", "--out", str(folder / "out"), *map(str, options)]
        assert main(["sensitivity", str(folder), str(file), *arguments]) == 0
        out = Path(arguments[-1]) if "--out" in options else folder / "out"
        return json.loads((out / "sensitivity.json").read_text()), capsys.readouterr().out

    return command


def test_the_command_on_documents(run, folder, write):
    # Not precise: its outlier channels are those of the first forward, in which another part is cast.
    preset = ["--preset", "infir2", "--budget", "0.2"]
    figures, printed = run(folder / "text.txt", *preset)
    found = [entry for entry in figures["costs"] if entry["pattern"] == "*.up_proj"]
    assert len(found) == 1
    assert all(entry["divergence"] > 0 and math.isfinite(entry["loss_standard_error"]) for entry in found)
    proposal = figures["proposal"]
    assert 0 < proposal["flops_share"] <= 0.2
    assert "for 1% of FLOPs" in printed
    written = json.loads((folder / "out" / "stage.json").read_text())
    assert written["fp8"]["linear"]["overrides"] == proposal["overrides"]
    model = causal_lm("llama", intermediate_size=256)
    kept = len(convert(model, parse_fp8(written)).left) - 1  # and the head
    assert kept == 14 - sum(isinstance(module, FP8Linear) for module in model.modules())
    assert kept > 0
    everything = figures["costs"][0]
    expected = word_of(Mean(everything["loss_increase"], everything["loss_standard_error"]))
    assert figures["verdict"] == expected
    assert f"{expected}: all linear layers in FP8 change the loss of 2 rows by " in printed
    again, _ = run(folder / "text.txt", *preset)
    assert again == figures  # deterministic
    written["data"] = {"path": str(folder / "text.txt"), "validation_fraction": 0.5}
    rest = next(entry for entry in run(write(written))[0]["costs"] if entry["pattern"] == "*")
    assert rest["divergence"] == pytest.approx(proposal["divergence"], rel=1e-6)


def test_a_budget_below_every_part_proposes_and_writes_nothing(run, folder, tmp_path):
    figures, printed = run(folder / "text.txt", "--budget", "0.001", "--out", tmp_path / "none")
    smallest = min((entry for entry in figures["costs"]), key=lambda entry: entry["flops_share"])
    assert f"{smallest['pattern']}, has {smallest['flops_share']:.2%}" in printed
    assert [file.name for file in (tmp_path / "none").iterdir()] == ["sensitivity.json"]
    assert run(folder / "text.txt", "--rows", "1")[0]["verdict"] == "undecided"
    enough = printed.partition("(--budget ")[2].split()[0]
    assert run(folder / "text.txt", "--budget", enough)[0]["proposal"]["overrides"]


ALL_KINDS = [f"*.{kind}_proj" for kind in ("q", "k", "v", "o", "gate", "up", "down")]
SECTIONS = {  # "fp8" of a stage: in words or not, with overrides that the proposal may name, too
    "a layer in BF16": {"preset": "hybrid_fast", "linear": {"overrides": {"*.o_proj": "bf16"}}},
    "a word": "hybrid_fast",
    "words": {"linear": "hybrid_fast", "optimizer": "coat"},
    "casts of all kinds": {
        "linear": {"overrides": {kind: {"input": {"granularity": "128x128"}} for kind in ALL_KINDS}}
    },
}


@pytest.mark.parametrize("case", SECTIONS)
def test_a_proposal_stands_before_the_overrides_of_a_stage_and_changes_nothing_else(case, run, folder, write):
    data = {"path": str(folder / "text.txt"), "tokenizer": str(folder), "validation_fraction": 0.5}
    stage = {**TINY, "fp8": SECTIONS[case], "data": data}
    figures, _ = run(write(stage), "--budget", "0.2")
    proposed, file = figures["proposal"]["overrides"], folder / "out" / "stage.json"
    written, expected = (load_stage(each, world=1).fp8 for each in (file, write(stage)))
    assert ("*.o_proj" in {entry["pattern"] for entry in figures["costs"]}) == (case != "a layer in BF16")
    assert list(written.linear.overrides)[: len(proposed)] == list(proposed)
    own = {pattern: cast for pattern, cast in written.linear.overrides.items() if pattern not in proposed}
    assert own == {pattern: cast for pattern, cast in expected.linear.overrides.items() if pattern not in proposed}
    assert written.model_copy(update={"linear": expected.linear}) == expected
    assert written.linear.model_copy(update={"overrides": expected.linear.overrides}) == expected.linear
    content = json.loads(file.read_text())
    assert {pattern: content["fp8"]["linear"]["overrides"][pattern] for pattern in proposed} == proposed
    assert {**content, "fp8": None} == {**json.loads(json.dumps(stage)), "fp8": None}


def test_an_open_preset_is_measured_and_written_as_training_has_it(run, folder, write):
    data = {"path": str(folder / "text.txt"), "tokenizer": str(folder), "validation_fraction": 0.5}
    for model, preset in (({"path": str(folder)}, "precise"), (TINY["model"], "infir2")):
        file = write({**TINY, "fp8": {}, "model": model, "data": data})
        assert load_stage(file, world=1).fp8.preset == preset
        assert run(file, "--budget", "0.2")[0]["preset"] == preset
        assert load_stage(folder / "out" / "stage.json", world=1).fp8.preset == preset
    assert run(folder / "text.txt", "--budget", "0.2")[0]["preset"] == "precise"
    assert json.loads((folder / "out" / "stage.json").read_text())["fp8"]["preset"] == "precise"


def test_the_command_over_a_grid(run, folder, tmp_path, capsys):
    grid = ["--grid", "fp8.preset=infir2,tensorwise", "--budget", "0.2", "--out", str(tmp_path / "out")]
    assert main(["sensitivity", str(folder), str(folder / "text.txt"), "--rows", "2", "--length", "41", *grid]) == 0
    assert capsys.readouterr().out.count("for 1% of FLOPs") == 2
    for preset in ("infir2", "tensorwise"):
        alone, _ = run(folder / "text.txt", "--budget", "0.2", "--preset", preset)
        assert json.loads((tmp_path / "out" / f"preset_{preset}" / "sensitivity.json").read_text()) == alone
        stage = json.loads((tmp_path / "out" / f"preset_{preset}" / "stage.json").read_text())
        assert stage["fp8"]["linear"]["overrides"] == alone["proposal"]["overrides"]


def test_points_of_one_folder_do_not_overwrite_each_other(folder, tmp_path):
    grid = ["--grid", 'fp8.linear.overrides={"*q_proj": "bf16"},{"q_proj": "bf16"}', "--out", str(tmp_path / "out")]
    with refused("same folder"):
        main(["sensitivity", str(folder), str(folder / "text.txt"), "--rows", "2", "--length", "41", *grid])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("file", "options", "key"),
    [
        ("text.txt", ["--preset", "rowise"], "fp8.preset"),
        ("text.txt", ["--set", "fp8.enabled=false"], "fp8.enabled"),
        ("absent.txt", [], "data.path"),
        ("config.json", [], "data"),
        ("text.txt", ["--out", "/dev/null/x"], "--out"),
    ],
)
def test_mistakes(folder, monkeypatch, file, options, key):
    monkeypatch.setattr(sys, "argv", [])
    with refused(key=key):
        main(["sensitivity", str(folder), str(folder / file), "--length", "41", *options])


def test_markers_of_a_chat_template_that_the_model_lacks_are_named(folder, write, tmp_path):
    base = tmp_path / "base"
    causal_lm("llama", vocab_size=10).save_pretrained(base)  # as many as words
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, base)
    chat = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for _ in range(4)))
    data = {"path": str(tmp_path / "chats.jsonl"), "format": "chat", "validation_fraction": 0.5}
    with refused("im_end", "data.chat_template"):
        main(["sensitivity", str(base), str(write({"fp8": {}, "data": data})), "--rows", "1", "--length", "41"])
