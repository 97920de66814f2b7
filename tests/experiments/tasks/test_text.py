"""Text as a task: masks of training, and validation that predicts each token once."""

import json
import math

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.tasks.corpora import Corpus
from experiments.tasks.task import NOTHING, Scores
from experiments.tasks.text import PARTS, MaskedTokens, NextToken
from experiments.tasks.tokenizers import BytePairTokenizer, ByteTokenizer
from experiments.tasks.windows import Windows, batches

MASK = 256
WINDOWS = np.random.default_rng(0).integers(256, size=(500, 65), dtype=np.uint8)
TOKENS = WINDOWS[:, 1:].astype(np.int32)


def of(kind, windows=WINDOWS, tokenizer=None, **options):
    """Returns the task with these windows for validation, and their tokens for training."""
    train = Windows(np.concatenate([windows[0, :1], *windows[:, 1:]]), windows.shape[1] - 1)
    return kind(windows=train, valid=windows, tokenizer=tokenizer or ByteTokenizer(), **options)


def training_of(task, seed=0, step=0, windows=WINDOWS):
    """Returns inputs and targets of a step, and the tokens of its windows, in their order."""
    (inputs,), targets = task.training(len(windows), seed, step)
    return inputs, targets, batches(task.windows, len(windows), seed)[step].astype(np.int32)


def test_the_next_token_is_predicted_from_those_before():
    task = of(NextToken)
    inputs, targets, windows = training_of(task)
    np.testing.assert_array_equal(inputs, windows[:, :-1])
    np.testing.assert_array_equal(targets, windows[:, 1:])
    assert sorted(map(bytes, targets.astype(np.uint8))) == sorted(map(bytes, WINDOWS[:, 1:]))
    (inputs,), targets = task.held_out()["validation"]
    np.testing.assert_array_equal(inputs, WINDOWS[:, :-1])
    np.testing.assert_array_equal(targets, TOKENS)
    assert inputs.dtype == targets.dtype == np.int32
    assert (task.vocab_size, task.num_classes, task.length) == (256, 256, 64)


@pytest.mark.parametrize("kind", [NextToken, MaskedTokens])
def test_examples_depend_on_the_seed_and_the_step_alone(kind):
    def examples(seed, step):
        (inputs,), targets = of(kind).training(4, seed, step)
        return np.stack([inputs, targets])

    task = of(kind)
    for step in (5, 3, 200):  # in any order, and in later epochs
        (inputs,), targets = task.training(4, 3, step)
        np.testing.assert_array_equal(np.stack([inputs, targets]), examples(3, step))
    assert not np.array_equal(examples(3, 5), examples(4, 5))
    assert not np.array_equal(examples(3, 5), examples(3, 6))


def test_texts_are_not_mistaken_for_each_other():
    (one, two) = (of(NextToken, WINDOWS[part]) for part in (slice(4), slice(4, 8)))
    assert one != two
    (first,), (second,) = (task.training(4, 0, 0).inputs for task in (one, two))
    assert not np.array_equal(first, second)


def test_training_masks_are_those_of_bert():
    inputs, targets, windows = training_of(of(MaskedTokens))
    tokens = windows[:, 1:]
    assert inputs.dtype == targets.dtype == np.int32
    predicted = targets != NOTHING
    assert set(predicted.sum(1)) == {round(0.15 * 64)}
    np.testing.assert_array_equal(targets[predicted], tokens[predicted])
    np.testing.assert_array_equal(inputs[~predicted], tokens[~predicted])
    seen, true = inputs[predicted], targets[predicted]
    # 5000 draws: three standard deviations are 0.017 and 0.013.
    assert (seen == MASK).mean() == pytest.approx(0.8, abs=0.017)
    assert (seen == true).mean() == pytest.approx(0.1 + 0.1 / 256, abs=0.013)
    other = seen[(seen != MASK) & (seen != true)]
    assert other.min() < 10 and 245 < other.max() < MASK
    # No position is favoured.
    assert predicted.mean(0).std() < 2 * (0.15 * 0.85 / len(WINDOWS)) ** 0.5


def test_training_masks_depend_on_the_seed_and_the_step_alone():
    def masks(seed, step):
        # All windows are equal, so that the order of the data does not matter.
        windows = np.zeros((8, 65), np.uint8)
        return of(MaskedTokens, windows).training(8, seed, step).targets != NOTHING

    np.testing.assert_array_equal(masks(3, 5), masks(3, 5))
    assert not np.array_equal(masks(3, 5), masks(4, 5))
    assert not np.array_equal(masks(3, 5), masks(3, 6))


def test_a_short_window_still_has_a_target():
    windows = WINDOWS[:, :5]
    _, targets, _ = training_of(of(MaskedTokens, windows), windows=windows)
    assert set((targets != NOTHING).sum(1)) == {1}


