"""The recurrence of a cell, whose gates read the last output: LSTM, GRU and sLSTM.

For one head, with the token's parts u_t `(G, H)` of the pre-activations of G gates, recurrent
matrices R `(H, G, H)` and biases b `(G, H)`:

    carry_t, h_t = cell(u_t + h_(t-1) R + b, carry_(t-1))

- "lstm", gates i, f, g, o, carry (c, h): c_t = sigmoid(f) c_(t-1) + sigmoid(i) tanh(g),
  h_t = sigmoid(o) tanh(c_t).
- "gru", gates r, z, n, carry h: h_t = (1 - sigmoid(z)) n' + sigmoid(z) h_(t-1), where the two parts
  of n are added as n' = tanh(u_t + sigmoid(r) (h_(t-1) R + b)).
- "slstm", gates z, i, f, o, carry (c, n, h, m): with log f' = log sigmoid(f), or f in "slstm_exp",
  m_t = max(log f' + m_(t-1), i), c_t = exp(log f' + m_(t-1) - m_t) c_(t-1) + exp(i - m_t) tanh(z),
  n_t = exp(log f' + m_(t-1) - m_t) n_(t-1) + exp(i - m_t), h_t = sigmoid(o) c_t / n_t.
  Where n_(t-1) = 0, m_t = i. No gradient goes through m.

This module chooses the implementation. Each implementation is a module with a differentiable
function `cell_recurrence`, and with what `effattn.dispatch.Implementations` needs.
"""

import functools
from typing import Any

import jax

from effattn import dispatch
from effattn.interfaces.cell_recurrence import Config, Inputs

IMPLEMENTATIONS = dispatch.Implementations(
    "the recurrence of a cell",
    {
        "xla": "effattn.xla.cell_recurrence",
        "llvm": "effattn.llvm.cell_recurrence",
    },
)


def cell_recurrence(
    mechanism: str, config: Config, x: Inputs, *, implementation: Any = None
) -> tuple[jax.Array, jax.Array]:
    """Runs a cell over the tokens.

    Args:
      mechanism: name of the mechanism, for messages.
      config: static configuration.
      x: the operands; sums have the dtype of the carry.
      implementation: as in `effattn.options`.

    Returns:
      `(h (*B, T, N, H), carry after the token that is read last)`, in the dtype of the carry. A
      token that is not valid gets the h of the carry before it.
    """
    length = x.tokens.shape[-4]
    suited = dispatch.suited(config.dtype, length)
    call = IMPLEMENTATIONS.call(mechanism, config, x, lengths=(length,), suited=suited)
    chosen = dispatch.choose(implementation, call)
    return _compiled(chosen, config, *x)


@functools.partial(jax.jit, static_argnums=(0, 1))  # so that eager calls compile once
def _compiled(chosen, config, *operands):
    def form(module):
        return functools.partial(module.cell_recurrence, config)

    return IMPLEMENTATIONS.run(chosen, form, *operands)
