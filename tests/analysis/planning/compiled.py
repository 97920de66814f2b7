"""Training step of a language model on a mesh, compiled for virtual devices."""

import math
import re

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from effattn.arrays import mesh_axes
from effattn.nn import TransformerLM, placement
from effattn.parallel import make_mesh

_OPERATION = re.compile(
    r" = (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)
_ARRAY = re.compile(r"(f32|s32|c64)\[([\d,]*)\]")


def step(config, batch, length, axis="data", devices=1):
    """The compiled step of AdamW with clipped gradients, with the mesh axis that divides it."""
    abstract = nnx.eval_shape(lambda: TransformerLM(config, rngs=nnx.Rngs(0)))
    graph, parameters, others = nnx.split(abstract, nnx.Param, ...)
    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    mesh = make_mesh(**{axis: devices}, devices=jax.devices()[:devices])

    def loss(parameters, others, tokens, labels):
        logits = nnx.merge(graph, parameters, others)(tokens)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def run(parameters, state, others, tokens, labels):
        value, gradients = jax.value_and_grad(loss)(parameters, others, tokens, labels)
        updates, state = optimiser.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, value

    def placed(tree, spec):
        return jax.tree_util.tree_map_with_path(
            lambda path, x: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=NamedSharding(mesh, spec(path, x))
            ),
            tree,
        )

    def divided(path, x):
        return PartitionSpec(*_divided(jax.tree_util.keystr(path), x.shape, axis, devices))

    parameters = placed(parameters, divided)
    state = placed(jax.eval_shape(optimiser.init, parameters), divided)
    others = placed(others, lambda path, x: PartitionSpec())
    place = mesh_axes.dividing(mesh.shape, (batch, length), placement.ACTIVATIONS)
    tokens = placed(jax.ShapeDtypeStruct((batch, length), jnp.int32), lambda path, x: place)
    of_state = jax.tree.map(lambda x: x.sharding, (parameters, state))
    out = *of_state, NamedSharding(mesh, PartitionSpec())
    with jax.set_mesh(mesh):
        traced = jax.jit(run, donate_argnums=(0, 1), out_shardings=out).trace(
            parameters, state, others, tokens, tokens
        )
        return traced.lower().compile()


def bytes_of(program):
    """Bytes of the arguments and temporaries of one device."""
    memory = program.memory_analysis()
    return memory.argument_size_in_bytes + memory.temp_size_in_bytes


def collectives(program):
    """Bytes of the arrays of each collective of a program, by operation."""
    found = {}
    for line in program.as_text().splitlines():
        if match := _OPERATION.search(line):
            sizes = [
                (8 if kind == "c64" else 4) * math.prod(int(n) for n in dims.split(",") if n)
                for kind, dims in _ARRAY.findall(match[1])
            ]
            found.setdefault(match[2], []).append(sizes)
    return found


def _divided(name, shape, axis, devices):
    spec = [None] * len(shape)
    if axis == "fsdp":
        largest = sorted(range(len(shape)), key=lambda i: -shape[i])
        where = next((i for i in largest if shape[i] % devices == 0), None)
    elif axis == "tensor" and len(shape) > 1:
        # Heads, columns and rows of the feed-forward layer, and the vocabulary.
        is_row = "['out']" in name or "down" in name or "embed" in name
        where = 0 if is_row else 1
    elif axis == "expert" and "_kernels" in name:
        where = 0
    else:
        where = None
    if where is not None:
        spec[where] = axis
    return spec
