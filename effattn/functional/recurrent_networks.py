"""Registry entries of recurrent and convolutional baselines, which exist only as modules."""

from effattn import registry

registry.register(
    registry.Mechanism(
        name="lstm",
        family="baseline",
        paper="Hochreiter and Schmidhuber 1997, Long Short-Term Memory",
        function=None,
        takes_heads=False,
        capabilities=frozenset({"causal", "lengths", "segments", "decode"}),
        builder="effattn.nn.lstm:LSTM",
        complexity="O(N D^2)",
        time_exponent=1.0,
        knows_order=True,
    )
)
registry.register(
    registry.Mechanism(
        name="gru",
        family="baseline",
        paper="Cho et al. 2014, Learning Phrase Representations using RNN Encoder-Decoder",
        function=None,
        takes_heads=False,
        capabilities=frozenset({"causal", "lengths", "segments", "decode"}),
        builder="effattn.nn.gru:GRU",
        complexity="O(N D^2)",
        time_exponent=1.0,
        knows_order=True,
    )
)
registry.register(
    registry.Mechanism(
        name="convolution",
        family="baseline",
        paper="Dauphin et al. 2017, Language Modeling with Gated Convolutional Networks",
        function=None,
        takes_heads=False,
        capabilities=frozenset({"causal", "lengths", "segments", "decode"}),
        builder="effattn.nn.convolution:DilatedConvolution",
        by_layer=lambda layer: {"dilation": 2 ** (layer % 4)},
        complexity="O(N W D^2)",
        time_exponent=1.0,
        knows_order=True,
    )
)
