"""Figures and measures of attention: patterns, attention weights, approximation error and rank.

    draw(Causal() & SlidingWindow(7, 0)).figure.savefig("window.png")
    draw("longformer", local_window_size=(7, 0), is_causal=True)     # measured from the function
    print(text("sparse_transformer", 32, stride=8))                  # the same in characters
    receptive_field(bigbird(8), depth=4)                             # tokens reached, by layers
    draw_attention(model, tokens, layer=3)                           # the weights of each head
    approximation_error("nystrom", q, k, v, num_landmarks=64)        # against exact attention
    effective_rank(singular_values("softmax", q, k))                 # of the attention matrix

Pictures of a mechanism come from calls of its function, not from a separate mask. Pictures use
dense matrices, O(N^2) in the number of tokens, and take up to `LONGEST` tokens;
`approximation_error`, and `singular_values` with a `count`, take more tokens in linear memory.
`effattn.analysis.cost` counts the operations and the memory of any program, and
`effattn.analysis.liveness` follows its memory over time. `plan` and `best_mesh` predict the memory,
traffic and time of training on many devices (`effattn.analysis.planning`).
Figures need matplotlib (the extra `analysis`); numbers and `text` do not.
"""

from effattn.analysis.approximation import (
    ApproximationError,
    approximation_error,
    effective_rank,
    singular_values,
)
from effattn.analysis.figures import draw, draw_attention, draw_receptive_field
from effattn.analysis.pictures import receptive_field, text
from effattn.analysis.planning import HARDWARE, MODELS, Hardware, best_mesh, plan
from effattn.analysis.probes import attention_weights, mixing_weights
from effattn.patterns.characters import LONGEST

__all__ = [
    "HARDWARE",
    "LONGEST",
    "MODELS",
    "ApproximationError",
    "Hardware",
    "approximation_error",
    "attention_weights",
    "best_mesh",
    "draw",
    "draw_attention",
    "draw_receptive_field",
    "effective_rank",
    "mixing_weights",
    "plan",
    "receptive_field",
    "singular_values",
    "text",
]
