"""Long-short attention: its key sets and norms, its limits, and refused arguments."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import effattn
from effattn import linformer_attention, sliding_window_attention
from effattn.analysis import cost
from effattn.arrays.combine import combine
from effattn.functional.long_short import long_short_attention
from effattn.testing.functions import assert_close
from tests.dense import draw, with_gradients
from tests.marks import slow

LENGTH = 14
LENGTHS = {"query_seq_lengths": np.array([14, 9]), "key_value_seq_lengths": np.array([11, 0])}


def with_norms(is_causal):
    """Keys and values of one size, two layer norms, and the scores of each token."""
    arrays = draw(LENGTH, LENGTH, size=3, value_size=3)
    rng = np.random.default_rng(0)
    norms = {f"{name}_{part}": rng.normal(size=(2, 3)) for name in "ab" for part in "ab"}
    if is_causal:
        return arrays | norms | {"projection": rng.normal(size=(2, 3, 2))}
    return arrays | norms | {"slot_scores": rng.normal(size=(2, LENGTH, 2, 2))}


@pytest.mark.slow
@pytest.mark.parametrize(
    "is_causal",
    [True, slow(False)],
    ids=["causal", "bidirectional"],
)
def test_projections_scores_and_norms_have_gradients_that_no_padding_reaches(is_causal, x64):
    arrays = with_norms(is_causal)
    for name, end in (("query", "query"), ("key", "key_value"), ("value", "key_value")):
        for row, length in enumerate(LENGTHS[f"{end}_seq_lengths"]):
            arrays[name][row, length:] = np.nan
    if not is_causal:
        arrays["slot_scores"][0, 11:] = np.nan
    options = {"window_size": 5, "segment_size": 3 if is_causal else None}

    def norms_of(arrays):
        others = {name: x for name, x in arrays.items() if "_a" not in name and "_b" not in name}
        window_norm, slot_norm = ((arrays[f"{n}_a"], arrays[f"{n}_b"]) for n in "ab")
        return others, {"window_norm": window_norm, "slot_norm": slot_norm, **options}

    def ours(arrays, lengths):
        others, norms = norms_of(arrays)
        return long_short_attention(
            **others, **norms, **lengths, is_causal=is_causal, return_residual=True
        )

    def naive(arrays, lengths):
        others, norms = norms_of(arrays)
        return effattn.naive.long_short(
            **others, **norms, **lengths, is_causal=is_causal, return_residual=True
        )

    got = jax.tree.map(np.asarray, with_gradients(ours, arrays, LENGTHS))
    (out, lse), gradients = got
    assert (out[1] == 0).all() and (lse[1] == -np.inf).all()
    assert all(np.isfinite(x).all() for x in gradients.values())
    zeros = {name: np.nan_to_num(x) for name, x in arrays.items()}
    assert_close(got, with_gradients(naive, zeros, LENGTHS), 1e-12)


def attend(arrays, **options):
    run = functools.partial(long_short_attention, return_residual=True, **options)
    return jax.jit(run)(**arrays)


def test_it_is_a_window_and_linformer_combined(x64):
    """The slot scores are constants here, not functions of the tokens."""
    arrays = draw(LENGTH, LENGTH)
    scores = np.random.default_rng(0).normal(size=(LENGTH, 1, 2))

    @jax.jit
    def both(arrays, scores):
        weights = jax.nn.softmax(scores[:, 0], 0).T
        slots = linformer_attention(
            **arrays, key_projection=weights, value_projection=weights, return_residual=True
        )
        # Window stretches of 1 token have no halves, so each token sees only itself.
        window = sliding_window_attention(**arrays, local_window_size=0, return_residual=True)
        return combine(*zip(window, slots, strict=True))

    ours = attend(arrays, window_size=1, slot_scores=scores)
    assert_close(ours, both(arrays, scores), 1e-12)


def test_bidirectional_with_one_segment_time_is_linear():
    """The laws use segments that grow with the length."""
    lengths, counts = (4096, 65536), []
    for length in lengths:
        one = jax.ShapeDtypeStruct((1, length, 1, 16), jnp.float32)
        attend = functools.partial(long_short_attention, window_size=64)

        def loss(query, key, value, projection, attend=attend):
            return attend(query, key, value, projection=projection).sum()

        projection = jax.ShapeDtypeStruct((16, 8), jnp.float32)
        traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3))).trace(one, one, one, projection)
        counts.append(cost.operations(traced.jaxpr))
    assert abs(cost.exponent(lengths, counts) - 1) <= 0.05, counts


@pytest.mark.parametrize("segment_size", [4, slow(None)], ids=["segments", "one segment"])
def test_packed_bidirectional_documents_give_what_they_give_alone(segment_size, x64):
    """The first row has three documents, one shorter than a window; the others one of them each."""
    rng, sizes = np.random.default_rng(0), (6, 2, 5)
    shapes = {"query": (4, 3), "key": (2, 3), "value": (2, 5), "slot_scores": (2, 3)}
    arrays = {name: rng.normal(size=(4, LENGTH, *shape)) for name, shape in shapes.items()}
    ids = np.zeros((4, LENGTH), int)
    ids[0, : sum(sizes)] = np.repeat([5, 2, 9], sizes)
    for row, size in enumerate(sizes, 1):
        ids[row, :size] = 1
        for x in arrays.values():
            x[row, :size] = x[0, ids[0] == ids[0, sum(sizes[:row]) - 1]]
    for x in arrays.values():
        x[ids == 0] = np.nan

    @jax.jit
    def gradients(arrays):
        def call(arrays):
            options = {"window_size": 3, "segment_size": segment_size, "segment_ids": ids}
            out = long_short_attention(**arrays, **options)
            return (out**2).sum(), out

        (_, out), found = jax.value_and_grad(call, has_aux=True)(arrays)
        return {**found, "out": out}

    for x in map(np.asarray, gradients(arrays).values()):
        assert (x[ids == 0] == 0).all()
        alone = np.concatenate([x[row, :size] for row, size in enumerate(sizes, 1)])
        np.testing.assert_allclose(x[0, : sum(sizes)], alone, rtol=1e-11, atol=1e-12)


def test_without_tokens_there_is_nothing():
    empty = {name: x[:, :0] for name, x in draw(3, 3, dtype=np.float32).items()}
    for is_causal in (True, False):
        out, lse = attend(
            empty, window_size=2, projection=np.ones((3, 2), np.float32), is_causal=is_causal
        )
        assert out.shape == (2, 0, 4, 5) and lse.shape == (2, 0, 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window_size": 0}, "window_size must be an int, 1 or more tokens, got 0"),
        ({"segment_size": 2.5}, "segment_size must be an int, 1 or more tokens, got 2.5"),
        ({"projection": None}, "one of projection and slot_scores, got neither"),
        ({"slot_scores": np.ones((14, 1, 2))}, "one of projection and slot_scores, got both"),
        ({"projection": np.ones((4, 2))}, r"\(3, slots\) or \(2, 3, slots\), got .* \(4, 2\)"),
        ({"projection": np.ones((3, 2), int)}, "projection must be floating point"),
        ({"projection": None, "slot_scores": np.ones(())}, "with 1 or more slots, got"),
        (
            {"projection": None, "slot_scores": np.ones((13, 1, 2))},
            r"broadcast to \(\*B, T, K, r\) = \(2, 14, 2, 2\), got \(13, 1, 2\)",
        ),
        ({"slot_norm": np.ones((2, 3))}, r"slot_norm must be a pair \(scale, bias\), got"),
        (
            {"window_norm": (np.ones((2, 3)),) * 2},
            "window_norm needs keys and values of the same head size",
        ),
        ({"query": np.ones((2, 13, 4, 3))}, "need the same length, got 13 and 14"),
        (
            {"segment_ids": (np.ones((2, 14), int),) * 2},
            r"segment_ids must be one array \(\*B, T\), .*got a pair",
        ),
    ],
)
def test_wrong_arguments_are_named(changes, message):
    arrays = {**draw(LENGTH, LENGTH), "window_size": 4, "projection": np.ones((3, 2))}
    with pytest.raises(ValueError, match=message):
        long_short_attention(**{**arrays, **changes})
