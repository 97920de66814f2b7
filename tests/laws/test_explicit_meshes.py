"""Arrays on a mesh of explicit axes, which their types carry, without `jax.set_mesh`.

`jax.make_mesh` makes such a mesh by default. Except in the last tests, only the types of arrays are
checked and nothing is computed. `tests.laws.test_sharding` checks the numbers of the same programs.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import effattn
from effattn.nn import (
    CrossAttention,
    EncoderDecoder,
    EncoderDecoderConfig,
    SelfAttention,
    TransformerConfig,
    TransformerLM,
)
from effattn.testing import functions, mixers
from effattn.testing.functions import SQUARE, Extent
from tests.laws.battery import FIRST_OF_FAMILY, LAYERS, MECHANISMS, mixer_of
from tests.laws.sharding import mesh, shard, specs_of
from tests.laws.test_decode import LENGTH
from tests.marks import slow_but_for
from tests.nn.build import filled

pytestmark = pytest.mark.devices

BY_ROW = PartitionSpec("batch")
DECODING = [s for s in MECHANISMS if s.has("decode")]
QUICK = [s for s in MECHANISMS if s.name in ("softmax", "dilated", "hierarchical", "performer")]


def devices():
    return mesh(jax.sharding.AxisType.Explicit)


def by_row(x):
    return jax.device_put(x, NamedSharding(devices(), BY_ROW))


def rows_of(tree):
    return {jax.typeof(leaf).sharding.spec[0] for leaf in jax.tree.leaves(tree)}


@pytest.mark.parametrize("everything", [False, True], ids=["tokens alone", "all that is claimed"])
@pytest.mark.parametrize("mechanism", slow_but_for(QUICK, MECHANISMS), ids=str)
def test_functions_and_their_gradients(mechanism, everything):
    extent = Extent(mechanism.has("causal"), everything, tuning=False)
    arrays = functions.draw_arrays(mechanism, SQUARE, everything)
    arrays = functions.cast(mechanism, arrays, jnp.float32)
    known = functions.neutral(mechanism, SQUARE, extent) if everything else {}
    cotangents = functions.cotangents_of(mechanism, extent, arrays, known)
    specs = {**specs_of(mechanism, arrays), **specs_of(mechanism, cotangents)}
    specs["initial_state"] = PartitionSpec("batch", "heads")
    # An array that a score_mod closes over has no mesh.
    placed = {**shard(devices(), arrays, **specs), **{k: arrays[k] for k in arrays if k == "slope"}}

    def run(arrays, cotangents, known):
        def call(of_tokens):
            return functions.call(mechanism, extent, {**arrays, **of_tokens}, known)

        results, pull_back = jax.vjp(call, {k: arrays[k] for k in mechanism.of_tokens})
        return results, pull_back(cotangents)[0]

    for of in jax.eval_shape(run, placed, shard(devices(), cotangents, **specs), known):
        for name, tree in of.items():
            for leaf in jax.tree.leaves(tree):
                assert tuple(leaf.sharding.spec)[: len(specs[name])] == tuple(specs[name]), name


@pytest.mark.parametrize("subject", slow_but_for(QUICK, DECODING), ids=str)
def test_modules_their_gradients_and_decoding(subject):
    def run(mixer, x):
        y, pull_back = jax.vjp(lambda mixer, x: mixer(x), mixer, x)
        _, gradient = pull_back(y)
        z, state = mixer.extend(x, mixer.init_state(4, LENGTH), lengths=jnp.arange(4) % 4)
        return y, gradient, z, state, mixer.extend(x[:, :1], state)

    x = by_row(np.zeros((4, 3, 16), np.float32))
    assert rows_of(jax.eval_shape(run, mixer_of(subject), x)) == {"batch"}


@pytest.mark.parametrize("mixer", slow_but_for(LAYERS[:1], LAYERS), ids=str)
def test_mixers_without_heads(mixer):
    def run(module, x):
        y, (_, gradient) = mixers.both(lambda m, x: m(x, **mixers.padding(mixer)), module, x, x)
        if not mixer.has("decode"):
            return y, gradient
        z, state = module.extend(x[:, :2], module.init_state(4, mixers.LENGTH))
        return y, gradient, z, state, module.extend(x[:, 2:3], state)

    module = mixers.cast(mixers.made(mixer), np.float32)
    x = by_row(mixers.tokens(1).astype(np.float32))
    assert rows_of(jax.eval_shape(run, module, x)) == {"batch"}


def assert_same(call, module, *arrays):
    """Checks that outputs and gradients of parameters agree on the mesh and on one device."""

    @jax.jit
    def run(module, *arrays):
        y, pull_back = jax.vjp(lambda module: call(module, *arrays), module)
        return y, pull_back(y)[0]

    functions.assert_close(run(module, *map(by_row, arrays)), run(module, *arrays), 2e-6)


FLOATS = np.random.default_rng(0).normal(size=(4, 24, 16)).astype(np.float32)
TOKENS = np.random.default_rng(0).integers(0, 11, size=(4, 24))


@pytest.mark.parametrize("mechanism", slow_but_for(FIRST_OF_FAMILY[:1], FIRST_OF_FAMILY), ids=str)
def test_the_numbers_of_a_function_are_those_of_one_device(mechanism):
    """The function is also called by itself, outside of any program."""
    extent = Extent(mechanism.has("causal"), tuning=False)
    arrays = functions.draw_plain(mechanism, 0)
    placed = shard(devices(), arrays, **specs_of(mechanism, arrays))

    def call(arrays):
        return functions.call(mechanism, extent, arrays, {})["out"]

    expected = call(arrays)
    functions.assert_close(call(placed), expected, 2e-6)
    functions.assert_close(jax.jit(call)(placed), expected, 2e-6)


RECURRENT = [s for s in MECHANISMS if s.name in ("retention", "delta_net")]
UNPLACED = [*FIRST_OF_FAMILY, *(s for s in RECURRENT if s not in FIRST_OF_FAMILY)]


@pytest.mark.parametrize("mechanism", slow_but_for([UNPLACED[0], *RECURRENT], UNPLACED), ids=str)
def test_arrays_on_no_mesh_are_placed_on_the_mesh_that_is_set(mechanism):
    extent = Extent(mechanism.has("causal"), tuning=False)
    arrays = functions.draw_plain(mechanism, 0)

    def call(arrays):
        return functions.call(mechanism, extent, arrays, {})["out"]

    @jax.jit
    def gradients(of_tokens):
        return jax.grad(lambda of_tokens: (call({**arrays, **of_tokens}) ** 2).sum())(of_tokens)

    of_tokens = {name: arrays[name] for name in mechanism.of_tokens}
    expected = call(arrays), gradients(of_tokens)
    with jax.set_mesh(devices()):
        functions.assert_close(call(arrays), expected[0], 2e-6)
        functions.assert_close(gradients(of_tokens), expected[1], 5e-6)


def test_self_attention_and_cross_attention():
    own = filled(lambda: SelfAttention(16, 4, rngs=nnx.Rngs(0)))
    assert_same(lambda m, x: m(x), own, FLOATS)
    functions.assert_close(own(by_row(FLOATS)), own(FLOATS), 2e-6)
    cross = filled(lambda: CrossAttention(16, 4, rngs=nnx.Rngs(0)))
    assert_same(lambda m, x, context: m(x, context), cross, FLOATS, FLOATS[:, ::-1])


def test_language_models_learn_and_decode():
    config = TransformerConfig(vocab_size=11, num_layers=2, features=16, num_heads=4)
    model = filled(lambda: TransformerLM(config, rngs=nnx.Rngs(0)))
    assert_same(lambda m, tokens: m(tokens), model, TOKENS)

    def decode(model, tokens):
        logits, state = model.extend(tokens[:, :20], model.init_state(4, 24))
        return logits, *(
            (piece := model.step(tokens[:, t : t + 1], state), state := piece[1])[0][0]
            for t in range(20, 24)
        )

    assert_same(decode, model, TOKENS)


def test_encoders_and_decoders():
    config = TransformerConfig(vocab_size=11, num_layers=1, features=16, num_heads=4)
    both = EncoderDecoderConfig(
        encoder=effattn.nn.TransformerConfig(
            vocab_size=11, num_layers=1, features=16, num_heads=4, is_causal=False
        ),
        decoder=config,
    )
    model = filled(lambda: EncoderDecoder(both, rngs=nnx.Rngs(0)))
    assert_same(lambda m, source, target: m(source, target), model, TOKENS, TOKENS[:, ::-1])
