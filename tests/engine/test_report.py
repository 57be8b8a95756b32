"""ds_fp8.initialize for deepspeed.initialize: arguments, start report, open presets, fetches ahead of their use."""

import contextlib
import functools
import inspect
import io
import json

import deepspeed
import pytest
import torch
from deepspeed import comm as dist
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from torch import nn
from transformers import AutoModelForCausalLM, OlmoConfig
from transformers.integrations import HfDeepSpeedConfig
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

import ds_fp8
from ds_fp8.config.errors import UserError
from ds_fp8.config.fp8 import FP8Config
from ds_fp8.config.presets import leaves_preset_open, with_preset
from ds_fp8.engine.initialize import initialize
from ds_fp8.engine.model import BUCKET, LIVE, weights_are_trained, wider_prefetch
from ds_fp8.engine.plans import convert
from ds_fp8.engine.report import why_slow
from ds_fp8.layers.experts.experts import FP8Experts
from tests.layers.hugging_face import causal_lm
from tests.layers.moe import mixture
from tests.ranks import on_ranks
from tests.zero import models
from tests.zero.test_experts import engine_of, train


def printed(architecture, changes, section, special=None):
    """(the start report, what rank 0 printed of it, in one line) of one rank."""
    model = causal_lm(architecture, **changes)
    raw = models.config({"report": "full", **section, "linear": {"backend": "reference"}})
    parameters = model.parameters()
    if special == "forward":
        model.forward = functools.partial(type(model).forward, model)
    elif special == "no optimizer":
        parameters = None
        del raw["optimizer"]
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        engine = ds_fp8.initialize(model=model, model_parameters=parameters, config=raw)[0]
    report = engine.fp8.report
    engine.destroy()
    return report, " ".join(output.getvalue().replace("│", " ").split())


MOE = {"num_experts": 8, "num_experts_per_tok": 2, "vocab_size": 320}


def test_experts_that_stay_bf16_are_said_first_and_little_fp8_is_a_warning(ranks):
    experts = {**MOE, "moe_intermediate_size": 264}
    (report, text), (_, silent) = ranks(2, printed, "qwen3_moe", experts, {})
    share = sum(part["parameters"] for part in report["kept_in_bf16"][:2]) / report["parameters"]
    assert text.index(f"{share:.0%} of the parameters stay BF16: experts") < text.index("linears in FP8")
    in_fp8 = report["fp8_parameters"] / report["parameters"]
    assert in_fp8 < 1 / 3
    assert f"only {in_fp8:.0%} of the parameters are in FP8" in text
    assert "a router or gate: 2 tensors, 4,096 parameters" in text
    assert "experts, matrices of 256 x 264 do not divide into 128x128 blocks: 2 tensors" in text
    assert silent == ""


@pytest.mark.parametrize(
    ("architecture", "words"),
    [
        ("granitemoe", "exports and servers have the experts in BF16: folders hold them in one 3-D tensor"),
        ("hrm_text", "exports and servers have this model in BF16 only: transformers cannot read it in FP8"),
        ("qwen2_moe", None),
    ],
)
def test_what_folders_cannot_hold_in_fp8_is_said_before_the_training(ranks, architecture, words):
    _, text = ranks(1, printed, architecture, {"num_local_experts": 4, "num_experts": 4}, {})[0]
    assert ("exports and servers" in text) == (words is not None)
    assert words is None or words in text


def test_experts_gathered_in_fp8_count_with_their_share(ranks):
    report, text = ranks(2, printed, "qwen3_moe", {**MOE, "moe_intermediate_size": 256}, {})[0]
    experts = 2 * 8 * 3 * 256 * 256
    assert report["fp8_gathered_experts"] == experts
    share = experts / report["parameters"]
    assert f"experts {share:.1%} of the parameters: all-gathered in FP8, dequantized and multiplied in BF16" in text
    assert "stay BF16" not in text
    assert "only" not in text
    kept = sum(part["parameters"] for part in report["kept_in_bf16"])
    assert report["fp8_parameters"] + experts + kept == report["parameters"]
    gathered = 2 * report["parameters"] - report["fp8_gathered_parameters"]
    assert report["gathered_bytes_per_parameter"] == gathered / report["parameters"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="attention in FP8 is emulated on a CPU alone")
