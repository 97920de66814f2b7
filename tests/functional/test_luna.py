"""Luna attention: the paper's formulas, exact attention in two steps, and contexts in pieces."""

import functools

import jax
import numpy as np
import pytest

import effattn
from effattn import LunaState, luna_attention
from effattn.testing.functions import assert_close

BATCH, LENGTH, HEADS, SIZE, PACKED = 2, 9, 2, 4, 3
SCALE = SIZE**-0.5
RNG = np.random.default_rng(0)
QUERY, KEY, VALUE, PACK_KEY = RNG.normal(size=(4, BATCH, LENGTH, HEADS, SIZE))
PACK_QUERY = RNG.normal(size=(HEADS, PACKED, SIZE))
STATE = np.zeros((BATCH, HEADS, SIZE, 5), np.float32)


pytestmark = pytest.mark.usefixtures("x64")


def attend(query=QUERY, tokens=slice(None), **options):
    key, value, pack_key = (x[:, tokens] for x in (KEY, VALUE, PACK_KEY))
    run = jax.jit(functools.partial(luna_attention, **options))
    return run(query, key, value, pack_query=PACK_QUERY, pack_key=pack_key)


def test_a_softmax_is_exact_attention_in_two_steps():
    pack_query = np.broadcast_to(PACK_QUERY.swapaxes(0, 1), (BATCH, PACKED, HEADS, SIZE))
    keys, values = (effattn.dot_product_attention(pack_query, PACK_KEY, x) for x in (KEY, VALUE))
    assert_close(attend(), effattn.dot_product_attention(QUERY, keys, values), 1e-12)


def test_a_causal_output_is_that_of_a_bidirectional_call_on_the_tokens_so_far():
    for activation in ("softmax", "elu", "softplus"):
        whole = attend(is_causal=True, activation=activation)
        for t in (0, 3, LENGTH - 1):
            alone = attend(QUERY[:, t : t + 1], slice(t + 1), activation=activation)
            assert_close(whole[:, t : t + 1], alone, 1e-12)


@pytest.mark.parametrize(
    ("activation", "omega"),
    [
        ("elu", lambda x: np.where(x > 0, x, np.expm1(x)) + 1),
        ("softplus", lambda x: np.log1p(np.exp(x))),
    ],
)
def test_the_causal_form_is_that_of_the_paper(activation, omega):
    """The function f of section 3.3, and its use for both steps, for each head."""

    def f(x, y, z):
        rows = [x[t] @ (y[: t + 1].T @ z[: t + 1]) / (t + 1) for t in range(LENGTH)]
        return np.stack(rows)

    out = np.zeros_like(VALUE)
    for b in range(BATCH):
        for n in range(HEADS):
            query, key, value, pack_key = (x[b, :, n] for x in (QUERY, KEY, VALUE, PACK_KEY))
            pack = omega(SCALE * PACK_QUERY[n] @ pack_key.T)
            unpack = np.exp(f(SCALE * query, key, pack.T))
            unpack = unpack / unpack.sum(1, keepdims=True)
            out[b, :, n] = f(unpack, pack.T, value)
    assert_close(attend(activation=activation, is_causal=True), out, 1e-12)


def test_the_pack_keys_are_the_keys_by_default():
    given = {"pack_query": PACK_QUERY, "is_causal": True}
    same = luna_attention(QUERY, KEY, VALUE, **given, pack_key=KEY)
    np.testing.assert_array_equal(luna_attention(QUERY, KEY, VALUE, **given), same)


@pytest.mark.parametrize("activation", ["softmax", "elu"])
def test_a_context_can_be_packed_in_pieces_and_read_later(activation):
    options = {"activation": activation, "return_state": True}
    expected, whole = attend(**options)
    _, state = attend(QUERY[:, :0], slice(4), **options)
    _, state = attend(QUERY[:, :0], slice(4, None), initial_state=state, **options)
    out, unchanged = attend(QUERY, slice(0), initial_state=state, **options)
    assert_close((out, state, unchanged), (expected, whole, whole), 1e-12)


def test_documents_of_very_different_logits_do_not_underflow():
    """Logits of the first document are larger by 2e4, so a shared maximum would hide the second."""
    size = np.where(np.arange(LENGTH) < 5, 1e4, 1.0)[:, None, None]
    ids = np.broadcast_to(np.where(np.arange(LENGTH) < 5, 1, 2), (BATCH, LENGTH))
    for is_causal in (True, False):
        run = functools.partial(luna_attention, pack_query=PACK_QUERY, is_causal=is_causal)
        packed = run(QUERY, KEY, VALUE, pack_key=size * PACK_KEY, segment_ids=ids)
        alone = run(QUERY[:, 5:], KEY[:, 5:], VALUE[:, 5:], pack_key=PACK_KEY[:, 5:])
        assert_close(packed[:, 5:], alone, 1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activation": "relu"}, "activation must be one of softmax, elu, softplus, got 'relu'"),
        ({"activation": ["elu"]}, r"activation must be one of softmax, .*, got \['elu'\]"),
        ({"pack_query": PACK_QUERY[0]}, r"pack_query must be .* \(1, m, 4\), or \(2, m, 4\)"),
        ({"pack_key": KEY[..., :3]}, r"pack_key must .*\(2, 9, 2, 4\)"),
        ({"initial_state": STATE}, "must be the LunaState .* got ndarray for activation='softmax'"),
        (
            {"initial_state": LunaState(STATE, STATE, STATE, None)},
            "got one without a maximum for activation='softmax'",
        ),
        (
            {"initial_state": LunaState(STATE, STATE, STATE, STATE), "activation": "elu"},
            "got one with a maximum for activation='elu'",
        ),
        (
            {"initial_state": LunaState(STATE, STATE, STATE, STATE)},
            r"initial_state.keys must .*\(2, 2, 4, 3\)",
        ),
        ({"implementation": "llvm", "is_causal": True}, "value_log_decay"),
    ],
)
def test_bad_arguments_are_named(options, message):
    options = {"pack_query": PACK_QUERY, **options}
    heads = (x.astype(np.float32) for x in (QUERY, KEY, VALUE))
    with pytest.raises((ValueError, NotImplementedError), match=message):
        luna_attention(*heads, **options)
