"""Mesa layer: the value of a query by least squares over all tokens so far."""

import dataclasses
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp

from effattn import registry
from effattn.arrays import checks, dtypes, mesh_axes
from effattn.arrays.axes import lead
from effattn.cores import by_head, recurrence
from effattn.cores.mesa import Equations, solve
from effattn.interfaces.linear_recurrence import Terms, clear
from effattn.naive import over_tokens, with_naive
from effattn.options import Recurrent, declared


class MesaState(NamedTuple):
    """State of `mesa_attention`; zeros are the empty state.

    Attributes:
      keys: `(*B, K, H, H)`, sums of outer products of keys; symmetric, no eigenvalue below 0.
      values: `(*B, K, H, Hv)`, sums of outer products of keys and values.
    """

    keys: jax.Array
    values: jax.Array


def naive(state, query, key, value, *, beta, log_decay, regulariser, num_steps):
    """One token of one head: query, key and regulariser `(H,)`, value `(Hv,)`."""
    keys, values = (
        jnp.exp(log_decay) * sums + beta * jnp.outer(key, x)
        for sums, x in zip(state, (key, value), strict=True)
    )
    solution = jnp.linalg.solve(keys.T + jnp.diag(regulariser), query)
    return MesaState(keys, values), solution @ values


def _empty(key, value, **_):
    return MesaState(
        jnp.zeros((key.size, key.size), key.dtype), jnp.zeros((key.size, value.size), value.dtype)
    )


@with_naive(
    over_tokens(naive, per_token=("beta", "log_decay"), per_head={"regulariser": 1}, empty=_empty)
)
@declared
def mesa_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    beta: jax.Array,
    log_decay: jax.Array,
    regulariser: jax.Array,
    num_steps: int = 30,
    **options: Unpack[Recurrent],
) -> Any:
    r"""Mesa layer.

    von Oswald et al. 2025, "MesaNet: Sequence Modeling by Locally Optimal Test-Time Training".

        G_t = exp(log_decay_t) G_(t-1) + beta_t k_t k_t^T
        S_t = exp(log_decay_t) S_(t-1) + beta_t k_t v_t^T
        out_t^T = q_t^T (G_t + diag(regulariser))^(-1) S_t

    The output is the value that a linear map gives the query, where the map solves weighted and
    regularised least squares over all keys and values so far. Queries are not scaled.

    The equation is solved by `num_steps` steps of conjugate gradients, from zero, for all tokens
    together: a step is a linear attention with the search directions as queries, on the core of
    linear recurrences. On CPUs in float32, a kernel solves 16 tokens at a time, and a
    token stops before `num_steps` once its residual is 1e-8 of its query. The gradient is that of
    the exact solution, and takes at most as many steps. In exact arithmetic H steps suffice. Fewer
    steps give an approximation, whose error grows with the ratio of the largest to the smallest
    eigenvalue of the matrix.

    Always causal. Time is O(num_steps T H (H + C)) for chunks of C tokens, memory O(T).

    Args:
      query: `(*B, T, N, H)`, with any number of batch dimensions.
      key: `(*B, T, K, H)`, N a multiple of K: query head n reads key head n // (N // K).
      value: `(*B, T, K, Hv)`.
      beta: `(*B, T, K)`, weight of each token, 0 or more, checked if concrete.
      log_decay: `(*B, T, K)`, 0 or less, checked if concrete.
      regulariser: `(K, H)`, above 0, checked if concrete.
      num_steps: conjugate-gradient steps.
      **options: padding, packing, state, chunks and execution: see `effattn.options.Recurrent`.

    Returns:
      `(*B, T, N, Hv)` in the dtype of `value`; with `return_state`, `(out, MesaState)`, in the
      promoted dtype of query, key and value, at least float32.

    Raises:
      ValueError: a weight below 0, a log decay above 0, a regulariser that is not above 0; and the
        errors of `effattn.options`.
    """
    given = recurrence.check(query, key, value, **options)
    num_steps = checks.at_least("num_steps", num_steps, 1, "steps")
    *batch, _, heads, size = given.key.shape
    beta = checks.shaped("beta", beta, given.key.shape[:-1])
    checks.between("beta", beta, 0)
    log_decay = recurrence.check_log_decay(log_decay, given.key.shape[:-1])
    regulariser = _check_regulariser(regulariser, (heads, size))
    shape = (*batch, heads, size)
    shapes = (*shape, size), (*shape, given.value.shape[-1])
    state = by_head.check_state(MesaState, given.initial_state, shapes, given)

    query = clear(given.query, given.tokens.query_mask).astype(given.dtype)
    diagonal, key = regulariser.astype(given.dtype), given.key
    wide_key = given.key.astype(given.dtype)
    # The linear solve is traced once, for the types that its operands have in every derivative.
    query, key, wide_key, beta, log_decay, diagonal, state, tokens = mesh_axes.vary_alike(
        (query, key, wide_key, beta, log_decay, diagonal, state, given.tokens)
    )

    def read(query, value, state):
        """Sums over the earlier tokens, and the state after the last one."""
        of_read = dataclasses.replace(given, value=value, initial_state=state, tokens=tokens)
        keys = key, value, beta, log_decay
        return recurrence.run("mesa_attention", _terms, of_read, query, keys)

    def product(x):
        of_keys = read(x, wide_key, state.keys)[0]
        return of_keys + mesh_axes.placed_like(x, _regularised, x, diagonal)

    equations = Equations(wide_key, beta, log_decay, diagonal, state.keys, tokens)
    solution = solve(
        "mesa_attention",
        _terms,
        product,
        query,
        equations,
        num_steps=num_steps,
        implementation=given.implementation,
    )
    out, values = read(solution, given.value, state.values)
    if not given.return_state:
        return out
    _, keys = read(query, wide_key, state.keys)
    return out, MesaState(keys, values)


def _regularised(x, diagonal):
    """diag(regulariser) x for vectors x `(*B, T, N, H)`."""
    heads, size = diagonal.shape
    groups = x.reshape(*x.shape[:-2], heads, x.shape[-2] // max(heads, 1), size)
    return (lead(diagonal[:, None], groups.ndim) * groups).reshape(x.shape)


def _terms(_, query, keys) -> Terms:
    key, value, beta, log_decay = keys
    return Terms(query, dtypes.product(beta[..., None], key), value, log_decay)


def _check_regulariser(value, shape):
    regulariser = checks.shaped("regulariser", value, shape)
    known = checks.known(regulariser)
    if known is not None and not (known > 0).all():
        raise ValueError(
            f"regulariser must be above 0, so that the equations have a solution, got "
            f"{known.min():.4g}"
        )
    return regulariser


registry.register(
    registry.Mechanism(
        name="mesa",
        family="recurrent",
        paper="von Oswald et al. 2025, MesaNet: Sequence Modeling by Locally Optimal Test-Time "
        "Training",
        function=mesa_attention,
        capabilities=frozenset({"causal"}),
        builder="effattn.nn.mesa:MesaNet",
        decoder="effattn.decode.recurrent:RecurrentDecoder",
        complexity="O(N M H^2)",
        time_exponent=1.0,
        knows_order=True,
    )
)
