"""Mixture of experts: choice of experts, their products, and the losses of the router.

Experts are feed-forward layers `(D) -> (D)` of the same sizes. The tokens of an expert stand in one
run of sorted rows, or in the slots that the expert has. Tokens are moved by gathers alone, forward
and backward, so that results do not depend on the order of atomic additions.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from effattn.arrays.gathers import inverse_of, permute, take
from effattn.arrays.linear_map import with_derivatives
from effattn.dispatch.partition import MeshAxes, is_needed, partitioned, placed_by
from effattn.dispatch.places import Names

Activation = Callable[[jax.Array], jax.Array]


class Routing(NamedTuple):
    """Experts of each token.

    Attributes:
      experts: int32 `(B, T, k)`, the chosen experts, the likeliest first; E for tokens in padding.
      weights: `(B, T, k)`, factors of the experts' outputs; 0 in padding.
      logits: `(B, T, E)`, logits of the router, at least float32; 0 in padding.
      probabilities: `(B, T, E)`, softmax of the logits.
    """

    experts: jax.Array
    weights: jax.Array
    logits: jax.Array
    probabilities: jax.Array


class Kernels(NamedTuple):
    """Projections of E experts.

    Attributes:
      gate: `(E, D, F)`, or None without a gate.
      up: `(E, D, F)`.
      down: `(E, F, D)`.
    """

    gate: jax.Array | None
    up: jax.Array
    down: jax.Array


class RoutingStats(NamedTuple):
    """Auxiliary losses of a router, and the load of its experts; means over the valid tokens.

    Attributes:
      load_balancing_loss: `()`, E sum_i f_i p_i, where f_i is the load of expert i and p_i its mean
        probability (Fedus et al. 2021, "Switch Transformers", equation 4). 1 for equal loads. If a
        token has k experts, each counts as 1 / k token (Dai et al. 2024, "DeepSeekMoE"). The
        gradient is that of p.
      router_z_loss: `()`, mean of logsumexp(logits)^2 (Zoph et al. 2022, "ST-MoE").
      load: `(E,)`, share of the choices that fall on each expert, before any token is dropped.
      dropped: `()`, share of the choices that the capacity leaves out; 0 without a capacity.
    """

    load_balancing_loss: jax.Array
    router_z_loss: jax.Array
    load: jax.Array
    dropped: jax.Array


def route(logits: jax.Array, count: int, valid: jax.Array | None = None) -> Routing:
    """Chooses the `count` likeliest experts of each token.

    The weights are the probabilities of the experts, divided by their sum if there are several
    (Jiang et al. 2024, "Mixtral of Experts"; Lepikhin et al. 2020, "GShard"). The weight of a
    single expert is its probability (Fedus et al. 2021, "Switch Transformers"), so that the router
    gets a gradient.

    Args:
      logits: `(B, T, E)`, at least float32.
      count: k, number of experts of a token.
      valid: bool `(B, T)`, False in padding; None for no padding.
    """
    number = logits.shape[-1]
    if valid is not None:
        logits = jnp.where(valid[..., None], logits, 0)
    probabilities = jax.nn.softmax(logits, -1)
    # XLA sorts the rows of each device alone, but gathers those of all devices for `lax.top_k`.
    order = jnp.argsort(lax.stop_gradient(probabilities), descending=True, stable=True)
    experts = order[..., :count].astype(jnp.int32)
    # A sum in place of a gather, whose gradient would be a scatter.
    weights = jnp.where(_is_expert(experts, number), probabilities[..., None, :], 0).sum(-1)
    if count > 1:
        weights = weights / weights.sum(-1, keepdims=True)
    if valid is not None:
        experts = jnp.where(valid[..., None], experts, number)
        weights = jnp.where(valid[..., None], weights, 0)
    return Routing(experts, weights, logits, probabilities)


def statistics(
    routing: Routing, kept: jax.Array, total: Callable[[Any], Any] = lambda sums: sums
) -> RoutingStats:
    """Losses and loads.

    Args:
      routing: choices of the tokens.
      kept: bool `(B, T, k)`, the choices that are computed.
      total: sums arrays over devices, if devices have parts of the tokens.
    """
    number, wide = routing.logits.shape[-1], routing.logits.dtype
    valid = routing.experts[..., 0] < number
    z = jnp.where(valid, jax.nn.logsumexp(routing.logits, -1), 0) ** 2
    probabilities = jnp.where(valid[..., None], routing.probabilities, 0)
    counts, tokens, kept, probabilities, z = total(
        (
            _is_expert(routing.experts, number).sum((0, 1, 2), dtype=jnp.int32).astype(wide),
            valid.sum(dtype=jnp.int32).astype(wide),
            kept.sum(dtype=jnp.int32).astype(wide),
            probabilities.sum((0, 1)),
            z.sum(),
        )
    )
    tokens, chosen = jnp.maximum(tokens, 1), jnp.maximum(counts.sum(), 1)
    load = counts / chosen
    return RoutingStats(
        load_balancing_loss=number * (load * (probabilities / tokens)).sum(),
        router_z_loss=z / tokens,
        load=load,
        dropped=(counts.sum() - kept) / chosen,
    )


def mix(
    x: jax.Array,
    routing: Routing,
    kernels: Kernels,
    activation: Activation,
    capacity_factor: float | None = None,
    places: MeshAxes | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Sums the outputs of each token's experts, by their weights.

    Args:
      x: `(B, T, D)`, finite in padding.
      routing: experts of each token.
      kernels: projections of the experts.
      activation: activation function of the experts.
      capacity_factor: see `with_capacity`; None for no capacity.
      places: mesh axes of the batch, from `effattn.dispatch.partition.places_of`.

    Returns:
      `(y, kept)`: the sums `(B, T, D)`, at least float32, and bool `(B, T, k)`, the choices that
      are computed.
    """
    if capacity_factor is not None:
        return with_capacity(
            x, routing, capacity_factor, functools.partial(in_slots, activation, kernels)
        )
    with placed_by(places):
        several = is_needed()
    operands = x, routing.experts, routing.weights, kernels
    if several:
        # The compiler would sort the tokens of all devices together.
        y = _by_device((places, activation), *operands)
    else:
        y = without_capacity(activation, *operands)
    return y, routing.experts < routing.logits.shape[-1]


