"""The functions of mixers without heads: their limits, and refused arguments."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import effattn
from effattn.analysis import cost
from effattn.functional.rwkv4 import Sums
from effattn.functional.s4 import hippo, low_rank_kernel
from effattn.nn import (
    GRU,
    LSTM,
    S4D,
    AFTConv,
    ConvolutionalClassifier,
    FNet,
    Hyena,
    Synthesizer,
)
from tests.marks import slow
from tests.nn.build import filled

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "transformers_fnet.npz"
RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, 9, 6)).astype(np.float32)
D = X.shape[-1]


def compiled(function, **options):
    return jax.jit(functools.partial(function, **options))


def close(a, b, tolerance=1e-5):
    np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * np.abs(b).max())


def test_fourier_mixing_agrees_with_transformers():
    with np.load(GOLDEN) as file:

        @jax.jit
        def with_gradient(x, cotangent):
            y, pull_back = jax.vjp(effattn.fourier_mixing, x)
            return y, *pull_back(cotangent)

        y, gradient = with_gradient(file["x"], file["cotangent"])
        close(y, file["output"], 1e-4)
        close(gradient, file["gradient"], 1e-4)


def test_rwkv4_mixing_takes_keys_of_any_size():
    """The largest key decides. Without decay and bonus, the result is a running softmax."""
    key = X.copy()
    key[:, 4] = 1e6
    zeros, run = np.zeros(D, np.float32), jax.jit(effattn.rwkv4_mixing)
    y = np.asarray(run(key, X, decay=zeros, bonus=zeros))
    close(y[:, 4:], np.broadcast_to(X[:, 4:5], X[:, 4:].shape))
    weights = np.exp(X)
    running = np.cumsum(weights * X, 1) / np.cumsum(weights, 1)
    close(run(X, X, decay=zeros, bonus=zeros), running)
    # The decay leaves only the present token and the one before it.
    far = np.full(D, 1e4, np.float32)
    y = np.asarray(run(X, X, decay=far, bonus=zeros))
    pair = (weights * X)[:, 1:] + (weights * X)[:, :-1]
    close(y[:, 1:], pair / (weights[:, 1:] + weights[:, :-1]))


def test_derivatives_along_a_tangent_are_those_of_the_gradients():
    key, value, tangent = np.random.default_rng(0).normal(size=(3, 1, 70, 3)).astype(np.float32)
    mix = functools.partial(effattn.rwkv4_mixing, value=value, decay=jnp.ones(3), bonus=jnp.ones(3))
    y, along = jax.jvp(mix, (key,), (tangent,))
    (gradient,) = jax.vjp(mix, key)[1](y)
    np.testing.assert_allclose((along * y).sum(), (gradient * tangent).sum(), rtol=1e-4)


def test_rwkv4_mixing_of_a_document_behind_one_of_far_larger_keys():
    """The weights of the second document do not underflow beside those of the first."""
    shift = np.where(np.arange(9) < 4, 100, -50)[:, None].astype(np.float32)
    ids = jnp.asarray([[1] * 4 + [2] * 5] * 2)

    @jax.jit
    def run(key, value, ids):
        mix = functools.partial(effattn.rwkv4_mixing, decay=jnp.ones(D), bonus=jnp.ones(D))
        y, pull_back = jax.vjp(lambda *arrays: mix(*arrays, segment_ids=ids), key, value)
        return y, pull_back(jnp.cos(y))

    together = run(X + shift, X, ids)
    alone = run((X + shift)[:, 4:], X[:, 4:], ids[:, 4:])
    for found, right in zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True):
        close(found[:, 4:], right, 2e-5)


def test_rwkv4_mixing_takes_zeros_for_the_state_of_no_token():
    """Zeros work even before keys for which exp(k) underflows."""
    key, value = np.full((1, 3, 2), -200, np.float32), np.ones((1, 3, 2), np.float32)
    zeros = Sums(*np.zeros((3, 1, 2), np.float32))
    mix = functools.partial(effattn.rwkv4_mixing, decay=np.ones(2), bonus=np.ones(2))
    np.testing.assert_allclose(mix(key, value, initial_state=zeros), 1, rtol=1e-6)


@pytest.mark.parametrize("is_causal", [True, slow(False)])
def test_the_forms_of_aft_are_each_other_at_their_limits(is_causal):
    """With equal biases, full and conv are simple; with a full window, local is full."""
    factors = RNG.normal(size=(2, 9, 3)).astype(np.float32)
    run = functools.partial(compiled, effattn.attention_free, is_causal=is_causal)
    simple = run()(X, X, X)
    with_bias = run()
    equal = with_bias(X, X, X, position_bias=tuple(np.ones_like(factors)))
    close(equal, simple)
    bias = tuple(factors)
    full = with_bias(X, X, X, position_bias=bias)
    local = run(local_window_size=9)(X, X, X, position_bias=bias)
    close(local, full)
    taps = np.zeros((2, 5 if is_causal else 9), np.float32)
    conv = run(local_window_size=4)(X, X, X, position_bias=taps)
    close(conv, simple)


@pytest.mark.parametrize("factors", [None, tuple(X[..., :2])], ids=["simple", "full"])
def test_aft_of_a_document_before_one_of_far_larger_keys(factors):
    key, ids = X.copy(), np.repeat([[1, 2]], [5, 4], 1)
    key[:, 5:] += 3000
    run = compiled(effattn.attention_free, position_bias=factors)
    both = run(X, key, X, segment_ids=np.repeat(ids, 2, 0))
    alone = effattn.attention_free(X[:, :5], key[:, :5], X[:, :5], position_bias=factors)
    close(both[:, :5], alone)


def test_the_memory_of_the_gradient_of_packed_aft_full_is_linear():
    def bytes_at(time):
        shapes = jax.ShapeDtypeStruct((1, time, 8), jnp.float32)
        factors = (jax.ShapeDtypeStruct((time, 3), jnp.float32),) * 2
        ids = jax.ShapeDtypeStruct((1, time), jnp.int32)

        def total(x, factors, ids):
            return effattn.attention_free(x, x, x, position_bias=factors, segment_ids=ids).sum()

        return cost.temporary_bytes(jax.jit(jax.grad(total)).trace(shapes, factors, ids))

    lengths = 1024, 4096
    assert cost.exponent(lengths, [bytes_at(time) for time in lengths]) <= 1.1


@functools.cache
def state_space():
    """The convolution arguments that an S4D layer draws."""

    def drawn():
        layer = S4D(4, state_size=16, rngs=nnx.Rngs(0))
        return {
            "rate": layer._A(jnp.float32),
            "output": jax.lax.complex(*layer.output[...]),
            "step_size": layer._dt(jnp.float32),
            "skip": layer.skip[...],
        }

    return jax.jit(drawn)()


@pytest.mark.parametrize("time", [slow(1), 100, slow(4096)])
def test_s4_is_one_as_convolution_and_as_recurrence(time):
    """The forms agree in float32, and the state continues from any split."""
    options = state_space()
    x = np.random.default_rng(1).normal(size=(2, time, 4)).astype(np.float32)
    forms = [
        compiled(effattn.s4_convolution, method=method, return_state=True)(x, **options)
        for method in ("convolution", "recurrence")
    ]
    jax.tree.map(lambda a, b: close(a, b, 1e-4), *forms)
    half = time // 2
    if half:
        run = compiled(effattn.s4_convolution, return_state=True)
        y, state = run(x[:, :half], **options)
        rest, _ = run(x[:, half:], **options, initial_state=state)
        close(np.concatenate([y, rest], 1), np.asarray(forms[0][0]), 1e-4)


def test_the_outputs_of_modes_start_as_complex_normal_numbers():
    """C = B c with E[|c|^2] = 1 and E[c^2] = 0: every phase is as likely."""
    output = np.asarray(S4D(2000, state_size=16, rngs=nnx.Rngs(0)).output)
    C, B = output[0] + 1j * output[1], hippo(16)[2]
    square = np.abs(B) ** 2
    np.testing.assert_allclose(np.mean(np.abs(C) ** 2, axis=0), square, rtol=0.1)
    assert (np.abs(np.mean(C**2, axis=0)) < 0.1 * square).all()


def test_the_low_rank_kernel_is_that_of_the_dense_hippo_matrix():
    """The test uses the matrix before diagonalisation, in float64, at several lengths."""
    size, step = 6, 0.3
    n = np.arange(size)
    b = np.sqrt(2 * n + 1)
    a = -np.tril(np.outer(b, b), -1) - np.diag(n + 1)
    inverse = np.linalg.inv(2 / step * np.eye(size) - a)
    turn, written = inverse @ (2 / step * np.eye(size) + a), 2 * inverse @ b
    rate, low_rank, to_modes = hippo(size)
    # The output C V reads the state of HiPPO in modes; C holds ones.
    normal = a + np.outer(np.sqrt(n + 0.5), np.sqrt(n + 0.5))
    _, vectors = np.linalg.eigh(-1j * (normal + 0.5 * np.eye(size)))
    for length in (1, 2, 7, 600):
        rest = np.eye(size) - np.linalg.matrix_power(turn, length)
        truncated = (np.ones(size) @ rest @ vectors)[size // 2 :]
        with jax.enable_x64(True):
            given = (np.asarray(p)[None] for p in (rate, low_rank, to_modes, truncated))
            kernel = compiled(low_rank_kernel, length=length)(*given, np.full((1,), step))
            kernel = np.asarray(kernel)
        state, expected = written, []
        for _ in range(length):
            expected.append(state.sum())
            state = turn @ state
        np.testing.assert_allclose(kernel[:, 0], expected, rtol=1e-9, atol=1e-9)


def test_hyena_without_filters_is_its_gates():
    gates = RNG.normal(size=(3, *X.shape)).astype(np.float32)
    filters = np.zeros((3, 9, D), np.float32)
    filters[:, 0] = 2
    run = jax.jit(effattn.hyena_convolution)
    close(run(gates, X, filters), 8 * gates.prod(0) * X)
    skip = np.full((3, D), 2, np.float32)
    close(run(gates, X, 0 * filters, skip=skip), 8 * gates.prod(0) * X)


def test_a_factorised_synthesizer_is_one_of_its_products():
    heads = 2
    coarse, fine, value = (
        RNG.normal(size=(2, 9, heads, size)).astype(np.float32) for size in (3, 4, 5)
    )
    logits = np.einsum("btna,btnc->btnac", coarse, fine).reshape(2, 9, heads, 12)[..., :9]
    for is_causal in (True, False):
        seen = np.tri(9, dtype=bool) if is_causal else np.ones((9, 9), bool)
        weights = jax.nn.softmax(np.where(seen[:, None], logits, -np.inf), -1)
        run = compiled(effattn.factorized_synthesizer_attention, is_causal=is_causal)
        y = run(coarse, fine, value)
        close(y, np.einsum("btns,bsnh->btnh", weights, value))


def test_what_is_in_the_padding_of_a_factorised_synthesizer_reaches_nothing():
    shown = np.arange(9)[:, None, None] < np.array([4, 0])[:, None, None, None]
    arrays = [RNG.normal(size=(2, 9, 2, 3)).astype(np.float32) for _ in range(3)]

    @jax.jit
    def run(arrays):
        def mix(*arrays):
            return effattn.factorized_synthesizer_attention(*arrays, lengths=np.array([4, 0]))

        y, pull_back = jax.vjp(mix, *arrays)
        return y, pull_back(y)

    clean = run([np.where(shown, x, 0) for x in arrays])
    dirty = run([np.where(shown, x, np.nan) for x in arrays])
    jax.tree.map(np.testing.assert_array_equal, dirty, clean)


def test_a_dense_synthesizer_is_attention_to_learned_keys():
    hidden, value = (RNG.normal(size=(2, 9, 2, 4)).astype(np.float32) for _ in range(2))
    table = RNG.normal(size=(9, 2, 4)).astype(np.float32)
    keys = np.broadcast_to(table, hidden.shape)
    exact = compiled(effattn.dot_product_attention, scale=1.0, is_causal=True)
    ours = compiled(effattn.synthesizer_attention, is_causal=True)
    close(ours(hidden, table, value), exact(hidden, keys, value))


def test_tables_that_are_not_trained_have_no_gradient():
    for kind in ("random", "factorized_random"):

        def make(kind=kind):
            return Synthesizer(D, 2, kind=kind, max_length=9, trained=False, rngs=nnx.Rngs(0))

        layer = filled(make)
        gradient = jax.jit(jax.grad(lambda m: jnp.sum(m(X) ** 2)))(layer)
        assert not np.any(gradient.table[...]) and np.any(gradient.value.kernel[...])
        assert not isinstance(layer.table, nnx.Param)


def of_poles(method):
    poles = -np.ones((4, 3), np.complex64)
    return lambda x: effattn.s4_convolution(
        x, rate=poles, output=poles, step_size=np.ones(4, np.float32), method=method
    )


POLES = {"rate": -np.ones((2, 3), np.complex64), "output": np.ones((2, 3), np.complex64)}
POLES["step_size"] = np.ones(2, np.float32)
WIDE_POLES = {"rate": -np.ones(3, np.complex64), "input": np.ones((3, 4), np.complex64)}
WIDE_POLES["step_size"] = np.ones(3, np.float32)
MIXINGS = {
    "rwkv4": lambda x: effattn.rwkv4_mixing(x, x, decay=jnp.ones(4), bonus=jnp.ones(4)),
    "rg_lru": lambda x: effattn.rg_lru(x, x, x, log_decay=-jnp.ones(4)),
    "aft": lambda x: effattn.attention_free(x, x, x, is_causal=True),
    "bidirectional aft": lambda x: effattn.attention_free(x, x, x),
    "biased aft": lambda x: effattn.attention_free(
        x, x, x, position_bias=(jnp.ones((9, 2)), jnp.ones((9, 2)))
    ),
    "hyena": lambda x: effattn.hyena_convolution(x[None], x, jnp.ones((1, *x.shape[1:]))),
    "s5": lambda x: effattn.s5_scan(x, **WIDE_POLES, output=jnp.ones((2, 4, 3), jnp.complex64)),
    "h3": lambda x: effattn.h3_mixing(x, x, x, **POLES),
    "long convolution": lambda x: effattn.long_convolution(x, jnp.ones((2, 7, 4))),
    "s4": of_poles("convolution"),
    "s4 in steps": of_poles("recurrence"),
    "factorized synthesizer": lambda x: effattn.factorized_synthesizer_attention(
        x[:, :, None], x[:, :, None], x[:, :, None]
    ),
}


@pytest.mark.parametrize("name", MIXINGS)
@pytest.mark.parametrize("batch, length", [(0, 7), (2, 0)])
def test_there_may_be_no_examples_or_no_tokens(name, batch, length):
    x = jnp.ones((batch, length, 4))
    gradient = jax.eval_shape(jax.grad(lambda x: MIXINGS[name](x).sum()), x)
    assert gradient.shape == x.shape


def test_no_tokens_leave_the_state_as_it_was():
    none, one = np.zeros((2, 0, D), np.float32), np.ones(D, np.float32)
    sums = Sums(*(np.full((2, D), size, np.float32) for size in (0.3, 0.7, 0.2)))
    rate = np.full((D, 3), -1 + 1j, np.complex64)
    states = np.full((2, D, 3), 2j, np.complex64)
    poles = functools.partial(effattn.s4_convolution, rate=rate, output=rate, step_size=one)
    for function, state in (
        (lambda x, **given: effattn.rwkv4_mixing(x, x, decay=one, bonus=one, **given), sums),
        (lambda x, **given: effattn.attention_free(x, x, x, is_causal=True, **given), sums),
        (lambda x, **given: effattn.rg_lru(x, x, x, log_decay=-one, **given), sums.values),
        (functools.partial(poles, method="convolution"), states),
        (functools.partial(poles, method="recurrence"), states),
    ):
        y, after = jax.jit(lambda s, f=function: f(none, initial_state=s, return_state=True))(state)
        assert y.shape == none.shape
        jax.tree.map(np.testing.assert_array_equal, after, state)


def test_the_state_of_packed_documents_is_that_of_the_last_one():
    """Padding may follow the last document."""
    decay, ids = np.ones(D, np.float32), np.repeat([[3, 4, 0]], [2, 4, 3], 1)
    for mix in (
        functools.partial(effattn.rwkv4_mixing, decay=decay, bonus=decay),
        functools.partial(effattn.attention_free, X[:1, :, :], is_causal=True),
    ):
        run = jax.jit(functools.partial(mix, return_state=True))
        _, packed = run(X[:1], X[:1], segment_ids=ids)
        if mix.func is effattn.attention_free:
            mix = functools.partial(effattn.attention_free, X[:1, 2:6], is_causal=True)
        _, alone = mix(X[:1, 2:6], X[:1, 2:6], return_state=True)
        jax.tree.map(close, packed, alone)


def test_spatial_gating_starts_from_the_token_itself():
    weights, bias = np.zeros((9, 9), np.float32), np.ones(9, np.float32)
    close(jax.jit(effattn.spatial_gating)(X, X, weights, bias), X)
    causal = compiled(effattn.spatial_gating, is_causal=True)
    assert not np.any(causal(X, X, np.eye(9, k=1), 0 * bias))


@pytest.mark.parametrize("layer", [LSTM, GRU])
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-6), (np.float64, 1e-14)])
def test_baselines_are_those_of_flax(layer, dtype, tolerance):
    """Outputs and carry agree: in float64 by XLA, in float32 by kernels where there are any."""
    with jax.enable_x64(dtype == np.float64):
        x = jnp.asarray(np.concatenate([X, X, X], 1), dtype)
        mixer = layer(D, param_dtype=dtype, rngs=nnx.Rngs(0))
        carry, expected = nnx.RNN(mixer.cell, return_carry=True)(x)
        y, state = mixer.extend(x, mixer.init_state(2, 0))
        close(y, expected, tolerance)
        close(mixer(x), expected, tolerance)
        pairs = jax.tree.leaves(state.state), jax.tree.leaves(carry)
        jax.tree.map(lambda *pair: close(*pair, tolerance), *pairs)


@pytest.mark.parametrize("layer", [LSTM, GRU])
def test_bidirectional_baselines_are_those_of_flax(layer):
    mixer = layer(D, is_causal=False, rngs=nnx.Rngs(0))
    lengths = np.array([len(X[0]), 3])
    both = nnx.Bidirectional(
        nnx.RNN(mixer.cell), nnx.RNN(mixer.backward, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(0)
    )
    expected = mixer.out(both(jnp.asarray(X), seq_lengths=jnp.asarray(lengths)))
    found = mixer(X, lengths=lengths)
    for row, length in enumerate(lengths):
        close(found[row, :length], expected[row, :length])


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


FILTERS, FACTORS = np.zeros((2, 9, D)), (np.zeros((9, 2)), np.zeros((9, 2)))
COMPLEX = np.zeros((D, 2), np.complex64)
STATE_SPACE = {"rate": COMPLEX - 1, "output": COMPLEX, "step_size": np.ones(D)}
IDS = np.ones((2, 9), int)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: effattn.fourier_mixing(np.ones(3)), r"x must be floating point of shape \(\*B, T"),
        (lambda: effattn.fourier_mixing(np.ones((3, 3), int)), "got int.* cast it"),
        (lambda: effattn.fourier_mixing(X, norm="forward"), "norm must be .*, got .forward."),
        (lambda: FNet(8, norm=2, rngs=nnx.Rngs(0)), 'norm must be "backward" or "ortho", got 2'),
        (lambda: effattn.rwkv4_mixing(X, X[:, :3], decay=0, bonus=0), "value must be float32 of"),
        (
            lambda: effattn.rwkv4_mixing(X, X, decay=np.ones(3), bonus=np.ones(D)),
            r"decay must be floating point of shape \(6,\), got .* \(3,\)",
        ),
        (
            lambda: effattn.rwkv4_mixing(
                X, X, decay=np.ones(D), bonus=np.ones(D), segment_ids=IDS, initial_state=()
            ),
            "initial_state needs segment_ids=None",
        ),
        (
            lambda: effattn.attention_free(X, X, X, position_bias=(FACTORS[0][:5],) * 2),
            "with T' at least the 9 tokens",
        ),
        (
            lambda: effattn.attention_free(X, X, X, position_bias=np.ones((2, 3))),
            "position_bias of taps needs local_window_size",
        ),
        (
            lambda: effattn.attention_free(X, X, X, position_bias=(FACTORS[0],)),
            "an array of taps or a pair of factors, got 1",
        ),
        (
            lambda: effattn.attention_free(X, X, X, position_bias=(FACTORS[0].astype(int),) * 2),
            "position_bias must be floating point",
        ),
        (
            lambda: effattn.attention_free(
                X, X, X, position_bias=np.ones((2, 3), complex), local_window_size=1
            ),
            "position_bias must be floating point",
        ),
        (
            lambda: effattn.attention_free(
                X, X, X, position_bias=np.ones((0, 3)), local_window_size=1
            ),
            r"\(G, 3\), .* 3 taps .*, got \(0, 3\)",
        ),
        (
            lambda: effattn.attention_free(
                X, X, X, position_bias=np.ones((4, 3)), local_window_size=1
            ),
            r"\(G, 3\), with G a divisor of .* local_window_size=1 in a bidirectional call, got",
        ),
        (
            lambda: effattn.attention_free(X, X, X, local_window_size=1),
            "needs position_bias, got N",
        ),
        (
            lambda: effattn.attention_free(X, X, X, is_causal=True, initial_state=X[:, 0]),
            "initial_state must be the Sums that an earlier call returned",
        ),
        (
            lambda: effattn.rwkv4_mixing(
                X, X, decay=np.ones(D), bonus=np.ones(D), initial_state=Sums(X, X, X)
            ),
            r"initial_state.values must be floating point of shape \(2, 6\), got .* \(2, 9, 6\)",
        ),
        (
            lambda: effattn.attention_free(X, X, X, return_state=True),
            "need is_causal=True and position_bias=None, .* got is_causal=False without",
        ),
        (
            lambda: effattn.hyena_convolution(np.zeros((2, 2, 9, D)), X, FILTERS[:, :5]),
            r"filters must have shape \(2, L, 6\) with L at least the 9 tokens, .* max_length",
        ),
        (
            lambda: effattn.hyena_convolution(np.zeros((2, 2, 9, D)), X, FILTERS.astype(int)),
            r"filters must be floating point of shape \(2, 9, 6\), got int",
        ),
        (lambda: Hyena(D, max_length=5, rngs=nnx.Rngs(0))(X), "9 tokens, .* max_length=5"),
        (
            lambda: effattn.s4_convolution(X, **STATE_SPACE, method="fft"),
            'method must be "convolution", "recurrence" or None, got \'fft\'',
        ),
        (
            lambda: effattn.s4_convolution(X, **STATE_SPACE, method="convolution", segment_ids=IDS),
            "segment_ids needs method='recurrence' or None",
        ),
        (
            lambda: effattn.s4_convolution(X, **{**STATE_SPACE, "rate": np.ones((D, 2))}),
            r"rate must be complex of shape \(6, M\)",
        ),
        (
            lambda: effattn.s4_convolution(X, **STATE_SPACE, initial_state=COMPLEX),
            r"initial_state must be complex of shape \(2, 6, 2\), got complex64 of shape \(6, 2\)",
        ),
        (
            lambda: effattn.s4_convolution(X, **STATE_SPACE, initial_state=np.ones((2, D, 2))),
            r"initial_state must be complex of shape \(2, 6, 2\), got float",
        ),
        (lambda: S4D(D, state_size=3, rngs=nnx.Rngs(0)), "state_size must be even"),
        (
            lambda: effattn.spatial_gating(X, X, np.ones((4, 4)), np.ones(4)),
            r"weights of shape \(4, 4\) are for at most 4 tokens, got 9 in value",
        ),
        (
            lambda: effattn.synthesizer_attention(
                np.ones((2, 9, 2, 3)), np.ones((9, 2, 4)), np.ones((2, 9, 2, 3))
            ),
            r"table must have shape \(S, N, A\) for hidden",
        ),
        (
            lambda: effattn.synthesizer_attention(
                np.ones((2, 9, 2, 3)), np.ones((9, 2, 3), int), np.ones((2, 9, 2, 3))
            ),
            "table must be floating point",
        ),
        (
            lambda: effattn.synthesizer_attention(
                np.ones((2, 9, 2, 3)), np.ones((3, 9, 2, 3)), np.ones((2, 9, 2, 3))
            ),
            r"table must be floating point of shape \(2, 9, 2, 3\), got .* \(3, 9, 2, 3\)",
        ),
        (
            lambda: effattn.factorized_synthesizer_attention(
                np.ones((2, 9, 2, 3), int), np.ones((2, 9, 2, 4)), np.ones((2, 9, 2, 3))
            ),
            "coarse must be floating point",
        ),
        (
            lambda: effattn.factorized_synthesizer_attention(
                np.ones((2, 9, 2, 3)), 1.0, np.ones((2, 9, 2, 3))
            ),
            r"fine \(B, T, N, m\) and value .*, got \(2, 9, 2, 3\), \(\) and",
        ),
        (
            lambda: effattn.factorized_synthesizer_attention(
                np.ones((2, 9, 2, 2)), np.ones((2, 9, 2, 4)), np.ones((2, 9, 2, 3))
            ),
            "at least 9 logits, one for each key, got 2 x 4",
        ),
        (
            lambda: Synthesizer(D, 2, kind="denser", max_length=9, rngs=nnx.Rngs(0)),
            "kind must be one of dense, factorized, random, factorized_random, mixture",
        ),
        (
            lambda: Synthesizer(
                D, 2, kind="random", max_length=9, hidden_features=3, rngs=nnx.Rngs(0)
            ),
            "kind='random' takes no hidden_features, got",
        ),
        (
            lambda: Synthesizer(D, 2, max_length=9, trained=False, rngs=nnx.Rngs(0)),
            "trained=False needs kind='random' or .*, got kind='dense'",
        ),
        (
            lambda: Synthesizer(D, 2, max_length=5, rngs=nnx.Rngs(0))(X),
            "x has 9 tokens, but this Synthesizer has parameters for max_length=5",
        ),
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
        (
            lambda: AFTConv(D, "2", rngs=nnx.Rngs(0)),
            "num_heads must be an int, 1 or more heads, got '2'",
        ),
        (
            lambda: Hyena(D, max_length=9, window_shift=None, rngs=nnx.Rngs(0)),
            "window_shift must be a number, got None",
        ),
        (
            lambda: Hyena(D, max_length=9, frequency="10", rngs=nnx.Rngs(0)),
            "frequency must be a number, got '10'",
        ),
        (
            lambda: Hyena(D, max_length=9, frequency=np.nan, rngs=nnx.Rngs(0)),
            "frequency must be finite, got nan",
        ),
        (
            lambda: Hyena(D, max_length=9, window_shift=np.nan, rngs=nnx.Rngs(0)),
            "window_shift must be finite, got nan",
        ),
    ],
)
def test_what_does_not_fit_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(call)
