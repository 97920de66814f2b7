"""effattn: efficient attention for JAX, every mechanism once, with one contract.

The functions are here; `effattn.patterns` holds the pairs that may attend, `effattn.nn` the Flax
modules, `effattn.decode` the states of decoding and `effattn.analysis` pictures of it all. They
are imported on first use. `effattn.advise` and `python -m effattn` help to choose a mechanism.
"""

import importlib
from typing import TYPE_CHECKING

from effattn import registry
from effattn.arrays.combine import combine
from effattn.functional.softmax import dot_product_attention

from effattn.functional.additive import additive_attention  # isort: skip
from effattn.functional.sigmoid import sigmoid_attention  # isort: skip
from effattn.functional.squared_relu import squared_relu_attention  # isort: skip
from effattn.functional.forgetting import forgetting_attention  # isort: skip
from effattn.functional.selective import selective_attention  # isort: skip
from effattn.functional.differential import differential_attention  # isort: skip
import effattn.functional.latent  # isort: skip
import effattn.functional.gated_attention  # isort: skip
from effattn.functional.stick_breaking import stick_breaking_attention  # isort: skip
from effattn.functional.entmax import entmax_attention  # isort: skip
from effattn.functional.talking_heads import talking_heads_attention  # isort: skip
from effattn.functional.path import path_attention  # isort: skip
from effattn.functional.sliding_window import sliding_window_attention  # isort: skip
import effattn.functional.dilated  # isort: skip
from effattn.functional.longformer import longformer_attention  # isort: skip
from effattn.functional.streaming import streaming_attention  # isort: skip
from effattn.functional.adaptive_span import adaptive_span_attention  # isort: skip
from effattn.functional.sparse_transformer import sparse_transformer_attention  # isort: skip
from effattn.functional.block_sparse import block_sparse_attention  # isort: skip
from effattn.functional.bigbird import bigbird_attention  # isort: skip
from effattn.functional.random import random_attention  # isort: skip
from effattn.functional.hierarchical import hierarchical_attention  # isort: skip
from effattn.functional.moba import moba_attention  # isort: skip
from effattn.functional.learned_blocks import learned_block_attention, sampled_block_attention  # isort: skip
from effattn.functional.native_sparse import native_sparse_attention  # isort: skip
from effattn.functional.sinkhorn import sinkhorn_attention  # isort: skip
from effattn.functional.indexed import indexed_attention  # isort: skip
from effattn.functional.sparse import sparse_attention  # isort: skip
from effattn.functional.linear import linear_attention  # isort: skip
from effattn.functional.retention import retention  # isort: skip
from effattn.functional.gated_linear import gated_linear_attention  # isort: skip
from effattn.functional.mamba2 import state_space_duality  # isort: skip
from effattn.functional.mamba3 import TrapezoidalState, trapezoidal_scan  # isort: skip
from effattn.functional.rwkv6 import rwkv6_attention  # isort: skip
from effattn.functional.mamba import selective_scan  # isort: skip
from effattn.functional.delta_net import delta_rule_attention  # isort: skip
import effattn.functional.gated_delta_net  # isort: skip
from effattn.functional.delta_product import delta_product_attention  # isort: skip
import effattn.functional.kimi_delta  # isort: skip
from effattn.functional.gated_delta_net_2 import gated_delta_rule_2_attention  # isort: skip
import effattn.functional.lightning  # isort: skip
import effattn.functional.hgrn2  # isort: skip
from effattn.functional.log_linear import LogLinearState, log_linear_attention  # isort: skip
from effattn.functional.gated_slot import GatedSlotState, gated_slot_attention  # isort: skip
from effattn.functional.mlstm import MLSTMState, mlstm_attention  # isort: skip
from effattn.functional.mesa import MesaState, mesa_attention  # isort: skip
from effattn.functional.ttt_linear import TTTState, ttt_linear_attention  # isort: skip
from effattn.functional.titans import TitansState, titans_memory  # isort: skip
from effattn.functional.rwkv7 import rwkv7_attention  # isort: skip
from effattn.functional.performer import (  # isort: skip
    PerformerState,
    performer_attention,
    performer_features,
)
from effattn.functional.random_features import random_feature_attention  # isort: skip
from effattn.functional.based import based_attention  # isort: skip
from effattn.functional.cosformer import cosformer_attention  # isort: skip
from effattn.functional.hedgehog import hedgehog_attention  # isort: skip
from effattn.functional.linformer import linformer_attention  # isort: skip
from effattn.functional.block_linformer import block_linformer_attention  # isort: skip
from effattn.functional.long_short import long_short_attention  # isort: skip
from effattn.functional.luna import LunaState, luna_attention  # isort: skip
from effattn.functional.nystrom import nystrom_attention  # isort: skip
from effattn.functional.lsh import lsh_attention, lsh_rotations  # isort: skip
from effattn.functional.routing import routing_attention  # isort: skip
from effattn.functional.fnet import fourier_mixing  # isort: skip
from effattn.functional.rwkv4 import rwkv4_mixing  # isort: skip
from effattn.functional.rg_lru import rg_lru  # isort: skip
from effattn.functional.attention_free import attention_free  # isort: skip
import effattn.functional.aft_full  # isort: skip
import effattn.functional.aft_simple  # isort: skip
import effattn.functional.aft_local  # isort: skip
import effattn.functional.aft_conv  # isort: skip
from effattn.functional.hyena import hyena_convolution  # isort: skip
from effattn.functional.long_convolution import long_convolution  # isort: skip
from effattn.functional.synthesizer import synthesizer_attention  # isort: skip
from effattn.functional.synthesizer_factorized import factorized_synthesizer_attention  # isort: skip
import effattn.functional.synthesizer_random  # isort: skip
import effattn.functional.synthesizer_factorized_random  # isort: skip
import effattn.functional.synthesizer_mixture  # isort: skip
from effattn.functional.gmlp import spatial_gating  # isort: skip
import effattn.functional.mixture_of_mechanisms  # isort: skip
import effattn.functional.bidirectional  # isort: skip
import effattn.functional.convolution_attention  # isort: skip
import effattn.functional.recurrent_memory  # isort: skip
import effattn.functional.transformer_xl  # isort: skip
import effattn.functional.compressive  # isort: skip
import effattn.functional.mega  # isort: skip
import effattn.functional.inducing_points  # isort: skip
from effattn.functional.infini import infini_attention  # isort: skip
import effattn.functional.lstm  # isort: skip
import effattn.functional.slstm  # isort: skip
import effattn.functional.gru  # isort: skip
import effattn.functional.convolution  # isort: skip
import effattn.llvm  # isort: skip
from effattn.functional.s4d import s4_convolution  # isort: skip
from effattn.functional.h3 import h3_mixing  # isort: skip
from effattn.functional.s5 import s5_scan  # isort: skip
import effattn.functional.s4  # noqa: F401  # isort: skip
from effattn.functional.paged import paged_attention, quantize_pages  # isort: skip
from effattn.arrays.segments import (
    positions_from_segment_ids,
    segment_ids_from_cu_seqlens,
    segment_ids_from_lengths,
)
from effattn.dispatch.support import support
from effattn.dispatch.tuning import tune
from effattn.patterns.layouts import BlockLayout

