"""AFT-full (Zhai et al. 2021): attention-free mixing with a bias for each pair of positions.

    w_ts = u_t . c_s,    position_bias = (u, c)

The formula and the function are those of `effattn.functional.attention_free`.
"""

from effattn import registry
from effattn.functional.attention_free import BOTH_WAYS, entry

registry.register(
    entry(
        name="aft_full",
        capabilities=BOTH_WAYS,
        builder="effattn.nn.aft_full:AFTFull",
        complexity="O(N^2 D), O(N D) a step",
        time_exponent=2.0,
        knows_order=True,
    )
)
