"""Several devices: meshes, and sequences that devices hold in parts.

Batch and heads need nothing from this package: effattn's functions run on sharded arrays under
`jax.jit`. A sequence that is too long for one device is divided among the devices of a mesh axis,
inside `jax.shard_map`, and they exchange what the mechanism needs:

- `exchange_heads` (Ulysses): every device gets all tokens of some of the heads. It takes any
  function over heads, unchanged; the number of devices must divide the number of query heads.
- `ring_attention`: exact attention, also within windows. Keys and values pass all devices; within
  a window, only the nearest tokens pass to the neighbours. The order of `zigzag_order` gives all
  devices equal work in causal calls.
- `pass_states`: recurrences, and their mixers with short convolutions. Each device sends one state
  and one transition to all others, whatever the length.
- `exchange_channels`: long convolutions and other mixers of tokens without heads, and their
  modules. Every device gets all tokens of some of the channels.
- `share_keys`: attention to compressed keys (low rank, landmarks, hierarchies). Compressed keys and
  values pass to all devices.

A model that is too large for one device may have one of its stages on each: `pipeline`.
The experts of `effattn.nn.MixtureOfExperts` may be divided among devices, too. By `exchange_tokens`
the tokens travel to their experts and back.

One call of attention on global arrays `(B, T, N, H)`, such as 131,072 tokens, on eight devices: two
parts of the batch, and four parts of the tokens, so the number of heads N is a multiple of 4:

    mesh = parallel.make_mesh(data=2, sequence=4)
    tokens = PartitionSpec("data", "sequence")
    attend = parallel.exchange_heads(effattn.dot_product_attention, "sequence")
    run = jax.shard_map(attend, mesh=mesh, in_specs=(tokens,) * 3, out_specs=tokens)
    out = jax.jit(run)(query, key, value)
"""

from effattn.parallel.channels import exchange_channels
from effattn.parallel.experts import exchange_tokens
from effattn.parallel.heads import exchange_heads
from effattn.parallel.keys import share_keys
from effattn.parallel.mesh import AXES, make_mesh
from effattn.parallel.pipeline import SCHEDULES, pipeline
from effattn.parallel.ring import ring_attention, zigzag_order
from effattn.parallel.states import pass_states

__all__ = [
    "AXES",
    "SCHEDULES",
    "exchange_channels",
    "exchange_heads",
    "exchange_tokens",
    "make_mesh",
    "pass_states",
    "pipeline",
    "ring_attention",
    "share_keys",
    "zigzag_order",
]
