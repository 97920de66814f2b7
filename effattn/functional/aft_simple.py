"""AFT-simple (Zhai et al. 2021): attention-free mixing without biases.

    w_ts = 0

The formula and the function are those of `effattn.functional.attention_free`.
"""

from effattn import registry
from effattn.functional.attention_free import BOTH_WAYS, entry

registry.register(
    entry(
        name="aft_simple",
        capabilities=BOTH_WAYS,
        builder="effattn.nn.aft_simple:AFTSimple",
        complexity="O(N D)",
        time_exponent=1.0,
    )
)
