"""Programs as they come, of Trainer, TRL, Accelerate and one's own, whose micro-steps must run as CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForImageTextToText, Trainer
from trl.trainer import utils

import ds_fp8
from tests.engine.graphs_in_python import in_every_engine
from tests.integrations.programs import (
    VOCABULARY,
    arguments,
    counting,
    deepspeed_config,
    installed,
    small_model,
    small_tokenizer,
    training_arguments,
)
from tests.ranks import on_ranks

STEPS = 6
FP8 = {"monitor": {"every": 0}}
LORA = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
TEXT = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": VOCABULARY,
}


def of_images_and_text():
    """A class whose outermost configuration says nothing of the text model's cache."""
    vision = {"model_type": "clip_vision_model", "image_size": 28, "patch_size": 14, "num_hidden_layers": 1}
    vision |= {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}
    text = TEXT | {"model_type": "llama"}
    config = AutoConfig.for_model("llava", text_config=text, vision_config=vision, image_token_id=VOCABULARY - 1)
    torch.manual_seed(0)
    return AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)


def with_router_logits():
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 128, "num_hidden_layers": 1}
    model = small_model(kind="qwen3_moe", output_router_logits=True, **experts)
    # All experts for all tokens: operations that the emulation repeats need fixed sizes.
    model.config._experts_implementation = "batched_mm"
    return model


def trainer(folder, model=small_model, fp8=None, peft_config=None, **more):
    from peft import get_peft_model

    args = training_arguments(folder, {**FP8, **(fp8 or {})}, max_steps=STEPS, **more)
    # Behind the arguments, as transformers has it: the model is born sharded, and adapters are added to it in FP32.
    network = model() if peft_config is None else get_peft_model(model(), peft_config)
    Trainer(model=network, args=args, train_dataset=counting()).train()


def sft(folder, lengths=(40,), **more):
    """TRL's trainer as it comes: adapters, layers recomputed, with what TRL makes of use_reentrant."""
    from trl import SFTConfig, SFTTrainer

    utils._use_triton = lambda device: True  # as on GPUs: the loss picks positions by a mask
    rows = [{"text": "".join("abcdefghij"[(i + k) % 10] for k in range(lengths[i % len(lengths)]))} for i in range(48)]
    more = {"max_steps": STEPS, "max_length": 32, "dataset_num_proc": 1, **more}
    SFTTrainer(
        model=small_model(num_key_value_heads=2),
        args=SFTConfig(**arguments(folder, FP8, **more)),
        train_dataset=Dataset.from_list(rows),
        processing_class=small_tokenizer(),
        peft_config=LORA,
    ).train()


def accelerate(folder):
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin

    model = small_model()
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=deepspeed_config(FP8)), mixed_precision="bf16"
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, optimizer, rows = accelerator.prepare(model, optimizer, DataLoader(counting(), batch_size=2))
    for _, batch in zip(range(STEPS), rows, strict=False):
        accelerator.backward(engine(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()


def preferences(folder):
    """DPO of one's own: chosen and rejected rows in one batch, a frozen reference in an engine of its own."""
    config = deepspeed_config(FP8) | {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 4}
    config |= {"gradient_accumulation_steps": 1, "gradient_clipping": 1.0}
    policy, frozen = small_model(), small_model().requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    engine = ds_fp8.initialize(model=policy, optimizer=optimizer, config=config)[0]
    reference = ds_fp8.initialize(model=frozen, config=config)[0]
    reference.eval()
    rows = torch.stack([row["input_ids"] for row in counting()])

    def log_probabilities(of, tokens):
        logits = of(input_ids=tokens).logits[:, :-1].float()
        return -F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none").sum(-1)

    for step in range(STEPS):
        chosen = rows[2 * step : 2 * step + 2]
        tokens = torch.cat([chosen, chosen.flip(-1)])
        with torch.no_grad():
            before = log_probabilities(reference, tokens)
        good, bad = (log_probabilities(engine, tokens) - before).chunk(2)
        engine.backward(-F.logsigmoid(0.1 * (good - bad)).mean())
        engine.step()


RECOMPUTED = {"gradient_checkpointing": True}
PROGRAMS = {
    "Trainer, a class of images and text": (trainer, {"model": of_images_and_text}),
    "Trainer, logits beside the loss": (trainer, {"fp8": {"loss": {"mode": "off"}}}),
    "Trainer, router logits": (trainer, {"model": with_router_logits}),
    **{
        f"Trainer, LoRA, re-entrant {reentrant}": (
            trainer,
            {"peft_config": LORA, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}, **RECOMPUTED},
        )
        for reentrant in (False, True)
    },
    "SFT, packed": (sft, {"packing": True, "packing_strategy": "wrapped"}),
    "SFT, padded": (sft, {"lengths": (24, 31), "pad_to_multiple_of": 32}),
    "Accelerate": (accelerate, {}),
    "DPO of one's own": (preferences, {}),
}


def ran(folder, program, options):
    """(why graphs are off, how many were captured, what they did and said) of the one engine that trains."""
    with installed(), in_every_engine() as made:
        program(folder, **options)
        ((graphs, said),) = made
        return graphs.off, graphs.captured, list(graphs.log), said


@pytest.mark.parametrize("program", PROGRAMS)
@on_ranks(1)
def test_micro_steps_run_as_graphs(tmp_path, program):
    off, captured, log, said = ran(tmp_path, *PROGRAMS[program])
    assert off is None
    assert captured >= 1, said
    assert "replayed for 0" in log
    assert ("captured for 0, padded" in log) == ("padded" in program)
    assert not [line for line in said if line.startswith("without CUDA graphs")]


@on_ranks(1)
def test_few_lengths_of_accumulated_micro_batches_are_not_called_many_and_many_get_none(tmp_path):
    *_, said = ran(tmp_path, sft, {"lengths": (12, 13, 14, 15), "gradient_accumulation_steps": 2, "max_steps": 8})
    assert not [line for line in said if "more than 8 shapes" in line]
    off, captured, _, said = ran(tmp_path, sft, {"lengths": tuple(range(12, 32)), "max_steps": 10})
    assert (off, captured) == (None, 0)
    assert said == ["without CUDA graphs: batches have more than 8 shapes; one that comes often is captured"]
