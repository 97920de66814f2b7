"""Decoding: decode states, decoders that extend them, and text generation. Needs no Flax."""

from effattn.decode.adaptive_span import AdaptiveSpanDecoder
from effattn.decode.based import BasedDecoder
from effattn.decode.block_linformer import BlockLinformerDecoder, BlockLinformerState
from effattn.decode.contiguous import ContiguousDecoder, ContiguousState
from effattn.decode.decoder import Decoder
from effattn.decode.forgetting import ForgettingDecoder, ForgettingState
from effattn.decode.gathered import GatheredDecoder
from effattn.decode.generate import generate
from effattn.decode.hierarchical import HierarchicalDecoder, HierarchicalState
from effattn.decode.infini import InfiniDecoder, InfiniState
from effattn.decode.learned_blocks import LearnedBlockDecoder, LearnedBlockState
from effattn.decode.log_linear import LogLinearDecoder
from effattn.decode.long_short import LongShortDecoder, LongShortState
from effattn.decode.longformer import LongformerDecoder, LongformerState
from effattn.decode.moba import MobaDecoder, MobaState
from effattn.decode.native_sparse import NativeSparseDecoder, NativeSparseState
from effattn.decode.path import PathDecoder, PathState
from effattn.decode.recurrent import RecurrentDecoder, RecurrentState
from effattn.decode.rewind import RewindableState, rewind
from effattn.decode.ring import RingDecoder, RingState
from effattn.decode.routing import RoutingDecoder, RoutingState
from effattn.decode.sampling import sample_token
from effattn.decode.selective import SelectiveDecoder, SelectiveState
from effattn.decode.state import State
from effattn.decode.streaming import StreamingDecoder, StreamingState
from effattn.decode.tokens import TokenState

__all__ = [
    "AdaptiveSpanDecoder",
    "BasedDecoder",
    "BlockLinformerDecoder",
    "BlockLinformerState",
    "ContiguousDecoder",
    "ContiguousState",
    "Decoder",
    "ForgettingDecoder",
    "ForgettingState",
    "GatheredDecoder",
    "HierarchicalDecoder",
    "HierarchicalState",
    "InfiniDecoder",
    "InfiniState",
    "LearnedBlockDecoder",
    "LearnedBlockState",
    "LogLinearDecoder",
    "LongShortDecoder",
    "LongShortState",
    "LongformerDecoder",
    "LongformerState",
    "MobaDecoder",
    "MobaState",
    "NativeSparseDecoder",
    "NativeSparseState",
    "PathDecoder",
    "PathState",
    "RecurrentDecoder",
    "RecurrentState",
    "RewindableState",
    "RingDecoder",
    "RingState",
    "RoutingDecoder",
    "RoutingState",
    "SelectiveDecoder",
    "SelectiveState",
    "State",
    "StreamingDecoder",
    "StreamingState",
    "TokenState",
    "generate",
    "rewind",
    "sample_token",
]
