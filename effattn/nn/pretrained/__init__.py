"""Loaders of pretrained layers and decoders of Hugging Face transformers, a file for each model."""

from effattn.nn.pretrained.bigbird import bigbird_from_transformers
from effattn.nn.pretrained.decoder import decoder_from_transformers
from effattn.nn.pretrained.fnet import fnet_from_transformers
from effattn.nn.pretrained.gated_delta_net import gated_delta_net_from_transformers
from effattn.nn.pretrained.latent import latent_from_transformers
from effattn.nn.pretrained.longformer import longformer_from_transformers
from effattn.nn.pretrained.mamba import mamba_from_transformers
from effattn.nn.pretrained.mamba2 import mamba2_from_transformers
from effattn.nn.pretrained.nystromformer import nystromformer_from_transformers
from effattn.nn.pretrained.reformer import (
    reformer_local_from_transformers,
    reformer_lsh_from_transformers,
)
from effattn.nn.pretrained.rg_lru import rg_lru_from_transformers
from effattn.nn.pretrained.rwkv4 import rwkv4_channel_mix_from_transformers, rwkv4_from_transformers

__all__ = [
    "bigbird_from_transformers",
    "decoder_from_transformers",
    "fnet_from_transformers",
    "gated_delta_net_from_transformers",
    "latent_from_transformers",
    "longformer_from_transformers",
    "mamba2_from_transformers",
    "mamba_from_transformers",
    "nystromformer_from_transformers",
    "reformer_local_from_transformers",
    "reformer_lsh_from_transformers",
    "rg_lru_from_transformers",
    "rwkv4_channel_mix_from_transformers",
    "rwkv4_from_transformers",
]