def test_attention_in_fp8_and_what_of_it_is_not(ranks):
    window = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
    report, text = ranks(2, printed, "qwen2", window, {"attention": {"format": "e4m3"}})[0]
    assert report["fp8_attention_layers"] == 1
    assert "1 layers, e4m3, gradients e5m2 (emulated), in rows without padding" in text
    assert "model.layers.1.self_attn: it has a sliding window" in text


PARTS = ("linears in FP8 14 (", "in BF16 embeddings", "products input e4m3", "wire weights e4m3", "step ds_fp8;")


@pytest.mark.parametrize(
    ("special", "said"),
    [
        (None, (*PARTS, "CUDA graphs off", "loss without logits", "preset not named")),
        ("forward", ("whether logits are in memory is up to it", "fp8.loss has no effect")),  # of another package
        ("no optimizer", ("optimizer step none: this engine evaluates CUDA",)),
    ],
)
def test_the_short_report_says_what_runs_where_in_a_few_lines(ranks, special, said):
    _, text = ranks(1, printed, "llama", {}, {"report": "short"}, special)[0]
    assert [words for words in said if words not in text] == []
    assert "hosts x ranks" not in text


@pytest.mark.parametrize(
    ("hidden", "tokens", "words"),
    [
        ([256], 10**6, "too small"),
        ([2048], None, "from 8192 tokens"),
        ([2048, 2048, 300], 8191, "8191 tokens a GPU and micro-batch are too few"),
        ([3584], 8192, None),
        ([4096], 2047, "begins at 2048"),
        ([16384], 16384, None),
        ([], 16, None),
    ],
)
def test_a_note_only_where_fp8_does_not_pay(hidden, tokens, words):
    text = why_slow([nn.Linear(size, 8, device="meta") for size in hidden], tokens)
    assert text is None if words is None else words in text


# ---------------------------------------------------------------- ds_fp8.initialize stands in for deepspeed.initialize


def test_the_arguments_are_deepspeeds_in_their_order():
    ours, theirs = inspect.signature(initialize).parameters, inspect.signature(deepspeed.initialize).parameters
    assert list(ours) == list(theirs)
    assert [p.default for p in ours.values()] == [p.default for p in theirs.values()]


@pytest.mark.parametrize(
    ("section", "expected", "enabled", "measures"),
    [
        (None, "", False, False),
        ({"enabled": False}, "FP8 is off", False, True),
        ({"monitor": {"every": 0}}, "linears in FP8", True, True),
    ],
    ids=["no section", "disabled", "enabled"],
)
@on_ranks(2)
def test_only_a_configuration_with_a_section_is_spoken_of(section, expected, enabled, measures):
    """With the configuration as eleventh positional argument."""
    torch.manual_seed(0)
    model = models.Net().bfloat16()
    given = (None, model, None, model.parameters(), None, None, 29500, None, None, None, models.config(section))
    with contextlib.redirect_stdout(io.StringIO()) as out:
        engine = initialize(*given)[0]
    assert (engine.fp8.config.enabled, engine.fp8.wire is not None) == (enabled, measures)
    said = out.getvalue()
    assert expected in said if dist.get_rank() == 0 and expected else said == ""


# ---------------------------------------------------------------- fetches of layers with experts ahead of their use


@pytest.fixture(scope="module")
def model():
    model = mixture("qwen3_moe")
    convert(model, FP8Config(linear={"backend": "reference"}))
    return model


@pytest.fixture(scope="module")
def layer(model):
    return sum(parameter.numel() for parameter in model.model.layers[0].parameters())


def wider(model, **zero):
    return wider_prefetch(DeepSpeedZeroConfig(**{"stage": 3, **zero}), model)


def test_limits_that_a_layer_does_not_fit_are_raised_and_said(model, layer):
    changes, notes = wider(model, **{BUCKET: 1000, LIVE: 2 * layer - 1})
    assert changes == {BUCKET: layer, LIVE: 2 * layer}
    assert [note.split(" raised ")[0] for note in notes] == [BUCKET, LIVE]
    assert notes[0].startswith(f"{BUCKET} raised from 1,000 to {layer:,}")
    changes, notes = wider(model, **{BUCKET: layer, LIVE: 1000})
    assert changes == {LIVE: 2000}  # at most doubled
    assert notes[-1] == f"{LIVE} is too small to fetch a layer with experts ahead: {2 * layer:,} would do"


