"""Write a Hugging Face folder from a trained run, a ZeRO checkpoint or another folder, without GPUs.

    ds-fp8 export runs/cpt served                     FP8 in DeepSeek's layout (128x128 blocks), read by vLLM and SGLang
    ds-fp8 export runs/cpt served --format bf16
    ds-fp8 export runs/cpt/checkpoints/step_500 served --format compressed-tensors
    ds-fp8 export output/checkpoint-500 served --deepspeed_config ds.json       of transformers' Trainer
    ds-fp8 export runs/lora served                    of adapters: their model, merged, cast from its BF16 weights
    ds-fp8 export folder served                       any model in BF16; or one in FP8 with --format bf16

FP8 weights are quantized from the FP32 masters as in training; a folder's as --deepspeed_config or "fp8": {} say.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ds_fp8.commands.arguments import as_served, config_file, parser_of
from ds_fp8.config.errors import UserError, first_paragraph

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel


class _Model(NamedTuple):
    """The configuration of the model to export, with the files that belong to it."""

    config: PretrainedConfig
    tokenizer: Callable[[Path], object] | None
    generation: GenerationConfig | None


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("source", type=Path, help="a run_dir, a checkpoint, or a Hugging Face folder")
    parser.add_argument("folder", type=Path, help="where to write")
    parser.add_argument("--format", default="fp8", help="fp8 (default), compressed-tensors or bf16")
    parser.add_argument("--model", metavar="FOLDER", help="where the model's configuration and tokenizer are")
    parser.add_argument("--deepspeed_config", metavar="FILE", help='the training\'s, for its "fp8" section')
    parser.add_argument("--force", action="store_true", help="replace an earlier export")
    arguments = parser.parse_args()
    print(f"reading {arguments.source}", flush=True)  # what is imported now takes seconds

    from ds_fp8.config.files import read_json
    from ds_fp8.config.fp8 import parse_fp8
    from ds_fp8.export import export_checkpoint
    from ds_fp8.export.checkpoints import export_model

    checkpoint, raw = _find(arguments.source)
    known = _known(arguments.source, checkpoint, raw is not None, arguments.model)
    if arguments.deepspeed_config is not None:
        raw = read_json(config_file(arguments.deepspeed_config))
    of_folder = (checkpoint / "config.json").is_file() and not any(checkpoint.glob("*_states.pt"))
    if raw is None and not of_folder and arguments.format != "bf16":
        raise UserError(
            "the casts of the training are unknown",
            remedy='give the JSON with the "fp8" section: --deepspeed_config FILE, or export --format bf16',
        )
    fp8 = parse_fp8({"fp8": {}} if of_folder and "fp8" not in (raw or {}) else raw or {}, arguments.deepspeed_config)
    named = {"layout": arguments.format, "tokenizer": known.tokenizer, "force": arguments.force}
    if of_folder:
        plan = export_model(_load(checkpoint, known.config, arguments.format), arguments.folder, fp8, **named)
    else:
        plan = export_checkpoint(
            checkpoint,
            arguments.folder,
            known.config,
            fp8,
            deepspeed_config=raw,
            generation=known.generation,
            source=f"{checkpoint.parent.parent.name}/{checkpoint.name}",
            **named,
        )
    for reason in dict.fromkeys(plan.left.values()):
        layers = [name for name, why in plan.left.items() if why == reason]
        print(f"in BF16: {', '.join(layers[:3])}{f' and {len(layers) - 3} more' if len(layers) > 3 else ''}: {reason}")
    if plan.quantized and fp8.linear.outlier_channels:
        lost = f" ({words})" if (words := as_served(_result(checkpoint))) else ""
        print(f"note: the outlier channels of training are in no FP8 folder{lost}, but in BF16 ones: --format bf16")
    print(f"{arguments.folder}: {len(plan.quantized)} layers in FP8, {len(plan.entries)} tensors")
    return 0


def _find(source: Path) -> tuple[Path, dict[str, Any] | None]:
    """Return the checkpoint to export, or the folder of a model in its place, and the training's JSON where known."""
    from ds_fp8.train.checkpoints import MANIFEST, Manifest, folder_of, problems_of, steps_in
    from ds_fp8.train.run_folder import CHECKPOINTS, CONFIG, MODEL
    from ds_fp8.train.stored_model import stored_model

    if not source.is_dir():
        raise UserError(f"there is no folder {source}", remedy="give a run_dir, a checkpoint or a Hugging Face folder")
    checkpoint = source
    if (source / CHECKPOINTS).is_dir():
        steps = steps_in(source)
        if not steps:
            raise UserError(f"{source} holds no complete checkpoint", remedy="finish or resume the run first")
        checkpoint = folder_of(source, steps[-1])
    elif (source / "latest").is_file():
        # A folder of DeepSpeed's: `latest` names the checkpoint that was saved last.
        checkpoint = source / (source / "latest").read_text(encoding="utf-8", errors="replace").strip()
    run_dir = checkpoint.parent.parent
    of_run = checkpoint.parent.name == CHECKPOINTS and (run_dir / CONFIG).is_file()
    if not of_run and not (checkpoint / MANIFEST).is_file():
        return checkpoint, None
    if problems := problems_of(checkpoint, 0, 1):
        raise UserError(
            f"{checkpoint} is not as it was saved: {'; '.join(problems[:3])}",
            file=checkpoint,
            remedy="give another checkpoint of the run, or resume the run",
        )
    raw = Manifest.read(checkpoint).config
    if not raw.get("train", {}).get("lora"):
        return checkpoint, raw
    if source == checkpoint:
        merged = f"ds-fp8 export {run_dir} takes the model of the finished run, {MODEL}, where they are merged"
        raise UserError(f"{checkpoint} is of a model with adapters", file=checkpoint, remedy=merged)
    return Path(stored_model(None, str(run_dir)).path), raw


