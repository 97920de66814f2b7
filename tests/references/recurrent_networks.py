"""The baselines by their naive forms."""

import effattn
from tests.references.reference import MixerReference

LSTM = MixerReference(mix=effattn.naive.lstm)
GRU = MixerReference(mix=effattn.naive.gru)
CONVOLUTION = MixerReference(
    mix=effattn.naive.convolution,
    variants={"": {"width": 3, "dilation": 2}, "wide": {"width": 4, "dilation": 5}},
)
