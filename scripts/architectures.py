"""Train tiny models of many Hugging Face architectures with ZeRO-3, in FP8 beside BF16, and print a table.

    python scripts/architectures.py                            every architecture below, then the table
    python scripts/architectures.py mixtral mamba              only these, again
    python scripts/architectures.py --results FILE --table     the table of what FILE holds already

Every architecture is built from its configuration class with a hidden size of 256 and two layers where it takes these,
filled with random numbers, and trained for 10 steps on two ranks over gloo: once by plain DeepSpeed in BF16, once with
"fp8": {}, from the same weights on the same random tokens. Results are appended to a file of JSON lines, and what it
holds is not run again unless it is named. The processes are kept from one architecture to the next, until one fails.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.ranks import RankDied, RankPools

STEPS, ROWS, LENGTH, RANKS = 10, 2, 32, 2
LARGEST = 40_000_000  # Parameters above which a configuration has not become small

# Set where a configuration has a field of this name.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "moe_intermediate_size"), 256),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "vocab_size"), 512),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace", "bos_token_id"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "max_position_embeddings"), 128),
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "head_dim": 64,
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size"), 16),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 32),
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

# What an architecture needs besides, or instead (None: its own default).
CHANGES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": "auto"},
    "deepseek_v2": {"num_key_value_heads": 4},
    "deepseek_v3": {"num_key_value_heads": 4},
    "falcon": {"head_dim": None},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_ssm": 512},
    "gemma4_text": {"head_dim": None},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1, "expert_layer_period": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "minicpm3": {"num_key_value_heads": 4},
    "mamba2": {"num_heads": 8, "head_dim": 64},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 64},
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"], "mamba_headdim": 64},
}

ARCHITECTURES = """
    llama mistral qwen2 qwen3 gemma gemma2 gemma3_text olmo olmo2 cohere starcoder2 granite smollm3 glm phi phi3
    falcon gpt2 gpt_neox opt bloom mixtral qwen2_moe qwen3_moe deepseek_v3 llama4_text mamba falcon_mamba jamba mamba2
    bamba falcon_h1 recurrent_gemma qwen3_next nemotron_h lfm2 gpt_oss granitemoe granitemoehybrid olmoe phimoe
    deepseek_v2 glm4_moe dots1 ernie4_5 ernie4_5_moe exaone4 hunyuan_v1_dense cohere2 glm4 olmo3 stablelm gptj gpt_neo
    gpt_bigcode codegen mpt persimmon nemotron helium arcee apertus diffllama ministral seed_oss minicpm3 biogpt xglm
    afmoe aria_text bitnet ctrl cwm doge flex_olmo hunyuan_v1_moe hyperclovax jetmoe
