"""A folder in vLLM beside the folder itself and transformers: `ds-fp8 export --check`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from ds_fp8.config.errors import UserError
from ds_fp8.config.formats import BLOCK, scale_shape
from ds_fp8.integrations.vllm_model import names_in_folder

LENGTH = 256
"""Tokens of a prompt."""
EQUAL, REWRITTEN = "equal", "the same numbers in other bytes"
SCALES = ("weight_scale_inv", "weight_scale")
"""Names of scales in the layouts fp8 and compressed-tensors, in folders and in vLLM."""


@dataclass(frozen=True)
class Served:
    """Results of `check_folder`."""

    equal: int
    """Tensors that vLLM holds byte for byte as the folder does."""
    rewritten: int
    """Codes and scales in other bytes that stand for the same numbers."""
    other: dict[str, str]
    """Name of any other -> how it differs."""
    positions: int
    other_argmax: int
    """Positions whose likeliest token is another in transformers."""
    text: list[int]
    reference_text: list[int]
    """Greedy tokens after the first prompt, by vLLM and by transformers."""


def check_folder(folder: Path | str, positions: int = 2048, prompts: Sequence[Sequence[int]] | None = None) -> Served:
    """Load an exported folder in vLLM and compare what it holds and computes.

    Args:
        folder: As `ds-fp8 export` writes it.
        positions: How many next tokens are compared with those of transformers, which decodes FP8 to BF16.
        prompts: Token ids; default: drawn from the vocabulary.

    Raises:
        UserError: vLLM is not installed, there is no GPU, or the folder does not exist.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} holds no model", remedy="give a folder that ds-fp8 export has written")
    if find_spec("vllm") is None:
        raise UserError("vLLM is not installed here", remedy="pip install vllm, in an environment with a GPU")
    if not torch.cuda.is_available():
        raise UserError("vLLM needs a GPU to compare with", remedy="run the check on a machine with one")
    from transformers import AutoConfig

    if prompts is None:
        size = AutoConfig.from_pretrained(folder).get_text_config().vocab_size
        generator = torch.Generator().manual_seed(0)
        shape = (max(1, -(-positions // (LENGTH - 1))), LENGTH)
        prompts = torch.randint(0, size, shape, generator=generator).tolist()
    reference, reference_text = _by_transformers(folder, prompts)
    torch.cuda.empty_cache()
    tensors, found, text = _by_vllm(folder, prompts)
    compared = [a != b for own, other in zip(found, reference, strict=True) for a, b in zip(own, other, strict=True)]
    counts = Counter(tensors.values())
    other = {name: verdict for name, verdict in tensors.items() if verdict not in (EQUAL, REWRITTEN)}
    return Served(counts[EQUAL], counts[REWRITTEN], other, len(compared), sum(compared), text, reference_text)


def _by_transformers(folder: Path, prompts: Sequence[Sequence[int]]) -> tuple[list[list[int]], list[int]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).cuda().eval()
    with torch.no_grad():
        rows = [torch.tensor([prompt], device="cuda") for prompt in prompts]
        likeliest = [model(input_ids=row).logits[0, :-1].argmax(-1).tolist() for row in rows]
        text = model.generate(rows[0], do_sample=False, min_new_tokens=16, max_new_tokens=16)
    return likeliest, text[0, len(prompts[0]) :].tolist()


def _by_vllm(folder: Path, prompts: Sequence[Sequence[int]]) -> tuple[dict[str, str], list[list[int]], list[int]]:
    import os

    # In this process, so that its tensors can be read.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    longest = max(len(prompt) for prompt in prompts) + 32
    llm = LLM(str(folder), skip_tokenizer_init=True, enforce_eager=True, max_model_len=longest, max_logprobs=1)
    inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    scores = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
    likeliest = []
    for answer in llm.generate(inputs, scores, use_tqdm=False):
        ranked = [min(entry.items(), key=lambda item: item[1].rank)[0] for entry in answer.prompt_logprobs[1:]]
        likeliest.append(ranked)
    text = llm.generate(inputs[:1], greedy, use_tqdm=False)[0].outputs[0].token_ids
    model: Any = llm.llm_engine.model_executor.driver_worker.model_runner.model
    return compare_tensors(model, folder), likeliest, list(text)


def compare_tensors(model: torch.nn.Module, folder: Path) -> dict[str, str]:
    """Return for each tensor of vLLM's model, stacked layers too, whether it holds a folder's bytes.

    Args:
        model: vLLM's model.
        folder: The folder that it was loaded from.

    Returns:
        By name: EQUAL; REWRITTEN for codes and scales of blocks that stand for the same numbers (DeepGEMM doubles the
        codes of a block whose largest is 224 or less, and halves its scale); else how they differ. Tensors of the
        folder that the model has not are listed too.
    """
    stored = _stored(folder)
    names_of = names_in_folder(model)
    held, expected, result = {}, {}, {}
    used: set[str] = set()
    for name, parameter in model.named_parameters():
        *head, layer, _ = name.split(".")
        if (head and head[-1] == "attn") or layer == "attn":
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
    for scales in [name for name in held if name.endswith(SCALES)]:
        codes = scales[: scales.rindex("weight")] + "weight"  # of experts "w13_weight"
        pair = [(found[codes], found[scales]) for found in (held, expected) if codes in found]
        alike = len(pair) == 2 and all(own.shape == other.shape for own, other in zip(*pair, strict=True))
        if alike and pair[0][1].shape == scale_shape(pair[0][0].shape, "128x128"):
            other = [name for name in (codes, scales) if result[name] != EQUAL]
            if other and _numbers(*pair[0]).equal(_numbers(*pair[1])):
                result |= dict.fromkeys(other, REWRITTEN)
    return result


def _stored(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a folder by name."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def _numbers(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return what codes [N, K] and the scales of their blocks stand for, FP32 [N, K]."""
    rows, columns = codes.shape
    factors = scales.float().repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return codes.float() * factors


def _beside(held: torch.Tensor, expected: torch.Tensor) -> str:
    # vLLM pads vocabularies, and some kernels hold codes transposed.
    for own in (held, held[: len(expected)], held.t() if held.dim() == 2 else held):
        if own.dtype == expected.dtype and own.shape == expected.shape and _bytes(own).equal(_bytes(expected)):
            return EQUAL
    return f"{held.dtype} {list(held.shape)} in vLLM holds other bytes than {expected.dtype} {list(expected.shape)}"


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)
