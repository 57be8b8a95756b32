"""FP8 folders of every maker: the numbers that codes stand for, in training and evaluation, or an error with a name."""

import json
from contextlib import ExitStack

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from ds_fp8.layers.linear.weights import UNSHARDED
from ds_fp8.train.served_model import load_served_model
from ds_fp8.train.stored_model import stored_tensors
from tests.refusals import refused
from tests.train.test_stored_model import load as trained

SIZES = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 64}
WHOLE, RAGGED = {"hidden_size": 256, "intermediate_size": 384}, {"hidden_size": 192, "intermediate_size": 320}
DOWN, EXPERTS = "model.layers.0.mlp.down_proj.weight", "model.layers.0.mlp.experts"


def ct(strategy, block=None, **changes):
    weights = {
        "type": "float",
        "num_bits": 8,
        "symmetric": True,
        "strategy": strategy,
        "block_structure": block,
        **changes,
    }
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}


def fp8(block=None, scheme="dynamic"):
    return {"quant_method": "fp8", "activation_scheme": scheme, **({"weight_block_size": block} if block else {})}


def modelopt(algo):
    return {"quant_method": "modelopt", "quant_algo": algo}


B128, B64, ODD = [128, 128], [64, 64], [96, 32]
READ = {  # method: section, hf_quant_config.json, ending of scales, what shares a scale
    **{f"fp8 {b[0]}x{b[1]}": (fp8(b), None, "_scale_inv", tuple(b)) for b in (B128, B64, ODD)},
    "fp8 128x128 named _scale": (fp8(B128), None, "_scale", (128, 128)),
    "fp8 by tensor": (fp8(None, "static"), None, "_scale", "()"),
    "fp8 by tensor [1]": (fp8(None, "static"), None, "_scale", "[1]"),
    "fp8 by channel": (fp8(), None, "_scale", "[N]"),
    "fbgemm by channel": ({"quant_method": "fbgemm_fp8"}, None, "_scale", "[N, 1]"),
    **{f"compressed {b[0]}x{b[1]}": (ct("block", b), None, "_scale", tuple(b)) for b in (B128, ODD)},
    "compressed by channel": (ct("channel"), None, "_scale", "[N, 1]"),
    "compressed by tensor": (ct("tensor"), None, "_scale", "[1]"),
    "modelopt by tensor": (modelopt("FP8"), None, "_scale", "()"),
    "modelopt by channel": (modelopt("FP8_PER_CHANNEL_PER_TOKEN"), None, "_scale", "[N]"),
    "modelopt's file by tensor": (None, {"quant_algo": "FP8"}, "_scale", "()"),
    "modelopt's file 128x128": (None, {"quant_algo": "FP8_PB_WO"}, "_scale", (128, 128)),
    "no section by tensor": (None, None, "_scale", "()"),
    "no section by channel": (None, None, "_scale_inv", "[N, 1]"),
}


