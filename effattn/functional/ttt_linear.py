"""TTT-Linear: a linear model that learns on the tokens, by gradient descent in mini-batches."""

from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp

from effattn import registry
from effattn.arrays import checks
from effattn.arrays.axes import lead
from effattn.arrays.segments import valid
from effattn.cores import by_head, recurrence
from effattn.naive import over_tokens, with_naive
from effattn.options import Packing, Padding, Precision, State, declared
from effattn.xla import inner_descent

EPSILON = 1e-6  # of the layer norm of the inner model


class Options(Padding, Packing, State, Precision, total=False):
    """The shared options of `ttt_linear_attention`."""


class TTTState(NamedTuple):
    """State of `ttt_linear_attention`; zeros are the empty state.

    Attributes:
      now: `(*B, K, H + 1, Hv)`, change of the weights since the first token, and in the last row
        that of the bias.
      start: the same at the start of the mini-batch of the last token.
      position: `(*B, K)`, number of tokens read, a whole number in floating point.
    """

    now: jax.Array
    start: jax.Array
    position: jax.Array


def normalised(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    """Layer norm over the last axis."""
    x = x - x.mean(-1, keepdims=True)
    x *= jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + EPSILON)
    return x * lead(scale, x.ndim) + lead(bias, x.ndim)


def naive(
    state,
    query,
    key,
    value,
    *,
    learning_rate,
    initial_weights,
    initial_bias,
    norm_scale,
    norm_bias,
    mini_batch_size,
):
    """One token of one head: query and key `(H,)`, value and vectors `(Hv,)`, a rate."""
    initial = jnp.concatenate([initial_weights, initial_bias[None]])

    def model(change, x):
        return normalised(jnp.append(x, 1) @ (initial + change), norm_scale, norm_bias)

    def loss(change):
        return jnp.sum((model(change, key) - value) ** 2) / 2

    is_first = state.position.astype(int) % mini_batch_size == 0
    start = jnp.where(is_first, state.now, state.start)
    now = state.now - learning_rate * jax.grad(loss)(start)
    return TTTState(now, start, state.position + 1), model(now, query)


def _empty(key, value, **_):
    zeros = jnp.zeros((key.size + 1, value.size), value.dtype)
    return TTTState(zeros, zeros, value.dtype.type(0))


