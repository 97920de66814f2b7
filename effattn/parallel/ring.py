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

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import effattn
from effattn.arrays import checks, dtypes, mesh_axes
from effattn.cores import attention

Window = int | tuple[int, int] | None


class _Part(NamedTuple):
    """Queries of this device, and keys of a block that passes, that attend to each other.

    Attributes:
      queries, keys: the first token, and the one after the last.
      is_causal: whether queries see no later keys.
    """

    queries: tuple[int, int]
    keys: tuple[int, int]
    is_causal: bool


class _Call(NamedTuple):
    """Static configuration.

    Attributes:
      axis_name: the mesh axis.
      causal: whether queries see no later keys.
      window: tokens that a query sees before and after its own; None is without limit.
      zigzag: whether device n has the chunks n and 2 P - 1 - n of 2 P.
      options: further options of `dot_product_attention`, as pairs.
    """

    axis_name: str
    causal: bool
    window: tuple[int, int] | None
    zigzag: bool
    options: tuple[tuple[str, Any], ...]

    @property
    def devices(self) -> int:
        return lax.axis_size(self.axis_name)

    def attend(self, query, block, ids, offset, is_causal, results=None):
        """Attention to a block of keys; the first query has position `offset` among them.

        Returns the output and the log-sum-exp, both at least float32. With `results`, those over
        all keys, it returns these, and its gradients are the block's share.
        """
        key, value, key_ids = block
        given = attention.check(
            "ring_attention",
            query,
            key,
            value,
            is_causal=is_causal,
            local_window_size=self.window,
            query_offset=offset,
            segment_ids=None if ids is None else (ids, key_ids),
            **dict(self.options),
        )
        given = dataclasses.replace(given, results=results)
        out, lse = attention.attend(query, key, value, given)
        return dtypes.widen(out), lse

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

    def parts(self, tokens):
        """Parts of another device's block that this device may attend to; None is no part."""
        everything, half = (0, tokens), tokens // 2
        if self.zigzag:
            # In an earlier device's block, the first chunk is earlier than both of this device, and
            # the second one is later. In a later device's, both lie between those of this device.
            early = _Part(everything, (0, half), False)
            return early, _Part((half, tokens), everything, False)
        # Without a window, all keys of an earlier device's block are earlier.
        return None, _Part(everything, everything, self.causal and self.window is not None)

    def place(self, way, hops, tokens):
        """Position of the first query among the keys after these hops; which of the parts.

        Without a window, positions do not matter: 0, so that more kernels take the call.
        """
        me = lax.axis_index(self.axis_name)
        source = me - way * hops
        if self.zigzag:
            return 0, (source % self.devices > me).astype(int)
        seen = (source >= 0) & (source < self.devices)
        if self.window is None:
            return 0, (seen | (not self.causal)).astype(int)
        return (me - source % self.devices) * tokens, seen.astype(int)


def zigzag_order(tokens: int, devices: int) -> np.ndarray:
    """The tokens in the order in which devices hold them for `ring_attention(order="zigzag")`.

    The sequence is cut into 2 P chunks for P devices; device n has the chunks n and 2 P - 1 - n.
    `x[:, order]`, sharded along its tokens, is the input; `order`, sharded likewise, has the
    positions of each device's tokens; `np.argsort(order)` leads back.

    Args:
      tokens: number of tokens of the whole sequence.
      devices: P.

    Returns:
      int32 `(tokens,)`.

    Raises:
      ValueError: no device, or the tokens cannot be cut into 2 P chunks of one length.
    """
    checks.at_least("devices", devices, 1)
    if tokens % (2 * devices):
        raise ValueError(
            f"the number of tokens must be a multiple of {2 * devices}, two chunks for each of the "
            f"{devices} devices, got {tokens}; pad the sequence"
        )
    chunks = np.arange(tokens, dtype=np.int32).reshape(2 * devices, -1)
    return np.stack([chunks[:devices], chunks[: devices - 1 : -1]], 1).reshape(-1)


