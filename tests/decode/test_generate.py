"""Generation gives the tokens of a plain loop, and is compiled once."""

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
    # Larger embeddings make one token much likelier than the next, so rounding causes no ties.
    model.embed.embedding[...] *= 50
    return model


def by_full_forward_passes(model, prompt, lengths, new_tokens, **marks):
    # Later tokens cannot change earlier logits, so one padded shape, compiled once, serves all
    # passes.
    marks = {name: np.pad(mark, [(0, 0), (0, new_tokens)]) for name, mark in marks.items()}
    forward = jax.jit(lambda model, tokens: model(tokens, **marks))
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
    """Model that prefers the token after the last one, and counts how often it is traced."""

    def __init__(self, vocab_size=10):
        self.vocab_size = vocab_size
        self.traces = 0

    def init_state(self, batch, max_length):
        self.room = max_length
        return jnp.zeros((batch,), jnp.int32)

    def extend(self, tokens, state, *, lengths=None):
        self.traces += 1
        return jax.nn.one_hot((tokens + 1) % self.vocab_size, self.vocab_size), state + 1


GLOBAL = np.array([[1, 0, 0, 1, 0], [1, 0, 1, 1, 0], [0, 0, 1, 0, 1]], bool)


@pytest.mark.parametrize("length", [5, slow(1)])
def test_global_tokens_of_the_prompt(length):
    """The last token of one prompt is global; padding is not."""
    longformer = {"name": "longformer", "local_window_size": (1, 0), "max_global": 2}
    model = make_model(mixer=longformer, num_layers=2)
    prompt, lengths = PROMPT[:, :length], np.minimum(LENGTHS, length)
    mask = GLOBAL[:, :length]
    tokens = generate(
        model, prompt, lengths=lengths, global_mask=mask, max_new_tokens=4, temperature=0
    )
    valid = mask & (np.arange(length) < lengths[:, None])
    expected = by_full_forward_passes(model, prompt, lengths, 4, global_mask=valid)
    np.testing.assert_array_equal(tokens, expected)
    without = by_full_forward_passes(model, prompt, lengths, 4)
    assert length == 1 or np.any(without != expected)


def test_global_tokens_need_a_model_that_takes_them():
    with pytest.raises(ValueError, match="no mixer of this model takes it"):
        generate(make_model(), PROMPT, global_mask=GLOBAL, max_new_tokens=1, temperature=0)
    with pytest.raises(ValueError, match=r"bool of the shape of the prompt, \(3, 5\), got int"):
        generate(make_model(), PROMPT, global_mask=LENGTHS, max_new_tokens=1, temperature=0)


def test_any_object_with_init_state_and_extend_generates():
    tokens = generate(Counting(), jnp.array([[3], [8]]), max_new_tokens=3, temperature=0)
    np.testing.assert_array_equal(tokens, [[4, 5, 6], [9, 0, 1]])


def test_the_state_has_room_for_all_tokens_but_the_last():
    model = Counting(13)
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
    assert model.traces == 2  # one trace of the prompt, and one of the step inside the loop


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
    assert traces == [(3, 4), (3, 1)]
    assert not np.array_equal(outs[0], outs[1])


def test_after_eos_a_row_holds_nothing_else():
    prompt = jnp.array([[3], [8]])
    tokens = generate(Counting(), prompt, max_new_tokens=5, temperature=0, eos_id=5)
    np.testing.assert_array_equal(tokens, [[4, 5, 5, 5, 5], [9, 0, 1, 2, 3]])


@pytest.mark.parametrize("ends", [[5, 1], (1, 5), np.array([5, 1]), jnp.array([1, 5, 5], jnp.int8)])
def test_each_of_several_tokens_ends_a_row(ends):
    prompt = jnp.array([[3], [8], [5]])
    tokens = generate(Counting(), prompt, max_new_tokens=4, temperature=0, eos_id=ends)
    np.testing.assert_array_equal(tokens, [[4, 5, 5, 5], [9, 0, 1, 1], [6, 7, 8, 9]])


class Noting(Counting):
    """Counting model that also records each run of a step."""

    def __init__(self):
        super().__init__()
        self.runs = []

    def extend(self, tokens, state, *, lengths=None):
        if tokens.shape[1] == 1:
            jax.debug.callback(lambda state: self.runs.append(state), state)
        return super().extend(tokens, state, lengths=lengths)


