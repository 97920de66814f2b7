"""Mixture of experts in place of a feed-forward layer."""

import dataclasses
from collections.abc import Callable
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from effattn.arrays import checks, dtypes, mesh_axes, segments
from effattn.cores.experts import Kernels, RoutingStats, mix, route, statistics
from effattn.decode.state import row_lengths
from effattn.dispatch.partition import places_of
from effattn.nn import initializers
from effattn.nn.feed_forward import FeedForward, activation_of
from effattn.nn.layers import Layers
from effattn.nn.module import Module
from effattn.nn.options import Parameters
from effattn.nn.placement import axes
from effattn.nn.tokens import checked_ids, tokens_of, zero_padding
from effattn.parallel.experts import exchange_tokens

_AXIS = "expert"  # the mesh axis that divides experts among devices


@dataclasses.dataclass(frozen=True)
class Experts:
    """Static configuration of the experts of a layer.

    Attributes:
      num_experts: E, number of experts among which the router chooses.
      experts_per_token: k, number of experts of each token.
      capacity_factor: c, so that an expert has ceil(c k T / E) slots for the T tokens of a row;
        None for no limit.
      num_shared_experts: number of further experts, which all tokens have.
    """

    num_experts: int
    experts_per_token: int = 2
    capacity_factor: float | None = None
    num_shared_experts: int = 0

    def __post_init__(self):
        checks.at_least("num_experts", self.num_experts, 1, "experts")
        checks.at_least("experts_per_token", self.experts_per_token, 1, "experts")
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"experts_per_token must be at most num_experts={self.num_experts}, got "
                f"{self.experts_per_token}"
            )
        if self.capacity_factor is not None:
            checks.positive("capacity_factor", self.capacity_factor)
        checks.at_least("num_shared_experts", self.num_shared_experts, 0, "experts")


