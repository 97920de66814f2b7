"""Mixture of dense Synthesizer and dot-product attention (Tay et al. 2020).

    y_t = sum_s softmax_s(alpha h_t . r_s + (1 - alpha) H**-0.5 q_t . k_s) v_s

for a learned share alpha of each head: `effattn.synthesizer_attention` with
hidden = [alpha h, (1 - alpha) H**-0.5 q] and table = [r, k].
"""

from effattn import registry
from effattn.functional.synthesizer import CAPABILITIES, entry, synthesizer_attention

registry.register(
    entry(
        name="synthesizer_mixture",
        function=synthesizer_attention,
        capabilities=CAPABILITIES,
        options={"kind": "mixture"},
        complexity="O(N^2 (A + H)), O(N (A + H)) a step",
    )
)
