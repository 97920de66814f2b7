"""Makes the golden file of gated recurrences with flash-linear-attention (torch, on a CPU).

The environment and the form of the file are those of `make_fla.py`. `fla_gates.npz` holds, with
M = 5 slots, beside the inputs of that file

    log_decay_slot  (B, T, N, M), one decay a slot
    initial_keys    (B, N, H, M)
    initial_values  (B, N, M, Hv)

and the cases

    hgrn2           decays `log_decay_feature`, whose complement is the key
    gated_slot      decays `log_decay_slot`, scores without a scale; the state is that of the keys,
                    then that of the values, as one flat array
"""

import torch
from make_fla import BATCH, HEADS, LENGTH, SIZE, VALUE_SIZE, draw, make, naive, save

SLOTS = 5


def hgrn2(query, value, log_decay_feature, initial_state):
    return naive("gla").naive_recurrent_gla(
        query,
        1 - log_decay_feature.exp(),
        value,
        log_decay_feature,
        initial_state=initial_state,
        output_final_state=True,
    )


def gated_slot(query, key, value, log_decay_slot, initial_keys, initial_values):
    output, states = naive("gsa").naive_recurrent_gsa(
        query,
        key,
        value,
        1 - log_decay_slot.exp(),
        log_decay_slot,
        scale=1.0,
        initial_state=(initial_keys, initial_values),
        output_final_state=True,
    )
    return output, torch.cat([x.flatten() for x in states])


def draw_more() -> dict[str, torch.Tensor]:
    inputs = draw()
    slots = torch.randn(BATCH, LENGTH, HEADS, SLOTS)
    inputs["log_decay_slot"] = torch.nn.functional.logsigmoid(slots + 1)
    inputs["initial_keys"] = torch.randn(BATCH, HEADS, SIZE, SLOTS)
    inputs["initial_values"] = torch.randn(BATCH, HEADS, SLOTS, VALUE_SIZE)
    return inputs


if __name__ == "__main__":
    save("fla_gates", make((hgrn2, gated_slot), draw_more()))
