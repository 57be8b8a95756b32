"""Train, export and adapt a tiny model of every type of transformers' causal and image-text-to-text models, on text.

    python scripts/architectures.py                            every type that the results lack
    python scripts/architectures.py mixtral qwen3_5:image      only these, again
    python scripts/architectures.py --table docs/architectures.md     run nothing, write the table into a page

On two ranks over gloo, in processes of the type's own: the model is read from a folder under zero.Init, every weight
and buffer compared with the folder's, and trained for 10 steps on the same random tokens by plain DeepSpeed in BF16 and
with "fp8": {}. Then its steps are captured as graphs (lists of operations, as in the tests), it is exported in both
layouts and read again, and adapters are trained on it. Last, documents of a packed row are compared with each alone,
and `ds-fp8 train` is asked what it makes of such rows. A line of JSON a type is appended to the results; a type that
needs more than 120 s of a processor, or uses none for so long, is ended, and what it has done until then counts.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.runtime.zero import GatheredParameters
from exported_folders import exports
from tiny_models import LARGEST, LENGTH, ROWS, auto_class, reader, tiny_config, tokens, types, words
from transformers.integrations import HfDeepSpeedConfig
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

import ds_fp8
from ds_fp8.config.errors import UserError
from ds_fp8.layers.published import stored_buffers
from ds_fp8.train import Lora, packed_attention, trial
from ds_fp8.train.adapters import add_adapters
from ds_fp8.train.stored_model import ModelSource, check_trainable, load_stored_model, stored_config
from tests import ranks
from tests.engine.graphs_in_python import log_of

STEPS, RANKS = 10, 2
LIMIT = 120  # Seconds of a processor, and seconds without
MOST_STEPS = 9  # Until a graph is replayed, where DeepSpeed never learns the order of modules
TOLERANCE = 1e-3  # Of logits in FP32, relative
# The engine runs no more after its exports: a model that is read may share a module with its hooks (XLM's GELU)
PARTS = ("graphs", "exports", "LoRA", "documents")
ONE_A_ROW = "one document a row"
Model, Engine, Inputs = Any, Any, dict[str, Any]


def check(name: str, folder: Path, parts: tuple[str, ...] = PARTS, steps: int = STEPS) -> dict[str, Any]:
    """Check a type on this rank. What is known at any time is in FOLDER/RANK.json."""
    rank = dist.get_rank()
    saved, file = folder / "saved", folder / f"{rank}.json"
    result: dict[str, Any] = {"architecture": name, "status": "not built"}

    def note(part: str, found: Any) -> Any:
        result[part] = found
        file.write_text(json.dumps(result), encoding="utf-8")
        return found

    try:
        origin, inputs = build(name, saved)
        note("class", type(origin).__name__)
        note("parameters", sum(parameter.numel() for parameter in origin.parameters()))
        note("status", "fails in BF16")
        try:
            engine, wrong = start(name, saved, origin, None)
        except CannotRead as error:
            note("zero.Init", f"fails in BF16: {error}")
            engine, wrong = start(name, saved, origin, None, born=False)
        bf16 = train(engine, inputs, steps)
        engine.destroy()
        note("bf16", [round(bf16[0], 4), round(bf16[-1], 4)])
        note("status", "fails in FP8")
        engine, wrong_in_fp8 = start(name, saved, origin, {}, born="zero.Init" not in result)
        result.setdefault("zero.Init", _loaded(wrong, wrong_in_fp8))
        fp8 = train(engine, inputs, steps)
        note("fp8", [round(fp8[0], 4), round(fp8[-1], 4)])
        note("gap", round(max(abs(ours - theirs) / max(theirs, 1) for ours, theirs in zip(fp8, bf16, strict=True)), 4))
        note("report", _report(engine.fp8.report))
        note("status", "trained")
    except UserError as error:
        note("status", "refused")
        note("reason", error.problem)
    except Exception as error:
        note("reason", words(error))
        raise  # other ranks may wait for this one
    for part in parts:
        note(part, "killed")  # unless it ends
        try:
            if part == "documents":
                note(part, documents(name, saved, inputs) if rank == 0 else {})
            elif result["status"] == "trained":
                if part == "exports":
                    exports(engine, name, folder, saved, lambda found: note("exports", found))
                elif part == "graphs":
                    note(part, graphs(engine, inputs))
                else:
                    engine.destroy()
                    note(part, adapters(name, saved, inputs, fp8[0]))
            else:
                note(part, "")
        except Exception as error:
            note(part, f"TRACEBACK {words(error)}")
    return result


def build(name: str, saved: Path) -> tuple[Model, Inputs]:
    """Build a random model and write it to a folder. Return it with what it needs besides tokens."""
    torch.manual_seed(0)
    model = auto_class(name).from_config(tiny_config(name), dtype=torch.bfloat16)
    count = sum(parameter.numel() for parameter in model.parameters())
    if count > LARGEST:
        raise ValueError(f"{count:,} parameters: the configuration has not become small")
    with torch.no_grad():  # what is initialized alike could change places; zeros of a mask stay
        for own in [*(p for p in model.parameters() if p.dim() > 1), *stored_buffers(model).values()]:
            if own.is_floating_point():
                noise = torch.rand_like(own, dtype=torch.float32)
                own.copy_(own * (1 + 0.25 * noise) if own.any() else 0.25 * noise)
    ids = tokens(0)
    inputs: Inputs = {"use_cache": False}
    try:
        model.train()(input_ids=ids, labels=ids, **inputs).loss.backward()
    except (TypeError, ValueError) as error:
        if "use_cache" in str(error):
            inputs = {}
        inputs |= {key: torch.zeros_like(ids) for key in ("mm_token_type_ids", "token_type_ids") if key in str(error)}
        model.train()(input_ids=ids, labels=ids, **inputs).loss.backward()
    model.zero_grad(set_to_none=True)
    try:
        model.save_pretrained(saved)  # the first rank
    finally:
        dist.barrier()
    return model, inputs


class CannotRead(Exception):
    """A rank could not read the model."""


def start(
    name: str, saved: Path, origin: Model, fp8: dict | None, born: bool = True, adapt: Any = None
) -> tuple[Engine, list[str]]:
    """Read a model, `born` under zero.Init, and start an engine. Return it, and the tensors that were read wrong."""
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        # Prefetch and reuse off: a model this small would otherwise stay gathered, and backward would gather nothing.
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "stage3_prefetch_bucket_size": 0,
            "stage3_max_reuse_distance": 0,
        },
    } | ({} if fp8 is None else {"fp8": fp8})
    kept = HfDeepSpeedConfig(copy.deepcopy(config)) if born else None  # transformers looks for one that is alive
    failures: list[str] = [""] * RANKS
    failure = ""
    try:
        model = reader(name, saved).from_pretrained(saved, dtype=torch.bfloat16)
    except Exception as error:
        failure = words(error)
    finally:
        unset_hf_deepspeed_config()
        del kept
    dist.all_gather_object(failures, failure)  # the first rank alone reads under zero.Init, and may fail alone
    if any(failures):
        raise CannotRead(next(filter(None, failures)))
    wrong = _misplaced(model, origin) if origin is not None else []
    if born and not all(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        wrong.append("not sharded")
    model = model.train() if adapt is None else adapt(model.train())
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    initialize = deepspeed.initialize if fp8 is None else ds_fp8.initialize
    return initialize(model=model, model_parameters=trained, config=config)[0], wrong


def train(engine: Engine, inputs: Inputs, steps: int) -> list[float]:
    """Return the losses of so many steps, averaged over ranks."""
    losses = []
    for step in range(steps):
        ids = tokens(1 + dist.get_rank() + 10 * (step % 2))
        loss = engine(input_ids=ids, labels=ids, **inputs).loss
        engine.backward(loss)
        engine.step()
        mean = loss.detach().float().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    return losses


def graphs(engine: Engine, inputs: Inputs) -> str:
    """Return "replayed" for steps that were captured and replayed, or the reason why not."""
    said: list[str] = []
    engine.fp8.health.say = said.append
    log = log_of(engine, auto=True)
    for _ in range(MOST_STEPS):
        train(engine, inputs, 1)
        if sum(line.startswith("replayed") for line in log) > 1:
            return "replayed"
    return (said or log or ["nothing was captured"])[0]


def adapters(name: str, saved: Path, inputs: Inputs, expected: float) -> str:
    """Train adapters for a step. Their first loss is that of the model without."""

    def adapt(model: Model) -> Model:
        add_adapters(model, Lora(r=8, alpha=64))
        return model

    try:
        engine, _ = start(name, saved, None, {}, born=False, adapt=adapt)
    except UserError as error:
        return f"refused: {error.problem}"
    losses = train(engine, inputs, 4)
    engine.destroy()
    if abs(losses[0] / expected - 1) > 0.02:
        return f"WRONG: a loss of {losses[0]:.4f}, and {expected:.4f} without adapters"
    return "trains" if losses[3] < losses[1] else f"WRONG: the loss stays at {losses[1]:.4f}"


# ---------------------------------------------------------------- documents of a packed row


def documents(name: str, saved: Path, inputs: Inputs) -> dict[str, str]:
    """Return whether documents of a row are those alone, by the attention that is taken, and what `train` does."""
    found = {}
    taken = trained_by_command(saved)
    attention = {"attn_implementation": "eager"} if taken.startswith('takes "eager"') else {}
    try:
        model = reader(name, saved).from_pretrained(saved, dtype=torch.float32, **attention).eval()
        ids, cut = tokens(5)[:1], LENGTH // 3
        places = torch.cat([torch.arange(cut), torch.arange(LENGTH - cut)])[None]

        def logits(part: slice, given: torch.Tensor = ids) -> torch.Tensor:
            more = {key: own[:1, part] if torch.is_tensor(own) else own for key, own in inputs.items()}
            with torch.no_grad():
                return model(input_ids=given[:, part], position_ids=places[:, part], **more).logits[0]

        def differ(one: torch.Tensor, other: torch.Tensor) -> bool:
            return bool(torch.dist(one, other) > TOLERANCE * other.norm())

        row, other = logits(slice(None)), logits(slice(None), torch.cat([ids[:, :cut], tokens(6)[:1, cut:]], 1))
        words_of = {
            "see those behind": differ(row[:cut], other[:cut]),
            "see those before": differ(row[cut:], logits(slice(cut, None))),
            "are other than alone": differ(row[:cut], logits(slice(cut))),
        }
        found["packed"] = next((text for text, applies in words_of.items() if applies), "apart")
    except Exception as error:
        found["packed"] = f"cannot be packed: {words(error)}"
    return found | {"ds-fp8 train": taken}


def trained_by_command(saved: Path) -> str:
    """Return what `ds-fp8 train` says of a model and rows of several documents, and whether it trains on one."""
    try:
        source = ModelSource("model.path", str(saved))
        config = stored_config(source)
        check_trainable(source, config)
        attention = packed_attention.NAME
        try:
            why = trial.check_rows(config, attention)
        except UserError as error:
            if '"eager"' not in str(error):
                raise
            attention = "eager"  # as the error says
            why = trial.check_rows(config, attention)
        packed_attention.register()
        # As DeepSpeed has it, weights that are read in FP32 too
        model = load_stored_model(source, config, {"attn_implementation": attention}).bfloat16().train()
        ids = tokens(5)[:1]
        places = torch.arange(LENGTH) % (LENGTH if why else LENGTH // 2)
        batch = {"input_ids": ids, "labels": ids, "position_ids": places[None]}
        model(**batch, use_cache=False, num_items_in_batch=torch.ones(())).loss.backward()
    except UserError as error:
        return f"refused: {error.problem}".replace(str(saved), "the folder")
    except Exception as error:
        return f"TRACEBACK {words(error)}"
    return f'takes "{attention}"' + (f" with {ONE_A_ROW}: {why}" if why else "")


# ---------------------------------------------------------------- words


def _misplaced(model: Model, origin: Model) -> list[str]:
    """Return the names of parameters and stored buffers that are not as in the origin."""
    truth = dict(origin.named_parameters()) | stored_buffers(origin)
    tensors = dict(model.named_parameters()) | stored_buffers(model)
    wrong = sorted(truth.keys() ^ tensors.keys())
    for name in [name for name in tensors if name in truth]:
        own = tensors[name]
        with GatheredParameters([own] if hasattr(own, "ds_id") else []):
            if own.shape != truth[name].shape or not torch.equal(own.detach().float(), truth[name].float()):
                wrong.append(name)
    return wrong


def _loaded(bf16: list[str], fp8: list[str]) -> str:
    if not fp8:
        return "right"
    text = f"{len(fp8)} tensors wrong, {fp8[0]} first"
    return f"as stock: {text}" if fp8 == bf16 else f"WRONG: {text}"


def _report(report: dict[str, Any]) -> dict[str, Any]:
    count = report["parameters"]
    kept = max(report.get("kept_in_bf16", []), key=lambda part: part["parameters"], default=None)
    counts = {"layers": "fused_layers", "attention halves": "fused_attention_halves", "MLPs": "fused_mlps"}
    fused = [f"{report[key]} {parts}" for parts, key in counts.items() if report.get(key)]
    return {
        "share": round((report["fp8_parameters"] + report.get("fp8_gathered_experts", 0)) / count, 3),
        "fused": ", ".join(fused) or "no",
        "kept": f"{kept['parameters'] / count:.0%}: {kept['reason']}" if kept else "",
    }


# ---------------------------------------------------------------- processes, results, the table


def run(name: str) -> dict[str, Any]:
    """Check a type on ranks of its own, which end with it."""
    begin, ended = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="architectures-") as folder:
        pool = ranks.RankPool(RANKS)
        processes = [psutil.Process(process.pid) for process in pool._processes]
        over = threading.Event()
        watch = threading.Thread(target=_end_after_limit, args=(processes, over, ended), daemon=True)
        watch.start()
        try:
            result = pool.run(check, name, Path(folder))[0]
        except (AssertionError, ranks.RankDied) as error:
            # The rank that failed alone, if one did, knows the reason.
            files = [json.loads(file.read_text()) for file in sorted(Path(folder).glob("*.json"))]
            result = max(files, key=lambda own: "reason" in own, default={"architecture": name, "status": "not built"})
            if ended and (result["status"] not in ("trained", "fails in BF16") or "still" not in ended[0]):
                result["status"] = "not finished"
            lines = str(error).splitlines()
            place = r'File ".*/((?:transformers/models|ds_fp8)/.*)", line (\d+),? in (?!_obey)'  # no watchdog
            ours = [":".join(found.groups()) for found in map(re.compile(place).search, lines) if found]
            if "reason" not in result:
                result["ended"] = " ".join([*ended, *(ours[:1] if ended else lines[-1:])])[-300:]
        finally:
            over.set()
            pool.close()
    return result | {"seconds": round(time.monotonic() - begin)}


def _end_after_limit(processes: list[psutil.Process], over: threading.Event, ended: list[str]) -> None:
    """Abort ranks that have used the seconds of a processor that they may, or none for as long; they print stacks."""
    last, since = 0.0, time.monotonic()
    while not over.wait(1):
        try:
            used = max(sum(process.cpu_times()[:2]) for process in processes)
            waits = all(process.status() != psutil.STATUS_RUNNING for process in processes)  # not for a processor
        except psutil.Error:
            return
        if used > last + 0.5 or not waits:
            last, since = used, time.monotonic()
        if used > LIMIT or time.monotonic() - since > LIMIT:
            ended.append("more than 120 s," if used > LIMIT else "stood still,")
            for process in processes:
                process.send_signal(signal.SIGABRT)
            return


def wrong(result: dict[str, Any]) -> list[str]:
    """Return what of a result is this package's fault."""
    given = {key: result.get(key, "") for key in ("zero.Init", "graphs", "LoRA", "ended")}
    given |= result.get("exports") or {} if isinstance(result.get("exports"), dict) else {}
    packed = result.get("documents") or {}
    given |= packed if isinstance(packed, dict) else {"documents": packed}
    found = [f"{key}: {text}" for key, text in given.items() if re.search("WRONG|TRACEBACK|killed", text)]
    taken = packed.get("ds-fp8 train", "") if isinstance(packed, dict) else ""
    if taken.startswith("takes") and packed["packed"] != "apart" and not _one_a_row(taken):
        found.append(f"SILENT documents: {packed['packed']}")
    if result["status"] == "fails in FP8":
        found.append(result.get("reason", ""))
    return found + ([result["ended"]] if result.get("ended") and result["status"] != "fails in BF16" else [])


