"""HGRN2 (Qin et al. 2024): gated linear attention whose keys are tied to the forget gates.

    S_t = diag(f_t) S_(t-1) + (1 - f_t) v_t^T;    out_t = H^(-1/2) S_t^T q_t

The function is `gated_linear_attention` of `effattn.functional.gated_linear`, with the key 1 - f,
the log decay log f and its default scale, which the norm of the mixer cancels.
"""

from effattn import registry
from effattn.functional.gated_linear import gated_linear_attention

registry.register(
    registry.Mechanism(
        name="hgrn2",
        family="recurrent",
        paper="Qin et al. 2024, HGRN2: Gated Linear RNNs with State Expansion",
        function=gated_linear_attention,
        capabilities=frozenset({"causal"}),
        by_layer=lambda layer, num_layers: {"lower_bound": layer / num_layers},
        builder="effattn.nn.hgrn2:HGRN2",
        decoder="effattn.decode.recurrent:RecurrentDecoder",
        complexity="O(N H Hv)",
        time_exponent=1.0,
        knows_order=True,
    )
)
