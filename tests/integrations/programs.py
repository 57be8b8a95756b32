"""A Trainer or TRL user's program, as small as it gets: a model, data and a DeepSpeed section with "auto" values."""

from __future__ import annotations

import contextlib
import gc
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, TrainingArguments
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

import ds_fp8
from tests.integrations import accelerate_on_cpus

VOCABULARY = 64

CHAT = (
    "{% for message in messages %}{{ '<' + message['role'][0] + '>' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<e>' }}{% endgeneration %}{% else %}{{ message['content'] + '<e>' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<a>' }}{% endif %}"
)


@contextlib.contextmanager
def installed(default: str | None = None) -> Iterator[None]:
    """ds_fp8.install(default) while Trainer, TRL or Accelerate run on this rank; all they leave behind is undone."""
    from accelerate.state import AcceleratorState

    accelerate_on_cpus.enable()
    ds_fp8.install(default)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        ds_fp8.uninstall()
        unset_hf_deepspeed_config()
        AcceleratorState._reset_state(reset_partial_state=True)
        gc.collect()


def deepspeed_config(fp8: dict | None, **sections: Any) -> dict:
    """As the documentation of Trainer has it, with every weight partitioned and gathered again for backward."""
    zero = {
        "stage": 3,
        "stage3_param_persistence_threshold": 300,
        "stage3_prefetch_bucket_size": 0,
        "stage3_max_reuse_distance": 0,
        "stage3_gather_16bit_weights_on_model_save": True,
    }
    autos = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    config = dict.fromkeys(autos, "auto") | {"bf16": {"enabled": True}, "zero_optimization": zero, **sections}
    return config if fp8 is None else {**config, "fp8": fp8}


def arguments(folder: Path | str, fp8: dict | None, sections: dict | None = None, **more: Any) -> dict:
    """Keywords of TrainingArguments or a TRL configuration."""
    defaults = {
        "output_dir": str(folder),
        "deepspeed": deepspeed_config(fp8, **(sections or {})),
        "bf16": True,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "max_steps": 4,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return {**defaults, **more}


def training_arguments(folder: Path | str, fp8: dict | None, sections: dict | None = None, **more: Any):
    return TrainingArguments(**arguments(folder, fp8, sections, **more))


def small_model(seed: int = 0, kind: str = "qwen3", **changes: Any) -> PreTrainedModel:
    """Two decoder layers of sides that divide by 128, in BF16, with weights from `seed`; kind: a model_type."""
    torch.manual_seed(seed)
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "max_position_embeddings": 256,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**shape, **changes}), dtype=torch.bfloat16)


def counting(rows: int = 32, length: int = 24) -> list[dict[str, torch.Tensor]]:
    """Rows that count upwards from different starts, labels included."""
    numbers = [(torch.arange(length) + 7 * row) % (VOCABULARY - 8) + 8 for row in range(rows)]
    return [{"input_ids": row, "labels": row} for row in numbers]


def small_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, and a chat template that marks what the assistant says."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    special = ["<p>", "<e>", "<s>", "<u>", "<a>", "<?>"]
    characters = "abcdefghijklmnopqrstuvwxyz0123456789 .+="
    vocabulary = {token: index for index, token in enumerate([*special, *characters])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<?>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<e>",
        pad_token="<p>",
        unk_token="<?>",
        extra_special_tokens=["<s>", "<u>", "<a>"],
        chat_template=CHAT,
    )


def history(trainer: Any, key: str) -> list[float]:
    """The values of `key` that a Trainer has logged, in their order."""
    return [entry[key] for entry in trainer.state.log_history if key in entry]
