"""FNet mixer."""

from typing import Any

from effattn.functional.fnet import fourier_mixing
from effattn.nn.mixer import Mixer


class FNet(Mixer):
    """Mixer without parameters: real part of the Fourier transform over tokens and features.

    Lee-Thorp et al. 2022, "FNet: Mixing Tokens with Fourier Transforms"; see
    `effattn.fourier_mixing`. The mixer is bidirectional and does not support padding. As in the
    paper, tokens need position embeddings, which a `Transformer` adds.

    Args:
      norm: as in `effattn.fourier_mixing`; "ortho" for pre-norm models, `TransformerLM` among them.
      is_causal: must be False.
      dropout_rate, dtype: see `effattn.nn.options.Mixing`; `dtype` is also that of the output.
      rngs: unused; every mixer accepts `rngs`.
    """

    _mechanism = "fnet"
    _of_known_length = True

    def __init__(
        self,
        in_features: int,
        *,
        norm: str = "backward",
        is_causal: bool = False,
        dropout_rate: float = 0.0,
        dtype: Any = None,
        rngs: Any = None,
    ):
        super().__init__(in_features, is_causal=is_causal, dropout_rate=dropout_rate, dtype=dtype)
        if norm not in ("backward", "ortho"):
            raise ValueError(f'norm must be "backward" or "ortho", got {norm!r}')
        self.norm = norm

    def _mix_all(self, x, lengths, segment_ids):
        x = x if self.dtype is None else x.astype(self.dtype)
        return fourier_mixing(x, norm=self.norm)
