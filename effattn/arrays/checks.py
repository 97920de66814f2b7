"""Shared argument checks, at trace time. An invalid argument raises `ValueError`."""

import difflib
import functools
import inspect
import math
import numbers
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from effattn.arrays import mesh_axes

# Positions are int32. Counts and sides of windows are limited to 2**30, and offsets to 2**29. Their
# sums then do not overflow, and a window of 2**30 tokens reaches every key.
_FAR = 2**30
_MOST = 2**31 - 1


Function = TypeVar("Function", bound=Callable[..., Any])


def checked(function: Function) -> Function:
    """Decorator: checks arguments by their annotations.

    Arguments annotated `bool` must be True or False. Arguments annotated `jax.Array` are converted
    to arrays. None is accepted if the annotation contains None. An unknown keyword argument is a
    `TypeError`.
    """
    parameters = inspect.signature(function).parameters
    rules = {
        name: _RULES[parameter.annotation]
        for name, parameter in parameters.items()
        if parameter.annotation in _RULES and name not in _OTHERWISE
    }
    names = positional(function)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    @functools.wraps(function)
    def call(*args, **kwargs):
        if not takes_any and (unknown := kwargs.keys() - parameters.keys()):
            name = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]
            wrong = min(unknown)
            raise TypeError(
                f"{name}() got an unexpected keyword argument {wrong!r}; "
                f"{suggestion(wrong, [each for each in parameters if each != 'self'])}"
            )
        known = zip(names, args, strict=False)
        first = [rules[n](n, x) if n in rules else x for n, x in known]
        named = {n: rules[n](n, x) if n in rules else x for n, x in kwargs.items()}
        return function(*first, *args[len(first) :], **named)

    return call  # type: ignore[return-value]


def suggestion(name: Any, known: Iterable[str]) -> str:
    """Advice for an unknown name: the most similar names, or all that are known."""
    known = tuple(known)
    close = difflib.get_close_matches(str(name), known, cutoff=0.6)
    if len(str(name)) > 2:  # shorter ones are in many names
        close += [each for each in known if str(name) in each and each not in close][:3]
    if close:
        return f"did you mean {' or '.join(close)}?"
    return f"known are {', '.join(known) or 'none'}"


def positional(function: Callable[..., Any]) -> tuple[str, ...]:
    """Names of the parameters that may be passed by position."""
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = inspect.signature(function).parameters.values()
    return tuple(parameter.name for parameter in parameters if parameter.kind in kinds)


def flag(name: str, value: Any) -> bool:
    """Checks a bool of Python or NumPy."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name} must be True or False, got {_quoted(value)}")
    return bool(value)


def one_of(name: str, value: Any, choices: Iterable[str]) -> str:
    """Checks that a value is one of these names."""
    names = tuple(choices)
    if not isinstance(value, str) or value not in names:
        raise ValueError(f"{name} must be one of {', '.join(names)}, got {_quoted(value)}")
    return value


def _quoted(value):
    """Text of a value for error messages; arrays and long values are shown by their type."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype} of shape {value.shape}"
    text = repr(value)
    return text if len(text) < 60 else f"a {type(value).__name__}"


def query_key_value(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[int, ...]:
    """Checks shapes and dtypes of query, key and value; returns the batch dimensions `*B`."""
    for name, array in (("query", query), ("key", key), ("value", value)):
        if array.ndim < 3:
            raise ValueError(
                f"{name} must have shape (*batch, length, heads, head size), got {array.shape}"
            )
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name} must be floating point, got dtype {array.dtype}")
    *batch, _, heads, size = query.shape
    *key_batch, length, key_heads, key_size = key.shape
    if key_batch != batch or value.shape[:-3] != tuple(batch):
        raise ValueError(
            "query, key and value must have the same batch dimensions, got "
            f"{tuple(batch)}, {tuple(key_batch)} and {value.shape[:-3]}"
        )
    if query.dtype != key.dtype:
        raise ValueError(
            f"query and key must have the same dtype, got {query.dtype} and {key.dtype}"
        )
    if size == 0:
        raise ValueError(f"query must have a head size of at least 1, got shape {query.shape}")
    if key_size != size:
        raise ValueError(
            f"query and key must have the same head size, got {size} in query {query.shape} and "
            f"{key_size} in key {key.shape}"
        )
    if value.shape[-3:-1] != (length, key_heads):
        raise ValueError(
            f"value must have the length and heads of key, {(length, key_heads)}, got "
            f"{value.shape[-3:-1]} in value {value.shape}"
        )
    if 0 in (heads, key_heads) or heads % key_heads:
        raise ValueError(
            "the number of query heads must be a multiple of the number of key heads, "
            f"got {heads} query heads and {key_heads} key heads; 1 or more of each"
        )
    return tuple(batch)


