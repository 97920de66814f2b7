"""Models on a mesh: where parameters live, equal results, and the collectives of each axis."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from effattn import nn, parallel
from effattn.arrays import mesh_axes
from effattn.nn import placement
from effattn.parallel import mixers
from tests.laws.sharding import collectives

CONFIG = {"vocab_size": 64, "features": 32, "num_heads": 8, "hidden_features": 64}
ROWS, TOKENS = 8, 16
OF_FORMS = {"hyena": {"max_length": 16}, "linformer": {"max_length": 16, "num_projected": 4}}


def build(mixer="softmax", layers=1, **options):
    config = nn.TransformerConfig(num_layers=layers, mixer=mixer, **CONFIG, **options)
    return nn.TransformerLM(config, rngs=nnx.Rngs(0))


def specs(model, **sizes):
    places = nn.shardings(model, parallel.make_mesh(**sizes, devices=jax.devices()))
    return {".".join(map(str, path)): place.spec for path, place in nnx.to_flat_state(places)}


def test_without_a_mesh_nothing_is_placed():
    x = jnp.ones((2, 4, 8))
    assert mesh_axes.constrained(x, placement.ACTIVATIONS) is x


def test_kernels_name_their_axes():
    model = nnx.eval_shape(build)
    block = model.blocks[0]
    names = {
        "query": block.mixer.query.kernel,
        "out": block.mixer.out.kernel,
        "up": block.feed_forward.up.kernel,
        "down": block.feed_forward.down.kernel,
        "embed": model.embed.embedding,
    }
    assert {name: x.get_metadata()["out_sharding"] for name, x in names.items()} == {
        "query": ("features", "heads", None),
        "out": ("heads", None, "features"),
        "up": ("features", "hidden"),
        "down": ("hidden", "features"),
        "embed": ("vocabulary", "features"),
    }


@pytest.mark.devices
@pytest.mark.parametrize("stages", [None, 2])
def test_a_model_is_built_where_it_lives(stages):
    def make():
        model = build("gated_delta_net", 2, dropout_rate=0.1)
        return model if stages is None else nn.PipelinedLM(model, stages)

    mesh = parallel.make_mesh(fsdp=2, tensor=2, stage=2)
    model = nn.placed(make, mesh)
    expected = nnx.state(make())
    for found, x, place in zip(
        *map(jax.tree.leaves, (nnx.state(model), expected, nn.shardings(expected, mesh))),
        strict=True,
    ):
        assert found.sharding == place and found.dtype == x.dtype
        key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        found, x = (jax.random.key_data(a) if key else a for a in (found, x))
        np.testing.assert_allclose(found, x, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (build, None),
        (build(), "build must be a function that makes the model, got a TransformerLM; use nnx"),
        (lambda: 3, "build must return an nnx.Module, got a "),
    ],
)
def test_a_model_is_built_by_a_function(make, message):
    mesh = parallel.make_mesh(data=1, devices=jax.devices()[:1])
    if message is None:
        assert type(nn.placed(make, mesh)) is nn.TransformerLM
        return
    with pytest.raises(ValueError, match=message):
        nn.placed(make, mesh)


def test_moments_are_placed_like_their_parameters():
    mesh = parallel.make_mesh(data=-1)
    params = {"a": {"kernel": jnp.ones((4, 2))}, "kernel": jnp.ones((4, 2))}
    places = {"a": {"kernel": "first"}, "kernel": "second"}
    state = [{"mu": params, "count": jnp.zeros(())}, {"kernel": jnp.ones((2, 4))}]
    found = placement.shardings_like(state, params, places, mesh)
    assert found[0]["mu"] == places
    whole = NamedSharding(mesh, P())
    assert found[0]["count"] == found[1]["kernel"] == whole


@pytest.mark.devices
def test_axes_that_devices_cannot_divide_stay_whole():
    model = nnx.eval_shape(lambda: build(num_kv_heads=2))
    found = specs(model, fsdp=2, tensor=4)
    assert found["blocks.0.mixer.query.kernel"] == P("fsdp", "tensor", None)
    assert found["blocks.0.mixer.key.kernel"] == P("fsdp", None, None)  # 2 key heads
    assert found["blocks.0.mixer_norm.scale"] == P()


@pytest.mark.devices
def test_activations_are_divided_as_far_as_they_can_be():
    mesh = parallel.make_mesh(data=2, sequence=2, tensor=2)
    with jax.set_mesh(mesh):
        run = jax.jit(lambda x: mesh_axes.constrained(x, placement.ACTIVATIONS))
        even, odd = run(jnp.ones((4, 6, 8))), run(jnp.ones((4, 5, 8)))
    assert even.sharding.spec == P("data", "sequence")
    assert odd.sharding.spec == P("data")


def compiled(mixer, layers, gradient, **sizes):
    mesh = parallel.make_mesh(**sizes)
    graph, state = nnx.split(nnx.eval_shape(lambda: build(mixer, layers)))
    state = jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        state,
        nn.shardings(state, mesh),
    )
    place = NamedSharding(mesh, P(("data", "fsdp"), "sequence"))
    tokens = jax.ShapeDtypeStruct((ROWS, TOKENS), jnp.int32, sharding=place)

    def run(state, tokens):
        return nnx.merge(graph, state)(tokens)

    function = jax.grad(lambda *given: run(*given).sum()) if gradient else run
    with jax.set_mesh(mesh):
        program = jax.jit(function).lower(state, tokens).compile()
    return collections.Counter(collectives(program))


@pytest.mark.devices
@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "gradient", "once", "of_layer"),
    [
        # The embedding, of which devices have parts, and two sums a layer (Megatron-LM).
        ({"tensor": 8}, False, {"all-reduce": 1}, {"all-reduce": 2}),
        ({"tensor": 8}, True, {"all-reduce": 1}, {"all-reduce": 4}),
        ({"data": 8}, False, {}, {}),
        # The gradients, all at once.
        ({"data": 8}, True, {"all-reduce": 1}, {}),
        # Four kernels of attention and three of the feed-forward layer; embedding and head.
        ({"fsdp": 8}, False, {"all-gather": 2, "all-to-all": 1}, {"all-gather": 7}),
    ],
)
def test_collectives_of_an_axis(sizes, gradient, once, of_layer):
    for layers in (1, 3):
        expected = collections.Counter(once)
        for name, count in of_layer.items():
            expected[name] += layers * count
        assert compiled("softmax", layers, gradient, **sizes) == expected


@pytest.mark.devices
@pytest.mark.slow
def test_tokens_are_looked_up_with_all_their_features():
    """Otherwise XLA divides the features by fsdp, and rearranges and gathers what it has read."""
    found = compiled("linear", 1, True, fsdp=2, tensor=2, sequence=2)
    assert "collective-permute" not in found


@pytest.mark.devices
@pytest.mark.slow
@pytest.mark.parametrize(
    ("mixer", "gradient", "of_layer"),
    [
        # Queries, keys, values and outputs (Ulysses).
        ("softmax", False, {"all-to-all": 4}),
        ("softmax", True, {"all-to-all": 8}),
        # The states, side by side with their transitions; their gradients return.
        ("linear", False, {"all-gather": 1}),
        ("linear", True, {"all-gather": 1, "reduce-scatter": 1}),
    ],
)
def test_collectives_of_divided_tokens(mixer, gradient, of_layer):
    for layers in (1, 3):
        expected = {name: layers * count for name, count in of_layer.items()}
        found = compiled(mixer, layers, gradient, sequence=8)
        assert found.pop("all-reduce", 0) == gradient  # the gradients of all parameters
        assert found == expected


@pytest.mark.devices
def test_mixers_run_in_their_form():
    forms = {
        "gated_linear": parallel.pass_states,
        "hyena": parallel.exchange_channels,
        "linformer": parallel.share_keys,
        "softmax": parallel.exchange_heads,
        "gru": parallel.pass_states,
    }
    for name, form in forms.items():
        options = OF_FORMS.get(name, {})
        is_causal = name != "linformer"
        model = nnx.eval_shape(
            lambda name=name, options=options, is_causal=is_causal: build(
                {"name": name, **options}, is_causal=is_causal
            )
        )
        assert next(iter(mixers.forms_of(model.blocks[0].mixer)), None) is form, name


@pytest.mark.devices
@pytest.mark.slow
@pytest.mark.parametrize(
    ("mixer", "options"),
    [
        # `pass_states` refuses these calls of functions that it knows.
        ({"name": "aft_full", "max_length": 16}, {}),
        ("linear", {"is_causal": False}),
        # Here no form can divide the heads, the blocks, or the reach of a convolution.
        ("softmax", {"num_kv_heads": 8}),
        ({"name": "block_linformer", "block_size": 8, "num_projected": 2}, {}),
        ("mamba", {}),
    ],
    ids=str,
)
def test_calls_that_no_form_takes_run_all_the_same(mixer, options):
    config = nn.TransformerConfig(
        num_layers=1, mixer=mixer, **CONFIG, **{"num_kv_heads": None, **options}
    )
    model = nn.TransformerLM(config, rngs=nnx.Rngs(0))
    tokens = np.random.default_rng(0).integers(0, 64, (2, TOKENS))
    run = jax.jit(lambda model: model(tokens))
    expected = run(model)
    with jax.set_mesh(parallel.make_mesh(sequence=8)):
        np.testing.assert_allclose(run(model), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.devices
@pytest.mark.slow
@pytest.mark.parametrize(
    ("mixer", "exchanged"),
    [
        (
            {"heads": [{"name": name, "num_heads": 4} for name in ("softmax", "linear")]},
            {"all-to-all": 4, "all-gather": 1},
        ),
        (
            {"name": "mixture_of_mechanisms", "mechanisms": ("linear", "softmax")},
            {"all-to-all": 4, "all-gather": 1},
        ),
    ],
    ids=["heads", "mixture"],
)
def test_each_of_several_mixers_exchanges_what_it_needs(mixer, exchanged):
    assert compiled(mixer, 1, False, data=2, sequence=4) == exchanged


@pytest.mark.devices
def test_tokens_that_devices_cannot_divide_are_left_to_the_compiler():
    mixer = nnx.eval_shape(build).blocks[0].mixer
    x = jnp.ones((2, 10, 32))
    assert mixers.divided(mixer, x) is mixer
    with jax.set_mesh(parallel.make_mesh(sequence=4, data=2)):
        assert mixers.divided(mixer, x) is mixer
        assert mixers.divided(mixer, jnp.ones((2, 12, 32))) is not mixer
    with jax.set_mesh(parallel.make_mesh(data=8)):
        assert mixers.divided(mixer, jnp.ones((2, 12, 32))) is mixer


@pytest.mark.devices
@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [{"data": 2, "fsdp": 2, "tensor": 2}, {"data": 2, "sequence": 2, "tensor": 2}, {"tensor": 8}],
    ids=str,
)
@pytest.mark.parametrize("mixer", ["softmax", "gated_delta_net", "mamba", "s4d", "gru"])
def test_a_model_on_a_mesh_equals_that_on_one_device(sizes, mixer):
    graph, state = nnx.split(build(mixer, 2))
    tokens = np.random.default_rng(0).integers(0, 64, (ROWS, TOKENS))

    @jax.jit
    def run(state, tokens):
        def loss(state):
            logits = nnx.merge(graph, state)(tokens)
            return jax.nn.logsumexp(logits, -1).mean() - logits[..., 0].mean(), logits

        gradients, logits = jax.grad(loss, has_aux=True)(state)
        return logits, gradients

    expected = run(state, tokens)
    mesh = parallel.make_mesh(**sizes)
    with jax.set_mesh(mesh):
        placed = jax.device_put(state, nn.shardings(state, mesh))
        logits, gradients = run(placed, tokens)
    np.testing.assert_allclose(logits, expected[0], rtol=1e-4, atol=1e-5)
    for x, y in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected[1]), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4 * float(np.abs(y).max()))
