"""Pictures of attention: who may attend to whom, how far it reaches, what a trained layer pays.

    draw(Causal() & SlidingWindow(7, 0)).figure.savefig("window.png")
    draw("longformer", local_window_size=(7, 0), is_causal=True)     # as the function really does
    print(text("sparse_transformer", 32, stride=8))                  # the same in characters
    receptive_field(bigbird(8), depth=4)                             # tokens reached, by layers
    draw_attention(model, tokens, layer=3)                           # the weights of each head

The pictures of a mechanism are made by calling it, never from a mask written for the picture. All
of this works on dense matrices, O(N^2) in the number of tokens, and takes up to `LONGEST` of them.
Figures need matplotlib, the extra `analysis`; the numbers and `text` do not.
"""

from effattn.analysis.figures import draw, draw_attention, draw_receptive_field
from effattn.analysis.pictures import receptive_field, text
from effattn.analysis.probes import LONGEST, attention_weights, mixing_weights

__all__ = [
    "LONGEST",
    "attention_weights",
    "draw",
    "draw_attention",
    "draw_receptive_field",
    "mixing_weights",
    "receptive_field",
    "text",
]