class MixtureOfExperts(Module):
    """Mixture of experts: a router sends each token to a few feed-forward layers.

        p_t = softmax(x_t W_r),   y_t = sum_(i in top k of p_t) g_ti expert_i(x_t) + shared(x_t)

    The experts are `FeedForward` layers. With k = 1, g_ti is p_ti (Fedus et al. 2021, "Switch
    Transformers"); with more, g_ti is p_ti divided by the sum of the k probabilities (Lepikhin et
    al. 2020, "GShard"; Jiang et al. 2024, "Mixtral of Experts"). The router computes in at least
    float32. Shared experts (Dai et al. 2024, "DeepSeekMoE") have all tokens, with factor 1.

    Tokens in padding have no experts and count in no loss; their outputs are zeros.

    Without `capacity_factor`, no token is dropped, and a token's output does not depend on other
    tokens. The cost is that of k experts a token (see `effattn.cores.experts.without_capacity` for
    CPUs). With it, the cost and all shapes are those of c k experts a token. In each row an expert
    takes the tokens that chose it in the order of their positions. Tokens behind its last slot get
    nothing from this expert, and pass by in the residual connection. The number of slots follows
    the valid tokens of the row; documents that are packed in a row share the slots.

    Give rows as a batch: without a capacity, `jax.vmap` over x alone raises a NotImplementedError,
    because JAX's ragged product does not take it.

    Decoding (`extend`) drops no token, so that any split of a sequence gives the same outputs. With
    a capacity these differ from the outputs of a call where the call drops tokens.

    In `jax.shard_map` over a mesh with an axis "expert", the module may hold the experts of a
    device alone (see `expert_specs`). The devices then exchange tokens, as
    `effattn.parallel.exchange_tokens` explains.

    Args:
      in_features: D, number of input and output features.
      hidden_features: F, number of hidden features of each expert.
      num_experts: see `Experts`.
      experts_per_token: see `Experts`.
      capacity_factor: see `Experts`.
      num_shared_experts: see `Experts`.
      activation: see `FeedForward`.
      gated: see `FeedForward`.
      kernel_init: initializer of the router, and of each expert's gate and up projections.
      out_kernel_init: initializer of each expert's down projection.
      **options: see `effattn.nn.options.Parameters`.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        num_experts: int,
        *,
        experts_per_token: int = 2,
        capacity_factor: float | None = None,
        num_shared_experts: int = 0,
        activation: str = "gelu",
        gated: bool = False,
        kernel_init: Callable[..., Any] = initializers.kernel_init,
        out_kernel_init: Callable[..., Any] = initializers.kernel_init,
        **options: Unpack[Parameters],
    ):
        self.in_features = checks.at_least("in_features", in_features, 1, "features")
        checks.at_least("hidden_features", hidden_features, 1, "features")
        self.experts = Experts(num_experts, experts_per_token, capacity_factor, num_shared_experts)
        self.activation = activation_of(activation)
        self.dtype = options.get("dtype")
        make = Layers(kernel_init=kernel_init, out_kernel_init=out_kernel_init, **options)

        sizes = {"features": in_features, "hidden": hidden_features}

        def kernels(init, *names):
            shape = num_experts, *(sizes[name] for name in names)
            return make.drawn(_of_each(init), *shape, **axes("experts", *names))

        self.router = make.linear(in_features, num_experts)
        self.gate_kernels = kernels(kernel_init, "features", "hidden") if gated else None
        self.up_kernels = kernels(kernel_init, "features", "hidden")
        self.down_kernels = kernels(out_kernel_init, "hidden", "features")
        # Experts that have the same tokens are one wider feed-forward layer.
        width = num_shared_experts * hidden_features
        own: Any = {"activation": activation, "gated": gated, **options}
        own |= {"kernel_init": kernel_init, "out_kernel_init": out_kernel_init}
        self.shared = FeedForward(in_features, width, **own) if width else None

    def __call__(
        self,
        x: jax.Array,
        *,
        lengths: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
    ) -> jax.Array:
        """Maps x `(B, T, D)` to `(B, T, D)`.

        Args:
          x: `(B, T, D)`.
          lengths: `(B,)` int, valid tokens of each right-padded row.
          segment_ids: `(B, T)` int, in which 0 is padding.
        """
        return self.with_routing(x, lengths=lengths, segment_ids=segment_ids)[0]

    def with_routing(
        self,
        x: jax.Array,
        *,
        lengths: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
    ) -> tuple[jax.Array, RoutingStats]:
        """Returns the output of a call, and the losses of the router and the load of the experts.

        Add both losses to the loss of training, times 0.01 and 0.001 as in the papers. If devices
        hold the experts in parts, the statistics are those of all tokens along the mesh axis.
        """
        return self._mix(x, lengths, segment_ids, self.experts.capacity_factor)

    def extend(self, x: jax.Array, *, lengths: jax.Array | None = None) -> jax.Array:
        """Maps new tokens in decoding, without a capacity; arguments as in a call."""
        return self._mix(x, lengths, None, None)[0]

    @mesh_axes.on_mesh_of_input
    def _mix(self, x, lengths, segment_ids, capacity_factor):
        x = tokens_of("x", x, self.in_features)
        if lengths is not None:
            lengths = row_lengths(lengths, *x.shape[:2])
        if segment_ids is not None:
            segment_ids = checked_ids(segment_ids, *x.shape[:2])
        valid = segments.valid(lengths, segment_ids, x.shape[1])
        places = places_of(x[:, :, None])

        def mix(module, x, valid):
            return module._mix_tokens(zero_padding(x, valid), valid, capacity_factor, places)

        specs = PartitionSpec(*mesh_axes.spec(x)), PartitionSpec()
        with jax.named_scope("experts"):
            return mesh_axes.placed(mix, x, *specs)(self, x, valid)

    def _mix_tokens(self, x, valid, capacity_factor, places):
        routing = route(self._logits(x), self.experts.experts_per_token, valid)
        gate = None if self.gate_kernels is None else self.gate_kernels[...]
        kernels = Kernels(gate, self.up_kernels[...], self.down_kernels[...])
        dtype = dtypes.common(x, kernels.up) if self.dtype is None else self.dtype
        given = x.astype(dtype), routing, kernels, self.activation
        if len(kernels.up) == self.experts.num_experts:
            y, kept = mix(*given, capacity_factor=capacity_factor, places=places)
            stats = statistics(routing, kept)
        else:
            y, kept = exchange_tokens(*given, capacity_factor=capacity_factor, axis_name=_AXIS)
            stats = statistics(routing, kept, lambda sums: lax.psum(sums, _AXIS))
        y = y.astype(dtype)
        return (y if self.shared is None else y + self.shared(x)), stats

    def _logits(self, x):
        kernel = self.router.kernel[...]
        x, kernel = (each.astype(dtypes.wide(x, kernel)) for each in (x, kernel))
        return jnp.einsum("btd,de->bte", x, kernel, precision="highest")


def expert_specs(model: Any, mesh: Mesh) -> Any:
    """Returns the specs of a model for `jax.shard_map`: the mesh axis "expert" divides the experts.

    Args:
      model: a `MixtureOfExperts`, or a model that has some.
      mesh: mesh with an axis "expert", such as that of `effattn.parallel.make_mesh`.

    Returns:
      A tree like `model`: `PartitionSpec("expert")` for the kernels of experts, and
      `PartitionSpec()` for all other arrays.

    Raises:
      ValueError: the mesh has no axis "expert", or the number of experts of a layer is no multiple
        of the number of devices.
    """
    if _AXIS not in mesh.shape:
        axes_of_mesh = ", ".join(map(repr, mesh.axis_names))
        raise ValueError(f"mesh must have an axis {_AXIS!r}, got the axes {axes_of_mesh}")
    devices = mesh.shape[_AXIS]
    for _, module in nnx.iter_modules(model):
        if isinstance(module, MixtureOfExperts) and module.experts.num_experts % devices:
            raise ValueError(
                f"num_experts must be a multiple of the {devices} devices of the mesh axis "
                f"{_AXIS!r}, got {module.experts.num_experts}"
            )

    def spec(path, _):
        names = {getattr(key, "name", getattr(key, "key", None)) for key in path}
        return PartitionSpec(_AXIS) if names & _KERNELS else PartitionSpec()

    return jax.tree_util.tree_map_with_path(spec, model)


_KERNELS = frozenset({"gate_kernels", "up_kernels", "down_kernels"})


def _of_each(init):
    """Initializer of kernels `(E, ...)`, each of which `init` draws."""

    def draw(key, shape, dtype):
        return jax.vmap(lambda key: init(key, shape[1:], dtype))(jax.random.split(key, shape[0]))

    return draw
