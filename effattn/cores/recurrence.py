"""Shared arguments and call path of recurrent mechanisms.

Each mechanism defines one function, its *terms*, that maps its inputs to the queries, keys, values
and decays of the linear recurrence; see `effattn.interfaces.linear_recurrence.Terms`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from effattn import dispatch
from effattn.arrays import checks, dtypes, mesh_axes
from effattn.arrays.segments import valid
from effattn.cores import diagonal_recurrence as diagonal
from effattn.cores import passed_states, sequence_parts
from effattn.cores.documents import packed, within_documents
from effattn.cores.linear_recurrence import IMPLEMENTATIONS, call, linear_recurrence
from effattn.dispatch.partition import places_of
from effattn.interfaces.linear_recurrence import Config, Inputs, Terms, Tokens, own_chunk
from effattn.xla.linear_sum import linear_sum


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Checked arguments that all recurrent mechanisms share.

    Attributes:
      batch: the batch dimensions, `*B`.
      query, key, value: the inputs as arrays.
      tokens: padding masks and, in causal calls, starts of packed documents.
      precision: precision of the matrix products.
      chunk: tokens in a chunk; None for the default of the core.
      dtype: dtype of sums and states.
      documents: segment ids of queries and keys in packed bidirectional calls; None elsewhere.
      initial_state: `(*B, V, F, D)`, with D + 1 in place of D if normalised; None is zero. `run`
        checks its shape.
      is_causal: whether attention is causal.
      return_state: whether the caller asked for the state.
      implementation: the caller's argument `implementation`.
    """

    batch: tuple[int, ...]
    query: jax.Array
    key: jax.Array
    value: jax.Array
    tokens: Tokens
    precision: Any
    chunk: int | None
    dtype: Any
    documents: tuple[jax.Array, jax.Array] | None = None
    initial_state: Any = None
    is_causal: bool = True
    return_state: bool = False
    implementation: Any = None


def check(
    query: Any,
    key: Any,
    value: Any,
    *,
    is_causal: bool = True,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    segment_ids: Any = None,
    precision: Any = None,
    chunk_size: Any = None,
    initial_state: Any = None,
    return_state: bool = False,
    implementation: Any = None,
    value_heads: bool = False,
) -> Arguments:
    """Checks the shared arguments (see `effattn.options.Recurrent` and `FeatureMapped`).

    With `value_heads`, the number of value heads may be a multiple of the number of key heads, if
    there are as many query heads as key heads.

    Raises:
      ValueError: an argument is invalid, or two arguments exclude each other.
    """
    query, key, value = (
        checks.as_array(name, x) for name, x in (("query", query), ("key", key), ("value", value))
    )
    of_key_heads = _values_of_key_heads(query, key, value) if value_heads else value
    batch = checks.query_key_value(query, key, of_key_heads)
    queries, keys = query.shape[-3], key.shape[-3]
    if is_causal and queries != keys:
        raise ValueError(
            f"a causal call needs as many queries as keys, got {queries} and {keys}; to continue a "
            "sequence, pass only its new tokens, and as initial_state the state that "
            "return_state=True gave"
        )
    if is_causal:
        reason = "each token of a causal call is both query and key"
        checks.one_segment_array(segment_ids, (*batch, keys), reason)
    if not is_causal and segment_ids is not None and (initial_state is not None or return_state):
        raise ValueError(
            "initial_state and return_state with segment_ids need is_causal=True, got False, "
            "because a bidirectional call has one state for each document; pass one document a "
            "row, padded by key_value_seq_lengths"
        )
    ids = checks.segment_ids(segment_ids, batch, queries, keys)
    documents = None if is_causal else ids
    query_ids, key_ids = documents or (None, None)
    query_lengths = checks.lengths("query_seq_lengths", query_seq_lengths, batch)
    key_lengths = checks.lengths("key_value_seq_lengths", key_value_seq_lengths, batch)
    tokens = Tokens(valid(query_lengths, query_ids, queries), valid(key_lengths, key_ids, keys))
    return Arguments(
        batch=batch,
        query=query,
        key=key,
        value=value,
        tokens=_packed(ids[1], tokens) if is_causal and ids is not None else tokens,
        precision=precision,
        chunk=check_chunk_size(chunk_size),
        dtype=sum_dtype(query, key, value),
        documents=documents,
        initial_state=initial_state,
        is_causal=is_causal,
        return_state=return_state,
        implementation=implementation,
    )


def _packed(segment_ids, tokens):
    return packed(segment_ids, tokens, passed_states.earlier_document(segment_ids, tokens.key_mask))


def _values_of_key_heads(query, key, value):
    """The values, cut to as many heads as the keys have, for the shared checks of shapes."""
    if min(query.ndim, key.ndim, value.ndim) < 3:
        return value
    heads, key_heads, values = query.shape[-2], key.shape[-2], value.shape[-2]
    if not key_heads or values == key_heads:
        return value
    if values % key_heads or heads != key_heads:
        raise ValueError(
            "the number of value heads must equal the number of key heads, or be a multiple of it "
            f"with as many query heads as key heads, got {heads} query heads, {key_heads} key "
            f"heads and {values} value heads"
        )
    return value[..., :key_heads, :]


def sum_dtype(*arrays: jax.Array) -> Any:
    """The dtype of sums and states: the promoted dtype, at least float32."""
    return dtypes.wide(*arrays)


def check_chunk_size(value: Any) -> int | None:
    """Checks the number of tokens in a chunk; None is the default of the core."""
    if value is None:
        return None
    if not checks.is_integer(value) or value < 1:
        raise ValueError(f"chunk_size must be None or an int, 1 or more tokens, got {value!r}")
    return int(value)