@pytest.mark.parametrize("ends", [5, [5, 0], [4, 5], None], ids=str)
@pytest.mark.parametrize("prompt", [[[3], [9]], [[3, 3, 3], [3, 3, 9]]])
def test_nothing_runs_after_all_rows_have_ended(ends, prompt):
    """One row or each row ends at its end token, or all rows go on to the last step."""
    model = Noting()
    tokens = generate(model, jnp.array(prompt), max_new_tokens=9, temperature=0, eos_id=ends)
    jax.effects_barrier()
    plain = (np.array(prompt)[:, -1:] + 1 + np.arange(9)) % 10
    ended = np.cumsum(np.isin(plain, [] if ends is None else ends), 1) > 0
    first = np.argmax(ended, 1)
    of_row = np.where(ended, plain[np.arange(2), first][:, None], plain)
    np.testing.assert_array_equal(tokens, of_row)
    expected = 9 if not ended.any(1).all() else first.max() + 1
    assert len(model.runs) == expected


@pytest.mark.parametrize("lengths", [None, np.array([64, 1])])
def test_logits_are_made_of_the_last_token_of_a_prompt_alone(lengths):
    """Logits of all 64 tokens of both rows would take 64 MB in the compiled program."""
    vocabulary, prompt = 2**17, jnp.ones((2, 64), jnp.int32)
    model = jax.eval_shape(lambda: make_model(vocab_size=vocabulary))

    def run(model):
        return generate(model, prompt, lengths=lengths, max_new_tokens=2, temperature=0)

    memory = jax.jit(run).lower(model).compile().memory_analysis()
    of_two_steps = 4 * 2 * 2 * vocabulary
    assert memory.temp_size_in_bytes < 4 * of_two_steps


def test_no_rows_and_no_new_tokens_give_empty_arrays():
    model = make_model()
    none = generate(model, PROMPT, max_new_tokens=0, temperature=0)
    assert none.shape == (3, 0) and none.dtype == jnp.int32
    for length in (1, 40):
        prompt = np.zeros((0, length), int)
        empty = generate(model, prompt, max_new_tokens=2, rng=jax.random.key(0), eos_id=1)
        assert empty.shape == (0, 2) and empty.dtype == jnp.int32


@pytest.mark.parametrize(
    ("prompt", "lengths"),
    [([[0, 13]], None), ([[-1, 0]], None), (np.array([[2**32, 1]]), None), ([[1, 13, 99]], [2])],
)
def test_a_prompt_outside_the_vocabulary_is_refused(prompt, lengths):
    """Models of other classes are checked too, by the size of their logits."""
    for model in (make_model(), Counting(13)):
        with pytest.raises(ValueError, match="prompt must (hold tokens of the vocab|fit in int32)"):
            generate(model, prompt, lengths=lengths, max_new_tokens=2, temperature=0)


