"""streaming_attention: documents with their own sinks, its limits, cost, and refused sizes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import effattn
from effattn.analysis import cost


def heads(time=23):
    rng = np.random.default_rng(0)
    return [rng.normal(size=(2, time, n, 8)).astype(np.float32) for n in (4, 2, 2)]


def attend(*given, **options):
    options = {"num_sinks": 2, "window_size": 3, **options}
    return jax.jit(functools.partial(effattn.streaming_attention, **options))(*given)


def test_without_sinks_it_is_a_window():
    window = functools.partial(
        effattn.sliding_window_attention, local_window_size=(2, 0), is_causal=True
    )
    np.testing.assert_array_equal(attend(*heads(), num_sinks=0), jax.jit(window)(*heads()))


def test_sinks_and_windows_of_all_tokens_are_exact_attention():
    exact = effattn.dot_product_attention(*heads(), is_causal=True)
    for options in ({"window_size": 40}, {"num_sinks": 40}):
        out = attend(*heads(), **options)
        np.testing.assert_allclose(out, exact, rtol=1e-5, atol=1e-6)


def test_sinks_of_documents_that_end_in_and_between_tiles_of_queries():
    """Documents shorter than the sinks, at and across the borders of tiles of three queries."""
    ids = jnp.asarray(np.repeat(np.arange(6) + 1, [1, 8, 2, 1, 9, 2]))[None].repeat(2, 0)
    of_sinks = heads()[0][:, ::-1]

    @functools.partial(jax.jit, static_argnums=0)
    def run(implementation, *arrays):
        def call(query, key, value, sink_query):
            return effattn.streaming_attention(
                query,
                key,
                value,
                num_sinks=2,
                window_size=3,
                sink_query=sink_query,
                segment_ids=ids,
                implementation=implementation,
            )

        out, back = jax.vjp(call, *arrays)
        return out, *back(jnp.cos(out))

    given = *heads(), of_sinks
    for found, expected in zip(run("xla", *given), run("naive", *given), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_operations_grow_with_the_window_alone():
    def operations(length, window):
        x = jax.ShapeDtypeStruct((1, length, 1, 64), jnp.float32)
        ids = jax.ShapeDtypeStruct((1, length), jnp.int32)

        def run(x, ids):
            return effattn.streaming_attention(
                x, x, x, window_size=window, segment_ids=ids, implementation="xla"
            )

        return cost.operations(jax.make_jaxpr(run)(x, ids))

    assert operations(8192, 128) < 2.2 * operations(4096, 128)
    assert operations(8192, 128) < operations(8192, 2048) / 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_sinks": -1}, "num_sinks must be an int, 0 or more tokens, got -1"),
        ({"window_size": 0}, "window_size must be an int, 1 or more tokens, the own token inc"),
        (
            {"sink_query": np.zeros((2, 23, 2, 8))},
            r"sink_query must be floating point of shape \(2, 23, 4, 8\)",
        ),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        attend(*heads(), **options)
