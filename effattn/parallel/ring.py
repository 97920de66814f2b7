"""Exact attention over a sequence that devices hold in parts (Liu et al. 2023, Ring Attention).

The devices of a mesh axis hold consecutive parts of T tokens. Keys and values travel around the
ring; each device attends to every part that passes, and combines the results by their log-sum-exps.
Backward, keys and values travel once more, with their gradients in at least float32, and one more
hop brings these gradients home. A device never has more than two parts, so its memory falls with
the number of devices.

Within a window of at most T tokens, a device needs only the nearest tokens of its neighbours: these
alone are sent, and what is sent does not grow with the sequence. For a wider window of w tokens,
whole parts travel over the nearest ceil(w / T) devices.
"""

import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

import effattn
from effattn.arrays import checks, dtypes, mesh_axes

Window = int | tuple[int, int] | None


class _Call(NamedTuple):
    """Static configuration.

    Attributes:
      axis_name: the mesh axis.
      causal: whether queries see no later keys.
      window: tokens that a query sees before and after its own; None is without limit.
      options: further options of `dot_product_attention`, as pairs.
    """

    axis_name: str
    causal: bool
    window: tuple[int, int] | None
    options: tuple[tuple[str, Any], ...]

    @property
    def devices(self) -> int:
        return lax.axis_size(self.axis_name)

    def attend(self, query, block, ids, offset):
        """Attention to a block of keys; the first query has position `offset` among them.

        Returns the output and the log-sum-exp, both at least float32.
        """
        key, value, key_ids = block
        segments = None if ids is None else (ids, key_ids)
        out, lse = effattn.dot_product_attention(
            query,
            key,
            value,
            is_causal=self.causal,
            local_window_size=self.window,
            query_offset=offset,
            segment_ids=segments,
            return_residual=True,
            **dict(self.options),
        )
        return out.astype(dtypes.wide(out)), lse

    def ways(self, tokens):
        """Directions of travel: +1 to later devices, -1 to earlier ones; and the number of hops."""
        last = self.devices - 1
        if self.window is None:
            return [(1, last)]
        left, right = (min(last, -(-reach // tokens)) for reach in self.window)
        return [(1, left), *([] if self.causal else [(-1, right)])]

    def hop(self, arrays, way, count=1):
        """The arrays of the device that is `count` before this one, or after it for way -1."""
        devices = self.devices
        pairs = [(n, (n + way * count) % devices) for n in range(devices)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.axis_name, pairs), arrays)

    def place(self, way, hops, tokens):
        """Position of the first query among the keys after these hops; whether it sees them."""
        me = lax.axis_index(self.axis_name)
        source = me - way * hops
        seen = (source >= 0) & (source < self.devices)
        if self.window is None and not self.causal:
            seen = jnp.ones_like(seen)
        return (me - source % self.devices) * tokens, seen


def ring_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    axis_name: str,
    is_causal: bool = False,
    local_window_size: Window = None,
    segment_ids: jax.Array | None = None,
    return_residual: bool = False,
    **options: Any,
) -> Any:
    """Exact attention over a sequence whose tokens the devices of a mesh axis hold in parts.

    Call it inside `jax.shard_map`, with the tokens of this device; device n has the n-th part.
    Every device computes O(T S) of the attention, and holds O(T) of keys, for S = P T tokens on P
    devices. Forward, it sends keys and values of T tokens P - 1 times. Backward, it sends them
    again, their gradients (at least float32) beside them, and these gradients once more. Within a
    window of w <= T tokens it sends keys and values of w tokens, and their gradients backward;
    within a wider one, ceil(w / T) times those of T tokens in place of P - 1 times.

    Causal attention leaves devices with early parts idle while others compute.

    Args:
      query: `(*B, T, N, H)`.
      key: `(*B, T, K, H)`.
      value: `(*B, T, K, Hv)`.
      axis_name: the mesh axis.
      is_causal: queries see no later keys of the sequence.
      local_window_size: as for `effattn.sliding_window_attention`.
      segment_ids: int `(*B, T)`, ids of the tokens of this device; 0 is padding.
      return_residual: also return the log-sum-exp.
      options: `scale`, `logits_soft_cap`, `precision` and `implementation` of
        `effattn.dot_product_attention`, without arrays.

    Returns:
      `(*B, T, N, Hv)` in the dtype of `value`; with `return_residual` also `(*B, T, N)`.

    Raises:
      ValueError: other options, or arrays whose numbers of tokens differ.
    """
    known = ("scale", "logits_soft_cap", "precision", "implementation")
    for name, option in options.items():
        if name not in known or isinstance(option, jax.Array):
            raise ValueError(
                f"ring_attention takes the options {', '.join(known)}, without arrays, got {name!r}"
            )
    query, key, value = (
        checks.as_array(name, x) for name, x in (("query", query), ("key", key), ("value", value))
    )
    tokens = query.shape[-3]
    if {key.shape[-3], value.shape[-3]} != {tokens}:
        raise ValueError(
            f"query, key and value must have equally many tokens on a device, got {tokens}, "
            f"{key.shape[-3]} and {value.shape[-3]}"
        )
    window = local_window_size
    if window is not None:
        left, right = window if isinstance(window, tuple | list) else (window, window)
        window = operator.index(left), operator.index(right)
        if min(window) < 0:
            raise ValueError(f"local_window_size must be 0 or more tokens, got {window}")
    if window is not None and is_causal:
        window = (window[0], 0)
    call = _Call(axis_name, is_causal, window, tuple(options.items()))
    run = _beside if window is not None and max(window) <= tokens else _ring
    out, lse = run(call, query, (key, value, segment_ids), segment_ids)
    out = out.astype(value.dtype)
    return (out, lse) if return_residual else out


def _beside(call, query, block, ids):
    """Attention within a window of at most T tokens, with the nearest tokens of the neighbours."""
    left, right = call.window
    tokens = query.shape[-3]
    key, value, _ = block
    batch = query.shape[:-3]
    own_ids = ids if ids is not None else jnp.ones((*batch, tokens), jnp.int32)
    own_ids = mesh_axes.vary_like(query, own_ids)

    def near(way, first, last):
        """Keys, values and ids of these tokens of the neighbour; none if there are no tokens."""
        if first == last:
            return []
        axis = len(batch)
        given = [lax.slice_in_dim(x, first, last, axis=axis) for x in (key, value, own_ids)]
        *found, ids = call.hop(given, way)
        _, seen = call.place(way, 1, tokens)
        return [[*found, jnp.where(seen, ids, 0)]]  # 0 is padding

    parts = [*near(1, tokens - left, tokens), [key, value, own_ids], *near(-1, 0, right)]
    together = [jnp.concatenate(each, len(batch)) for each in zip(*parts, strict=True)]
    return call.attend(query, tuple(together), own_ids, left)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(call, query, block, ids):
    return _forward(call, query, block, ids)[0]


def _forward(call, query, block, ids):
    tokens = query.shape[-3]
    found = call.attend(query, block, ids, 0)
    for way, hops in call.ways(tokens):

        def step(carry, hop, way=way):
            found, moving = carry
            moving = call.hop(moving, way)
            offset, seen = call.place(way, hop, tokens)

            def more():
                out, lse = call.attend(query, moving, ids, offset)
                return effattn.combine((found[0], out), (found[1], lse))

            return (lax.cond(seen, more, lambda: found), moving), None

        if hops:
            (found, _), _ = lax.scan(step, (found, block), jnp.arange(1, hops + 1))
    return found, (query, block, ids, *found)


def _backward(call, saved, cotangents):
    query, block, ids, out, lse = saved
    d_out, d_lse = cotangents
    tokens = query.shape[-3]
    whole = (d_out * out).sum(-1) - d_lse
    is_empty = _is_empty(lse)

    def pull(block, offset):
        """Gradients of queries, keys and values from one block."""

        def attend(query, key, value):
            return call.attend(query, (key, value, block[2]), ids, offset)

        (part, part_lse), back = jax.vjp(attend, query, *block[:2])
        # The block's share of the weights of each row.
        share = jnp.exp(part_lse - jnp.where(is_empty, 0, lse))
        share = jnp.where(is_empty | _is_empty(part_lse), 0, share)
        d_part_lse = share * ((d_out * part).sum(-1) - whole)
        return back((share[..., None] * d_out, d_part_lse))

    d_query, *d_block = (x.astype(dtypes.wide(x)) for x in pull(block, 0))
    for way, hops in call.ways(tokens):

        def step(carry, hop, way=way):
            d_query, moving = carry
            block, d_block = moving = call.hop(moving, way)
            offset, seen = call.place(way, hop, tokens)

            def more():
                d_more, *d_moved = pull(block, offset)
                return d_query + d_more, [x + y for x, y in zip(d_block, d_moved, strict=True)]

            d_query, d_block = lax.cond(seen, more, lambda: (d_query, d_block))
            return (d_query, (block, d_block)), None

        if hops:
            none = [mesh_axes.vary_like(x, jnp.zeros_like(x)) for x in d_block]
            carry = d_query, (block, none)
            (d_query, (_, d_moved)), _ = lax.scan(step, carry, jnp.arange(1, hops + 1))
            # The gradients go home.
            d_moved = call.hop(d_moved, -way, hops)
            d_block = [x + y for x, y in zip(d_block, d_moved, strict=True)]
    d_key, d_value = (x.astype(like.dtype) for x, like in zip(d_block, block, strict=False))
    return d_query.astype(query.dtype), (d_key, d_value, None), None


def _is_empty(lse):
    return (lse == -jnp.inf) | (lse == dtypes.lowest(lse.dtype))


_ring.defvjp(_forward, _backward)
