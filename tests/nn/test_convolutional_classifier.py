"""The classifier reads the tokens of each row and no padding."""

import jax
import numpy as np
import pytest
from flax import nnx

from effattn.nn import ConvolutionalClassifier
from tests.closeness import close
from tests.nn.build import filled

RNG = np.random.default_rng(0)


def test_the_classifier_reads_the_text_alone():
    model = filled(lambda: ConvolutionalClassifier(11, 3, features=4, filters=5, rngs=nnx.Rngs(0)))
    run = nnx.jit(lambda model, tokens, **given: model(tokens, **given))
    tokens = RNG.integers(0, 11, size=(3, 8))
    lengths = np.array([8, 5, 1])
    logits = np.asarray(run(model, tokens, lengths=lengths))
    assert logits.shape == (3, 3)
    for row, length in enumerate(lengths):
        close(run(model, tokens[row : row + 1, :length]), logits[row : row + 1])
    other = np.where(np.arange(8) < lengths[:, None], tokens, 10)
    np.testing.assert_array_equal(run(model, other, lengths=lengths), logits)
    dropped = run(model, tokens, rngs=jax.random.key(0))
    assert not np.array_equal(dropped, run(model, tokens))
    with pytest.raises(ValueError, match="tokens must hold tokens of the vocabulary, from 0 to 10"):
        model(tokens + 11)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: ConvolutionalClassifier(5, 2, widths=(), rngs=nnx.Rngs(0)),
            "widths must be a list of one or more ints",
        ),
        (
            lambda: ConvolutionalClassifier(5, 2, widths=(3, 0), rngs=nnx.Rngs(0)),
            "each of widths must be an int, 1 or more tokens, got 0",
        ),
        (
            lambda: ConvolutionalClassifier(0, 2, rngs=nnx.Rngs(0)),
            "vocab_size must be an int, 1 or more tokens, got 0",
        ),
        (
            lambda: ConvolutionalClassifier(5, 2.0, rngs=nnx.Rngs(0)),
            "num_classes must be an int, 1 or more classes, got 2.0",
        ),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(call)
