"""The mixers of the attention-free transformer by their naive forms."""

import effattn
from tests.references.reference import MixerReference


def mix_by(name, bias=lambda mixer: None):
    """The mixer of that name, with its `position_bias`."""

    def mix(mixer, x):
        q, k, v = (x[None] @ layer.kernel[...] for layer in (mixer.query, mixer.key, mixer.value))
        (y,) = getattr(effattn.naive, name)(
            q,
            k,
            v,
            position_bias=bias(mixer),
            local_window_size=getattr(mixer, "window", None),
            is_causal=mixer.is_causal,
        )
        return y @ mixer.out.kernel[...]

    return mix


def factors(mixer):
    return mixer.row_bias[...], mixer.column_bias[...]


AFT_FULL = MixerReference(
    mix=mix_by("aft_full", factors),
    variants={"": {"max_length": 16, "rank": 3}},
    cost=lambda length: {"max_length": length},
)
AFT_SIMPLE = MixerReference(mix=mix_by("aft_simple"))
AFT_LOCAL = MixerReference(
    mix=mix_by("aft_local", factors),
    variants={"": {"max_length": 16, "rank": 3, "local_window_size": 3}},
    cost=lambda length: {"max_length": length},
)
AFT_CONV = MixerReference(
    mix=mix_by("aft_conv", lambda mixer: mixer.taps[...]),
    variants={"": {"local_window_size": 3}},
)
