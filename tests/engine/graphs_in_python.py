"""GraphDriver on a machine without a GPU: all of its code, with graphs that are lists of operations.

As a CUDA graph, such a list has every Python value that its recording met, and all tensors where they were: what a
replay reads and writes lies at the same addresses. Recording computes, which a capture does not, so that what it writes
outside of its own memory is put back.
"""

import contextlib
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from transformers import AutoModelForCausalLM, Qwen2Config

import ds_fp8
from ds_fp8.engine import attach
from ds_fp8.graphs import driver
from ds_fp8.graphs.capture import GraphPool
from ds_fp8.zero.deepspeed.micro_step import MicroStep
from tests.zero import models

READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)


def _tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if torch.is_tensor(leaf)]


def _storage(tensor):
    return tensor.untyped_storage().data_ptr() if tensor.numel() else None


def _alias(tensor):
    # Whoever gives `parameter.data` other memory does not give it to this one.
    return tensor.detach() if torch.is_tensor(tensor) else tensor


def _already(*_):
    return True


class OperationList:
    """In place of a CUDAGraph."""

    def __init__(self):
        self._operations = []

    def replay(self):
        with torch.no_grad():
            for function, args, kwargs, results in self._operations:
                found = function(*args, **kwargs)
                for leaf in tree_leaves(found):
                    if hasattr(leaf, "wait"):  # of a collective
                        leaf.wait()
                for mine, new in zip(results, _tensors(found), strict=True):
                    if mine is not None:
                        mine.copy_(new)

    def add(self, function, args, kwargs, found):
        """Record an operation; results in memory of its own are copied into the first ones at a replay."""
        given = {_storage(tensor) for tensor in _tensors((args, kwargs))}
        results = [None if _storage(x) in given or not x.numel() else _alias(x) for x in _tensors(found)]
        self._operations.append((function, *tree_map(_alias, (args, kwargs)), results))

    def reset(self):
        self._operations.clear()


class _Recording(TorchDispatchMode):
    """Records all operations, and puts back what they write to tensors from before."""

    def __init__(self, graph):
        super().__init__()
        self._graph, self._own, self._before = graph, set(), {}
        self._kept = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        schema = function._schema
        picks = function is torch.ops.aten.index.Tensor and any(x.dtype is torch.bool for x in _tensors(args[1]))
        if picks or function in READS:
            raise RuntimeError(f"{schema.name} reads from the device, which a capture forbids")
        collective = schema.name.startswith("c10d::")
        for argument, value in zip(schema.arguments, args, strict=False):
            if collective or (argument.alias_info is not None and argument.alias_info.is_write):
                self._keep(value)
        for argument in schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write and argument.name in kwargs:
                self._keep(kwargs[argument.name])
        found = function(*args, **kwargs)
        if collective:
            for leaf in tree_leaves(found):
                if hasattr(leaf, "wait"):
                    leaf.wait()
        given = {_storage(tensor) for tensor in _tensors((args, kwargs))}
        self._own.update(_storage(x) for x in _tensors(found) if _storage(x) not in given)
        self._kept.append([x.detach() for x in _tensors(found)])  # or its memory would be another tensor's soon
        self._graph.add(function, args, kwargs, found)
        return found

    def _keep(self, value):
        for tensor in _tensors(value):
            place = _storage(tensor)
            if place is not None and place not in self._own and place not in self._before:
                storage = tensor.untyped_storage()
                self._before[place] = storage, storage.clone()

    def restore(self):
        for storage, before in self._before.values():
            storage.copy_(before)


