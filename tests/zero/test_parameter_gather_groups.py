"""Weights of one fused product: adjacent in memory if fetched in a row, right in any case, freed after the last."""

import functools
import gc
import math
import time

import deepspeed
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ds_fp8.casts import quantize
from ds_fp8.layers.linear.weights import UNSHARDED, can_stack, stacked_weight
from ds_fp8.zero.param import SCALE_ALIGNMENT
from tests.zero import models
from tests.zero.test_parameter_gather import SECTIONS, SPECS, fp8_linears, gather
from tests.zero.test_training import QUIET, assert_same

# Outputs of the linears of a fused product; blocks of the second straddle its weights
SIZES = [(256, 128, 70), (130, 64, 70), (128, 384), (1024, 37)]
PREFETCH = {"stage3_prefetch_bucket_size": 50000, "stage3_max_reuse_distance": 10**8}


def build(sizes_of_layers, section=None, leaf=False, group=True, **zero):
    def prepare(model):
        if leaf:
            deepspeed.utils.set_z3_leaf_modules(model, [models.Branches])

    layers = [functools.partial(models.Branches, sizes=sizes, group=group) for sizes in sizes_of_layers]
    return models.build(models.config({**QUIET, **(section or {})}, **zero), prepare=prepare, layers=layers)


def release(weights):
    for weight in weights:
        weight.partition()


def codes(weight):
    return getattr(weight, UNSHARDED).data.view(torch.uint8)


def right(weights, masters, preset):
    """Whether every gathered weight is the cast of its whole master tensor."""
    return all(
        models.same_cast(getattr(w, UNSHARDED), quantize(m, *SPECS[preset]))
        for w, m in zip(weights, masters, strict=True)
    )


def whole_product_gathered_together(preset):
    engine = build(SIZES, SECTIONS[preset])
    models.train(engine, 1)
    result = []
    layers = engine.module.layers
    for sizes, before, layer in zip(SIZES, [layers[-1], *layers[:-1]], layers, strict=True):
        weights, others = layer.weights(), (before.join.weight, layer.join.weight)
        masters = [models.full_master(weight) for weight in weights]
        gather(engine, [*others, *reversed(weights)])
        seen = {
            "right": right(weights, masters, preset),
            "others": right(others, [models.full_master(weight) for weight in others], preset),
        }
        ends = [codes(weight).data_ptr() + weight.ds_numel for weight in weights]
        seen["adjacent"] = all(codes(w).data_ptr() == end for w, end in zip(weights[1:], ends[:-1], strict=True))
        if can_stack(sizes, SPECS[preset][1]):
            stacked = stacked_weight(weights, layer.join.recipe)
            seen["view"] = stacked.data.data_ptr() == codes(weights[0]).data_ptr()
            if preset == "tensorwise":
                parts = [quantize(m, *SPECS[preset]).dequantize() for m in masters]
                seen["whole"] = torch.equal(stacked.dequantize(), torch.cat(parts))
            else:
                seen["view"] &= stacked.scale.data_ptr() == getattr(weights[0], UNSHARDED).scale.data_ptr()
                seen["whole"] = models.same_cast(stacked, quantize(torch.cat(masters), *SPECS[preset]))
        release([*weights, *others])
        result.append(seen)
    return result


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("preset", SPECS)
def test_stacking_weights_fetched_together_is_a_view_of_their_whole_cast(ranks, world, preset):
    for layers in ranks(world, whole_product_gathered_together, preset):
        for sizes, seen in zip(SIZES, layers, strict=True):
            assert len(seen) == (5 if can_stack(sizes, SPECS[preset][1]) else 3), sizes
            assert all(seen.values()), (sizes, seen)


def fetched_apart(sizes_of_layers, fetches):
    """Fetch a product's weights in these parts, those that are there a second time.

    Returns for each layer whether its weights and what its product reads are right, whether that is a view, how many
    weights there are, and the bytes left behind.
    """
    engine = build(sizes_of_layers)
    models.train(engine, 1)
    result = []
    for layer in engine.module.layers:
        weights, join = [weight for weight in layer.weights() if not weight.ds_persist], layer.join.weight
        masters = [models.full_master(weight) for weight in [*weights, join]]
        before = live_bytes()
        gather(engine, [join])
        for fetch in fetches:
            some = [weights[i] for i in fetch if i < len(weights)]
            release([weight for weight in some if getattr(weight, UNSHARDED) is not None])
            if some:
                gather(engine, some)
        stacked = stacked_weight(weights, layer.join.recipe)
        same = models.same_cast(stacked, quantize(torch.cat(masters[:-1]), *SPECS["infir2"]))
        view = stacked.data.data_ptr() == codes(weights[0]).data_ptr()
        result.append((right([*weights, join], masters, "infir2"), same, view, len(weights)))
        del stacked
        release([*weights, join])
        result[-1] += (live_bytes() - before,)
    return result


@pytest.mark.parametrize(
    ("fetches", "view"),
    [
        (([0], [1, 2]), True),
        (([2, 1], [0]), True),
        (([1], [2], [0]), True),
        (([0], [1, 2], [1]), False),  # released, and fetched again
    ],
)
def test_weights_fetched_apart_are_one_operand(ranks, fetches, view):
    """Also with a third weight so small that it is not gathered at all: then there is no room beside its product."""
    found = ranks(2, fetched_apart, [(256, 128, 70), (256, 128, 2)], fetches)
    assert found == [[(True, True, view, 3, 0), (True, True, False, 2, 0)]] * 2


