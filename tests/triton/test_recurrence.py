"""The linear recurrence in the Triton language: interpreted, and compiled.

Results are compared with one token at a time in float64, and with the XLA form.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import effattn
from effattn import dispatch
from effattn.testing.functions import assert_close
from tests.marks import slow
from tests.pallas import recurrence_cases
from tests.pallas.lowering import LEAST_SHARED
from tests.triton.calls import bytes_of_calls, compile_calls

pytest.importorskip("triton")

recurrence = functools.partial(recurrence_cases.recurrence, names=("jax_triton",))
TOKEN, FEATURE = ((2, 2, 4), (70, 66)), ((4, 2, 2), (40, 20))


@pytest.mark.parametrize(
    ("length", "decay", "heads", "sizes", "normalized", "form"),
    [
        (70, "token", (2, 1, 1), (16, 16), False, "plain"),
        (70, "none", (1, 1, 1), (5, 6), False, "delta"),
        slow(130, "none", (1, 1, 1), (7, 3), True, "plain"),
        slow(64, "token", *TOKEN, True, "plain"),
        slow(1, "feature", (4, 2, 2), (3, 5), False, "plain"),
        slow(130, "feature", *FEATURE, False, "plain"),
        slow(130, "token", (2, 2, 4), (70, 20), True, "delta"),
        slow(70, "feature", (4, 2, 2), (5, 6), False, "delta"),
        slow(70, "feature", (2, 1, 1), (5, 6), False, "own"),
        slow(70, "feature", (4, 2, 2), (5, 6), False, "bonus"),
    ],
)
def test_agrees_with_one_token_at_a_time(length, decay, heads, sizes, normalized, form):
    # The seed is that of five in which the terms of the denominator cancel least.
    args = recurrence_cases.draw(length, decay, heads, sizes, normalized, form, seed=2)
    ours = functools.partial(recurrence, normalized=normalized)
    recurrence_cases.assert_near(
        recurrence_cases.with_gradients(ours, *args),
        recurrence_cases.exact(*args, normalized=normalized),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("decay", "form", "normalized"),
    [("none", "plain", True), ("token", "plain", False), ("feature", "delta", False)],
)
def test_documents_and_masks(decay, form, normalized):
    args = recurrence_cases.draw(103, decay, (4, 2, 2), (5, 6), normalized, form)
    tokens = recurrence_cases.documents()
    given = {"tokens": tokens, "normalized": normalized, "names": ("jax_triton",)}
    ours = recurrence_cases.of_documents(*args, **given)
    recurrence_cases.assert_near(
        ours, recurrence_cases.exact(*args, tokens=tokens, normalized=normalized)
    )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, slow(jnp.float16)])
@pytest.mark.parametrize("decay", ["none", slow("token"), slow("feature")])
def test_sixteen_bits(decay, dtype):
    """As exact as the XLA form, but for states that are saved in bfloat16."""
    heads = (2, 1, 1) if decay == "token" else (2, 2, 2)
    terms, state = recurrence_cases.draw(70, decay, heads, (5, 6))
    terms = jax.tree.map(lambda x: jnp.asarray(x, dtype), terms)
    expected = recurrence_cases.exact(terms, state)
    ours, xla = (
        recurrence_cases.with_gradients(functools.partial(each, names=names), terms, state)
        for each, names in ((recurrence, ("jax_triton",)), (recurrence, ("xla",)))
    )
    for error, other, size in recurrence_cases.errors(ours, xla, expected):
        assert error <= (1.1 if dtype == jnp.float16 else 1.5) * other + 1e-6 * size
        assert error < 0.005 * size


@recurrence_cases.sixteen_bit_forms
@pytest.mark.slow
def test_sixteen_bit_inputs_are_read_as_they_are(decay, form, normalized):
    """The scale is a power of two, whose product with a rounded gradient is exact."""
    given = "jax_triton", decay, form, normalized, jnp.float16
    both = recurrence_cases.in_both_widths(*given, scale=0.25)
    recurrence_cases.assert_alike(*both)


@pytest.mark.parametrize("decay", [None, slow("token")])
def test_under_vmap_the_mapped_axis_becomes_part_of_the_batch(decay):
    """NaN in padding reaches no output and no gradient."""
    rng = np.random.default_rng(2)
    query, key, value = (rng.normal(size=(3, 20, 2, n)).astype(np.float32) for n in (4, 4, 6))
    lengths = np.asarray([20, 0, 7])
    padding = np.arange(20) >= lengths[:, None]
    args = [np.where(padding[..., None, None], np.nan, x) for x in (query, key, value)]
    gate = -rng.random((20, 2)).astype(np.float32) if decay else np.zeros((20, 2), np.float32)

    @functools.partial(jax.jit, static_argnums=0)
    def run(name, lengths, *args):
        def attend(length, *args):
            return effattn.gated_linear_attention(
                *args,
                log_decay=gate,
                query_seq_lengths=length,
                key_value_seq_lengths=length,
                implementation=name,
            )

        def all_of(*args):
            return jax.vmap(attend)(lengths, *args)

        out, pull_back = jax.vjp(all_of, *args)
        return out, pull_back(out)

    with dispatch.interpreted():
        ours = run("jax_triton", lengths, *args)
    assert_close(ours, run("xla", lengths, *args), 1e-6)


@pytest.mark.parametrize("gate", [slow(None), slow(2), 3])
def test_bytes(gate):
    """Kernels move at most four times the bytes of the arguments and results, with gradients too.

    XLA only converts and sums gradients.
    """
    attend, arrays, inputs, output = recurrence_cases.of_bytes(gate)

    def function(arrays):
        return attend(**arrays, implementation="jax_triton")

    def gradients(arrays):
        return jax.vjp(function, arrays)[1](arrays["value"])

    assert bytes_of_calls(function, arrays) <= 4 * (inputs + output)
    assert bytes_of_calls(gradients, arrays) <= 4 * (2 * inputs + output)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 120])
@pytest.mark.parametrize(
    ("decay", "form", "sizes"),
    [
        ("none", "plain", (64, 64)),
        ("token", "plain", (128, 128)),
        ("feature", "plain", (128, 128)),
        ("token", "delta", (128, 128)),
        ("feature", "delta", (256, 256)),
    ],
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_compiled_it_fits_every_card(capability, decay, form, sizes, dtype):
    """Products run on tensor cores, and registers hold nearly all values.

    Where each feature has a decay, the levels of a block hold more values beside a product.
    """
    terms, state = recurrence_cases.draw(200, decay, (4, 2, 2), sizes, form=form)
    terms = jax.tree.map(lambda x: jnp.asarray(x, dtype), terms)
    function = functools.partial(recurrence, interpreted=False)
    gradients = functools.partial(recurrence_cases._with_gradients, function)
    for kernel in compile_calls(capability, gradients, terms, state):
        assert kernel.shared <= LEAST_SHARED, kernel
        assert kernel.stack <= (512 if decay == "feature" else 128), kernel
        assert kernel.tensor_cores > 0, kernel
