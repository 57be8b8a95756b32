"""Export tiny models of many Hugging Face types, load the folders again, and print a table of what each came to.

    python scripts/check_exports.py                            every type below that RESULTS lacks, then the table
    python scripts/check_exports.py deepseek_v3 llava          only these, again
    python scripts/check_exports.py --jobs 16                  so many types at a time
    python scripts/check_exports.py --table                    the table of what RESULTS holds already

Every type is built from its configuration class in a process of its own (one rank, gloo), written by save_pretrained,
trained for a step by ds_fp8 with ZeRO-3 and exported in BF16 and in FP8. Right is a folder whose names, buffers and
their types are those of save_pretrained, and which transformers, and the loader of `train.init_from`, read to the very
logits of a model that is given the engine's numbers by hand. A line of JSON a type is appended to RESULTS.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from architectures import ARCHITECTURES, CHANGES, SIZES

TIMEOUT = 120
TEXT_ONLY = """
    deepseek_v32 deepseek_v4 glm4_moe_lite glm_moe_dsa minimax minimax_m2 kimi_linear lfm2_moe olmo_hybrid hrm_text
    qwen3_5_moe_text gemma4_text gemma3n_text ministral3 vaultgemma nanochat granitemoeshared solar_open exaone_moe
    cohere2_moe mellum hy_v4 glm5_next zamba2 axk2 longcat_flash dbrx mistral4 youtu
""".split()  # noqa: SIM905
MULTIMODAL = """
    llava llava_next mllama mistral3 qwen2_vl qwen2_5_vl qwen3_vl qwen3_vl_moe qwen3_5 qwen3_5_moe gemma3 gemma4
    paligemma aya_vision internvl aria idefics3 smolvlm llama4 glm4v glm4v_moe minimax_m3_vl