def test_others_stay(model, layer):
    for zero in ({}, {BUCKET: layer, LIVE: 2 * layer}, {BUCKET: 0, LIVE: 1}, {"stage": 2, BUCKET: 1}):
        assert wider(model, **zero) == ({}, [])


def test_dense_models_are_left_alone():
    dense = causal_lm("llama")
    convert(dense, FP8Config(linear={"backend": "reference"}))
    assert wider(dense, **{BUCKET: 1, LIVE: 1}) == ({}, [])


@on_ranks(2)
def test_experts_are_under_way_before_their_layer_once_the_trace_is_known():
    # Space for two layers, in a bucket that ends with the first weight.
    space = {BUCKET: 100, "stage3_max_reuse_distance": 0}
    engine = engine_of("qwen3_moe", {}, changes={"num_hidden_layers": 4}, **space)
    train(engine, 3)
    seen = {}

    def look(name, layer, *_):
        experts = [part for part in layer.modules() if isinstance(part, FP8Experts)]
        weights = [weight for part in experts for weight in part.parameters()]
        seen.setdefault(name, [weight.ds_status.name != "NOT_AVAILABLE" for weight in weights])

    for number, layer in enumerate(engine.module.model.layers):
        layer.register_forward_pre_hook(functools.partial(look, number), prepend=True)
    ids = torch.arange(32)[None]
    engine(input_ids=ids, labels=ids, use_cache=False)
    assert len(seen) == 4
    assert all(all(weights) for name, weights in seen.items() if name > 0), seen
    assert any(note.startswith(BUCKET) for note in engine.fp8.report["notes"])


# ---------------------------------------------------------------- the preset that a configuration leaves open


OPEN = {"monitor": {"every": 0}}


def trained_model():
    """A model whose weights are not those of a beginning."""
    model = causal_lm("llama")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter += 0.05 * torch.randn_like(parameter)
    return model


def from_config(folder, config):
    return causal_lm("llama")


def from_pretrained(folder, config):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


def loaded_by_hand(folder, config):
    model = causal_lm("llama")
    if dist.get_rank() == 0:  # whose weights DeepSpeed broadcasts
        model.load_state_dict(from_pretrained(folder, config).state_dict())
    return model


def named_but_random(folder, config):
    model = causal_lm("llama")
    model.config.name_or_path = folder  # as of a configuration that transformers has read
    return model


def sharded(build):
    """`build` under zero.Init, of DeepSpeed itself or of transformers."""

    def build_sharded(folder, config):
        keep = HfDeepSpeedConfig({key: value for key, value in config.items() if key != "fp8"})
        born = contextlib.nullcontext()
        if build is not from_pretrained:
            born = deepspeed.zero.Init(config_dict_or_path=config, dtype=torch.bfloat16)
        try:
            with born:
                return build(folder, config)
        finally:
            unset_hf_deepspeed_config()
            del keep

    return build_sharded


BUILDS = {
    "from_config": (from_config, "infir2"),
    "from_pretrained": (from_pretrained, "precise"),
    "loaded by hand on the first rank": (loaded_by_hand, "precise"),
    "named but random": (named_but_random, "infir2"),
    "zero.Init": (sharded(from_config), "infir2"),
    "from_pretrained under zero.Init": (sharded(from_pretrained), "precise"),
}


