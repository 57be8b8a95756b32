"""Weights of one fused product: adjacent in memory if fetched in a row, right in any case, freed after the last."""

import functools
import gc
import math
import time

import deepspeed
import pytest
import torch
from deepspeed import comm as dist
from torch.multiprocessing.reductions import StorageWeakRef

from ds_fp8.casts import quantize
from ds_fp8.layers.linear.weights import UNSHARDED, can_stack, stacked_weight
from ds_fp8.zero.param import SCALE_ALIGNMENT
from tests.ranks import case, on_ranks
from tests.zero import models
from tests.zero.models import fp8_linears, gather, release
from tests.zero.test_parameter_gather import SECTIONS, SPECS
from tests.zero.test_training import assert_same

# Outputs of the linears of a fused product; blocks of the second straddle its weights
SIZES = [(256, 128, 70), (130, 64, 70), (128, 384), (1024, 37)]
PREFETCH = {"stage3_prefetch_bucket_size": 50000, "stage3_max_reuse_distance": 10**8}


def build(sizes_of_layers, section=None, leaf=False, group=True, **zero):
    """An engine behind a step."""

    def prepare(model):
        if leaf:
            deepspeed.utils.set_z3_leaf_modules(model, [models.Branches])

    layers = [functools.partial(models.Branches, sizes=sizes, group=group) for sizes in sizes_of_layers]
    engine = models.engine(section or {}, prepare=prepare, layers=layers, **zero)
    losses = models.train(engine, 1)
    return engine, losses


def codes(weight):
    return getattr(weight, UNSHARDED).data.view(torch.uint8)


def right(weights, masters, preset="infir2"):
    """Whether every gathered weight is the cast of its whole master tensor."""
    return all(
        models.same_cast(getattr(w, UNSHARDED), quantize(m, *SPECS[preset]))
        for w, m in zip(weights, masters, strict=True)
    )


def is_view(stacked, weights):
    return stacked.data.data_ptr() == codes(weights[0]).data_ptr()


@on_ranks(2, 3)
def test_stacking_weights_fetched_together_is_a_view_of_their_whole_cast():
    for preset in SPECS:
        engine, _ = build(SIZES, SECTIONS[preset])
        layers = engine.module.layers
        for sizes, before, layer in zip(SIZES, [layers[-1], *layers[:-1]], layers, strict=True):
            with case((preset, sizes)):
                weights, others = layer.weights(), (before.join.weight, layer.join.weight)
                masters = [models.full_master(weight) for weight in weights]
                gather([*others, *reversed(weights)])
                assert right(weights, masters, preset)
                assert right(others, [models.full_master(weight) for weight in others], preset)
                ends = [codes(weight).data_ptr() + weight.ds_numel for weight in weights]
                assert [codes(weight).data_ptr() for weight in weights[1:]] == ends[:-1]
                if can_stack(sizes, SPECS[preset][1]):
                    stacked = stacked_weight(weights, layer.join.recipe)
                    assert is_view(stacked, weights)
                    if preset == "tensorwise":
                        parts = [quantize(m, *SPECS[preset]).dequantize() for m in masters]
                        assert torch.equal(stacked.dequantize(), torch.cat(parts))
                    else:
                        assert stacked.scale.data_ptr() == getattr(weights[0], UNSHARDED).scale.data_ptr()
                        assert models.same_cast(stacked, quantize(torch.cat(masters), *SPECS[preset]))
                release([*weights, *others])
        if preset == "infir2":
            assert_rows_of_scales_are_padded_once_a_refresh([m.weight for m in fp8_linears(engine).values()])
        engine.destroy()


def assert_rows_of_scales_are_padded_once_a_refresh(weights):
    gather(weights)
    scales = [getattr(weight, UNSHARDED).scale for weight in weights]
    addresses = [scale.data_ptr() for scale in scales]
    release(weights)
    gather(weights)
    assert [getattr(weight, UNSHARDED).scale.data_ptr() for weight in weights] == addresses
    assert len(scales) == sum(len(sizes) + 1 for sizes in SIZES)
    assert torch.empty(0).set_(scales[0].untyped_storage()).isfinite().all()
    for scale in scales:
        assert scale.stride() == (math.ceil(scale.shape[1] / SCALE_ALIGNMENT) * SCALE_ALIGNMENT, 1)
        assert scale.data_ptr() % (4 * SCALE_ALIGNMENT) == 0
    release(weights)


FETCHES = [  # and whether what they bring is a view
    (([0], [1, 2]), True),
    (([2, 1], [0]), True),
    (([1], [2], [0]), True),
    (([0], [1, 2], [1]), False),  # released, and fetched again
]


