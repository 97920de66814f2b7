import jax
import numpy as np
import pytest

from experiments.harness.optimisers import make_optimiser


def ones(*shape):
    return np.ones(shape, np.float32)


PARAMS = {
    "embed": {"embedding": ones(6, 4)},
    "mixer": {"query": {"kernel": ones(4, 2, 3)}, "out": {"kernel": ones(2, 3, 4)}},
    "experts": {"up_kernels": ones(3, 4, 5), "down_kernels": ones(3, 5, 4)},
    "norm": {"scale": ones(4)},
}


def updates(name, gradients, steps=1, **options):
    options = {"steps": 10, "warmup": 0.2, "clip": 1e9, "weight_decay": 0.0, **options}
    optimiser = make_optimiser(name, **options)
    state, taken = jax.jit(optimiser.init)(PARAMS), []
    next_update = jax.jit(optimiser.update)
    for _ in range(steps):
        update, state = next_update(gradients, state, PARAMS)
        taken.append(update)
    return taken


def random_gradients(scale=1.0):
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: scale * rng.normal(size=x.shape).astype(x.dtype), PARAMS)


def test_muon_orthogonalises_kernels_read_from_inputs_to_outputs():
    (update,) = updates("muon", random_gradients(), warmup=0.1)
    query = np.asarray(update["mixer"]["query"]["kernel"]).reshape(4, 6)
    out = np.asarray(update["mixer"]["out"]["kernel"]).reshape(6, 4)
    experts = [matrix for kernels in update["experts"].values() for matrix in np.asarray(kernels)]
    assert len(experts) == 6
    for matrix in (query, out, *experts):
        singular = np.linalg.svd(matrix, compute_uv=False)
        # Five Newton-Schulz steps bring singular values near max(1, sqrt(outputs / inputs)).
        assert singular.max() / singular.min() < 2
    (raw,) = updates("adamw", random_gradients(), warmup=0.1)
    singular = np.linalg.svd(
        np.asarray(raw["mixer"]["query"]["kernel"]).reshape(4, 6), compute_uv=False
    )
    assert singular.max() / singular.min() > 2


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_rate_rises_and_decays_to_zero(name):
    sizes = [
        np.abs(update["mixer"]["out"]["kernel"]).max() for update in updates(name, PARAMS, steps=11)
    ]
    assert np.argmax(sizes) == 2
    np.testing.assert_allclose(sizes[0] / sizes[2], 0.5, rtol=1e-3)
    assert sorted(sizes[2:], reverse=True) == sizes[2:]
    assert sizes[10] < 1e-6


def test_gradients_are_clipped_by_their_global_norm():
    gradients = random_gradients(scale=100.0)
    norm = np.sqrt(sum(np.sum(g**2) for g in jax.tree.leaves(gradients)))
    small = jax.tree.map(lambda g: g / norm, gradients)
    clipped = updates("adamw", gradients, clip=1.0)[0]
    for a, b in zip(
        jax.tree.leaves(clipped), jax.tree.leaves(updates("adamw", small)[0]), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-4)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_only_kernels_decay(name):
    zeros = jax.tree.map(np.zeros_like, PARAMS)
    (update,) = updates(name, zeros, weight_decay=0.5, warmup=0.1)
    np.testing.assert_allclose(update["mixer"]["query"]["kernel"], -0.5, rtol=1e-6)
    np.testing.assert_allclose(update["experts"]["up_kernels"], -0.5, rtol=1e-6)
    np.testing.assert_array_equal(update["embed"]["embedding"], 0)
    np.testing.assert_array_equal(update["norm"]["scale"], 0)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_one_step_is_a_whole_schedule(name):
    (update,) = updates(name, random_gradients(), steps=1, warmup=0.0)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(update))
    assert np.abs(update["norm"]["scale"]).max() > 0
