"""S4: state space models of each feature, with a matrix that is diagonal plus low rank."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from effattn import registry
from effattn.naive import over_examples

# Frequencies of a kernel in memory at a time.
_FREQUENCIES = 256


def naive(mixer, x):
    """S4 by its recurrence with dense matrices: tokens x `(T, D)`; all modes, conjugates too."""
    wide = jnp.promote_types(x.dtype, jnp.float32)

    def modes(pair):
        half = lax.complex(pair[0].astype(wide), pair[1].astype(wide))
        return jnp.concatenate([half, half.conj()], -1)

    def of_feature(L, P, B, truncated, dt, x):
        """One feature: L, P, B and C~ `(2 M,)`, x `(T,)`."""
        A, identity = jnp.diag(L) - jnp.outer(P, P.conj()), jnp.eye(len(L))
        inverse = jnp.linalg.inv(2 / dt * identity - A)
        Abar, Bbar = inverse @ (2 / dt * identity + A), 2 * inverse @ B
        rest = identity - jnp.linalg.matrix_power(Abar, mixer.max_length)
        C = jnp.linalg.solve(rest.T, truncated)  # C~ = C (I - Abar^max_length)

        def step(state, token):
            state = Abar @ state + Bbar * token
            return state, (C @ state).real

        return lax.scan(step, jnp.zeros_like(Bbar), x)[1]

    L = modes((-jnp.exp(mixer.log_rate[...].astype(wide)), mixer.turn[...]))
    P, B, truncated = (modes(pair[...]) for pair in (mixer.low_rank, mixer.input, mixer.output))
    dt, u = jnp.exp(mixer.log_step[...].astype(wide)), x.astype(wide)
    y = jax.vmap(of_feature)(L, P, B, truncated, dt, u.T).T + mixer.skip[...].astype(wide) * u
    return jax.nn.glu(jax.nn.gelu(y.astype(x.dtype)) @ mixer.out.kernel[...])


def low_rank_kernel(
    rate: jax.Array,
    low_rank: jax.Array,
    input: jax.Array,
    truncated_output: jax.Array,
    step_size: jax.Array,
    length: int,
) -> jax.Array:
    r"""Convolution kernel of S4, by algorithm 1 of the paper.

    Gu et al. 2022, "Efficiently Modeling Long Sequences with Structured State Spaces".

    The state matrix is A = diag(L) - P P^*. The bilinear discretisation with step size dt gives

        Abar = (2/dt - A)^-1 (2/dt + A);   Bbar = 2 (2/dt - A)^-1 B;   K_t = C Abar^t Bbar

    With C~ = C (I - Abar^length) and w_m = 1 / ((2/dt) (1 - z) - L_m (1 + z)), the Woodbury
    identity gives the Fourier transform of the kernel at the roots of unity z:

        2 (C~ w B - (1 + z) (C~ w P) (P^* w B) / (1 + (1 + z) P^* w P))

    where each product sums over modes and their conjugates. For z = exp(-2i a), s = (2/dt) sin a
    and c = cos a, a mode with the term x w in a sum, such as C~_m B_m w_m, and its conjugate, whose
    w is w', add

        x w + x^* w' = exp(i a) (i s Re(x) - c Re(x L^*)) / ((i s - L c) (i s - L^* c))

    so the sums over modes are products of real matrices. Time is O(length D (M + log length)),
    memory O(D (length + M)).

    Args:
      rate: L, `(D, M)` complex; the first of each of M conjugate pairs of modes.
      low_rank: P, `(D, M)` complex.
      input: B, `(D, M)` complex.
      truncated_output: C~, `(D, M)` complex.
      step_size: dt, `(D,)`.
      length: number of taps of the kernel, at least 1.

    Returns:
      `(length, D)` real.
    """
    count = length // 2 + 1
    blocks = -(-count // _FREQUENCIES)
    angles = np.pi * (np.arange(blocks * _FREQUENCIES) % length) / length
    conjugate = jnp.conj
    pairs = (
        (truncated_output, input),
        (truncated_output, low_rank),
        (conjugate(low_rank), input),
        (conjugate(low_rank), low_rank),
    )
    weights = jnp.stack([left * right for left, right in pairs], 1)
    weights = jnp.stack([weights.real, (weights * conjugate(rate)[:, None]).real])  # (2, D, 4, M)
    L_real, L_imag = rate.real[..., None], rate.imag[..., None]  # (D, M, 1)

    @jax.checkpoint
    def of_block(roots):
        """Returns the transform at the frequencies of sin a and cos a, `(D, frequencies)`."""
        sine, cosine = roots[0][None], roots[1][None]
        s = (2 / step_size)[:, None] * sine
        # 1 / ((r + i p) (r + i q)) for each pair of modes.
        r, shift = -L_real * cosine[:, None], L_imag * cosine[:, None]
        p, q = s[:, None] - shift, s[:, None] + shift
        scale = 1 / ((r * r + p * p) * (r * r + q * q))
        inverse = jnp.stack([(r * r - p * q) * scale, -r * (p + q) * scale])  # (2, D, M, n)
        sums = jnp.einsum("adxm,rdmf->axrdf", weights, inverse, precision="highest")
        (s_real, s_imag), (c_real, c_imag) = ((x[:, 0], x[:, 1]) for x in sums)  # (4, D, n)
        # 2 (i s S - C cos a), for S and C of the sums; strict promotion refuses float by complex.
        real = s[None] * s_imag + cosine[None] * c_real
        imag = s[None] * s_real - cosine[None] * c_imag
        output, of_output, of_input, both = lax.complex(-2 * real, 2 * imag)
        root, cosine = lax.complex(cosine, sine), lax.complex(cosine, jnp.zeros_like(cosine))
        return root * (output - cosine * of_output * of_input / (1 + cosine * both))

    angles = angles.reshape(blocks, -1)
    roots = jnp.asarray(np.stack([np.sin(angles), np.cos(angles)], 1), rate.real.dtype)
    spectrum = lax.map(of_block, roots)
    spectrum = jnp.moveaxis(spectrum, 0, 1).reshape(rate.shape[0], -1)[:, :count]
    return jnp.fft.irfft(spectrum, length, axis=-1).T


def hippo(size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the modes of HiPPO-LegS: rates, low rank P and input B, each `(size / 2,)` complex.

    The matrix A_nk = -sqrt(2n + 1) sqrt(2k + 1) below the diagonal, -(n + 1) on it, plus P P^T with
    P_n = sqrt(n + 1/2), is normal. In the basis of its eigenvectors, A is diag(rates) - P P^*. The
    input is B_n = sqrt(2n + 1). Modes come in conjugate pairs; one mode of each pair is returned.
    """
    n = np.arange(size)
    rates, to_modes = hippo_modes(size)
    return rates, to_modes @ np.sqrt(n + 0.5), to_modes @ np.sqrt(2 * n + 1)