def ring_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    axis_name: str,
    is_causal: bool = False,
    order: str = "contiguous",
    local_window_size: Window = None,
    segment_ids: jax.Array | None = None,
    return_residual: bool = False,
    **options: Any,
) -> Any:
    """Exact attention over a sequence whose tokens the devices of a mesh axis hold in parts.

    Call it inside `jax.shard_map`, with the tokens of this device; device n has the n-th part, or,
    with `order="zigzag"`, the chunks n and 2 P - 1 - n of 2 P.
    Every device computes O(T S) of the attention, and holds O(T) of keys, for S = P T tokens on P
    devices. Forward, it sends keys and values of T tokens P - 1 times. Backward, it sends them
    again, their gradients (at least float32) beside them, and these gradients once more. Within a
    window of w <= T tokens it sends keys and values of w tokens, and their gradients backward;
    within a wider one, ceil(w / T) times those of T tokens in place of P - 1 times.

    Causal attention of contiguous parts leaves devices with early parts idle while others compute:
    the last device attends to (2 P - 1) T^2 / 2 pairs of a query and a key. In the order "zigzag"
    all devices attend to P T^2 / 2 pairs, T^2 / 2 of them at every hop.

    Args:
      query: `(*B, T, N, H)`.
      key: `(*B, T, K, H)`.
      value: `(*B, T, K, Hv)`.
      axis_name: the mesh axis.
      is_causal: queries see no later keys of the sequence.
      order: "contiguous"; or "zigzag" for causal calls without a window, with the tokens in the
        order of `zigzag_order`, inputs and outputs.
      local_window_size: as for `effattn.sliding_window_attention`.
      segment_ids: int `(*B, T)`, ids of the tokens of this device; 0 is padding.
      return_residual: also return the log-sum-exp.
      options: `scale`, `logits_soft_cap`, `precision` and `implementation` of
        `effattn.dot_product_attention`, without arrays.

    Returns:
      `(*B, T, N, Hv)` in the dtype of `value`; with `return_residual` also `(*B, T, N)`.

    Raises:
      ValueError: other options, arrays whose numbers of tokens differ, an order that the call
        cannot have, or a call outside of `jax.shard_map` over the mesh axis.
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
    window = None if local_window_size is None else checks.window(local_window_size)
    if window is not None and is_causal:
        window = (window[0], 0)
    _check_order(order, is_causal, window, tokens)
    mesh_axes.check_axis(axis_name)
    call = _Call(axis_name, is_causal, window, order == "zigzag", tuple(options.items()))
    run = _beside if window is not None and max(window) <= tokens else _ring
    out, lse = run(call, query, (key, value, segment_ids), segment_ids)
    out = out.astype(value.dtype)
    return (out, dtypes.logarithms(lse)) if return_residual else out


def _check_order(order, is_causal, window, tokens):
    if order not in ("contiguous", "zigzag"):
        raise ValueError(f'order must be "contiguous" or "zigzag", got {order!r}')
    if order == "zigzag" and (not is_causal or window is not None):
        raise ValueError(
            'order="zigzag" balances causal calls without a window, got '
            f"is_causal={is_causal} and local_window_size={window}; leave order out"
        )
    if order == "zigzag" and tokens % 2:
        raise ValueError(
            f'order="zigzag" needs two chunks of one length on a device, got {tokens} tokens; pad '
            "the sequence"
        )


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
    return call.attend(query, tuple(together), own_ids, left, call.causal)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(call, query, block, ids):
    return _forward(call, query, block, ids)[0]


def _forward(call, query, block, ids):
    axis, tokens = query.ndim - 3, query.shape[-3]
    found = call.attend(query, block, ids, 0, call.causal)
    for way, hops in call.ways(tokens):

        def step(carry, hop, way=way):
            found, moving = carry
            moving = call.hop(moving, way)
            offset, which = call.place(way, hop, tokens)

            def meet(part):
                if part is None:
                    return found
                of_queries, keys = _cut((query, ids, found), part.queries, axis), part.keys
                query_part, ids_part, before = of_queries
                of_keys = _cut(moving, keys, axis)
                more = call.attend(query_part, of_keys, ids_part, offset, part.is_causal)
                joined = effattn.combine(*zip(before, more, strict=True))
                return tuple(
                    lax.dynamic_update_slice_in_dim(x, new, part.queries[0], axis)
                    for x, new in zip(found, joined, strict=True)
                )

            branches = [functools.partial(meet, part) for part in call.parts(tokens)]
            return (lax.switch(which, branches), moving), None

        if hops:
            (found, _), _ = lax.scan(step, (found, block), jnp.arange(1, hops + 1))
    return found, (query, block, ids, *found)


def _backward(call, saved, cotangents):
    query, block, ids, out, lse = saved
    axis, tokens = query.ndim - 3, query.shape[-3]

    def pull(block, offset, part):
        """Gradients of queries, keys and values from one block."""
        *key_value, key_ids = block

        def attend(query, *key_value):
            arrays = query, ids, (out, lse)
            query, ids_part, results = _cut(arrays, part.queries, axis)
            of_keys = _cut((*key_value, key_ids), part.keys, axis)
            return call.attend(query, of_keys, ids_part, offset, part.is_causal, results)

        _, back = jax.vjp(attend, query, *key_value)
        return [dtypes.widen(x) for x in back(_cut(cotangents, part.queries, axis))]

    everything = (0, tokens)
    d_query, *d_block = pull(block, 0, _Part(everything, everything, call.causal))
    for way, hops in call.ways(tokens):

        def step(carry, hop, way=way):
            d_query, moving = carry
            block, d_block = moving = call.hop(moving, way)
            offset, which = call.place(way, hop, tokens)

            def meet(part):
                if part is None:
                    return d_query, d_block
                d_more, *d_moved = pull(block, offset, part)
                return d_query + d_more, [x + y for x, y in zip(d_block, d_moved, strict=True)]

            branches = [functools.partial(meet, part) for part in call.parts(tokens)]
            d_query, d_block = lax.switch(which, branches)
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


def _cut(arrays, tokens, axis):
    """Some tokens of all arrays, from the first to the one after the last."""
    first, end = tokens
    return jax.tree.map(lambda x: lax.slice_in_dim(x, first, end, axis=axis), arrays)


_ring.defvjp(_forward, _backward)
