"""What all recurrent mechanisms share: the arguments that each takes, and the call of the core.

A mechanism says in one function, its *terms*, what it makes of queries and keys; see
`effattn.cores.linear_recurrence.Terms`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from effattn import dispatch
from effattn.arrays import checks, dtypes, mesh_axes
from effattn.arrays.segments import within
from effattn.cores.documents import packed, within_documents
from effattn.cores.linear_recurrence import MODULES, call, linear_recurrence
from effattn.interfaces.linear_recurrence import Config, Inputs, Terms, Tokens, own_chunk
from effattn.xla.diagonal_recurrence import diagonal_recurrence
from effattn.xla.linear_recurrence import linear_sum


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """The arguments that mechanisms share, as checked.

    Attributes:
      batch: the batch dimensions, `*B`.
      query, key, value: as given, as arrays.
      tokens: padding and, in causal calls, packed documents.
      precision: of the matrix products.
      chunk: tokens of one masked product; None for the core's own.
      dtype: of sums and states.
      documents: segment ids of queries and keys, of packed bidirectional calls; None elsewhere.
      initial_state: `(*B, V, F, D)`, with D + 1 in place of D if normalised; None is zero. Not
        checked yet.
      is_causal: direction.
      return_state: whether the caller asked for the state.
      implementation: what the caller asked for.
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
    """Of an always causal mechanism: as many queries as keys, of the same tokens.

    With `value_heads` there may be more value heads than key heads, if there are not more query
    heads.
    """
    query, key, value = (
        checks.as_array(name, x) for name, x in (("query", query), ("key", key), ("value", value))
    )
    of_key_heads = value
    if value_heads and min(query.ndim, key.ndim, value.ndim) > 2:
        heads, key_heads, values = query.shape[-2], key.shape[-2], value.shape[-2]
        if key_heads and values != key_heads:
            if values % key_heads or heads != key_heads:
                raise ValueError(
                    "the number of value heads must be that of key heads, or a multiple of it "
                    f"where there are as many query heads, got {heads} query heads, "
                    f"{key_heads} key heads and {values} value heads"
                )
            of_key_heads = value[..., :key_heads, :]
    batch = checks.query_key_value(query, key, of_key_heads)
    length = key.shape[-3]
    if query.shape[-3] != length:
        raise ValueError(
            f"a recurrence needs as many queries as keys, got {query.shape[-3]} and {length}; to "
            "continue a sequence pass only its new tokens, and as initial_state the state that "
            "return_state=True gave"
        )
    tokens = Tokens(
        _within(checks.lengths("query_seq_lengths", query_seq_lengths, batch), length),
        _within(checks.lengths("key_value_seq_lengths", key_value_seq_lengths, batch), length),
    )
    if checks.is_pair(segment_ids, (*batch, length)):
        raise ValueError(
            "segment_ids must be one array (*B, T) where attention is causal, got a pair: query t "
            "and key t are the same token"
        )
    ids = checks.segment_ids(segment_ids, batch, length, length)
    return Arguments(
        batch=batch,
        query=query,
        key=key,
        value=value,
        tokens=tokens if ids is None else packed(ids[1], tokens),
        precision=precision,
        chunk=check_chunk_size(chunk_size),
        dtype=sum_dtype(query, key, value),
        initial_state=initial_state,
        return_state=return_state,
        implementation=implementation,
    )


def sum_dtype(*arrays: jax.Array) -> Any:
    """The dtype of sums and states: promoted, and at least float32."""
    return dtypes.wide(*arrays)


def check_chunk_size(value: Any) -> int | None:
    """Tokens of one masked product; None for the core's own."""
    if value is None:
        return None
    if not checks.is_integer(value) or value < 1:
        raise ValueError(f"chunk_size must be None or an int, 1 or more tokens, got {value!r}")
    return int(value)


