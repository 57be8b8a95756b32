"""Loss of a model as it is served in FP8 after further training, compared with BF16's own run of the same order.

    python scripts/bench/served_loss.py FOLDER --steps 1500 --orders 0,1 --jobs 5 --limit 480 --json found.json
        --arms bf16,precise,precise+tail=served,precise+pull=0.02,precise+pull=0.1,precise+reset
    python scripts/bench/served_loss.py --quick                      a tiny random model, on any machine

FOLDER holds a model and tokens.pt, a tensor of token ids; the first 64 rows are for validation. An arm is a run of
SECTIONS, and may change the last --tail of its steps; it then begins from a checkpoint of its section's run:

    +tail=SECTION   the steps of another section
    +pull=K         masters drawn to the values of their quantized weights (CAGE, arXiv 2510.18784) every PERIOD steps,
                    master += k * (value - master), with k of a step rising from 0 to K
    +reset          masters of weights that oscillate set to these values every WATCH steps (as OsciReset, 2510.27527)

Every arm is evaluated in plain transformers: weights in BF16 ("bf16"), linears in FP8 with inputs in BF16 ("fp8") and
with inputs quantized as servers do ("served"); the same for the mean of the masters over the tail ("mean bf16", ...).
--details adds what each kind of linears costs, the mean of the errors as a bias, and GPTQ's rounding. Arms are
processes of their own, --jobs at once on one GPU.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import banner, print_table, whole_numbers, words, write_json
from torch import nn

from ds_fp8.casts import QuantizedTensor, group_amax, quantize, scale_from_amax
from ds_fp8.config.errors import UserError, main_entry
from ds_fp8.config.formats import BLOCK

SECTIONS: dict[str, dict[str, Any]] = {
    "bf16": {"preset": "precise", "linear": {"overrides": {"*": "bf16"}}},
    "precise": {"preset": "precise"},
    "served": {"preset": "precise", "linear": {"outlier_channels": 0}},
    "hybrid_fast": {"preset": "hybrid_fast"},
}
PERIOD = 5  # steps from one pull, or one sample of the mean, to the next
WATCH = 50  # steps in which a reset counts returns
RETURNS = 2  # of a weight's data to their value before the last change, from which on it oscillates
MAX = 448.0  # of E4M3
QKV, GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
KINDS = {"qkv": QKV, "o": ("o_proj",), "gate_up": GATE_UP, "down": ("down_proj",)}
NAMES = [f"{of}{name}" for of in ("", "mean ") for name in ("bf16", "fp8", "served")]
Weights = dict[str, torch.Tensor]


class Arm:
    """One run, by its name."""

    def __init__(self, name: str):
        self.name, (self.section, *changes) = name, name.split("+")
        options = {key: value for key, _, value in (change.partition("=") for change in changes)}
        self.tail, self.pull = options.pop("tail", self.section), float(options.pop("pull", 0))
        self.reset, self.changed = options.pop("reset", None) is not None, bool(changes)
        if options or {self.section, self.tail} - SECTIONS.keys():
            remedy = f"SECTION[+tail=SECTION][+pull=K][+reset], of {', '.join(SECTIONS)}"
            raise UserError(f"there is no arm {name}", key="--arms", remedy=remedy)


# ---------------------------------------------------------------- training


def start(section: str, options: argparse.Namespace) -> Any:
    from transformers import AutoModelForCausalLM

    import ds_fp8

    model = AutoModelForCausalLM.from_pretrained(options.folder, dtype=torch.bfloat16).train()
    rates = {"total_num_steps": options.steps, "warmup_num_steps": 20, "warmup_min_ratio": 0.0, "cos_min_ratio": 0.1}
    adamw = {"lr": options.rate, "betas": [0.9, 0.95], "weight_decay": 0.0, "torch_adam": True}
    config = {
        "train_micro_batch_size_per_gpu": options.rows,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 3} | ({"stage3_param_persistence_threshold": 0} if options.quick else {}),
        "steps_per_print": 10**6,
        "optimizer": {"type": "AdamW", "params": adamw},
        "scheduler": {"type": "WarmupCosineLR", "params": rates},
        "fp8": SECTIONS[section] | {"monitor": {"every": 0}},
    }
    return ds_fp8.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]


class Oscillation:
    """Counts how often the data of each weight return to their value before the last change."""

    def __init__(self, group: Any):
        group.requantize_and_wait()
        self._group, self._last, self._before = group, group.data.clone(), group.data.clone()
        self.returns, self._changed, self._steps = torch.zeros_like(self._last), torch.zeros_like(self._last), 0

    def step(self) -> None:
        self._group.requantize_and_wait()
        changed = self._group.data != self._last
        self.returns += changed & (self._group.data == self._before)
        self._changed |= changed
        self._before = torch.where(changed, self._last, self._before)
        self._last.copy_(self._group.data)
        self._steps += 1

    def of(self, weight: Any, counts: torch.Tensor) -> torch.Tensor:
        rows = counts[weight.start : weight.start + weight.data_numel].view(-1, weight.pitch)
        return rows[:, : weight.shard.shape[1]]  # without room for outlier blocks

    def shares(self) -> dict[str, float]:
        """Return the shares of weights whose data have changed, and have returned at least so often."""
        numel = sum(weight.shard.shape.numel() for weight in self._group)
        found = {"steps": self._steps}
        for name, counts, least in [("changed", self._changed, 1)] + [(str(n), self.returns, n) for n in (1, 2, 4, 8)]:
            found[name] = sum((self.of(w, counts) >= least).sum().item() for w in self._group) / numel
        return found


@torch.no_grad()
def write_masters(group: Any, how: Callable[[Any, torch.Tensor, torch.Tensor], object]) -> None:
    """Let `how(weight, masters, values)` write the masters [R, C] of each weight; values: of its quantized weight."""
    group.requantize_and_wait()
    for weight in group:
        quantized = QuantizedTensor.of_bytes(weight.covered_data(), weight.covered(weight.scale), weight.spec)
        how(weight, weight.master()[: weight.shard.valid].view(weight.shard.shape), quantized.dequantize())
    group.load_wrote()


def train(arm: Arm, order: int, rows: torch.Tensor, options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Train an arm; return its masters, their mean over the tail, its loss as trained and figures of the run."""
    from ds_fp8.zero.deepspeed.parameters import master_shard

    began, engine = time.time(), start(arm.tail, options)
    turn = options.steps - round(options.steps * options.tail)
    first, saved = turn if arm.changed else 0, work / f"{arm.section}_{order}"
    if arm.changed:
        engine.load_checkpoint(saved, tag="turn")
    group, named = engine.fp8.weights, dict(engine.module.named_parameters())
    masters = [master_shard(p)[: p.ds_numel].view(p.ds_shape) for p in named.values()]
    mean, samples, watch = [m.clone() for m in masters], 0, None
    validation, rows = rows[: options.validation].to(engine.device), rows[options.validation :]
    shuffled = torch.randperm(len(rows), generator=torch.Generator().manual_seed(order))
    losses, loop = [], time.time()
    for step in range(first, options.steps):
        if step == turn and not arm.changed and options.keeps:
            engine.save_checkpoint(saved, tag="turn")
            (saved / "ready").touch()
        if group is not None and watch is None and step >= options.steps * 2 // 3:
            watch = Oscillation(group)
        batch = rows[shuffled[(torch.arange(options.rows) + step * options.rows) % len(rows)]].to(engine.device)
        loss = engine(input_ids=batch, labels=batch, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach().float())
        if watch is not None:
            watch.step()
        done = step + 1 - turn
        if done > 0 and done % PERIOD == 0:
            if arm.pull:
                k = 1 - (1 - arm.pull * done / (options.steps - turn)) ** PERIOD
                write_masters(group, lambda weight, master, value, k=k: master.lerp_(value, k))
            samples += 1
            torch._foreach_lerp_(mean, masters, 1 / samples)
        if arm.reset and done > 0 and done % WATCH == 0:

            def to_center(weight: Any, master: torch.Tensor, value: torch.Tensor, watch: Oscillation = watch) -> None:
                master.copy_(torch.where(watch.of(weight, watch.returns) >= RETURNS, value, master))

            write_masters(group, to_center)
            watch.returns.zero_()
    figures = {"training_loss": torch.stack(losses).mean().item(), "start_seconds": loop - began}
    figures["step_ms"] = 1e3 * (time.time() - loop) / len(losses)
    figures["oscillation"] = watch and watch.shares()
    engine.eval()
    with torch.no_grad():
        own = [engine(input_ids=x, labels=x, use_cache=False).loss.item() for x in validation.split(options.rows)]
    weights = {name: master.clone() for name, master in zip(named, masters, strict=True)}
    if group is not None:  # what is evaluated below is what training holds
        scale = engine.fp8.config.linear.weight.scale
        pairs = [(weights[name], group.unsharded(p)) for name, p in named.items() if group.of(p) is not None]
        same = [quantize(w, "e4m3", "128x128", scale).data.float() == q.data.float() for w, q in pairs]
        figures["same_data"] = sum(one.float().mean().item() for one in same) / len(same)
    engine.destroy()
    return {"weights": weights, "mean": dict(zip(named, mean, strict=True)), "as_trained": average(own), **figures}


