"""Factorised random Synthesizer (Tay et al. 2020): the random table is a product of two factors.

    y_t = sum_s softmax_s(a_t . r_s) v_s

for learned rows a_t and r_s of each position: `effattn.synthesizer_attention` with hidden = a.
"""

from effattn import registry
from effattn.functional.synthesizer import CAPABILITIES, entry, synthesizer_attention

registry.register(
    entry(
        name="synthesizer_factorized_random",
        function=synthesizer_attention,
        capabilities=CAPABILITIES,
        options={"kind": "factorized_random"},
        knows_order=True,
        complexity="O(N^2 (A + H)), O(N (A + H)) a step",
    )
)