@with_naive(
    over_tokens(
        naive,
        per_token=("learning_rate",),
        per_head={"initial_weights": 2, "initial_bias": 1, "norm_scale": 1, "norm_bias": 1},
        empty=_empty,
    )
)
@declared
def ttt_linear_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    learning_rate: jax.Array,
    initial_weights: jax.Array,
    initial_bias: jax.Array,
    norm_scale: jax.Array,
    norm_bias: jax.Array,
    mini_batch_size: int = 16,
    **options: Unpack[Options],
) -> Any:
    r"""TTT-Linear (Sun et al. 2024, "Learning to (Learn at Test Time)").

    The state is a linear model with a layer norm, which learns to map each key to its value:

        f(x; W, b) = norm_scale * (z - mean(z)) / std(z) + norm_bias,    z = x W + b
        W_t = W_(t-1) - learning_rate_t d/dW |f(k_t; W', b') - v_t|^2 / 2,    and so b_t
        out_t = f(q_t; W_t, b_t)

    W' and b' are W and b before the mini-batch of the token. Mini-batches are `mini_batch_size`
    tokens long, counted from the start of the document. The gradients of a mini-batch are
    independent, and their sums are products of matrices (the dual form). W_0 and b_0 are
    `initial_weights` and `initial_bias`. The paper's model f also adds x: pass v - k as value, and
    add q to the output.

    Always causal. Time is O(T H Hv), in T / `mini_batch_size` steps, memory
    O(T H Hv / `mini_batch_size`). Derivatives in forward mode and of any order work.

    Args:
      query: `(*B, T, N, H)`, with any number of batch dimensions.
      key: `(*B, T, K, H)`, N a multiple of K: query head n reads key head n // (N // K).
      value: `(*B, T, K, Hv)`.
      learning_rate: `(*B, T, K)`, learning rate of each token.
      initial_weights: `(K, H, Hv)`.
      initial_bias: `(K, Hv)`.
      norm_scale: `(K, Hv)`.
      norm_bias: `(K, Hv)`.
      mini_batch_size: tokens in a mini-batch; it changes the result.
      **options: padding, packing, state and precision: see `effattn.options`.

    Returns:
      `(*B, T, N, Hv)` in the dtype of `value`; with `return_state`, `(out, TTTState)`, in the
      promoted dtype of query, key and value, at least float32.

    Raises:
      ValueError: wrong shapes, dtypes or options; and the errors of `effattn.options`.
    """
    given = recurrence.check(query, key, value, **options)
    checks.known_length("ttt_linear_attention", given.query)
    mini_batch = checks.at_least("mini_batch_size", mini_batch_size, 1, "tokens")
    learning_rate = checks.shaped("learning_rate", learning_rate, given.key.shape[:-1])
    *batch, length, heads, size = given.key.shape
    features = given.value.shape[-1]
    weights = checks.shaped("initial_weights", initial_weights, (heads, size, features))
    vectors = {"initial_bias": initial_bias, "norm_scale": norm_scale, "norm_bias": norm_bias}
    vectors = {name: checks.shaped(name, x, (heads, features)) for name, x in vectors.items()}
    of_heads = (*batch, heads)
    shape = (*of_heads, size + 1, features)
    state = by_head.check_state(TTTState, given.initial_state, (shape, shape, of_heads), given)
    chunk = min(mini_batch, max(length, 1))
    is_aligned = given.initial_state is None and given.tokens.starts is None

    def of_head(query, keys, marks, state, parameters):
        key, value, learning_rate = keys
        query, key = _with_one(query), _with_one(key)
        initial = jnp.concatenate([parameters["weights"], parameters["initial_bias"][None]])
        norm = parameters["norm_scale"], parameters["norm_bias"]

        def loss(predictions, values):
            return jnp.sum((normalised(predictions, *norm) - values) ** 2) / 2

        steps = inner_descent.Steps(query, key, value, learning_rate, None, None)
        out, memory = inner_descent.descend(
            jax.grad(loss),
            mini_batch,
            is_aligned,
            given.precision,
            steps,
            marks,
            initial,
            inner_descent.Memory(state.now, state.start, None),
            state.position.astype(jnp.int32),
        )
        position = by_head.tokens_read(marks, state.position)
        state = TTTState(memory.now, memory.start, position)
        return normalised(out, *norm), state

    out, state = by_head.run(
        "ttt_linear_attention",
        chunk,
        of_head,
        given,
        given.query,
        (given.key, given.value, learning_rate),
        state,
        {"weights": weights, **vectors},
    )
    if options.get("segment_ids") is not None and options.get("key_value_seq_lengths") is not None:
        # The recurrence gives zeros in documents without keys, whose model is the initial one.
        is_read: Any = given.tokens.query_mask
        lengths = checks.lengths("query_seq_lengths", options.get("query_seq_lengths"), given.batch)
        is_valid: Any = valid(lengths, jnp.asarray(options["segment_ids"]), length)
        is_alone = (is_valid & ~is_read)[..., None, None]
        query = jnp.where(is_alone, given.query, 0).astype(given.dtype)
        untrained = _untrained(query, given.precision, weights, vectors).astype(out.dtype)
        out = jnp.where(is_alone, untrained, out)
    return recurrence.results(out, state, given)


def _untrained(query, precision, weights, vectors):
    """Outputs `(*B, T, N, Hv)` of the initial model for queries `(*B, T, N, H)`."""
    groups = query.shape[-2] // max(len(weights), 1)

    def of_heads(x):
        return jnp.repeat(x, groups, 0).astype(query.dtype)

    def by_query(x):
        return lead(of_heads(x), query.ndim)

    heads = of_heads(weights)
    out = jnp.einsum("...nh,nhv->...nv", query, heads, precision=precision)
    out += by_query(vectors["initial_bias"])
    return normalised(out, by_query(vectors["norm_scale"]), by_query(vectors["norm_bias"]))


def _with_one(x):
    """Appends a feature of 1, which reads and writes the bias."""
    return jnp.concatenate([x, jnp.ones_like(x[..., :1])], -1)


registry.register(
    registry.Mechanism(
        name="ttt_linear",
        family="recurrent",
        paper="Sun et al. 2024, Learning to (Learn at Test Time): RNNs with Expressive Hidden "
        "States",
        function=ttt_linear_attention,
        capabilities=frozenset({"causal"}),
        builder="effattn.nn.ttt_linear:TTTLinear",
        decoder="effattn.decode.recurrent:RecurrentDecoder",
        complexity="O(N H Hv)",
        time_exponent=1.0,
        knows_order=True,
    )
)
