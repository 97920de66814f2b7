"""Expert parallelism: each of P devices has E / P experts, and tokens travel to their experts.

With a capacity (Lepikhin et al. 2020, "GShard"), every device sends the slots of all experts in one
all-to-all to the devices of these experts, and gets their outputs in a second. For k experts a
token and the capacity factor c, the slots of a device are c k times its tokens.

Without a capacity, all tokens of a device may have their experts on any one device. An all-to-all
with slots for this case moves as much as an all-gather of all tokens, which takes its place; the
sums of outputs return by a reduce-scatter. `jax.lax.ragged_all_to_all` would move the chosen tokens
alone, but JAX has no such collective for CPUs.
"""

import functools

import jax
from jax import lax

from effattn.arrays import mesh_axes
from effattn.cores import experts
from effattn.cores.experts import Activation, Kernels, Routing


def exchange_tokens(
    x: jax.Array,
    routing: Routing,
    kernels: Kernels,
    activation: Activation,
    *,
    axis_name: str,
    capacity_factor: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Sums the outputs of each token's experts, which the devices of a mesh axis hold in parts.

    Call it inside `jax.shard_map`. `nn.MixtureOfExperts` does so where it holds a part of its
    experts. The results are those of `effattn.cores.experts.mix` for all tokens and experts.

    Args:
      x: `(B, T, D)`, whole rows of this device, finite in padding.
      routing: experts of these tokens, among all E experts.
      kernels: projections of the E / P experts of this device.
      activation: activation function of the experts.
      axis_name: the mesh axis that divides rows and experts.
      capacity_factor: see `effattn.nn.Experts`; None for no capacity.

    Returns:
      `(y, kept)`, as `mix`.

    Raises:
      ValueError: the kernels are not those of E / P experts.
    """
    mesh_axes.check_axis(axis_name)
    devices, number = lax.axis_size(axis_name), routing.logits.shape[-1]
    if len(kernels.up) * devices != number:
        raise ValueError(
            f"kernels must be those of {number} experts / {devices} devices of the mesh axis "
            f"{axis_name!r}, got kernels of {len(kernels.up)} experts"
        )
    if capacity_factor is not None:

        def call(slots):
            """Outputs of all experts for the slots `(B, E, C, D)` of this device."""
            slots = lax.all_to_all(slots, axis_name, 1, 0, tiled=True)
            out = experts.in_slots(activation, kernels, slots)
            return lax.all_to_all(out, axis_name, 0, 1, tiled=True)

        return experts.with_capacity(x, routing, capacity_factor, call)
    everyone = functools.partial(lax.all_gather, axis_name=axis_name, tiled=True)
    x, chosen, weights = map(everyone, (x, routing.experts, routing.weights))
    chosen = chosen - lax.axis_index(axis_name) * len(kernels.up)
    y = experts.without_capacity(activation, x, chosen, weights, kernels)
    return lax.psum_scatter(y, axis_name, tiled=True), routing.experts < number