def _result(checkpoint: Path) -> dict[str, Any]:
    """Return the result of the run whose last step is exported; empty where there is none."""
    from ds_fp8.config.files import read_json
    from ds_fp8.train.run_folder import RESULT

    file = checkpoint.parent.parent / RESULT
    result = read_json(file) if file.is_file() else {}
    return result if checkpoint.name == f"step_{result.get('steps')}" else {}


def _load(folder: Path, config: PretrainedConfig, layout: str) -> PreTrainedModel:
    from ds_fp8.train.stored_model import ModelSource, check_trainable, load_stored_model, quantization_of

    source = ModelSource("FOLDER", str(folder))
    if layout != "bf16" and quantization_of(source):
        raise UserError(f"{folder} is in FP8", remedy="serve it as it is, or export it with --format bf16")
    check_trainable(source, config)
    return load_stored_model(source, config, {})


def _known(source: Path, checkpoint: Path, of_run: bool, model: str | None) -> _Model:
    from ds_fp8.config.files import read_json
    from ds_fp8.train.run_folder import CONFIG

    run_dir = checkpoint.parent.parent
    # A finished run has its model in run_dir/model, Trainer beside or above the checkpoint.
    for folder in [Path(model)] if model else [checkpoint, run_dir / "model", source, source.parent]:
        if (folder / "config.json").is_file() and "model_type" in read_json(folder / "config.json"):
            return _read_model(folder)
    if not of_run or model is not None:
        raise UserError(
            f"the configuration of the model in {source} is not known",
            remedy="--model FOLDER, with its config.json and tokenizer",
        )
    return _model_of_stage(run_dir / CONFIG, checkpoint)


def _read_model(folder: Path) -> _Model:
    from transformers import GenerationConfig

    from ds_fp8.data import load_tokenizer, save_tokenizer
    from ds_fp8.export.folder import make_savable
    from ds_fp8.train.stored_model import ModelSource, stored_config

    tokenizer = generation = None
    if (folder / "tokenizer_config.json").is_file():
        tokenizer = partial(save_tokenizer, load_tokenizer(str(folder)))
    else:
        print(f"note: {folder} has no tokenizer, and so the export has none: --model FOLDER names one that has")
    file = folder / "generation_config.json"
    if file.is_file():
        try:
            generation = GenerationConfig.from_pretrained(folder)
        except Exception as error:  # transformers fails in its own way at each mistake
            problem = f"transformers cannot read this {file.name}: {first_paragraph(error)}"
            raise UserError(problem, file=file, remedy="correct it, or give another folder: --model FOLDER") from None
        if left_out := make_savable(generation):
            print(f"note: {left_out}")
    return _Model(stored_config(ModelSource("--model", str(folder))), tokenizer, generation)


def _model_of_stage(stage_file: Path, checkpoint: Path) -> _Model:
    from transformers import GenerationConfig

    from ds_fp8.data import build_tokenizer, save_tokenizer, stop_tokens
    from ds_fp8.train import load_stage
    from ds_fp8.train.model import load_model_config

    # The stage's batch is checked against the ranks that trained it.
    ranks = len(list(checkpoint.glob("*_optim_states.pt")))
    stage = load_stage(stage_file, world=ranks)
    tokenizer = build_tokenizer(stage.data)
    config = load_model_config(stage, tokenizer)
    generation = GenerationConfig.from_model_config(config)
    generation.eos_token_id = stop_tokens(tokenizer, stage.data.format == "chat")
    return _Model(config, partial(save_tokenizer, tokenizer), generation)
