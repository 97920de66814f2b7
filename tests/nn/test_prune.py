"""Removal of heads: what is left gives what the whole model gives without the other heads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from effattn import nn

TOKENS = np.random.default_rng(0).integers(0, 32, (2, 12))


def build(mixer="softmax", **options):
    config = nn.TransformerConfig(
        vocab_size=32, num_layers=2, features=32, num_heads=4, mixer=mixer, **options
    )
    return nn.TransformerLM(config, rngs=nnx.Rngs(0))


def silenced(model, keep):
    """The model, whose output projections read nothing of the other heads."""
    model = nnx.clone(model)
    heads = model.config.num_kv_heads or 4
    for block, kept in zip(model.blocks, keep, strict=True):
        kernel = block.mixer.out.kernel
        mask = np.isin(np.arange(heads), kept).repeat(4 // heads)
        kernel[...] = kernel[...] * mask[:, None, None]
    return model


@pytest.mark.parametrize(
    ("mixer", "options", "keep"),
    [
        ("softmax", {}, [[0, 2, 3], [1, 2, 3]]),
        ("softmax", {"num_kv_heads": 2, "qk_norm": True}, [[1], [0]]),
        ({"name": "softmax", "use_bias": True, "scale": 0.3}, {}, [[3], [0]]),
        ("sliding_window", {"head_dim": 6}, [[0, 3], [1, 2]]),
    ],
)
def test_equals_the_model_without_the_other_heads(mixer, options, keep):
    model = build(mixer, **options)
    before = jax.tree.map(np.asarray, nnx.state(model))
    smaller = nn.prune_heads(model, keep)
    np.testing.assert_allclose(smaller(TOKENS), silenced(model, keep)(TOKENS), rtol=2e-5, atol=2e-5)
    assert smaller.config.num_heads == len(keep[0]) * (2 if "num_kv_heads" in options else 1)
    rebuilt = nnx.eval_shape(lambda: nn.TransformerLM(smaller.config, rngs=nnx.Rngs(0)))
    assert nnx.split(rebuilt)[0] == nnx.split(smaller)[0]
    # The model does not change, and shares no arrays.
    jax.tree.map(np.testing.assert_array_equal, before, nnx.state(model))


def test_decodes_as_it_reads():
    smaller = nn.prune_heads(build(), [[0, 2], [1, 3]])
    state = smaller.init_state(2, 12)
    logits, _ = smaller.extend(TOKENS, state)
    np.testing.assert_allclose(logits, smaller(TOKENS), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        ([[0]], "equally many heads, at least one, for each of the 2 layers"),
        ([0, 1], "must be a list of key heads for each layer, got \\[0, 1\\]"),
        ([[0], [1, 2]], "equally many heads"),
        ([[], []], "at least one"),
        ([[0], [4]], "key heads from 0 to 3 in increasing order, got \\[4\\]"),
        ([[1, 0], [0, 1]], "in increasing order"),
        ([[0, 0], [0, 1]], "in increasing order"),
    ],
)
def test_other_indices_are_refused(keep, message):
    with pytest.raises(ValueError, match=message):
        nn.prune_heads(build(), keep)


def test_models_of_another_kind_are_refused():
    with pytest.raises(ValueError, match="must be a Transformer without stages, got a Linear"):
        nn.prune_heads(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), [[0]])
    with pytest.raises(ValueError, match="layer 0 must be softmax or sliding_window.*got RetNet"):
        nn.prune_heads(build("retention"), [[0], [0]])
    with pytest.raises(ValueError, match="layer 1 must be .*got GRU"):
        nn.prune_heads(build(("softmax", "gru")), [[0], [0]])
    with pytest.raises(ValueError, match="must have the heads of the configuration, \\(4, 4\\)"):
        nn.prune_heads(build({"name": "softmax", "num_kv_heads": 2}), [[0], [0]])
    window = {"name": "sliding_window", "local_window_size": (3, 0), "dilation": (1, 1, 2, 2)}
    with pytest.raises(ValueError, match="no options that may differ by head, got dilation"):
        nn.prune_heads(build(window), [[0], [0]])
    for options in ({"sink": jnp.arange(4.0)}, {"score_mod": lambda logit, b, h, i, j: logit * h}):
        with pytest.raises(ValueError, match="no options that may differ by head, got s"):
            nn.prune_heads(build({"name": "softmax", **options}), [[0], [0]])
