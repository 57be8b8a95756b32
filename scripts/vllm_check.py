"""Load an exported folder in vLLM, and compare what it holds and computes with the folder itself.

python scripts/vllm_check.py FOLDER [--positions 2048]

Counts tensors that vLLM holds byte for byte, and those in other bytes that stand for the same numbers (DeepGEMM doubles
the codes of a block whose largest is 224 or less, and halves its scale); compares the likeliest next tokens, and greedy
text, with those of transformers, which decodes FP8 to BF16. Exit status 1 where a server holds other numbers.
"""

from __future__ import annotations

import argparse
import os
from collections import Counter
from pathlib import Path

import torch
from safetensors.torch import load_file

from ds_fp8.config.formats import BLOCK, scale_shape
from ds_fp8.integrations.vllm_model import names_in_folder

LENGTH = 256
EQUAL, REWRITTEN = "equal", "the same numbers in other bytes"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--positions", type=int, default=2048, help="next tokens that are compared")
    arguments = parser.parse_args()
    from transformers import AutoConfig, AutoModelForCausalLM

    size = AutoConfig.from_pretrained(arguments.folder).get_text_config().vocab_size
    rows = max(1, -(-arguments.positions // (LENGTH - 1)))
    prompts = torch.randint(0, size, (rows, LENGTH), generator=torch.Generator().manual_seed(0)).tolist()
    model = AutoModelForCausalLM.from_pretrained(arguments.folder, dtype=torch.bfloat16).cuda().eval()
    with torch.no_grad():
        inputs = [torch.tensor([prompt], device="cuda") for prompt in prompts]
        expected = [model(input_ids=row).logits[0, :-1].argmax(-1).tolist() for row in inputs]
        text = model.generate(inputs[0], do_sample=False, min_new_tokens=16, max_new_tokens=16)[0, LENGTH:].tolist()
    del model
    torch.cuda.empty_cache()
    verdicts, found, served_text = _by_vllm(arguments.folder, prompts)
    counts = Counter(verdicts.values())
    other = {name: verdict for name, verdict in verdicts.items() if verdict not in (EQUAL, REWRITTEN)}
    print(
        f"{counts[EQUAL]} tensors equal, {counts[REWRITTEN]} in other bytes for the same numbers, {len(other)} differ"
    )
    for name, why in list(other.items())[:5]:
        print(f"  {name}: {why}")
    differ = sum(a != b for own, two in zip(found, expected, strict=True) for a, b in zip(own, two, strict=True))
    print(f"another likeliest token than in transformers at {differ} of {rows * (LENGTH - 1)} positions")
    alike = next((i for i, (a, b) in enumerate(zip(served_text, text, strict=True)) if a != b), len(text))
    print(f"greedy text: the same for {alike} of {len(text)} tokens")
    return 1 if other else 0


def _by_vllm(folder: Path, prompts: list[list[int]]) -> tuple[dict[str, str], list[list[int]], list[int]]:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in this process, so that its tensors can be read
    from vllm import LLM, SamplingParams

    llm = LLM(str(folder), skip_tokenizer_init=True, enforce_eager=True, max_model_len=LENGTH + 32, max_logprobs=1)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    scores = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
    likeliest = [
        [min(entry.items(), key=lambda item: item[1].rank)[0] for entry in answer.prompt_logprobs[1:]]
        for answer in llm.generate(inputs, scores, use_tqdm=False)
    ]
    text = llm.generate(inputs[:1], greedy, use_tqdm=False)[0].outputs[0].token_ids
    model = llm.llm_engine.model_executor.driver_worker.model_runner.model
    return compare_tensors(model, folder), likeliest, list(text)


def compare_tensors(model: torch.nn.Module, folder: Path) -> dict[str, str]:
    """Return for each tensor of vLLM's model, and of the folder that it lacks: EQUAL, REWRITTEN, or how it differs."""
    stored = {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}
    names_of = names_in_folder(model)
    held, expected, result, used = {}, {}, {}, set()
    for name, parameter in model.named_parameters():
        if "attn" in name.split(".")[-3:-1]:
            continue  # scales of the cache
        parts = names_of(name)
        missing = next((part for part in parts if part not in stored), None)
        if missing is not None:
            result[name] = f"the folder has no {missing}"
            continue
        used.update(parts)
        held[name] = parameter.detach().cpu()
        if held[name].dim() == 3:
            held[name] = held[name].flatten(0, 1)  # experts, one below the other
        expected[name] = torch.cat([stored[part].reshape(stored[part].shape or (1,)) for part in parts])
        result[name] = _beside(held[name], expected[name])
    tied = {"lm_head.weight"} if getattr(getattr(model, "config", None), "tie_word_embeddings", False) else set()
    result |= dict.fromkeys(sorted(set(stored) - used - tied), "vLLM's model has no such tensor")
    for scales in [name for name in held if name.endswith(("weight_scale_inv", "weight_scale"))]:
        codes = scales[: scales.rindex("weight")] + "weight"  # of experts "w13_weight"
        pair = [(found[codes], found[scales]) for found in (held, expected) if codes in found]
        alike = len(pair) == 2 and all(own.shape == other.shape for own, other in zip(*pair, strict=True))
        if alike and pair[0][1].shape == scale_shape(pair[0][0].shape, "128x128"):
            other = [name for name in (codes, scales) if result[name] != EQUAL]
            if other and _numbers(*pair[0]).equal(_numbers(*pair[1])):
                result |= dict.fromkeys(other, REWRITTEN)
    return result


def _numbers(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    rows, columns = codes.shape
    return codes.float() * scales.float().repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]


def _beside(held: torch.Tensor, expected: torch.Tensor) -> str:
    # vLLM pads vocabularies, and some kernels hold codes transposed.
    for own in (held, held[: len(expected)], held.t() if held.dim() == 2 else held):
        same_kind = own.dtype == expected.dtype and own.shape == expected.shape
        if same_kind and own.contiguous().view(torch.uint8).equal(expected.contiguous().view(torch.uint8)):
            return EQUAL
    return f"{held.dtype} {list(held.shape)} in vLLM holds other bytes than {expected.dtype} {list(expected.shape)}"


if __name__ == "__main__":
    raise SystemExit(main())
