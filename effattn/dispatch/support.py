"""Support table: which implementations each mechanism has, where they run and what they take."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from effattn import dispatch, registry

# Sizes of the traced calls. They span several tiles of every kernel: blocks are as long as the
# largest tile, and windows are shorter than the sequence.
_LENGTH, _HEADS, _SIZE, _BLOCK, _WINDOW, _GLOBAL = 1024, 2, 64, 128, 127, 16
_PAGED = "paged_attention"

# Implementations that a traced call asks for. "pallas" is named because sparse patterns then choose
# tiles that every kernel accepts.
_ASKED = "pallas", "xla"


class Row(NamedTuple):
    """One implementation of one mechanism.

    Attributes:
      mechanism: name in the registry, or "paged_attention".
      implementation: name for the argument `implementation`.
      platform: JAX's name of the platform, or "any".
      dtypes: accepted dtypes of queries, keys and values.
      size: the largest head dimension, or number of features; None is any.
      others: further requirements, as text.
    """

    mechanism: str
    implementation: str
    platform: str
    dtypes: tuple[str, ...]
    size: int | None
    others: str


class Support(tuple[Row, ...]):
    """Rows of the support table; `str` gives a Markdown table."""

    def __str__(self) -> str:
        lines = [
            "| mechanism | implementation | runs on | dtypes | head size | limits |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        for row in self:
            size = "any" if row.size is None else f"up to {row.size}"
            cells = (
                f"`{row.mechanism}`",
                f"`{row.implementation}`",
                row.platform,
                ", ".join(row.dtypes),
                size,
                row.others,
            )
            lines.append(f"| {' | '.join(cells)} |")
        return "\n".join(lines)


def support(mechanism: str | None = None) -> Support:
    """Table of the implementations of one mechanism, or of all: `print(effattn.support())`.

    The table comes from the same checks that every call makes. For each dtype, a representative
    call of the mechanism with the options of its registry entry is traced; each implementation that
    accepts the call has a row. Calls with other options are accepted within the limits of the row.
    If an implementation rejects a call, naming the implementation raises `NotImplementedError` with
    the reason.

    Kernels that this machine's CPU or GPU cannot run have no row. On a machine without a GPU or
    TPU, the kernels for GPUs or TPUs are listed. Mechanisms without an argument `implementation`
    are plain JAX, run everywhere, and have no row.

    Args:
      mechanism: name in the registry, or "paged_attention"; None for all.

    Raises:
      ValueError: an unknown name.
    """
    if mechanism is None:
        names: tuple[str, ...] = (*registry.names(), _PAGED)
    else:
        names = (mechanism,)
    return Support(row for name in names for row in _rows(name))


@functools.cache
def _rows(name: str) -> tuple[Row, ...]:
    entry = None if name == _PAGED else registry.get(name)
    if entry is not None and not _takes_implementation(entry):
        return ()
    whole = _call_paged if entry is None else functools.partial(_call, entry)
    dtypes = dispatch.Limits().dtypes
    taken = {dtype: _taken(whole, dtype) for dtype in dtypes}
    rows = []
    for implementation, platform in dispatch.PLATFORMS.items():
        own = {d: takes[implementation] for d, takes in taken.items() if implementation in takes}
        if not own:
            continue
        limits = [each for of_dtype in own.values() for each in of_dtype]
        sizes = [each.size for each in limits if each.size is not None]
        others = [piece for each in limits for piece in each.others.split("; ") if piece]
        if entry is not None and platform is not None:
            others += _directions(entry, implementation, next(iter(own)))
        asked = "; ".join(dict.fromkeys(others))
        size = min(sizes, default=None)
        rows.append(Row(name, implementation, platform or "any", (*own,), size, asked))
    return tuple(rows)


def _takes_implementation(entry: registry.Mechanism) -> bool:
    """Returns whether the mixer takes the argument, or the function without its naive form."""
    if entry.mixer_takes("implementation"):
        return True
    function = entry.function and inspect.unwrap(entry.function)
    return function is not None and "implementation" in inspect.signature(function).parameters


def _directions(entry: registry.Mechanism, implementation: str, dtype: str) -> list[str]:
    """Requirement on causality, for an implementation of a causal and bidirectional mechanism."""
    if not {"causal", "bidirectional"} <= entry.capabilities:
        return []
    if implementation in _bidirectional(entry.name, dtype, False):
        return []
    packed = "segments" in entry.capabilities
    if packed and implementation in _bidirectional(entry.name, dtype, True):
        return ["causal or packed calls"]
    return ["causal calls"]


@functools.cache
def _bidirectional(name: str, dtype: str, packed: bool) -> frozenset[str]:
    """Implementations that accept a bidirectional call."""
    call = functools.partial(_call, registry.get(name), is_causal=False, packed=packed)
    return frozenset(_taken(call, dtype))


def _taken(call: Callable[..., Any], dtype: str) -> dict[str, list[dispatch.Limits]]:
    """Implementations that accept every core call of `call(dtype)`, with their limits.

    The call is traced, not compiled. The user's configuration of dtype and rank promotion has no
    effect.
    """
    with (
        jax.enable_x64(dtype == "float64"),
        jax.numpy_rank_promotion("allow"),
        jax.numpy_dtype_promotion("standard"),
        dispatch.recorded(*_ASKED) as taken,
    ):
        jax.eval_shape(functools.partial(call, dtype))
    takes = [name for name in dispatch.PLATFORMS if all(name in limits for limits in taken)]
    return {name: [limits[name] for limits in taken] for name in takes if taken}


def _call(
    entry: registry.Mechanism,
    dtype: str,
    is_causal: bool | None = None,
    packed: bool = False,
) -> Any:
    """Applies a new mixer of the mechanism to tokens; `is_causal=None` is causal if possible."""
    from flax import nnx  # importing effattn does not import Flax

    is_causal = "causal" in entry.capabilities if is_causal is None else is_causal
    known = entry.mixer_options() | entry.options.keys()
    representative = {"max_length": _LENGTH, "block_size": _BLOCK, "max_global": _GLOBAL}
    if is_causal:  # bidirectional calls are traced without a window
        representative["local_window_size"] = _WINDOW
    options: dict[str, Any] = {n: option for n, option in representative.items() if n in known}
    if entry.mixer_takes("is_causal"):
        options["is_causal"] = is_causal
    features = _HEADS * _SIZE
    mixer = entry.build(features, _HEADS, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0), **options)
    keywords = {}
    if packed:
        keywords["segment_ids"] = jnp.arange(_LENGTH)[None] // _BLOCK + 1
    if "max_global" in options:
        keywords["global_mask"] = jnp.arange(_LENGTH)[None] < _GLOBAL
    return mixer(jnp.zeros((1, _LENGTH, features), dtype), **keywords)


def _call_paged(dtype: str) -> Any:
    """Decodes one token of a sequence that fills several pages."""
    pages = _LENGTH // _BLOCK
    pool = jnp.zeros((pages, _BLOCK, _HEADS, _SIZE), dtype)
    query = jnp.zeros((1, 1, _HEADS, _SIZE), dtype)
    table, lengths = jnp.arange(pages)[None], jnp.full(1, _LENGTH)
    paged_attention = registry.load("effattn.functional.paged:paged_attention")
    return paged_attention(query, pool, pool, block_table=table, lengths=lengths)
