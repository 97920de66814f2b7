"""Mixer with the matrix memory of the xLSTM."""

import jax
from flax import nnx

from effattn.arrays import checks, dtypes
from effattn.nn.attention import refuse
from effattn.nn.initializers import forget_bias_init
from effattn.nn.layers import Layers
from effattn.nn.options import SelfAttentionOptions
from effattn.nn.self_attention import SelfAttention

FORGET_GATES = ("sigmoid", "exp")


class MLSTM(SelfAttention):
    """Mixer with the matrix memory of the xLSTM (Beck et al. 2024, "xLSTM").

        q, k, v = x Wq, x Wk, x Wv;   log i = x Wi + bi;   log f = log sigmoid(x Wf + bf)
        y = (sigmoid(x Wr + br) * norm(mlstm_attention(q, k, v, log i, log f))) Wo

    `norm` is a layer norm of each head with a learned scale. Wi and Wf start at zero, and the
    biases of forget gates between 3 and 6, so that heads start with shorter and longer memories.

    Args:
      forget_gate: activation of the forget gate, "sigmoid" or "exp".
      **options: as in `SelfAttention`, and options of `effattn.mlstm_attention`.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        forget_gate: str = "sigmoid",
        **options: SelfAttentionOptions,
    ):
        refuse(
            type(self),
            options,
            ("log_input_gate", "log_forget_gate"),
            "it computes the gates from the tokens",
        )
        checks.one_of("forget_gate", forget_gate, FORGET_GATES)
        super().__init__(in_features, num_heads, "mlstm", **options)
        self.forget_gate = forget_gate
        make = Layers(**options)

        def gate(bias_init):
            zeros = nnx.initializers.zeros
            sizes = in_features, self.num_kv_heads
            return make.heads(*sizes, use_bias=True, kernel_init=zeros, bias_init=bias_init)

        self.input = gate(nnx.initializers.normal(0.1))
        self.forget = gate(forget_bias_init)
        self.gate = make.heads(in_features, (num_heads, self.value_dim), use_bias=True)
        self.norm = make.layer_norm(self.value_dim, use_bias=False)

    def _per_token(self, x: jax.Array) -> dict[str, jax.Array]:
        # At least float32, since log decays are summed over many tokens.
        log_input, forget = (dtypes.widen(logits) for logits in (self.input(x), self.forget(x)))
        log_forget = jax.nn.log_sigmoid(forget) if self.forget_gate == "sigmoid" else forget
        return {"log_input_gate": log_input, "log_forget_gate": log_forget}

    def _finish(self, out: jax.Array, x: jax.Array) -> jax.Array:
        return self.out(jax.nn.sigmoid(self.gate(x)) * self.norm(out))