def test_validation_predicts_each_token_once_and_masks_it_then():
    task = of(MaskedTokens)
    ((inputs,), targets) = task.held_out()["validation"]
    inputs, targets = (x.reshape(-1, PARTS, 64) for x in (inputs, targets))
    assert inputs.dtype == targets.dtype == np.int32
    masked = targets != NOTHING
    assert (masked.sum(1) == 1).all()
    assert set(masked.sum(2).ravel()) == {64 // PARTS, 64 // PARTS + 1}
    np.testing.assert_array_equal(targets.max(1), TOKENS)
    np.testing.assert_array_equal(
        inputs, np.where(masked, MASK, np.broadcast_to(TOKENS[:, None], masked.shape))
    )
    assert not np.array_equal(masked[0], masked[1])
    again = task.held_out()["validation"]
    np.testing.assert_array_equal(again.inputs[0].reshape(inputs.shape), inputs)
    np.testing.assert_array_equal(again.targets.reshape(inputs.shape), targets)
    assert task.vocab_size == task.num_classes == MASK + 1


def scores(nats):
    return Scores(np.asarray(nats, np.float32), np.zeros(np.shape(nats), bool))


@pytest.mark.parametrize("kind", [NextToken, MaskedTokens])
def test_perplexities_are_exponentials_of_the_loss(kind):
    task = of(kind, WINDOWS[:2], bytes_per_word=5.0)
    validation = task.held_out()["validation"]
    # All targets cost two nats but for one, which costs 4.56.
    nats = np.where(validation.targets == NOTHING, 0.0, 2.0)
    nats[0, np.flatnonzero(nats[0])[0]] += 2.56
    measures = task.measure("validation", validation, scores(nats))
    assert measures["loss"] == pytest.approx(2.02)
    assert measures["bits_per_byte"] == pytest.approx(2.02 / math.log(2))
    assert measures["perplexity"] == pytest.approx(math.exp(2.02))
    assert measures["word_perplexity"] == pytest.approx(math.exp(2.02 * 5), rel=1e-5)
    assert of(kind).measure("validation", validation, scores(nats))["word_perplexity"] is None


def test_a_perplexity_beyond_a_float_is_none_and_written_as_json_has_it():
    task = of(NextToken, WINDOWS[:2], bytes_per_word=5.0)
    nats = np.full((2, 64), 1e4)
    measures = task.measure("validation", task.held_out()["validation"], scores(nats))
    assert measures["perplexity"] is None and measures["word_perplexity"] is None
    assert json.loads(json.dumps(measures), parse_constant=pytest.fail) == measures


def test_bits_are_those_of_bytes_not_of_tokens(documents):
    corpus = Corpus(tuple(documents[:15]), tuple(documents[15:]))
    tokenizer = BytePairTokenizer.train(corpus.train, 300)
    task = NextToken.of(corpus, tokenizer, context=16, batch=2, eval_windows=5)
    validation = task.held_out()["validation"]
    measures = task.measure("validation", validation, scores(np.ones((5, 16))))
    assert measures["loss"] == 1.0
    text = "".join(tokenizer.decode(window[1:]) for window in task.valid)
    assert len(text.encode()) > 2 * 5 * 16
    bits = 5 * 16 / math.log(2)
    assert measures["bits_per_byte"] == pytest.approx(bits / len(text.encode()))


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (8, {"1": 1, "2": 2.5, "4": 6}),
        (9, {"1": 1, "2": 2.5, "4": 5.5, "8": 8.5}),
        (15, {"1": 1, "2": 2.5, "4": 5.5, "8": 11.5}),
    ],
)
def test_losses_by_position_are_means_over_the_tokens_before(length, expected):
    task = of(NextToken, WINDOWS[:2, : length + 1])
    # Each target costs as many bits as it has tokens before it.
    bits = np.tile(np.arange(1, length + 1), (2, 1))
    validation = task.held_out()["validation"]
    measures = task.measure("validation", validation, scores(bits * math.log(2)))
    assert measures["bits_by_position"] == pytest.approx(expected, rel=1e-6)


def spelled(tokens):
    """Model whose likeliest token is the mask, and the next likeliest the letter q."""
    return jnp.zeros((*tokens.shape, 257)).at[..., MASK].set(2).at[..., ord("q")].set(1)


def test_a_sample_fills_the_blanks_of_the_prompt():
    text = b"\nand so say all of us."
    found = of(MaskedTokens, np.frombuffer(text, np.uint8)[None]).sample(spelled, seed=0)
    prompt = found["prompt"]
    assert len(prompt) == len(text) - 1 and prompt.count("_") == 3
    assert found["sample"] == prompt.replace("_", "q")


def test_prompts_of_byte_pairs_have_a_blank_a_token(documents):
    tokenizer = BytePairTokenizer.train(documents, 300)
    window = tokenizer.encode(documents[:1])[:22]
    task = of(MaskedTokens, window[None], tokenizer)
    assert task.mask == 300

    def model(tokens):
        return jnp.zeros((*tokens.shape, 301))

    prompt = task.sample(model, seed=0)["prompt"]
    assert prompt.count("_") == 3
    whole = tokenizer.decode(window[1:])
    pieces = prompt.split("_")
    assert whole.startswith(pieces[0]) and whole.endswith(pieces[-1])


def test_a_model_that_does_not_decode_has_no_sample():
    class Model:
        def init_state(self, *arguments):
            raise NotImplementedError

        extend = init_state

    text = b"to be or not to be"
    found = of(NextToken, np.frombuffer(text, np.uint8)[None]).sample(Model(), seed=0)
    assert found == {"prompt": "to b", "sample": None}