def chosen(folder, name, section):
    """The report and the saved preset of an engine."""
    config = models.config({**OPEN, **section})
    model = BUILDS[name][0](folder, json.loads(json.dumps(config)))
    engine = ds_fp8.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    state = engine.fp8.state_dict()
    engine.destroy()
    return engine.fp8.report, state["preset"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("trained")
    trained_model().save_pretrained(path)
    return str(path)


@on_ranks(2)
def test_it_is_precise_for_trained_weights_alone_on_all_ranks(folder):
    for name, (_, expected) in BUILDS.items():
        report, saved = chosen(folder, name, {})
        assert report["preset"] == saved == expected, name
        assert ("trained" in report["preset_reason"]) == (expected == "precise"), name
        assert report["outlier_channels"] == (128 if expected == "precise" else 0), name


@pytest.mark.parametrize(
    ("section", "preset", "has_reason", "channels"),
    [
        ({"preset": "infir2"}, "infir2", False, 0),
        ({"linear": {"input": {"scale": "pow2"}}}, "infir2", False, 0),
        ({"linear": {"outlier_channels": 64}}, "precise", True, 64),
        ({"preset": {"optimizer": "coat"}}, {"optimizer": "coat", "linear": "precise"}, True, 128),
    ],
)
@on_ranks(1)
def test_what_the_section_names_stays(folder, section, preset, has_reason, channels):
    report, saved = chosen(folder, "from_pretrained", section)
    assert saved == preset
    assert (report["preset_reason"] is not None) == has_reason
    assert report["outlier_channels"] == channels


@on_ranks(1)
def test_a_note_says_where_trained_weights_meet_infir2(folder):
    infir2 = {"preset": "infir2"}
    for name, section, noted in (
        ("from_pretrained", infir2, True),
        ("from_pretrained", {**infir2, "optimizer": "coat"}, True),
        ("from_pretrained under zero.Init", infir2, True),
        ("from_config", infir2, False),
        ("from_pretrained", {}, False),
        ("from_pretrained", {"linear": {"input": {"scale": "fp32"}}}, False),
    ):
        notes = [note for note in chosen(folder, name, section)[0]["notes"] if note.startswith("preset")]
        said = "preset infir2 on trained weights: precise ends closer to BF16 (docs/configuration.md)"
        assert notes == [said] * noted, (name, section)


@pytest.mark.parametrize(
    ("section", "is_open"),
    [
        ({}, True),
        (True, True),
        ({"linear": {"skip": ["lm_head"]}}, True),
        ({"linear": {"outlier_channels": 64}}, True),
        ({"preset": {"optimizer": "coat"}}, True),
        ({"optimizer": "coat"}, True),
        ("infir2", False),
        ({"preset": "infir2"}, False),
        ({"preset": {"linear": "rowwise"}}, False),
        ({"linear": "rowwise"}, False),
        ({"linear": {"input": {"scale": "fp32"}}}, False),
        ({"enabled": False}, False),
        (None, False),
    ],
)
def test_a_section_leaves_the_preset_open_or_not(section, is_open):
    assert leaves_preset_open(section) == is_open
    if isinstance(section, dict):
        assert FP8Config(**section).leaves_preset_open == is_open
    if is_open:
        assert not leaves_preset_open(with_preset(section, "precise"))


def test_norms_without_weights_leave_it_to_what_transformers_has_loaded(tmp_path):
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = OlmoConfig(**sizes, vocab_size=128, pad_token_id=None, bos_token_id=None, eos_token_id=None)
    drawn = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    assert weights_are_trained(drawn) == (False, "neither norms nor transformers show that weights are trained")
    drawn.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert weights_are_trained(loaded) == (True, "the weights are trained: transformers has loaded them")


@pytest.mark.parametrize(
    ("build", "section", "channels"),
    [
        (trained_model, {}, 128),
        (trained_model, {"linear": {"outlier_channels": 64}}, 64),
        (trained_model, {"preset": "infir2"}, 0),
        (lambda: causal_lm("llama"), {}, 0),
    ],
)
def test_convert_decides_as_initialize_does(build, section, channels):
    if section.keys() != {"linear"}:  # a mapping, or a preset's name
        given = section.get("preset", {**OPEN, **section})
        assert ds_fp8.convert(build(), given).recipe.outlier_channels == channels
    assert ds_fp8.convert(build(), FP8Config(**OPEN, **section)).recipe.outlier_channels == channels


@on_ranks(2)
def test_a_checkpoint_of_another_preset_is_not_continued_silently(folder, tmp_path):
    """By a random model, from the checkpoint of a trained one; it is with the preset named."""

    def engine(model, section):
        return ds_fp8.initialize(model=model, model_parameters=model.parameters(), config=models.config(section))[0]

    engine(from_pretrained(folder, None), OPEN).save_checkpoint(tmp_path, tag="a")
    with pytest.raises(UserError) as caught:
        engine(causal_lm("llama"), OPEN).load_checkpoint(tmp_path, tag="a")
    assert caught.value.key == "fp8.preset"
    assert caught.value.remedy == '"fp8": {"preset": "precise"}'
    engine(causal_lm("llama"), {**OPEN, "preset": "precise"}).load_checkpoint(tmp_path, tag="a")
    engine(from_pretrained(folder, None), OPEN).load_checkpoint(tmp_path, tag="a")
