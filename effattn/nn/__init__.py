"""Flax NNX modules: mixers for every mechanism, Transformers, and adapters for Flax layers."""

from effattn.decode.generate import generate
from effattn.nn.adapters import as_attention_fn
from effattn.nn.adaptive_span import AdaptiveSpanSelfAttention
from effattn.nn.additive import AdditiveCrossAttention, AdditiveSelfAttention
from effattn.nn.aft_conv import AFTConv
from effattn.nn.aft_full import AFTFull
from effattn.nn.aft_local import AFTLocal
from effattn.nn.aft_simple import AFTSimple
from effattn.nn.alibi import Alibi, alibi_slopes
from effattn.nn.based import BasedSelfAttention
from effattn.nn.bidirectional import Bidirectional
from effattn.nn.block import Block
from effattn.nn.block_linformer import BlockLinformerSelfAttention
from effattn.nn.channel_mixing import RWKV4ChannelMix, RWKV6ChannelMix, RWKV7ChannelMix
from effattn.nn.compressive import CompressiveAttention, CompressiveState
from effattn.nn.configuration import TransformerConfig
from effattn.nn.convert import Conversion, conversion, convert
from effattn.nn.convolution import DilatedConvolution
from effattn.nn.convolution_attention import ConvolutionAttention
from effattn.nn.convolutional_classifier import ConvolutionalClassifier
from effattn.nn.cross_attention import CrossAttention
from effattn.nn.delta_net import DeltaNet
from effattn.nn.delta_product import GatedDeltaProduct
from effattn.nn.delta_rule import DeltaRuleState
from effattn.nn.differential import DifferentialSelfAttention
from effattn.nn.encoder_decoder import (
    EncoderDecoder,
    EncoderDecoderConfig,
    EncoderDecoderState,
)
from effattn.nn.experts import Experts, MixtureOfExperts, RoutingStats, expert_specs
from effattn.nn.feed_forward import ChunkedFeedForward, FeedForward, SwiGLU
from effattn.nn.fnet import FNet
from effattn.nn.forgetting import ForgettingAttention
from effattn.nn.gated_delta_net import GatedDeltaNet
from effattn.nn.gated_delta_net_2 import GatedDeltaNet2
from effattn.nn.gated_linear import GatedLinearAttention
from effattn.nn.gated_self_attention import GatedSelfAttention
from effattn.nn.gated_slot import GatedSlotAttention
from effattn.nn.gmlp import GatedMLP
from effattn.nn.gru import GRU
from effattn.nn.h3 import H3
from effattn.nn.hedgehog import HedgehogSelfAttention
from effattn.nn.hgrn2 import HGRN2
from effattn.nn.hybrid import HybridHeads, HybridState
from effattn.nn.hyena import Hyena, HyenaState
from effattn.nn.indexed import IndexedSelfAttention
from effattn.nn.inducing_points import AttentionPooling, InducedSelfAttention
from effattn.nn.infini import InfiniSelfAttention
from effattn.nn.kimi_delta import KimiDeltaAttention
from effattn.nn.language_model import TransformerLM
from effattn.nn.latent import LatentAttention
from effattn.nn.learned_blocks import LearnedBlockSelfAttention, policy_loss
from effattn.nn.lightning import LightningAttention
from effattn.nn.linformer import LinformerSelfAttention
from effattn.nn.log_linear import LogLinearAttention
from effattn.nn.long_convolution import LongConvolution
from effattn.nn.long_short import LongShortSelfAttention
from effattn.nn.longformer import LongformerSelfAttention
from effattn.nn.lsh import LSHSelfAttention
from effattn.nn.lstm import LSTM
from effattn.nn.luna import LunaSelfAttention
from effattn.nn.mamba import Mamba
from effattn.nn.mamba2 import Mamba2
from effattn.nn.mamba3 import Mamba3
from effattn.nn.mega import Mega, MegaState
from effattn.nn.mesa import MesaNet
from effattn.nn.mixture_of_mechanisms import MixtureOfMechanisms
from effattn.nn.mlstm import MLSTM
from effattn.nn.native_sparse import NativeSparseSelfAttention
from effattn.nn.path import PathAttention
from effattn.nn.performer import PerformerSelfAttention
from effattn.nn.pipelined import PipelinedLM
from effattn.nn.placement import placed, shardings
from effattn.nn.pretrained import (
    bigbird_from_transformers,
    decoder_from_transformers,
    fnet_from_transformers,
    gated_delta_net_from_transformers,
    latent_from_transformers,
    longformer_from_transformers,
    mamba2_from_transformers,
    mamba_from_transformers,
    nystromformer_from_transformers,
    reformer_local_from_transformers,
    reformer_lsh_from_transformers,
    rg_lru_from_transformers,
    rwkv4_channel_mix_from_transformers,
    rwkv4_from_transformers,
)
from effattn.nn.prune import prune_heads
from effattn.nn.random_features import RandomFeatureSelfAttention
from effattn.nn.recurrent_memory import RecurrentMemoryAttention
from effattn.nn.relative_bias import RelativePositionBias
from effattn.nn.retention import RetNet
from effattn.nn.reversible import ReversibleStack
from effattn.nn.rg_lru import RGLRU
from effattn.nn.rotary import RotaryEmbedding
from effattn.nn.routing import Centroids, RoutingSelfAttention
from effattn.nn.rwkv4 import RWKV4
from effattn.nn.rwkv6 import RWKV6
from effattn.nn.rwkv7 import RWKV7
from effattn.nn.s4 import S4
from effattn.nn.s4d import S4D
from effattn.nn.s5 import S5
from effattn.nn.selective import SelectiveSelfAttention
from effattn.nn.self_attention import SelfAttention
from effattn.nn.shared_keys import SharedKeysAttention
from effattn.nn.short_convolution import ShortConvolution
from effattn.nn.sinkhorn import SinkhornSelfAttention
from effattn.nn.slstm import SLSTM
from effattn.nn.streaming import StreamingSelfAttention
from effattn.nn.synthesizer import Synthesizer
from effattn.nn.talking_heads import TalkingHeadsAttention
from effattn.nn.titans import TitansMemory
from effattn.nn.transformer import Transformer, TransformerState
from effattn.nn.transformer_xl import TransformerXLAttention
from effattn.nn.ttt_linear import TTTLinear