if TYPE_CHECKING:
    from effattn import analysis, decode, naive, nn, parallel, patterns, testing
    from effattn.advice.ranking import advise
    from effattn.analysis.kernels import check

__version__ = "0.1.0"

__all__ = [
    "BlockLayout",
    "GatedSlotState",
    "LogLinearState",
    "LunaState",
    "MLSTMState",
    "MesaState",
    "PerformerState",
    "TTTState",
    "TitansState",
    "TrapezoidalState",
    "adaptive_span_attention",
    "additive_attention",
    "advise",
    "analysis",
    "attention_free",
    "based_attention",
    "bigbird_attention",
    "block_linformer_attention",
    "block_sparse_attention",
    "check",
    "combine",
    "cosformer_attention",
    "decode",
    "delta_product_attention",
    "delta_rule_attention",
    "differential_attention",
    "dot_product_attention",
    "entmax_attention",
    "factorized_synthesizer_attention",
    "forgetting_attention",
    "fourier_mixing",
    "gated_delta_rule_2_attention",
    "gated_linear_attention",
    "gated_slot_attention",
    "h3_mixing",
    "hedgehog_attention",
    "hierarchical_attention",
    "hyena_convolution",
    "indexed_attention",
    "infini_attention",
    "learned_block_attention",
    "linear_attention",
    "linformer_attention",
    "log_linear_attention",
    "long_convolution",
    "long_short_attention",
    "longformer_attention",
    "lsh_attention",
    "lsh_rotations",
    "luna_attention",
    "mesa_attention",
    "mlstm_attention",
    "moba_attention",
    "naive",
    "native_sparse_attention",
    "nn",
    "nystrom_attention",
    "paged_attention",
    "parallel",
    "path_attention",
    "patterns",
    "performer_attention",
    "performer_features",
    "positions_from_segment_ids",
    "quantize_pages",
    "random_attention",
    "random_feature_attention",
    "registry",
    "retention",
    "rg_lru",
    "routing_attention",
    "rwkv4_mixing",
    "rwkv6_attention",
    "rwkv7_attention",
    "s4_convolution",
    "s5_scan",
    "sampled_block_attention",
    "segment_ids_from_cu_seqlens",
    "segment_ids_from_lengths",
    "selective_attention",
    "selective_scan",
    "sigmoid_attention",
    "sinkhorn_attention",
    "sliding_window_attention",
    "sparse_attention",
    "sparse_transformer_attention",
    "spatial_gating",
    "squared_relu_attention",
    "state_space_duality",
    "stick_breaking_attention",
    "streaming_attention",
    "support",
    "synthesizer_attention",
    "talking_heads_attention",
    "testing",
    "titans_memory",
    "trapezoidal_scan",
    "ttt_linear_attention",
    "tune",
]

_LOADED = {"advise": "effattn.advice.ranking:advise", "check": "effattn.analysis.kernels:check"}
_LAZY = ("analysis", "decode", "naive", "nn", "parallel", "patterns", "testing")

if not TYPE_CHECKING:  # where every name that it does not know would be one of these

    def __getattr__(name: str):
        if name in _LAZY:
            return importlib.import_module(f"effattn.{name}")
        if name in _LOADED:
            return registry.load(_LOADED[name])
        raise AttributeError(f"module 'effattn' has no attribute {name!r}")


def __dir__():
    return sorted([*globals(), *_LOADED, *_LAZY])