""".split()  # noqa: SIM905
TYPES = [*MULTIMODAL, *TEXT_ONLY, *reversed(ARCHITECTURES)]

MORE_SIZES: dict[str, Any] = {
    **dict.fromkeys(("embed_dim", "expert_ffn_hidden_size", "moe_latent_size", "out_hidden_size"), 256),
    **dict.fromkeys(("text_hidden_size", "projection_dim", "proj_hidden_size"), 256),
    **dict.fromkeys(("vocab_size_per_layer_input", "shared_expert_intermediate_size", "mlp_dim"), 512),
    **dict.fromkeys(("dense_intermediate_size", "intermediate_size_mlp", "max_position_embeddings"), 512),
    **dict.fromkeys(("num_layers", "depth", "n_layers", "moe_topk", "top_k_experts", "moe_k", "index_n_heads"), 2),
    **dict.fromkeys(("o_lora_rank", "index_head_dim"), 128),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "hidden_size_per_layer_input"), 32),
    **dict.fromkeys(("num_nextn_predict_layers", "num_kv_shared_layers"), 0),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "global_head_dim", "mamba_d_head"), 64),
    **dict.fromkeys(("num_channels", "in_channels"), 3),
    "num_shared_experts": 1,
    "num_heads": 4,
    "index_topk": 16,
    "mamba_n_heads": 8,
    "image_size": 56,
    "patch_size": 14,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
OF_TOWERS = {"hidden_size": 128, "embed_dim": 128, "intermediate_size": 256}
NOT_OF_TOWERS = {"head_dim", "vocab_size", "num_key_value_heads"}
HYBRID = ["linear_attention", "full_attention"]
GEMMA = ["sliding_attention", "full_attention"]
MORE_CHANGES: dict[str, dict[str, Any]] = {
    "gemma3n_text": {"layer_types": GEMMA, "activation_sparsity_pattern": [0.95, 0.0], "intermediate_size": [512, 512]}
    | {"laurel_rank": 16},
    "gemma4_text": {"layer_types": GEMMA},
    **{kind: {"layer_types": HYBRID} for kind in ("qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "minimax")},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "qwen2_vl_text": {"num_attention_heads": 2, "num_key_value_heads": 1},
    "qwen2_5_vl_text": {"num_attention_heads": 2, "num_key_value_heads": 1},
    "glm4v_moe_text": {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128},
    "mllama_text_model": {"cross_attention_layers": [1]},
    **{kind: {"num_key_value_heads": 4} for kind in ("deepseek_v32", "glm_moe_dsa", "glm4_moe_lite", "longcat_flash")},
}


def tiny_config(kind: str) -> Any:
    """Return a configuration of a type with small sides, towers and text model too."""
    from transformers import CONFIG_MAPPING

    known = CONFIG_MAPPING[kind]()
    parts = getattr(type(known), "sub_configs", None) or {}
    if not any("text" in name for name in parts):
        return CONFIG_MAPPING[kind](**_sizes(known, kind))
    wanted: dict[str, Any] = {}
    for name, part_class in parts.items():
        part = getattr(known, name, None)
        if part is None and hasattr(part_class, "model_type"):
            part = part_class()
        if part is not None and not getattr(part, "sub_configs", None):
            sizes = _sizes(part, part.model_type)
            if "text" not in name:
                sizes = {key: OF_TOWERS.get(key, own) for key, own in sizes.items() if key not in NOT_OF_TOWERS}
            wanted[name] = {**sizes, "model_type": part.model_type}
    tokens = [key for key in vars(known) if re.search(r"_token_(id|index)$", key) and key not in SIZES]
    wanted |= {key: 500 + place for place, key in enumerate(tokens)}
    wanted |= {k: SIZES[k] for k in ("hidden_size", "pad_token_id", "vocab_size") if k in vars(known)}
    return CONFIG_MAPPING[kind](**wanted)


def _sizes(known: Any, kind: str) -> dict[str, Any]:
    names = vars(known).keys() | getattr(known, "attribute_map", {}).keys()
    wanted = {key: value for key, value in {**SIZES, **MORE_SIZES}.items() if key in names}
    wanted |= CHANGES.get(kind, {}) | MORE_CHANGES.get(kind, {})
    return {key: value for key, value in wanted.items() if value is not None}


def check(kind: str, folder: Path) -> dict[str, Any]:
    """Train, export and load a model of a type in this process."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    import ds_fp8
    from ds_fp8.config.errors import UserError
    from ds_fp8.export import export_engine, served_weights
    from ds_fp8.export.engines import served_plan, unsharded_entries
    from ds_fp8.layers.published import stored_buffers

    auto = AutoModelForImageTextToText if kind in MULTIMODAL else AutoModelForCausalLM
    torch.manual_seed(0)
    result: dict[str, Any] = {"type": kind, "status": "not built"}
    try:
        model = auto.from_config(tiny_config(kind), dtype=torch.bfloat16)
        with torch.no_grad():
            for buffer in stored_buffers(model).values():
                if buffer.is_floating_point():
                    buffer += 0.25 * torch.rand_like(buffer, dtype=torch.float32).to(buffer.dtype)
        result |= {"class": type(model).__name__, "status": "not trained in BF16"}
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(3, 200, (2, 48), generator=generator)
        inputs = {"input_ids": ids, "use_cache": False}
        if model.config.model_type in ("gemma3", "paligemma"):
            inputs["token_type_ids"] = torch.zeros_like(ids)
        if model.config.model_type == "gemma4":
            inputs["mm_token_type_ids"] = torch.zeros_like(ids)
        model.train()(**inputs, labels=ids).loss.backward()
        model.zero_grad(set_to_none=True)
        model.save_pretrained(folder / "saved")
        result["status"] = "not trained in FP8"
        zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "bf16": {"enabled": True},
            "steps_per_print": 10**9,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
            "zero_optimization": zero,
            "fp8": {"monitor": {"every": 0}, "graph": "off"},
        }
        engine, *_ = ds_fp8.initialize(model=model, model_parameters=model.parameters(), config=config)
        engine.backward(engine(**inputs, labels=ids).loss)
        engine.step()
        engine.eval()
    except Exception as error:
        return result | {"reason": _words(error)}
    saved, right = _tensors(folder / "saved"), True  # written by the first rank, before they met
    result |= {"status": "wrong", "buffers": len(stored_buffers(model))}
    stock = None
    try:
        _logits(auto.from_pretrained(folder / "saved", dtype=torch.bfloat16), inputs)
    except Exception as error:
        stock = _words(error)
    for layout in ("bf16", "fp8"):
        found = result[layout] = {}
        out = folder / layout
        try:
            plan = export_engine(engine, out, layout=layout)
            found["in FP8"], found["left"] = len(plan.quantized), sorted(set(plan.left.values()))
            held = {name: own for name, own in _tensors(out).items() if not name.endswith("_scale_inv")}
            found["lacks"] = sorted(saved.keys() - held.keys())
            found["has besides"] = sorted(held.keys() - saved.keys())
            # As the engine holds it, codes decoded, under transformers' names.
            whole: dict[str, torch.Tensor] = {}
            for entry, numbers in unsharded_entries(engine, plan):
                for name, own in numbers.items():
                    whole[name] = own.dequantize(torch.bfloat16) if entry.quantized else own
                    whole[name] = whole[name].view(entry.form.shapes[name])
            twin = auto.from_config(tiny_config(kind), dtype=torch.bfloat16)
            twin.load_state_dict(whole, strict=False)
            names = {name for name, _ in twin.named_parameters()} | stored_buffers(twin).keys()
            found["not in the plan"] = sorted(names - whole.keys())
            read, info = auto.from_pretrained(out, dtype=torch.bfloat16, output_loading_info=True)
            found["missing"] = sorted(map(str, info["missing_keys"])) + sorted(map(str, info["unexpected_keys"]))
            found["logits"] = _computes_as(read, twin, inputs)
            found["buffers"] = _same(stored_buffers(read), stored_buffers(engine.module))
            if layout == ("fp8" if served_plan(engine).quantized else "bf16"):
                served = {}
                for name, codes, scales in served_weights(engine):
                    served |= {name: codes} if scales is None else {name: codes, f"{name}_scale_inv": scales}
                found["served"] = _same(served, _tensors(out))
            if auto is AutoModelForCausalLM:
                from ds_fp8.train.stored_model import ModelSource, load_stored_model, stored_config

                source = ModelSource("FOLDER", str(out))
                again = load_stored_model(source, stored_config(source), {})
                found["logits, own loader"] = _computes_as(again, twin, inputs)
        except UserError as error:
            said = any(error.problem in note for note in engine.fp8.report["notes"])
            found["said at the start, and refused" if said else "refused"] = _words(error)
            found["buffers"] = said
        except Exception as error:
            found["traceback"] = _words(error)
            if _words(error) == stock:
                found |= {"as after save_pretrained": found.pop("traceback"), "buffers": True}
        empty = ("lacks", "has besides", "missing", "not in the plan", "refused", "traceback")
        right &= not any(found.get(key) for key in empty) and found.get("buffers", False)
        right &= all(own for key, own in found.items() if key.startswith(("logits", "served")))
    return result | ({"status": "right"} if right else {})


