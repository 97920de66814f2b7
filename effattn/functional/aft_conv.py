"""AFT-conv (Zhai et al. 2021): attention-free mixing with a bias for each distance up to W.

    w_ts = taps_(t - s) if |t - s| <= W, else 0;    position_bias = taps, local_window_size = W

The formula and the function are those of `effattn.functional.attention_free`.
"""

from effattn import registry
from effattn.functional.attention_free import BOTH_WAYS, entry

registry.register(
    entry(
        name="aft_conv",
        capabilities=BOTH_WAYS,
        builder="effattn.nn.aft_conv:AFTConv",
        complexity="O(N W D), O(N D) a step",
        time_exponent=1.0,
        knows_order=True,
    )
)
