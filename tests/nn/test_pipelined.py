"""Language models in stages: equal to the model without stages, and divided among devices."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from effattn import nn, parallel
from tests.laws.sharding import collectives

COUNT, BATCH, TIME, VOCABULARY = 3, 4, 8, 18


def config_of(**changes):
    sizes = {"vocab_size": VOCABULARY, "num_layers": 4, "features": 16, "num_heads": 4}
    return nn.TransformerConfig(**{**sizes, "mixer": "softmax", "max_length": TIME, **changes})


def models(stages=2, **changes):
    """A model, and the same one in stages."""
    config = config_of(**changes)
    return (
        nn.TransformerLM(config, rngs=nnx.Rngs(0)),
        nn.PipelinedLM(nn.TransformerLM(config, rngs=nnx.Rngs(0)), stages),
    )


@functools.cache
def drawn():
    """Tokens and targets; in NumPy, because a cached array may be made while JAX traces."""
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, (COUNT, BATCH, TIME), np.int32)
    return tokens, np.roll(tokens, -1, -1)


def loss(logits, targets):
    nats = -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)
    return nats.sum() / (COUNT * BATCH * TIME)


def of_routing(stats):
    return stats.load_balancing_loss + stats.router_z_loss


def test_the_methods_of_a_language_model_give_the_same():
    plain, staged = models()
    tokens, _ = drawn()
    np.testing.assert_array_equal(staged(tokens[0]), plain(tokens[0]))
    logits, _ = staged.extend(tokens[0], staged.init_state(BATCH, TIME))
    np.testing.assert_allclose(logits, plain(tokens[0]), atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "stages", "message"),
    [
        ({"num_layers": 3}, 2, "stages must divide the number of layers, 3, got 2"),
        ({}, 0, "stages must divide the number of layers, 4, got 0"),
        ({"mixer": ("softmax", "linear", "linear", "linear")}, 2, "layer 2 is built differently"),
        ({"mixer": "routing"}, 2, "a model with centroids cannot be divided in stages"),
    ],
    ids=str,
)
def test_what_cannot_be_divided_is_refused(changes, stages, message):
    with pytest.raises(ValueError, match=message):
        models(stages, **changes)


def test_heads_are_removed_before_the_layers_are_divided():
    _, staged = models()
    with pytest.raises(ValueError, match="a Transformer without stages, got a PipelinedLM"):
        nn.prune_heads(staged, [[0]] * 4)


@pytest.mark.devices
def test_too_few_learned_positions_are_refused():
    _, staged = models(positions="learned", max_length=TIME - 1)
    with pytest.raises(ValueError, match="must have at most 7 columns"):
        on_stages(staged, {"stage": 2, "data": 4})


def test_a_mesh_without_the_stages_is_refused():
    _, staged = models()
    with pytest.raises(ValueError, match="must have an axis 'stage' of size 2.* Its axes are none"):
        staged.pipelined_loss(*drawn(), loss)


def test_tokens_without_microbatches_are_refused():
    _, staged = models()
    with pytest.raises(ValueError, match=r"tokens must have shape \(M, B, T\), got \(2, 8\)"):
        staged.pipelined_loss(jnp.ones((2, 8), int), None, loss)


def on_one_device(model, routing_loss=None):
    """The loss, and its gradients by layer and for the other parameters."""
    graph, params, others = nnx.split(model, nnx.Param, ...)
    tokens, targets = drawn()

    @jax.jit
    @jax.value_and_grad
    def run(params):
        model, total = nnx.merge(graph, params, others), 0
        for inputs, target in zip(tokens, targets, strict=True):
            logits, routing = model.with_routing(inputs)
            total += loss(logits, target)
            if routing_loss is not None:
                total += sum(map(routing_loss, routing))
        return total

    value, gradients = run(params)
    return value, nnx.merge(graph, gradients, others)


def on_stages(model, sizes, routing_loss=None, schedule="1f1b"):
    """As `on_one_device`, with the compiled program."""
    mesh = parallel.make_mesh(**sizes)
    graph, params, others = nnx.split(model, nnx.Param, ...)
    of_params, of_others = nnx.split_state(nn.shardings(model, mesh), nnx.Param, ...)
    params, others = jax.device_put(params, of_params), jax.device_put(others, of_others)
    batch = jax.device_put(drawn(), NamedSharding(mesh, PartitionSpec(None, "data")))

    @jax.value_and_grad
    def run(params, others, batch):
        model = nnx.merge(graph, params, others)
        options = {"schedule": schedule, "routing_loss": routing_loss}
        return model.pipelined_loss(*batch, loss, **options)

    jitted = jax.jit(run, out_shardings=(None, of_params))
    with jax.set_mesh(mesh):
        program = jitted.lower(params, others, batch).compile()
        value, gradients = program(params, others, batch)
    return value, nnx.merge(graph, gradients, others), program


def assert_equal(found, expected):
    value, gradients, *_ = found
    np.testing.assert_allclose(value, expected[0], rtol=1e-5)
    pairs = zip(gradients.blocks, expected[1].blocks, strict=True)
    names = [n for n in ("embed", "positions", "norm", "head") if getattr(gradients, n) is not None]
    others = ((getattr(gradients, name), getattr(expected[1], name)) for name in names)
    for ours, plain in (*pairs, *others):
        states = (jax.tree.leaves(nnx.state(each, nnx.Param)) for each in (ours, plain))
        for x, y in zip(*states, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4 * np.abs(y).max())


def mixture(first):
    several = {"mechanisms": (first, "softmax"), "gate": "top1", "capacity": 0.5}
    return {"name": "mixture_of_mechanisms", **several}


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.devices
@pytest.mark.parametrize(
    ("sizes", "schedule", "changes"),
    [
        ({"stage": 2, "data": 2, "tensor": 2}, "1f1b", {}),
        slow({"stage": 2, "data": 2, "tensor": 2}, "gpipe", {"tie_embeddings": False}),
        slow({"stage": 2, "sequence": 2, "data": 2}, "1f1b", {"mixer": "gated_delta_net"}),
        slow({"stage": 2, "sequence": 2, "data": 2}, "1f1b", {"mixer": mixture("linear")}),
        slow({"stage": 2, "sequence": 2, "fsdp": 2}, "1f1b", {"mixer": "sliding_window"}),
        slow({"stage": 2, "expert": 2, "fsdp": 2}, "1f1b", {"experts": nn.Experts(4)}),
        slow({"stage": 2, "data": 4}, "1f1b", {"mixer": "performer", "positions": "learned"}),
    ],
    ids=str,
)
def test_equals_one_device(sizes, schedule, changes):
    routing_loss = of_routing if "experts" in changes else None
    plain, staged = models(**changes)
    expected = on_one_device(plain, routing_loss)
    assert_equal(on_stages(staged, sizes, routing_loss, schedule), expected)


@pytest.mark.devices
def test_devices_hold_their_stage_alone_and_send_activations():
    plain, _ = models()
    staged = nn.PipelinedLM(plain, 4)
    *_, program = on_stages(staged, {"stage": 4, "data": 2})
    layers = sum(x.size for x in jax.tree.leaves(nnx.state(staged.stages)))
    others = sum(x.size for x in jax.tree.leaves(nnx.state(staged))) - layers
    given = program.memory_analysis().argument_size_in_bytes
    batch = 2 * COUNT * BATCH // 2 * TIME  # tokens and targets of half of the rows
    assert given == 4 * (layers // 4 + others + batch)
    # Activations and their gradients go to the neighbours; sums are over rows and of what the
    # stages share. Nothing is gathered.
    assert {*collectives(program)} == {"collective-permute", "all-reduce"}
    # Sums follow the last microbatch.
    loops = [part for part in program.as_text().split("\n\n") if not part.startswith("ENTRY")]
    assert not any(" all-reduce" in part for part in loops)
    sent = re.findall(r"= \S*\[([\d,]*)\]\S* collective-permute\(", program.as_text())
    assert {*sent} == {f"{BATCH // 2},{TIME},16", ""}


# Its places depend on all tokens of a row.
@pytest.mark.devices
@pytest.mark.parametrize(
    ("sizes", "changes", "message"),
    [
        ({"stage": 4, "data": 2}, {}, "must have an axis 'stage' of size 2"),
        ({"stage": 2, "sequence": 4}, {"experts": nn.Experts(2)}, "needs a mesh without an axis"),
        ({"stage": 2, "sequence": 4}, {"mixer": mixture("gru")}, "called on parts of the tokens"),
    ],
    ids=str,
)
def test_meshes_that_do_not_fit_are_refused(sizes, changes, message):
    _, staged = models(**changes)
    with pytest.raises(ValueError, match=message):
        on_stages(staged, sizes)


@pytest.mark.devices
@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("gpipe", marks=pytest.mark.slow)])
def test_arrays_that_a_loss_closes_over_are_constants(schedule):
    """Gradients of such arrays would be sums in which only the last stage takes part."""
    _, staged = models(mixer="linear")

    def run(factor):
        def scaled(logits, targets):
            return factor * loss(logits, targets)

        return staged.pipelined_loss(*drawn(), scaled, schedule=schedule)

    with jax.set_mesh(parallel.make_mesh(stage=2, data=4)):
        value, gradient = jax.jit(jax.value_and_grad(run))(2.0)
    assert value > 0 and gradient == 0


@pytest.mark.devices
def test_without_jit():
    plain, staged = models()
    with jax.set_mesh(parallel.make_mesh(stage=2, data=4)):
        value = staged.pipelined_loss(*drawn(), loss, schedule="gpipe")
    np.testing.assert_allclose(value, on_one_device(plain)[0], rtol=1e-5)


@pytest.mark.devices
def test_sixteen_bits():
    plain, staged = models(dtype="bfloat16")
    value, *_ = on_stages(staged, {"stage": 2, "data": 4})
    np.testing.assert_allclose(value, on_one_device(plain)[0], rtol=1e-3)


@pytest.mark.devices
def test_explicit_axes_are_refused():
    _, staged = models()
    mesh = parallel.make_mesh(stage=2, data=4, axis_type=AxisType.Explicit)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="must be automatic"):
        staged.pipelined_loss(*drawn(), loss)


@pytest.mark.devices
def test_tokens_that_the_mesh_does_not_divide_are_refused():
    _, staged = models()
    tokens = jnp.zeros((1, BATCH, 6), jnp.int32)
    with jax.set_mesh(parallel.make_mesh(stage=2, sequence=4)):
        with pytest.raises(
            ValueError, match="'sequence' of the mesh, 4, must divide the tokens, 6"
        ):
            staged.pipelined_loss(tokens, tokens, loss)
