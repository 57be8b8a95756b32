"""Trainer and Accelerate with an fp8 section: the same numbers as a plain loop over ds_fp8.initialize."""

from __future__ import annotations

import warnings

import pytest
import torch
from deepspeed import comm as dist
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, Trainer

import ds_fp8
from tests.integrations.programs import counting, deepspeed_config, history, installed, small_model, training_arguments
from tests.ranks import on_ranks

STEPS = 4


def trained(folder, fp8, sections=None, **more):
    """Losses and learning rates of a Trainer, and the start report of its engine."""
    model = small_model()
    with installed():
        args = training_arguments(folder, fp8, sections, **more)
        trainer = Trainer(model=model, args=args, train_dataset=counting())
        trainer.train()
        return history(trainer, "loss"), history(trainer, "learning_rate"), trainer.model_wrapped.fp8.report


def plainly_trained(folder, fp8):
    """Losses of the same training in a loop over ds_fp8.initialize: two micro-batches a step, the mean over all label
    tokens, and Trainer's two parameter groups, which decide what shares a scale in compressed moments."""
    model = small_model()
    with installed():
        args = training_arguments(folder, fp8, gradient_accumulation_steps=2)
        trainer = Trainer(model=model, args=args, train_dataset=counting())
        batches, decaying = iter(trainer.get_train_dataloader()), trainer.get_decay_parameter_names(model)
    batch_sizes = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    more = {"gradient_clipping": 1.0, "zero_allow_untested_optimizer": True}
    matrices, vectors = (
        [p for n, p in model.named_parameters() if (n in decaying) == first] for first in (True, False)
    )
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": vectors}], lr=1e-3, weight_decay=0.0)
    engine = ds_fp8.initialize(model=model, optimizer=optimizer, config=deepspeed_config(fp8) | batch_sizes | more)[0]
    losses = []
    for _ in range(STEPS):
        loss = torch.zeros(())
        micro_batches = [next(batches), next(batches)]
        items = sum((batch["labels"][:, 1:] != -100).sum() for batch in micro_batches)
        dist.all_reduce(items)
        for batch in micro_batches:
            micro_loss = engine(**batch, num_items_in_batch=items).loss * dist.get_world_size()
            engine.backward(micro_loss, scale_wrt_gas=False)
            engine.step()
            loss += micro_loss.detach()
        dist.all_reduce(loss)
        losses.append(loss.item() / dist.get_world_size())
    return losses


@pytest.mark.parametrize(("fp8", "reduced_in"), [({}, "e4m3"), ({"preset": "coat"}, "bf16")], ids=["infir2", "coat"])
@on_ranks(2)
def test_losses_equal_a_plain_loops(tmp_path, fp8, reduced_in):
    losses, _, report = trained(tmp_path, fp8, gradient_accumulation_steps=2, gradient_checkpointing=True)
    assert report["fp8_linears"] == 14
    assert (report["param_gather"], report["grad_reduce"]) == ("e4m3", reduced_in)
    assert losses == pytest.approx(plainly_trained(tmp_path, fp8), rel=1e-6)


@on_ranks(2)
def test_compressed_moments_with_trainers_own_optimizer_and_with_one_in_the_configuration(tmp_path):
    """The section is one that Accelerate fills in."""
    more = {"warmup_steps": 1, "weight_decay": 0.1, "lr_scheduler_type": "linear"}
    section = {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lr_scheduler.step")
        trainers, sections = (trained(tmp_path, {"preset": "coat"}, sections, **more) for sections in ({}, section))
    for losses, _, report in (trainers, sections):
        assert report["optimizer"] == "ds_fp8.optim.AdamW"
        assert report["moment_bytes_per_parameter"] < 2.1
        assert losses[-1] < losses[0] - 0.1
    assert trainers[1] == pytest.approx([0, 1e-3, 2e-3 / 3, 1e-3 / 3])
    assert trainers[0] == pytest.approx(sections[0], rel=1e-3)


def saving(folder, resume):
    """A run that evaluates with metrics and saves every second step, or what follows its first checkpoint."""

    def accuracy(prediction):
        guesses = prediction.predictions.argmax(-1)
        return {"accuracy": float((guesses[:, :-1] == prediction.label_ids[:, 1:]).mean())}

    model = small_model()
    every = {"strategy": "steps", "steps": 2}
    more = {f"{kind}_{key}": value for kind in ("eval", "save") for key, value in every.items()}
    with installed():
        args = training_arguments(folder, {}, load_best_model_at_end=True, **more)
        trainer = Trainer(
            model=model, args=args, train_dataset=counting(), eval_dataset=counting(4), compute_metrics=accuracy
        )
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2" if resume else None)
        accuracies, best = history(trainer, "eval_accuracy"), trainer.state.best_model_checkpoint
        return history(trainer, "loss"), accuracies, best


@on_ranks(2)
def test_checkpoints_resume_bit_for_bit_and_hold_a_model(tmp_path):
    losses, accuracies, best = saving(tmp_path, False)
    assert losses == trained(tmp_path, {})[0]  # looking at the weights changes nothing
    assert saving(tmp_path, True)[0] == losses
    assert len(accuracies) == 2
    assert 0 < accuracies[-1] <= 1
    stored = AutoModelForCausalLM.from_pretrained(best, dtype=torch.bfloat16)
    row = counting(1)[0]
    with torch.no_grad():
        loss = stored(input_ids=row["input_ids"][None], labels=row["labels"][None]).loss
    assert loss.item() < losses[0] - 0.1


# -------------------- Accelerate alone


def accelerated(section, default):
    """Losses of a loop over Accelerate's prepare and backward, and the start report."""
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin

    model = small_model()
    with installed(default):
        plugin = DeepSpeedPlugin(hf_ds_config=deepspeed_config(section))
        accelerator = Accelerator(deepspeed_plugin=plugin, mixed_precision="bf16")
        rows = DataLoader(counting(), batch_size=2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        engine, optimizer, rows = accelerator.prepare(model, optimizer, rows)
        losses = []
        for _, batch in zip(range(4), rows, strict=False):
            loss = engine(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, engine.fp8.report


@on_ranks(2)
def test_a_section_and_a_default_are_the_same():
    losses, report = accelerated({"preset": "coat"}, None)
    assert report["optimizer"] == "ds_fp8.optim.AdamW"
    assert report["fp8_linears"] == 14
    assert losses == accelerated(None, "coat")[0]
    assert losses[-1] < losses[0] - 0.1