""".split()  # noqa: SIM905


def tiny_config(architecture: str) -> Any:
    from transformers import AutoConfig

    known = AutoConfig.for_model(architecture)
    wanted = {key: value for key, value in SIZES.items() if key in vars(known) or key in known.attribute_map}
    wanted |= CHANGES.get(architecture, {})
    return AutoConfig.for_model(architecture, **{key: value for key, value in wanted.items() if value is not None})


def train(architecture: str, fp8: dict | None) -> dict[str, Any]:
    """Train a model for STEPS steps on this rank. Return its losses, averaged over ranks, and the start report."""
    import logging

    import torch
    from deepspeed import comm as dist
    from transformers import AutoModelForCausalLM

    import ds_fp8

    logging.getLogger("ds_fp8").setLevel(logging.ERROR)  # the report is returned
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(architecture), dtype=torch.bfloat16).train()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if parameters > LARGEST:
        raise ValueError(f"{parameters:,} parameters: the configuration has not become small")
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        # Prefetch and reuse off: a model this small would otherwise stay gathered, and backward would gather nothing.
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "stage3_prefetch_bucket_size": 0,
            "stage3_max_reuse_distance": 0,
        },
    } | ({} if fp8 is None else {"fp8": fp8})
    engine, *_ = ds_fp8.initialize(model=model, model_parameters=model.parameters(), config=config)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    vocabulary = min(512, model.config.vocab_size)
    batches = [torch.randint(3, vocabulary, (ROWS, LENGTH), generator=generator) for _ in range(2)]
    losses = []
    for step in range(STEPS):
        ids = batches[step % len(batches)]
        loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        mean = loss.detach().float().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    report = engine.fp8.report if fp8 is not None else {}
    engine.destroy()
    return {"class": type(model).__name__, "parameters": parameters, "losses": losses, "report": report}


def train_or_refuse(architecture: str) -> dict[str, Any]:
    """Train in FP8 on this rank; return the reason in place of losses where the package refuses the model."""
    from ds_fp8.config.errors import UserError

    try:
        return train(architecture, {})
    except UserError as refusal:
        return {"reason": str(refusal)}


def compare(ranks: RankPools, architecture: str) -> dict[str, Any]:
    """Train an architecture twice, BF16 first, and return one line of results."""
    result: dict[str, Any] = {"architecture": architecture, "status": "fails in BF16"}
    try:
        bf16 = ranks(RANKS, train, architecture, None)[0]
        result |= {"class": bf16["class"], "parameters": bf16["parameters"], "bf16": bf16["losses"]}
        result["status"] = "fails in FP8"
        fp8 = ranks(RANKS, train_or_refuse, architecture)[0]
    except (AssertionError, RankDied) as error:
        return result | {"traceback": str(error)}
    if "reason" in fp8:
        return result | {"status": "refused", "reason": fp8["reason"]}
    return result | {"status": "trained", "fp8": fp8["losses"], "report": fp8["report"]}


def _failed(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [result for result in results if result["status"] not in ("trained", "refused")]


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """Return the last line of results of each architecture in a file; nothing where there is no file."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {result["architecture"]: result for result in map(json.loads, lines)}


def table(results: dict[str, dict[str, Any]]) -> str:
    lines = [
        "| architecture | parameters in FP8 | fused | loss BF16 | loss FP8 | gap | the largest part that stays BF16 |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in sorted(results):
        lines.append(f"| {name} | " + " | ".join(_cells(results[name])) + " |")
    return "\n".join(lines)


def _cells(result: dict[str, Any]) -> list[str]:
    if result["status"] != "trained":
        reason = (result.get("reason") or result["status"]).splitlines()[0]
        first = f"{result['bf16'][0]:.3f} → {result['bf16'][-1]:.3f}" if "bf16" in result else ""
        return ["", "", first, result["status"], "", reason]
    report, bf16, fp8 = result["report"], result["bf16"], result["fp8"]
    counts = (
        (report["fused_layers"], "layer", "layers"),
        (report.get("fused_attention_halves", 0), "attention half", "attention halves"),
        (report["fused_mlps"], "MLP", "MLPs"),
    )
    fused = [f"{count} {one if count == 1 else several}" for count, one, several in counts if count]
    in_fp8 = report["fp8_parameters"] + report.get("fp8_gathered_experts", 0)
    gap = fp8[-1] - bf16[-1]
    kept = max(report.get("kept_in_bf16", []), key=lambda part: part["parameters"], default=None)
    return [
        f"{in_fp8 / report['parameters']:.0%}",
        " and ".join(fused) or "no",
        f"{bf16[0]:.3f} → {bf16[-1]:.3f}",
        f"{fp8[0]:.3f} → {fp8[-1]:.3f}",
        f"{gap:+.3f}",
        f"{kept['parameters'] / report['parameters']:.0%}: {kept['reason']}" if kept else "",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="ARCHITECTURE", help="run these, also where there is a result")
    parser.add_argument("--results", type=Path, default=Path("architectures.jsonl"), metavar="FILE")
    parser.add_argument("--table", action="store_true", help="run nothing, print the table")
    arguments = parser.parse_args()

    results = read_results(arguments.results)
    wanted = arguments.names or [name for name in ARCHITECTURES if name not in results]
    ranks = RankPools()
    for name in [] if arguments.table else wanted:
        results[name] = result = compare(ranks, name)
        with arguments.results.open("a", encoding="utf-8") as file:
            print(json.dumps(result), file=file)
        print(f"{name}: {result['status']}", *(result.get("traceback") or "").splitlines()[-1:], flush=True)
    ranks.close()
    print(table(results))
    return 0 if not _failed(list(results.values())) else 1


if __name__ == "__main__":
    raise SystemExit(main())