class RecordedPool(GraphPool):
    """Captures lists of operations, by all code of a capture but CUDA's. `log` says what was done."""

    room = True

    def __init__(self, micro_step):
        self.log, self._recordings = [], []
        with mock.patch.object(torch.cuda, "Stream"):
            super().__init__(micro_step)

    def capture(self, call_module, call, draws):
        self.log.append(f"captured for {call.shape.capacity()}" + ", padded" * call.padded)
        self.log += ["in the order of a dry run"] * (not call.ordered)
        cuda = {"CUDAGraph": OperationList, "graph": self._record, "graph_pool_handle": object}
        memory = {"empty_cache": lambda: None, "memory_reserved": lambda _: 0, "mem_get_info": lambda _: (1, 1)}
        try:
            with mock.patch.multiple(torch.cuda, **cuda, **memory):
                graph = super().capture(call_module, call, draws)
        finally:
            self._restore()
        graph.close = self._logged(graph.close, "closed")
        return graph

    def _dry_run(self, make):
        made = []
        try:
            super()._dry_run(lambda: made.append(make()) or made[-1])
        finally:
            self._restore()
        assert not any(graph._forward._operations for graph in made), "nothing of a dry run is kept"

    @contextlib.contextmanager
    def _record(self, graph, pool, stream, capture_error_mode):
        assert pool is not None
        recording, state = _Recording(graph), torch.get_rng_state()
        # Collectives are waited for when they are recorded; gloo's wait would copy what it has received once more.
        with mock.patch.object(torch.distributed.Work, "wait", _already), recording:
            yield
        self._recordings.append(recording)
        torch.set_rng_state(state)

    def _restore(self):
        while self._recordings:  # backward wrote last
            self._recordings.pop().restore()

    def _logged(self, function, word):
        def with_log():
            self.log.append(word)
            function()

        return with_log

    def memory_of_check(self, compute):
        compute()
        assert self.log.pop() == "eager"
        return 0

    def has_room(self, needed, kept):
        return self.room

    def recover(self):
        pass


class Graphs(driver.GraphDriver):
    """All of it, with lists of operations in place of CUDA graphs."""

    def __init__(self, engine, auto=False):
        fp8 = engine.fp8
        micro_step = MicroStep(engine, fp8.step.gradients, fp8.weights, fp8.wire)
        micro_step.start_clock = lambda: None
        with mock.patch.object(driver, "GraphPool", RecordedPool):
            super().__init__(engine, micro_step, lambda line: fp8.health.say(line), fp8.monitor, auto)
        self.log = self._pool.log

    def _call_aside(self, call):
        self.log.append("eager")
        return self._call_module(*call.args, **call.kwargs)

    def _replay(self, call):
        self.log.append(f"replayed for {call.shape.graph.max_documents}")
        return super()._replay(call)

    def _check(self, call):
        self.log.append("checked")
        return super()._check(call)


def log_of(engine, wanted=True, auto=False):
    """Give an engine its graphs, and return the list of what they do; an empty one where none are wanted."""
    if not wanted:
        return []
    engine.fp8.graphs = Graphs(engine, auto)
    return engine.fp8.graphs.log


class Around(torch.nn.Module):
    """A model around another, for forwards of somebody's own."""

    def __init__(self, model):
        super().__init__()
        self.model, self.config = model, model.config


def take_step(engine, loss):
    """Loss and gradient norm of a step."""
    engine.backward(loss)
    engine.step()
    return loss.item(), float(engine.get_global_grad_norm())


def model_of(attention: str = "sdpa", layers: int = 1, **more):
    """A small Qwen2 with weights from seed 0."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen2Config(**sizes, num_hidden_layers=layers, vocab_size=128, **more)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=attention)


def engine_of(attention: str = "sdpa", fp8=None, model=None):
    """An engine of a small Qwen2 or of `model`, and the list of what it says."""
    model = model_of(attention) if model is None else model
    section = models.config({"monitor": {"every": 0}, **(fp8 or {})}) | {"train_micro_batch_size_per_gpu": 1}
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine = ds_fp8.initialize(model=model, model_parameters=parameters, config=section)[0]
    said = []
    engine.fp8.health.say = said.append
    return engine, said


class Run:
    """An engine of a small Qwen2 or of `model`, with graphs or without, destroyed behind the context.

    said, log: what it says, and what its graphs do. happened: what they did in each step, as one text.
    """

    def __init__(self, attention: str = "sdpa", graphs: bool = True, auto: bool = False, fp8=None, model=None):
        self.engine, self.said = engine_of(attention, fp8, model)
        self.log = log_of(self.engine, graphs, auto)
        self.graphs, self.found, self.happened, self._seen = self.engine.fp8.graphs, [], [], 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.engine.destroy()

    def step(self, loss):
        """Loss and gradient norm of a step, which `found` keeps."""
        self.found.append(take_step(self.engine, loss))
        self.happened.append(", ".join(self.log[self._seen :]))
        self._seen = len(self.log)
        return self.found[-1]


@contextlib.contextmanager
def in_every_engine():
    """Give all engines that are made inside these graphs, whoever makes them; yields (graphs, what is said) of each."""
    made = []

    def attach_graphs(engine, state):
        if state.step is not None:  # a reference model's has none
            said = []
            state.health.say = said.append
            state.graphs = Graphs(engine, auto=True)
            state.health.on_move = state.graphs.reset
            made.append((state.graphs, said))

    with mock.patch.object(attach, "_capture_graphs", attach_graphs):
        yield made