def hippo_modes(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the normal part of HiPPO-LegS in modes: rates `(M,)`, and V^* `(M, size)`.

    The normal part is V diag(rates) V^* and its conjugate for one mode of each of M = size / 2
    conjugate pairs. See `hippo`.
    """
    n = np.arange(size)
    low_rank, input = np.sqrt(n + 0.5), np.sqrt(2 * n + 1)
    matrix = -np.tril(np.outer(input, input), -1) - np.diag(n + 1)
    normal = matrix + np.outer(low_rank, low_rank)
    # `normal` is -1/2 times the identity plus a skew-symmetric matrix, i times a Hermitian matrix.
    A_imag, vectors = np.linalg.eigh(-1j * (normal + 0.5 * np.eye(size)))
    first = slice(size // 2, None)
    return -0.5 + 1j * A_imag[first], vectors.conj().T[first]


registry.register(
    registry.Mechanism(
        name="s4",
        family="state space",
        paper="Gu et al. 2022, Efficiently Modeling Long Sequences with Structured State Spaces",
        function=None,
        naive=over_examples(naive),
        takes_heads=False,
        capabilities=frozenset({"causal", "lengths", "segments", "decode"}),
        builder="effattn.nn.s4:S4",
        complexity="O(N D (log N + M))",
        time_exponent=1.0,
        causality="rounding",
        knows_order=True,
    )
)
