"""FNet by its naive form."""

import effattn
from tests.references.reference import MixerReference

FNET = MixerReference(
    mix=lambda mixer, x: effattn.naive.fnet(x, norm=mixer.norm),
    variants={"": {}, "ortho": {"norm": "ortho"}},
    transforms=True,
)