def room_beside(sizes):
    """Fetch weights of a product one by one, release some, and fetch one again.

    Returns the elements of each weight, the bytes of codes after each of these, and what readers of one weight keep.
    """
    engine = build([sizes])
    models.train(engine, 1)
    weights = engine.module.layers[0].weights()
    gather(engine, weights)
    release(weights)
    before, held = live_bytes(), []
    for fetch, then in (([0], [0]), ([0, 1], [1]), ([1], [0, 1])):
        for i in fetch:
            gather(engine, [weights[i]])
        held.append(live_bytes() - before)
        release([weights[i] for i in then])
        held.append(live_bytes() - before)
    return (
        [weight.ds_numel for weight in weights],
        held,
        [engine.fp8.weights.unsharded(weight).data.untyped_storage().nbytes() for weight in weights],
    )


def test_room_is_left_once_and_only_while_it_may_be_taken(ranks):
    for (first, second, third), held, read in ranks(2, room_beside, (256, 128, 70)):
        product = first + second + third
        # The first alone; both, of which one goes; it comes again, beside what the first left.
        assert held == [product, 0, product, product, product + second, 0]
        assert read == [first, second, third]


def test_no_room_is_left_where_padding_would_part_it(ranks):
    for (first, second, _), held, _ in ranks(3, room_beside, (256, 128, 70)):
        padding = 2 * 2
        assert held[1] == held[5] == 0
        for found, numel in zip(held, (first, 0, first + second, first, first + second, 0), strict=True):
            assert numel <= found <= numel + padding


def stacked_where_it_is_used(leaf):
    """Whether forward found all weights of the product adjacent, by layer."""
    engine = build([(256, 128, 70)] * 3, leaf=leaf)
    found = []

    def look(layer, _):
        stacked = stacked_weight(layer.weights(), layer.join.recipe)
        found.append(stacked.data.data_ptr() == codes(layer.weights()[0]).data_ptr())

    for layer in engine.module.layers:
        layer.register_forward_pre_hook(look)
    models.train(engine, 2)
    return found, [name for name, m in fp8_linears(engine).items() if getattr(m.weight, UNSHARDED) is not None]


def test_a_leaf_module_finds_its_product_stacked_and_leaves_nothing_behind(ranks):
    assert ranks(2, stacked_where_it_is_used, True) == [([True] * 6, [])] * 2


def losses_and_weights(leaf, group, zero):
    engine = build([(256, 128, 70)] * 2, leaf=leaf, group=group, **zero)
    return models.train(engine, 4), models.bf16_weights(engine)


@pytest.mark.parametrize("leaf", [False, True])
@pytest.mark.parametrize("zero", [{}, PREFETCH], ids=["no prefetch", "prefetch"])
def test_marking_a_product_changes_nothing(ranks, baseline, leaf, zero):
    plain = baseline(2, losses_and_weights, False, False, {})
    for left, marked in zip(plain, ranks(2, losses_and_weights, leaf, True, zero), strict=True):
        assert_same(left, marked)


def scale_layouts():
    engine = build(SIZES)
    weights = [m.weight for m in fp8_linears(engine).values()]
    gather(engine, weights)
    scales = [getattr(weight, UNSHARDED).scale for weight in weights]
    again = [scale.data_ptr() for scale in scales]
    release(weights)
    gather(engine, weights)
    once = again == [getattr(weight, UNSHARDED).scale.data_ptr() for weight in weights]
    finite = torch.empty(0).set_(scales[0].untyped_storage()).isfinite().all().item()
    return [(s.shape, s.stride(), s.data_ptr() % (4 * SCALE_ALIGNMENT)) for s in scales], finite, once


def test_rows_of_block_scales_are_padded_once_a_refresh(ranks):
    for layouts, finite, once in ranks(2, scale_layouts):
        assert len(layouts) == sum(len(sizes) + 1 for sizes in SIZES)
        for shape, stride, misalignment in layouts:
            assert stride == (math.ceil(shape[1] / SCALE_ALIGNMENT) * SCALE_ALIGNMENT, 1)
            assert misalignment == 0
        assert finite
        assert once


def live_bytes():
    """Bytes of all FP8 and uint8 storages that stay alive; gloo's thread drops its own a moment after a wait."""
    return min(_live_bytes_after(0.1) for _ in range(3))


def _live_bytes_after(seconds):
    time.sleep(seconds)
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and thing.dtype in (torch.uint8, torch.float8_e4m3fn):
            storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    return sum(storages.values())


def memory_of_a_gather():
    engine = build([(256, 128, 70)])
    layer = engine.module.layers[0]
    weights = [*layer.weights(), layer.join.weight]
    gather(engine, weights)  # casts the shards
    release(weights)
    before = live_bytes()
    handle = weights[0].all_gather_coalesced(weights)
    handle.wait()
    held = live_bytes() - before
    storages = [StorageWeakRef(codes(weight).untyped_storage()) for weight in weights]
    alive = []
    for weight in weights:
        weight.partition()
        alive.append([not storage.expired() for storage in storages])
    return held, sum(weight.ds_numel for weight in weights), alive, live_bytes() - before


@pytest.mark.parametrize("world", [2, 3])
def test_a_product_is_held_once_and_freed_with_its_last_weight(ranks, world):
    for held, numel, alive, after in ranks(world, memory_of_a_gather):
        # The shards' padding, of at most world - 1 bytes a weight, stays behind a stack.
        assert numel <= held <= numel + 2 * (world - 1)
        assert alive == [[True] * 4, [True] * 4, [False] * 3 + [True], [False] * 4]
        assert after == 0