def test_padding_of_a_prompt_may_hold_anything():
    prompt = np.array([[3, 99, -7], [3, 4, 5]])
    tokens = generate(Counting(), prompt, lengths=[1, 3], max_new_tokens=2, temperature=0)
    np.testing.assert_array_equal(tokens, [[4, 5], [6, 7]])


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
    """The first token has its own noise too. Independent draws of 10 tokens agree in 1 of 10."""
    prompt = jnp.zeros((1000, 1), jnp.int32)
    options = {"max_new_tokens": 3, "temperature": 1e4, "rng": jax.random.key(0)}
    tokens = np.asarray(generate(Counting(), prompt, **options))
    for first, second in [(0, 1), (1, 2), (0, 2)]:
        # The bound is four standard errors.
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
        # `top_p` refers to the probabilities after the temperature and `top_k`.
        ({"temperature": 0.5, "top_p": 0.8}, [0.64, 0, 0.36, 0]),
        ({"temperature": 1.0, "top_k": 2, "top_p": 0.55}, [1, 0, 0, 0]),
    ],
    ids=str,
)
def test_draws_follow_the_cut_distribution(options, expected):
    frequency = draws(**options)
    np.testing.assert_array_equal(frequency[np.array(expected) == 0], 0)
    # The bound is four standard errors of a frequency from 4000 draws.
    np.testing.assert_allclose(frequency, expected, atol=4 * 0.5 / 4000**0.5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": jnp.zeros((5,), jnp.int32)}, r"prompt must be integers of shape \(B, P\)"),
        ({"prompt": jnp.zeros((2, 5))}, "prompt must be integers"),
        ({"prompt": jnp.zeros((2, 0), jnp.int32)}, "P >= 1"),
        ({"lengths": jnp.array([1, 0, 2])}, "at least one prompt token"),
        ({"lengths": jnp.array([1, 6, 2])}, "between 0 and the 5 tokens"),
        ({"max_new_tokens": -1}, "max_new_tokens must be an int, 0 or more tokens, got -1"),
        ({"max_new_tokens": 2.0}, "max_new_tokens must be an int"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature must be 0 .* positive and finite, got inf"),
        ({"temperature": jnp.array([0.5, 1.0, 2.0])}, "one number for all rows"),
        ({"temperature": None}, "temperature must be one number for all rows, got None"),
        ({"temperature": 1.0}, "needs rng"),
        ({"temperature": 1.0, "rng": 0}, "rng must be a jax.random key, got 0"),
        ({"temperature": 1.0, "rng": jax.random.key(0), "top_k": 2.5}, "top_k must be an int"),
        ({"temperature": 1.0, "rng": jax.random.key(0), "top_k": 14}, "vocabulary size 13"),
        ({"temperature": 1.0, "rng": jax.random.key(0), "top_k": 0}, "top_k"),
        ({"temperature": 1.0, "rng": jax.random.key(0), "top_p": 0.0}, "top_p"),
        ({"temperature": 1.0, "rng": jax.random.key(0), "top_p": 1.5}, "top_p"),
        ({"top_k": 3}, "temperature=0 takes the likeliest"),
        ({"eos_id": 1.5}, "eos_id must be an int"),
        ({"eos_id": []}, r"one or more of them in a list or an array, got \[\]"),
        ({"eos_id": [[1, 2]]}, "eos_id must be an int"),
        ({"eos_id": True}, "eos_id must be an int"),
        ({"eos_id": "</s>"}, "eos_id must be an int, .* got '</s>'"),
        ({"eos_id": -1}, "eos_id must hold tokens of the vocabulary, from 0 to 12, got -1"),
        ({"eos_id": [1, 13]}, "eos_id must hold tokens of the vocabulary, from 0 to 12, got 13"),
        ({"eos_id": 2**40}, "eos_id must fit in int32"),
    ],
)
def test_bad_arguments_are_named(changes, message):
    arguments = {"prompt": PROMPT, "max_new_tokens": 2, "temperature": 0, **changes}
    with pytest.raises(ValueError, match=message):
        generate(Counting(13), arguments.pop("prompt"), **arguments)


def sampled(logits, count=400, **options):
    """Frequency of each token in the draws, which a traced temperature must not change."""
    logits = np.broadcast_to(np.float32(logits), (count, len(logits)))
    rng = jax.random.key(0)
    tokens = np.asarray(sample_token(logits, rng, **options))
    temperature = np.float32(options.pop("temperature"))
    traced = jax.jit(lambda t: sample_token(logits, rng, temperature=t, **options))(temperature)
    np.testing.assert_array_equal(traced, tokens)
    return np.bincount(tokens, minlength=logits.shape[1]) / count


@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.9}], ids=str)
@pytest.mark.parametrize("temperature", [1e-37, 1e-38, 1e-40, 1e-45, 1e-300])
def test_a_tiny_temperature_takes_the_best(temperature, options):
    """The temperatures are normal or subnormal in float32, or zero there."""
    for logits in ([0, 1, 3, 2], [-70, -80, -69.9999, -75], [1e-30, 0, 2e-30, -np.inf]):
        drawn = sampled(logits, temperature=temperature, **options)
        np.testing.assert_array_equal(drawn, [0, 0, 1, 0])


@pytest.mark.parametrize("temperature", [1e-40, 1.0])
def test_generate_takes_the_best_at_a_tiny_temperature_and_draws_at_others(temperature):
    prompt, options = jnp.array([[3], [8]]), {"max_new_tokens": 5, "rng": jax.random.key(0)}
    best = generate(Counting(), prompt, max_new_tokens=5, temperature=0)
    drawn = generate(Counting(), prompt, temperature=temperature, **options)
    assert np.array_equal(drawn, best) == (temperature < 1)


