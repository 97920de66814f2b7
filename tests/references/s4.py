"""State spaces with their matrices as matrices, token by token."""

import jax
import jax.numpy as jnp

from tests.references.reference import MixerReference


def finished(mixer, x, y):
    y = (y + mixer.skip[...].astype(y.dtype) * x).astype(x.dtype)
    return jax.nn.glu(jax.nn.gelu(y) @ mixer.out.kernel[...])


def parameters(mixer, wide):
    """L and d, and a function from pairs of real arrays to complex ones."""
    rate = -jnp.exp(mixer.log_rate[...].astype(wide)) + 1j * mixer.turn[...].astype(wide)
    return rate, jnp.exp(mixer.log_step[...].astype(wide))


def complex_of(parameter, wide):
    real, imaginary = parameter[...].astype(wide)
    return real + 1j * imaginary


def diagonal(mixer, x):
    wide = jnp.promote_types(x.dtype, jnp.float32)
    rate, step = parameters(mixer, wide)
    decay = jnp.exp(step[:, None] * rate)

    def step(state, token):
        state = decay * state + (decay - 1) / rate * token[:, None]
        return state, 2 * (complex_of(mixer.output, wide) * state).sum(-1).real

    return finished(mixer, x, jax.lax.scan(step, jnp.zeros_like(rate), x.astype(wide))[1])


def low_rank(mixer, x):
    """Over all modes, conjugates too, with C from C~ by the definition."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    rate, step = parameters(mixer, wide)
    both = [complex_of(p, wide) for p in (mixer.low_rank, mixer.input, mixer.output)]
    rate, p, b, c = (jnp.concatenate([a, a.conj()], -1) for a in (rate, *both))

    @jax.vmap
    def of_feature(rate, p, b, c, step, x):
        a, eye = jnp.diag(rate) - jnp.outer(p, p.conj()), jnp.eye(len(rate))
        inverse = jnp.linalg.inv(2 / step * eye - a)
        turn = inverse @ (2 / step * eye + a)
        rest = eye - jnp.linalg.matrix_power(turn, mixer.max_length)
        output = jnp.linalg.solve(rest.T, c)

        def step(state, token):
            state = turn @ state + 2 * inverse @ b * token
            return state, (output @ state).real

        return jax.lax.scan(step, jnp.zeros_like(c), x)[1]

    return finished(mixer, x, of_feature(rate, p, b, c, step, x.T.astype(wide)).T)


S4D = MixerReference(mix=diagonal, transforms=True, variants={"": {"state_size": 6}})
S4 = MixerReference(
    mix=low_rank,
    transforms=True,
    # A state space goes on past the kernel that its parameters are those of.
    variants={
        "": {"state_size": 4, "max_length": 16},
        "longer": {"state_size": 4, "max_length": 12},
    },
    cost=lambda length: {"max_length": length},
)
