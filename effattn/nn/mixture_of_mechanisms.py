"""Mixer with a gate per token over several mechanisms."""

from collections.abc import Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from effattn.arrays import checks, dtypes
from effattn.decode.state import row_lengths
from effattn.nn import initializers
from effattn.nn.build import Mechanism, mechanism, named
from effattn.nn.hybrid import SeveralMixers
from effattn.nn.layers import Layers
from effattn.nn.options import Projected
from effattn.nn.tokens import valid_tokens


class MixtureOfMechanisms(SeveralMixers):
    """Mixture of mechanisms with a gate per token (Jacobs et al. 1991, "Adaptive Mixtures").

        y_t = sum_m g_tm mixer_m(x)_t,   g_t = softmax(x_t W_g + b_g)

    With `gate="top1"` the largest entry of g_t becomes 1 and the other entries 0; the gradient is
    that of the softmax (straight-through estimator, Bengio et al. 2013). Every mechanism computes
    outputs for all tokens; the gate selects or mixes the outputs. Add `penalty` to the loss to
    discourage costly mechanisms:

        penalty = mean_t sum_m g_tm cost_m

    Time, memory and decode state are the sums over the mechanisms.

    Args:
      num_heads: N, number of heads of every mechanism.
      mechanisms: two or more registered names, callables, or mappings of a `"name"` and options;
        see `effattn.nn.build`.
      costs: cost of each mechanism, 0 or more; default 0, 1, ... in the order of `mechanisms`.
      gate: "soft" or "top1".
      max_length: maximum number of tokens per row, for mechanisms with parameters per position.
      **options: those of `effattn.nn.options.Projected`, and model options for all mixers, such as
        `rotary` and `num_kv_heads`.

    Raises:
      ValueError: an unknown gate or mechanism, invalid costs, or an option that a mechanism does
        not support.
    """

    _mechanism = "mixture_of_mechanisms"

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        mechanisms: Sequence[Mechanism] = ("sliding_window", "softmax"),
        costs: Sequence[float] | None = None,
        gate: str = "soft",
        max_length: int | None = None,
        **options: Annotated[Any, Projected],
    ):
        super().__init__(in_features, **options)
        if gate not in ("soft", "top1"):
            raise ValueError(f'gate must be "soft" or "top1", got {gate!r}')
        several = mechanisms if isinstance(mechanisms, Sequence) else ()
        if len(several) < 2:
            raise ValueError(
                "mechanisms must be two or more registered names, callables, or mappings with a "
                f'"name", got {mechanisms!r}'
            )
        given = [named("each item of mechanisms", one) for one in several]
        costs = range(len(given)) if costs is None else costs
        costs = tuple(costs) if np.iterable(costs) else (costs,)
        needs = f"{len(given)} numbers, 0 or more, one for each mechanism"
        if len(costs) != len(given) or min(checks.real("costs", c, needs) for c in costs) < 0:
            raise ValueError(f"costs must be {needs}, got {costs}")
        self.gate, self.costs = gate, costs
        entries = [mechanism(name) for name, _ in given]
        self.names = tuple(entry.name for entry in entries)
        common = {"is_causal": self.is_causal, "max_length": max_length, **options}
        self.mixers = nnx.List(
            entry.build(in_features, num_heads, **{**entry.options_of_model(common), **own})
            for entry, (_, own) in zip(entries, given, strict=True)
        )
        make = Layers(**{**options, "kernel_init": initializers.kernel_init})
        self.choose = make.linear(in_features, len(entries), use_bias=True)

    def gates(self, x: jax.Array) -> jax.Array:
        """Gate values g of each token and mechanism.

        Args:
          x: `(B, T, D)`.

        Returns:
          `(B, T, M)`, rows that sum to 1, in at least float32.
        """
        logits = self.choose(x)
        soft = jax.nn.softmax(logits.astype(dtypes.wide(logits.dtype)), -1)
        if self.gate == "soft":
            return soft
        hard = jax.nn.one_hot(soft.argmax(-1), len(self.names), dtype=soft.dtype)
        # The parentheses make the value exactly 0 or 1.
        return hard + (soft - jax.lax.stop_gradient(soft))

    def penalty(
        self,
        x: jax.Array,
        *,
        lengths: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
    ) -> jax.Array:
        """Mean cost over valid tokens, a scalar `()`; arguments as in `__call__`."""
        if lengths is not None:
            lengths = row_lengths(lengths, *x.shape[:2])
        valid = valid_tokens(x.shape[1], lengths, segment_ids)
        valid = jnp.ones(x.shape[:2], bool) if valid is None else valid
        gates = self.gates(jnp.where(valid[..., None], x, 0))
        cost = gates @ jnp.asarray(self.costs, gates.dtype)
        return jnp.where(valid, cost, 0).sum() / jnp.maximum(valid.sum(), 1)

    def _mix_all(self, x, lengths, segment_ids):
        given = {"lengths": lengths, "segment_ids": segment_ids}
        return self._combined(x, [mixer(x, **given) for mixer in self.mixers])

    def _combined(self, x, outputs):
        gates = self.gates(x).astype(outputs[0].dtype)
        return sum(gates[..., m, None] * y for m, y in enumerate(outputs))
