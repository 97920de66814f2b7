"""The trapezoidal scan is a complex recurrence, and Mamba-2 at its limit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import effattn
from effattn.functional.mamba3 import TrapezoidalState
from effattn.nn import Mamba3
from tests.nn.build import filled

BATCH, LENGTH, HEADS, F, P = 2, 37, 2, 4, 3
RNG = np.random.default_rng(0)
HEAD = BATCH, LENGTH, HEADS
C, B = RNG.normal(size=(2, *HEAD, F))
X = RNG.normal(size=(*HEAD, P))
DT, LAMBDA = RNG.uniform(0.1, 1, HEAD), RNG.uniform(0, 1, HEAD)
NUMBERS = {"step_size": DT, "log_decay": -DT * RNG.uniform(0, 1, HEAD), "trapezoid": LAMBDA}
ANGLE = RNG.normal(size=(*HEAD, F // 2))


def by_paper(query, key, value, step_size, log_decay, trapezoid, angle, rank=1):
    """The trapezoidal recurrence of a complex state: a pair of features is a complex number.

    The sums over r are those of several inputs and outputs of a state.
    """

    def of_ranks(x):
        return x.reshape(BATCH, LENGTH, HEADS, rank, -1)

    def of_pairs(x):
        return x[..., ::2] + 1j * x[..., 1::2]

    q, k, value = of_pairs(of_ranks(query)), of_pairs(of_ranks(key)), of_ranks(value)
    h = np.zeros((BATCH, HEADS, F // 2, P), complex)
    before, y = np.zeros_like(h), np.zeros_like(value)
    for t in range(LENGTH):
        alpha = np.exp(log_decay[:, t, :, None] + 1j * angle[:, t])[..., None]
        dt, share = step_size[:, t, :, None, None], trapezoid[:, t, :, None, None]
        written = np.einsum("bnrf,bnrp->bnfp", k[:, t], value[:, t])
        h = alpha * h + (1 - share) * dt * alpha * before + share * dt * written
        before = written
        y[:, t] = np.einsum("bnrf,bnfp->bnrp", q[:, t].conj(), h).real
    return y.reshape(BATCH, LENGTH, HEADS * rank, P)


def test_it_is_the_complex_recurrence_of_the_paper():
    with jax.enable_x64(True):
        y = jax.jit(effattn.trapezoidal_scan)(C, B, X, **NUMBERS, angle=ANGLE)
    expected = by_paper(C, B, X, **NUMBERS, angle=ANGLE)
    np.testing.assert_allclose(y, expected, rtol=1e-9, atol=1e-9)


RANK = 3
MANY = [RNG.normal(size=(BATCH, LENGTH, HEADS * RANK, size)) for size in (F, F, P)]


def test_several_inputs_and_outputs_share_the_state_of_the_paper():
    with jax.enable_x64(True):
        run = functools.partial(effattn.trapezoidal_scan, rank=RANK, chunk_size=8)
        y = jax.jit(run)(*MANY, **NUMBERS, angle=ANGLE)
    expected = by_paper(*MANY, **NUMBERS, angle=ANGLE, rank=RANK)
    np.testing.assert_allclose(y, expected, rtol=1e-9, atol=1e-9)


def outputs_and_gradients(implementation, ids, *arrays):
    """Output, state and gradients of two calls, the second one from the state of the first one."""

    def call(arrays):
        first, second = (jax.tree.map(lambda x, at=at: x[:, at], arrays) for at in SPLIT)
        options = {"rank": RANK, "implementation": implementation, "return_state": True}
        heads, numbers = first
        out, state = effattn.trapezoidal_scan(*heads, **numbers, **options, segment_ids=ids)
        heads, numbers = second
        lengths = dict.fromkeys(("query_seq_lengths", "key_value_seq_lengths"), LENGTHS)
        return out, effattn.trapezoidal_scan(
            *heads, **numbers, **options, **lengths, initial_state=state
        )

    y, pull_back = jax.vjp(call, arrays)
    return y, pull_back(jax.tree.map(jnp.ones_like, y))


SPLIT = slice(0, 12), slice(12, 20)
LENGTHS = np.array([0, 5])


def test_ranks_agree_with_the_formula_for_documents_padding_and_states():
    ids = np.repeat([[1, 2, 0], [3, 4, 5]], [3, 7, 2], 1)
    with jax.enable_x64(True):
        arrays = MANY, {**NUMBERS, "angle": ANGLE}
        found, expected = (
            jax.jit(functools.partial(outputs_and_gradients, name))(ids, *arrays)
            for name in ("xla", "naive")
        )
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)


def test_without_turns_and_with_a_share_of_1_it_is_mamba2():
    rate = np.array([-0.3, -1.0])
    numbers = {"step_size": DT, "log_decay": DT * rate, "trapezoid": np.ones(HEAD)}
    with jax.enable_x64(True):
        run = functools.partial(effattn.trapezoidal_scan, **numbers)
        y = jax.jit(run)(C, B, X, angle=np.zeros((*HEAD, 0)))
        run = functools.partial(effattn.state_space_duality, step_size=DT, rate=rate)
        np.testing.assert_allclose(y, jax.jit(run)(C, B, X), rtol=1e-9, atol=1e-9)


def test_a_state_that_turns_counts_modulo_2():
    """A token of 1 turns the state by half a turn; without decay its sign is the parity."""
    tokens = RNG.integers(0, 2, size=(1, 4000, 1))
    ones = np.ones((1, 4000, 1, 2), np.float32)
    ones[..., 1] = 0
    first = np.float32(np.arange(4000) == 0)[None, :, None]
    y = jax.jit(effattn.trapezoidal_scan)(
        ones,
        ones,
        ones[..., :1],
        step_size=first,
        log_decay=np.zeros_like(first),
        trapezoid=np.ones_like(first),
        angle=np.float32(np.pi * tokens)[..., None],
    )
    turns = np.cumsum(tokens, 1) - tokens[:, :1]
    np.testing.assert_allclose(y[..., 0, 0], ((-1.0) ** turns)[..., 0], atol=1e-5)


def mixer(**options):
    return Mamba3(8, 2, state_size=6, rngs=nnx.Rngs(0), **options)


def test_ranks_with_equal_parameters_are_one_rank_with_a_larger_input():
    """R equal inputs of 1 / R, and the mean of R equal outputs."""
    one, more = filled(mixer), filled(lambda: mixer(mimo_rank=3))
    parts = np.split(np.asarray(one.project.kernel[...]), np.cumsum(one.sizes)[:-1], 1)
    parts[2], parts[3] = np.tile(parts[2], 3), np.tile(parts[3], 3)
    more.project.kernel[...] = np.concatenate(parts, 1)
    for name in ("key_bias", "query_bias"):
        getattr(more, name)[...] = np.repeat(getattr(one, name)[...], 3, 0)
    for name in ("key_norm", "query_norm"):
        getattr(more, name).scale[...] = getattr(one, name).scale[...]
    more.step_bias[...], more.out.kernel[...] = one.step_bias[...], one.out.kernel[...]
    # The skip is per rank, so that its input is not summed over the ranks.
    more.skip[...] = 3 * one.skip[...]
    ones = np.ones_like(more.mimo_x[...])
    more.mimo_x[...], more.mimo_z[...], more.mimo_o[...] = ones / 3, ones, ones / 3
    x = jnp.asarray(RNG.normal(size=(2, 9, 8)), jnp.float32)
    run = nnx.jit(lambda mixer, x: mixer(x))
    np.testing.assert_allclose(run(more, x), run(one, x), rtol=1e-4, atol=1e-5)


def test_the_sums_of_the_state_do_not_grow_with_the_rank():
    state = jax.eval_shape(lambda: mixer(mimo_rank=3).init_state(2, 10)).state
    assert state.sums.shape == (2, 2, 6, 8)
    assert state.key.shape == (2, 6, 6) and state.value.shape == (2, 6, 8)


def test_groups_of_B_and_C_are_shared_by_their_heads():
    """With equal weights for both groups, two groups are one."""
    one, two = filled(mixer), filled(lambda: mixer(num_kv_heads=2))
    parts = np.split(np.asarray(one.project.kernel[...]), np.cumsum(one.sizes)[:-1], 1)
    parts[2], parts[3] = np.tile(parts[2], 2), np.tile(parts[3], 2)
    two.project.kernel[...] = np.concatenate(parts, 1)
    for name in ("step_bias", "key_bias", "query_bias", "skip"):
        getattr(two, name)[...] = getattr(one, name)[...]
    for name in ("key_norm", "query_norm"):
        getattr(two, name).scale[...] = getattr(one, name).scale[...]
    two.out.kernel[...] = one.out.kernel[...]
    x = jnp.asarray(RNG.normal(size=(2, 9, 8)), jnp.float32)
    run = nnx.jit(lambda mixer, x: mixer(x))
    np.testing.assert_allclose(run(two, x), run(one, x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: effattn.trapezoidal_scan(C, B, X, **NUMBERS, angle=np.ones((*HEAD, 3))),
            "angle must rotate at most 2 pairs of the 4 features of a key, got 3 angles",
        ),
        (
            lambda: effattn.trapezoidal_scan(C, B, X, **NUMBERS, angle=np.float32(1)),
            r"angle must be floating point of shape \(2, 37, 2, 0\)",
        ),
        (
            lambda: effattn.trapezoidal_scan(C, B, X, **{**NUMBERS, "log_decay": DT}, angle=ANGLE),
            "log_decay must be 0 or less",
        ),
        (
            lambda: effattn.trapezoidal_scan(C, B, X, **{**NUMBERS, "step_size": -DT}, angle=ANGLE),
            "step_size must be 0 or more, got -",
        ),
        (
            lambda: effattn.trapezoidal_scan(
                C, B, X, **{**NUMBERS, "trapezoid": 1 + DT}, angle=ANGLE
            ),
            "trapezoid must be between 0 and 1, got 1",
        ),
        (
            lambda: effattn.trapezoidal_scan(
                C, B, X, **NUMBERS, angle=ANGLE, initial_state=np.zeros((2, 2, 4, 3))
            ),
            "initial_state must be the TrapezoidalState that an earlier call returned, got ndarray",
        ),
        (
            lambda: effattn.trapezoidal_scan(
                C, B, X, **NUMBERS, angle=ANGLE, initial_state=TrapezoidalState(C, B, X)
            ),
            r"initial_state.sums must be floating point of shape \(2, 2, 4, 3\)",
        ),
        (
            lambda: effattn.trapezoidal_scan(C, B, X, **NUMBERS, angle=ANGLE, rank=3),
            "rank must divide the 2 heads of key and value, .* share a state, got 3",
        ),
        (
            lambda: effattn.trapezoidal_scan(C, B, X, **NUMBERS, angle=ANGLE, rank=2),
            r"log_decay must be floating point of shape \(2, 37, 1\)",
        ),
        (lambda: mixer(mimo_rank=0), "mimo_rank must be an int, 1 or more inputs, got 0"),
        (lambda: mixer(num_angles=4), r"num_angles must be at most 3, half of state_size \(6\)"),
        (lambda: mixer(num_kv_heads=3), r"num_heads \(2\) must be a positive multiple of"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
