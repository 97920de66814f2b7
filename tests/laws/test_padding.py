"""Law 5: padding, packing and the other examples of a batch change nothing."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.laws import battery
from tests.laws.battery import MECHANISMS, SQUARE, SUBJECTS, Extent


def everything(subject):
    return Extent(is_causal=subject.has("causal"), everything=True)


def claiming(*capabilities):
    """Subjects that claim these, as long as a compiled program of theirs is there to be used."""
    subjects = [s for s in MECHANISMS if all(s.has(c) for c in capabilities)]
    return pytest.mark.parametrize("subject", subjects, ids=str)


def run(subject, arrays, known, cotangents):
    return battery.to_numpy(
        battery.program(subject, everything(subject))(arrays, known, cotangents)
    )


@claiming("lengths")
def test_what_is_in_padding_reaches_nothing(subject):
    """Not a bit of it: NaN there gives what zeros give, and zeros where the padding is."""
    extent = everything(subject)

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
        present = {"query": of_queries, "key": of_keys, "value": of_keys}

        def filled(value):
            fill = {k: np.where(p[..., None, None], arrays[k], value) for k, p in present.items()}
            return run(subject, {**arrays, **fill}, known, cotangents)

        results, gradients = with_nan = filled(np.nan)
        jax.tree.map(np.testing.assert_array_equal, with_nan, filled(0.0))
        assert (results["out"][~of_queries] == 0).all()
        for name, where in present.items():
            assert (gradients[name][~where] == 0).all()
        if "lse" in results:
            assert (results["lse"][~of_queries] == -np.inf).all()
            results = {**results, "lse": results["lse"][results["lse"] != -np.inf]}
        assert all(np.isfinite(x).all() for x in jax.tree.leaves((results, gradients)))

    with jax.enable_x64(True):
        holds()


@claiming("segments", "lengths")
def test_packed_documents_give_what_they_give_alone(subject):
    extent, length = everything(subject), SQUARE.keys

    @settings(max_examples=4)
    @given(st.integers(1, length - 2), st.integers(1, length - 1), st.integers(0, 99))
    def holds(border, rest, seed):
        """The first example packs two documents, and the next two hold one of them each."""
        ends = border, min(border + rest, length)
        documents = (slice(0, ends[0]), slice(*ends))
        arrays = battery.draw_arrays(subject, SQUARE, True, seed)
        arrays.pop("bias", None), arrays.pop("initial_state", None)
        known = battery.neutral(subject, SQUARE, extent)
        known["segment_ids"][0] = 7
        known["segment_ids"][0, documents[1]] = 3
        known["segment_ids"][0, ends[1] :] = 0
        for row, document in enumerate(documents, 1):
            size = document.stop - document.start
            for name in ("query", "key", "value"):
                arrays[name][row] = np.nan
                arrays[name][row, :size] = arrays[name][0, document]
            known["query_seq_lengths"][row] = known["key_value_seq_lengths"][row] = size
        cotangents = battery.cotangents_of(subject, extent, arrays, known)
        for row, document in enumerate(documents, 1):
            cotangents["out"][row, : document.stop - document.start] = cotangents["out"][0, document]
            if "lse" in cotangents:
                cotangents["lse"][row, : document.stop - document.start] = cotangents["lse"][0, document]
            if "state" in cotangents:
                cotangents["state"][1] = 0
                cotangents["state"][2] = cotangents["state"][0]
        results, gradients = run(subject, arrays, known, cotangents)
        for row, document in enumerate(documents, 1):
            size = document.stop - document.start
            for x in [*(results[k] for k in results if k != "state"), *(gradients[k] for k in ("query", "key", "value"))]:
                np.testing.assert_allclose(x[row, :size], x[0, document], rtol=1e-12, atol=1e-12)
        if "state" in results:
            np.testing.assert_allclose(results["state"][2], results["state"][0], rtol=1e-12)

    with jax.enable_x64(True):
        holds()


@pytest.mark.parametrize("subject", MECHANISMS, ids=str)
def test_an_example_does_not_depend_on_the_others(subject):
    """Bit for bit, and even if they are NaN."""
    arrays = battery.draw_plain(subject, 0)
    expected = battery.run(subject, arrays)
    for row in range(SQUARE.batch[0]):
        kept = np.arange(SQUARE.batch[0]) == row
        others = {k: np.where(kept[:, None, None, None], x, np.nan) for k, x in arrays.items()}
        got = battery.run(subject, others)
        jax.tree.map(lambda a, b, row=row: np.testing.assert_array_equal(a[row], b[row]), got, expected)
