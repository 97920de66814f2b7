"""Lightning attention (Qin et al. 2024): retention whose decays depend on the head and the layer.

    S_t = lambda S_(t-1) + k_t v_t^T;    out_t = S_t^T q_t

The function is `retention` of `effattn.functional.retention`, with `scale=1` and other values of
`log_decay`.
"""

from effattn import registry
from effattn.functional.retention import retention

registry.register(
    registry.Mechanism(
        name="lightning",
        family="recurrent",
        paper="Qin et al. 2024, Various Lengths, Constant Speed: Efficient Language Modeling with "
        "Lightning Attention",
        function=retention,
        capabilities=frozenset({"causal"}),
        by_layer=lambda layer, num_layers: {"depth": layer / max(num_layers - 1, 1)},
        builder="effattn.nn.lightning:LightningAttention",
        decoder="effattn.decode.recurrent:RecurrentDecoder",
        complexity="O(N H Hv)",
        time_exponent=1.0,
        knows_order=True,
    )
)
