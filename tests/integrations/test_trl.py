"""TRL's trainers with an "fp8" section beside the same run in BF16."""

from __future__ import annotations

import math

import pytest
from datasets import Dataset
from deepspeed import comm as dist
from peft import LoraConfig, PeftModel

from tests.integrations.programs import arguments, history, installed, small_model, small_tokenizer
from tests.ranks import on_ranks

WORDS = ("one", "two", "three", "four", "five", "six")
COAT = {"preset": "coat"}


def conversations(count: int = 24) -> Dataset:
    turns = [("user", "after {}", 0), ("assistant", "{}", 1)]
    rows = [[(role, words.format(WORDS[i % 5 + after])) for role, words, after in turns] for i in range(count)]
    return Dataset.from_list([{"messages": [{"role": r, "content": text} for r, text in row]} for row in rows])


def preferences(count: int = 24) -> Dataset:
    return Dataset.from_list(
        [{"prompt": f"after {WORDS[i % 5]} ", "chosen": WORDS[i % 5 + 1], "rejected": "seven"} for i in range(count)]
    )


def supervised(folder, fp8):
    """SFTTrainer with packing and a loss on the assistant's turns alone."""
    from trl import SFTConfig, SFTTrainer

    with installed():
        more = {"packing": True, "assistant_only_loss": True, "max_length": 64, "dataset_num_proc": 1}
        args = SFTConfig(**arguments(folder, fp8, **more))
        trainer = SFTTrainer(
            model=small_model(), args=args, train_dataset=conversations(), processing_class=small_tokenizer()
        )
        trainer.train()
        return history(trainer, "loss"), trainer.model_wrapped.fp8.report


def preferring(folder, fp8, adapters=False, more=None):
    """DPOTrainer: (losses, reports). The reference is an engine without an optimizer, or the model without adapters."""
    from trl import DPOConfig, DPOTrainer

    models = {"model": small_model(), "ref_model": small_model()}
    if adapters:  # which have TRL's dropout
        lora = LoraConfig(r=8, target_modules="all-linear", lora_dropout=0.05, task_type="CAUSAL_LM")
        models = {"model": small_model(num_key_value_heads=2), "peft_config": lora}
    with installed():
        args, data = DPOConfig(**arguments(folder, fp8, **(more or {}))), preferences()
        trainer = DPOTrainer(**models, args=args, train_dataset=data, processing_class=small_tokenizer())
        trainer.train()
        if adapters:
            trainer.save_model(f"{folder}/adapter")
            dist.barrier()  # rank 0 has written it
        engines = [trainer.model_wrapped, *([] if adapters else [trainer.ref_model])]
        return history(trainer, "loss"), [engine.fp8.report for engine in engines]


def reinforcing(folder, fp8, lora=None):
    """GRPOTrainer: generation with DeepSpeed's hooks taken off and put back, a reference (another model, or this one
    without its adapters), answers rewarded for being long."""
    from trl import GRPOConfig, GRPOTrainer

    stored = f"{folder}/stored"  # the reference model is loaded from where the model came from
    if dist.get_rank() == 0:
        small_model(num_key_value_heads=2 if lora else 1).save_pretrained(stored)
    dist.barrier()
    with installed():
        more = {"num_generations": 2, "max_completion_length": 8, "beta": 0.04, "max_steps": 2}
        more |= {"max_steps": 4, "learning_rate": 1e-2} if lora else {}
        trainer = GRPOTrainer(
            model=stored,
            reward_funcs=lambda completions, **_: [float(len(text)) for text in completions],
            args=GRPOConfig(**arguments(folder, fp8, **more)),
            train_dataset=preferences().remove_columns(["chosen", "rejected"]),
            processing_class=small_tokenizer(),
            peft_config=lora,
        )
        trainer.train()
        return history(trainer, "loss"), history(trainer, "kl"), trainer.model_wrapped.fp8.report


@on_ranks(2)
def test_supervised_fine_tuning_with_packing_and_masks(tmp_path):
    (losses, report), (plain, _) = (supervised(tmp_path, fp8) for fp8 in ({}, None))
    assert report["fp8_linears"] == 14
    assert losses == pytest.approx(plain, rel=0.02)
    assert losses[-1] < losses[0] - 0.1


@on_ranks(2)
def test_preferences_against_a_reference_model(tmp_path):
    losses, (policy, reference) = preferring(tmp_path, COAT)
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6)  # both models compute alike
    assert losses[-1] < 0.6
    assert policy["fp8_linears"] == reference["fp8_linears"] == 14
    assert policy["optimizer"] == "ds_fp8.optim.AdamW"
    assert reference["optimizer"] == "none"


@on_ranks(2)
def test_preferences_learnt_by_fused_adapters(tmp_path):
    more = {"learning_rate": 1e-2}
    plain, _ = preferring(tmp_path / "bf16", None, True, more)
    losses, (report,) = preferring(tmp_path / "fused", {}, True, more)
    assert (report["fp8_linears"], report["fused_layers"]) == (14, 2)
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6)
    assert losses[-1] < 0.5
    assert losses == pytest.approx(plain, rel=0.1)
    PeftModel.from_pretrained(small_model(num_key_value_heads=2), tmp_path / "fused" / "adapter")


@on_ranks(2)
def test_a_reference_that_follows_the_policy_is_the_policy(tmp_path):
    """After every step, in one GatheredParameters over both. But for rounding: its codes are casts of the BF16 values
    that were copied, the policy's are casts of masters."""
    more = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 1.0}
    losses, _ = preferring(tmp_path, {}, False, more)
    assert len(losses) > 2
    assert losses == pytest.approx([math.log(2)] * len(losses), abs=2e-3)


@pytest.mark.parametrize("adapters", [False, True])
@on_ranks(2)
def test_generation_between_steps(tmp_path, adapters):
    lora = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM") if adapters else None
    losses, divergence, report = reinforcing(tmp_path, {}, lora)
    assert report["fp8_linears"] == 14
    assert report["fused_layers"] == 2 or not adapters
    assert divergence[0] == pytest.approx(0, abs=1e-6)  # with adapters, from itself without them: they do nothing yet
    assert all(0 < d < 1 for d in divergence[2:]) or not adapters
    assert all(math.isfinite(value) for value in (*losses, *divergence))