def check_log_decay(value: Any, shape: tuple[int, ...], name: str = "log_decay") -> jax.Array:
    """Logarithms of decays, 0 or less; their sign is looked at where they are concrete."""
    array = checks.as_array(name, value)
    if array.shape != shape or not jnp.issubdtype(array.dtype, jnp.floating):
        raise ValueError(
            f"{name} must be floating point of shape {shape}, got {array.dtype} of shape "
            f"{array.shape}"
        )
    # By NumPy: within a trace, JAX would trace what it is asked of known arrays.
    known = () if isinstance(array, jax.core.Tracer) else np.asarray(array)
    largest = np.max(known, initial=-np.inf)
    if largest > 0:
        raise ValueError(
            f"{name} holds logarithms of decays, 0 or less, got up to {largest:.4g}; "
            "of a decay in (0, 1] pass jnp.log, of a logit jax.nn.log_sigmoid"
        )
    return array


def check_scale(value: Any, query: jax.Array) -> jax.Array:
    """The multiplier of q . k, `()`; H**-0.5 for None."""
    scale = checks.as_array("scale", query.shape[-1] ** -0.5 if value is None else value)
    if scale.ndim or scale.dtype == bool or not jnp.isrealobj(scale):
        raise ValueError(f"scale must be a real number, got {scale.dtype} of shape {scale.shape}")
    if value is not None:
        checks.finite("scale", value)
    return scale


def _within(lengths: jax.Array | None, length: int) -> jax.Array | None:
    return None if lengths is None else within(lengths, length)


def run(
    name: str,
    terms: Callable[[Any, Any, Any], Terms],
    given: Arguments,
    queries: Any,
    keys: Any,
    parameters: Any = None,
    *,
    normalized: bool = False,
    attend: Callable[..., tuple[jax.Array, jax.Array]] = linear_recurrence,
) -> tuple[jax.Array, jax.Array]:
    """`(out, state)` of a mechanism.

    Args:
      name: of the mechanism's function.
      terms: what the mechanism makes of its tokens; the same object, or an equal one, each time.
      given: the shared arguments.
      queries: arrays `(*B, T, ...)` for `terms`; padded queries are cleared.
      keys: arrays `(*B, S, ...)` for `terms`; padded keys are cleared.
      parameters: arrays for `terms` that all tokens share.
      normalized: divide by the sum of the weights.
      attend: the form of the core.
    """
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
    *rows, _ = mesh_axes.spec(given.query if shapes.query.shape[-2] > value_heads else given.value)
    *examples, _, heads, _ = mesh_axes.spec(given.value)
    specs = PartitionSpec(*rows, None), PartitionSpec(*examples, heads, None, None)

    def core(*operands):
        # Chosen for the operands that the core gets: packing adds some of them on the way.
        with_kernels = attend not in _WITHOUT_KERNELS
        its_call = call(name, config, Inputs(*operands)) if with_kernels else _without_kernels(name)
        chosen = dispatch.choose(given.implementation, its_call)
        return attend(config._replace(implementations=chosen), *operands)

    def run(documents, *operands):
        if documents is None:
            return core(*operands)
        return within_documents(core, documents, *operands)

    operands = Inputs(parameters, state, queries, keys, given.tokens)
    with jax.named_scope(name):
        out, state = mesh_axes.placed(run, given.query, *specs)(given.documents, *operands)
    return checkpoint_name(out, name), state


def results(out: jax.Array, state: Any, given: Arguments) -> Any:
    """The output, with the state where the caller asked for it."""
    return (out, state) if given.return_state else out


# Forms that are not the linear recurrence: two matrix products, and a scan of entries.
_WITHOUT_KERNELS = linear_sum, diagonal_recurrence


def _without_kernels(name: str) -> dispatch.Call:

    def refusal(implementation):
        if implementation == "xla":
            return None
        return "takes causal and packed calls, of decays that states share by feature"

    return dispatch.Call(name, {each: functools.partial(refusal, each) for each in MODULES})
