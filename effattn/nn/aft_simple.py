"""AFT-simple mixer."""

from effattn.functional.attention_free import attention_free
from effattn.nn.attention_free import AFT
from effattn.nn.recurrent import RecurrentMixer


class AFTSimple(AFT, RecurrentMixer):
    """AFT without position biases (Zhai et al. 2021, "An Attention Free Transformer").

        y = attention_free(x W_q, x W_k, x W_v) W_o

    Time is O(T D^2); the decode state has 3 D numbers per row.

    Args:
      **options: see `effattn.nn.options.Projected`.
    """

    _mechanism = "aft_simple"

    def _mix(self, x, state, lengths, segment_ids):
        with_state = {"initial_state": state, "return_state": True} if self.is_causal else {}
        mixed = attention_free(
            *(project(x) for project in (self.query, self.key, self.value)),
            is_causal=self.is_causal,
            lengths=lengths,
            segment_ids=segment_ids,
            **with_state,
        )
        y, state = mixed if self.is_causal else (mixed, None)
        return self.out(y), state
