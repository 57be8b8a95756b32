"""MicroStepGraphs on a machine without a GPU: all of its decisions, with graphs that launch the module again.

What stands in for a graph computes what the kernels of one would, and changes nothing else of DeepSpeed's.
"""

from unittest import mock

import torch
from torch.utils._pytree import tree_flatten
from transformers import AutoModelForCausalLM, Qwen2Config

from ds_fp8.engine import micro_steps
from ds_fp8.engine.capture import masks_as_outside
from ds_fp8.engine.micro_step_graph import MicroStepGraph, only_differentiable
from tests.zero import models


class _Passes:
    """In place of a CUDAGraph."""

    def __init__(self, replay):
        self.replay = replay

    def reset(self):
        pass


class Relaunched(MicroStepGraph):
    """In place of what is captured."""

    def __init__(self, call, batch, most, micro_step, gradients, addresses, log):
        self._call, self.most, self._micro_step, self._gradients = call, most, micro_step, gradients
        self.addresses, self._log, self._token, self._persistent = addresses, log, None, []
        self._wire = mock.Mock()
        self._batch = {name: x.detach().clone() if torch.is_tensor(x) else x for name, x in batch.items()}
        self._anchor, self._gradient = torch.zeros((), requires_grad=True), torch.ones(())
        self._arrives, self._sends = frozenset(gradients._places), 0
        self._leaves = []
        self._forward, self._backward = _Passes(self._launch_forward), _Passes(self._launch_backward)

    def close(self):
        self._log.append("closed")
        super().close()

    def replay(self, batch):
        self._log.append(f"replayed for {self.most}")
        return super().replay(batch)

    def _launch(self):
        with masks_as_outside(self.most), torch.enable_grad():
            leaves, self._structure = tree_flatten(self._call(**self._batch))
        self._place, loss = only_differentiable(leaves)
        self._micro_step.finish_gathers()
        return leaves, loss

    def _launch_forward(self):
        state = self._micro_step.remember()
        leaves, _ = self._launch()
        self._leaves = [leaf.detach() if torch.is_tensor(leaf) else leaf for leaf in leaves]
        self.loss = self._leaves[self._place]
        del leaves
        self._micro_step.partition()
        self._micro_step.restore(state)

    def _launch_backward(self):
        state, arrived = self._micro_step.remember(), self._gradients.arrived
        _, loss = self._launch()
        torch.autograd.backward([loss], [self._gradient])
        self._micro_step.finish_backward()
        self._micro_step.restore(state)
        self._gradients.arrived = arrived


class Graphs(micro_steps.MicroStepGraphs):
    """All decisions, and nothing of CUDA. `log` says what was done."""

    def __init__(self, engine):
        fp8 = engine.fp8
        self.log = []
        with mock.patch.object(torch.cuda, "Stream"):
            super().__init__(
                engine, fp8.step.gradients, fp8.parameter_gather, fp8.wire, fp8.health, fp8.monitor, known_only=False
            )
        self._micro_step.start_clock = lambda: None
        self._graphs.make_room = lambda *_, **__: None

    def _captured(self, kind, batch, most):
        self.log.append(f"captured for {most}")
        self._settle()
        self._agreement.least(True)  # whether all could
        graph = Relaunched(self._stock, batch, most, self._micro_step, self._gradients, self._addresses(), self.log)
        self._graphs.add(kind, graph, 0, 0)
        self._captured_once = True
        return graph

    def _aside(self, args, kwargs):
        self.log.append("eager")
        return self._stock(*args, **kwargs)


def engine_of(attention: str = "sdpa", fp8: dict | None = None):
    """An engine of a small Qwen2, with this "fp8" section, and the list of what it says."""
    import ds_fp8

    models.leave_modules_to_themselves()
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen2Config(**sizes, num_hidden_layers=1, vocab_size=128)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=attention)
    section = models.config({"monitor": {"every": 0}, **(fp8 or {})}) | {"train_micro_batch_size_per_gpu": 1}
    engine = ds_fp8.initialize(model=model, model_parameters=list(model.parameters()), config=section)[0]
    said = []
    engine.fp8.health.say = said.append
    return engine, said
