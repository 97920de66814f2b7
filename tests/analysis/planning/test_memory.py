"""Predicted memory of training steps against compiled programs on CPUs."""

import dataclasses
from importlib import metadata

import jax
import pytest
from flax import nnx

from effattn.analysis import liveness, planning
from effattn.analysis.planning import counts, memory, settings
from effattn.nn import Experts, TransformerConfig, TransformerLM
from tests.analysis.planning import compiled

JAXLIB = tuple(map(int, metadata.version("jaxlib").split(".")[:2]))
REMAT = pytest.mark.skipif(
    JAXLIB < (0, 11), reason="XLA of jaxlib 0.10 shares values with recomputation on CPUs"
)


def model(mixer="softmax", *, remat=False, layers=3, features=64, heads=4, vocabulary=256):
    return TransformerConfig(
        vocab_size=vocabulary,
        num_layers=layers,
        features=features,
        num_heads=heads,
        mixer=mixer,
        max_length=128,
        remat=remat,
    )


def setting(config, mesh, **options):
    defaults = {"batch": 8, "microbatches": 1, "precision": "mixed", "remat": True}
    options = {**defaults, "context": 128, **options}
    return settings.make(config, None, mesh=mesh, **options)


def of_step(config, mesh, compiler=liveness.CPU, **options):
    options = {"precision": "float32", "remat": config.remat, **options}
    return memory.training(setting(config, mesh, **options), compiler, 0.0)


def agrees(config, batch, axis="data", devices=1):
    program = compiled.step(config, batch, 128, axis, devices)
    found = of_step(config, {axis: devices}, batch=batch)
    return found.total == pytest.approx(compiled.bytes_of(program), rel=0.1)


def test_memory_of_a_step():
    assert agrees(model(layers=2), 4)


SLOW = [
    pytest.param(model(), id="softmax"),
    pytest.param(model(remat=True, layers=5), id="softmax, remat", marks=REMAT),
    pytest.param(model("gated_linear"), id="gated linear"),
    pytest.param(model("retention"), id="retention"),
    pytest.param(model("mamba", layers=2), id="mamba"),
    pytest.param(model("linear", remat=True), id="linear, remat", marks=REMAT),
    pytest.param(model(vocabulary=8192, features=128, layers=2), id="a large vocabulary"),
    pytest.param(model(["softmax", "linear", "softmax"]), id="layers that differ"),
]


@pytest.mark.slow
@pytest.mark.parametrize("config", SLOW)
def test_memory_of_further_models(config):
    assert agrees(config, 4)


DIVIDED = [
    ("data", model(heads=8), 8),
    ("fsdp", model(heads=8, layers=4, features=128, vocabulary=512), 8),
    # The library of XLA on CPUs also computes gradients of norms, of 4096 tokens or more.
    ("tensor", model(heads=8, layers=4, features=256, vocabulary=512), 32),
]


@pytest.mark.slow
@pytest.mark.devices
@pytest.mark.parametrize(("axis", "config", "batch"), DIVIDED, ids=[d[0] for d in DIVIDED])
def test_memory_on_eight_devices(axis, config, batch):
    assert agrees(config, batch, axis=axis, devices=8)


@pytest.mark.slow
@pytest.mark.devices
def test_memory_of_divided_experts():
    config = dataclasses.replace(model(heads=8), experts=Experts(16, 2, capacity_factor=1.0))
    assert agrees(config, 16, axis="expert", devices=8)


@REMAT
@pytest.mark.slow
@pytest.mark.devices
@pytest.mark.parametrize("axis", ["fsdp", "tensor"])
def test_memory_of_recomputed_layers_on_eight_devices(axis):
    config = model(heads=8, layers=4, features=256, vocabulary=512, remat=True)
    assert agrees(config, 8 if axis == "fsdp" else 32, axis=axis, devices=8)


CASES = [(False, liveness.ACCELERATOR), (True, liveness.CPU)]


@pytest.mark.parametrize(("remat", "compiler"), CASES, ids=["accelerator", "cpu, remat"])
def test_more_layers_continue_straight_lines(remat, compiler):
    config = model(layers=5, remat=remat, features=32)
    found = of_step(config, {}, compiler, batch=2)
    share = dataclasses.replace(config, dtype="float32")
    whole = counts.steps(share, 2, 128, compiler).timeline.peak
    assert found.gradients + found.saved + found.working == pytest.approx(whole, rel=0.01)