def _computes_as(model: Any, twin: Any, inputs: dict[str, Any]) -> bool:
    import torch

    for name, own in model.named_parameters():  # some weights are read in FP32
        twin.get_parameter(name).data = twin.get_parameter(name).data.to(own.dtype)
    stored = model.state_dict().keys()
    for name, own in model.named_buffers():  # what no folder holds is what transformers makes of it (GPT-J, CodeGen)
        if name not in stored:
            twin.get_buffer(name).data = own
    return bool(torch.equal(_logits(model, inputs), _logits(twin, inputs)))


def _logits(model: Any, inputs: dict[str, Any]) -> Any:
    import torch

    with torch.no_grad():
        return model.eval()(**inputs).logits


def _same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Return whether tensors are the same by name, type and number."""
    import torch

    same = (
        own.dtype == expected[n].dtype and torch.equal(own.cpu().float(), expected[n].cpu().float())
        for n, own in found.items()
        if n in expected
    )
    return found.keys() == expected.keys() and all(same)


def _tensors(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return {name: own for file in folder.glob("*.safetensors") for name, own in load_file(file).items()}


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {getattr(error, 'problem', str(error)[:300])}"


def run(kind: str) -> dict[str, Any]:
    """Check a type in a process of its own."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
        environment = os.environ | alone | {"MASTER_PORT": str(free.getsockname()[1]), "OMP_NUM_THREADS": "1"}
        free.close()
        start = time.monotonic()
        command = [sys.executable, __file__, "--one", kind, "--folder", folder]
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False
            )
        except subprocess.TimeoutExpired:
            return {"type": kind, "status": "timeout"}
        line = next((line for line in reversed(done.stdout.splitlines()) if line.startswith('{"type"')), None)
        end = (done.stderr or done.stdout).splitlines()[-1:]
        result = json.loads(line) if line else {"type": kind, "status": "died", "reason": " ".join(end)[:300]}
        return result | {"seconds": round(time.monotonic() - start, 1)}


