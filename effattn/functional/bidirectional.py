"""Bidirectional mixing (Schuster and Paliwal 1997): a causal mixer in each direction."""

from effattn import registry
from effattn.naive import over_examples


def naive(mixer, x):
    """Tokens x `(T, D)`; each of the two `mixer.mixers` maps `(1, T, D)` to `(1, T, D)`."""
    forward, backward = mixer.mixers
    return forward(x[None])[0] + backward(x[None, ::-1])[0, ::-1]


registry.register(
    registry.Mechanism(
        name="bidirectional",
        family="hybrid",
        paper="Schuster and Paliwal 1997, Bidirectional Recurrent Neural Networks",
        function=None,
        naive=over_examples(naive),
        takes_heads=False,
        capabilities=frozenset({"bidirectional", "lengths", "segments"}),
        reasons={"causal": "one of its two mixers reads the tokens from the end"},
        options={"mixer": "mamba"},
        builder="effattn.nn.bidirectional:Bidirectional",
        complexity="twice that of its mixer",
        time_exponent=1.0,
        knows_order=True,
    )
)
