"""Folders as finished runs leave them."""

import json
from pathlib import Path

SITES = [f"model.layers.{layer}.{name}" for layer in range(3) for name in ("self_attn.q_proj", "mlp.down_proj")]


def finished_run(
    folder: Path,
    loss: float | None,
    gathered: int,
    answered: float,
    enabled: bool = True,
    measured: bool = True,
    **more,
) -> Path:
    """Write what a run of ten steps leaves in its folder.

    Args:
        loss: the last one, None where it was not finite.
        gathered: bytes of parameters a step.
        answered: share of right answers.
        enabled: FP8 is on.
        measured: the health of casts was measured, where FP8 is on.
        more: goes into the result.
    """
    folder.mkdir(parents=True)
    result = {
        "steps": 10,
        "first_loss": 6.0,
        "last_train_loss": (loss or 0.5) + 0.01,
        "first_validation_loss": 6.1,
        "final_loss": loss,
        "final_loss_bf16": loss and loss * (1 - 0.004 * enabled),
        "exact_match": {"before": 0.0, "after": answered, "problems": 50},
        "bytes_per_step": {"all_gather_bytes": gathered, "grad_bytes": gathered // 2},
        "tokens_per_second": 1000.0,
        "step_seconds": 0.5,
        "peak_memory_bytes": 2**30,
        "skipped_steps": 0,
        "ranks": 2,
        "device": "cpu",
        "parameters": 12345,
        "versions": {"torch": "2.13.0"},
        "made": {
            "started": "2026-11-25 04:00:00 UTC",
            "seconds": 100,
            "first_step": 0,
            "host": "here",
            "processor": "a <processor>",
            "commit": "8cc33d18606e",
            "command": "ds-fp8 train cpt.json",
            "seed": 1234,
        },
        "fp8": {
            "enabled": enabled,
            "fp8_linears": 14 * enabled,
            "casts": {"input": "e4m3 1x128 pow2"},
            "notes": ["a <note> & more"],
        },
        **more,
    }
    (folder / "result.json").write_text(json.dumps(result))
    (folder / "config.json").write_text(
        json.dumps({"fp8": {"enabled": enabled}, "train": {"run_dir": str(folder), "steps": 10}})
    )
    records = [{"step": 0, "validation_loss": 6.1}]
    for step in range(1, 11):
        records.append(
            {
                "step": step,
                "loss": 6.0 - step * (6.0 - (loss or 0.5)) / 10,
                "learning_rate": 1e-3 / step,
                "gradient_norm": 100.0 / step**2,
                "tokens_per_second": 1000.0 + step,
            }
        )
        if enabled and measured:
            figures = {"amax": 3.0, "flushed": 0.02 * step / 10, "saturated": 0.0, "snr_db": 31.0 - step}
            cast = {name: [value] * len(SITES) for name, value in figures.items()}
            records.append({"step": step, "health": {"sites": SITES, "input": cast, "grad_output": cast}})
    sample = {
        "prompt": "3 < 4 & 5?",
        "generated": f"{'yes' if enabled else 'no'}.",
        "expected": "yes",
        "right": enabled,
    }
    records.append({"step": 10, "event": "answers", "answers": [sample]})
    if enabled:
        records.append({"step": 10, "validation_loss_bf16": result["final_loss_bf16"]})
    records.append({"step": 10, "validation_loss": loss, "exact_match": answered, "problems": 50})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def pairs(folder: Path, *names: str, fp8: float = 0.505, bf16: float = 0.5) -> Path:
    """Write fp8/NAME and bf16/NAME with these final losses, and return `folder`."""
    for name in names:
        finished_run(folder / "fp8" / name, fp8, 530, 0.8)
        finished_run(folder / "bf16" / name, bf16, 1000, 0.7, enabled=False)
    return folder