def table(results: dict[str, dict[str, Any]]) -> str:
    lines = ["| type | status | buffers | in FP8 | not right, or in BF16 because |", "|---|---|---|---|---|"]
    for kind in sorted(results):
        own = results[kind]
        wrong = [own.get("reason", "")]
        for layout in ("bf16", "fp8"):
            part = own.get(layout, {})
            wrong += [f"{layout}: {key} {str(part[key])[:160]}" for key in part if _is_wrong(key, part[key])]
        if own["status"] == "right":
            wrong = own["fp8"].get("left") or list(own["fp8"].values())[:1]
            wrong = [*wrong, own["fp8"].get("as after save_pretrained", "")]
        count = own.get("fp8", {}).get("in FP8", "")
        lines.append(
            f"| {kind} | {own['status']} | {own.get('buffers', '')} | {count} | {'; '.join(filter(None, wrong))} |"
        )
    return "\n".join(lines)


def _is_wrong(key: str, value: Any) -> bool:
    if key.startswith(("logits", "buffers", "served")):
        return not value
    return key not in ("in FP8", "left", "as after save_pretrained") and bool(value)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="TYPE", help="check these, also where there is a result")
    parser.add_argument("--results", type=Path, default=Path("exports.jsonl"), metavar="FILE")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="types at a time (default 1)")
    parser.add_argument("--table", action="store_true", help="run nothing, print the table")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        # Here and not in `check`, which tests call in processes that go on with other tests.
        logging.getLogger("ds_fp8").setLevel(logging.ERROR)
        logging.getLogger("transformers").setLevel(logging.ERROR)
        print(json.dumps(check(arguments.one, arguments.folder)), flush=True)
        os._exit(0)  # an engine that has failed may leave threads behind
    lines = arguments.results.read_text(encoding="utf-8").splitlines() if arguments.results.exists() else []
    results = {result["type"]: result for result in map(json.loads, lines)}
    wanted = [] if arguments.table else arguments.names or [name for name in TYPES if name not in results]
    with ThreadPoolExecutor(max(1, arguments.jobs)) as threads, arguments.results.open("a", encoding="utf-8") as file:
        for result in threads.map(run, wanted):
            results[result["type"]] = result
            print(json.dumps(result), file=file, flush=True)
            print(f"{result['type']}: {result['status']} {result.get('seconds', '')}", flush=True)
    print(table(results))
    return (
        0
        if all(result["status"] in ("right", "not built", "not trained in BF16") for result in results.values())
        else 1
    )


if __name__ == "__main__":
    raise SystemExit(main())
