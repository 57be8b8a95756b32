"""An engine that steps, overflows, is written to, read, loaded and offloaded, and the FP32 tensors that it must be.

The model of an engine is a dict of FP32 masters, and what a user has written in BF16 since the last step. Where another
step can take the same bits, a second engine with DeepSpeed's step around the same optimizer does all of it, too.
"""

from __future__ import annotations

import logging
import random
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed import comm as dist
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.utils import (
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
)

from ds_fp8.casts import quantize
from ds_fp8.config.errors import UserError
from ds_fp8.layers.linear.linear import FP8Linear
from ds_fp8.zero.deepspeed.checkpoints import consolidated_state_dict
from tests.zero import models

MOMENTS = ("exp_avg", "exp_avg_sq")


class Life:
    """One or two engines, and what they must be."""

    def __init__(self, options: dict[str, Any], folder: str, seed: int, sizes: tuple[int, int]):
        self.options, self.folder, self.draw = options, folder, random.Random(seed)
        self.sizes = sizes
        optimizer = self.options.get("fp8", {}).get("optimizer", {})
        self.coded, self.compressed = "master" in optimizer, "exp_avg" in optimizer
        self.config = self.options.get("config", {})
        self.clip, self.micro_batches = (
            self.config.get(key, default)
            for key, default in (("gradient_clipping", 0.0), ("gradient_accumulation_steps", 1))
        )
        # With clipping the last bits of the norm count, which DeepSpeed sums in another order.
        self.owns = (True,) if self.coded or self.clip else (True, False)
        self.engines = [self.build(own) for own in self.owns]
        self.number, self.saves, self.skipped, self.pending, self.rewritten, self.hidden = 0, 0, 0, set(), set(), set()
        self.wrote_moment = False
        self.masters = {name: master(p) for name, p in self.parameters().items() if p.requires_grad}
        self.bf16 = {name: bf16(p) for name, p in self.parameters().items() if not p.requires_grad}
        self.fixed, self.counts = set(self.bf16), {"global": 0, "skipped": 0, **dict.fromkeys(self.masters, 0)}
        self.check()

    def build(self, own: bool):
        optimizer = {"implementation": "ds_fp8", **self.options.get("fp8", {}).get("optimizer", {})}
        section = {"monitor": {"every": 0}, **self.options.get("fp8", {}), "optimizer": optimizer}
        ds_config = models.config(section, **self.options.get("zero", {})) | {"gradient_clipping": 0.0} | self.config
        more = {key: self.options[key] for key in ("prepare", "born_sharded") if key in self.options}
        engine = models.build(ds_config, sizes=self.sizes, own=own, **more)
        assert (engine.fp8.step is not None) == own
        engine.fp8.optimizer.compact = self.options.get("compact", False)
        engine.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD([torch.zeros(1)]), lambda step: 1.0)
        return engine

    def parameters(self, engine=None):
        return dict((engine or self.engines[0]).module.named_parameters())

    def of_all(self, name: str):
        return [self.parameters(engine)[name] for engine in self.engines]

    def weight(self) -> str:
        """A weight to write to: mostly of a linear."""
        names = [f"layers.{index}.{part}.weight" for index in range(2) for part in ("up", "down")]
        return self.draw.choice([name for name in [*names, "embedding.weight"] if name not in self.pending])

    def trained_weight(self) -> str:
        return self.draw.choice([name for name in self.masters if name.endswith("weight") and "head" not in name])

    def check(self) -> None:
        """Masters, BF16 numbers and quantized weights of every engine are those of the model, bit for bit."""
        for engine in self.engines:
            parameters = self.parameters(engine)
            for name in self.masters.keys() - self.hidden:
                if name in self.pending and self.coded:  # the next cast rounds them
                    self.masters[name] = self.as_kept(name, self.masters[name])
                assert torch.equal(safe_get_local_fp32_param(parameters[name]), part(self.masters[name])), name
            numbers = models.bf16_weights(engine)
            for name in parameters:
                # DeepSpeed writes BF16 shards in the next step.
                shown = engine is self.engines[0] and name.startswith("layers")
                if name not in self.pending | self.hidden and (shown or name not in self.rewritten):
                    assert torch.equal(numbers[name], self.numbers(name).cpu()), name
            steps, skipped = self.counts["global"], self.counts["skipped"]
            assert (engine.global_steps, engine.skipped_steps) == (steps, skipped)
            assert engine.lr_scheduler.last_epoch == steps - skipped
            linears = {f"{name}.weight": m for name, m in engine.module.named_modules() if isinstance(m, FP8Linear)}
            assert len(linears) == 4
            found = models.unsharded(linears[name].weight for name in linears)
            for (name, linear), weight in zip(linears.items(), found, strict=True):
                spec = linear.recipe.weight
                if name not in self.pending | self.hidden:
                    source = self.bf16[name].float() if name in self.bf16 else self.masters[name]
                    expected = quantize(source, spec.format, spec.granularity, spec.scale)
                    if self.coded and name in self.bf16:  # masters of codes round the amax, for casts to find it again
                        found, wanted = weight.dequantize(), expected.dequantize()
                        assert ((found - wanted).abs() <= 0.01 * wanted.abs()).float().mean() > 0.95, name
                    else:
                        assert models.same_cast(weight, expected), name
                    if name not in self.fixed and engine is self.engines[0]:  # nobody reads BF16 shards else
                        assert linear.weight.ds_tensor.is_contiguous() == (name in self.bf16), name

    def numbers(self, name: str) -> torch.Tensor:
        return self.bf16[name] if name in self.bf16 else self.masters[name].bfloat16()

    def loss(self, engine, number: int) -> torch.Tensor:
        return engine(models.batch(number, dist.get_rank()).to(engine.device))

    def evaluate(self, number: int = 1000) -> list[float]:
        found = []
        for engine in self.engines:
            engine.eval()
            with torch.no_grad():
                found.append(self.loss(engine, number).item())
            engine.train()
        assert len(set(found)) == 1
        return found

    # ---------------------------------------------------------------- steps

    def backwards(self, around=None, between=None, last=None, without=None, factor=1.0) -> list[float]:
        """The micro-batches of a step up to the last backward; something behind a forward, a backward, the last."""
        losses = []
        for engine in self.engines:
            for micro in range(self.micro_batches):
                layer = None if without is None else engine.module.get_submodule(without)
                if layer is not None:
                    layer.forward = lambda x: x.new_ones(*x.shape[:-1], self.sizes[1])
                loss = self.loss(engine, self.number + micro)
                if layer is not None:
                    del layer.forward
                if around is not None:
                    around()
                engine.backward(loss * factor)
                losses.append(loss.item())
                final = micro == self.micro_batches - 1
                do = last if final else between
                if do is not None:
                    do(engine)
                if not final:
                    engine.step()
        self.number += self.micro_batches
        count = self.micro_batches
        assert all(losses[i : i + count] == losses[:count] for i in range(0, len(losses), count))
        return losses[:count]

    def finish_step(self, without: str | None = None) -> None:
        """Take the engines' steps, and the model's: AdamW's on FP32 tensors."""
        expected, group = {}, self.engines[0].optimizer.param_groups[0]
        learning = [name for name in self.masters if self.parameters()[name].requires_grad]
        gradients = {name: safe_get_local_grad(self.parameters()[name]).clone() for name in learning}
        missing = [name for name in learning if without is not None and name.startswith(without)]
        gradients |= {name: torch.zeros_like(gradients[name]) for name in missing}
        before = {name: self.moments_before(name) for name in learning}
        squares = torch.stack([gradient.double().square().sum() for gradient in gradients.values()]).sum()
        dist.all_reduce(squares)
        norm = float(squares.sqrt())
        factor = min(1.0, self.clip / (norm + 1e-6)) if self.clip else 1.0
        assert not self.clip or norm > self.clip / 2
        for name in learning:
            assert gradients[name].any() or name in missing, name
            expected[name] = self.adamw(name, gradients[name] * factor, *before[name], group)
        for engine in self.engines:
            engine.step()
            assert engine.was_step_applied()
            assert float(engine.get_global_grad_norm()) == pytest.approx(norm, rel=1e-6)
        assert not any(safe_get_local_grad(self.parameters()[name]).any() for name in missing)
        self.counts["global"] += 1
        old, parameters = self.masters, self.parameters()
        self.masters = old | {name: master(parameters[name]) for name in learning}
        for name in learning:
            found = part(self.masters[name])
            rtol, atol = (2.0**-17, 2e-7) if self.rounds(name) else (1e-6, 1e-8)
            if self.compressed and self.wrote_moment:  # which the step rounds before it reads them
                atol = 0.2 * group["lr"]
            torch.testing.assert_close(found, expected[name][0], rtol=rtol, atol=atol, msg=lambda m, n=name: n + m)
            assert not torch.equal(self.masters[name], old[name]), name
            self.counts[name] += 1
        if not self.compressed:
            for name in learning:
                for key, wanted in zip(MOMENTS, expected[name][1:], strict=True):
                    atol_of = 1e-6 * float(wanted.abs().max())
                    # kernels compute 1 - beta2 in FP32: 1 - 0.999 is 1.3e-5 off
                    torch.testing.assert_close(moment(parameters[name], key), wanted, rtol=2e-5, atol=atol_of)
        for engine in self.engines[1:]:  # every bit is that of DeepSpeed's step
            for name, parameter in self.parameters(engine).items():
                if name in learning:
                    assert torch.equal(safe_get_local_grad(parameter), gradients[name]), name
                    for key in MOMENTS:
                        assert torch.equal(moment(parameter, key), moment(parameters[name], key)), f"{name} {key}"
        self.bf16 = {name: numbers for name, numbers in self.bf16.items() if name in self.fixed}
        self.pending, self.rewritten, self.wrote_moment = set(), set(), False

    def moments_before(self, name: str) -> list[torch.Tensor]:
        if not self.counts[name]:
            return [torch.zeros_like(part(self.masters[name]))] * 2
        return [moment(self.parameters()[name], key) for key in MOMENTS]

    def adamw(self, name, gradient, exp_avg, exp_avg_sq, group):
        (beta1, beta2), count = group["betas"], self.counts[name] + 1
        exp_avg = beta1 * exp_avg + (1 - beta1) * gradient
        exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * gradient.square()
        denominator = (exp_avg_sq / (1 - beta2**count)).sqrt() + group["eps"]
        decayed = part(self.masters[name]) * (1 - group["lr"] * group["weight_decay"])
        return decayed - group["lr"] / (1 - beta1**count) * exp_avg / denominator, exp_avg, exp_avg_sq

    def step(self) -> None:
        self.backwards()
        self.finish_step()

    def step_with_evaluation_behind_forward(self) -> None:
        self.backwards(around=self.evaluate)
        self.finish_step()

    def step_with_evaluation_between(self) -> None:
        self.backwards(between=lambda engine: self.evaluate())
        self.finish_step()

    def step_with_zero_grad_between(self) -> None:
        self.backwards(between=lambda engine: engine.zero_grad())
        self.finish_step()

    def step_with_written_gradients(self) -> None:
        """Of one weight all of it, or every rank its part."""
        halve = self.halve(self.trained_weight())
        self.backwards(between=halve, last=halve)
        self.finish_step()

    def halve(self, name: str):
        local = self.draw.random() < 0.5

        def write(engine):
            parameter = self.parameters(engine)[name]
            before = safe_get_full_grad(parameter).clone()
            if local:
                safe_set_local_grad(parameter, safe_get_local_grad(parameter) / 2)
            else:
                safe_set_full_grad(parameter, before / 2)
            assert torch.equal(safe_get_full_grad(parameter), before / 2)

        return write

    def step_of_two_losses(self) -> None:
        if "reentrant" in self.options:  # DeepSpeed refuses
            return
        if any(engine.fp8.graphs is not None for engine in self.engines):
            return  # a graph keeps the activations of one forward, and the second loss may be the one that is captured
        for engine in self.engines:
            for _ in range(self.micro_batches):
                engine.backward(self.loss(engine, self.number) + self.loss(engine, self.number + 1))
                if _ < self.micro_batches - 1:
                    engine.step()
        self.number += 2
        self.finish_step()

    def step_of_coalesced_reductions(self) -> None:
        if self.micro_batches > 1:
            return
        for engine in self.engines:
            with engine.coalesce_grad_reduction():
                for micro in range(2):
                    engine.backward(self.loss(engine, self.number + micro))
        self.number += 2
        self.finish_step()

    def step_without_a_layer(self) -> None:
        """DeepSpeed's step would take the gradient of before."""
        if len(self.engines) == 1:
            self.step()
            self.backwards(without="layers.1.up", last=self.halve("embedding.weight"))
            self.finish_step(without="layers.1.up")

    def overflow(self) -> None:
        value, rank = self.draw.choice([torch.inf, torch.nan]), self.draw.randrange(dist.get_world_size())
        before = [moment(p, key) for p in self.learning() for key in MOMENTS]
        self.backwards(factor=value if dist.get_rank() == rank else 1.0)
        said, handler = [], logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())
        logging.getLogger("ds_fp8").addHandler(handler)
        for engine in self.engines:
            engine.step()
            assert not engine.was_step_applied()
            assert engine.optimizer.loss_scale == 1
        logging.getLogger("ds_fp8").removeHandler(handler)
        self.counts["global"] += 1
        self.counts["skipped"] += 1
        # One that was written is compressed by any step.
        assert self.wrote_moment or all(
            map(torch.equal, before, [moment(p, key) for p in self.learning() for key in MOMENTS])
        )
        self.skipped += 1
        if dist.get_rank() == 0 and self.skipped == 1:  # Inf is NaN behind the cast of gradients
            assert any(line.startswith("a step was skipped, 1 so far: the gradient norm is") for line in said)

    # ---------------------------------------------------------------- writes and reads

    def write_masters(self, within: bool = False) -> None:
        name, factor = self.trained_weight(), self.draw.choice([1.5, -0.5])
        wanted = factor * self.masters[name]
        for parameter in self.of_all(name):
            if within:
                with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                    safe_set_full_fp32_param(parameter, wanted)
            else:
                safe_set_full_fp32_param(parameter, wanted)
        self.bf16.pop(name, None)
        self.masters[name] = self.as_kept(name, wanted)
        self.rewritten.add(name)

    def write_masters_within_a_gather(self) -> None:
        self.write_masters(within=True)

    def write_local_masters(self) -> None:
        """Of one rank alone: they count from the next step on."""
        name, writer = self.trained_weight(), self.draw.randrange(dist.get_world_size())
        wanted, before = self.masters[name].clone(), self.evaluate()
        part = -(-wanted.numel() // dist.get_world_size())
        wanted.view(-1)[writer * part : (writer + 1) * part] *= 2
        for parameter in self.of_all(name):
            if dist.get_rank() == writer:
                safe_set_local_fp32_param(parameter, 2 * safe_get_local_fp32_param(parameter))
        self.pending.add(name)
        self.masters[name] = self.as_kept(name, wanted)
        assert self.evaluate() == before

    def rounds(self, name: str) -> bool:
        """Whether masters are codes: those of what is gathered in BF16 are FP32."""
        return self.coded and "layers" in name and "weight" in name

    def as_kept(self, name: str, wanted: torch.Tensor) -> torch.Tensor:
        """What masters become that a user writes: what is coded, is rounded."""
        if name not in self.pending:
            self.evaluate()  # which casts
        found = master(self.parameters()[name])
        if self.rounds(name):
            torch.testing.assert_close(found, wanted, rtol=2.0**-18, atol=1e-7)
            return found
        return wanted

    def write_bf16(self) -> None:
        name, numbers = self.weight(), None
        for parameter in self.of_all(name):
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                if numbers is None:
                    numbers = parameter.detach().clone()
                    numbers[::2] *= self.draw.choice([3.0, -0.5])
                if dist.get_rank() == 0:
                    parameter.data.copy_(numbers)
        self.bf16[name] = numbers
        self.rewritten -= {name}

    def look(self) -> None:
        """What is gathered for a module, and then for a user who writes nothing, stays as it is."""
        name = self.weight()
        for parameter in self.of_all(name):
            parameter.all_gather_coalesced([parameter]).wait()
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                assert name in self.rewritten or torch.equal(parameter, self.numbers(name))

    def write_moment(self) -> None:
        name, key, self.wrote_moment = self.trained_weight(), self.draw.choice(MOMENTS), True
        for parameter in self.of_all(name):
            wanted = 1.25 * safe_get_full_optimizer_state(parameter, key)
            safe_set_full_optimizer_state(parameter, wanted, key)
            assert torch.equal(safe_get_full_optimizer_state(parameter, key), wanted)

    def freeze(self) -> None:
        """A layer, for a step: moments and decay move its masters all the same, as in DeepSpeed, which hides them."""
        names = [name for name in self.masters if name.startswith("layers.1")]  # ranks gather in one order
        self.train_layer(names, False)
        self.hidden = set(names)
        self.step()
        self.check()
        self.train_layer(names, True)
        self.hidden = set()
        for name in names:
            self.counts[name] += 1
            self.masters[name] = master(self.parameters()[name])

    def train_layer(self, names: list[str], learns: bool) -> None:
        for name in names:
            for parameter in self.of_all(name):
                parameter.requires_grad_(learns)

    def learning(self):
        return [p for p in self.parameters().values() if p.requires_grad]

    # ---------------------------------------------------------------- states

    def offload_gradients(self) -> None:
        self.offload(OffloadStateTypeEnum.lp_grads)

    def offload_weights(self) -> None:
        if not self.fixed:  # DeepSpeed 0.19 runs over the end of its buffer where some are frozen
            self.offload(OffloadStateTypeEnum.lp_params)

    def offload(self, *included) -> None:
        for engine in self.engines:
            engine.offload_states(include=list(included), pin_memory=False)
            engine.reload_states()

    def offload_everything(self) -> None:
        for engine in self.engines:
            with pytest.raises(UserError, match=r"include=\[OffloadStateTypeEnum.lp_params"):
                engine.offload_states(pin_memory=False)

    def save(self) -> str:
        self.saves += 1
        for own, engine in zip(self.owns, self.engines, strict=True):
            engine.save_checkpoint(f"{self.folder}/{own}", tag=f"at{self.saves}", client_state={"saved": self.saves})
        return f"at{self.saves}"

    def load(self, tag: str) -> None:
        for own, engine in zip(self.owns, self.engines, strict=True):
            _, client_state = engine.load_checkpoint(f"{self.folder}/{own}", tag=tag)
            assert client_state["saved"] == self.saves

    def resume_in_place(self) -> None:
        self.go_on_and_resume(new=False)

    def resume_in_a_new_engine(self) -> None:
        self.go_on_and_resume(new=True)

    def go_on_and_resume(self, new: bool) -> None:
        """Two steps, a load, and the same steps: all is as it was the first time."""
        self.step()  # what is written in BF16 alone is not saved
        tag, number = self.save(), self.number
        saved, fixed = dict(self.masters), {name: self.bf16[name] for name in self.fixed}
        counts, ends = dict(self.counts), []
        for again in (False, True):
            if again:
                if new:
                    for engine in self.engines:
                        engine.destroy()
                    self.engines, self.skipped = [self.build(own) for own in self.owns], 0
                self.load(tag)
                self.masters, self.bf16, self.counts, self.number = dict(saved), dict(fixed), dict(counts), number
                self.pending, self.rewritten, self.wrote_moment = set(), set(), False
                self.check()
            self.step()
            self.step()
            states = [moment(p, key) for p in self.learning() for key in MOMENTS]
            ends.append(([*self.masters.values(), *states], self.evaluate()))
        assert ends[0][1] == ends[1][1]
        assert all(map(torch.equal, ends[0][0], ends[1][0]))

    def end(self) -> None:
        """What is left of an engine is the BF16 of its masters, even of a weight that was gathered when it ended."""
        self.step()
        for engine in self.engines:
            state = consolidated_state_dict(engine)
            assert (state is None) == (dist.get_rank() > 0)
            for name in self.parameters() if state else ():
                assert torch.equal(state[name], self.numbers(name).cpu()), name
            weight = engine.module.layers[1].up.weight
            weight.all_gather_coalesced([weight]).wait()
            engine.destroy()
            for name, parameter in engine.module.named_parameters():
                assert torch.equal(bf16(parameter), self.numbers(name)), name


def master(parameter) -> torch.Tensor:
    return models.full_master(parameter).clone()


def moment(parameter, key: str) -> torch.Tensor:
    """Of this rank."""
    return safe_get_local_optimizer_state(parameter, key).clone()


def part(full: torch.Tensor) -> torch.Tensor:
    """This rank's elements."""
    return full.flatten().chunk(dist.get_world_size())[dist.get_rank()]


def bf16(parameter) -> torch.Tensor:
    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().clone()
