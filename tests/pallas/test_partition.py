"""Pallas kernels on eight devices, interpreted: results, gradients, and messages of devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import effattn
from effattn import dispatch
from effattn.pallas.mosaic_tpu import recurrence_steps
from effattn.testing.functions import assert_close
from tests.laws.sharding import collectives
from tests.marks import slow, slow_but_for

pytestmark = pytest.mark.devices

BATCH, TOKENS, HEADS, SIZE = 4, 80, 4, 16
BY_HEAD, BY_ROW = P("batch", None, "heads"), P("batch")
SLOPES = jnp.array([0.5, 0.25, 0.125, 1.0])
IDS = jnp.array([[1] * 50 + [2] * 26 + [0] * 4] * BATCH)


def of_example_and_head(slopes, logit, b, h, i, j):
    """A bias that differs by example and head, with a gradient for the slopes."""
    return logit + slopes[h] * (j - i) / (b + 1)


def with_score_mod(query, key, value, slopes, **options):
    score_mod = functools.partial(of_example_and_head, slopes)
    return effattn.dot_product_attention(query, key, value, score_mod=score_mod, **options)


def with_bias(query, key, value, bias, **options):
    return effattn.dot_product_attention(query, key, value, bias, **options)


# A function of query, key, value and, for some, another array; and this array.
CALLS = {
    "causal": (functools.partial(effattn.dot_product_attention, is_causal=True), None),
    "documents": (functools.partial(effattn.dot_product_attention, segment_ids=IDS), None),
    "score_mod": (functools.partial(with_score_mod, is_causal=True), SLOPES),
    "bias": (with_bias, jnp.linspace(-1, 1, HEADS * TOKENS**2).reshape(HEADS, TOKENS, TOKENS)),
    "dropout": (
        functools.partial(
            effattn.dot_product_attention, dropout_rate=0.5, dropout_rng=jax.random.key(3)
        ),
        None,
    ),
    "layout": (
        functools.partial(effattn.bigbird_attention, block_size=16, num_random_blocks=1),
        None,
    ),
    "pattern of heads": (
        functools.partial(effattn.sparse_transformer_attention, stride=4),
        None,
    ),
    "linear": (functools.partial(effattn.linear_attention, is_causal=True), None),
    "retention": (effattn.retention, None),
    "delta": (
        lambda query, key, value, **options: effattn.delta_rule_attention(
            query, key, value, beta=jax.nn.sigmoid(key[..., 0]), **options
        ),
        None,
    ),
}


def arrays_of(key_heads, more):
    counts = HEADS, key_heads, key_heads, HEADS
    keys = jax.random.split(jax.random.key(0), 4)
    *arrays, cotangent = (
        jax.random.normal(key, (BATCH, TOKENS, count, SIZE))
        for key, count in zip(keys, counts, strict=True)
    )
    return (*arrays, *(() if more is None else (more,))), cotangent


def program(function, implementation):
    @jax.jit
    def run(arrays, cotangent):
        call = functools.partial(function, implementation=implementation)
        with dispatch.interpreted():
            out, pull_back = jax.vjp(call, *arrays)
            return out, pull_back(cotangent)

    return run


def compiled(function, arrays, cotangent, mesh, of_keys):
    specs = (BY_HEAD, of_keys, of_keys, *[P()] * (len(arrays) - 3))
    there = tuple(
        jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(arrays, specs, strict=True)
    )
    result = jax.device_put(cotangent, NamedSharding(mesh, BY_HEAD))
    return program(function, "triton").lower(there, result).compile(), (there, result)


@pytest.mark.parametrize(
    ("heads", "decay"), [(8, None), (8, "token"), slow(20, None), slow(22, "token")]
)
def test_tpu_recurrences_whose_query_heads_are_on_several_devices(heads, decay, monkeypatch):
    """On a device, a step may have more tokens than a step of the whole call would have."""
    # The interpreter of TPUs, which finds races, cannot be partitioned.
    monkeypatch.setattr(recurrence_steps.pltpu, "InterpretParams", lambda **_: True)
    rng, length = np.random.default_rng(0), 512
    query, key, value = (
        jnp.asarray(rng.normal(size=(1, length, n, 128)) / 8, jnp.bfloat16) for n in (heads, 1, 1)
    )
    log_decay = -jnp.asarray(rng.uniform(size=(1, length, 1)), jnp.float32)
    attend = functools.partial(effattn.linear_attention, is_causal=True)
    if decay:
        attend = functools.partial(effattn.gated_linear_attention, log_decay=log_decay)
    arrays, out = (query, key, value), query
    mesh = jax.make_mesh((4, 2), ("batch", "heads"), (AxisType.Auto,) * 2)
    places = NamedSharding(mesh, P(None, None, "heads")), NamedSharding(mesh, P())
    there = tuple(map(jax.device_put, arrays, (places[0], places[1], places[1])))
    got = program(attend, "mosaic_tpu")(there, jax.device_put(out, places[0]))
    assert_close(got, program(attend, "xla")(arrays, out), 0.02)


# Pallas interprets the kernels.
QUICK = "causal", "score_mod", "linear", "delta"


@pytest.mark.parametrize("name", slow_but_for(QUICK, CALLS))
def test_each_device_runs_the_kernels_for_its_rows_and_heads(name):
    function, more = CALLS[name]
    arrays, cotangent = arrays_of(HEADS, more)
    expected = program(function, "xla")(arrays, cotangent)
    mesh = jax.make_mesh((4, 2), ("batch", "heads"), (AxisType.Auto,) * 2)
    run, there = compiled(function, arrays, cotangent, mesh, BY_HEAD)
    # Gradients of what examples share are summed; nothing else is told.
    assert set(collectives(run)) <= ({"all-reduce"} if more is not None else set())
    assert_close(run(*there), expected, 1e-5)


@pytest.mark.parametrize(
    "name", slow_but_for(["causal"], ["causal", "layout", "linear", "retention"])
)
@pytest.mark.parametrize("key_heads", [1, 2])
def test_heads_on_several_devices_share_a_key_head(name, key_heads):
    function, more = CALLS[name]
    arrays, cotangent = arrays_of(key_heads, more)
    expected = program(function, "xla")(arrays, cotangent)
    mesh = jax.make_mesh((2, 4), ("batch", "heads"), (AxisType.Auto,) * 2)
    run, there = compiled(function, arrays, cotangent, mesh, BY_ROW)
    # XLA splits two heads over pairs of devices between the kernels of a recurrence.
    gathered = {"all-gather"} if (name, key_heads) == ("retention", 2) else set()
    assert set(collectives(run)) <= {"all-reduce"} | gathered
    assert_close(run(*there), expected, 1e-5)


@pytest.mark.parametrize("name", slow_but_for(["linear"], ["documents", "linear"]))
def test_explicit_axes(name):
    function, more = CALLS[name]
    arrays, cotangent = arrays_of(HEADS, more)
    expected = program(function, "xla")(arrays, cotangent)
    mesh = jax.make_mesh((4, 2), ("batch", "heads"), (AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        run, there = compiled(function, arrays, cotangent, mesh, BY_HEAD)
        assert set(collectives(run)) <= ({"all-reduce"} if more is not None else set())
        found = run(*there)
    assert_close(found, expected, 1e-5)