@on_ranks(2)
def test_weights_fetched_apart_are_one_operand():
    """Also with a third weight so small that it is not gathered at all: then there is no room beside its product."""
    engine, _ = build([(256, 128, 70), (256, 128, 2)])
    for fetches, view in FETCHES:
        for layer, count in zip(engine.module.layers, (3, 2), strict=True):
            with case((fetches, count)):
                weights, join = [weight for weight in layer.weights() if not weight.ds_persist], layer.join.weight
                assert len(weights) == count
                masters = [models.full_master(weight) for weight in [*weights, join]]
                before = live_bytes()
                gather([join])
                for fetch in fetches:
                    some = [weights[i] for i in fetch if i < count]
                    release([weight for weight in some if getattr(weight, UNSHARDED) is not None])
                    if some:
                        gather(some)
                stacked = stacked_weight(weights, layer.join.recipe)
                assert right([*weights, join], masters)
                assert models.same_cast(stacked, quantize(torch.cat(masters[:-1]), *SPECS["infir2"]))
                assert is_view(stacked, weights) == (view and count == 3)
                del stacked
                release([*weights, join])
                assert live_bytes(lambda found, before=before: found == before) == before


@on_ranks(2, 3)
def test_room_is_left_once_and_only_while_it_may_be_taken():
    """And none where padding would part it: on 3 ranks."""
    engine, _ = build([(256, 128, 70)])
    weights = engine.module.layers[0].weights()
    gather(weights)
    release(weights)
    before, (first, second, third) = live_bytes(), (weight.ds_numel for weight in weights)
    if dist.get_world_size() == 2:
        product, padding = first + second + third, 0
        # The first alone; both, of which one goes; it comes again, beside what the first left.
        expected = [product, 0, product, product, product + second, 0]
    else:
        padding, expected = 2 * 2, [first, 0, first + second, first, first + second, 0]
    wanted = iter(expected)

    def check():
        low = next(wanted)
        high = low + padding * bool(low)
        assert low <= live_bytes(lambda found: low <= found - before <= high) - before <= high, low

    for fetch, then in (([0], [0]), ([0, 1], [1]), ([1], [0, 1])):
        for i in fetch:
            gather([weights[i]])
        check()
        release([weights[i] for i in then])
        check()
    if dist.get_world_size() == 2:
        kept = [engine.fp8.weights.unsharded(weight).data.untyped_storage().nbytes() for weight in weights]
        assert kept == [first, second, third]


@on_ranks(2)
def test_a_leaf_module_finds_its_product_stacked_and_leaves_nothing_behind():
    engine, _ = build([(256, 128, 70)] * 3, leaf=True)
    found = []
    for layer in engine.module.layers:
        layer.register_forward_pre_hook(
            lambda layer, _: found.append(is_view(stacked_weight(layer.weights(), layer.join.recipe), layer.weights()))
        )
    models.train(engine, 2, start=1)
    assert (found, models.held(engine)) == ([True] * 6, [])


@on_ranks(2)
def test_marking_a_product_changes_nothing():
    def losses_and_weights(leaf, group, zero):
        engine, losses = build([(256, 128, 70)] * 2, leaf=leaf, group=group, **zero)
        return losses + models.train(engine, 2, start=1), models.bf16_weights(engine)

    plain = losses_and_weights(False, False, {})
    for leaf in (False, True):
        for zero in ({}, PREFETCH):
            with case((leaf, zero)):
                assert_same(losses_and_weights(leaf, True, zero), plain)


def live_bytes(wanted=None):
    """Bytes of all FP8 and uint8 storages that stay alive; gloo's thread drops its own a moment after a wait."""
    found = []
    for _ in range(3 if wanted is None else 20):
        time.sleep(0.03)
        gc.collect()
        storages = {}
        for thing in gc.get_objects():
            if issubclass(type(thing), torch.Tensor) and thing.dtype in (torch.uint8, torch.float8_e4m3fn):
                storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
        found.append(sum(storages.values()))
        if wanted is not None and wanted(found[-1]):
            return found[-1]
    return min(found)


@pytest.mark.parametrize("world", [2, 3])
@on_ranks()
def test_a_product_is_held_once_and_freed_with_its_last_weight(world):
    engine, _ = build([(256, 128, 70)])
    layer = engine.module.layers[0]
    weights = [*layer.weights(), layer.join.weight]
    gather(weights)  # casts the shards
    release(weights)
    before, numel = live_bytes(), sum(weight.ds_numel for weight in weights)
    gather(weights)
    # The shards' padding, of at most world - 1 bytes a weight, stays behind a stack.
    high = numel + 2 * (world - 1)
    assert numel <= live_bytes(lambda found: numel <= found - before <= high) - before <= high
    storages, alive = [StorageWeakRef(codes(weight).untyped_storage()) for weight in weights], []
    for weight in weights:
        weight.partition()
        alive.append([not storage.expired() for storage in storages])
    assert alive == [[True] * 4, [True] * 4, [False] * 3 + [True], [False] * 4]
    assert live_bytes(lambda found: found == before) == before
