"""Law 5: padding, packing and the other examples of a batch change nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.laws import battery
from tests.laws.battery import MECHANISMS, SQUARE

# Landmarks are means of queries, and clusters choose among them.
MIXING_QUERIES = "nystrom", "routing"


def claiming(*capabilities):
    """The mechanisms that claim all these."""
    subjects = [s for s in MECHANISMS if all(s.has(c) for c in capabilities)]
    return pytest.mark.parametrize("subject", subjects, ids=str)


def where(kept, array, value):
    """`array`, with a value in the place of the rows or tokens that are not kept."""
    kept = kept.reshape(kept.shape + (1,) * (array.ndim - kept.ndim))
    return np.where(kept, array, np.asarray(value, array.dtype))


@claiming("lengths")
def test_what_is_in_padding_reaches_nothing(subject):
    """Not a bit of it: NaN there gives what zeros give, and zeros where the padding is."""
    extent = battery.everything(subject)

    @settings(max_examples=8)
    @given(battery.draw_known(subject, SQUARE, extent), st.integers(0, 99))
    def holds(known, seed):
        arrays = battery.draw_arrays(subject, SQUARE, True, seed)
        cotangents = battery.cotangents_of(subject, extent, arrays, known)
        ids = known.get("segment_ids", np.ones((*SQUARE.batch, SQUARE.keys), int))
        of_queries, of_keys = (
            (ids != 0) & (np.arange(SQUARE.keys) < known[f"{side}_seq_lengths"][:, None])
            for side in ("query", "key_value")
        )
        present = {**dict.fromkeys(subject.of_tokens, of_keys), "query": of_queries}

        def filled(value):
            fill = {k: where(p, arrays[k], value) for k, p in present.items()}
            return battery.run_everything(subject, {**arrays, **fill}, known, cotangents)

        results, gradients = with_nan = filled(np.nan)
        jax.tree.map(np.testing.assert_array_equal, with_nan, filled(0.0))
        assert (results["out"][~of_queries] == 0).all()
        for name, kept in present.items():
            assert (gradients[name][~kept] == 0).all()
        if "lse" in results:
            assert (results["lse"][~of_queries] == -np.inf).all()
            results = {**results, "lse": results["lse"][results["lse"] != -np.inf]}
        assert all(np.isfinite(x).all() for x in jax.tree.leaves((results, gradients)))

    with jax.enable_x64(True):
        holds()


@claiming("segments", "lengths")
def test_packed_documents_give_what_they_give_alone(subject):
    extent, length = battery.everything(subject), SQUARE.keys

    @settings(max_examples=4)
    @given(st.integers(1, length - 2), st.integers(1, length - 1), st.integers(0, 99))
    def holds(border, rest, seed):
        """The first example packs two documents, and the next two hold one of them each."""
        ends = border, min(border + rest, length)
        documents = slice(0, border), slice(*ends)
        arrays = battery.draw_arrays(subject, SQUARE, True, seed)
        # What is not a token's own differs between a packed row and one alone.
        if "bias" in arrays:
            arrays["bias"][:] = 0
        if "initial_state" in arrays:
            arrays["initial_state"] = battery.empty_state(subject, SQUARE, jnp.float64)
        known = battery.neutral(subject, SQUARE, extent)
        known["segment_ids"][0] = np.where(np.arange(length) < border, 7, 3)
        known["segment_ids"][0, ends[1] :] = 0
        alone = list(enumerate(documents, 1))
        for row, document in alone:
            size = document.stop - document.start
            known["query_seq_lengths"][row] = known["key_value_seq_lengths"][row] = size
            for name in subject.of_tokens:
                arrays[name][row] = np.nan
                arrays[name][row, :size] = arrays[name][0, document]
        cotangents = battery.cotangents_of(subject, extent, arrays, known)
        of_state = cotangents.pop("state", None)
        for x in cotangents.values():
            for row, document in alone:
                x[row, : document.stop - document.start] = x[0, document]
        if of_state is not None:
            for x in jax.tree.leaves(of_state):
                x[1], x[2] = 0, x[0]
            cotangents["state"] = of_state
        results, gradients = battery.run_everything(subject, arrays, known, cotangents)
        state = results.pop("state", None)
        of_tokens = [*results.values(), *(gradients[k] for k in subject.of_tokens)]
        for row, document in alone:
            for x in of_tokens:
                whole, part = x[0, document], x[row, : document.stop - document.start]
                np.testing.assert_allclose(part, whole, rtol=1e-12, atol=1e-12)
        for x in jax.tree.leaves(state):
            np.testing.assert_allclose(x[2], x[0], rtol=1e-12)

    with jax.enable_x64(True):
        holds()


def test_an_example_does_not_depend_on_the_others(mechanism):
    """Bit for bit, and even if they are NaN."""
    arrays, names = battery.draw_plain(mechanism, 0), mechanism.of_tokens

    def run(arrays):
        """What belongs to an example: not the gradients of what all share."""
        results, gradients = battery.run(mechanism, arrays)
        return results, {k: gradients[k] for k in names}

    expected = run(arrays)
    for row in range(SQUARE.batch[0]):
        kept = np.arange(SQUARE.batch[0]) == row
        got = run({**arrays, **{k: where(kept, arrays[k], np.nan) for k in names}})
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(a[row], b[row])


def test_a_query_that_is_not_a_number_reaches_its_own_output_alone(mechanism):
    if mechanism.name in MIXING_QUERIES:
        pytest.skip("mixes queries, or sorts them")
    arrays = battery.draw_plain(mechanism, 0)
    expected = battery.run(mechanism, arrays)[0]["out"]
    arrays["query"][:, 5] = np.nan
    out = battery.run(mechanism, arrays)[0]["out"]
    others = np.arange(SQUARE.queries) != 5
    np.testing.assert_array_equal(out[:, others], expected[:, others])
    assert np.isnan(out[:, 5]).all()