def as_array(name: str, value: Any) -> jax.Array:
    """Converts a value to an array; integers that do not fit JAX's integer dtype are an error."""
    if isinstance(value, np.ndarray | list | tuple | int):
        numbers = known(value)
        if numbers is not None and numbers.dtype.kind in "iu":
            fits = np.iinfo(jax.dtypes.canonicalize_dtype(numbers.dtype))
            low, high = (int(edge(numbers, initial=0)) for edge in (np.min, np.max))
            if low < fits.min or high > fits.max:
                raise ValueError(
                    f"{name} must fit in {fits.dtype}, which JAX makes of {numbers.dtype} unless "
                    f"jax_enable_x64 is set; got values from {low} to {high}"
                )
            if isinstance(value, list | tuple):
                value = numbers  # JAX reads no uint64 from a list
    try:
        if value is None:
            raise TypeError("None is not an array")
        array = jnp.asarray(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name} must be an array of numbers, got {_quoted(value)}") from error
    return mesh_axes.on_mesh_that_is_set(array)


def _passed_on(name, value):
    """Converts to an array. NumPy and Python integers become NumPy arrays: concrete in a trace."""
    array = as_array(name, value)
    if isinstance(value, jax.Array) or not jnp.issubdtype(array.dtype, jnp.integer):
        return array
    numbers = known(value)
    return array if numbers is None else numbers


def _optional(rule):
    return lambda name, value: None if value is None else rule(name, value)


# Arguments that functions check by themselves: random keys, and arrays that may be pairs.
_OTHERWISE = frozenset({"rng", "dropout_rng", "segment_ids", "initial_state"})

# Check for each annotation.
_RULES: dict[Any, Callable[[str, Any], Any]] = {
    bool: flag,
    bool | None: _optional(flag),
    jax.Array: _passed_on,
    jax.Array | None: _optional(_passed_on),
}


def lengths(
    name: str, value: Any, batch: Sequence[int], most: int | None = None
) -> jax.Array | None:
    """Checks lengths, integers `(*B)`; without batch dimensions also `(1,)`, as in `jax.nn`.

    Without `most`, lengths above the number of tokens are accepted, also as in `jax.nn`.
    """
    if value is None:
        return None
    given, value = value, as_array(name, value)
    if not batch and value.shape == (1,):
        value = value[0]
    if not jnp.issubdtype(value.dtype, jnp.integer) or value.shape != tuple(batch):
        raise ValueError(
            f"{name} must be integers of shape {tuple(batch)}, one for each example, got "
            f"{value.dtype} of shape {value.shape}"
        )
    not_negative(name, given)
    numbers = None if most is None else known(given)
    if numbers is not None and np.max(numbers, initial=0) > most:
        raise ValueError(
            f"{name} must lie between 0 and the {most} tokens given, got {np.max(numbers)}"
        )
    return counts(value)


def known(value: Any) -> np.ndarray | None:
    """The value as a NumPy array if it is concrete and numeric; else None.

    Pass an argument as the caller gave it: within a trace, an array that JAX has converted may be a
    tracer.
    """
    if isinstance(value, jax.core.Tracer):
        return None
    if not getattr(value, "is_fully_addressable", True):
        return None  # other processes have parts of the array
    try:
        numbers: np.ndarray | None = np.asarray(value)
        if isinstance(value, list | tuple) and numbers is not None and numbers.dtype.kind == "f":
            numbers = _without_rounding(value, numbers)
    except (jax.errors.TracerArrayConversionError, TypeError, ValueError):
        return None
    return None if numbers is None or numbers.dtype.kind in "OUS" else numbers


