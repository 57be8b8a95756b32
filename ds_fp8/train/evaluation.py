"""Measuring a model without training it: loss per token on held-out rows, and answers to held-out problems."""

from __future__ import annotations

from collections.abc import Callable

import torch
from deepspeed import DeepSpeedEngine
from deepspeed import comm as dist
from transformers import PreTrainedTokenizerBase

from ds_fp8.data import (
    IGNORED,
    PackedDataset,
    Problem,
    chat_prompt,
    document_prompt,
    encode_prompts,
    extract_answer,
    tokenize_chat,
)
from ds_fp8.train.batches import collate, label_tokens

PROBLEMS_AT_ONCE = 64


@torch.no_grad()
def validation_loss(
    engine: DeepSpeedEngine, rows: PackedDataset, micro_batch: int, batches: int, check: Callable[[], None]
) -> float:
    """Mean loss per label token, in nats, over the first `batches` micro-batches of every rank. Collective.

    `check` is called before each micro-batch and may raise.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    batches = min(batches, -(-len(rows) // (micro_batch * world)))
    totals = torch.zeros(2, dtype=torch.float64, device=engine.device)
    engine.eval()
    for index in range(batches):
        check()
        start = (index * world + rank) * micro_batch
        batch = _rows_or_blanks(rows, range(start, start + micro_batch), engine.device)
        # With one item in the batch the mean is the sum.
        loss = engine(**batch, use_cache=False, num_items_in_batch=torch.ones((), device=engine.device)).loss
        totals += torch.stack([loss.double(), label_tokens(batch["labels"]).double()])
    engine.train()
    dist.all_reduce(totals)
    total, count = totals.tolist()
    return total / max(count, 1)


def _rows_or_blanks(rows: PackedDataset, indices: range, device: torch.device) -> dict[str, torch.Tensor]:
    """The batch of these rows. A row after the last is one without labels, so that all ranks run alike."""
    batch = collate([rows[min(index, len(rows) - 1)] for index in indices], device)
    for place, index in enumerate(indices):
        if index >= len(rows):
            batch["labels"][place] = IGNORED
    return batch


@torch.no_grad()
def exact_match(
    engine: DeepSpeedEngine,
    tokenizer: PreTrainedTokenizerBase,
    problems: list[Problem],
    chat: bool,
    max_new_tokens: int,
    check: Callable[[], None],
) -> float:
    """The share of `problems` that greedy generation answers rightly. Collective; ranks share the problems.

    `chat` puts a problem as a user's turn of the chat template, otherwise as the beginning of a document. `check` is
    called before each batch and may raise.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    # All ranks generate for equally many problems; the repeated ones at the end do not count.
    share = -(-len(problems) // world)
    mine = [problems[index % len(problems)] for index in range(rank, share * world, world)]
    counted = len(range(rank, len(problems), world))
    stops = [tokenizer.eos_token_id, *([_end_of_turn(tokenizer)] if chat else [])]
    right = 0
    engine.eval()
    for start in range(0, share, PROBLEMS_AT_ONCE):
        check()
        batch = mine[start : start + PROBLEMS_AT_ONCE]
        prompts = _chat_prompts(tokenizer, batch) if chat else encode_prompts(tokenizer, map(document_prompt, batch))
        ids, mask = _left_padded(prompts, tokenizer.pad_token_id, engine.device)
        out = engine.module.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=stops,
            synced_gpus=world > 1,
        )
        texts = tokenizer.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)
        pairs = list(zip(batch, texts, strict=True))[: max(counted - start, 0)]
        right += sum(extract_answer(text) == problem.answer for problem, text in pairs)
    engine.train()
    total = torch.tensor([right], dtype=torch.int64, device=engine.device)
    dist.all_reduce(total)
    return total.item() / len(problems)


def _chat_prompts(tokenizer: PreTrainedTokenizerBase, problems: list[Problem]) -> list[list[int]]:
    messages = [chat_prompt(problem) for problem in problems]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)[
        "input_ids"
    ]


def _end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that closes an assistant's turn: the last one that carries loss."""
    turns = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    return next(label for label in reversed(tokenize_chat(tokenizer, turns)[1]) if label != IGNORED)


def _left_padded(prompts: list[list[int]], pad_id: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 ids and mask [prompts, longest], the words of each prompt at the right end."""
    longest = max(map(len, prompts))
    ids = [[pad_id] * (longest - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)
