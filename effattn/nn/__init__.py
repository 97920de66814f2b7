"""Flax NNX modules: mixers for every mechanism, Transformers, and adapters for Flax layers."""

from effattn.decode.generate import generate
from effattn.nn.adapters import as_attention_fn
from effattn.nn.additive import AdditiveCrossAttention, AdditiveSelfAttention
from effattn.nn.alibi import Alibi, alibi_slopes
from effattn.nn.attention import CrossAttention, SelfAttention
from effattn.nn.attention_free import AFTConv, AFTFull, AFTLocal, AFTSimple
from effattn.nn.based import BasedSelfAttention
from effattn.nn.block_linformer import BlockLinformerSelfAttention
from effattn.nn.convolution import ConvolutionalClassifier, DilatedConvolution
from effattn.nn.convolution_attention import ConvolutionAttention
from effattn.nn.delta_net import DeltaNet, DeltaNetState, GatedDeltaNet
from effattn.nn.encoder_decoder import (
    EncoderDecoder,
    EncoderDecoderConfig,
    EncoderDecoderState,
)
from effattn.nn.feed_forward import ChunkedFeedForward, SwiGLU
from effattn.nn.fnet import FNet
from effattn.nn.gated_linear import GatedLinearAttention
from effattn.nn.gmlp import GatedMLP
from effattn.nn.hedgehog import HedgehogSelfAttention
from effattn.nn.hybrid import HybridHeads, HybridState
from effattn.nn.hyena import Hyena, HyenaState
from effattn.nn.linformer import LinformerSelfAttention
from effattn.nn.long_short import LongShortSelfAttention
from effattn.nn.longformer import LongformerSelfAttention
from effattn.nn.lsh import LSHSelfAttention
from effattn.nn.mamba import Mamba
from effattn.nn.mamba2 import Mamba2
from effattn.nn.mixture import MixtureOfMechanisms
from effattn.nn.performer import PerformerSelfAttention
from effattn.nn.pretrained import bigbird_from_transformers, longformer_from_transformers
from effattn.nn.random_features import RandomFeatureSelfAttention
from effattn.nn.recurrent_memory import RecurrentMemoryAttention
from effattn.nn.recurrent_networks import GRU, LSTM
from effattn.nn.retention import RetNet
from effattn.nn.reversible import ReversibleStack
from effattn.nn.rotary import RotaryEmbedding
from effattn.nn.routing import Centroids, RoutingSelfAttention
from effattn.nn.rwkv import RWKV6, RWKV7
from effattn.nn.rwkv4 import RWKV4, RWKV4ChannelMix
from effattn.nn.s4 import S4, S4D
from effattn.nn.short_convolution import ShortConvolution
from effattn.nn.synthesizer import Synthesizer
from effattn.nn.transformer import (
    Block,
    Transformer,
    TransformerConfig,
    TransformerLM,
    TransformerState,
)

__all__ = [
    "AFTConv",
    "AFTFull",
    "AFTLocal",
    "AFTSimple",
    "AdditiveCrossAttention",
    "AdditiveSelfAttention",
    "Alibi",
    "BasedSelfAttention",
    "Block",
    "BlockLinformerSelfAttention",
    "Centroids",
    "ChunkedFeedForward",
    "ConvolutionAttention",
    "ConvolutionalClassifier",
    "CrossAttention",
    "DeltaNet",
    "DeltaNetState",
    "DilatedConvolution",
    "EncoderDecoder",
    "EncoderDecoderConfig",
    "EncoderDecoderState",
    "FNet",
    "GRU",
    "GatedDeltaNet",
    "GatedLinearAttention",
    "GatedMLP",
    "HedgehogSelfAttention",
    "HybridHeads",
    "HybridState",
    "Hyena",
    "HyenaState",
    "LSHSelfAttention",
    "LSTM",
    "LinformerSelfAttention",
    "LongShortSelfAttention",
    "LongformerSelfAttention",
    "Mamba",
    "Mamba2",
    "MixtureOfMechanisms",
    "PerformerSelfAttention",
    "RWKV4",
    "RWKV4ChannelMix",
    "RWKV6",
    "RWKV7",
    "RandomFeatureSelfAttention",
    "RecurrentMemoryAttention",
    "RetNet",
    "ReversibleStack",
    "RotaryEmbedding",
    "RoutingSelfAttention",
    "S4",
    "S4D",
    "SelfAttention",
    "ShortConvolution",
    "SwiGLU",
    "Synthesizer",
    "Transformer",
    "TransformerConfig",
    "TransformerLM",
    "TransformerState",
    "alibi_slopes",
    "as_attention_fn",
    "bigbird_from_transformers",
    "generate",
    "longformer_from_transformers",
]
