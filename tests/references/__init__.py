"""Each mechanism in its shortest obvious form, and what the laws need to know to test it.

A new mechanism gets the whole battery by being registered and by one entry in `REFERENCES`, or in
`MIXERS` where it takes no heads.
"""

from tests.references.attention_free import AFT_CONV, AFT_FULL, AFT_LOCAL, AFT_SIMPLE
from tests.references.based import BASED
from tests.references.block_linformer import BLOCK_LINFORMER
from tests.references.cosformer import COSFORMER
from tests.references.delta_rule import DELTA_NET, GATED_DELTA_NET, RWKV7
from tests.references.fnet import FNET
from tests.references.gmlp import GMLP
from tests.references.hedgehog import HEDGEHOG
from tests.references.hierarchical import HIERARCHICAL
from tests.references.hybrids import CONVOLUTION_ATTENTION, MIXTURE_OF_MECHANISMS
from tests.references.hyena import HYENA
from tests.references.linear import LINEAR
from tests.references.linformer import LINFORMER
from tests.references.long_short import LONG_SHORT
from tests.references.lsh import LSH
from tests.references.nystrom import NYSTROM
from tests.references.performer import PERFORMER
from tests.references.random_features import RANDOM_FEATURES
from tests.references.recurrences import GATED_LINEAR, MAMBA, MAMBA2, RETENTION, RWKV6
from tests.references.recurrent_memory import RECURRENT_MEMORY
from tests.references.recurrent_networks import CONVOLUTION, GRU, LSTM
from tests.references.reference import MixerReference, Reference
from tests.references.routing import ROUTING
from tests.references.rwkv4 import RWKV4
from tests.references.s4 import S4, S4D
from tests.references.softmax import (
    ADDITIVE,
    DILATED,
    SIGMOID,
    SLIDING_WINDOW,
    SOFTMAX,
    SQUARED_RELU,
)
from tests.references.sparse import BIGBIRD, BLOCK_SPARSE, LONGFORMER, RANDOM, SPARSE_TRANSFORMER
from tests.references.synthesizer import DENSE, FACTORIZED, FACTORIZED_RANDOM, MIXTURE, RANDOM_TABLE

REFERENCES: dict[str, Reference] = {
    "softmax": SOFTMAX,
    "additive": ADDITIVE,
    "sigmoid": SIGMOID,
    "squared_relu": SQUARED_RELU,
    "sliding_window": SLIDING_WINDOW,
    "dilated": DILATED,
    "linear": LINEAR,
    "based": BASED,
    "cosformer": COSFORMER,
    "hedgehog": HEDGEHOG,
    "performer": PERFORMER,
    "random_features": RANDOM_FEATURES,
    "longformer": LONGFORMER,
    "sparse_transformer": SPARSE_TRANSFORMER,
    "block_sparse": BLOCK_SPARSE,
    "bigbird": BIGBIRD,
    "random": RANDOM,
    "hierarchical": HIERARCHICAL,
    "retention": RETENTION,
    "gated_linear": GATED_LINEAR,
    "mamba": MAMBA,
    "mamba2": MAMBA2,
    "rwkv6": RWKV6,
    "delta_net": DELTA_NET,
    "gated_delta_net": GATED_DELTA_NET,
    "rwkv7": RWKV7,
    "linformer": LINFORMER,
    "block_linformer": BLOCK_LINFORMER,
    "long_short": LONG_SHORT,
    "nystrom": NYSTROM,
    "routing": ROUTING,
}

# Of the mechanisms that take no heads.
MIXERS: dict[str, MixerReference] = {
    "lsh": LSH,
    "fnet": FNET,
    "rwkv4": RWKV4,
    "aft_full": AFT_FULL,
    "aft_simple": AFT_SIMPLE,
    "aft_local": AFT_LOCAL,
    "aft_conv": AFT_CONV,
    "hyena": HYENA,
    "synthesizer": DENSE,
    "synthesizer_factorized": FACTORIZED,
    "synthesizer_random": RANDOM_TABLE,
    "synthesizer_factorized_random": FACTORIZED_RANDOM,
    "synthesizer_mixture": MIXTURE,
    "gmlp": GMLP,
    "lstm": LSTM,
    "gru": GRU,
    "convolution": CONVOLUTION,
    "s4d": S4D,
    "s4": S4,
    "mixture_of_mechanisms": MIXTURE_OF_MECHANISMS,
    "convolution_attention": CONVOLUTION_ATTENTION,
    "recurrent_memory": RECURRENT_MEMORY,
}
