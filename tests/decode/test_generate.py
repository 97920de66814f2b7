"""Generation is the loop one would write, compiled once."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from effattn.decode import generate, sample_token
from effattn.nn import TransformerConfig, TransformerLM
from tests.marks import slow

CONFIG = TransformerConfig(vocab_size=13, num_layers=1, features=8, num_heads=2)
PROMPT = np.random.default_rng(3).integers(0, 13, (3, 5), np.int32)
LENGTHS = np.array([5, 1, 3])


def make_model(seed=0, **changes):
    model = TransformerLM(dataclasses.replace(CONFIG, **changes), rngs=nnx.Rngs(seed))
    # Larger embeddings make one token much likelier than the next: no ties by rounding.
    model.embed.embedding[...] *= 50
    return model


def by_full_forward_passes(model, prompt, lengths, new_tokens):
    # What follows a token cannot change its logits: one shape, compiled once, does for all passes.
    forward = jax.jit(lambda model, tokens: model(tokens))
    rows = np.arange(len(prompt))
    lengths = np.array(lengths)
    tokens = np.pad(prompt, [(0, 0), (0, new_tokens)])
    new = []
    for _ in range(new_tokens):
        logits = np.asarray(forward(model, tokens))[rows, lengths - 1]
        new.append(np.argmax(logits, axis=-1))
        tokens[rows, lengths] = new[-1]
        lengths += 1
    return np.stack(new, axis=1)


@pytest.mark.parametrize(
    "changes",
    [
        slow({"mixer": "softmax", "positions": "learned", "max_length": 9}),
        slow(
            {"mixer": {"name": "sliding_window", "local_window_size": (2, 0)}, "positions": "alibi"}
        ),
        {"mixer": ("softmax", "linear"), "num_layers": 2},
    ],
    ids=["softmax", "window", "mixed"],
)
def test_greedy_equals_argmax_of_full_forward_passes(changes):
    model = make_model(**changes)
    with jax.numpy_rank_promotion("raise"):
        tokens = generate(model, PROMPT, lengths=LENGTHS, max_new_tokens=4, temperature=0)
    assert tokens.dtype == jnp.int32
    np.testing.assert_array_equal(tokens, by_full_forward_passes(model, PROMPT, LENGTHS, 4))


class Counting:
    """Prefers the token after the last one, and counts how often it is traced."""

    def __init__(self, vocab_size=10):
        self.vocab_size = vocab_size
        self.traces = 0

    def init_state(self, batch, max_length):
        self.room = max_length
        return jnp.zeros((batch,), jnp.int32)

    def extend(self, tokens, state, *, lengths=None):
        self.traces += 1
        return jax.nn.one_hot((tokens + 1) % self.vocab_size, self.vocab_size), state + 1


def test_any_object_with_init_state_and_extend_generates():
    tokens = generate(Counting(), jnp.array([[3], [8]]), max_new_tokens=3, temperature=0)
    np.testing.assert_array_equal(tokens, [[4, 5, 6], [9, 0, 1]])


def test_the_state_has_room_for_all_tokens_but_the_last():
    model = Counting()
    generate(model, PROMPT, max_new_tokens=4, temperature=0)
    assert model.room == 5 + 4 - 1


def test_the_same_shapes_compile_once():
    model = Counting()
    for seed in range(3):
        generate(
            model,
            jnp.full((2, 3), seed),
            max_new_tokens=4,
            temperature=0.5 + seed,
            top_p=0.3 * (seed + 1),
            rng=jax.random.key(seed),
            eos_id=seed,
        )
    assert model.traces == 2  # the prompt, and the step inside the scan


def test_new_parameters_do_not_compile_again():
    traces = []

    class Traced(TransformerLM):
        def extend(self, tokens, state, *, lengths=None):
            traces.append(tokens.shape)
            return super().extend(tokens, state, lengths=lengths)

    outs = [
        generate(Traced(CONFIG, rngs=nnx.Rngs(seed)), PROMPT, max_new_tokens=6, temperature=0)
        for seed in range(3)
    ]
    assert traces == [(3, 5), (3, 1)]
    assert not np.array_equal(outs[0], outs[1])


def test_after_eos_a_row_holds_nothing_else():
    prompt = jnp.array([[3], [8]])
    tokens = generate(Counting(), prompt, max_new_tokens=5, temperature=0, eos_id=5)
    np.testing.assert_array_equal(tokens, [[4, 5, 5, 5, 5], [9, 0, 1, 2, 3]])


def test_one_new_token_needs_no_step():
    tokens = generate(Counting(), jnp.array([[3]]), max_new_tokens=1, temperature=0)
    np.testing.assert_array_equal(tokens, [[4]])


def test_the_same_key_draws_the_same_and_steps_draw_anew():
    model = Counting()
    options = {"max_new_tokens": 32, "temperature": 100.0}
    prompt = jnp.zeros((1, 1), jnp.int32)
    first = generate(model, prompt, rng=jax.random.key(0), **options)
    np.testing.assert_array_equal(first, generate(model, prompt, rng=jax.random.key(0), **options))
    assert not np.array_equal(first, generate(model, prompt, rng=jax.random.key(1), **options))
    assert len(set(np.asarray(first[0]).tolist())) > 4


def test_each_token_is_drawn_with_noise_of_its_own():
    """Also the first, of the prompt; of a thousand independent pairs of ten a tenth are equal."""
    prompt = jnp.zeros((1000, 1), jnp.int32)
    options = {"max_new_tokens": 3, "temperature": 1e4, "rng": jax.random.key(0)}
    tokens = np.asarray(generate(Counting(), prompt, **options))
    for first, second in [(0, 1), (1, 2), (0, 2)]:
        # Four standard errors.
        assert abs((tokens[:, first] == tokens[:, second]).mean() - 0.1) < 0.04


def test_numbers_may_be_traced():
    model, rng, prompt = Counting(), jax.random.key(0), jnp.array([[3], [8]])

    def draw(temperature, top_p, eos_id):
        given = {"temperature": temperature, "top_p": top_p, "eos_id": eos_id}
        return generate(model, prompt, max_new_tokens=5, rng=rng, **given)

    drawn = draw(2.0, 0.9, 5)
    assert not np.array_equal(drawn, draw(0.1, 0.9, 5))
    np.testing.assert_array_equal(jax.jit(draw)(2.0, 0.9, 5), drawn)


LOGITS = np.log(np.float32([0.4, 0.1, 0.3, 0.2]))


def draws(count=4000, **options):
    rng = jax.random.key(0)
    tokens = sample_token(np.broadcast_to(LOGITS, (count, 4)), rng, **options)
    return np.bincount(np.asarray(tokens), minlength=4) / count


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"temperature": 1.0}, [0.4, 0.1, 0.3, 0.2]),
        ({"temperature": 0.5}, np.array([0.16, 0.01, 0.09, 0.04]) / 0.3),
        ({"temperature": 1.0, "top_k": 2}, [4 / 7, 0, 3 / 7, 0]),
        ({"temperature": 1.0, "top_k": 4}, [0.4, 0.1, 0.3, 0.2]),
        ({"temperature": 1.0, "top_p": 0.65}, [4 / 7, 0, 3 / 7, 0]),
        ({"temperature": 1.0, "top_p": 0.75}, [4 / 9, 0, 3 / 9, 2 / 9]),
        ({"temperature": 1.0, "top_p": 1e-6}, [1, 0, 0, 0]),
        ({"temperature": 1.0, "top_p": 1.0}, [0.4, 0.1, 0.3, 0.2]),
        ({"temperature": 1.0, "top_k": 3, "top_p": 0.5}, [4 / 7, 0, 3 / 7, 0]),
        # The probability to reach is of what the temperature and top_k left.
        ({"temperature": 0.5, "top_p": 0.8}, [0.64, 0, 0.36, 0]),
        ({"temperature": 1.0, "top_k": 2, "top_p": 0.55}, [1, 0, 0, 0]),
    ],
    ids=str,
)
def test_draws_follow_the_cut_distribution(options, expected):
    frequency = draws(**options)
    np.testing.assert_array_equal(frequency[np.array(expected) == 0], 0)
    # Four standard errors of a frequency from 4000 draws.
    np.testing.assert_allclose(frequency, expected, atol=4 * 0.5 / 4000**0.5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": jnp.zeros((5,), jnp.int32)}, r"prompt must be integers of shape \(B, P\)"),
        ({"prompt": jnp.zeros((2, 5))}, "prompt must be integers"),
        ({"prompt": jnp.zeros((2, 0), jnp.int32)}, "P >= 1"),
        ({"lengths": jnp.array([1, 0, 2])}, "at least one prompt token"),
        ({"lengths": jnp.array([1, 6, 2])}, "between 0 and the 5 tokens"),
        ({"max_new_tokens": 0}, "max_new_tokens must be an int, 1 or more tokens, got 0"),
        ({"max_new_tokens": 2.0}, "max_new_tokens must be an int"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature must be 0 .* positive and finite, got inf"),
        ({"temperature": jnp.array([0.5, 1.0, 2.0])}, "one number for all rows"),
        ({"temperature": None}, "temperature must be one number for all rows, got None"),
        ({"temperature": 1.0}, "needs rng"),
        ({"temperature": 1.0, "rng": 0}, "needs rng, a jax.random key, got 0"),
        ({"temperature": 1.0, "rng": jax.random.key(0), "top_k": 2.5}, "top_k must be an int"),
        ({"temperature": 1.0, "rng": jax.random.key(0), "top_k": 11}, "vocabulary size 10"),
        ({"temperature": 1.0, "rng": jax.random.key(0), "top_k": 0}, "top_k"),
        ({"temperature": 1.0, "rng": jax.random.key(0), "top_p": 0.0}, "top_p"),
        ({"temperature": 1.0, "rng": jax.random.key(0), "top_p": 1.5}, "top_p"),
        ({"top_k": 3}, "temperature=0 takes the likeliest"),
        ({"eos_id": 1.5}, "eos_id must be an int"),
        ({"eos_id": [1, 2]}, "eos_id must be one number"),
        ({"eos_id": -1}, "eos_id must be a token, or None for no end, got -1"),
    ],
)
def test_bad_arguments_are_named(changes, message):
    arguments = {"prompt": PROMPT, "max_new_tokens": 2, "temperature": 0, **changes}
    with pytest.raises(ValueError, match=message):
        generate(Counting(), arguments.pop("prompt"), **arguments)


def test_sampling_without_a_key_is_refused():
    with pytest.raises(ValueError, match="needs rng"):
        sample_token(LOGITS, temperature=1.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 0.0}, "temperature must be positive"),
        ({"temperature": -1.0}, "temperature must be positive"),
        ({"temperature": float("inf")}, "temperature must be positive and finite"),
        ({"temperature": "1"}, "temperature must be a number, got '1'"),
        ({"top_k": 5}, "vocabulary size 4"),
        ({"top_k": 2.5}, "top_k must be an int"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\]"),
        ({"top_p": 2.0}, r"top_p must be in \(0, 1\]"),
    ],
)
def test_what_no_token_can_be_drawn_with_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        sample_token(LOGITS, jax.random.key(0), **{"temperature": 1.0, **changes})


def test_draws_do_not_depend_on_the_dtype_of_the_logits():
    """Of equal logits, where noise in 16 bits would have many ties and few values."""
    logits, rng = jnp.zeros((64, 4096), jnp.bfloat16), jax.random.key(0)
    wide = sample_token(logits.astype(jnp.float32), rng, temperature=1.0)
    np.testing.assert_array_equal(sample_token(logits, rng, temperature=1.0), wide)
