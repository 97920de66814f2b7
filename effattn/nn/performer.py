"""Self-attention of Performer, with its random features."""

from typing import Any

from flax import nnx

from effattn.arrays import dtypes
from effattn.functional.performer import performer_features
from effattn.nn.attention import refuse
from effattn.nn.options import SelfAttentionOptions
from effattn.nn.self_attention import SelfAttention


class PerformerSelfAttention(SelfAttention):
    """Mixer with random features (Choromanski et al. 2020, "Rethinking Attention with Performers").

        q, k, v = x Wq, x Wk, x Wv;   y = performer_attention(q, k, v, projection=w) Wo

    The random vectors w of each key head are drawn at construction and are not trained: an
    `nnx.Variable`, not an `nnx.Param`. The paper redraws w from time to time during training: call
    `redraw` between training steps.

    Args:
      num_features: m, number of random features per key head. The error of the softmax
        approximation falls as m**-0.5.
      orthogonal: see `effattn.performer_features`.
      hyperbolic: see `effattn.performer_features`.
      rngs: random streams for parameter initialisation. The random vectors are drawn from the
        stream `features` if there is one, otherwise from the default stream.
      **options: as in `SelfAttention`, and options of `effattn.performer_attention`: `kernel` and
        `scale`.

    Raises:
      ValueError: as `SelfAttention` and `effattn.performer_features`.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        num_features: int = 256,
        orthogonal: bool = True,
        hyperbolic: bool = False,
        rngs: nnx.Rngs,
        **options: SelfAttentionOptions,
    ):
        advice = "it draws num_features random vectors, and redraw draws new ones"
        refuse(type(self), options, ("projection",), advice)
        super().__init__(in_features, num_heads, "performer", rngs=rngs, **options)
        self.num_features = num_features
        self.orthogonal = orthogonal
        self.hyperbolic = hyperbolic
        self.projection = nnx.Variable(self._draw(rngs))

    def redraw(self, rngs: nnx.Rngs) -> None:
        """Draws new random vectors; earlier decode states become invalid."""
        self.projection[...] = self._draw(rngs)

    def _draw(self, rngs: nnx.Rngs) -> Any:
        return performer_features(
            rngs.features(),
            self.num_features,
            self.head_dim,
            num_heads=self.num_kv_heads,
            orthogonal=self.orthogonal,
            hyperbolic=self.hyperbolic,
            dtype=dtypes.wide(self.param_dtype),
        )

    def _options(self) -> dict[str, Any]:
        return {**super()._options(), "projection": self.projection[...]}
