"""Several devices: meshes, and sequences that devices hold in parts.

Batch and heads need nothing from this package: effattn's functions run on sharded arrays under
`jax.jit`. A sequence that is too long for one device is divided among the devices of a mesh axis,
inside `jax.shard_map`, and they exchange what the mechanism needs:

- `exchange_heads` (Ulysses): every device gets all tokens of some of the heads. It takes any
  function of query, key and value, unchanged, and as many devices as there are heads.
- `ring_attention`: exact attention, also within windows. Keys and values pass all devices; within
  a window, only the nearest tokens pass to the neighbours.
- `pass_states`: recurrences. One state a device passes, whatever the length.

A model that is too large for one device may have one of its stages on each: `pipeline`.
The experts of `effattn.nn.MixtureOfExperts` may be divided among devices, too. By `exchange_tokens`
the tokens travel to their experts and back.

A model of 131,072 tokens on eight devices, two of them for the batch:

    mesh = parallel.make_mesh(data=2, sequence=4)
    tokens = PartitionSpec("data", "sequence")
    attend = parallel.exchange_heads(effattn.dot_product_attention, "sequence")
    run = jax.shard_map(attend, mesh=mesh, in_specs=(tokens,) * 3, out_specs=tokens)
    out = jax.jit(run)(query, key, value)
"""

from effattn.parallel.experts import exchange_tokens
from effattn.parallel.heads import exchange_heads
from effattn.parallel.mesh import AXES, make_mesh
from effattn.parallel.pipeline import SCHEDULES, pipeline
from effattn.parallel.ring import ring_attention
from effattn.parallel.states import pass_states

__all__ = [
    "AXES",
    "SCHEDULES",
    "exchange_heads",
    "exchange_tokens",
    "make_mesh",
    "pass_states",
    "pipeline",
    "ring_attention",
]