def scales_of(shape, share):
    """Scales of powers of two, so that BF16 holds the truth, and a factor for each number, counted one by one."""
    generator = torch.Generator().manual_seed(sum(shape))
    rows, columns = shape[-2:]
    if isinstance(share, tuple):
        grid = [*shape[:-2], -(-rows // share[0]), -(-columns // share[1])]
        row, column = torch.arange(rows) // share[0], torch.arange(columns) // share[1]
    elif "N" in share:
        grid, row, column = [*shape[:-1], 1], torch.arange(rows), torch.zeros(columns, dtype=torch.long)
    else:
        grid, row, column = [1, 1], torch.zeros(rows, dtype=torch.long), torch.zeros(columns, dtype=torch.long)
        grid = [*shape[:-2], 1, 1] if share == "[E]" else grid
    scales = 2.0 ** torch.randint(-9, -4, grid, generator=generator)
    factors = scales[..., row[:, None], column[None]]
    stored = {"()": [], "[1]": [1], "[N]": shape[:-1], "[E]": shape[:1]}.get(share, grid)
    return scales.view(stored), factors


def write(folder, method, kind="llama", sizes=WHOLE, fused=False, forget=(), scale_dtype=torch.float32):
    """Write a folder as its makers do. Returns the truth of every weight of the model."""
    section, file, ending, share = READ[method] if isinstance(method, str) else method
    torch.manual_seed(1)
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": sizes["intermediate_size"]}
    config = AutoConfig.for_model(kind, **SIZES, **sizes, **(experts if "moe" in kind else {}), head_dim=96)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if not fused:
        model.save_pretrained(folder)
    truth = dict(model.state_dict())
    parts = {}
    for name, weight in model.state_dict().items():
        if name.startswith(EXPERTS):
            if fused:
                parts[name] = (name, weight)
            else:
                for expert, own in enumerate(weight):
                    halves = own.chunk(2) if name.endswith("gate_up_proj") else [own]
                    for part, half in zip(
                        ("gate_proj", "up_proj") if len(halves) == 2 else ("down_proj",), halves, strict=True
                    ):
                        parts[f"{EXPERTS}.{expert}.{part}.weight"] = (name, half)
        else:
            parts[name] = (name, weight)
    stored, found = {}, {}
    for name, (whole, weight) in parts.items():
        if "proj" not in name:
            stored[name] = weight.clone()
            continue
        codes = (torch.randn(weight.shape) * 60).to(torch.float8_e4m3fn)
        scales, factors = scales_of(
            list(weight.shape), "[E]" if fused and weight.dim() == 3 and share == "()" else share
        )
        stored[name] = codes
        if name not in forget:
            stored[name + ending] = scales.to(scale_dtype)
        if "static" in str(section):
            stored[f"{name.removesuffix('.weight')}.input_scale"] = torch.ones(())
        found.setdefault(whole, []).append((codes.float() * factors).bfloat16())
    for name, own in found.items():
        stacked = name.startswith(EXPERTS) and not fused
        if stacked and name.endswith("gate_up_proj"):
            own = [torch.cat(own[expert : expert + 2]) for expert in (0, 2)]
        truth[name] = torch.stack(own) if stacked else own[0]
    folder.mkdir(exist_ok=True)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    values = model.config.to_dict() | ({} if section is None else {"quantization_config": section})
    (folder / "config.json").write_text(json.dumps(values))
    if file is not None:
        (folder / "hf_quant_config.json").write_text(json.dumps({"producer": {}, "quantization": file}))
    return truth


def served_weight(model, name):
    """A weight as evaluation has it: of products of codes what these stand for."""
    parameter = model.get_parameter(name)
    held = getattr(parameter, UNSHARDED, None)
    return parameter.detach() if held is None else held.dequantize(torch.bfloat16)


KINDS = {"dense": ("llama", False), "experts": ("qwen3_moe", False), "stacks": ("qwen3_moe", True)}


@pytest.mark.parametrize("stored", KINDS)
@pytest.mark.parametrize("method", READ)
def test_codes_are_read_as_their_maker_cast_them(method, stored, tmp_path):
    kind, fused = KINDS[stored]
    # All pairs of method, kind and sizes.
    sizes = (WHOLE, RAGGED)[(list(READ).index(method) + list(KINDS).index(stored)) % 2]
    truth = write(tmp_path / "fp8", method, kind, sizes, fused)
    model = trained(tmp_path / "fp8")
    state = model.state_dict()
    assert state.keys() == truth.keys()
    assert [name for name in truth if not torch.equal(state[name], truth[name])] == []
    evaluated, serving = load_served_model(tmp_path / "fp8", "cpu", {"dtype": torch.bfloat16})
    assert [name for name in truth if not torch.equal(served_weight(evaluated, name), truth[name])] == []
    codes = 7 if kind == "llama" else 4 + (2 if fused else 6)
    assert len(serving.layers) + len(serving.decoded) == codes
    assert bool(serving.note) == bool(serving.decoded)
    # What training saves is a plain model.
    if method == "fp8 128x128" and not fused:
        model.save_pretrained(tmp_path / "bf16")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "bf16").state_dict()
        assert all(torch.equal(again[name], truth[name]) for name in truth)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e8m0fnu])
def test_scales_of_other_types(dtype, tmp_path):
    truth = write(tmp_path / "fp8", "fp8 128x128", scale_dtype=dtype)
    assert torch.equal(trained(tmp_path / "fp8").get_parameter(DOWN), truth[DOWN])


