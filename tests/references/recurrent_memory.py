"""Attention with a recurrent memory by its naive form."""

import effattn
from tests.references.reference import MixerReference

RECURRENT_MEMORY = MixerReference(
    mix=effattn.naive.recurrent_memory,
    variants={
        "": {"segment_size": 5, "num_slots": 3},
        "short": {"segment_size": 2, "num_slots": 1},
    },
)
