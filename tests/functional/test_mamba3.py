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


def by_paper(query, key, value, step_size, log_decay, trapezoid, angle):
    """The trapezoidal recurrence of a complex state: a pair of features is a complex number."""

    def of_pairs(x):
        return x[..., ::2] + 1j * x[..., 1::2]

    q, k = of_pairs(query), of_pairs(key)
    h = np.zeros((BATCH, HEADS, F // 2, P), complex)
    before, y = np.zeros_like(h), np.zeros_like(value)
    for t in range(LENGTH):
        alpha = np.exp(log_decay[:, t, :, None] + 1j * angle[:, t])[..., None]
        dt, share = step_size[:, t, :, None, None], trapezoid[:, t, :, None, None]
        written = k[:, t, :, :, None] * value[:, t, :, None]
        h = alpha * h + (1 - share) * dt * alpha * before + share * dt * written
        before = written
        y[:, t] = np.einsum("bnr,bnrp->bnp", q[:, t].conj(), h).real
    return y


def test_it_is_the_complex_recurrence_of_the_paper():
    with jax.enable_x64(True):
        y = jax.jit(effattn.trapezoidal_scan)(C, B, X, **NUMBERS, angle=ANGLE)
    expected = by_paper(C, B, X, **NUMBERS, angle=ANGLE)
    np.testing.assert_allclose(y, expected, rtol=1e-9, atol=1e-9)


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
        (lambda: mixer(num_angles=4), r"num_angles must be at most 3, half of state_size \(6\)"),
        (lambda: mixer(num_kv_heads=3), r"num_heads \(2\) must be a positive multiple of"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
