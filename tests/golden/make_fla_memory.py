"""Makes the golden file of memories and paths with flash-linear-attention (torch, on a CPU).

The environment and the form of the file are those of `make_fla.py`. `fla_memory.npz` holds, beside
the inputs of that file

    square_value    (B, T, N, H), values with as many features as the keys
    levels          (B, T, N, L), weights of the levels
    regulariser     (N, H), positive
    key_memory      (B, N, H, H), symmetric and positive definite
    value_memory    (B, N, H, H)
    norm_scale      (N, H)
    norm_bias       (N, H)
    bias            (B, N, 1, H)

and the cases

    path            vectors `removal_key` and strengths `beta`; without a state
    log_linear      `log_decay` and `levels`; without a state
    mesa            the exact solution; the state is that of the keys, then that of the values
    ttt_linear      the first 8 tokens, in mini-batches of 4 with a rate of 0.1; the output is the
                    state, the matrix and then the bias, because outputs add other residuals
                    than those of the paper
"""

import torch
from make_fla import BATCH, HEADS, LENGTH, SIZE, draw, make, naive, save

LEVELS = (LENGTH - 1).bit_length() + 1


def path(query, key, value, removal_key, beta):
    gates = torch.zeros(BATCH, LENGTH, HEADS)
    output = naive("path_attn").naive_path_attn(
        query, key, value, removal_key, beta, gates, SIZE**-0.5, chunk_size=8
    )
    return output, None


def log_linear(query, key, value, log_decay, levels):
    run = naive("log_linear_attn").naive_log_linear_attn
    return run(query, key, value, log_decay, levels, scale=None), None


def mesa(query, key, square_value, log_decay, beta, regulariser, key_memory, value_memory):
    output, *states = naive("mesa_net").naive_mesa_net_exact(
        *(query, key, square_value, log_decay, regulariser, beta),
        h_kk_init=key_memory,
        h_kv_init=value_memory,
    )
    return output, torch.stack(states)


def ttt_linear(key, square_value, norm_scale, norm_bias, value_memory, bias):
    _, *states = naive("ttt").chunk_ttt_linear_ref(
        *(x[:, :8] for x in (torch.zeros_like(key), key, square_value)),
        *(norm_scale, norm_bias),
        torch.full((BATCH, 8, HEADS, 1), 0.1),
        mini_batch_size=4,
        initial_state=value_memory,
        initial_state_bias=bias,
        output_final_state=True,
    )
    return torch.cat(states, 2), None


def draw_more() -> dict[str, torch.Tensor]:
    inputs = draw()
    memory = torch.randn(BATCH, HEADS, SIZE, SIZE)
    inputs |= {
        "square_value": torch.randn(BATCH, LENGTH, HEADS, SIZE),
        "levels": torch.rand(BATCH, LENGTH, HEADS, LEVELS),
        "regulariser": torch.rand(HEADS, SIZE) + 0.25,
        "key_memory": memory @ memory.mT / SIZE,
        "value_memory": torch.randn(BATCH, HEADS, SIZE, SIZE),
        "norm_scale": torch.rand(HEADS, SIZE) + 0.5,
        "norm_bias": torch.randn(HEADS, SIZE),
        "bias": torch.randn(BATCH, HEADS, 1, SIZE),
    }
    inputs["cotangent_square"] = torch.randn(BATCH, LENGTH, HEADS, SIZE)
    inputs["cotangent_state"] = torch.randn(BATCH, HEADS, SIZE + 1, SIZE)
    return inputs


if __name__ == "__main__":
    inputs = draw_more()
    cases = {"cotangent": (path, log_linear), "cotangent_square": (mesa,)}
    cases["cotangent_state"] = (ttt_linear,)
    arrays = {}
    for name, each in cases.items():
        arrays |= make(each, {**inputs, "cotangent": inputs[name]})
    save("fla_memory", {**arrays, "cotangent": inputs["cotangent"].numpy()})
