"""A mechanism takes the options that it claims, and refuses all others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from effattn import registry
from effattn.nn import CrossAttention, SelfAttention, as_attention_fn
from effattn.testing import functions
from effattn.testing.functions import SQUARE
from tests.laws.battery import CALLED_IN_FLOAT32

ROWS, LENGTH = SQUARE.batch[0], SQUARE.keys


def keywords(mechanism):
    """Arguments that use each capability, for the capabilities that need arguments of their own."""
    rows, pairs = (ROWS,), (ROWS, SQUARE.heads, LENGTH, LENGTH)
    state = jnp.zeros((ROWS, SQUARE.key_heads, SQUARE.size, SQUARE.value_size + 1))
    return {
        "offset": {"query_offset": 0},
        "lengths": {
            "query_seq_lengths": np.full(rows, LENGTH),
            "key_value_seq_lengths": np.full(rows, LENGTH),
        },
        "segments": {"segment_ids": np.ones((ROWS, LENGTH), np.int32)},
        "window": {"local_window_size": 3},
        "bias": {"bias": np.zeros(pairs, np.float32)},
        "mask": {"mask": np.ones(pairs, bool)},
        "score_mod": {"score_mod": lambda logit, b, h, i, j: logit},
        "soft_cap": {"logits_soft_cap": 2.0},
        "sink": {"sink": np.zeros(SQUARE.heads, np.float32)},
        "dropout": {"dropout_rate": 0.5, "dropout_rng": jax.random.key(0)},
        "residual": {"return_residual": True},
        "state": {"initial_state": state, "return_state": True},
    }


SHOWN_BY_ARGUMENTS = tuple(keywords(None))


def test_every_capability_is_covered():
    """The shapes of the laws' calls cover the capabilities without arguments of their own."""
    by_shapes = {"bidirectional", "causal", "cross", "grouped", "decode"}
    assert {*SHOWN_BY_ARGUMENTS, *by_shapes} == set(registry.CAPABILITIES)


@pytest.mark.parametrize("capability", SHOWN_BY_ARGUMENTS)
def test_a_signature_has_what_is_claimed_and_nothing_else(mechanism, capability):
    """Other laws test the claimed options; an unclaimed option is Python's TypeError."""
    given = keywords(mechanism)[capability]
    if mechanism.has(capability):
        assert given.keys() <= mechanism.parameters.keys()
        return
    assert not given.keys() & mechanism.parameters.keys()
    arrays = functions.draw_plain(mechanism, 0)
    for name, value in given.items():
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
            mechanism.entry.function(**arrays, **mechanism.options, **{name: value})


def test_a_module_gives_advice_on_what_is_not_claimed(mechanism):
    """The advice names mechanisms that have the missing capability."""

    def build(**options):
        options = {"is_causal": mechanism.has("causal"), **options}
        return mechanism.entry.build(8, 4, rngs=nnx.Rngs(0), **options)

    refusals = {
        "causal": lambda: build(is_causal=True),
        "bidirectional": lambda: build(is_causal=False),
        "grouped": lambda: build(num_kv_heads=2),
        "dropout": lambda: build(dropout_rate=0.5),
        "cross": lambda: CrossAttention(8, 4, attention=mechanism.name, rngs=nnx.Rngs(0)),
        "lengths": lambda: build()(jnp.ones((1, 4, 8)), lengths=jnp.array([4])),
        "segments": lambda: build()(jnp.ones((1, 4, 8)), segment_ids=jnp.ones((1, 4), int)),
        "bias": lambda: adapted(mechanism, bias=jnp.zeros((4, 3, 3))),
        "mask": lambda: adapted(mechanism, mask=jnp.tri(3, dtype=bool)),
    }
    for capability in refusals.keys() - mechanism.entry.capabilities:
        with pytest.raises(ValueError, match=f"lacks '{capability}'") as raised:
            jax.eval_shape(refusals[capability])
        for name in registry.names(capability):
            assert name in str(raised.value)


def adapted(mechanism, **given):
    x = jnp.ones((1, 3, 4, 8))
    return as_attention_fn(mechanism.name, **mechanism.options)(x, x, x, **given)


@pytest.mark.parametrize("capability", ["score_mod", "soft_cap", "sink", "window"])
def test_a_module_has_no_option_for_what_is_not_claimed(mechanism, capability):
    if mechanism.has(capability):
        return
    options = keywords(mechanism)[capability]
    for make in (
        lambda: SelfAttention(8, 4, attention=mechanism.name, rngs=nnx.Rngs(0), **options),
        lambda: as_attention_fn(mechanism.name, **options),
    ):
        with pytest.raises(ValueError, match=f"has no option {next(iter(options))}"):
            make()


# Batch dimensions, and names of the arrays in 16 bits; the other arrays have 32 bits.
BATCHES = ((), ("query", "key")), ((2, 1, 2), ("value",))


@pytest.mark.parametrize(("batch", "narrow"), BATCHES, ids=["none", "three"])
def test_any_number_of_batch_dimensions_and_mixed_dtypes(mechanism, batch, narrow):
    """The output has the dtype of the value; sums have at least float32."""
    sizes, extent = SQUARE._replace(batch=batch), functions.plain(mechanism)
    arrays = functions.draw_arrays(mechanism, sizes, everything=False)
    arrays = functions.cast(mechanism, arrays, jnp.float32)
    arrays.update({k: arrays[k].astype(jnp.float16) for k in narrow})
    results = jax.eval_shape(lambda a: functions.call(mechanism, extent, a, {}), arrays)
    assert results["out"].shape == (*batch, LENGTH, SQUARE.heads, SQUARE.value_size)
    assert results.pop("out").dtype == arrays["value"].dtype
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(results))
    if "lse" in results:
        assert results["lse"].shape == (*batch, LENGTH, SQUARE.heads)


@pytest.mark.parametrize("mechanism", CALLED_IN_FLOAT32, ids=str)
def test_float32_stays_float32_where_float64_is_enabled(mechanism):
    """A constant of the default dtype would change the dtype of a loop's carry."""
    results, gradients = functions.run(mechanism, functions.draw_plain(mechanism, 0))
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves((results, gradients)))