# ---------------------------------------------------------------- evaluation


class Served:
    """A plain model in BF16, whose linears may have weights in FP8, and inputs quantized as servers do."""

    def __init__(self, folder: Path, device: torch.device, scale: str):
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()
        self.scale, self.device, head = scale, device, self.model.get_output_embeddings()
        modules = dict(self.model.named_modules()).items()
        self.linears = {n: module for n, module in modules if isinstance(module, nn.Linear) and module is not head}

    def rounded(self, masters: Weights, but: tuple[str, ...] = ()) -> Weights:
        """Return masters with the values of their quantized weights for linears, but those with these last names."""
        names = [f"{name}.weight" for name in self.linears if name.rpartition(".")[2] not in but]
        return masters | {n: quantize(masters[n], "e4m3", "128x128", self.scale).dequantize() for n in names}

    def load(self, weights: Weights, bias: Mapping[str, torch.Tensor] | None = None) -> None:
        for name, linear in self.linears.items():
            terms = [of[key] for of, key in ((weights, f"{name}.bias"), (bias or {}, name)) if key in of]
            linear.bias = nn.Parameter(sum(terms).to(torch.bfloat16)) if terms else None
        for name, parameter in self.model.named_parameters():
            if not name.endswith(".bias"):
                parameter.data.copy_(weights[name])

    @torch.no_grad()
    def losses(self, rows: torch.Tensor, casts: bool, but: tuple[str, ...] = (), see: Callable | None = None) -> list:
        """Return the loss of each row; `see(name, inputs)` is called with the inputs of every linear."""

        def before(name: str, _: nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
            x = args[0].flatten(0, -2)
            if see is not None:
                see(name, x)
            if casts and name.rpartition(".")[2] not in but:
                x = quantize(x, "e4m3", "1x128", self.scale).dequantize(x.dtype)
            return (x.view(args[0].shape),)

        hooks = [m.register_forward_pre_hook(lambda *a, n=n: before(n, *a)) for n, m in self.linears.items()]
        result = []
        for x in rows.to(self.device).split(4):
            logits = self.model(input_ids=x, use_cache=False).logits[:, :-1].flatten(0, 1)
            losses = F.cross_entropy(logits.float(), x[:, 1:].flatten(), reduction="none")
            result += losses.view(len(x), -1).mean(1).tolist()
        for hook in hooks:
            hook.remove()
        return result


@torch.no_grad()
def gptq(weight: torch.Tensor, moments: torch.Tensor, scale: str) -> torch.Tensor:
    """Round weights [L, N, K] to E4M3 with scales of 128x128 blocks, by the moments x xT [L, K, K] of their inputs."""
    diagonal = torch.diag_embed(
        0.01 * moments.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True).expand(moments.shape[:2])
    )
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(moments + diagonal))
    upper, w, result = torch.linalg.cholesky(inverse, upper=True), weight.clone(), torch.empty_like(weight)
    for left in range(0, w.shape[2], BLOCK):
        right = min(left + BLOCK, w.shape[2])
        amax = torch.stack([group_amax(one[:, left:right].contiguous(), "128x128") for one in w])
        scales = scale_from_amax(amax, "e4m3", scale).repeat_interleave(BLOCK, 1)[:, : w.shape[1], 0]
        errors = torch.empty_like(w[:, :, left:right])
        for k in range(left, right):
            result[:, :, k] = (w[:, :, k] / scales).clamp(-MAX, MAX).to(torch.float8_e4m3fn).float() * scales
            errors[:, :, k - left] = error = (w[:, :, k] - result[:, :, k]) / upper[:, k, k, None]
            w[:, :, k + 1 : right] -= error[:, :, None] * upper[:, None, k, k + 1 : right]
        w[:, :, right:] -= errors @ upper[:, left:right, right:]
    return result


