"""Operations, parameters, states and memory of a model, counted from jaxprs of abstract arrays."""

import collections
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from effattn import registry
from effattn.analysis import cost, liveness
from effattn.analysis.planning import parts
from effattn.nn import TransformerConfig, TransformerLM
from effattn.nn.block import Block

# Parameters of `MixtureOfExperts` that the mesh axis `expert` divides.
EXPERTS = frozenset({"gate_kernels", "up_kernels", "down_kernels"})
# Tokens from which operations that are linear in the number of tokens are counted.
_FEW = 128


class Pass(NamedTuple):
    """Operations of a forward pass, and of a backward pass without recomputation."""

    forward: float
    backward: float

    def times(self, factor: float) -> "Pass":
        """The operations of several passes."""
        return Pass(self.forward * factor, self.backward * factor)

    def plus(self, other: "Pass") -> "Pass":
        """The operations of both."""
        return Pass(self.forward + other.forward, self.backward + other.backward)

    def minus(self, other: "Pass") -> "Pass":
        """The operations without those of another part."""
        return self.plus(other.times(-1))


@functools.lru_cache(maxsize=1024)
def alike(config: TransformerConfig) -> tuple[int, ...]:
    """For each layer, the index of the first layer that is like it."""
    layers = range(config.num_layers)
    residual = config.value_residual  # of values, which the layers after the first have
    described = [
        (config.layer_mixer(layer), config.layer_experts(layer), residual and layer > 0)
        for layer in layers
    ]
    return tuple(described.index(layer) for layer in described)


def kinds(config: TransformerConfig) -> dict[int, int]:
    """Number of layers that are like each layer, by the index of the first of them."""
    return dict(collections.Counter(alike(config)))


@functools.lru_cache(maxsize=1024)
def at_length(config: TransformerConfig, length: int) -> TransformerConfig:
    """The model with the sizes that the registry derives from the length, unless they are given."""
    if not isinstance(config.mixer, str):
        return dataclasses.replace(config, max_length=length)
    entry = registry.get(config.mixer)
    options = {} if entry.options_at is None else entry.options_at(length)
    sizes = {name: size for name, size in options.items() if isinstance(size, int)}
    mixer = {"name": config.mixer, **sizes} if sizes else config.mixer
    return dataclasses.replace(config, mixer=mixer, max_length=length)


def first_layers(config: TransformerConfig, count: int) -> TransformerConfig:
    """The model with its first layers alone."""

    def first(of_layers):
        return of_layers[:count] if isinstance(of_layers, tuple | list) else of_layers

    sizes = {"mixer": first(config.mixer), "experts": first(config.experts)}
    return dataclasses.replace(config, num_layers=count, **sizes)


def hidden_features(config: TransformerConfig) -> int:
    """Hidden features of the feed-forward layers."""
    parameters = split(at_length(config, _FEW), 0, "feed_forward")[1]
    name = next(name for name in ("up_kernels", "up", "key") if name in parameters)
    up = parameters[name] if name == "up_kernels" else parameters[name]["kernel"]
    return up.get_value().shape[-1]


@functools.lru_cache(maxsize=1024)
def has_heads(config: TransformerConfig, layer: int) -> bool:
    """Returns whether the mixer of a layer calls a function over heads."""
    return hasattr(
        nnx.eval_shape(lambda: Block(config, layer, rngs=nnx.Rngs(0))).mixer, "attention"
    )


def parameters_of_layers(config: TransformerConfig, module: str | None = None) -> int:
    """Number of parameters of all layers, or of one module of each."""
    return sum(
        count * _size(split(config, layer, module)[1]) for layer, count in kinds(config).items()
    )


def parameters_of_experts(config: TransformerConfig) -> tuple[float, float]:
    """Number of parameters in the experts of all layers, and in the experts of one token."""
    total = of_token = 0.0
    for layer, count in kinds(config).items():
        if (experts := config.layer_experts(layer)) is not None:
            parameters = split(config, layer, "feed_forward")[1]
            size = count * _size({n: leaf for n, leaf in parameters.items() if n in EXPERTS})
            total += size
            of_token += size * experts.experts_per_token / experts.num_experts
    return total, of_token


