"""Which micro-steps of packed rows become graphs, and for how many documents, on two ranks with rows of their own.

A machine without a GPU captures nothing. What stands in for a graph here launches the module again, under the masks of
a capture: which micro-step meets which graph is decided as always, and its losses are those of the module.
"""

from unittest import mock

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from ds_fp8.engine import micro_steps
from ds_fp8.engine.capture import masks_as_outside
from ds_fp8.train import packed_attention
from tests.zero import models

LENGTH = 64


class Relaunched:
    """In place of a MicroStepGraph."""

    pending = False

    def __init__(self, call, most, addresses, log):
        self.call, self.most, self.addresses, self.log = call, most, addresses, log

    def close(self):
        self.log.append("closed")

    def replay(self, batch):
        self.log.append(f"replayed for {self.most}")
        with masks_as_outside(self.most):
            return self.call(**batch)


class Graphs(micro_steps.MicroStepGraphs):
    """All of its decisions, and nothing of CUDA."""

    def __init__(self, *args):
        self.log = []
        with mock.patch.object(torch.cuda, "Stream"):
            super().__init__(*args)
        self._micro_step.start_clock = lambda: None

    def _captured(self, kind, batch, most):
        self.log.append(f"captured for {most}")
        graph = self._graphs[kind] = Relaunched(self._stock, most, self._addresses(), self.log)
        return graph

    def _aside(self, args, kwargs):
        self.log.append("eager")
        return self._stock(*args, **kwargs)

    def _settle(self):
        pass


def trained(rows, graphs):
    """Losses of this rank whose row of every step has documents of these lengths, what became of it, what was said."""
    from deepspeed import comm as dist

    import ds_fp8

    packed_attention.register()
    models.leave_modules_to_themselves()
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen2Config(**sizes, num_hidden_layers=1, vocab_size=128)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="packed")
    section = models.config({"monitor": {"every": 0}}) | {"train_micro_batch_size_per_gpu": 1}
    engine = ds_fp8.initialize(model=model, model_parameters=list(model.parameters()), config=section)[0]
    fp8, said, log = engine.fp8, [], None
    fp8.health.say = said.append
    if graphs:
        fp8.graphs = Graphs(engine, fp8.step.gradients, fp8.parameter_gather, fp8.wire, fp8.health, fp8.monitor, False)
        log = fp8.graphs.log
    losses = []
    for step, lengths in enumerate(rows):
        positions = torch.cat([torch.arange(length) for length in lengths[dist.get_rank()]])[None]
        tokens = (torch.arange(LENGTH) * 7 + step + dist.get_rank())[None] % 128
        loss = engine(input_ids=tokens, labels=tokens, position_ids=positions, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    result = losses, log and list(log), said
    engine.destroy()
    return result


ONE = [LENGTH]
ROWS = [
    (ONE, ONE, "eager"),
    (ONE, ONE, "eager"),
    (ONE, ONE, "captured for 0, replayed for 0"),
    (ONE, ONE, "replayed for 0"),
    ([20, 44], ONE, "eager"),
    ([1] * 64, [63, 1], "eager"),
    ([30, 34], [9, 55], "closed, captured for 128, replayed for 128"),
    ([5] * 12 + [4], [31, 33], "replayed for 128"),
]
MORE = [
    ([20, 44], [1, 63], "eager"),
    ([21, 43], [64], "eager"),
    ([22, 42], [2, 62], "captured for 16, replayed for 16"),
    ([4] * 16, [2] * 32, "closed, captured for 64, replayed for 64"),
    ([22, 42], [1] * 64, "replayed for 64"),
]


def check(ranks, rows):
    given = [row[:2] for row in rows]
    launched, captured = (ranks(2, trained, given, graphs) for graphs in (False, True))
    for theirs, ours in zip(launched, captured, strict=True):
        assert ", ".join(ours[1]) == ", ".join(what for *_, what in rows)
        assert ours[0] == theirs[0]
        assert ours[2] == []


def test_rows_of_one_document_are_plain_until_packed_ones_come(ranks):
    check(ranks, ROWS)


def test_a_graph_is_captured_anew_for_more_documents_on_any_rank(ranks):
    check(ranks, MORE)