def _one_a_row(taken: str) -> bool:
    return ONE_A_ROW in taken or "note: " in taken  # as results said it before 2026-11-29


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """Return the last line of results of each type in a file; nothing where there is no file."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {result["architecture"]: result for result in map(json.loads, lines)}


HEADING = "## Every type\n\n"
HEADER = """\
| type | FP8 | fused | loss BF16 | FP8 | largest gap | graphs | documents of a row | BF16 export | FP8 export | LoRA | \
remarks |
|---|---|---|---|---|---|---|---|---|---|---|---|"""


def table(results: dict[str, dict[str, Any]]) -> str:
    counts = Counter(result["status"] for result in results.values()).most_common()
    said = ", ".join(f"{count} {status}" for status, count in counts)
    gaps = sorted(result["gap"] for result in results.values() if "gap" in result)
    summary = f"{len(results)} of {len(types())} types: {said}. Gaps: median {gaps[len(gaps) // 2]:.2%}, largest "
    rows = (f"| {name} | {' | '.join(_cells(results[name]))} |" for name in sorted(results))
    return "\n".join([f"{summary}{gaps[-1]:.2%}.", "", HEADER, *rows])


def _cells(result: dict[str, Any]) -> list[str]:
    remarks = [*wrong(result)]
    if result["status"] != "trained":
        remarks = [f"{result['status']}: {result.get('reason', result.get('ended', ''))}"]
    zero = result.get("zero.Init", "right")
    remarks += [f"zero.Init: {zero}"] if zero != "right" else []
    report, exported, packed = (result.get(key) or {} for key in ("report", "exports", "documents"))
    exported, packed = (own if isinstance(own, dict) else {} for own in (exported, packed))
    remarks += [f"BF16 {report['kept']}"] if report.get("share", 1) < 0.5 else []
    taken = packed.get("ds-fp8 train", "")
    rows = ONE_A_ROW if _one_a_row(taken) else packed.get("packed", "").partition(":")[0]
    losses = [" → ".join(f"{loss:.3f}" for loss in result[key]) if key in result else "" for key in ("bf16", "fp8")]
    return [
        f"{report['share']:.0%}" if report else "",
        report.get("fused", ""),
        *losses,
        f"{result['gap']:.2%}" if "gap" in result else "",
        "yes" if result.get("graphs") == "replayed" else result.get("graphs", "")[:90],
        rows,
        *(exported.get(layout, "").partition(":")[0] for layout in ("bf16", "fp8")),
        result.get("LoRA", "").partition(" ")[0].rstrip(":"),
        "; ".join(text.replace("|", "/")[:300] for text in remarks),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="TYPE", help="run these, also where there is a result")
    parser.add_argument("--results", type=Path, default=Path("docs/log/architectures.jsonl"), metavar="FILE")
    parser.add_argument("--table", type=Path, metavar="PAGE", help="run nothing, write the table into a page")
    arguments = parser.parse_args()

    results = read_results(arguments.results)
    if arguments.table:
        before = arguments.table.read_text(encoding="utf-8").partition(HEADING)[0]
        arguments.table.write_text(f"{before}{HEADING}{table(results)}\n", encoding="utf-8")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the ranks, too
    ranks.TIMEOUT = 10**6  # `_end_after_limit` knows better
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
    for name in arguments.names or [name for name in types() if name not in results]:
        results[name] = result = run(name)
        with arguments.results.open("a", encoding="utf-8") as file:
            print(json.dumps(result), file=file)
        print(f"{name}: {result['status']} in {result['seconds']} s", *wrong(result), sep="\n    ", flush=True)
    return 1 if any(map(wrong, results.values())) else 0


if __name__ == "__main__":
    raise SystemExit(main())
