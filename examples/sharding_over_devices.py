"""
Divide a model and a sequence among devices
===========================================

A mesh names groups of devices, and says which axes of arrays they divide. The same code runs on one
device and on many. Here eight virtual devices share one CPU, so that it runs everywhere.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import effattn
from effattn import nn, parallel

jax.config.update("jax_num_cpu_devices", 8)  # must come before the first array

# %%
# The devices of the axis `data` divide the rows of a batch, and those of `tensor` the heads and the
# hidden features. `nn.placed` makes each parameter where it lives.

mesh = parallel.make_mesh(data=-1, tensor=2 if jax.device_count() > 1 else 1)
config = nn.TransformerConfig(vocab_size=256, num_layers=1, features=64, num_heads=4)


@nnx.jit
def train_step(model, optimizer, tokens):
    def loss_of(model):
        logits = model(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


def train(model, tokens):
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    return [float(train_step(model, optimizer, tokens)) for _ in range(3)]


tokens = np.random.default_rng(0).integers(256, size=(16, 257))
print("losses on one device:", *train(nn.TransformerLM(config, rngs=nnx.Rngs(0)), tokens))

model = nn.placed(lambda: nn.TransformerLM(config, rngs=nnx.Rngs(0)), mesh)
with jax.set_mesh(mesh):
    print(f"losses on {mesh.size} devices:  ", *train(model, tokens))
print("heads of the queries:", model.blocks[0].mixer.query.kernel.sharding.spec)

# %%
# Every device has a part of the tokens. A recurrence needs only the state before its part, which
# `parallel.pass_states` computes: each device sends one state and one transition to the others,
# whatever the length.

mesh = parallel.make_mesh(sequence=-1)
parts = PartitionSpec(None, "sequence")
recurrence = parallel.pass_states(effattn.gated_linear_attention, "sequence")


@jax.jit
@jax.shard_map(mesh=mesh, in_specs=(parts, parts), out_specs=parts)
def attend(x, log_decay):
    return recurrence(x, x, x, log_decay=log_decay)


x = jax.random.normal(jax.random.key(0), (1, 16_384, 2, 32))
log_decay = -0.001 * jnp.ones(x.shape[:-1])
out = attend(*jax.device_put((x, log_decay), NamedSharding(mesh, parts)))
whole = effattn.gated_linear_attention(x, x, x, log_decay=log_decay)
print("tokens of a device:", out.addressable_shards[0].data.shape[1], "of", out.shape[1])
error = jnp.abs(out - whole).max() / jnp.abs(whole).max()
print(f"largest difference from one device, relative to the largest output: {error:.0e}")