def without_capacity(
    activation: Activation,
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    kernels: Kernels,
) -> jax.Array:
    """Sums of the outputs of all chosen experts, `(B, T, D)`, at least float32.

    All tokens are sorted by expert, for products by `lax.ragged_dot`. On CPUs XLA multiplies each
    token by the kernels of all experts, so that the products cost E times as much.

    Args:
      activation: see `mix`.
      x: see `mix`.
      experts: `(B, T, k)`; those other than 0 to E - 1 add zeros.
      weights: `(B, T, k)`.
      kernels: see `mix`.
    """
    number, count = len(kernels.up), experts.shape[-1]
    expert = experts.reshape(-1)
    expert = jnp.where((expert >= 0) & (expert < number), expert, number)
    order = _sorted(expert)
    place = inverse_of(order)
    sizes = _is_expert(expert, number).sum(0, dtype=jnp.int32)
    rows = take(x.reshape(-1, x.shape[-1]), order // count, place.reshape(-1, count))
    # Rows after the last group belong to no expert, and `lax.ragged_dot` leaves their products
    # undefined.
    is_computed = jnp.arange(len(rows), dtype=jnp.int32) < sizes.sum(dtype=jnp.int32)
    rows = jnp.where(is_computed[:, None], rows, 0)
    out = _feed_forward(activation, kernels, rows, lambda x, w: lax.ragged_dot(x, w, sizes))
    out = jnp.where(is_computed[:, None], out, 0)
    out = permute(out, place, order)
    return _weighted(weights, out.reshape(*weights.shape, out.shape[-1]))


def _by_device_fwd(static, x, experts, weights, kernels):
    """`without_capacity`, by each device for its part of the batch.

    The backward pass computes the outputs again: sorted rows have no sharding of their own.
    """
    places, activation = static
    call, names, leaves = _of_leaves(activation, x, weights, kernels)
    with placed_by(places):
        run = partitioned(lambda *given: (call(*given),), [_OF_TOKENS, *names], [_OF_TOKENS])
        return run(experts, *leaves)[0], (x, experts, weights, kernels)


def _by_device_bwd(static, arrays, d_out):
    places, activation = static
    x, experts, weights, kernels = arrays
    call, names, leaves = _of_leaves(activation, x, weights, kernels)

    def on_device(d_out, experts, *leaves):
        return jax.vjp(functools.partial(call, experts), *leaves)[1](d_out)

    with placed_by(places):
        run = partitioned(on_device, [_OF_TOKENS, _OF_TOKENS, *names], names)
        d_x, d_weights, *d_kernels = run(d_out, experts, *leaves)
    return d_x, None, d_weights, jax.tree.unflatten(jax.tree.structure(kernels), d_kernels)


_by_device = with_derivatives(
    lambda *operands: _by_device_fwd(*operands)[0],
    _by_device_fwd,
    _by_device_bwd,
    lambda static, *operands: without_capacity(static[1], *operands),
)

_OF_TOKENS: Names = ("row0", None, None)


def _of_leaves(activation, x, weights, kernels):
    """`without_capacity` of a list of arrays, the names of their axes, and the arrays."""
    each, structure = jax.tree.flatten(kernels)

    def call(experts, x, weights, *each):
        kernels = jax.tree.unflatten(structure, each)
        return without_capacity(activation, x, experts, weights, kernels)

    names = [_OF_TOKENS] * 2 + [(None, None, None)] * len(each)
    return call, names, (x, weights, *each)


def with_capacity(
    x: jax.Array,
    routing: Routing,
    factor: float,
    call: Callable[[jax.Array], jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """Sums of the outputs of experts that have few slots for the tokens of a row.

    An expert has `capacity(n, k, E, factor)` slots for the n valid tokens of a row. They are taken
    in the order of the positions. A choice without a slot is dropped: it adds zeros.

    Args:
      x: `(B, T, D)`, finite in padding.
      routing: experts of each token.
      factor: capacity factor.
      call: the experts, from tokens `(B, E, C, D)` in C slots each to their outputs.

    Returns:
      `(y, kept)`, as `mix`.
    """
    number, count = routing.logits.shape[-1], routing.experts.shape[-1]
    time = x.shape[1]
    slots = min(time, int(capacity(time, count, number, factor)))
    valid = routing.experts[..., 0] < number
    budget = capacity(valid.sum(-1, dtype=jnp.int32), count, number, factor)
    taken = jax.vmap(functools.partial(_slots, number, slots))(routing.experts, budget)
    tokens = jax.vmap(take)(x, taken.token, taken.slot)
    tokens = jnp.where(taken.is_filled[..., None], tokens, 0)
    out = call(tokens.reshape(len(x), number, slots, -1)).reshape(len(x), number * slots, -1)
    kept = taken.slot >= 0
    out = jax.vmap(take)(out, jnp.maximum(taken.slot, 0), taken.choice)
    return _weighted(routing.weights, jnp.where(kept[..., None], out, 0)), kept


class _Slots(NamedTuple):
    """Slots of the tokens of a row, for C slots of each of E experts.

    Attributes:
      token: `(E C,)`, the token in each slot; any token in an empty slot.
      choice: `(E C, 1)`, the choice `token k + i` in each slot; -1 in an empty slot.
      is_filled: bool `(E C,)`.
      slot: `(T, k)`, the slot of each choice; -1 for a choice without a slot.
    """

    token: jax.Array
    choice: jax.Array
    is_filled: jax.Array
    slot: jax.Array


def _slots(number, slots, experts, budget) -> _Slots:
    expert, (_, count) = experts.reshape(-1), experts.shape
    order = _sorted(expert)
    sizes = _is_expert(expert, number).sum(0, dtype=jnp.int32)
    first = jnp.cumsum(sizes) - sizes
    # Padding stands behind all experts.
    rank = inverse_of(order) - jnp.pad(first, (0, 1))[expert]
    has_slot = (expert < number) & (rank < budget)
    slot = jnp.where(has_slot, expert * slots + rank, -1).reshape(experts.shape)
    index = jnp.arange(slots, dtype=jnp.int32)
    at = first[:, None] + index
    choice = order[jnp.minimum(at, len(order) - 1)].reshape(-1)
    is_filled = (index < jnp.minimum(sizes, budget)[:, None]).reshape(-1)
    return _Slots(choice // count, jnp.where(is_filled, choice, -1)[:, None], is_filled, slot)


def in_slots(activation: Activation, kernels: Kernels, tokens: jax.Array) -> jax.Array:
    """Outputs of E experts for tokens `(B, E, C, D)`."""
    return _feed_forward(
        activation, kernels, tokens, lambda x, w: jnp.einsum("becd,edf->becf", x, w)
    )


def capacity(tokens: Any, count: int, number: int, factor: float) -> Any:
    """Slots of each expert for the tokens of a row, ceil(factor k tokens / E), int32.

    Args:
      tokens: number of tokens, an int or an array of JAX.
      count: k, number of experts of a token.
      number: E, number of experts.
      factor: capacity factor.
    """
    xp = jnp if isinstance(tokens, jax.Array) else np
    # A little less than the ratio, so that rounding does not lift a product over a whole number.
    ratio = np.float32(factor * count / number * (1 - 2**-20))
    return xp.ceil(xp.asarray(tokens, np.float32) * ratio).astype(np.int32)


def _feed_forward(activation, kernels, x, product):
    gate, up, down = jax.tree.map(lambda w: w.astype(x.dtype), kernels)
    hidden = product(x, up)
    if gate is None:
        return product(activation(hidden), down)
    return product(activation(product(x, gate)) * hidden, down)


def _weighted(weights, out):
    """Sums `(..., k, D)` by weights `(..., k)`."""
    return (weights[..., None] * out.astype(weights.dtype)).sum(-2)


def _sorted(expert):
    """The stable order by expert, int32: choices of an expert stay in the order of positions."""
    return jnp.argsort(expert, stable=True).astype(jnp.int32)


def _is_expert(experts, number):
    return experts[..., None] == jnp.arange(number, dtype=jnp.int32)
