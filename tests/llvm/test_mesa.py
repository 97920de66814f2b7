"""The linear equations of a Mesa layer by the CPU kernel, against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import effattn
from effattn.llvm import mesa, runtime
from effattn.testing.functions import assert_close
from tests.llvm.function_cases import by_kernel, exact

pytestmark = pytest.mark.skipif(
    runtime.refusal() is not None, reason=f"the kernels are not here: {runtime.refusal()}"
)

# Batch, tokens, query heads, key heads, features and values; steps, and options.
CASES = {
    "a token": ((1,), 1, 1, 1, 3, 2, 8, {}),
    "chunks and a part": ((2,), 37, 2, 2, 8, 5, 30, {}),
    "groups": ((), 32, 4, 2, 20, 12, 40, {}),
    "three steps": ((2,), 37, 2, 1, 17, 5, 3, {}),
    "documents": (
        (2,),
        37,
        2,
        1,
        8,
        5,
        30,
        {"segment_ids": np.array([[1] * 20 + [2] * 17, [0] * 3 + [4] * 30 + [1] * 4])},
    ),
    "lengths": (
        (2,),
        20,
        2,
        2,
        8,
        5,
        30,
        {"query_seq_lengths": np.array([20, 7]), "key_value_seq_lengths": np.array([18, 7])},
    ),
}


def arrays_of(case):
    batch, tokens, heads, key_heads, features, values, _, _ = case
    rng = np.random.default_rng(tokens)
    key = rng.normal(size=(*batch, tokens, key_heads, features))
    arrays = {
        "query": rng.normal(size=(*batch, tokens, heads, features)),
        "key": key / np.linalg.norm(key, axis=-1, keepdims=True),
        "value": rng.normal(size=(*batch, tokens, key_heads, values)),
        "beta": rng.random((*batch, tokens, key_heads)),
        "log_decay": -rng.random((*batch, tokens, key_heads)) / 4,
        "regulariser": 0.3 + rng.random((key_heads, features)),
    }
    return {name: x.astype(np.float32) for name, x in arrays.items()}


def assert_exact(case):
    call = functools.partial(effattn.mesa_attention, num_steps=case[-2], **case[-1])
    assert_close(by_kernel(call, arrays_of(case)), exact(call, arrays_of(case)), 1e-5)


@pytest.mark.parametrize("name", CASES)
def test_it_agrees_with_as_many_steps_in_float64(name):
    assert_exact(CASES[name])


@pytest.mark.usefixtures("lanes")
def test_vectors_of_every_width_agree():
    assert_exact(CASES["groups"])


def test_a_state_goes_on():
    """Two halves, the second from the state of the first, are the whole."""
    given = arrays_of(CASES["groups"])
    regulariser = given.pop("regulariser")
    call = functools.partial(
        effattn.mesa_attention, regulariser=regulariser, implementation="llvm", return_state=True
    )
    whole, after = call(**given)
    early, state = call(**{name: x[:20] for name, x in given.items()})
    late, last = call(**{name: x[20:] for name, x in given.items()}, initial_state=state)
    assert_close((jnp.concatenate([early, late]), last), (whole, after), 1e-5)


def test_an_infinite_query_has_no_finite_output():
    given = arrays_of(CASES["groups"])
    given["query"][3] = np.inf
    out = effattn.mesa_attention(**given, implementation="llvm")
    assert not np.isfinite(out[3]).any()
    assert np.isfinite(np.delete(out, 3, 0)).all()


def test_a_token_stops_where_little_is_left_to_solve(monkeypatch):
    """With a coarse limit, a thousand steps give what few steps give."""
    case = CASES["groups"]
    given = arrays_of(case)
    call = functools.partial(effattn.mesa_attention, **given, implementation="llvm")
    fine = call(num_steps=1000)
    monkeypatch.setattr(mesa, "_SOLVED", 0.01)
    coarse = call(num_steps=1000)
    assert 1e-3 < np.abs(coarse - fine).max() < 0.5


def test_no_token_before_a_change_notices_it():
    """Earlier outputs stay equal bit for bit, though the tokens of a chunk are solved together."""
    given = arrays_of(CASES["groups"])
    call = functools.partial(effattn.mesa_attention, implementation="llvm")
    changed = {name: np.array(x) for name, x in given.items()}
    for name in ("query", "key", "value"):
        changed[name][5:] *= 7
    before, after = call(**given), call(**changed)
    np.testing.assert_array_equal(before[:5], after[:5])
    assert (before[5] != after[5]).any()


def test_a_query_of_zeros_has_an_output_of_zeros():
    given = arrays_of(CASES["groups"])
    given["query"] = 0 * given["query"]
    out = effattn.mesa_attention(**given, implementation="llvm")
    np.testing.assert_array_equal(out, 0)


def test_under_vmap_the_shared_arrays_stay_shared():
    given = arrays_of(CASES["groups"])
    call = functools.partial(effattn.mesa_attention, implementation="llvm")
    queries = jnp.stack([given["query"], 2 * given["query"]])
    ours = jax.vmap(lambda query: call(**{**given, "query": query}))(queries)
    expected = jnp.stack([call(**{**given, "query": query}) for query in queries])
    assert_close(ours, expected, 1e-6)
