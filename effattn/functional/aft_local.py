"""AFT-local (Zhai et al. 2021): attention-free mixing with biases in a window of W tokens.

    w_ts = u_t . c_s if |t - s| <= W, else 0;    position_bias = (u, c), local_window_size = W

The formula and the function are those of `effattn.functional.attention_free`.
"""

from effattn import registry
from effattn.functional.attention_free import BOTH_WAYS, entry

registry.register(
    entry(
        name="aft_local",
        capabilities=BOTH_WAYS,
        builder="effattn.nn.aft_local:AFTLocal",
        complexity="O(N W D), O(N D) a step",
        time_exponent=1.0,
        knows_order=True,
    )
)
