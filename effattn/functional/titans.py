"""Titans' neural memory: a linear memory, trained by gradient descent with momentum and decay."""

from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp

from effattn import registry
from effattn.arrays import checks
from effattn.cores import by_head, recurrence
from effattn.naive import over_tokens, with_naive
from effattn.options import Packing, Padding, Precision, State, declared
from effattn.xla import inner_descent


class Options(Padding, Packing, State, Precision, total=False):
    """The shared options of `titans_memory`."""


class TitansState(NamedTuple):
    """State of `titans_memory`; zeros are the empty state.

    Attributes:
      now: `(*B, K, H, Hv)`, the memory M.
      start: `(*B, K, H, Hv)`, the memory before the mini-batch of the last token.
      velocity: `(*B, K, H, Hv)`, the sum S of steps with momentum.
      position: `(*B, K)`, number of tokens read, a whole number in floating point.
    """

    now: jax.Array
    start: jax.Array
    velocity: jax.Array
    position: jax.Array


def naive(state, query, key, value, *, learning_rate, momentum, log_decay, mini_batch_size):
    """One token of one head: query and key `(H,)`, value `(Hv,)`, gates `()`."""
    is_first = state.position.astype(int) % mini_batch_size == 0
    start = jnp.where(is_first, state.now, state.start)
    gradient = jax.grad(lambda memory: jnp.sum((key @ memory - value) ** 2) / 2)(start)
    velocity = momentum * state.velocity - learning_rate * gradient
    now = jnp.exp(log_decay) * state.now + velocity
    return TitansState(now, start, velocity, state.position + 1), query @ now


def _empty(key, value, **_):
    zeros = jnp.zeros((key.size, value.size), value.dtype)
    return TitansState(zeros, zeros, zeros, value.dtype.type(0))


@with_naive(over_tokens(naive, per_token=("learning_rate", "momentum", "log_decay"), empty=_empty))
@declared
def titans_memory(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    learning_rate: jax.Array,
    momentum: jax.Array,
    log_decay: jax.Array,
    mini_batch_size: int = 16,
    **options: Unpack[Options],
) -> Any:
    r"""Neural memory (Behrouz et al. 2025, "Titans: Learning to Memorize at Test Time").

        S_t = momentum_t S_(t-1) - learning_rate_t k_t (M'^T k_t - v_t)^T
        M_t = exp(log_decay_t) M_(t-1) + S_t;    out_t = M_t^T q_t

    M' is the memory before the mini-batch of the token, and k_t (M'^T k_t - v_t)^T is the gradient
    of |M^T k_t - v_t|^2 / 2 at M'. Mini-batches are `mini_batch_size` tokens long, counted from the
    start of the document. The paper's forget gate alpha is 1 - exp(log_decay). This is the linear
    memory, a matrix that starts at zero; deep memories, and the paper's combinations with
    attention, are not covered. With mini-batches of one token, no momentum and no decay, this is
    the delta rule.

    Always causal. Time is O(T H Hv), in T / `mini_batch_size` steps, memory
    O(T H Hv / `mini_batch_size`). Derivatives in forward mode and of any order work.

    Args:
      query: `(*B, T, N, H)`, with any number of batch dimensions.
      key: `(*B, T, K, H)`, N a multiple of K: query head n reads key head n // (N // K). On
        equal keys the memory stays bounded if the sum of learning_rate * |k|^2 over a mini-batch
        stays below 2 (1 - momentum).
      value: `(*B, T, K, Hv)`.
      learning_rate: `(*B, T, K)`, learning rate of each token.
      momentum: `(*B, T, K)`, from 0 to 1, checked if concrete.
      log_decay: `(*B, T, K)`, 0 or less, checked if concrete.
      mini_batch_size: tokens in a mini-batch; it changes the result.
      **options: padding, packing, state and precision: see `effattn.options`.

    Returns:
      `(*B, T, N, Hv)` in the dtype of `value`; with `return_state`, `(out, TitansState)`, in the
      promoted dtype of query, key and value, at least float32.

    Raises:
      ValueError: a momentum outside of [0, 1], a log decay above 0; and the errors of
        `effattn.options`.
    """
    given = recurrence.check(query, key, value, **options)
    checks.known_length("titans_memory", given.query)
    mini_batch = checks.at_least("mini_batch_size", mini_batch_size, 1, "tokens")
    *batch, length, heads, size = given.key.shape
    of_tokens, of_heads = given.key.shape[:-1], (*batch, heads)
    learning_rate = checks.shaped("learning_rate", learning_rate, of_tokens)
    momentum = checks.shaped("momentum", momentum, of_tokens)
    checks.between("momentum", momentum, 0, 1)
    log_decay = recurrence.check_log_decay(log_decay, of_tokens)
    shape = (*of_heads, size, given.value.shape[-1])
    shapes = shape, shape, shape, of_heads
    state = by_head.check_state(TitansState, given.initial_state, shapes, given)
    chunk = min(mini_batch, max(length, 1))
    is_aligned = given.initial_state is None and given.tokens.starts is None

    def of_head(query, keys, marks, state, _):
        key, value, learning_rate, log_decay, momentum = keys
        steps = inner_descent.Steps(query, key, value, learning_rate, log_decay, momentum)
        out, (now, start, velocity) = inner_descent.descend(
            jnp.subtract,
            mini_batch,
            is_aligned,
            given.precision,
            steps,
            marks,
            None,
            inner_descent.Memory(state.now, state.start, state.velocity),
            state.position.astype(jnp.int32),
        )
        position = by_head.tokens_read(marks, state.position)
        return out, TitansState(now, start, velocity, position)

    keys = given.key, given.value, learning_rate, log_decay, momentum
    out, state = by_head.run("titans_memory", chunk, of_head, given, given.query, keys, state)
    return recurrence.results(out, state, given)


registry.register(
    registry.Mechanism(
        name="titans",
        family="recurrent",
        paper="Behrouz et al. 2025, Titans: Learning to Memorize at Test Time",
        function=titans_memory,
        capabilities=frozenset({"causal"}),
        builder="effattn.nn.titans:TitansMemory",
        decoder="effattn.decode.recurrent:RecurrentDecoder",
        complexity="O(N H Hv)",
        time_exponent=1.0,
        knows_order=True,
    )
)
