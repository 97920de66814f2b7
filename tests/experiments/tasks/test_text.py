"""Training objectives: masks of training, and validation that predicts each token once."""

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.tasks.text import NOTHING, PARTS, MaskedTokens, NextToken
from experiments.tasks.tokenizers import BytePairTokenizer, ByteTokenizer

MASK = 256
OBJECTIVE = MaskedTokens.of(256)
WINDOWS = np.random.default_rng(0).integers(256, size=(500, 65), dtype=np.uint8)
TOKENS = WINDOWS[:, 1:].astype(np.int32)


def same(left, right):
    return all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


def test_the_next_token_is_predicted_from_those_before():
    for examples in (NextToken.of(256).training(WINDOWS, 0, 0), NextToken().validation(WINDOWS)):
        np.testing.assert_array_equal(examples.inputs, WINDOWS[:, :-1])
        np.testing.assert_array_equal(examples.targets, TOKENS)


def test_training_masks_are_those_of_bert():
    inputs, targets = OBJECTIVE.training(WINDOWS, 0, 0)
    assert inputs.dtype == targets.dtype == np.int32
    predicted = targets != NOTHING
    assert set(predicted.sum(1)) == {round(0.15 * 64)}
    np.testing.assert_array_equal(targets[predicted], TOKENS[predicted])
    np.testing.assert_array_equal(inputs[~predicted], TOKENS[~predicted])
    seen, true = inputs[predicted], targets[predicted]
    # 5000 draws: three standard deviations are 0.017 and 0.013.
    assert (seen == MASK).mean() == pytest.approx(0.8, abs=0.017)
    assert (seen == true).mean() == pytest.approx(0.1 + 0.1 / 256, abs=0.013)
    other = seen[(seen != MASK) & (seen != true)]
    assert other.min() < 10 and 245 < other.max() < MASK
    # No position is favoured.
    assert predicted.mean(0).std() < 2 * (0.15 * 0.85 / len(WINDOWS)) ** 0.5


def test_training_masks_depend_on_the_seed_and_the_step_alone():
    first = OBJECTIVE.training(WINDOWS, 3, 5)
    assert same(first, OBJECTIVE.training(WINDOWS, 3, 5))
    assert not same(first, OBJECTIVE.training(WINDOWS, 4, 5))
    assert not same(first, OBJECTIVE.training(WINDOWS, 3, 6))


def test_a_short_window_still_has_a_target():
    assert (OBJECTIVE.training(WINDOWS[:, :5], 0, 0).targets != NOTHING).sum(1).min() == 1


def test_validation_predicts_each_token_once_and_masks_it_then():
    inputs, targets = (x.reshape(-1, PARTS, 64) for x in OBJECTIVE.validation(WINDOWS))
    assert inputs.dtype == targets.dtype == np.int32
    masked = targets != NOTHING
    assert (masked.sum(1) == 1).all()
    assert set(masked.sum(2).ravel()) == {64 // PARTS, 64 // PARTS + 1}
    np.testing.assert_array_equal(targets.max(1), TOKENS)
    np.testing.assert_array_equal(
        inputs, np.where(masked, MASK, np.broadcast_to(TOKENS[:, None], masked.shape))
    )
    assert not np.array_equal(masked[0], masked[1])
    assert same(OBJECTIVE.validation(WINDOWS), OBJECTIVE.validation(WINDOWS))


def spelled(tokens):
    """Model whose likeliest token is the mask, and the next likeliest the letter q."""
    return jnp.zeros((*tokens.shape, 257)).at[..., MASK].set(2).at[..., ord("q")].set(1)


def test_a_sample_fills_the_blanks_of_the_prompt():
    text = b"\nand so say all of us."
    window = np.frombuffer(text, np.uint8)
    prompt = OBJECTIVE.prompt(window, ByteTokenizer())
    assert len(prompt) == len(text) - 1 and prompt.count("_") == 3
    sample = OBJECTIVE.sample(spelled, window, ByteTokenizer(), seed=0)
    assert sample == prompt.replace("_", "q")


def test_prompts_of_byte_pairs_have_a_blank_a_token(documents):
    tokenizer = BytePairTokenizer.train(documents, 300)
    window = tokenizer.encode(documents[:1])[:22]
    objective = MaskedTokens.of(300)
    prompt = objective.prompt(window, tokenizer)
    assert prompt.count("_") == 3
    whole = tokenizer.decode(window[1:])
    pieces = prompt.split("_")
    assert whole.startswith(pieces[0]) and whole.endswith(pieces[-1])