def check_log_decay(value: Any, shape: tuple[int, ...], name: str = "log_decay") -> jax.Array:
    """Checks log decays of that shape; concrete values above 0 raise `ValueError`."""
    array = checks.shaped(name, value, shape)
    # NumPy, because within a trace JAX would trace this even for a concrete array.
    known = () if isinstance(array, jax.core.Tracer) else np.asarray(array)
    largest = np.max(known, initial=-np.inf)
    if largest > 0:
        raise ValueError(
            f"{name} must be 0 or less, the logarithm of a decay, got up to {largest:.4g}; for a "
            "decay in (0, 1] pass jnp.log of it, for a logit jax.nn.log_sigmoid of it"
        )
    return array


def check_scale(value: Any, query: jax.Array) -> jax.Array:
    """Checks the factor of q . k, a real `()`; None is H**-0.5."""
    scale = checks.as_array("scale", query.shape[-1] ** -0.5 if value is None else value)
    if scale.ndim or scale.dtype == bool or not jnp.isrealobj(scale):
        raise ValueError(
            f"scale must be a number or an array of shape (), got {scale.dtype} of shape "
            f"{scale.shape}"
        )
    if value is not None:
        checks.finite("scale", value)
    # Integers have no gradient, and parameters of the core do.
    is_float = jnp.issubdtype(scale.dtype, jnp.floating)
    return scale if is_float else scale.astype(sum_dtype(query))


@dataclasses.dataclass(frozen=True)
class Bound:
    """A function with its first arguments: like `functools.partial`, but equal to its copies."""

    function: Callable[..., Any]
    first: tuple[Any, ...]

    def __call__(self, *arguments: Any) -> Any:
        """Calls the function with the first arguments and `arguments`."""
        return self.function(*self.first, *arguments)


def run(
    name: str,
    terms: Callable[[Any, Any, Any], Terms],
    given: Arguments,
    queries: Any,
    keys: Any,
    parameters: Any = None,
    *,
    normalized: bool = False,
    attend: Callable[..., tuple[jax.Array, jax.Array]] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Runs a mechanism: the output and the state after the last token.

    Args:
      name: name of the mechanism's function, for messages and profiles.
      terms: `(parameters, queries, keys) -> Terms`. Pass an equal, hashable object in every call:
        a new function compiles anew.
      given: the shared arguments.
      queries: pytree of arrays `(*B, T, ...)` for `terms`; padded queries are set to zero.
      keys: pytree of arrays `(*B, S, ...)` for `terms`; padded keys are set to zero.
      parameters: arrays for `terms` that do not depend on the token.
      normalized: divide the output by the sum of the weights.
      attend: the core. Default: `linear_sum` for bidirectional calls without documents, and
        `linear_recurrence` for other calls.
    """
    if not given.is_causal:
        sequence_parts.refuse(f"{name} without is_causal=True")
    if attend is None:
        in_order = given.is_causal or given.documents is not None
        attend = linear_recurrence if in_order else linear_sum
    shapes = jax.eval_shape(terms, parameters, queries, keys)
    config = Config(
        terms=terms,
        dtype=given.value.dtype,
        normalized=normalized,
        precision=given.precision,
        chunk=own_chunk(shapes) if given.chunk is None else given.chunk,
    )
    initial_state = given.initial_state
    value_heads, value_size = shapes.value.shape[-2:]
    shape = (*given.batch, value_heads, shapes.key.shape[-1], value_size + normalized)
    if initial_state is None:
        state = jnp.zeros(shape, given.dtype)
    elif isinstance(initial_state, tuple):
        raise ValueError(
            f"initial_state must be an array of shape {shape}, as an earlier {name} with the same "
            f"options returned it, got {type(initial_state).__name__}"
        )
    else:
        state = checks.shaped("initial_state", initial_state, shape).astype(given.dtype)
    finest = given.query if shapes.query.shape[-2] > value_heads else given.value
    places = places_of(finest)
    *axes, _ = mesh_axes.spec(finest)
    *examples, _, heads, _ = mesh_axes.spec(given.value)
    specs = PartitionSpec(*axes, None), PartitionSpec(*examples, heads, None, None)

    def core_of(config):
        def core(*operands):
            # The implementation is chosen here because `within_documents` changes the operands.
            its_call = _CALLS[attend](name, config, Inputs(*operands))
            chosen = dispatch.choose(given.implementation, its_call, places)
            return attend(config._replace(implementations=chosen), *operands)

        return core

    def run(documents, *operands):
        if documents is not None:
            return within_documents(core_of(config), documents, *operands)
        x = Inputs(*operands)
        total_decay = diagonal.diagonal_decay if attend is diagonal.diagonal_recurrence else None
        state, after = passed_states.before(name, core_of, config, x, total_decay)
        out, state = core_of(config)(*x._replace(state=state))
        return out, state if after is None else after

    operands = Inputs(parameters, state, queries, keys, given.tokens)
    with jax.named_scope(name):
        out, state = mesh_axes.placed(run, given.query, *specs)(given.documents, *operands)
    return checkpoint_name(out, name), state


def results(out: jax.Array, state: Any, given: Arguments) -> Any:
    """The output, or `(output, state)` with `return_state`."""
    return (out, state) if given.return_state else out


def _call_in_xla(name, config, x):
    reason = "takes causal or packed calls, got a bidirectional call without segment_ids"
    return IMPLEMENTATIONS.call_in_xla(name, reason)


# Description of a call of each core.
_CALLS: dict[Any, Callable[..., dispatch.Call]] = {
    linear_recurrence: call,
    linear_sum: _call_in_xla,
    diagonal.diagonal_recurrence: diagonal.call,
}
