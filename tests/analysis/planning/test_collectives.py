"""Predicted transfers against the collectives of compiled training steps on eight CPU devices."""

import itertools

import pytest

from effattn.analysis.planning import memory, settings, traffic
from effattn.nn import TransformerConfig
from tests.analysis.planning import compiled

LAYERS, FEATURES, BATCH, LENGTH, VOCABULARY = 2, 64, 8, 32, 128
ROW = BATCH * LENGTH * FEATURES * 4


def of_step(axis, remat=False):
    """The predicted transfers, the collectives of the compiled step, and the setting."""
    config = TransformerConfig(
        vocab_size=VOCABULARY, num_layers=LAYERS, features=FEATURES, num_heads=8, remat=remat
    )
    options = {"batch": BATCH, "microbatches": 1, "precision": "float32", "remat": remat}
    setting = settings.make(config, None, LENGTH, {axis: 8}, **options, experts=(1, 1))
    program = compiled.step(config, BATCH, LENGTH, axis, 8)
    return traffic.transfers(setting), compiled.collectives(program), setting


pytestmark = [pytest.mark.devices, pytest.mark.slow]


def large(collectives):
    """Bytes of the arrays that are not losses and norms of single tokens."""
    flat = itertools.chain.from_iterable(collectives)
    return sum(size for size in flat if size > BATCH * LENGTH * 4)


def test_data_reduces_each_gradient_once():
    (predicted,), found, setting = of_step("data")
    # The gradients of tied embeddings, of tokens and of logits, are reduced before they are added.
    tied = VOCABULARY * FEATURES * 4
    norms = (2 * LAYERS + 1) * FEATURES * 4
    assert large(found["all-reduce"]) == predicted.size + tied - norms
    assert found.keys() == {"all-reduce"}


def test_fsdp_gathers_weights_and_sums_gradients():
    predicted, found, setting = of_step("fsdp")
    gathered = sum(t.number * t.size for t in predicted if t.operation == "all-gather")
    assert sum(map(sum, found["all-gather"])) == pytest.approx(gathered, rel=0.02)
    # XLA on CPUs has no reduce-scatter: it reduces, and takes a slice.
    gradients = memory.parameters(setting).total * 4
    tied = VOCABULARY * FEATURES * 4
    assert large(found["all-reduce"]) == pytest.approx(gradients + tied, rel=0.02)


def test_tensor_takes_two_all_reduces_a_layer_in_each_direction():
    (predicted,), found, _ = of_step("tensor")
    activations = [sizes for sizes in found["all-reduce"] if ROW in sizes]
    assert (len(activations), ROW) == (predicted.number, predicted.size)
    # XLA on CPUs reduces the gradients of queries, keys and values, and those of both projections
    # of the feed-forward layer, before it adds them.
    assert sorted(map(len, activations)) == [1] * (2 * LAYERS + 2) + [2] * LAYERS + [3] * LAYERS
    assert found.keys() == {"all-reduce"}