@pytest.mark.parametrize("mixer", ["softmax", "gated_linear", "linformer"])
def test_parameters_are_those_of_the_model(mixer):
    config = dataclasses.replace(model(mixer), is_causal=mixer != "linformer")
    abstract = nnx.eval_shape(lambda: TransformerLM(config, rngs=nnx.Rngs(0)))
    number = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(abstract, nnx.Param)))
    assert memory.parameters(setting(config, {})).total == number
    assert planning.plan(abstract, None, 128, {}, "h100").memory.parameters == 2 * number


def test_tensor_and_stage_divide_parameters_and_fsdp_what_is_stored():
    config = model(heads=8, layers=4)
    whole = memory.parameters(setting(config, {}))
    norms = 2 * config.features * config.num_layers
    half = memory.parameters(setting(config, {"tensor": 2}))
    assert half.layers == (whole.layers - norms) / 2 + norms
    assert memory.parameters(setting(config, {"stage": 2})).layers == whole.layers / 2
    stored = [of_step(config, {"fsdp": n}) for n in (1, 8)]
    for part in ("parameters", "masters", "optimiser"):
        assert getattr(stored[1], part) == getattr(stored[0], part) / 8


def test_the_axis_expert_divides_experts_alone():
    config = dataclasses.replace(model(), experts=(None, Experts(8), Experts(8)))
    of_expert = 3 * config.features * counts.hidden_features(config)
    found = setting(config, {"expert": 4})
    number = memory.parameters(found)
    assert number.experts == 2 * 8 * of_expert
    assert memory.stored(found) == number.total - number.experts * 3 / 4


def test_the_state_has_that_of_channel_mixing():
    sizes = {"vocab_size": 32, "num_layers": 2, "features": 64, "num_heads": 4, "positions": "none"}
    config = TransformerConfig(**sizes, mixer="rwkv7", feed_forward="rwkv7")
    state = jax.eval_shape(
        lambda: TransformerLM(config, rngs=nnx.Rngs(0)).init_state(3, 128).layers
    )
    expected = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    assert sum(counts.state_bytes(config, layer, 3, 128) for layer in (0, 1)) == expected


def test_a_cache_is_divided_along_the_sequence_and_a_state_is_not():
    def decoded(mixer, **mesh):
        return planning.plan(model(mixer), None, 128, mesh, "h100", training=False)

    def state(mixer, **mesh):
        return decoded(mixer, **mesh).memory.state

    # Keys and values of 16 bits.
    assert state("softmax") == 3 * 128 * 2 * 64 * 2 + 3 * 4
    assert state("softmax", sequence=4) == pytest.approx(state("softmax") / 4, abs=16)
    assert state("linear", sequence=4) == state("linear")
    mixed = ["softmax", "linear", "linear"]
    whole = state("softmax") / 3 / 4 + 2 * state("linear") / 3
    assert state(mixed, sequence=4) == pytest.approx(whole, abs=16)
    # Each device gathers the cache of a layer.
    assert decoded("softmax", sequence=4).memory.communication == state("softmax") / 3
    (gather,) = decoded("softmax", sequence=4).transfers
    assert gather[:5] == ("sequence: cache", "all-gather", ("sequence",), 3, state("softmax") / 3)


def test_pipelines_keep_the_activations_of_microbatches_that_are_on_their_way():
    config = model(layers=8)
    whole, half = (
        of_step(config, {"stage": n}, liveness.ACCELERATOR, microbatches=8) for n in (1, 2)
    )
    # Half of the layers, twice as many microbatches.
    assert half.saved == pytest.approx(whole.saved)
    assert half.gradients < whole.gradients


def test_saved_activations_are_those_of_the_literature():
    """Bytes a token and feature of a layer, without dropout and saved scores."""
    config = dataclasses.replace(
        model(layers=4, features=512, heads=8), feed_forward="gelu", norm="layer"
    )
    found = of_step(config, {}, liveness.ACCELERATOR, precision="mixed", context=1024)
    each = found.saved / (config.num_layers * 8 * 1024 * config.features)
    # Korthikanti et al. 2022, section 4.1: 34, two of which are masks of dropout. Attention here
    # also saves what rounding took from its output. The rest are log-sum-exps and statistics of
    # norms.
    assert each == pytest.approx(34 - 2 + 2, rel=0.01)


@pytest.mark.slow
def test_a_million_tokens_take_no_memory_to_plan():
    mesh = {"tensor": 8, "sequence": 8, "stage": 8}
    found = planning.plan(planning.MODELS["175B"], "linear", 2**20, mesh, "b200")
    # One sequence: (B, T, D) of 16 bits for each recomputed layer.
    assert found.memory.saved == pytest.approx(12 * 2**20 / 8 * 12288 * 2, rel=0.01)
