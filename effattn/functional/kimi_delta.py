"""Kimi delta attention (Kimi Team 2025): the delta rule with a decay for each key feature.

    S_t = (I - beta_t k_t k_t^T) diag(alpha_t) S_(t-1) + beta_t k_t v_t^T

The function is `delta_rule_attention` of `effattn.functional.delta_net`, with `log_decay` of shape
`(*B, T, K, H)`.
"""

from effattn import registry
from effattn.functional.delta_net import delta_rule_attention

registry.register(
    registry.Mechanism(
        name="kimi_delta",
        family="recurrent",
        paper="Kimi Team 2025, Kimi Linear: An Expressive, Efficient Attention Architecture",
        function=delta_rule_attention,
        capabilities=frozenset({"causal"}),
        builder="effattn.nn.kimi_delta:KimiDeltaAttention",
        decoder="effattn.decode.recurrent:RecurrentDecoder",
        complexity="O(N H Hv)",
        time_exponent=1.0,
        knows_order=True,
    )
)