def details(served: Served, masters: Weights, rows: torch.Tensor, calibration: torch.Tensor) -> dict[str, list[float]]:
    """Return losses as served with one kind of linears in BF16, with the mean corrected, and with GPTQ's rounding."""
    found: dict[str, list[float]] = {}
    for kind, names in KINDS.items():
        served.load(served.rounded(masters, names))
        found[f"but {kind}"] = served.losses(rows, True, names)
    moments: dict[str, torch.Tensor] = {}
    means: dict[str, torch.Tensor] = {}

    def see(name: str, x: torch.Tensor) -> None:
        x = x.float()
        if name not in moments:
            moments[name], means[name] = x.new_zeros(x.shape[1], x.shape[1]), x.new_zeros(x.shape[1])
        moments[name].addmm_(x.t(), x, alpha=1 / len(x))
        means[name] += x.mean(0) * 4 / len(calibration)

    decoded = served.rounded(masters)
    served.load(decoded)
    served.losses(calibration, False, see=see)
    bias = {name: (masters[f"{name}.weight"] - decoded[f"{name}.weight"]) @ means[name] for name in served.linears}
    by_data = dict(masters)
    for leaf in {name.rpartition(".")[2] for name in served.linears}:  # of all layers together
        names = [name for name in served.linears if name.rpartition(".")[2] == leaf]
        stacks = torch.stack([masters[f"{n}.weight"] for n in names]), torch.stack([moments[n] for n in names])
        by_data |= zip((f"{n}.weight" for n in names), gptq(*stacks, served.scale), strict=True)
    for name, weights, correction in (("bias", decoded, bias), ("gptq", by_data, None)):
        served.load(weights, correction)
        found |= {f"{what} {name}": served.losses(rows, what == "served") for what in ("fp8", "served")}
    return found


