"""Mixer with a gate per token over several mechanisms."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from effattn import registry
from effattn.arrays import checks, dtypes
from effattn.arrays.segments import within
from effattn.decode.state import new_lengths, row_lengths
from effattn.nn import initializers
from effattn.nn.hybrid import HybridState, check_groups
from effattn.nn.mixer import CausalMixer


class MixtureOfMechanisms(CausalMixer):
    """Mixture of mechanisms with a gate per token (Jacobs et al. 1991, "Adaptive Mixtures").

        y_t = sum_m g_tm mixer_m(x)_t,   g_t = softmax(x_t W_g + b_g)

    With `gate="top1"` the largest entry of g_t becomes 1 and the other entries 0; the gradient is
    that of the softmax (straight-through estimator, Bengio et al. 2013). Every mechanism computes
    outputs for all tokens; the gate selects or mixes the outputs. Add `penalty` to the loss to
    discourage costly mechanisms:

        penalty = mean_t sum_m g_tm cost_m

    Time, memory and decode state are the sums over the mechanisms.

    Args:
      in_features: D, number of features per token.
      num_heads: N, number of heads of every mechanism.
      mechanisms: two or more registered names, or mappings of a `"name"` and options.
      costs: cost of each mechanism, 0 or more; default 0, 1, ... in the order of `mechanisms`.
      gate: "soft" or "top1".
      max_length: maximum number of tokens per row, for mechanisms with parameters per position.
      is_causal: token t reads tokens 0 to t only.
      dropout_rate: must be 0.
      dtype: computation dtype; default is the promotion of the input and parameter dtypes.
      param_dtype: dtype of the parameters.
      kernel_init: initializer of the projections of every mechanism.
      out_kernel_init: initializer of all output projections; default `kernel_init`.
      rngs: random streams for parameter initialisation.
      **options: model options for all mixers, such as `rotary` and `num_kv_heads`.

    Raises:
      ValueError: an unknown gate or mechanism, invalid costs, or an option that a mechanism does
        not support.
    """

    _state = HybridState

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        mechanisms: Sequence[str | Mapping[str, Any]] = ("sliding_window", "softmax"),
        costs: Sequence[float] | None = None,
        gate: str = "soft",
        max_length: int | None = None,
        is_causal: bool = True,
        dropout_rate: float = 0.0,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Callable[..., Any] = initializers.kernel_init,
        out_kernel_init: Callable[..., Any] | None = None,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        super().__init__(
            in_features,
            "mixture_of_mechanisms",
            is_causal=is_causal,
            dropout_rate=dropout_rate,
            dtype=dtype,
            param_dtype=param_dtype,
        )
        if gate not in ("soft", "top1"):
            raise ValueError(f'gate must be "soft" or "top1", got {gate!r}')
        several = mechanisms if isinstance(mechanisms, Sequence) else ()
        given = [{"name": m} if isinstance(m, str) else m for m in several]
        if len(given) < 2 or any(not isinstance(m, Mapping) or "name" not in m for m in given):
            raise ValueError(
                'mechanisms must be two or more names, or mappings with a "name", got '
                f"{mechanisms!r}"
            )
        costs = range(len(given)) if costs is None else costs
        costs = tuple(costs) if np.iterable(costs) else (costs,)
        needs = f"{len(given)} numbers, 0 or more, one a mechanism"
        if len(costs) != len(given) or min(checks.real("costs", c, needs) for c in costs) < 0:
            raise ValueError(f"costs must be {needs}, got {costs}")
        self.gate, self.costs = gate, costs
        self.names = tuple(one["name"] for one in given)
        common = {
            "is_causal": is_causal,
            "max_length": max_length,
            "dtype": dtype,
            "param_dtype": param_dtype,
            "kernel_init": kernel_init,
            "out_kernel_init": out_kernel_init,
            **options,
        }
        mixers = []
        for one in given:
            own = {**one}
            entry = registry.get(own.pop("name"))
            mixers.append(
                entry.build(
                    in_features,
                    num_heads,
                    rngs=rngs,
                    **{**entry.options_of_model(common), **own},
                )
            )
        self.mixers = nnx.List(mixers)
        self.choose = nnx.Linear(
            in_features, len(mixers), dtype=dtype, param_dtype=param_dtype, rngs=rngs
        )

    def parts(self, x: jax.Array) -> list[tuple[Any, jax.Array]]:
        """The mixer of each mechanism, with its input tokens."""
        return [(mixer, x) for mixer in self.mixers]

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
        valid = jnp.ones(x.shape[:2], bool)
        if lengths is not None:
            valid &= within(row_lengths(lengths, *x.shape[:2]), x.shape[1])
        if segment_ids is not None:
            valid &= jnp.asarray(segment_ids) != 0
        gates = self.gates(jnp.where(valid[..., None], x, 0))
        cost = gates @ jnp.asarray(self.costs, gates.dtype)
        return jnp.where(valid, cost, 0).sum() / jnp.maximum(valid.sum(), 1)

    def _mix_all(self, x, lengths, segment_ids):
        given = {"lengths": lengths, "segment_ids": segment_ids}
        return self._mixed(x, [mixer(x, **given) for mixer in self.mixers])

    def _empty(self, batch, max_length, dtype):
        states = tuple(mixer.init_state(batch, max_length, dtype) for mixer in self.mixers)
        return HybridState(states, jnp.zeros((batch,), jnp.int32))

    def _check_shapes(self, state, batch):
        check_groups(state, len(self.mixers))

    def _extend(self, x, state, lengths):
        both = [
            mixer.extend(x, of_mixer, lengths=lengths)
            for mixer, of_mixer in zip(self.mixers, state.groups, strict=True)
        ]
        more = new_lengths(lengths, *x.shape[:2])
        outputs, states = zip(*both, strict=True)
        return self._mixed(x, outputs), HybridState(states, state.length + more)

    def _mixed(self, x, outputs):
        gates = self.gates(x).astype(outputs[0].dtype)
        return sum(gates[..., m, None] * y for m, y in enumerate(outputs))
