"""Training of Transformers: 16 bits, remat and dropout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effattn.nn import Block, Transformer
from tests.nn.build import floats
from tests.nn.calls import call
from tests.nn.small_models import PLAIN, TOKENS, close, loss, made


def test_bfloat16_computes_with_float32_parameters_gradients_and_logits(monkeypatch):
    seen, block = [], Block.with_shared

    def spy(self, x, *args, **options):
        seen.append(x.dtype)
        return block(self, x, *args, **options)

    monkeypatch.setattr(Block, "with_shared", spy)
    options = {"num_layers": 1, "tie_embeddings": False}
    model = made(dtype="bfloat16", **options)
    value, gradient = jax.eval_shape(jax.value_and_grad(loss), model, TOKENS)
    assert value.dtype == jnp.float32
    for leaf in jax.tree.leaves((model, gradient)):
        assert leaf.dtype == jnp.float32
    assert set(seen) == {jnp.dtype("bfloat16")}
    state = jax.eval_shape(lambda: model.init_state(2, 4))
    assert state.layers[0].key.dtype == jnp.bfloat16
    logits, exact = call(model, TOKENS), np.asarray(call(made(**options), TOKENS))
    assert logits.dtype == jnp.float32
    error = np.sqrt(np.mean((logits - exact) ** 2) / np.mean(exact**2))
    assert error < 0.02


@pytest.mark.parametrize("positions", ["none", "learned"])
def test_gradients_of_embeddings_are_added_up_unrounded(positions):
    # All gradients are equal, so a sum in bfloat16 stops growing at the 256th.
    rows, time = 64, 32
    options = {**PLAIN, "positions": positions, "max_length": time, "tie_embeddings": False}
    model = made(dtype="bfloat16", **options)
    tokens = np.zeros((rows, time), np.int32)

    @jax.jit
    def gradients(model, tokens):
        features = jax.grad(lambda model: Transformer.__call__(model, tokens).sum())(model)
        tables = features.embed, features.positions
        return [table.embedding[...] for table in tables if table is not None]

    one, all_rows = gradients(model, tokens[:1]), gradients(model, tokens)
    for alone, together in zip(one, all_rows, strict=True):
        np.testing.assert_allclose(together, rows * alone, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_remat_changes_no_gradient():
    options = {**PLAIN, "dropout_rate": 0.2}
    gradient = jax.jit(jax.value_and_grad(loss))
    plain = gradient(made(**options), TOKENS, jax.random.key(0))
    again = gradient(made(remat=True, **options), TOKENS, jax.random.key(0))
    close(jax.tree.leaves(again), jax.tree.leaves(plain))


@pytest.mark.parametrize(
    ("policy", "function"),
    [
        (None, None),
        ("dots_saveable", jax.checkpoint_policies.dots_saveable),
        (jax.checkpoint_policies.nothing_saveable, jax.checkpoint_policies.nothing_saveable),
    ],
    ids=["no policy", "by name", "function"],
)
def test_remat_recomputes_each_layer_by_its_policy(policy, function):
    model = made(remat=True, remat_policy=policy)
    equations = jax.make_jaxpr(lambda model: model(TOKENS))(model).eqns
    policies = [e.params["policy"] for e in equations if e.primitive.name == "remat2"]
    assert policies == [function, function]


def test_dropout_needs_rngs_and_is_off_without():
    model, plain = made(**PLAIN, dropout_rate=0.5), made(**PLAIN)
    np.testing.assert_array_equal(call(model, TOKENS), call(plain, TOKENS))
    run = jax.jit(lambda model, rngs: model(TOKENS, rngs=rngs))
    one, other = run(model, jax.random.key(0)), run(model, jax.random.key(1))
    assert not np.allclose(one, other)
    np.testing.assert_array_equal(one, run(model, jax.random.key(0)))
    np.testing.assert_array_equal(run(plain, jax.random.key(0)), call(plain, TOKENS))


def test_each_dropout_has_a_key_of_its_own(monkeypatch):
    """Embeddings, the output of each sublayer, and the weights of mixers have dropout."""
    model = made(**{**PLAIN, "num_layers": 2}, mixer={"name": "softmax", "dropout_rate": 0.5})

    @jax.jit
    def run(model, key):
        keys = []

        def recorded(x, rate, key):
            keys.append(jax.random.key_data(key))
            return x

        with monkeypatch.context() as patch:
            patch.setattr("effattn.nn.transformer.dropout", recorded)
            patch.setattr("effattn.nn.block.dropout", recorded)
            return model(TOKENS, rngs=key), jnp.stack(keys)

    logits, keys = run(model, jax.random.key(0))
    assert len(np.unique(keys, axis=0)) == len(keys) == 1 + 2 * 2
    assert not np.allclose(logits, call(model, TOKENS))


def test_dropout_keeps_the_mean_of_what_a_layer_adds():
    block, x = made(num_layers=1, dropout_rate=0.5).blocks[0], floats(1, 3, 16)
    # Without the feed-forward layer, the output is linear in the dropped elements.
    block.feed_forward.down.kernel[...] *= 0

    @jax.jit
    def run(block, keys):
        return block(x) - x, jax.vmap(lambda key: block(x, rngs=key) - x)(keys)

    expected, added = map(np.asarray, run(block, jax.random.split(jax.random.key(1), 4096)))
    spread = np.std(added, axis=0) / added.shape[0] ** 0.5
    assert (np.abs(np.mean(added, axis=0) - expected) < 5 * spread + 1e-6).all()
    assert 0.45 < np.mean(added == 0) < 0.55


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_rngs_alone_switch_dropout(mode):
    model = made(num_layers=1, dropout_rate=0.5)
    run = jax.jit(lambda model: (model(TOKENS), model(TOKENS, rngs=jax.random.key(0))))
    without, dropped = run(model)
    assert not np.allclose(dropped, without)
    getattr(model, mode)()
    jax.tree.map(np.testing.assert_array_equal, run(model), (without, dropped))
