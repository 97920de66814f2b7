"""The Triton kernels of the linear recurrence: interpreted and lowered.

Results are compared with one token at a time in float64, and with the XLA form.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import effattn
from effattn import dispatch
from effattn.interfaces.linear_recurrence import Config, Inputs
from effattn.pallas.triton import linear_recurrence
from effattn.testing.functions import assert_close
from tests.marks import slow
from tests.pallas.lowering import TRITON, compile_triton, kernel_bytes, kernels_of
from tests.pallas.recurrence_cases import (
    assert_alike,
    assert_near,
    documents,
    draw,
    errors,
    exact,
    in_both_widths,
    of_bytes,
    of_documents,
    one_document,
    program,
    recurrence,
    sixteen_bit_forms,
    with_gradients,
)
from tests.xla.test_linear_recurrence import ALL, as_they_are


@pytest.mark.parametrize(
    ("length", "decay", "heads", "sizes", "normalized"),
    [
        slow(1, "feature", (4, 2, 2), (3, 5), False),
        (64, "token", (2, 2, 4), (70, 66), True),
        slow(130, "head", (1, 1, 1), (7, 3), False),
        slow(130, "feature", (4, 2, 2), (70, 66), True),
    ],
)
def test_agrees_with_one_token_at_a_time(length, decay, heads, sizes, normalized):
    """Partial chunks, shared heads, and sizes of several tiles or of less than a tile."""
    args = draw(length, decay, heads, sizes, normalized)
    ours = with_gradients(functools.partial(recurrence, normalized=normalized), *args)
    assert_near(ours, exact(*args, normalized=normalized))


@pytest.mark.slow
def test_the_delta_form_agrees_with_one_token_at_a_time():
    """Some tokens forget much; one token forgets all, so its decay has no gradient."""
    # The seed is that of five in which the terms of the denominator cancel least.
    terms, state = draw(130, "token", (2, 2, 4), (70, 20), normalized=True, form="delta", seed=2)
    terms.log_decay[:, 20], terms.log_decay[:, 66] = -1e4, -np.inf
    ours = with_gradients(functools.partial(recurrence, normalized=True), terms, state)
    assert_near(ours, exact(terms, state, normalized=True))
    assert not np.any(ours[1][0].log_decay[:, 66])


@pytest.mark.parametrize(
    ("decay", "heads", "normalized"),
    [
        ("feature", (2, 1, 1), False),
        slow("none", (1, 1, 2), False),
        slow("token", (2, 2, 2), True),
    ],
)
def test_removed_vectors_of_their_own(decay, heads, normalized):
    """A token is two tokens of the kernels: one removes, one writes."""
    args = draw(70, decay, heads, (5, 6), normalized, form="own", seed=1)
    ours = with_gradients(functools.partial(recurrence, normalized=normalized), *args)
    assert_near(ours, exact(*args, normalized=normalized))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("decay", "form", "sizes", "normalized"),
    [
        ("none", "plain", (16, 16), True),
        ("token", "plain", (5, 6), False),
        ("feature", "plain", (5, 6), False),
        ("none", "bonus", (5, 6), False),
        ("feature", "bonus", (5, 6), False),
        ("feature", "delta", (5, 6), False),
        ("feature", "own", (5, 6), False),
    ],
)
def test_documents_and_masks(decay, form, sizes, normalized):
    args = draw(103, decay, (4, 2, 2), sizes, normalized, form)
    tokens = documents()
    ours = of_documents(*args, tokens, normalized=normalized)
    assert_near(ours, exact(*args, tokens=tokens, normalized=normalized))


@pytest.mark.slow
@pytest.mark.parametrize("decay", ["token", "feature"])
def test_decays_that_forget_much_or_all(decay):
    """As exact as the XLA form; gradients do not pass through a decay of zero."""
    terms, state = draw(103, decay, (4, 2, 2), (5, 6))
    strong = 40 * terms.log_decay
    strong[:, 20], strong[:, 66] = -1e4, -np.inf
    args = terms._replace(log_decay=strong), state
    expected = exact(*args, one_document())
    ours = of_documents(*args, one_document(), normalized=False)
    xla = of_documents(*args, one_document(), names=("xla",))
    assert not np.any(ours[1][0].log_decay[:, 66])
    for error, other, size in errors(ours, xla, expected):
        assert error <= max(2 * other, 1e-6 * size)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_sixteen_bits(dtype):
    terms, state = draw(103, "token", (4, 2, 2), (5, 6))
    terms = jax.tree.map(lambda x: jnp.asarray(x, dtype), terms)
    expected = exact(terms, state, one_document())
    ours = with_gradients(recurrence, terms, state)
    xla = with_gradients(functools.partial(recurrence, names=("xla",)), terms, state)
    for error, other, size in errors(ours, xla, expected):
        assert error <= 1.1 * other + 1e-6 * size
        assert error < 0.005 * size


@sixteen_bit_forms
def test_sixteen_bit_inputs_are_read_as_they_are(decay, form, normalized):
    assert_alike(*in_both_widths("triton", decay, form, normalized, jnp.bfloat16))


@pytest.mark.slow
def test_padding_may_hold_anything():
    """NaN in padding reaches no output and no gradient, for any number of batch axes."""
    rng = np.random.default_rng(2)
    query, key, value = (rng.normal(size=(1, 3, 20, 2, n)).astype(np.float32) for n in (4, 4, 6))
    log_decay = -rng.random((1, 3, 20, 2)).astype(np.float32)
    lengths = np.asarray([[20, 0, 7]])
    padding = np.arange(20) >= lengths[..., None]
    args = [
        np.where(padding[(..., *[None] * (x.ndim - 3))], np.nan, x)
        for x in (query, key, value, log_decay)
    ]

    @functools.partial(jax.jit, static_argnames="name")
    def run(args, lengths, name):
        def attend(query, key, value, log_decay):
            return effattn.gated_linear_attention(
                query,
                key,
                value,
                log_decay=log_decay,
                query_seq_lengths=lengths,
                key_value_seq_lengths=lengths,
                return_state=True,
                implementation=name,
            )

        results, pull_back = jax.vjp(attend, *args)
        return results, pull_back(results)

    with dispatch.interpreted():
        ours, alone = run(args, lengths, "triton"), run([x[0, 2] for x in args], 7, "triton")
    assert_close(ours, run(args, lengths, "xla"), 1e-6)
    assert_close(alone, jax.tree.map(lambda x: x[0, 2], ours), 1e-6)


@pytest.mark.slow
def test_the_delta_rule_in_sixteen_bits_with_padding():
    """NaN in padding reaches no output and no gradient."""
    rng = np.random.default_rng(2)
    lengths = np.asarray([70, 0, 7])
    padding = np.arange(70) >= lengths[:, None]
    key = rng.normal(size=(3, 70, 2, 8))
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    args = (
        rng.normal(size=(3, 70, 4, 8)),
        key,
        rng.normal(size=(3, 70, 2, 6)),
        rng.random((3, 70, 2)),
        -rng.random((3, 70, 2)),
    )
    args = [np.where(padding[(..., *[None] * (x.ndim - 2))], np.nan, x) for x in args]
    args = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), args)

    @functools.partial(jax.jit, static_argnums=0)
    def run(name, *args):
        def attend(query, key, value, beta, log_decay):
            return effattn.delta_rule_attention(
                query,
                key,
                value,
                beta=beta,
                log_decay=log_decay,
                query_seq_lengths=lengths,
                key_value_seq_lengths=lengths,
                return_state=True,
                implementation=name,
            )

        results, pull_back = jax.vjp(attend, *args)
        return results, pull_back(jax.tree.map(jnp.ones_like, results))

    with dispatch.interpreted():
        ours = run("triton", *args)
    expected = run("xla", *jax.tree.map(lambda x: x.astype(jnp.float32), args))
    for error, _, size in errors(ours, ours, expected):
        assert error < 0.005 * size


@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [True, False])
def test_mechanisms_take_it(is_causal):
    """Performer's features decay by a running maximum; bidirectional documents are sorted."""
    rng = np.random.default_rng(1)
    query, key, value = (rng.normal(size=(70, n, 6)).astype(np.float32) for n in (4, 2, 2))
    ids = np.sort(rng.integers(0, 3, 70))

    @functools.partial(jax.jit, static_argnums=0)
    def run(name, *args):
        def attend(*args):
            return effattn.performer_attention(
                *args,
                projection=effattn.performer_features(jax.random.key(0), 12, 6),
                is_causal=is_causal,
                segment_ids=ids,
                implementation=name,
            )

        out, pull_back = jax.vjp(attend, *args)
        return out, pull_back(out)

    with dispatch.interpreted():
        ours = run("triton", query, key, value)
    assert_close(ours, run("xla", query, key, value), 2e-6)


