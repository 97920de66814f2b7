"""Linear recurrence by kernels: the common part for all devices.

XLA computes the terms once for the whole sequence, in the dtype of the sums; kernels get these
arrays. A term that is an input of 16 bits, or for queries its product with a scalar, is not
computed: kernels read the input, which has half of the bytes, and convert it themselves. On TPUs,
XLA computes queries with a scalar.

Let S_t be the state, G_t its gradient from all reads at token t or later, and dy_t the gradient of
the output:

    y_t = S_t^T q_t    dq_t = S_t dy_t    dk_t = G_t v_t    dv_t = G_t^T k_t
    G_t = exp(w_(t+1)) G_(t+1) + q_t dy_t^T

The walk that computes states from keys and values therefore also computes gradients of states, in
reverse order, from queries and dy. A device with many processors computes all blocks in parallel,
from states that walks have saved at every `BLOCK` tokens (`by_blocks`). A device with one processor
does all of it in the walks.

Gradient of the log decays. A pair (token j writes, token i > j reads) decays at every token t with
j < t <= i, so the pair contributes to the gradient of each of these log decays. The same
contribution is part of q_i dq_i and of k_j dk_j. In the sum of q dq - k dk over the tokens from t
to the end of the block, only the pairs within the block that cross t remain. The sum over values of
S * G at the end of the block adds the pairs that are read in later blocks. Sums thus have as many
terms as a block has tokens, in float32; a sum over the whole sequence would lose small terms. The
pair of a query and its own token never decays and can be larger than all other pairs, so q dq and
k dk both leave out this pair.

The delta form is a plain recurrence of corrected values, see `recurrence_delta`.

With separate removed vectors (a_t in place of k_t), a token of the delta form is two tokens. The
first decays the state, recalls with b_t, and writes what it recalls, negative, to a_t. The second
writes v_t to k_t, without decay, and the query reads after it.

The first token of a document has a log decay of -inf. This is safe where kernels exponentiate
sums of log decays. The kernels for Hopper subtract running sums, and so raise log decays to at
least -128 first (`mosaic_gpu.recurrence_plan`).

Shapes: batch B; tokens T; N query, K key and V value heads; `max(N, V)` heads of the output; F
features; D values, including the additional value of a normalised recurrence; n blocks of `BLOCK`
tokens.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from effattn.arrays.scaled_inputs import scaled_inputs
from effattn.interfaces.linear_recurrence import (
    Config,
    Inputs,
    append_one,
    clear,
    divided,
    masked_terms,
)
from effattn.pallas import partition

BLOCK = 64  # tokens from one saved state to the next
LARGEST = 256  # largest number of features, and of values


class Arrays(NamedTuple):
    """Operands of the recurrence, in float32 if the dtype is not named.

    Attributes:
      query: `(B, T, N, F)`, float32 or 16 bits.
      key: `(B, T, K, F)`, float32 or 16 bits.
      value: `(B, T, V, D)`, float32 or 16 bits.
      log_decay: `(B, T, V)`, or `(B, T, K, F)` if V = K, float32 or 16 bits; None without decay.
      scale: `(1,)`, factor of the queries; None for 1.
      recalled: `(B, T, K, F)`, float32, in the delta form: the keys b that read the state.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    log_decay: jax.Array | None
    scale: jax.Array | None = None
    recalled: jax.Array | None = None

    @property
    def heads(self) -> int:
        """Number of heads of the output."""
        return max(self.query.shape[2], self.value.shape[2])

    def widened(self) -> "Arrays":
        """The same operands in float32, with the queries times the scale."""
        wide = jax.tree.map(lambda x: x.astype(jnp.float32), self)
        query = wide.query if self.scale is None else wide.query * self.scale
        return wide._replace(query=query, scale=None)


class How(NamedTuple):
    """Execution options.

    Attributes:
      precision: precision of products.
      interpreted: whether, or how, kernels are interpreted.
      dtype: dtype of the output; gradients have this dtype or a wider one.
    """

    precision: lax.Precision
    interpreted: Any
    dtype: Any = jnp.float32

    def dot(self, left: jax.Array, right: jax.Array) -> jax.Array:
        """Returns the product, computed by XLA with the precision of the kernels."""
        return jnp.matmul(left, right, precision=self.precision)


