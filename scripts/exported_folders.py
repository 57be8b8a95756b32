"""Export an engine in both layouts, read the folders again, and compare them with the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from deepspeed import comm as dist
from safetensors.torch import load_file
from tiny_models import auto_class, reader, tiny_config, tokens, words

from ds_fp8.config.errors import UserError
from ds_fp8.export import export_engine, served_weights
from ds_fp8.export.engines import served_plan, unsharded_entries
from ds_fp8.layers.published import stored_buffers
from ds_fp8.train.stored_model import ModelSource, load_stored_model, stored_config

Model, Engine, Tensors = Any, Any, dict[str, torch.Tensor]


def exports(engine: Engine, name: str, folder: Path, saved: Path, note: Any) -> None:
    """Export in both layouts and compare the folders; `note` takes what is known at any time.

    Right is a folder whose names, buffers and their types are those of save_pretrained, and which transformers, and the
    loader of `train.init_from`, read to the very logits of a model that is given the engine's numbers by hand.
    """
    found: dict[str, str] = {}
    for layout in ("bf16", "fp8"):
        note(found | {layout: "killed"})
        try:
            out = folder / layout
            plan = export_engine(engine, out, layout=layout)
            numbers: Tensors = {}  # dequantized, under transformers' names
            for entry, parts in unsharded_entries(engine, plan):
                for key, own in parts.items():
                    number = own.dequantize(torch.bfloat16) if entry.quantized else own
                    numbers[key] = number.view(entry.form.shapes[key])
            served = None
            if layout == ("fp8" if served_plan(engine).quantized else "bf16"):
                served = {}
                for key, data, scale in served_weights(engine):
                    served |= {key: data} if scale is None else {key: data, f"{key}_scale_inv": scale}
            # Ranks hold the same from here on: one reads.
            buffers = stored_buffers(engine.module)
            wrong = compare_folder(name, out, saved, numbers, buffers, served) if dist.get_rank() == 0 else []
            found[layout] = "; ".join(wrong) or f"right, {len(plan.quantized)} in FP8" * (layout == "fp8") or "right"
        except UserError as error:
            told = any(error.problem in line for line in engine.fp8.report["notes"])
            found[layout] = f"{'refused, said at the start' if told else 'WRONG: refused'}: {error.problem}"
        except Exception as error:
            found[layout] = f"TRACEBACK {words(error)}"
        note(found)


def compare_folder(
    name: str, out: Path, saved: Path, numbers: Tensors, buffers: Tensors, served: Tensors | None
) -> list[str]:
    """Return what of a folder is not as it should be."""
    auto, wrong = reader(name, out), []
    expected = _tensors(saved).keys()
    held = {key for key in _tensors(out) if not key.endswith("_scale_inv")}
    by_hand = auto_class(name).from_config(tiny_config(name), dtype=torch.bfloat16)
    by_hand.load_state_dict(numbers, strict=False)
    names = {key for key, _ in by_hand.named_parameters()} | stored_buffers(by_hand).keys()
    differences = {"lacks": expected - held, "has besides": held - expected, "not planned": names - numbers.keys()}
    wrong += [f"WRONG {text} {sorted(own)[:3]}" for text, own in differences.items() if own]
    if wrong and (lost := auto.from_pretrained(saved, output_loading_info=True)[1]["missing_keys"]):
        wrong = [f"as after save_pretrained: reads none of {sorted(lost)[:3]}"]
    try:
        read, info = auto.from_pretrained(out, dtype=torch.bfloat16, output_loading_info=True)
        strange = sorted(map(str, [*info["missing_keys"], *info["unexpected_keys"]]))
        wrong += [f"WRONG missing or unexpected {strange[:3]}"] if strange else []
        stock = by_hand
        if not _computes_as(read, by_hand):  # transformers may change what it reads
            by_hand.save_pretrained(out / "stock")
            stock = auto.from_pretrained(out / "stock", dtype=torch.bfloat16)
            changed = [key for key, own in by_hand.named_parameters() if not own.equal(read.get_parameter(key))]
            as_stock = _computes_as(read, stock)
            wrong.append(f"as after save_pretrained: other {changed[:3]}" if as_stock else "WRONG logits")
        # transformers reads some in FP32 that zero.Init has in BF16
        kept = {key: own.to(buffers[key].dtype) for key, own in stored_buffers(read).items() if key in buffers}
        wrong += [] if _same(kept, buffers) else ["WRONG buffers"]
    except Exception as error:
        try:
            _logits(auto.from_pretrained(saved, dtype=torch.bfloat16))
        except Exception as stock:
            return [*wrong, f"as after save_pretrained: {words(stock)}"]
        return [*wrong, f"WRONG cannot be read: {words(error)}"]
    if served is not None and not _same(served, _tensors(out)):
        wrong.append("WRONG weights as served")
    if auto.__name__ == "AutoModelForCausalLM":
        source = ModelSource("FOLDER", str(out))
        again = load_stored_model(source, stored_config(source), {})
        wrong += [] if _computes_as(again, stock) else ["WRONG logits by this package's loader"]
    return wrong


def _computes_as(model: Model, other: Model) -> bool:
    for name, own in model.named_parameters():  # some weights are read in FP32
        other.get_parameter(name).data = other.get_parameter(name).data.to(own.dtype)
    stored = model.state_dict().keys()
    for name, own in model.named_buffers():  # what no folder holds is what transformers makes of it (GPT-J, CodeGen)
        if name not in stored:
            other.get_buffer(name).data = own
    return bool(torch.equal(_logits(model), _logits(other)))


def _logits(model: Model) -> Any:
    with torch.no_grad():
        return model.eval()(input_ids=tokens(7)).logits


def _same(found: Tensors, expected: Tensors) -> bool:
    """Return whether tensors are the same by name, type and number."""
    same = (
        own.dtype == expected[n].dtype and torch.equal(own.cpu().float(), expected[n].cpu().float())
        for n, own in found.items()
        if n in expected
    )
    return found.keys() == expected.keys() and all(same)


def _tensors(folder: Path) -> Tensors:
    return {name: own for file in folder.glob("*.safetensors") for name, own in load_file(file).items()}
