"""Gated DeltaNet (Yang, Kautz and Hatamizadeh 2024): the delta rule on a state that decays.

    S_t = alpha_t (I - beta_t k_t k_t^T) S_(t-1) + beta_t k_t v_t^T

The formula and the function are those of `effattn.functional.delta_net`, with `log_decay`.
"""

from effattn import registry
from effattn.functional.delta_net import delta_rule_attention

registry.register(
    registry.Mechanism(
        name="gated_delta_net",
        family="recurrent",
        paper="Yang, Kautz and Hatamizadeh 2024, Gated Delta Networks: Improving Mamba2 with "
        "Delta Rule",
        function=delta_rule_attention,
        capabilities=frozenset({"causal"}),
        builder="effattn.nn.gated_delta_net:GatedDeltaNet",
        decoder="effattn.decode.recurrent:RecurrentDecoder",
        complexity="O(N H Hv)",
        time_exponent=1.0,
        knows_order=True,
    )
)