@pytest.mark.slow
def test_under_vmap():
    terms, state = draw(20, "token", (2, 1, 1), (3, 4))

    def loss(terms, state):
        return jax.tree.map(jnp.sum, recurrence(terms, state))

    @jax.jit
    def gradients(terms, state):
        return jax.grad(lambda *args: sum(loss(*args)), (0, 1))(terms, state)

    three = jax.tree.map(lambda x: jnp.stack([x, 2 * x, 3 * x]), (terms, state))
    ours = jax.vmap(gradients)(*three)
    for i in range(3):
        alone = gradients(*jax.tree.map(lambda x, i=i: x[i], three))
        assert_close(jax.tree.map(lambda x, i=i: x[i], ours), alone, 1e-6)


@pytest.mark.parametrize(
    ("dtype", "gate", "sizes"),
    [
        slow(jnp.float32, None, (64, 64)),
        slow(jnp.bfloat16, None, (64, 64)),
        slow(jnp.float16, 2, (96, 255)),
        slow(jnp.float32, 2, (96, 255)),
        slow(jnp.bfloat16, 3, (128, 80)),
        (jnp.float32, 3, (128, 80)),
        slow(jnp.float16, 3, (6, 5)),
    ],
)
def test_it_is_lowered_for_gpus(dtype, gate, sizes):
    assert kernels_of(*program(dtype, gate, sizes, "triton")) == {TRITON}