class Gradients(NamedTuple):
    """Gradients of the recurrence.

    Attributes:
      query: `(B, T, heads, F)`, of the queries with their scale.
      key: `(B, T, V, F)`.
      value: `(B, T, V, D)`.
      log_decay: `(B, T, V)`, or `(B, T, V, F)`; None without decay.
      state: of the state before the first token, `(B, V, F, D)`.
      recalled: `(B, T, V, F)`, in the delta form.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    log_decay: jax.Array | None
    state: jax.Array
    recalled: jax.Array | None = None


class Kernels(NamedTuple):
    """Kernels of one device. The first argument of each function is `How`; it is not listed here.

    `d_out` has float32 or 16 bits.

    Attributes:
      forward: `(arrays, state (B, V, F, D)) ->` the output `(B, T, heads, D)` in the dtype of
        `How`, and the state after the last token.
      backward: `(arrays, state, d_out (B, T, heads, D), d_state) -> Gradients`.
    """

    forward: Callable[..., tuple[jax.Array, jax.Array]]
    backward: Callable[..., Gradients]


def by_blocks(
    states: Callable[..., jax.Array],
    gradients_of_states: Callable[..., jax.Array],
    read: Callable[..., jax.Array],
    d_query: Callable[..., jax.Array],
    d_key: Callable[..., jax.Array],
    d_value: Callable[..., jax.Array],
) -> Kernels:
    """Kernels of the plain form, by walks and by kernels for all blocks at once.

    The first argument of each function is `How`; it is not listed.

    Args:
      states: `(arrays, state) ->` the states before each block and after the last block,
        `(B, V, n + 1, F', D')`.
      gradients_of_states: `(arrays, d_out, d_state) ->` the gradients of these states.
      read: `(arrays, states) ->` the output.
      d_query: as in `gradients_of_blocks`.
      d_key: likewise.
      d_value: `(arrays, gradients of states, d_out) -> (B, T, V, D)`, the gradient of the values.
    """
    gradients = gradients_of_blocks(d_query, d_key)

    def forward(how, arrays, state):
        found = states(how, arrays, state)
        return read(how, arrays, found), whole_state(arrays, found[:, :, -1])

    def backward(how, arrays, state, d_out, d_state):
        found = states(how, arrays, state)
        co_states = gradients_of_states(how, arrays, d_out, d_state)
        value = d_value(how, arrays, co_states, d_out)
        query, key, log_decay = gradients(how, arrays, found, co_states, d_out)
        return Gradients(query, key, value, log_decay, whole_state(arrays, co_states[:, :, 0]))

    return Kernels(forward, backward)


def whole_state(arrays: Arrays, state: jax.Array) -> jax.Array:
    """Slices a state `(B, V, F', D')` to `(B, V, F, D)`."""
    return state[..., : arrays.key.shape[-1], : arrays.value.shape[-1]]


def gradients_of_blocks(
    d_query: Callable[..., jax.Array], d_key: Callable[..., jax.Array]
) -> Callable[..., tuple[jax.Array, jax.Array, jax.Array | None]]:
    """Gradients of queries, keys and log decays, by a kernel for queries and one for keys.

    Returns a function of `(arrays, states, gradients of states, d_out)`. States are those before
    each block and after the last block, `(B, V, n + 1, F', D')`. The first argument of each
    function is `How`; it is not listed.

    Args:
      d_query: `(arrays, states, d_out) -> (B, T, heads, F)`, the gradient of the queries. With
        decays, the part from each query's own token is left out.
      d_key: `(arrays, gradients of states, d_out) -> (B, T, V, F)`, the gradient of the keys. With
        decays, the part from the query of the same token is left out.
    """

    def gradients(how, arrays, states, co_states, d_out):
        of_query = d_query(how, arrays, states, d_out)
        of_key = d_key(how, arrays, co_states, d_out)
        if arrays.log_decay is None:
            return of_query, of_key, None
        wide = arrays.widened()
        d_log_decay = _d_log_decay(wide, states, co_states, of_query, of_key)
        own_query, own_key = _own(wide, d_out.astype(of_query.dtype))
        return of_query + own_query, of_key + own_key, d_log_decay

    return gradients


class _Summed(NamedTuple):
    """Terms of the recurrence in the form that kernels read.

    Attributes:
      arrays: operands of the recurrence.
      own: `(B, T, heads, D)`, with a bonus: the part of the output from each query's own token.
      least: `(*B, T, V)`, least normalisers (see `effattn.interfaces.linear_recurrence.Terms`).
    """

    arrays: Arrays
    own: jax.Array | None = None
    least: jax.Array | None = None

    def is_output(self, config: Config) -> bool:
        """Returns whether what the kernels read is the output, apart from its mask."""
        return self.own is None and not config.normalized


def refusal(config: Config, x: Inputs) -> str | None:
    """Returns the reason why no kernel can take these operands, or None."""
    terms = jax.eval_shape(config.terms, x.parameters, x.queries, x.keys)
    dtypes = {array.dtype for array in jax.tree.leaves((x.queries, x.keys))}
    features, values = x.state.shape[-2:]
    if terms.value_log_decay is not None:
        return "takes decays of heads and of features, not of values"
    if terms.recalled is not None and terms.bonus is not None:
        return "takes the delta form without a bonus"
    if x.state.dtype != jnp.float32:
        return f"takes float32, bfloat16 and float16, got {_widest(dtypes)}"
    if max(features, values) > LARGEST:
        return (
            f"takes up to {LARGEST} features and {LARGEST} values (the normaliser is one), got "
            f"{features} and {values}"
        )
    if 0 in (*x.state.shape, *terms.query.shape):
        return f"takes at least one token, got queries of shape {terms.query.shape}"
    return _refused_precision(config.precision)


def _widest(dtypes):
    return max(dtypes, key=lambda dtype: dtype.itemsize)


def _refused_precision(precision):
    """Returns the reason why kernels, which have only `lax.Precision`, cannot use `precision`."""
    try:
        for one in _each(precision):
            lax.Precision(one)
    except ValueError:
        return f"takes a precision of jax.lax.Precision, got {precision!r}"
    return None


def precision_of(config: Config, x: Inputs) -> lax.Precision:
    """Returns the precision of the products in the kernels.

    Float32 queries or outputs need full float32 products, as the default precision would round
    them. For 16-bit queries and outputs the default is enough: TensorFloat-32, or passes of
    bfloat16, keep all bits of a 16-bit number.
    """
    dtypes = [array.dtype for array in jax.tree.leaves(x.queries)]
    wide = any(jnp.dtype(dtype).itemsize > 2 for dtype in (config.dtype, *dtypes))
    asked = {lax.Precision(one) for one in _each(config.precision)}
    return lax.Precision.HIGHEST if wide else max(asked, key=lambda one: one.value)


def _each(precision):
    return precision if isinstance(precision, tuple) else (precision,)


def forward(kernels: Kernels, config: Config, x: Inputs):
    """Returns `((output, state), None)`; no residuals, as the backward recomputes the states."""
    kernels = partition.recurrence(kernels)
    how = How(precision_of(config, x), config.implementations.interpreted)
    summed = _summed(config, x, x.parameters, x.queries, x.keys)
    if summed.is_output(config):
        how = how._replace(dtype=config.dtype)
    arrays = _narrow(config, x, summed)
    read, state = kernels.forward(how, arrays, _one_batch(x.state, 3))
    output = _output(config, x, read, summed.own, summed.least)
    return (output, _like_state(x, state)), None


def backward(
    kernels: Kernels,
    config: Config,
    x: Inputs,
    saved: None,
    d_output: jax.Array,
    d_state: jax.Array,
) -> Inputs:
    """Returns the gradients of all inputs except `tokens`."""
    kernels = partition.recurrence(kernels)
    how = How(precision_of(config, x), config.implementations.interpreted)

    sums = functools.partial(_summed, config, x)
    summed, to_arguments = jax.vjp(sums, x.parameters, x.queries, x.keys)
    arrays, read = _narrow(config, x, summed), None
    state = _one_batch(x.state, 3)
    if summed.is_output(config):  # no terms are added to the gradients here
        how = how._replace(dtype=config.dtype)
    if config.normalized:
        read, _ = kernels.forward(how, arrays, state)
    if summed.is_output(config):
        d_read = _masked(x, d_output)
        if _has_two_writes(config, x):
            d_read = _alternating(jnp.zeros_like(d_read), d_read)
        d_own = d_least = None
    else:
        if read is None:  # the gradient does not depend on the value of `read`
            shape = (*arrays.query.shape[:2], arrays.heads, x.state.shape[-1])
            read = jnp.zeros(shape, x.state.dtype)
        _, to_read = jax.vjp(functools.partial(_output, config, x), read, summed.own, summed.least)
        d_read, d_own, d_least = to_read(d_output)
    found = kernels.backward(how, arrays, state, d_read, _one_batch(d_state, 3))
    of_terms = {
        name: _over_shares(getattr(found, name), array)
        for name in ("query", "key", "recalled")
        if (array := getattr(arrays, name)) is not None
    }
    d_arrays = Arrays(**of_terms, value=found.value, log_decay=found.log_decay)
    d_parameters, d_queries, d_keys = to_arguments(_Summed(d_arrays, d_own, d_least))
    return Inputs(
        parameters=d_parameters,
        state=_like_state(x, found.state),
        queries=d_queries,
        keys=d_keys,
        tokens=None,
    )


def _narrow(config, x, summed) -> Arrays:
    """Replaces terms by the 16-bit inputs that they are, or for queries by input and scale."""
    if _has_two_writes(config, x):
        return summed.arrays
    queries, keys = clear(x.queries, x.tokens.query_mask), clear(x.keys, x.tokens.key_mask)
    given = x.parameters, queries, keys
    like = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, x.state.dtype), given)
    found, inputs = scaled_inputs(config.terms, *like), jax.tree.leaves(given)
    parameters, replaced = len(jax.tree.leaves(x.parameters)), {}
    for name in ("query", "key", "value", "log_decay"):
        term = getattr(found, name)
        if term is None or term.argument < parameters:
            continue
        array = inputs[term.argument]
        if array.dtype.itemsize > 2 or (term.factor is not None and name != "query"):
            continue
        if term.factor is not None:
            replaced["scale"] = inputs[term.factor].astype(x.state.dtype).reshape(1)
        if name == "value" and config.normalized:
            array = append_one(array)
        if name == "log_decay":
            array = _forgotten(array, x.tokens.starts)
        array = _one_batch(array, array.ndim - x.state.ndim + 3)
        shifted = summed.own is not None
        replaced[name] = _shifted(name, array, x.tokens.starts) if shifted else array
    return summed.arrays._replace(**replaced)


def _forgotten(log_decay, starts):
    """Sets the log decays at the starts of documents to -inf."""
    if starts is None:
        return log_decay
    of_heads = starts.reshape(*starts.shape, *(1,) * (log_decay.ndim - starts.ndim))
    return jnp.where(of_heads, -jnp.inf, log_decay)


def _summed(config, x, parameters, queries, keys) -> _Summed:
    """Returns the terms, with a log decay of -inf at the first token of a document.

    The first token of a document recalls nothing in the delta form. With a bonus, `own` holds the
    part of the output from each query's own token. A query with a bonus reads the state before its
    token, but kernels read the state after a token. So keys, values and decays get one more token
    of zeros at the start, and queries one more token of zeros at the end.
    """
    terms = masked_terms(config, parameters, queries, keys, x.tokens, x.state.dtype)
    log_decay, starts = terms.log_decay, x.tokens.starts
    if starts is not None:
        if log_decay is None:
            log_decay = jnp.zeros(terms.value.shape[:-1], x.state.dtype)
        log_decay = _forgotten(log_decay, starts)
    if log_decay is not None:
        log_decay = _one_batch(log_decay, log_decay.ndim - terms.key.ndim + 3)
    query, key, value = (_one_batch(x, 3) for x in (terms.query, terms.key, terms.value))
    if terms.recalled is not None:
        kept = None if starts is None else ~starts
        recalled = _one_batch(clear(terms.recalled, kept), 3)
        arrays = Arrays(query, key, value, log_decay, recalled=recalled)
        if terms.removed is not None:
            arrays = _two_writes(arrays, _one_batch(terms.removed, 3))
        return _Summed(arrays, least=terms.least)
    if terms.bonus is None:
        return _Summed(Arrays(query, key, value, log_decay), least=terms.least)
    heads, (batch, length, key_heads, features) = query.shape[2], key.shape
    by_key = query.reshape(batch, length, key_heads, -1, features)
    weights = jnp.sum(by_key * (terms.bonus * key)[:, :, :, None], -1).reshape(*query.shape[:-1])
    outputs = max(heads, value.shape[2])
    own = _repeated(weights, outputs)[..., None] * _repeated(value, outputs)
    query, key, value = (
        _shifted(name, array, starts)
        for name, array in (("query", query), ("key", key), ("value", value))
    )
    log_decay = None if log_decay is None else _shifted("log_decay", log_decay, starts)
    return _Summed(Arrays(query, key, value, log_decay), own, least=terms.least)


def _has_two_writes(config, x):
    """Returns whether a token writes to its key and to a removed vector."""
    return jax.eval_shape(config.terms, x.parameters, x.queries, x.keys).removed is not None


def _two_writes(arrays, removed) -> Arrays:
    """Returns arrays of 2 T tokens, see the docstring of this file."""
    query, key, value, log_decay, _, recalled = arrays
    later = None if log_decay is None else _alternating(log_decay, jnp.zeros_like(log_decay))
    return Arrays(
        _alternating(jnp.zeros_like(query), query),
        _alternating(removed, key),
        _alternating(jnp.zeros_like(value), value),
        later,
        recalled=_alternating(recalled, jnp.zeros_like(recalled)),
    )


def _alternating(first, second):
    """Tokens of two arrays `(B, T, ...)` in turn, `(B, 2 T, ...)`."""
    both = jnp.stack([first, second], 2)
    return both.reshape(first.shape[0], -1, *first.shape[2:])


def _shifted(name, array, starts):
    """One more token of zeros in a field of `Arrays`: queries read the state before their token.

    The first query of a document reads nothing.
    """
    if name == "query" and starts is not None:
        array = jnp.where(_one_batch(starts, 1)[..., None, None], 0, array)
    more = (0, 1) if name == "query" else (1, 0)
    return jnp.pad(array, [(0, 0), more, *[(0, 0)] * (array.ndim - 2)])


def _repeated(x, heads):
    """Repeats the heads of `(B, T, V, ...)` so that there are `heads`."""
    return jnp.repeat(x, heads // x.shape[2], 2)


def _one_batch(x, kept):
    """Reshapes `(*B, ...)`, with `kept` axes after the batch, to `(B, ...)`."""
    return x.reshape(-1, *x.shape[x.ndim - kept :])


def _like_state(x, state):
    """Slices and reshapes `(B, V, F', D')` to `(*B, V, F, D)`."""
    features, values = x.state.shape[-2:]
    return state[..., :features, :values].reshape(x.state.shape)


def _output(config, x, read, own, least):
    """Returns the output `(*B, T, heads, D)` in its dtype, from `read` `(B, T, heads, D)`."""
    if own is not None:
        read = read[:, :-1] + own
    if _has_two_writes(config, x):
        read = read[:, 1::2]
    output = read.reshape(*x.state.shape[:-3], *read.shape[1:])
    output = divided(config, output, least)
    return clear(output, x.tokens.query_mask).astype(config.dtype)


def _masked(x, d_output):
    """Returns `(B, T, heads, D)`, zero for masked queries."""
    return _one_batch(clear(d_output, x.tokens.query_mask), 3)


def _over_shares(gradient, like):
    """Sums `(B, T, heads, F)` over the heads that share one head of `like`."""
    return gradient.reshape(*like.shape[:3], -1, like.shape[3]).sum(3)


def _own(arrays, d_read):
    """Gradients of queries and keys from the pairs of a query and its own token.

    Shapes: `(B, T, heads, F)` of queries and `(B, T, V, F)` of keys.
    """
    heads = arrays.heads
    query, key, value = (_repeated(x, heads) for x in arrays[:3])
    weight = jnp.sum(d_read * value, -1, keepdims=True)
    of_key = weight * query
    return weight * key, of_key.reshape(*arrays.value.shape[:3], -1, query.shape[-1]).sum(3)


def _d_log_decay(arrays, states, co_states, d_query, d_key):
    """Gradient of the log decays, see the docstring of this file; zero where it is -inf."""
    batch, length, heads, _ = arrays.value.shape
    by_feature = arrays.log_decay.ndim == 4

    def products(array, gradient):
        product = array[:, :, :, None] * gradient.reshape(*array.shape[:3], -1, array.shape[3])
        return product.reshape(batch, length, heads, -1, array.shape[3]).sum(3)

    crossing = products(arrays.query, d_query) - products(arrays.key, d_key)
    at_end = jnp.sum(states[:, :, 1:] * co_states[:, :, 1:], -1)  # (B, V, n, F')
    at_end = at_end[..., : arrays.key.shape[-1]]
    if not by_feature:
        crossing, at_end = crossing.sum(-1, keepdims=True), at_end.sum(-1, keepdims=True)
    blocks, size = at_end.shape[2], crossing.shape[-1]
    crossing = jnp.pad(crossing, ((0, 0), (0, blocks * BLOCK - length), (0, 0), (0, 0)))
    crossing = crossing.reshape(batch, blocks, BLOCK, heads, size)
    later = lax.cumsum(crossing, axis=2, reverse=True) + jnp.moveaxis(at_end, 1, 2)[:, :, None]
    gradient = later.reshape(batch, blocks * BLOCK, heads, size)[:, :length]
    gradient = gradient if by_feature else gradient[..., 0]
    return jnp.where(jnp.isneginf(arrays.log_decay), 0, gradient)


def over_group(group: int, x: jax.Array, axis: int) -> jax.Array:
    """Sums over the `group` heads of the output that read one value head; `axis` has the heads."""
    if group == 1:
        return x
    return x.reshape(*x.shape[:axis], -1, group, *x.shape[axis + 1 :]).sum(axis + 1)
