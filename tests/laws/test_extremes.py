"""Law 7: whatever the values and the lengths, results and gradients are finite."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.laws import battery
from tests.laws.battery import CALLED_IN_FLOAT32, MECHANISMS, SQUARE


def assert_finite(tree):
    for path, x in jax.tree.leaves_with_path(tree):
        assert np.isfinite(x).all(), jax.tree_util.keystr(path)


def ones(arrays, **sizes):
    return {**arrays, **{k: np.full_like(arrays[k], v) for k, v in sizes.items()}}


EXTREMES = {
    "logits of 1e4": lambda a: {**a, "query": a["query"] * 1e2, "key": a["key"] * 1e2},
    "logits of -1e4": lambda a: ones(a, query=-1e2, key=1e2),
    "equal keys": lambda a: ones(a, key=1.0),
    "zeros": lambda a: ones(a, query=0.0, key=0.0),
    "features of zero": lambda a: ones(a, query=-1e4, key=-1e4),
    "subnormal features": lambda a: ones(a, query=-45.0, key=-45.0),
}


@pytest.mark.parametrize("extreme", EXTREMES)
def test_extreme_values(mechanism, extreme):
    arrays = mechanism.reference.bounded(EXTREMES[extreme](battery.draw_plain(mechanism, 0)))
    assert_finite(battery.run(mechanism, arrays))


@pytest.mark.parametrize("subject", [s for s in MECHANISMS if s.reference.decays], ids=str)
@pytest.mark.parametrize("log_decay", [0.0, -1e-30, -1e4], ids=str)
def test_extreme_decays(subject, log_decay):
    """Nothing is forgotten, and everything."""
    arrays = battery.draw_plain(subject, 0)
    arrays = ones(arrays, **dict.fromkeys(subject.reference.decays, log_decay))
    assert_finite(battery.run(subject, arrays))


def test_equal_keys_share_their_weight(mechanism):
    """With keys that are all equal and values that are all equal, the output is that value."""
    arrays = ones(battery.draw_plain(mechanism, 0), query=1.0, key=1.0, value=3.0)
    results, _ = battery.run(mechanism, arrays)
    if mechanism.reference.normalized:
        np.testing.assert_allclose(results["out"], 3.0, rtol=1e-6)


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=str)
def test_nothing_is_left_after_padding(mechanism):
    if not mechanism.has("lengths"):
        pytest.skip("takes no lengths")
    extent = battery.everything(mechanism)
    with jax.enable_x64(True):
        arrays = battery.draw_arrays(mechanism, SQUARE, everything=True)
        arrays.update({k: np.full_like(arrays[k], np.nan) for k in mechanism.of_tokens})
        known = battery.neutral(mechanism, SQUARE, extent)
        known["query_seq_lengths"][:] = known["key_value_seq_lengths"][:] = 0
        cotangents = battery.cotangents_of(mechanism, extent, arrays, known)
        results, gradients = battery.run_everything(mechanism, arrays, known, cotangents)
    assert (results["out"] == 0).all()
    assert np.all(results.get("lse", -np.inf) == -np.inf)
    # A state is handed through, and its gradient with it.
    if "state" in results:
        same = functools.partial(jax.tree.map, np.testing.assert_array_equal)
        same(results["state"], arrays["initial_state"])
        same(gradients.pop("initial_state"), cotangents["state"])
    for gradient in gradients.values():
        assert (gradient == 0).all()


@pytest.mark.parametrize("mechanism", CALLED_IN_FLOAT32, ids=str)
def test_one_token(mechanism):
    """Attends to itself alone, and it weighs nothing where weights are relative.

    Where options need more tokens, the others are padding.
    """
    arrays, least = battery.draw_plain(mechanism, 0), mechanism.reference.least_tokens
    arrays.update({k: arrays[k][:, :least] for k in mechanism.of_tokens})
    one = np.ones(SQUARE.batch, np.int32)
    known = {"query_seq_lengths": one, "key_value_seq_lengths": one} if least > 1 else {}
    extent = battery.plain(mechanism)._replace(tuning=False)

    def total(arrays):
        results = battery.call(mechanism, extent, arrays, known)
        if known and "lse" in results:
            results["lse"] = results["lse"][:, 0]
        return sum(map(jnp.sum, jax.tree.leaves(results)))

    assert_finite(jax.jit(jax.value_and_grad(total))(arrays))
