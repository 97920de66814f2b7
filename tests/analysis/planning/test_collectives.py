"""Predicted transfers against the collectives of compiled training steps on eight CPU devices."""

import collections
import itertools

import pytest

from effattn.analysis import liveness
from effattn.analysis.planning import memory, settings, traffic
from effattn.nn import Experts, TransformerConfig
from tests.analysis.planning import compiled
from tests.analysis.planning.test_memory import REMAT

LAYERS, FEATURES, BATCH, LENGTH, VOCABULARY = 2, 64, 8, 32, 128
ROW = BATCH * LENGTH * FEATURES * 4


def of_step(axis, remat=False):
    """The predicted transfers, the collectives of the compiled step, and the setting."""
    config = TransformerConfig(
        vocab_size=VOCABULARY, num_layers=LAYERS, features=FEATURES, num_heads=8, remat=remat
    )
    options = {"batch": BATCH, "microbatches": 1, "precision": "float32", "remat": remat}
    setting = settings.make(config, None, LENGTH, {axis: 8}, **options)
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


MIXERS = {
    "softmax": {},
    "sliding_window": {"local_window_size": (9, 0)},
    "linear": {},
    "gated_linear": {},
    "mamba": {},
    "hyena": {"max_length": 256},
    "s4d": {},
    "mixture_of_mechanisms": {"mechanisms": ("softmax", "linear")},
}
# Predicted sums of gradients, relative to those of XLA, which sums one more spectrum of Hyena.
SUMS = {"hyena": 0.918}
NAMES = {"collective-permute": "send"}


@pytest.mark.parametrize("remat", [False, True], ids=["saved", "recomputed"])
@pytest.mark.parametrize("name", MIXERS)
def test_a_divided_sequence_exchanges_what_the_form_of_the_model_does(name, remat):
    config = TransformerConfig(
        vocab_size=VOCABULARY,
        num_layers=1,
        features=FEATURES,
        num_heads=8,
        mixer={"name": name, **MIXERS[name]},
        remat=remat,
    )
    options = {"batch": 2, "microbatches": 1, "precision": "float32", "remat": remat}
    setting = settings.make(config, None, 256, {"sequence": 8}, **options)
    predicted = collections.Counter()
    for t in traffic.transfers(setting):
        predicted[t.operation] += t.number * t.size
    program = compiled.step(config, 2, 256, "sequence", 8)
    found = {
        NAMES.get(operation, operation): sum(map(sum, sizes))
        for operation, sizes in compiled.collectives(program).items()
    }
    if "reduce-scatter" in found:
        found["reduce-scatter"] *= 8  # operands, not results
    # XLA reduces the two gradients of tied embeddings before it adds them.
    reduced = found.pop("all-reduce") - VOCABULARY * FEATURES * 4
    of_xla = predicted.pop("all-reduce") / reduced
    assert of_xla == pytest.approx(SUMS.get(name, 1.0), rel=0.01)
    # XLA folds the transitions of linear attention, which are ones.
    assert found == pytest.approx(predicted, rel=0.02)


@pytest.mark.parametrize(
    ("mixer", "length", "remat"),
    [
        ("mamba", 256, False),
        ("s4", 512, False),
        ("rwkv4", 512, False),
        pytest.param("hyena", 256, True, marks=REMAT),
    ],
)
def test_memory_of_a_divided_sequence(mixer, length, remat):
    config = TransformerConfig(
        vocab_size=VOCABULARY,
        num_layers=2,
        features=FEATURES,
        num_heads=8,
        mixer=mixer,
        max_length=length,
        remat=remat,
    )
    options = {"batch": 2, "microbatches": 1, "precision": "float32", "remat": remat}
    setting = settings.make(config, None, length, {"sequence": 8}, **options)
    found = memory.training(setting, liveness.CPU, 0.0).total
    program = compiled.step(config, 2, length, "sequence", 8)
    assert found == pytest.approx(compiled.bytes_of(program), rel=0.1)


@pytest.mark.parametrize("capacity", [None, 1.0], ids=["no capacity", "capacity"])
def test_experts_are_gathered(capacity):
    # XLA moves slots in place of kernels if they are smaller, as with fewer tokens.
    config = TransformerConfig(
        vocab_size=VOCABULARY,
        num_layers=LAYERS,
        features=FEATURES,
        num_heads=8,
        hidden_features=32,
        experts=Experts(8, 2, capacity),
    )
    options = {"batch": BATCH, "microbatches": 1, "precision": "float32", "remat": False}
    setting = settings.make(config, None, 2 * LENGTH, {"expert": 8}, **options)
    predicted = {t.kind: t for t in traffic.transfers(setting)}
    found = compiled.collectives(compiled.step(config, BATCH, 2 * LENGTH, "expert", 8))
    gathered = predicted["expert: experts"]
    assert sum(map(sum, found["all-gather"])) == gathered.number * gathered.size
    # XLA on CPUs has no reduce-scatter: it reduces, and takes a slice.
    reduced = sum(t.number * t.size for t in predicted.values()) - gathered.number * gathered.size
    tied = VOCABULARY * FEATURES * 4
    assert sum(map(sum, found["all-reduce"])) - tied == pytest.approx(reduced, rel=0.01)
    assert found.keys() == {"all-gather", "all-reduce"}