@pytest.mark.parametrize("gate", [slow(None), 2, slow(3)])
def test_bytes_of_a_forward_pass(gate):
    """Kernels move at most four times the bytes of the arguments and of the output.

    Half of them are states, which one kernel writes and the other reads.
    """
    attend, arrays, inputs, output = of_bytes(gate)
    moved = kernel_bytes(lambda arrays: attend(**arrays, implementation="triton"), arrays)
    assert moved <= 4 * (inputs + output)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "gate", "dtype"),
    [
        (89, 2, jnp.float32),
        (89, 2, jnp.bfloat16),
        (89, 3, jnp.bfloat16),
        (90, 3, jnp.bfloat16),
    ],
)
def test_compiled_it_fits_every_card(capability, gate, dtype):
    """16-bit matrix products run on tensor cores, and registers hold nearly all values.

    Where each feature has a decay, the levels of a block hold more values beside a product.
    """
    stack = 512 if gate == 3 else 128
    kernels = compile_triton(capability, *program(dtype, gate, (64, 64), "triton"))
    assert {kernel.name.removeprefix("linear_recurrence_") for kernel in kernels} == {
        "walk",
        "walk_back",
        "read_block",
        "d_query_block",
        "d_key_block",
        "d_value_block",
    }
    for kernel in kernels:
        assert kernel.shared <= 99 * 1024, kernel
        if dtype == jnp.bfloat16:
            assert kernel.stack <= stack, kernel
            assert kernel.tensor_cores > 0, kernel


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "shared", "sizes"), [(89, 99, (192, 16)), (90, 227, (64, 64))]
)
def test_compiled_the_delta_rule_fits_its_cards(capability, shared, sizes):
    """`shared` is in KB; two chunks in flight need more shared memory than small cards have."""
    program_of_it = program(jnp.bfloat16, 2, sizes, "triton", delta=True)
    kernels = compile_triton(capability, *program_of_it)
    assert {kernel.name.removeprefix("linear_recurrence_") for kernel in kernels} == {
        "correct",
        "correct_back",
        "read_block",
        "d_query_block",
        "d_key_block",
    }
    for kernel in kernels:
        assert kernel.shared <= shared * 1024, kernel
        assert kernel.stack <= 128, kernel
        assert kernel.tensor_cores > 0, kernel


def test_elsewhere_it_says_who_takes_the_arguments():
    terms, state = draw(5, "token", (2, 2, 2), (3, 4))
    args = terms.query, terms.key, terms.value

    def loss(query, key, value, name):
        attend = functools.partial(effattn.gated_linear_attention, log_decay=terms.log_decay)
        return jnp.sum(attend(query, key, value, initial_state=state, implementation=name) ** 2)

    run = jax.jit(jax.value_and_grad(loss, (0, 1, 2)), static_argnums=3)
    with pytest.raises(NotImplementedError, match="'triton' .*on cuda alone; implementation='xla'"):
        run(*args, "triton")
    expected = run(*args, "xla")
    jax.tree.map(np.testing.assert_array_equal, run(*args, ("triton", "xla")), expected)


def call(dtype=np.float32, length=5, sizes=(3, 4), attend=effattn.gated_linear_attention, **given):
    rng = np.random.default_rng(0)
    query, key, value = (
        rng.normal(size=(length, 2, n)).astype(dtype) for n in (*sizes[:1], *sizes)
    )
    return attend(query, key, value, **given)


LOG_DECAY = {"log_decay": -np.ones((5, 2), np.float32)}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({**LOG_DECAY, "dtype": np.float64}, "takes float32, bfloat16 and float16, got float64"),
        (
            {**LOG_DECAY, "sizes": (260, 8)},
            "takes up to 256 features and 256 values .*got 260 and 8",
        ),
        (
            {"attend": effattn.linear_attention, "sizes": (3, 256), "is_causal": True},
            "takes up to 256 features and 256 values .*got 3 and 257",
        ),
        (
            {"length": 0, "log_decay": np.zeros((0, 2), np.float32)},
            r"takes at least one token, got queries of shape \(0, 2, 3\)",
        ),
        ({**LOG_DECAY, "precision": "BF16_BF16_F32"}, "takes a precision of jax.lax.Precision"),
        ({"attend": effattn.linear_attention}, "takes causal or packed calls, got a bidirectional"),
    ],
)
def test_what_it_does_not_take_another_does(given, message):
    with jax.enable_x64(True):
        with pytest.raises(NotImplementedError, match=f"{message}.*implementation='xla' takes"):
            call(**given, implementation="triton")
        jax.jit(lambda: call(**given, implementation=("triton", "xla"))).lower()


def test_no_kernel_takes_the_delta_form_with_a_bonus():
    terms, state = draw(5, "token", (2, 2, 2), (3, 4), form="delta")
    config = Config(as_they_are, jnp.float32)
    x = Inputs({"bonus": terms.key[0, 0]}, state, terms.query, terms[1:], ALL)
    message = "takes the delta form without a bonus"
    assert message in linear_recurrence.refusal(config, x)
