"""Where the parameters of a model live on the devices of a mesh."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# Names of the axes of kernels and embeddings, and the mesh axes that divide them. Modules have the
# names as the metadata `out_sharding` of Flax.
RULES: Mapping[str, str] = {
    "features": "fsdp",  # D, of tokens
    "heads": "tensor",
    "hidden": "tensor",  # F, of feed-forward layers
    "experts": "expert",  # E, of mixtures of experts
    "vocabulary": "tensor",
    "stages": "stage",  # S, of a `PipelinedLM`
}

Module = TypeVar("Module", bound=nnx.Module)

# Mesh axes of the rows and tokens of activations `(B, T, D)`.
ACTIVATIONS = ("data", "fsdp", "expert"), ("sequence",)


def axes(*names: str | None) -> dict[str, Any]:
    """Metadata of a parameter whose axes have these names."""
    # Without a mesh, Flax refuses to place a parameter when it is made.
    return {"out_sharding": names, "eager_sharding": False}


def placed(build: Callable[[], Module], mesh: Mesh, rules: Mapping[str, str] = RULES) -> Module:
    """Builds a model whose variables are made on the devices where they live.

    A variable that is divided is never whole on one device, so the model may be larger than the
    memory of a device.
    The variables are those of `build()`. Use the model where the mesh is set:

        mesh = parallel.make_mesh(fsdp=2, tensor=4)
        model = nn.placed(lambda: nn.TransformerLM(config, rngs=nnx.Rngs(0)), mesh)
        with jax.set_mesh(mesh):
            logits = model(tokens)

    Args:
      build: function that makes the model, with its `nnx.Rngs`.
      mesh: mesh, such as that of `effattn.parallel.make_mesh`.
      rules: mesh axes by the names of parameter axes.

    Raises:
      ValueError: `build` is a model that is already there, or makes no module.
    """
    if isinstance(build, nnx.Module):
        raise ValueError(
            f"build must be a function that makes the model, got a {type(build).__name__}; use "
            "nnx.update(model, jax.device_put(nnx.state(model), nn.shardings(model, mesh))) for a "
            "model that is already there"
        )
    shapes = nnx.eval_shape(build)
    if not isinstance(shapes, nnx.Module):
        raise ValueError(f"build must return an nnx.Module, got a {type(shapes).__name__}")
    make = jax.jit(lambda: nnx.state(build()), out_shardings=shardings(shapes, mesh, rules))
    return nnx.merge(nnx.graphdef(shapes), make())


def shardings(model: Any, mesh: Mesh, rules: Mapping[str, str] = RULES) -> nnx.State:
    """Returns the sharding of every variable of a model on a mesh.

    The heads of projections, the hidden features of feed-forward layers and the vocabulary are
    divided among the devices of the axis `tensor` (Shoeybi et al. 2019, "Megatron-LM"), the
    features of tokens among those of `fsdp` (Rajbhandari et al. 2020, "ZeRO"), experts among those
    of `expert` (Lepikhin et al. 2020, "GShard"), and the stages of a `PipelinedLM` among those of
    `stage`. An axis that these devices cannot divide evenly, and all other variables, are whole on
    each device.

    For a model that is already there; `placed` builds a new one:

        mesh = parallel.make_mesh(fsdp=2, tensor=4)
        state = jax.device_put(nnx.state(model), nn.shardings(model, mesh))
        nnx.update(model, state)

    Args:
      model: a module, or one of `nnx.eval_shape`, or its state.
      mesh: mesh, such as that of `effattn.parallel.make_mesh`.
      rules: mesh axes by the names of parameter axes.

    Returns:
      A state with a `NamedSharding` for each variable, in the structure of `nnx.state(model)`.
    """

    def of(variable: Any) -> Any:
        names = variable.get_metadata().get("out_sharding") or ()
        sizes = variable.get_value().shape
        return variable.replace(NamedSharding(mesh, _spec(names, sizes, mesh, rules)))

    state = model if isinstance(model, nnx.State) else nnx.state(model)
    return jax.tree.map(of, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))


def shardings_like(tree: Any, params: Any, of_params: Any, mesh: Mesh) -> Any:
    """Returns the shardings of arrays that belong to parameters, such as an optimiser's moments.

    A leaf belongs to the parameter with its shape whose path is the end of the leaf's path. A leaf
    without a parameter is whole on each device.

    Args:
      tree: a pytree of arrays or shapes, such as the state of an optimiser of Optax.
      params: the parameters: nested dictionaries of arrays or shapes.
      of_params: their shardings.
      mesh: mesh for the other leaves.
    """
    known = zip(jax.tree.leaves_with_path(params), jax.tree.leaves(of_params), strict=True)
    by_end = {(tuple(map(str, path)), leaf.shape): place for (path, leaf), place in known}
    whole = NamedSharding(mesh, PartitionSpec())

    def of(path: Sequence[Any], leaf: Any) -> NamedSharding:
        names = tuple(map(str, path))
        ends = ((names[start:], leaf.shape) for start in range(len(names)))
        return next((by_end[end] for end in ends if end in by_end), whole)

    return jax.tree.map_with_path(of, tree)


def _spec(names, sizes, mesh, rules):
    taken: set[str] = set()
    places: list[str | None] = []
    for name, size in zip(names, sizes, strict=False):
        axis = rules.get(name, "") if name else ""
        count = mesh.shape.get(axis, 1)
        divides = count > 1 and size % count == 0 and axis not in taken
        places.append(axis if divides else None)
        taken |= {axis} if divides else set()
    return PartitionSpec(*places)