def _without_rounding(value: Any, numbers: np.ndarray) -> np.ndarray:
    """Exact integers below 2**64; NumPy converts lists of small and large integers to floats."""
    exact = np.asarray(value, object)
    if exact.size and all(is_integer(x) and 0 <= x < 2**64 for x in exact.flat):
        return exact.astype(np.uint64)
    return numbers


def not_negative(name: str, value: Any) -> None:
    """Checks that counts are 0 or more and not NaN, if they are concrete."""
    numbers = known(value)
    if numbers is not None and not np.min(numbers, initial=0) >= 0:
        raise ValueError(f"{name} must be 0 or more, got {np.min(numbers)}")


def between(name: str, value: Any, low: float, high: float = math.inf) -> None:
    """Checks that concrete values, such as gates of tokens, lie in [low, high].

    NaN is accepted, because padding may hold NaN.
    """
    numbers = known(value)
    if numbers is None:
        return
    outside = numbers[(numbers < low) | (numbers > high)]
    if outside.size:
        needs = f"{low} or more" if high == math.inf else f"between {low} and {high}"
        raise ValueError(f"{name} must be {needs}, got {float(outside.flat[0]):.4g}")


def counts(value: jax.Array) -> jax.Array:
    """Clips counts to 0 ... 2**30, as int32, so that sums of counts do not overflow."""
    return jnp.clip(value, 0, min(_FAR, jnp.iinfo(value.dtype).max)).astype(jnp.int32)


def segment_ids(
    value: Any, batch: Sequence[int], query_length: int, key_length: int
) -> tuple[jax.Array, jax.Array] | None:
    """Checks segment ids: int32 ids of queries `(*B, T)` and keys `(*B, S)`, or None.

    `value` is one array, or a pair (query ids, key ids). Ids of wider integer dtypes are renumbered
    so that equal ids stay equal and 0 stays 0. int32 ids may not contain -2**31, which marks masked
    keys.
    """
    if value is None:
        return None
    if is_pair(value, (*batch, key_length)):
        if len(value) != 2 or any(ids is None for ids in value):
            raise ValueError(
                f"segment_ids must be one array or a pair (query, key) of arrays, got {len(value)} "
                f"items{', of which one is None' if len(value) == 2 else ''}"
            )
        pair = _ids(value[0]), _ids(value[1])
    else:
        if query_length != key_length:
            raise ValueError(
                f"segment_ids must be a pair (query ids, key ids) where query length "
                f"{query_length} and key length {key_length} differ, got one array"
            )
        pair = (_ids(value),) * 2
    for name, ids, length in zip(("query", "key"), pair, (query_length, key_length), strict=True):
        shape = (*batch, length)
        if not jnp.issubdtype(ids.dtype, jnp.integer) or ids.shape != shape:
            raise ValueError(
                f"segment_ids of the {name} must be integers of shape {shape}, got {ids.dtype} of "
                f"shape {ids.shape}"
            )
        numbers = known(ids) if ids.dtype == jnp.int32 else None
        if numbers is not None and np.min(numbers, initial=0) < -_MOST:
            raise ValueError(
                f"segment_ids of the {name} must be above -2**31, which marks masked keys; give "
                "that document another number"
            )
    return _ids_in_32_bits(*pair)


def is_pair(value, shape):
    """True if the value is a pair (query ids, key ids); a list of ids of `shape` is one array."""
    if not isinstance(value, list):
        return isinstance(value, tuple)
    numbers = known(value)
    return numbers is None or numbers.shape != shape


