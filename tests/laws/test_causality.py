"""Law 2: nothing reaches back in time, forward or backward."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.laws import battery
from tests.laws.battery import IN_FLOAT32, SQUARE

CAUSAL = [s for s in IN_FLOAT32 if s.has("causal")]


def rms(x):
    return np.sqrt(np.mean(np.square(x)))


@pytest.mark.parametrize("subject", CAUSAL, ids=str)
def test_a_token_changes_nothing_before_it(subject):
    arrays = battery.draw_plain(subject, 0)
    results, _ = battery.run(subject, arrays)

    @settings(max_examples=6)
    @given(st.integers(1, SQUARE.queries - 1), st.integers(1, 99))
    def holds(token, seed):
        other = battery.draw_plain(subject, seed)
        changed = {
            k: np.concatenate([arrays[k][:, :token], other[k][:, token:]], 1)
            for k in subject.of_tokens
        }
        after, _ = battery.run(subject, {**arrays, **changed})
        for name in results.keys() - {"state"}:
            change = after[name] - results[name]
            allowed = 0 if subject.entry.causality == "exact" else 1e-5 * rms(results[name])
            assert np.abs(change[:, :token]).max() <= allowed
            assert (change[:, token:] != 0).any()

    holds()


@pytest.mark.parametrize("subject", CAUSAL, ids=str)
def test_the_jacobian_is_block_lower_triangular(subject):
    arrays, cotangents = battery.draw_plain(subject, 0), battery.plain_cotangents(subject)

    @settings(max_examples=6)
    @given(st.integers(0, SQUARE.queries - 2))
    def holds(token):
        """Gradients of the outputs up to a token reach that token and no later one."""
        cut = {
            name: jax.tree.map(np.zeros_like, x)
            if name == "state"
            else np.where(_times(x) <= token, x, 0)
            for name, x in cotangents.items()
        }
        _, gradients = battery.run(subject, arrays, cut)
        for name in subject.of_tokens:
            gradient = gradients[name]
            allowed = 0 if subject.entry.causality == "exact" else 1e-5 * rms(gradient)
            assert np.abs(gradient[:, token + 1 :]).max() <= allowed
            # A decay or a gate of the first token has nothing to act on.
            if token > 0 or name not in subject.reference.per_token:
                assert (gradient[:, : token + 1] != 0).any()

    holds()


def _times(x):
    """The second axis, time, counted."""
    return np.arange(x.shape[1]).reshape(-1, *(1,) * (x.ndim - 2))
