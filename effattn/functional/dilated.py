"""Dilated sliding-window attention: the registry entry for windows of growing dilation."""

from effattn import registry
from effattn.functional.sliding_window import sliding_window_attention

registry.register(
    registry.Mechanism(
        name="dilated",
        family="sparse",
        paper="Beltagy et al. 2020, Longformer: The Long-Document Transformer",
        function=sliding_window_attention,
        capabilities=frozenset({"cross"}),
        options={"local_window_size": 127, "dilation": 2},
        by_layer=lambda layer, _: {"dilation": 2 ** (layer % 4)},
        complexity="O(N w)",
        time_exponent=1.0,
        decoder="effattn.decode.ring:RingDecoder",
    )
)