def parameters_of_ends(config: TransformerConfig) -> int:
    """Number of parameters outside the layers: embeddings, the last norm, the projection."""
    _, parameters, _ = _split_model(first_layers(config, 1))
    return _size({name: leaf for name, leaf in parameters.items() if name != "blocks"})


def parameters_of_mixer(config: TransformerConfig, layer: int) -> tuple[int, int]:
    """Number of arrays of parameters of a layer's mixer, and their bytes."""
    parameters = split(config, layer, "mixer")[1]
    return len(jax.tree.leaves(parameters)), _bytes(parameters)


class Layers(NamedTuple):
    """Operations of all layers for one sequence.

    Attributes:
      mixers: in the mixers.
      feed_forward: in the feed-forward layers or experts.
      others: in norms and residual connections.
    """

    mixers: Pass
    feed_forward: Pass
    others: Pass


@functools.lru_cache(maxsize=1024)
def operations_of_layers(config: TransformerConfig, length: int) -> Layers:
    """Operations of all layers for one sequence."""
    found = Layers(*[Pass(0.0, 0.0)] * 3)
    # All but the mixers do the same for each token.
    few = min(length, cost.COUNTED // 4)
    for layer, count in kinds(config).items():
        mixer = operations_of_mixer(config, layer, length)
        sized = at_length(config, few)
        own, feed_forward, block = (
            _operations(sized, layer, module, few) for module in ("mixer", "feed_forward", None)
        )
        others = block.minus(feed_forward).minus(own)
        each = mixer, *(part.times(length / few) for part in (feed_forward, others))
        found = Layers(*(x.plus(y.times(count)) for x, y in zip(found, each, strict=True)))
    return found


@functools.lru_cache(maxsize=1024)
def operations_of_mixer(config: TransformerConfig, layer: int, length: int) -> Pass:
    """Operations of a layer's mixer for one sequence."""
    powers = [_power(group["name"]) for group in config.layer_mixer(layer)]

    def counted(which):
        def count(n):
            return _operations(at_length(config, n), layer, "mixer", n)[which]

        if None in powers and length > cost.COUNTED:
            # A polynomial through three counts: linear or quadratic, as the counts are.
            lengths = cost.COUNTED / np.array([4, 2, 1])
            through = np.polyfit(lengths, [count(int(n)) for n in lengths], 2)
            return float(np.polyval(through, length))
        return cost.extrapolated(count, length, max(power or 1.0 for power in powers))

    return Pass(counted(0), counted(1))


def _power(mixer):
    """Power of the length with which the time of a registered mixer grows; None for others."""
    entry = registry.get(mixer) if isinstance(mixer, str) else registry.entry_of(mixer)
    return None if entry is None else entry.time_exponent


@functools.lru_cache(maxsize=1024)
def operations_of_ends(config: TransformerConfig) -> Pass:
    """Operations for each token of the embedding, the last norm, the logits and the loss."""
    graph, parameters, others = _split_model(first_layers(at_length(config, _FEW), 1))
    x = jax.ShapeDtypeStruct((1, _FEW, config.features), config.dtype)
    labels = jax.ShapeDtypeStruct((1, _FEW), jnp.int32)

    def forward(parameters, x, others, labels):
        model = nnx.merge(graph, parameters, others)
        return loss(model._logits(model.norm(x)), labels)

    def both(*given):
        return jax.value_and_grad(forward, (0, 1))(*given)

    once, twice = (
        cost.operations(jax.make_jaxpr(f)(parameters, x, others, labels)) for f in (forward, both)
    )
    return Pass(once, twice - once).times(1 / _FEW)


def loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean cross-entropy of logits `(B, T, V)` and labels `(B, T)`."""
    picked = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)


@functools.lru_cache(maxsize=1024)
def state_bytes(config: TransformerConfig, layer: int, batch: int, length: int) -> int:
    """Bytes of the decode state of a layer."""

    def state():
        block = Block(config, layer, rngs=nnx.Rngs(0))
        if not hasattr(block.mixer, "init_state"):
            raise ValueError(
                f"the mixer {type(block.mixer).__name__} does not decode; plan its training alone"
            )
        return block.init_state(batch, length)

    return _bytes(jax.eval_shape(state))


class Steps(NamedTuple):
    """Memory of a forward and backward pass over time.

    Attributes:
      timeline: bytes of buffers at each step, without parameters.
      layers: the step after which all gradients of each layer are written.
    """

    timeline: liveness.Timeline
    layers: tuple[int, ...]


@functools.lru_cache(maxsize=256)
def steps(
    config: TransformerConfig,
    batch: int,
    length: int,
    compiler: liveness.Compiler,
    forms: tuple[Any, ...] = (),
    devices: int = 1,
) -> Steps:
    """Memory of the gradient of the mean loss of a batch, from its jaxpr.

    Args:
      config: the model, as one device computes it.
      batch: B.
      length: tokens of a sequence on one device.
      compiler: rules by which values are stored.
      forms: form of each layer's mixer, if several devices divide the sequence.
      devices: number of devices that divide the sequence.
    """
    graph, parameters, others = _split_model(config)
    tokens = jax.ShapeDtypeStruct((batch, devices * length), jnp.int32)

    def gradient(parameters, others, tokens, labels):
        def forward(parameters):
            model = nnx.merge(graph, parameters, others)
            for block, form in zip(model.blocks, forms, strict=False):
                block.mixer = parts.InParts(block.mixer, form)
            mean = loss(model(tokens), labels)
            return jax.lax.psum(mean, parts.AXIS) / devices if forms else mean

        return jax.value_and_grad(forward)(parameters)

    given = parameters, others, tokens, tokens
    if forms:
        specs = parts.WHOLE, parts.WHOLE, parts.TOKENS, parts.TOKENS
        closed = parts.of_device(gradient, devices, specs, parts.WHOLE, *given)
    else:
        closed = jax.make_jaxpr(gradient)(*given)
    timeline = liveness.timeline(closed, compiler)
    last = [0] * config.num_layers
    paths = (path for path, _ in jax.tree_util.tree_leaves_with_path(parameters))
    for path, step in zip(paths, timeline.written[1:], strict=True):
        name, layer, *_ = (getattr(part, "key", None) for part in path)
        if name == "blocks":
            last[int(str(layer))] = max(last[int(str(layer))], step)
    return Steps(timeline, tuple(last))


def programs(
    config: TransformerConfig, layer: int, module: str | None, length: int
) -> tuple[Any, Any]:
    """Jaxprs of the forward pass, and of the forward and backward pass, of one sequence."""
    graph, parameters, others = split(config, layer, module)
    x = jax.ShapeDtypeStruct((1, length, config.features), config.dtype)

    def forward(parameters, others, x):
        return nnx.merge(graph, parameters, others)(x)

    def both(parameters, others, x):
        y, pull_back = jax.vjp(lambda p, x: forward(p, others, x), parameters, x)
        return y, pull_back(y)

    once, twice = (jax.make_jaxpr(f)(parameters, others, x) for f in (forward, both))
    return once, twice


@functools.lru_cache(maxsize=1024)
def _operations(config, layer, module, length):
    """Operations of a layer or of one of its modules for one sequence."""
    once, twice = map(cost.operations, programs(config, layer, module, length))
    return Pass(once, twice - once)


@functools.lru_cache(maxsize=1024)
def split(config, layer, module):
    """Graph, parameters and other variables of a layer or of one of its modules, abstract."""

    def build():
        block = Block(config, layer, rngs=nnx.Rngs(0))
        return block if module is None else getattr(block, module)

    return nnx.split(nnx.eval_shape(build), nnx.Param, ...)


class _Model(TransformerLM):
    """A model that calls all layers by one function, which JAX traces once for layers alike."""

    def _block(self, block, x, marks, key, shared):
        return _call(self.config.remat, self.config.remat_policy)(block, x, shared)


@functools.cache
def _call(remat, policy):
    def call(block, x, shared):
        x, _, shared = block.with_shared(x, shared)
        return x, (), shared

    if not remat:
        return call
    if isinstance(policy, str):
        policy = getattr(jax.checkpoint_policies, policy)
    return jax.checkpoint(call, policy=policy)


@functools.lru_cache(maxsize=256)
def _split_model(config):
    abstract = nnx.eval_shape(lambda: _Model(config, rngs=nnx.Rngs(0)))
    return nnx.split(abstract, nnx.Param, ...)


def _size(tree):
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def _bytes(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
