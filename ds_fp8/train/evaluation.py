"""Evaluation: loss per token on held-out rows, and answers to held-out problems."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal

import torch
from deepspeed import DeepSpeedEngine
from deepspeed import comm as dist
from transformers import PreTrainedTokenizerBase

from ds_fp8.config.log import logger
from ds_fp8.data import IGNORED, PackedDataset, stop_tokens
from ds_fp8.data.rows import measured_rows
from ds_fp8.data.stage import Question, extract_answer
from ds_fp8.engine.health import check_labels
from ds_fp8.export.engines import plan_in_fp8
from ds_fp8.export.on_all_ranks import on_all_ranks
from ds_fp8.layers.attention.sequence_parallel import local_sequences
from ds_fp8.layers.head.loss import withholds_logits
from ds_fp8.train.batches import Batch, label_tokens, micro_batches
from ds_fp8.train.loop import Callback, Run
from ds_fp8.train.metrics import ANSWERS, BF16_LOSS, SERVED_LOSS, report
from ds_fp8.train.model import Alone, without_casts
from ds_fp8.train.stage import Stage

QUESTIONS_AT_ONCE = 64
MAX_SAMPLES = 12  # Answers that are kept as text


@torch.no_grad()
def validation_loss(
    engine: DeepSpeedEngine | Alone, stage: Stage, rows: PackedDataset, batches: int, check: Callable[[], None]
) -> float:
    """Return the mean loss per label token, in nats, over the first `batches` batches of `rows`. Collective.

    Several sources are in them by their weights. `check` is called before each batch.
    """
    chosen = measured_rows(rows.rows_by_source, batches * stage.global_batch, stage.data.weights())
    totals = torch.zeros(2, dtype=torch.float64, device=engine.device)
    # Where the loss is fused no logits are made: of long rows with a large vocabulary they would be the largest tensor.
    options = {"use_cache": False} | ({"skip_logits": True} if withholds_logits(engine.module) else {})
    engine.eval()
    for start in range(0, len(chosen), stage.global_batch):
        check()
        for batch in micro_batches(stage, rows, chosen[start : start + stage.global_batch], engine.device):
            # With one item in the batch the mean is the sum.
            loss = engine(**batch, **options, num_items_in_batch=torch.ones((), device=engine.device)).loss
            totals += torch.stack([loss.double(), label_tokens(batch).double()])
    engine.train()
    dist.all_reduce(totals)
    # Sums over all ranks divided once: ranks with fewer label tokens do not count more.
    total, count = totals.tolist()
    if not math.isfinite(total):
        check_labels()
    return total / max(count, 1)


@torch.no_grad()
def exact_match(
    engine: DeepSpeedEngine | Alone,
    stage: Stage,
    tokenizer: PreTrainedTokenizerBase,
    questions: list[Question],
    pattern: str,
    check: Callable[[], None],
) -> tuple[float, list[dict[str, Any]]]:
    """Answer `questions`, which the ranks share, by greedy generation. Collective.

    Returns the share that is answered rightly, and the first answers of this rank as text. `pattern` finds the answer
    in what is generated; `check` is called before each batch.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    # All ranks generate for equally many questions; the repeated ones at the end do not count.
    share = -(-len(questions) // world)
    mine = [questions[index % len(questions)] for index in range(rank, share * world, world)]
    counted = len(range(rank, len(questions), world))
    right, samples = 0, []
    engine.eval()
    for start in range(0, share, QUESTIONS_AT_ONCE):
        check()
        batch = mine[start : start + QUESTIONS_AT_ONCE]
        # At the left: generation goes on behind the last token of a row, which must be the prompt's.
        prompts = tokenizer.pad(
            {"input_ids": [list(question.prompt) for question in batch]},
            padding_side="left",
            return_attention_mask=True,
            return_tensors="pt",
        ).to(engine.device)
        with local_sequences(engine.module) if stage.shared_by > 1 else nullcontext():
            out = engine.module.generate(
                **prompts,
                max_new_tokens=stage.train.max_new_tokens,
                do_sample=False,
                pad_token_id=tokenizer.pad_token_id,
                eos_token_id=stop_tokens(tokenizer, stage.data.format == "chat"),
                # ZeRO-3 gathers weights collectively: a rank whose answers are complete goes on generating with the
                # others.
                synced_gpus=world > 1,
            )
        texts = tokenizer.batch_decode(out[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
        # Cut to this rank's own questions: repeated ones were generated so that all ranks gather as often.
        pairs = list(zip(batch, texts, strict=True))[: max(counted - start, 0)]
        # Together: what is refused of one rank's answers, a search without end, ends all ranks.
        found = on_all_ranks(lambda pairs=pairs: [extract_answer(pattern, text) == one.answer for one, text in pairs])
        right += sum(map(sum, found))
        for (question, text), correct in list(zip(pairs, found[rank], strict=True))[: MAX_SAMPLES - len(samples)]:
            prompt = tokenizer.decode(question.prompt, skip_special_tokens=True)
            samples.append({"prompt": prompt, "generated": text, "expected": question.answer, "right": correct})
    engine.train()
    return right / len(questions), samples


def label_logits(model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits [T, V] of a batch at the places with a label, and the labels [T]."""
    inputs = {name: x for name, x in batch.items() if name != "labels"}
    logits, labels = model(**inputs, use_cache=False).logits[:, :-1], batch["labels"][:, 1:]
    return logits[labels != IGNORED], labels[labels != IGNORED]


class Evaluation(Callback):
    """Measures what is due after a step and is not in the log: a stop may have come between a measurement and the next.

    Each of the losses is that of the model as it is trained, and BF16_LOSS that of its BF16 weights without casts.
    """

    def on_start(self, run: Run) -> None:
        # A forward may have kernels to compile, or hundreds of tokens to generate, before the next check.
        self._check = partial(run.interrupt.check, slow=True)
        self.on_step(run)

    def on_step(self, run: Run) -> None:
        config, is_last = run.stage.train, run.step == run.stage.train.steps
        if run.step == 0 or run.is_due(config.eval_every):
            self._measure_loss(run, "validation")
            if config.eval_bf16 and run.step:
                self._measure_in_bf16(run, lambda: without_casts(run.stage, run.engine))
        if is_last and len(run.data.test):
            self._measure_loss(run, "test")
        if run.step == 0 or is_last:
            self._measure_answers(run)

    def on_end(self, run: Run) -> None:
        self._measure_as_served(run)

        def stopped() -> DeepSpeedEngine:
            run.engine.fp8.stop_casting()  # for good: nothing is trained after it
            return run.engine

        self._measure_in_bf16(run, stopped)

    def _loss(self, run: Run, model: DeepSpeedEngine | Alone, rows: PackedDataset) -> float:
        return validation_loss(model, run.stage, rows, run.stage.train.eval_batches, self._check)

    def _measure_in_bf16(self, run: Run, model: Callable[[], DeepSpeedEngine | Alone]) -> None:
        if run.engine.fp8.casts and not run.log.has(run.step, BF16_LOSS):
            loss = self._loss(run, model(), run.data.validation)
            report(run, BF16_LOSS, loss, f"validation loss of the weights in BF16, without casts, {loss:.4f}")

    def _measure_as_served(self, run: Run) -> None:
        """Measure what the FP8 export loses with its outlier channels; without any it computes as training."""
        state = run.engine.fp8
        if state.casts and state.config.linear.outlier_channels and not run.log.has(run.step, SERVED_LOSS):
            plan = plan_in_fp8(run.engine)
            if plan is not None:
                state.compute_as_served(plan.left)  # for good, as below
                loss = self._loss(run, run.engine, run.data.validation)
                report(run, SERVED_LOSS, loss, f"validation loss as served in FP8, by ds-fp8 export, {loss:.4f}")

    def _measure_loss(self, run: Run, split: Literal["validation", "test"]) -> None:
        if run.log.value(run.step, f"{split}_loss") is None:
            loss = self._loss(run, run.engine, getattr(run.data, split))
            # exp overflows FP64 just above 709.
            perplexity = math.exp(min(loss, 700.0))
            line = f"{split} loss {loss:.4f}, perplexity {perplexity:.4g}"
            report(run, f"{split}_loss", loss, line, **{f"{split}_perplexity": perplexity})

    def _measure_answers(self, run: Run) -> None:
        wanted = run.stage.train.exact_match_problems
        if not wanted or run.log.value(run.step, "exact_match") is not None:
            return
        questions = run.data.questions(wanted)
        if not questions:
            if run.step == 0:
                logger.info('no exact match: the data has no known answers ("data.answer_pattern" finds them in chats)')
            return
        pattern = run.data.answer_pattern
        share, samples = exact_match(run.engine, run.stage, run.tokenizer, questions, pattern, self._check)
        run.log.append({"step": run.step, "event": ANSWERS, "answers": samples})
        line = f"exact match {share:.1%} of {len(questions)} problems"
        # Last: this record marks the answers as measured, so a run stopped in between answers the questions again.
        report(run, "exact_match", share, line, problems=len(questions))
