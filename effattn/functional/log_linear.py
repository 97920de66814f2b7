"""Log-linear attention: gated linear attention with a state for each level of distance."""

from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp

from effattn import registry
from effattn.arrays import checks, dtypes
from effattn.cores import by_head, recurrence
from effattn.interfaces.linear_recurrence import clear
from effattn.naive import over_tokens, with_naive
from effattn.options import Chunk, Packing, Padding, Precision, State, declared
from effattn.xla import fenwick_states


class Options(Padding, Packing, State, Chunk, Precision, total=False):
    """The shared options of `log_linear_attention`."""


class LogLinearState(NamedTuple):
    """State of `log_linear_attention`; zeros are the empty state.

    Attributes:
      sums: `(*B, K, L - 1, H, Hv)`, sums over the earlier tokens of each level from 1 on.
      position: `(*B, K)`, number of tokens read, a whole number in floating point.
    """

    sums: jax.Array
    position: jax.Array


def naive(state, query, key, value, *, log_decay, levels, scale):
    """One token of one head: query and key `(H,)`, value `(Hv,)`, log_decay `()`, levels `(L,)`."""
    level = jnp.arange(len(state.sums))
    full = (state.position.astype(int) >> level) % 2
    has_tokens = (full == 1) | (level == level[-1])
    sums = jnp.where(has_tokens[:, None, None], jnp.exp(log_decay) * state.sums, 0)
    written = jnp.outer(key, value)
    out = levels[0] * (query @ written) + jnp.einsum("l,h,lhv->v", levels[1:], query, sums)
    # As in a binary counter, the first level that is empty takes the token and all levels below.
    target = jnp.minimum(jnp.cumprod(full).sum(), len(sums) - 1)
    below = jnp.where(level < target, 1, 0)[:, None, None]
    sums = jnp.where((level == target)[:, None, None], sums + (below * sums).sum(0) + written, sums)
    return LogLinearState((1 - below) * sums, state.position + 1), scale * out


def _empty(key, value, levels, **_):
    sums = jnp.zeros((levels.size - 1, key.size, value.size), value.dtype)
    return LogLinearState(sums, value.dtype.type(0))


@with_naive(over_tokens(naive, per_token=("log_decay",), per_query=("levels",), empty=_empty))
@declared
def log_linear_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    log_decay: jax.Array,
    levels: jax.Array,
    scale: float | jax.Array | None = None,
    **options: Unpack[Options],
) -> Any:
    r"""Log-linear attention (Guo et al. 2025, "Log-Linear Attention"), on gated linear attention.

        out_t = scale * sum_(s <= t) levels_t[l(t, s)] a_ts (q_t . k_s) v_s
        a_ts = exp(sum_(s < r <= t) log_decay_r)

    The level l of a query and a key is 0 for t = s, and else the number of the highest bit in which
    their positions in the document differ, counted from 1. These levels are the buckets of a
    Fenwick tree: level l has at most 2^(l - 1) tokens, and each level has its state. The last level
    has all tokens that are further away, so the state keeps its size in sequences of any length.

    Always causal. Time is O(T (C (H + Hv) + L H Hv)) for chunks of C tokens and L levels, and
    O(T L^2 H Hv / C) more for chunks that do not begin at a multiple of their size; memory is
    O(T (C + L H Hv / C)), the state L - 1 matrices H x Hv for each key head: with
    L = 1 + log2(T), O(log T). Derivatives in forward mode and of any order work.

    Args:
      query: `(*B, T, N, H)`, with any number of batch dimensions.
      key: `(*B, T, K, H)`, N a multiple of K: query head n reads key head n // (N // K).
      value: `(*B, T, K, Hv)`.
      log_decay: `(*B, T, K)`, 0 or less, checked if concrete.
      levels: `(*B, T, N, L)`, weights of the L levels, L at least 2.
      scale: multiplies the queries; default H**-0.5.
      **options: padding, packing, state, chunks and precision: see `effattn.options`.

    Returns:
      `(*B, T, N, Hv)` in the dtype of `value`; with `return_state`, `(out, LogLinearState)`, in the
      promoted dtype of query, key and value, at least float32.

    Raises:
      ValueError: a log decay above 0, fewer than 2 levels; and the errors of `effattn.options`.
    """
    given = recurrence.check(query, key, value, **options)
    checks.known_length("log_linear_attention", given.query)
    log_decay = recurrence.check_log_decay(log_decay, given.key.shape[:-1])
    count = levels.shape[-1] if levels.ndim else 0
    if count < 2:
        raise ValueError(
            f"levels must have the weights of 2 levels or more, (*B, T, N, L), got {levels.shape}"
        )
    levels = checks.shaped("levels", levels, (*given.query.shape[:-1], count))
    *batch, length, heads, size = given.key.shape
    shape = (*batch, heads, count - 1, size, given.value.shape[-1])
    state = by_head.check_state(LogLinearState, given.initial_state, (shape, shape[:-3]), given)
    multiplier = recurrence.check_scale(scale, given.query)
    # Levels that are empty after the last token are not computed.
    used = count if given.initial_state is not None else min(count, max(length, 1).bit_length() + 1)
    chunk = min(given.chunk or 64, max(length, 1))
    aligned = 0
    if chunk & (chunk - 1) == 0 and given.tokens.starts is None and given.initial_state is None:
        # The state after the last token is right if all tokens before it are present.
        is_padded = given.tokens.key_mask is not None
        whole = 0 if is_padded else length // chunk
        aligned = whole if given.return_state else -(-length // chunk)

    def of_head(queries, keys, marks, state, _):
        query, levels = queries
        key, value, log_decay = keys
        out, sums = fenwick_states.attend(
            aligned,
            given.precision,
            query,
            key,
            value,
            log_decay,
            levels[..., :used],
            marks,
            state.sums[: used - 1],
            state.position.astype(jnp.int32),
        )
        sums = jnp.concatenate([sums, state.sums[used - 1 :]])
        position = by_head.tokens_read(marks, state.position)
        return out, LogLinearState(sums, position)

    out, state = by_head.run(
        "log_linear_attention",
        chunk,
        of_head,
        given,
        (dtypes.product(clear(given.query, given.tokens.query_mask), multiplier), levels),
        (given.key, given.value, log_decay),
        state,
    )
    return recurrence.results(out, state, given)


registry.register(
    registry.Mechanism(
        name="log_linear",
        family="recurrent",
        paper="Guo et al. 2025, Log-Linear Attention",
        function=log_linear_attention,
        capabilities=frozenset({"causal"}),
        builder="effattn.nn.log_linear:LogLinearAttention",
        decoder="effattn.decode.log_linear:LogLinearDecoder",
        complexity="O(N log(N) H Hv)",
        time_exponent=1.0,
        knows_order=True,
    )
)
