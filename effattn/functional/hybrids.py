"""Registry entries of hybrid mechanisms, which exist only as modules."""

from effattn import registry

registry.register(
    registry.Mechanism(
        name="mixture_of_mechanisms",
        family="hybrid",
        paper="Jacobs et al. 1991, Adaptive Mixtures of Local Experts",
        function=None,
        takes_heads=False,
        capabilities=frozenset({"causal", "bidirectional", "lengths", "segments", "decode"}),
        options={"mechanisms": ("sliding_window", "softmax")},
        builder="effattn.nn.mixture_of_mechanisms:MixtureOfMechanisms",
        complexity="the sum of its mechanisms'",
        time_exponent=2.0,
    )
)

registry.register(
    registry.Mechanism(
        name="convolution_attention",
        family="hybrid",
        paper="Wu et al. 2020, Lite Transformer with Long-Short Range Attention",
        function=None,
        takes_heads=False,
        capabilities=frozenset({"causal", "lengths", "segments", "decode"}),
        reasons={"bidirectional": "its convolution looks back only"},
        builder="effattn.nn.convolution_attention:ConvolutionAttention",
        complexity="O(N^2 D), O(N D) a step",
        time_exponent=2.0,
    )
)

registry.register(
    registry.Mechanism(
        name="recurrent_memory",
        family="hybrid",
        paper="Bulatov et al. 2022, Recurrent Memory Transformer",
        function=None,
        takes_heads=False,
        capabilities=frozenset({"causal", "lengths", "decode"}),
        reasons={
            "bidirectional": "its memory comes from the segments before",
            "segments": "its segments are of positions in a row, not in a document",
        },
        builder="effattn.nn.recurrent_memory:RecurrentMemoryAttention",
        complexity="O(N S D)",
        time_exponent=1.0,
    )
)
