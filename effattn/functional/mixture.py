"""The entry of the mixture of mechanisms, which is a module alone."""

from effattn import registry

registry.register(
    registry.Mechanism(
        name="mixture_of_mechanisms",
        family="hybrid",
        paper="Jacobs et al. 1991, Adaptive Mixtures of Local Experts",
        function=None,
        takes_heads=False,
        cores=(),
        capabilities=frozenset({"causal", "bidirectional", "lengths", "segments", "decode"}),
        options={"mechanisms": ("sliding_window", "softmax")},
        builder="effattn.nn.mixture:MixtureOfMechanisms",
        complexity="the sum of its mechanisms'",
        time_exponent=2.0,
    )
)