def test_a_huge_temperature_draws_evenly_but_never_what_is_excluded():
    for temperature in (1e30, 3e38):
        drawn = sampled([0, 5, -np.inf, 9], count=4000, temperature=temperature)
        np.testing.assert_allclose(drawn, [1 / 3, 1 / 3, 0, 1 / 3], atol=0.03)
        # `top_k` is applied before the division, which would make all logits equal.
        drawn = sampled([1, 1.0000001, 0], temperature=temperature, top_k=1)
        np.testing.assert_array_equal(drawn, [0, 1, 0])


INF, NAN = np.inf, np.nan


@pytest.mark.parametrize(
    ("logits", "first", "likely"),
    [
        ([1, 5, 5, -INF], 1, [1, 2]),
        ([-INF, -INF, -3, -INF], 2, [2]),
        ([0, INF, 3, INF], 1, [1, 3]),
        ([-INF, -INF, -INF], 0, [0, 1, 2]),
        ([NAN, 2, 1, -INF], 1, [1]),
        ([NAN, -INF, INF, 7], 2, [2]),
        ([NAN, NAN], 0, [0, 1]),
        ([-0.0, 0.0], 0, [0, 1]),
    ],
    ids=str,
)
def test_ties_and_infinities(logits, first, likely):
    """Greedy choice takes the first of the best; a draw at a tiny temperature takes each alike."""
    assert sample_token(np.float32(logits)) == first
    assert jax.jit(sample_token)(np.float32(logits)) == first
    for options in ({}, {"top_k": 1}, {"top_p": 1e-40}):
        drawn = sampled(logits, count=4000, temperature=1e-39, **options)
        expected = np.isin(np.arange(len(logits)), likely) / len(likely)
        np.testing.assert_allclose(drawn, expected, atol=0.04 if len(likely) > 1 else 0)


def test_infinite_logits_pass_the_check_for_nan():
    with jax.debug_nans(True):
        for logits in ([-INF, 1, -INF], [INF, 0, INF], [-INF, -INF, -INF]):
            sampled(logits, temperature=0.5, top_k=2, top_p=0.9)


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
    """The logits are equal, so noise in 16 bits would have few values and many ties."""
    logits, rng = jnp.zeros((64, 4096), jnp.bfloat16), jax.random.key(0)
    wide = sample_token(logits.astype(jnp.float32), rng, temperature=1.0)
    np.testing.assert_array_equal(sample_token(logits, rng, temperature=1.0), wide)


def test_options_of_draws_without_a_temperature_are_refused():
    with pytest.raises(ValueError, match="takes the likeliest token and uses no rng, top_k; give"):
        sample_token(LOGITS, jax.random.key(0), top_k=2)
    with pytest.raises(ValueError, match="uses no top_p"):
        sample_token(LOGITS, top_p=0.9)


@pytest.mark.parametrize("shape", [(4,), (2, 4), (3, 2, 4)])
def test_each_row_may_have_its_own_temperature_and_share(shape):
    """Four rows of a vocabulary of four, so that a wrong axis would have the same size."""
    draw = np.random.default_rng(0)
    logits = draw.normal(size=(*shape, 4)).astype(np.float32)
    temperature, top_p = draw.uniform(0.2, 2, shape), draw.uniform(0.3, 1, shape)
    for seed in range(20):
        rng = jax.random.key(seed)
        together = sample_token(logits, rng, temperature=temperature, top_p=top_p)
        for place in np.ndindex(shape):
            options = {"temperature": temperature[place], "top_p": top_p[place]}
            alone = sample_token(logits, rng, **options)
            assert together[place] == alone[place]
    with pytest.raises(ValueError, match="one number, or one for each row, of shape .*, got shape"):
        sample_token(logits, rng, temperature=np.ones((*shape, 1)))


@pytest.mark.parametrize("rng", [np.ones(2), jnp.zeros((3, 2), jnp.uint32), 7], ids=str)
def test_what_is_no_key_is_refused(rng):
    with pytest.raises(ValueError, match="rng must be a jax.random key, got"):
        sample_token(LOGITS, rng, temperature=1.0)