def one_segment_array(value: Any, shape: tuple[int, ...], reason: str) -> None:
    """Raises `ValueError` if segment ids are a pair for queries and keys; see `is_pair`."""
    if is_pair(value, shape):
        raise ValueError(
            f"segment_ids must be one array (*B, T), because {reason}, got a pair; pass the ids of "
            "the tokens once"
        )


def _ids(value):
    """Converts ids to an array, int32 if they are NumPy or Python integers that fit in int32."""
    numbers = known(value) if isinstance(value, np.ndarray | list | tuple) else None
    if numbers is None or numbers.dtype.kind not in "iu":
        return as_array("segment_ids", value)
    fits = np.min(numbers, initial=0) >= -_MOST and np.max(numbers, initial=0) <= _MOST
    return as_array("segment_ids", numbers.astype(np.int32) if fits else numbers)


def _ids_in_32_bits(queries: jax.Array, keys: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Renumbers ids as int32: equal ids stay equal, and 0 stays 0."""
    if all(jnp.can_cast(ids.dtype, jnp.int32) for ids in (queries, keys)):
        return queries.astype(jnp.int32), keys.astype(jnp.int32)
    dtype = jnp.promote_types(queries.dtype, keys.dtype)
    if not jnp.issubdtype(dtype, jnp.integer):
        raise ValueError(
            "segment_ids of queries and keys must have dtypes that promote to an integer dtype, "
            f"got {queries.dtype} and {keys.dtype}; pass both as int64"
        )
    if queries is keys:
        ranks = _ranks(keys)
        return ranks, ranks
    ranks = _ranks(jnp.concatenate([queries.astype(dtype), keys.astype(dtype)], -1))
    return ranks[..., : queries.shape[-1]], ranks[..., queries.shape[-1] :]


def _ranks(ids: jax.Array) -> jax.Array:
    """Ranks of the distinct ids in each row, int32 from 1 in ascending order; 0 stays 0."""
    order = jnp.argsort(ids, -1, stable=True)
    ordered = jnp.take_along_axis(ids, order, -1)
    is_new = jnp.concatenate(
        [jnp.ones_like(ids[..., :1], bool), ordered[..., 1:] != ordered[..., :-1]], -1
    )
    ranks = jnp.cumsum(is_new, -1, dtype=jnp.int32)
    ranks = jnp.take_along_axis(ranks, jnp.argsort(order, -1), -1)
    return jnp.where(ids == 0, 0, ranks)


def window(value: Any) -> tuple[int, int]:
    """Checks `local_window_size`, an int w or a pair; returns (left, right)."""
    pair = (value, value) if is_integer(value) else value
    if (
        not isinstance(pair, tuple | list)
        or len(pair) != 2
        or not all(is_integer(w) and w >= 0 for w in pair)
    ):
        raise ValueError(
            "local_window_size must be an int or a pair (left, right) of ints, 0 or more, the "
            f"number of tokens that a token sees on each side of itself, got {value!r}"
        )
    return min(int(pair[0]), _FAR), min(int(pair[1]), _FAR)


def broadcastable(
    name: str, value: Any, shape: tuple[int, ...], axes: str = "(*B, N, T, S)"
) -> jax.Array:
    """Checks that an array broadcasts to `shape`; returns it with as many axes as `shape`."""
    value = as_array(name, value)
    given = value.shape
    extra = value.ndim - len(shape)
    if extra > 0 and given[:extra] == (1,) * extra:
        value = value.reshape(given[extra:])
    elif extra < 0:
        value = value.reshape((1,) * -extra + given)
    if value.ndim != len(shape) or any(
        a not in (1, b) for a, b in zip(value.shape, shape, strict=True)
    ):
        raise ValueError(f"{name} must broadcast to {axes} = {shape}, got {given}")
    return value


def tile(value: Any) -> tuple[int, int] | None:
    """Checks `tile`: (queries, keys), or None."""
    if value is None:
        return None
    if (
        not isinstance(value, tuple | list)
        or len(value) != 2
        or not all(is_integer(side) and side > 0 for side in value)
    ):
        raise ValueError(f"tile must be a pair (queries, keys) of positive ints, got {value!r}")
    return int(value[0]), int(value[1])


def offset(value: Any, batch: Sequence[int]) -> int | jax.Array:
    """Checks `query_offset`: an int, or an int array `()` or `(*B)`."""
    if is_integer(value):
        if abs(value) > _FAR // 2:
            raise ValueError(f"query_offset must lie between -2**29 and 2**29, got {value!r}")
        return int(value)
    array = as_array("query_offset", value)
    if not jnp.issubdtype(array.dtype, jnp.integer) or array.shape not in ((), tuple(batch)):
        raise ValueError(
            f"query_offset must be an int, or integers of shape () or {tuple(batch)}, got "
            f"{array.dtype} of shape {array.shape}"
        )
    limit = min(_FAR // 2, jnp.iinfo(array.dtype).max)
    low = 0 if jnp.issubdtype(array.dtype, jnp.unsignedinteger) else -limit
    return jnp.clip(array, low, limit).astype(jnp.int32)


def scale(value: Any, head_size: int) -> float | jax.Array:
    """Checks the scale of the logits: a float, or a floating-point array `()`; None is H**-0.5."""
    if value is None:
        return float(head_size**-0.5)
    if not isinstance(value, jax.Array):
        return finite("scale", real("scale", value, "a number or an array of shape ()"))
    if value.shape != () or value.dtype == bool or not jnp.isrealobj(value):
        raise ValueError(
            f"scale must be a number or an array of shape (), got {value.dtype} of shape "
            f"{value.shape}"
        )
    finite("scale", value)
    return value if jnp.issubdtype(value.dtype, jnp.floating) else value.astype(jnp.float32)


def finite(name: str, value: Any) -> Any:
    """Checks that a number is finite, if it is concrete."""
    number = known(value)
    if number is not None and not np.isfinite(number.astype(float)):
        raise ValueError(f"{name} must be finite, got {float(number)}")
    return value


def positive(name: str, value: Any) -> float:
    """Checks a finite number above 0."""
    number = real(name, value, "a finite number above 0")
    if not 0 < number < float("inf"):
        raise ValueError(f"{name} must be a finite number above 0, got {value!r}")
    return number


def soft_cap(value: Any) -> float | None:
    """Checks `logits_soft_cap`: a finite number above 0, or None."""
    return None if value is None else positive("logits_soft_cap", value)


def real(name, value, needs):
    """Checks a concrete real number of Python, NumPy or JAX; returns a float."""
    known = isinstance(value, np.ndarray | jax.Array) and not isinstance(value, jax.core.Tracer)
    scalar = known and value.ndim == 0 and jnp.isrealobj(value)
    if isinstance(value, bool) or not (scalar or isinstance(value, numbers.Real)):
        raise ValueError(f"{name} must be {needs}, got {value!r}")
    return float(value)


def shaped(name: str, value: Any, shape: tuple[int, ...]) -> jax.Array:
    """Checks a floating-point array of the given shape."""
    value = as_array(name, value)
    if value.shape != shape or not jnp.issubdtype(value.dtype, jnp.floating):
        raise ValueError(
            f"{name} must be floating point of shape {shape}, got {value.dtype} of shape "
            f"{value.shape}"
        )
    return value


def dtype(name: str, value: Any) -> Any:
    """Checks a floating-point dtype of JAX or NumPy, or its name."""
    try:
        known = None if value is None else jnp.dtype(value)
    except TypeError:
        known = None
    if known is None or not jnp.issubdtype(known, jnp.floating):
        raise ValueError(
            f"{name} must be a floating-point dtype, such as jnp.float32 or 'bfloat16', got "
            f"{_quoted(value)}"
        )
    return known


def key(name: str, value: Any) -> Any:
    """Checks a single `jax.random` key."""
    if not _is_key(value):
        raise ValueError(f"{name} must be a jax.random key, got {_quoted(value)}")
    return value


def accepts(name: str, function: Any, arguments: Sequence[str]) -> None:
    """Checks that a function can be called with these positional arguments."""
    of = ", ".join(arguments)
    if not callable(function):
        raise ValueError(f"{name} must be a function ({of}), got {_quoted(function)}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions in C have no signature
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise ValueError(
            f"{name} must be a function ({of}), got one that takes {signature}"
        ) from error


def dropout_rate(rate: Any, rng: Any) -> float:
    """Checks a dropout rate in [0, 1), and its `jax.random` key if the rate is above 0."""
    number = share("dropout_rate", rate)
    if number > 0 and not _is_key(rng):
        raise ValueError(f"dropout_rate={number} needs dropout_rng, a jax.random key, got {rng!r}")
    return number


def share(name: str, value: Any) -> float:
    """Checks a number in [0, 1)."""
    number = real(name, value, "a number in [0, 1)")
    if not 0 <= number < 1:
        raise ValueError(f"{name} must be a number in [0, 1), got {value!r}")
    return number


def _is_key(rng):
    """True if the value is a single key of `jax.random.key` or the older `PRNGKey`."""
    if isinstance(rng, jax.Array) and jnp.issubdtype(rng.dtype, jax.dtypes.prng_key):
        return rng.ndim == 0
    return isinstance(rng, jax.Array | np.ndarray) and rng.dtype == np.uint32 and rng.ndim == 1


def is_integer(value: Any) -> bool:
    """True if the value is an integer of Python or NumPy; bools do not count."""
    if isinstance(value, np.ndarray):
        return value.ndim == 0 and np.issubdtype(value.dtype, np.integer)
    return hasattr(value, "__index__") and not isinstance(value, bool | np.bool_ | jax.Array)


def at_least(name: str, value: Any, least: int, of: str = "") -> int:
    """Checks an int that is at least `least`; `of` names the unit, for the message."""
    if not is_integer(value) or value < least:
        raise ValueError(f"{name} must be an int, {least} or more{of and ' ' + of}, got {value!r}")
    if value > _MOST:
        raise ValueError(f"{name} must be at most {_MOST}, the largest int32, got {value!r}")
    return int(value)


def known_length(mechanism: str, *arrays: jax.Array, axis: int = -3) -> None:
    """Checks that the arrays have static lengths: an exported program may leave lengths open."""
    for array in arrays:
        if array.ndim >= -axis and not isinstance(array.shape[axis], int):
            raise ValueError(
                f"{mechanism} needs a length that is known when it is traced, got the open length "
                f"{array.shape[axis]}: export one program for each length, or one for the longest, "
                "called with the lengths of rows; dot_product_attention, sliding_window_attention "
                "and linear_attention can be exported with an open length"
            )


def self_attention(mechanism: str, query: jax.Array, key: jax.Array) -> None:
    """Checks that queries and keys have the same length."""
    for name, x in (("query", query), ("key", key)):
        if x.ndim < 3:
            raise ValueError(
                f"{name} must have shape (*batch, length, heads, head size), got {x.shape}"
            )
    if query.shape[-3] != key.shape[-3]:
        raise ValueError(
            f"{mechanism} is self-attention: query and key need the same length, got "
            f"{query.shape[-3]} and {key.shape[-3]}"
        )


def dilation(value: Any, heads: int, key_heads: int) -> int | tuple[int, ...]:
    """Checks `dilation`, 1 or more tokens: an int, or one int per query head."""
    each = tuple(value) if isinstance(value, tuple | list) else (value,) * heads
    if not all(is_integer(d) and d >= 1 for d in each):
        raise ValueError(f"dilation must be an int, 1 or more tokens, got {value!r}")
    if len(each) != heads:
        raise ValueError(
            f"dilation must be an int, or one for each of the {heads} query heads, got {value!r}"
        )
    each = tuple(int(d) for d in each)
    group = heads // key_heads
    if any(d != each[n - n % group] for n, d in enumerate(each)):
        raise ValueError(
            f"dilation must be the same for the {group} query heads of each key head, got {value!r}"
        )
    return each[0] if len(set(each)) == 1 else each
