"""FP8 beside BF16 through Trainer, TRL and Accelerate, case by case, on two CPU ranks: prints a table for the log.

    python scripts/integrations.py                      every case
    python scripts/integrations.py sft grpo             only these

The cases are those of tests/integrations, and more that would take too long there. Liger's kernels are not among them:
Triton's interpreter, which stands for a GPU on CPUs, cannot run them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.integrations import test_accelerate, test_trainer, test_trl
from tests.integrations.programs import (
    arguments,
    counting,
    history,
    installed,
    small_model,
    small_tokenizer,
    training_arguments,
)
from tests.ranks import RankPools

ADAMW = {
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}
}
WARMUP = {
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"},
    }
}
PACKAGES = ("torch", "deepspeed", "transformers", "accelerate", "trl", "peft")


def trainer(folder, fp8, sections=None, **more):
    return test_trainer.trained(folder, fp8, sections, **more)[0]


def trainer_optimizer_section(folder, fp8):
    return trainer(folder, fp8, ADAMW)


def trainer_scheduler_section(folder, fp8):
    return trainer(folder, fp8, ADAMW | WARMUP, warmup_steps=2)


def trainer_checkpointing(folder, fp8):
    return trainer(folder, fp8, gradient_checkpointing=True, gradient_accumulation_steps=2)


def trainer_reentrant_checkpointing(folder, fp8):
    return trainer(folder, fp8, gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": True})


def trainer_label_smoothing(folder, fp8):
    return trainer(folder, fp8, label_smoothing_factor=0.1)


def trainer_save_only_model(folder, fp8):
    """Return the loss of the stored model, loaded again."""
    import torch
    from deepspeed import comm as dist
    from transformers import AutoModelForCausalLM

    trainer(folder, fp8, save_strategy="steps", save_steps=4, save_only_model=True)
    dist.barrier()
    rows = torch.stack([row["input_ids"] for row in counting(4)])
    with torch.no_grad():
        stored = AutoModelForCausalLM.from_pretrained(f"{folder}/checkpoint-4")
        return [stored(input_ids=rows, labels=rows).loss.item()]


def trainer_generation(folder, fp8):
    """Return losses, after which all ranks have generated together."""
    import torch
    from transformers import Trainer

    model = small_model()
    with installed():
        made = Trainer(model=model, args=training_arguments(folder, fp8), train_dataset=counting())
        made.train()
        prompt = counting(1)[0]["input_ids"][None, :8]
        made.model_wrapped.eval()
        with torch.no_grad():
            made.model_wrapped.module.generate(prompt, max_new_tokens=4, do_sample=False, synced_gpus=True)
        return history(made, "loss")


def sft(folder, fp8):
    return test_trl.supervised(folder, fp8)[0]


def sft_lora(folder, fp8):
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    with installed():
        args = SFTConfig(**arguments(folder, fp8, max_length=64, dataset_num_proc=1, learning_rate=1e-2))
        made = SFTTrainer(
            model=small_model(),
            args=args,
            train_dataset=test_trl.conversations(),
            processing_class=small_tokenizer(),
            peft_config=LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"),
        )
        made.train()
        return history(made, "loss")


def dpo(folder, fp8):
    return test_trl.preferring(folder, fp8)[0]


def grpo(folder, fp8):
    return test_trl.reinforcing(folder, fp8)[1]


def accelerate(folder, fp8):
    return test_accelerate.accelerated(fp8, None, False)[0]


def accelerate_adapters(folder, fp8):
    return test_accelerate.accelerated(fp8, None, True)[0]


CASES = {
    function.__name__: function
    for function in (
        trainer,
        trainer_optimizer_section,
        trainer_scheduler_section,
        trainer_checkpointing,
        trainer_reentrant_checkpointing,
        trainer_label_smoothing,
        trainer_save_only_model,
        trainer_generation,
        sft,
        sft_lora,
        dpo,
        grpo,
        accelerate,
        accelerate_adapters,
    )
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}")
    names = parser.parse_args().cases or list(CASES)
    print(", ".join(f"{name} {version(name)}" for name in PACKAGES if find_spec(name.replace("-", "_"))))
    print("| case | last figure, infir2 | coat | BF16 |\n|---|---|---|---|", flush=True)
    pools, failed = RankPools(), []
    for name in names:
        cells = []
        for fp8 in ({}, {"preset": "coat"}, None):
            with tempfile.TemporaryDirectory() as folder:
                try:
                    cells.append(f"{pools(2, CASES[name], folder, fp8)[0][-1]:.4f}")
                except AssertionError as error:
                    failed.append(f"{name}, {fp8}: {error}")
                    cells.append("failed")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    pools.close()
    print("\n".join(failed), file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
