"""Mixer with a different mechanism in each group of heads."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from effattn.arrays import checks, mesh_axes
from effattn.decode.state import check_state, new_lengths
from effattn.nn import initializers
from effattn.nn.build import mechanism, named
from effattn.nn.dropout import dropout_key
from effattn.nn.heads import head_size, key_heads
from effattn.nn.mixer import CausalMixer
from effattn.nn.module import Module
from effattn.nn.tokens import with_global_mask
from effattn.parallel.mixers import divided


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HybridState:
    """Decode state of a mixer that consists of several mixers, such as `HybridHeads`.

    Attributes:
      groups: the decode state of each part.
      length: `(B,)` int32, number of tokens read.
    """

    groups: tuple[Any, ...]
    length: jax.Array

    @property
    def parts(self) -> tuple[Any, ...]:
        """The states of the parts, which `forget` changes."""
        return self.groups

    def forget(self, n: jax.Array, most: int) -> "HybridState":
        """The state without the last n tokens of each row, at most `most`."""
        groups = tuple(group.forget(n, most) for group in self.groups)
        return dataclasses.replace(self, groups=groups, length=self.length - n)


class SeveralMixers(CausalMixer):
    """Base class of mixers that give all tokens to several mixers, and combine their outputs.

    A subclass sets `mixers`, an `nnx.List`, and implements `_combined`.
    """

    mixers: Any

    @property
    def calls_each_alone(self) -> bool:
        """True if the output of a token needs the outputs of the mixers for this token alone."""
        return True

    def _combined(self, x: jax.Array, outputs: Sequence[jax.Array]) -> jax.Array:
        """Output `(B, T, D)` from the tokens and the output of each mixer."""
        raise NotImplementedError

    def parts(self, x: jax.Array) -> list[tuple[Any, jax.Array]]:
        """Each mixer, with its input tokens."""
        return [(mixer, x) for mixer in self.mixers]

    def _outputs(
        self, x: jax.Array, padding: Mapping[str, Any], global_mask: jax.Array | None = None
    ) -> list[jax.Array]:
        """The output of each mixer; devices that divide the tokens exchange what each needs."""
        return [
            divided(mixer, x)(x, **padding, **with_global_mask(mixer, global_mask))
            for mixer in self.mixers
        ]

    def _initial(self, batch, max_length, dtype):
        groups = tuple(mixer.init_state(batch, max_length, dtype) for mixer in self.mixers)
        return HybridState(groups, jnp.zeros((batch,), jnp.int32))

    def _check_state(self, state, batch):
        check_state(state, HybridState, batch)
        if len(state.groups) != len(self.mixers):
            raise ValueError(
                f"state has {len(state.groups)} parts, and this {type(self).__name__} needs "
                f"{len(self.mixers)}; it is the state of another layer"
            )

    def _extend(self, x, state, lengths, global_mask=None):
        extended = [
            mixer.extend(x, group, lengths=lengths, **with_global_mask(mixer, global_mask))
            for mixer, group in zip(self.mixers, state.groups, strict=True)
        ]
        outputs, groups = zip(*extended, strict=True)
        length = state.length + new_lengths(lengths, *x.shape[:2])
        return self._combined(x, outputs), HybridState(groups, length)


class HybridHeads(SeveralMixers):
    """Mixer with a different mechanism in each group of heads.

        y = sum_g mixer_g(x),

    which equals one output projection of the concatenated heads. A layer can combine local and
    global heads, as in the Routing Transformer (Roy et al. 2020) and in Hymba (Dong et al. 2024).

    Args:
      in_features: D, number of features per token.
      num_heads: N, total number of query heads.
      groups: one mapping per group of heads, in head order: "name", a registered mechanism (or a
        callable, see `effattn.nn.build`), "num_heads", the number of heads in the group, and
        options of the group's mixer:
        `[{"name": "softmax", "num_heads": 2}, {"name": "sliding_window", "num_heads": 6}]`.
      num_kv_heads: K, total number of key heads, a divisor of N; split among groups in proportion
        to their query heads. Default: the default of each group's mixer.
      head_dim: H, head dimension; default D / N.
      kernel_init: initializer of the projections.
      out_kernel_init: initializer of the output projection; default `kernel_init`.
      score_mod: `score_mod` of all groups; its argument h is the head index among all N heads.
      rngs: random streams for parameter initialisation.
      **options: options of all groups' mixers; options in a group's mapping override them.

    Raises:
      ValueError: groups whose heads do not sum to N, or options that a mixer does not support.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        groups: Sequence[Mapping[str, Any]],
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        kernel_init: Callable[..., Any] = initializers.kernel_init,
        out_kernel_init: Callable[..., Any] | None = None,
        score_mod: Callable[..., Any] | None = None,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        if not isinstance(groups, Sequence):
            raise ValueError(f"groups must be a sequence of mappings, got {groups!r}")
        for group in groups:
            if not isinstance(group, Mapping) or not checks.is_integer(group.get("num_heads")):
                raise ValueError(
                    "each item of groups must be a mapping with a mechanism's "
                    f'"name" and its "num_heads", an int, got {group!r}'
                )
        sizes = [group["num_heads"] for group in groups]
        shared = num_heads // key_heads(num_heads, num_kv_heads)
        if (
            not groups
            or min(sizes) < 1
            or sum(sizes) != num_heads
            or any(n % shared for n in sizes)
        ):
            raise ValueError(
                f"groups must have {num_heads} heads together, and each group a multiple of "
                f"{shared}, the number of query heads of a key head, got {sizes}"
            )
        head_dim = head_size(in_features, num_heads, head_dim)
        mixers, names, first = [], [], 0
        for group, size in zip(groups, sizes, strict=True):
            name, of_group = named("each item of groups", group)
            entry = mechanism(name)
            names.append(entry.name)
            del of_group["num_heads"]
            if score_mod is not None:
                of_group = {"score_mod": OfHeads(score_mod, first), **of_group}
            if num_kv_heads is not None:
                of_group = {"num_kv_heads": size // shared, **of_group}
            if not entry.mixer_takes("head_dim"):
                raise ValueError(
                    f"groups must have mixers that take head_dim, but the mixer of {entry.name!r} "
                    "does not; use it alone in a layer"
                )
            mixer = entry.build(
                in_features,
                size,
                head_dim=head_dim,
                kernel_init=kernel_init,
                # Initially the sum of the groups has the variance of one projection of all heads.
                out_kernel_init=_scaled(out_kernel_init or kernel_init, (size / num_heads) ** 0.5),
                rngs=rngs,
                **{**entry.options_of_model(options), **of_group},
            )
            mixers.append(mixer)
            first += size
        directions = [getattr(mixer, "is_causal", True) for mixer in mixers]
        if len(set(directions)) > 1:
            raise ValueError(
                "groups must all have the same is_causal, got "
                + ", ".join(f"{n} {d}" for n, d in zip(names, directions, strict=True))
            )
        self.in_features, self.is_causal = in_features, directions[0]
        self.mixers = nnx.List(mixers)

    @mesh_axes.on_mesh_of_input
    def __call__(
        self,
        x: jax.Array,
        *,
        lengths: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        global_mask: jax.Array | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
    ) -> jax.Array:
        """Mixes whole sequences; arguments as in `SelfAttention`.

        `global_mask` is for the groups that take it, see `LongformerSelfAttention`.
        """
        key, given = dropout_key(rngs), {"lengths": lengths, "segment_ids": segment_ids}
        self._check_mask(global_mask)
        if key is None:
            return self._combined(x, self._outputs(x, given, global_mask))
        pairs = zip(self.mixers, jax.random.split(key, len(self.mixers)), strict=True)
        outputs = [
            mixer(x, **given, **with_global_mask(mixer, global_mask), rngs=key)
            for mixer, key in pairs
        ]
        return self._combined(x, outputs)

    def extend(
        self,
        x: jax.Array,
        state: Any,
        *,
        lengths: jax.Array | None = None,
        global_mask: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        """Mixes new tokens that follow `state`; arguments as in `SelfAttention` and `__call__`."""
        self._check_mask(global_mask)
        return self._extended(x, state, lengths, global_mask)

    @property
    def takes_global_mask(self) -> bool:
        """True if a group takes `global_mask`."""
        return any(getattr(mixer, "takes_global_mask", False) for mixer in self.mixers)

    def _check_mask(self, global_mask):
        if global_mask is not None and not self.takes_global_mask:
            raise ValueError(
                "global_mask was given, but no group takes it; give one the mixer 'longformer' "
                "with max_global, or leave global_mask out"
            )

    def _combined(self, x, outputs):
        return sum(outputs)


class OfHeads(Module):
    """`score_mod` of a group of heads; the group starts at head `first` of the layer."""

    def __init__(self, score_mod: Callable[..., Any], first: int):
        self.score_mod = score_mod
        self.first = first
        self.is_causal = getattr(score_mod, "is_causal", False)

    def __call__(self, logit: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        """Calls `score_mod` with the layer's head index `first + h`."""
        return self.score_mod(logit, b, h + np.int32(self.first), i, j)


def _scaled(init: Callable[..., Any], factor: float) -> Callable[..., Any]:
    def scaled(key, shape, *args, **kwargs):
        drawn = init(key, shape, *args, **kwargs)
        if isinstance(drawn, nnx.VariableMetadata):
            return dataclasses.replace(drawn, raw_value=drawn.raw_value * factor)
        return drawn * factor

    return scaled
