"""native_sparse_attention: other implementations, its limit, the selection, and refusals."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import effattn
from effattn.analysis import cost
from effattn.cores.native_sparse import Settings, _of_blocks, _of_strides

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "fla_sparse.npz"
SIZES = {
    "compression_size": 4,
    "compression_stride": 2,
    "block_size": 4,
    "num_selected": 4,
    "window_size": 3,
}


def heads(time=24, key_heads=2):
    rng = np.random.default_rng(0)
    shapes = [(2, time, 4, 8), (2, time, key_heads, 8), (2, time, key_heads, 6), (2, time, 4, 3)]
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def attend(query, key, value, gates, **options):
    run = functools.partial(effattn.native_sparse_attention, **{**SIZES, **options})
    return jax.jit(run)(query, key, value, gates=gates)


def only(branch, gates):
    return np.broadcast_to(np.eye(3, dtype=np.float32)[branch], gates.shape)


def test_it_is_that_of_flash_linear_attention():
    with np.load(GOLDEN) as arrays:
        golden = dict(arrays)
    names = [name.removeprefix("d_") for name in golden if name.startswith("d_")]
    sizes = {"compression_size": 3, "compression_stride": 3, "block_size": 3, "num_selected": 4}

    @jax.jit
    def run(given, cotangent):
        def call(query, key, value, compressed_gate, selected_gate):
            gates = [compressed_gate, selected_gate, jnp.zeros_like(selected_gate)]
            gates = jnp.stack(gates, -1)
            return effattn.native_sparse_attention(query, key, value, gates=gates, **sizes)

        out, pull_back = jax.vjp(lambda given: call(**given), given)
        return out, pull_back(cotangent)[0]

    out, gradients = run({name: golden[name] for name in names}, golden["cotangent"])
    np.testing.assert_allclose(out, golden["output"], rtol=1e-4, atol=1e-4)
    for name in names:
        expected = golden[f"d_{name}"]
        np.testing.assert_allclose(gradients[name], expected, rtol=1e-4, atol=1e-4, err_msg=name)


def test_all_blocks_selected_are_exact_attention():
    query, key, value, gates = heads()
    exact = effattn.dot_product_attention(query, key, value, is_causal=True)
    out = attend(query, key, value, only(1, gates), num_selected=6)
    np.testing.assert_allclose(out, exact, rtol=1e-5, atol=1e-6)


def test_the_last_branch_is_a_window():
    query, key, value, gates = heads()
    near = effattn.sliding_window_attention(
        query, key, value, is_causal=True, local_window_size=(2, 0)
    )
    out = attend(query, key, value, only(2, gates))
    np.testing.assert_allclose(out, near, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("size", "stride", "block"), [(4, 2, 8), (32, 16, 64), (3, 3, 3), (4, 1, 2)]
)
def test_scores_count_the_strides_that_a_compressed_block_shares_with_a_block(size, stride, block):
    settings = Settings.of(
        compression_size=size, compression_stride=stride, block_size=block, num_selected=3
    )
    length = 5 * block + stride
    count = settings.count(length)
    weights = np.random.default_rng(0).uniform(size=(2, count)).astype(np.float32)
    expected = np.zeros((2, 6))
    for i in range(count):
        for start in range(i * stride, i * stride + size, stride):
            expected[:, start // block] += weights[:, i]
    scores = _of_blocks(settings, _of_strides(settings, weights), 6)
    np.testing.assert_allclose(scores, expected, rtol=1e-5)


def test_the_first_block_and_those_near_are_always_selected():
    """The other block is that with the key that is like the query."""
    key = np.zeros((1, 24, 1, 8), np.float32)
    key[0, 8:12, 0] = 20
    query, value = np.ones_like(key), np.eye(24, dtype=np.float32)[None, :, None]
    gates = np.zeros((1, 24, 1, 3), np.float32)

    def seen_by_the_last(query):
        weights = attend(query, key, value, only(1, gates))[0, 23, 0]
        return (np.asarray(weights) > 0).nonzero()[0].tolist()

    always = [*range(4)], [*range(16, 24)]
    assert seen_by_the_last(query) == [*always[0], *range(8, 12), *always[1]]
    # Without a preference, the blocks of which most strides are compressed come first.
    assert seen_by_the_last(0 * query) == [*always[0], *range(4, 8), *always[1]]


def test_heads_of_a_group_select_alike():
    query, key, value, gates = heads(key_heads=2)
    eye = np.broadcast_to(np.eye(24, dtype=np.float32)[None, :, None], (2, 24, 2, 24))
    seen = np.asarray(attend(query, key, eye, only(1, gates))) > 0
    np.testing.assert_array_equal(seen[:, :, 0], seen[:, :, 1])
    np.testing.assert_array_equal(seen[:, :, 2], seen[:, :, 3])
    assert (seen[:, :, 1] != seen[:, :, 2]).any()


def test_the_jacobian_is_block_lower_triangular():
    query, key, value, gates = (x[0] for x in heads(11))

    def of_row(*arrays):
        return attend(*(x[None] for x in arrays), block_size=2, num_selected=3)[0].sum((-2, -1))

    for jacobian in jax.jacrev(of_row, (0, 1, 2, 3))(query, key, value, gates):
        reaches = np.abs(jacobian).max((-2, -1))
        np.testing.assert_array_equal(np.triu(reaches, 1), np.zeros((11, 11)))


def test_a_learned_compression_gets_gradients():
    query, key, value, gates = heads()

    @jax.jit
    @jax.grad
    def gradient(weights):
        def compress(keys, values):
            mean = functools.partial(jnp.einsum, "l,...lh->...h", weights)
            return mean(keys), mean(values)

        return effattn.native_sparse_attention(
            query, key, value, gates=gates, compress=compress, **SIZES
        ).sum()

    assert (np.abs(gradient(np.full(4, 0.25, np.float32))) > 1e-3).all()


def test_operations_at_the_settings_of_the_paper():
    """Less than half of exact attention's at 16,384 tokens, with heads in groups of four."""
    shapes = [(1, 16384, 4, 64), (1, 16384, 1, 64), (1, 16384, 1, 64), (1, 16384, 4, 3)]
    query, key, value, gates = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    exact = functools.partial(effattn.dot_product_attention, is_causal=True, implementation="xla")

    def sparse(query, key, value, gates):
        return effattn.native_sparse_attention(query, key, value, gates=gates)

    ours = cost.operations(jax.make_jaxpr(sparse)(query, key, value, gates))
    assert 2.4 * ours < cost.operations(jax.make_jaxpr(exact)(query, key, value))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compression_size": 5}, "compression_size must be an int of tokens, 1 or more and a mul"),
        ({"block_size": 3}, "multiple of compression_stride=2, got 3"),
        ({"num_selected": 2}, "num_selected must be an int, 3 or more blocks: the first, the own"),
        ({"window_size": 0}, "window_size must be an int, 1 or more tokens, got 0"),
        ({"compression_stride": 0}, "compression_stride must be an int, 1 or more tokens, got 0"),
        ({"compress": lambda k, v: (k, v)}, "compress must map keys .* to .*, got"),
        ({"compress": lambda k, v: k}, "compress must return two arrays, for keys and values, got"),
        ({"compress": 3}, r"compress must be a function \(keys, values\), got 3"),
        ({"compress": lambda k: k}, r"compress must be a function \(keys, values\), got one that"),
        ({"compress": lambda k, v: (None, None)}, "keys of compress must be an array of numbers"),
        (
            {"compress": lambda k, v: (k[..., 0, :].astype(int), v[..., 0, :])},
            "compress must map keys .* to floating point of shape .*, got int32",
        ),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        attend(*heads(), **options)


def test_gates_of_another_shape_are_refused():
    query, key, value, gates = heads()
    with pytest.raises(ValueError, match=r"gates must be floating point of shape \(2, 24, 4, 3\)"):
        attend(query, key, value, gates[..., :2])
