"""Base class of mixers whose head outputs are normalised and gated."""

from typing import Any

import jax

from effattn.nn.self_attention import SelfAttention


class GatedOutput(SelfAttention):
    """Self-attention with the output (silu(gate(x)) * norm(o)) Wo; a subclass makes both layers."""

    gate: Any  # from `(B, T, D)` to `(B, T, N, Hv)`
    norm: Any

    def _finish(self, out: jax.Array, x: jax.Array) -> jax.Array:
        return self.out(jax.nn.silu(self.gate(x)) * self.norm(out))