__all__ = [
    "AFTConv",
    "AFTFull",
    "AFTLocal",
    "AFTSimple",
    "AdaptiveSpanSelfAttention",
    "AdditiveCrossAttention",
    "AdditiveSelfAttention",
    "Alibi",
    "AttentionPooling",
    "BasedSelfAttention",
    "Bidirectional",
    "Block",
    "BlockLinformerSelfAttention",
    "Centroids",
    "ChunkedFeedForward",
    "CompressiveAttention",
    "CompressiveState",
    "Conversion",
    "ConvolutionAttention",
    "ConvolutionalClassifier",
    "CrossAttention",
    "DeltaNet",
    "DeltaRuleState",
    "DifferentialSelfAttention",
    "DilatedConvolution",
    "EncoderDecoder",
    "EncoderDecoderConfig",
    "EncoderDecoderState",
    "Experts",
    "FNet",
    "FeedForward",
    "ForgettingAttention",
    "GRU",
    "GatedDeltaNet",
    "GatedDeltaNet2",
    "GatedDeltaProduct",
    "GatedLinearAttention",
    "GatedMLP",
    "GatedSelfAttention",
    "GatedSlotAttention",
    "H3",
    "HGRN2",
    "HedgehogSelfAttention",
    "HybridHeads",
    "HybridState",
    "Hyena",
    "HyenaState",
    "IndexedSelfAttention",
    "InducedSelfAttention",
    "InfiniSelfAttention",
    "KimiDeltaAttention",
    "LSHSelfAttention",
    "LSTM",
    "LatentAttention",
    "LearnedBlockSelfAttention",
    "LightningAttention",
    "LinformerSelfAttention",
    "LogLinearAttention",
    "LongConvolution",
    "LongShortSelfAttention",
    "LongformerSelfAttention",
    "LunaSelfAttention",
    "MLSTM",
    "Mamba",
    "Mamba2",
    "Mamba3",
    "Mega",
    "MegaState",
    "MesaNet",
    "MixtureOfExperts",
    "MixtureOfMechanisms",
    "NativeSparseSelfAttention",
    "PathAttention",
    "PerformerSelfAttention",
    "PipelinedLM",
    "RGLRU",
    "RWKV4",
    "RWKV4ChannelMix",
    "RWKV6",
    "RWKV6ChannelMix",
    "RWKV7",
    "RWKV7ChannelMix",
    "RandomFeatureSelfAttention",
    "RecurrentMemoryAttention",
    "RelativePositionBias",
    "RetNet",
    "ReversibleStack",
    "RotaryEmbedding",
    "RoutingSelfAttention",
    "RoutingStats",
    "S4",
    "S4D",
    "S5",
    "SLSTM",
    "SelectiveSelfAttention",
    "SelfAttention",
    "SharedKeysAttention",
    "ShortConvolution",
    "SinkhornSelfAttention",
    "StreamingSelfAttention",
    "SwiGLU",
    "Synthesizer",
    "TTTLinear",
    "TalkingHeadsAttention",
    "TitansMemory",
    "Transformer",
    "TransformerConfig",
    "TransformerLM",
    "TransformerState",
    "TransformerXLAttention",
    "alibi_slopes",
    "as_attention_fn",
    "bigbird_from_transformers",
    "conversion",
    "convert",
    "decoder_from_transformers",
    "expert_specs",
    "fnet_from_transformers",
    "gated_delta_net_from_transformers",
    "generate",
    "latent_from_transformers",
    "longformer_from_transformers",
    "mamba2_from_transformers",
    "mamba_from_transformers",
    "nystromformer_from_transformers",
    "placed",
    "policy_loss",
    "prune_heads",
    "reformer_local_from_transformers",
    "reformer_lsh_from_transformers",
    "rg_lru_from_transformers",
    "rwkv4_channel_mix_from_transformers",
    "rwkv4_from_transformers",
    "shardings",
]