def run_arm(arm: Arm, order: int, options: argparse.Namespace, work: Path) -> None:
    """Train and evaluate an arm, in a process of its own; write what is found to `work`."""
    from ds_fp8.train import processes

    processes.set_single_process_env()
    processes.init_distributed()
    tokens = torch.load(options.folder / "tokens.pt").long()
    rows = tokens[: len(tokens) // options.length * options.length].view(-1, options.length)
    found, losses = train(arm, order, rows, options, work), {}
    weights, mean = found.pop("weights"), found.pop("mean")
    device = next(iter(weights.values())).device
    if device.type == "cuda":
        torch.cuda.empty_cache()
    served = Served(options.folder, device, "pow2" if arm.tail == "hybrid_fast" else "fp32")
    for of, masters in (("", weights), ("mean ", mean)):
        served.load(masters)
        losses[f"{of}bf16"] = served.losses(rows[: options.validation], False)
        served.load(served.rounded(masters))
        losses |= {f"{of}{what}": served.losses(rows[: options.validation], what == "served") for what in NAMES[1:3]}
    file = work / f"{arm.name}_{order}.json"
    write_json(file, arm=arm.name, order=order, **found, losses=losses)
    if arm.name in options.details:
        losses |= details(served, weights, rows[: options.validation], rows[-options.calibration :])
        write_json(file, arm=arm.name, order=order, **found, losses=losses)


# ---------------------------------------------------------------- all arms


def average(values: list[float]) -> float:
    return sum(values) / len(values)


def gap(losses: list[float], base: list[float]) -> str:
    """Return the gap of the mean loss in percent, with the standard error of the paired differences of rows."""
    error = (torch.tensor(losses) - torch.tensor(base)).std() / len(losses) ** 0.5 / average(base)
    return f"{100 * (average(losses) / average(base) - 1):+.3f} ({100 * error:.3f})"


def show(title: str, results: list[dict[str, Any]], names: list[str]) -> None:
    """Print the gaps to BF16's run of the same order; those of means to its mean."""
    base, rows = {one["order"]: one["losses"] for one in results if one["arm"] == "bf16"}, []
    for one in results:
        own, losses = base.get(one["order"]), one["losses"]
        if own is None or names[-1] not in losses:
            continue
        trained = f"{100 * (one['as_trained'] / average(own['bf16']) - 1):+.3f}"
        gaps = [gap(losses[name], own["mean bf16" if name.startswith("mean") else "bf16"]) for name in names]
        oscillate = one["oscillation"] and one["oscillation"][str(RETURNS)]
        loss = f"{average(losses['bf16']):.5f}"
        rows.append([one["arm"], one["order"], loss, trained, *gaps, one["step_ms"], oscillate])
    print_table(title, ["arm", "order", "loss", "as trained", *names, "ms a step", "oscillate"], rows)


def run_arms(options: argparse.Namespace, work: Path) -> None:
    """Run all arms in all orders, --jobs at once, until they are done or time is up."""
    arms, began, context = [Arm(name) for name in options.arms], time.time(), multiprocessing.get_context("spawn")
    waiting = [(arm, order) for order in options.orders for arm in arms]
    waiting.sort(key=lambda job: job[0].changed)
    options.keeps = any(arm.changed for arm in arms)
    running: dict[Any, tuple[Arm, int]] = {}
    results: list[dict[str, Any]] = []
    while waiting or running:
        ready = [(arm, n) for arm, n in waiting if not arm.changed or (work / f"{arm.section}_{n}" / "ready").exists()]
        for job in ready[: options.jobs - len(running)]:
            waiting.remove(job)
            process = context.Process(target=run_arm, args=(*job, options, work))
            process.start()
            running[process] = job
        if not running:
            break  # what waits has no checkpoint to begin from
        time.sleep(0.3)
        for process in [process for process in running if process.exitcode is not None]:
            arm, order = running.pop(process)
            file = work / f"{arm.name}_{order}.json"
            if process.exitcode:
                print(f"{arm.name}, order {order}, failed", flush=True)
            if not file.exists():
                continue
            results.append(json.loads(file.read_text()))
            losses = ", ".join(f"{name} {average(own):.5f}" for name, own in results[-1]["losses"].items())
            print(f"{time.time() - began:.0f} s: {arm.name}, order {order}: {losses}", flush=True)
            if options.json:
                write_json(options.json, banner=banner(), seconds=time.time() - began, results=results)
        if options.limit and time.time() - began > options.limit:
            for process, (arm, order) in running.items():
                process.kill()
                print(f"{arm.name}, order {order}, cut off", flush=True)
            break
    show("gap to the weights of BF16's run of the same order, in % (standard error over rows)", results, NAMES)
    details = next((list(one["losses"])[len(NAMES) :] for one in results if len(one["losses"]) > len(NAMES)), [])
    for names in filter(None, (details[: len(KINDS)], details[len(KINDS) :])):
        show("the same, served with one kind of linears in BF16, and changed after training", results, names)


def quick_folder(folder: Path) -> Path:
    """Write a tiny random model, and tokens that can be learnt."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 192, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 128}
    heads = {"num_attention_heads": 3, "num_key_value_heads": 1, "tie_word_embeddings": True}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(folder)
    steps = torch.randint(1, 4, (40_000,), generator=torch.Generator().manual_seed(0))
    torch.save((steps.cumsum(0) % 128).to(torch.int32), folder / "tokens.pt")
    return folder


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, metavar="FOLDER")
    parser.add_argument("--arms", type=words, default=["bf16", "precise", "precise+tail=served", "precise+pull=0.02"])
    parser.add_argument("--details", type=words, default=["precise"], help="arms of which everything is evaluated")
    parser.add_argument("--orders", type=whole_numbers, default=[0], help="seeds of the order of rows")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--tail", type=float, default=0.2, help="share of the steps that arms change (default 0.2)")
    parser.add_argument("--rate", type=float, default=3e-4, help="learning rate")
    parser.add_argument("--rows", type=int, default=4, help="rows a step")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a row")
    parser.add_argument("--validation", type=int, default=64, help="rows to evaluate")
    parser.add_argument("--calibration", type=int, default=512, help="rows of training data that GPTQ rounds by")
    parser.add_argument("--jobs", type=int, default=4, help="arms that run at once")
    parser.add_argument("--limit", type=float, help="seconds after which arms that run are cut off")
    parser.add_argument("--json", metavar="FILE", help="write the figures there after every arm")
    parser.add_argument("--quick", action="store_true", help="a tiny model and few steps, for any machine")
    options = parser.parse_args(given)
    with tempfile.TemporaryDirectory() as work:
        if options.quick:
            folder = options.folder or quick_folder(Path(work, "model"))
            quick = {"steps": 20, "tail": 0.5, "length": 64, "validation": 8, "calibration": 8, "rate": 5e-3}
            parser.set_defaults(folder=folder, **quick)
            options = parser.parse_args(given)
        if options.folder is None:
            raise UserError("no folder is given", remedy="name one with a model and tokens.pt, or --quick")
        print(json.dumps(banner()), flush=True)
        run_arms(options, Path(work))


if __name__ == "__main__":
    main_entry(main)
