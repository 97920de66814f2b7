"""Support table: which implementations each mechanism has, where they run and what they take."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from effattn import dispatch, registry

# Representative calls span several tiles of every kernel: blocks have the size of the largest tile,
# and windows are shorter than the sequence.
_LENGTH, _HEADS, _SIZE, _BLOCK, _WINDOW, _GLOBAL = 1024, 2, 64, 128, 127, 16
_PAGED = "paged_attention"

# The names that a traced call is given. Kernels are named for GPUs, as sparse patterns then choose
# tiles that every kernel takes; cuDNN is called by a path of its own.
_KERNELS, _CUDNN = ("pallas", "xla"), ("cudnn",)


class Row(NamedTuple):
    """One implementation of one mechanism.

    Attributes:
      mechanism: its name in the registry, or "paged_attention".
      implementation: what the argument `implementation` names.
      platform: that it runs on, as JAX calls it, or "any".
      dtypes: of queries, keys and values.
      size: the largest head size, or number of features; None is any.
      others: what else it asks for, as text.
    """

    mechanism: str
    implementation: str
    platform: str
    dtypes: tuple[str, ...]
    size: int | None
    others: str


class Support(tuple[Row, ...]):
    """Rows; as text, a Markdown table."""

    def __str__(self) -> str:
        lines = [
            "| mechanism | implementation | runs on | dtypes | head size | asks for |",
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
    """Which implementations there are of each mechanism, or of one: `print(effattn.support())`.

    The table is derived from the checks that every call makes. A call of the mechanism with the
    options of its registry entry, on a sequence of several tiles, blocks and windows, is traced in
    each dtype; an implementation that takes all of the call has a row. Calls with other options are
    taken within the row's limits, and where an implementation does not take one, naming that
    implementation is a `NotImplementedError` that gives the reason.

    Implementations that do not run on this machine's processor or GPU have no row. Where there is
    no GPU, or no TPU, the kernels for them are listed. Mechanisms without an argument
    `implementation` are plain JAX, run everywhere, and have no row.

    Args:
      mechanism: a name in the registry, or "paged_attention"; None for all.

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
    taken = {dtype: _taken(whole, dtype, _KERNELS) for dtype in dtypes}
    if "cudnn" in _taken(whole, "bfloat16", _CUDNN):
        for dtype in dtypes:
            taken[dtype] |= _only("cudnn", _taken(whole, dtype, _CUDNN))
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
        where = platform or ("cuda" if implementation == "cudnn" else "any")
        asked = "; ".join(dict.fromkeys(others))
        rows.append(Row(name, implementation, where, (*own,), min(sizes, default=None), asked))
    return tuple(rows)


def _only(name: str, taken: dict[str, Any]) -> dict[str, Any]:
    return {name: taken[name]} if name in taken else {}


def _takes_implementation(entry: registry.Mechanism) -> bool:
    if entry.function is None:
        return entry.mixer_takes("implementation")
    return "implementation" in inspect.signature(entry.function).parameters


def _directions(entry: registry.Mechanism, implementation: str, dtype: str) -> list[str]:
    """The direction that an implementation asks for where its mechanism has both."""
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
    """The implementations that take a bidirectional call."""
    call = functools.partial(_call, registry.get(name), is_causal=False, packed=packed)
    return frozenset(_taken(call, dtype, _KERNELS))


def _taken(
    call: Callable[..., Any], dtype: str, names: tuple[str, ...]
) -> dict[str, list[dispatch.Limits]]:
    """The implementations that take all that `call(dtype)` runs, with their limits there.

    The call is traced with these names, whatever promotion the user has configured. Nothing is
    compiled.
    """
    with (
        jax.enable_x64(dtype == "float64"),
        jax.numpy_rank_promotion("allow"),
        jax.numpy_dtype_promotion("standard"),
        dispatch.recorded(*names) as taken,
    ):
        try:
            jax.eval_shape(functools.partial(call, dtype))
        except NotImplementedError:  # from the library that the call was handed to
            return {}
    takes = [name for name in dispatch.PLATFORMS if all(name in limits for limits in taken)]
    return {name: [limits[name] for limits in taken] for name in takes if taken}


def _call(
    entry: registry.Mechanism,
    dtype: str,
    is_causal: bool | None = None,
    packed: bool = False,
) -> Any:
    """A new mixer, applied to tokens; causal where its mechanism can be, unless told otherwise."""
    from flax import nnx  # importing the library imports no Flax

    is_causal = "causal" in entry.capabilities if is_causal is None else is_causal
    known = entry.mixer_options() | entry.options.keys()
    representative = {"max_length": _LENGTH, "block_size": _BLOCK, "max_global": _GLOBAL}
    if is_causal:  # a window that mechanisms of both directions may have is of causal calls
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
    """One token, whose sequence fills several pages."""
    pages = _LENGTH // _BLOCK
    pool = jnp.zeros((pages, _BLOCK, _HEADS, _SIZE), dtype)
    query = jnp.zeros((1, 1, _HEADS, _SIZE), dtype)
    table, lengths = jnp.arange(pages)[None], jnp.full(1, _LENGTH)
    paged_attention = registry.load("effattn.functional.paged:paged_attention")
    return paged_attention(query, pool, pool, block_table=table, lengths=lengths)
