"""Base class of the RWKV mixers with heads: token shift, projections and a layer norm per head."""

from typing import Unpack

import numpy as np

from effattn.arrays import dtypes
from effattn.arrays.axes import lead
from effattn.nn.heads import head_size, key_heads
from effattn.nn.layers import Layers
from effattn.nn.options import Recurrent
from effattn.nn.recurrent import FunctionMixer
from effattn.nn.token_shift import check_depth, token_shift


class TimeMixing(FunctionMixer):
    """Base class of `RWKV6` and `RWKV7`: token shift, projections and a layer norm per head."""

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        head_dim: int | None,
        num_kv_heads: int | None,
        depth: float,
        **options: Unpack[Recurrent],
    ):
        super().__init__(in_features, **options)
        self.head_dim = head_size(in_features, num_heads, head_dim)
        self.num_heads = num_heads
        self.num_kv_heads = key_heads(num_heads, num_kv_heads)
        check_depth(depth)
        make = Layers(**options)
        inner, of_keys = num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.receptance = make.linear(in_features, inner)
        self.key, self.value = (make.linear(in_features, of_keys) for _ in range(2))
        self.norm = make.layer_norm(self.head_dim, epsilon=64e-5, use_scale=False, use_bias=False)
        self.norm_scale = make.constant(np.ones(inner))
        self.norm_bias = make.constant(np.zeros(inner))
        self.out = make.out(inner, in_features)

    def _shifted(self, x, before, lengths, segment_ids):
        """Returns x, x' - x and the last token; x' is the previous token of each token."""
        dtype = dtypes.common(x, self.norm_scale[...]) if self.dtype is None else self.dtype
        shifted, last = token_shift(x, before, lengths=lengths, segment_ids=segment_ids)
        x, shifted = x.astype(dtype), shifted.astype(dtype)
        return x, shifted - x, last

    def _heads(self, projected, heads):
        return projected.reshape(*projected.shape[:2], heads, self.head_dim)

    def _normalised(self, out):
        """Normalises each head: `(B, T, N, H)` to `(B, T, N H)`."""
        out = self.norm(out).reshape(*out.shape[:2], self.num_heads * self.head_dim)
        scale, bias = (lead(p[...], 3).astype(out.dtype) for p in (self.norm_scale, self.norm_bias))
        return out * scale + bias
