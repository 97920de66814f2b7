"""Decoding of log-linear attention: a state for each level, whatever the number of tokens."""

import dataclasses

import jax

from effattn.decode.decoder import Sizes
from effattn.decode.recurrent import RecurrentDecoder


@dataclasses.dataclass(frozen=True)
class LogLinearDecoder(RecurrentDecoder):
    """Decodes `log_linear_attention`, whose `levels` belong to the queries."""

    def _empty(self, sizes: Sizes, **per_token):
        levels = per_token["levels"]
        shape = (*levels.shape[:2], sizes.key_heads, levels.shape[-1])
        per_token["levels"] = jax.ShapeDtypeStruct(shape, levels.dtype)
        return super()._empty(sizes, **per_token)