REFUSED = {  # what is wrong: method, changes of tensors, words of the error beside the weight's name
    "one scale missing": ("fp8 128x128", lambda t: t.pop(f"{DOWN}_scale_inv"), "no scale"),
    "one scale missing, no section": ("no section by tensor", lambda t: t.pop(f"{DOWN}_scale"), "no scale"),
    "two scales": ("fp8 128x128", lambda t: t.update({f"{DOWN}_scale": torch.ones(1)}), "_scale_inv and"),
    "another block": ("fp8 64x64", lambda t: t.update({f"{DOWN}_scale_inv": torch.ones(2, 3)}), "64x64 blocks"),
    "no block stated": ((fp8(), None, "_scale_inv", (128, 128)), None, "one a tensor or one a channel"),
    "no section, blocks": ((None, None, "_scale_inv", (128, 128)), None, "one a tensor or one a channel"),
    "channels where blocks are stated": ((fp8(B128), None, "_scale", "[N]"), None, "128x128 blocks"),
    "packed scales": ("fp8 128x128", lambda t: t.update({f"{DOWN}_scale_inv": torch.ones(2, 3).byte()}), "U8"),
    "scale of a weight that is none": (
        "fp8 by tensor", lambda t: t.update({DOWN: t[DOWN].bfloat16()}), f"{DOWN}_scale met no FP8 weight"),
    "second scale": ("fp8 by tensor", lambda t: t.update({f"{DOWN}_scale_2": torch.ones(1)}), "_scale_2 met no"),
    **{
        f"compressed {change}": ((section, None, "_scale", "[N, 1]"), None, 'quantised with "compressed-tensors"')
        for change, section in {
            **{str(c): ct("channel", **c) for c in ({"num_bits": 4}, {"type": "int"}, {"symmetric": False})},
            "by group": ct("group"),
            "packed": ct("channel") | {"format": "pack-quantized"},
        }.items()
    },
    "nvfp4": ((modelopt("NVFP4"), None, "_scale", "()"), None, 'quantised with "modelopt NVFP4"'),
    "mixed": ((None, {"quant_algo": "MIXED_PRECISION"}, "_scale", "()"), None, "modelopt MIXED_PRECISION"),
    "gptq": (({"quant_method": "gptq", "bits": 4}, None, "_scale", "()"), None, 'quantised with "gptq"'),
    "no name of an algorithm": ((None, {"quant_algo": ["FP8"]}, "_scale", "()"), None, "modelopt ['FP8']"),
    "no object in ModelOpt's file": ((None, [1], "_scale", "()"), None, 'quantised with "hf_quant_config.json"'),
    "a list of groups": ((ct("channel") | {"config_groups": [1]}, None, "_scale", "[N, 1]"), None, "compressed"),
    "a group that is none": ((ct("channel") | {"config_groups": {"g": 1}}, None, "_scale", "()"), None, "compressed"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_refused_by_name(case, tmp_path):
    method, change, words = REFUSED[case]
    write(tmp_path / "fp8", method)
    if change is not None:
        tensors = load_file(tmp_path / "fp8" / "model.safetensors")
        change(tensors)
        save_file(tensors, tmp_path / "fp8" / "model.safetensors", metadata={"format": "pt"})
    for load in (trained, lambda folder: load_served_model(folder, "cpu", {"dtype": torch.bfloat16})):
        with refused(text=words) as caught:
            load(tmp_path / "fp8")
        assert "proj.weight" in str(caught.value) or "quantised with" in str(caught.value)


@pytest.mark.parametrize("text", ["{", "[1]", "[" * 20_000, '{"quantization": [1]}', '{"other": 1}'])
def test_a_quantization_that_cannot_be_read_is_refused(text, tmp_path):
    write(tmp_path / "fp8", (None, {"quant_algo": "FP8"}, "_scale", "()"))
    (tmp_path / "fp8" / "hf_quant_config.json").write_text(text)
    with refused(r'quantised with "hf_quant_config\.json"'):
        trained(tmp_path / "fp8")


def test_a_weight_by_the_name_of_a_scale_of_activations_is_loaded(tmp_path):
    """As Gemma 3n's altup.correct_output_scale."""
    stored = {
        "a.weight": torch.zeros(4, 4, dtype=torch.float8_e4m3fn),
        "a.weight_scale": torch.ones(()),
        "a.input_scale": torch.ones(1),
        "altup.correct_output_scale": torch.ones(4, dtype=torch.bfloat16),
    }
    save_file(stored, tmp_path / "model.safetensors")
    with ExitStack() as opened:
        found = stored_tensors([tmp_path / "model.safetensors"], {}, "model.path", opened)
        assert found.keys() == {"a.weight", "altup.correct_output_scale"}


def test_pickled_codes_are_refused(tmp_path):
    write(tmp_path / "fp8", "no section by tensor")
    torch.save(load_file(tmp_path / "fp8" / "model.safetensors"), tmp_path / "fp8" / "pytorch_model.bin")
    (tmp_path / "fp8" / "model.safetensors").unlink()
    with refused("not in safetensors"):
        trained(tmp_path / "fp8")


def test_an_attention_that_a_folder_names_is_not_fetched(tmp_path):
    """A name with an owner is a kernel on the hub: transformers fetches it, or asks for the package that does."""
    write(tmp_path / "fp8", "fp8 128x128")
    trained(tmp_path / "fp8").save_pretrained(tmp_path / "bf16")
    for folder in (tmp_path / "fp8", tmp_path / "bf16"):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"_attn_implementation": "evilowner/flash-attn"}))
        trained(folder)
        model, _ = load_served_model(folder, "cpu", {"attn_implementation": "sdpa"})
        assert model.config._attn_implementation == "sdpa"
