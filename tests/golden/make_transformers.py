"""Makes the golden files of this folder with Hugging Face's transformers (torch, on a CPU).

    python -m venv /tmp/hf && /tmp/hf/bin/pip install torch transformers numpy
    /tmp/hf/bin/python tests/golden/make_transformers.py

The models are small and have random parameters. A file holds the parameters under their names in
transformers, the inputs, the output of the attention and of its dense layer (before the residual
and its LayerNorm), and the gradient of sum(output * cotangent) by the input. The files of Mamba and
Mamba-2 hold the parameters and the output of a whole mixer, for Mamba-2 by case; the file of
Reformer also holds the random rotations of a layer. The models train, with no dropout. All arrays
are float32 except the indices; rows in padding hold zeros. Nothing is downloaded.
"""

import json
import pathlib
import sys

import numpy as np
import torch
import transformers
from transformers.models.big_bird import modeling_big_bird as big_bird
from transformers.models.fnet import modeling_fnet as fnet
from transformers.models.longformer import modeling_longformer as longformer
from transformers.models.mamba import modeling_mamba as mamba
from transformers.models.mamba2 import modeling_mamba2 as mamba2
from transformers.models.nystromformer import modeling_nystromformer as nystromformer
from transformers.models.reformer import modeling_reformer as reformer
from transformers.models.rwkv import modeling_rwkv as rwkv

HERE = pathlib.Path(__file__).parent
BATCH, FEATURES, HEADS = 2, 24, 4

LONGFORMER_WINDOW = 8
# For each case, the number of tokens, the valid tokens of each row, and the global tokens among
# them; 32 is a multiple of the window and 27 is not.
LONGFORMER = {
    "no_global": (32, [32, 32], [[], []]),
    "global": (32, [32, 32], [[0], [0]]),
    "padded": (32, [32, 19], [[0, 3, 29], [7]]),
    "ragged": (27, [27, 21], [[1, 13, 26], []]),
}

BIGBIRD_BLOCK = 4
# Number of blocks, random blocks of each block (None for exact attention), and valid tokens of each
# row.
BIGBIRD = {
    "full": (4, None, [16, 11]),
    "one_random": (9, 1, [36, 36]),
    "two_random": (12, 2, [48, 48]),
    "padded": (12, 2, [48, 42]),
}

NYSTROM_KERNEL = 5
# Number of tokens, a multiple of the number of landmarks, and number of landmarks.
NYSTROM = {"pairs": (12, 6), "long": (40, 4), "one": (7, 1)}

REFORMER_CHUNK = 6
# Number of tokens, a multiple of the chunk, and the factors of the number of buckets.
REFORMER = {"whole": (36, [8]), "factors": (36, [2, 4]), "two_chunks": (12, [4])}

# The length of 21 tokens is no multiple of the chunk.
MAMBA2 = {
    "hidden_size": 16,
    "num_heads": 4,
    "head_dim": 8,
    "state_size": 6,
    "conv_kernel": 4,
    "chunk_size": 8,
    "num_hidden_layers": 1,
}
MAMBA = {
    "hidden_size": 16,
    "state_size": 6,
    "conv_kernel": 4,
    "expand": 2,
    "time_step_rank": 3,
    "num_hidden_layers": 1,
}
MAMBA_LENGTH = 21
MAMBA2_GROUPS = {"one_group": 1, "two_groups": 2}


def randomise(module: torch.nn.Module) -> None:
    """Draws larger parameters than a model starts with, biases too, so that attention varies."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.0, 1.5 / FEATURES**0.5 if parameter.ndim > 1 else 0.3)


def parameters_of(module: torch.nn.Module) -> dict[str, np.ndarray]:
    """The whole state dict, including the parameters of the LayerNorm."""
    return {f"parameter/{name}": value.numpy() for name, value in module.state_dict().items()}


def draw(length: int, features: int = FEATURES) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, with a gradient, and the cotangent."""
    x = torch.randn(BATCH, length, features, requires_grad=True)
    return x, torch.randn(BATCH, length, features)


def results(attention, heads, x, cotangent, valid) -> dict[str, np.ndarray]:
    output = attention.output.dense(heads) * valid[..., None]
    (gradient,) = torch.autograd.grad((output * cotangent).sum(), x)
    return {
        "x": x.detach().numpy() * valid.numpy()[..., None],
        "cotangent": cotangent.numpy(),
        "output": output.detach().numpy(),
        "gradient": gradient.numpy(),
    }


def make_longformer() -> dict[str, np.ndarray]:
    torch.manual_seed(0)
    config = transformers.LongformerConfig(
        hidden_size=FEATURES,
        num_attention_heads=HEADS,
        num_hidden_layers=1,
        attention_window=[LONGFORMER_WINDOW],
        attention_probs_dropout_prob=0.0,
        hidden_dropout_prob=0.0,
    )
    attention = longformer.LongformerAttention(config, layer_id=0).train()
    randomise(attention)
    arrays = parameters_of(attention)
    for name, (length, lengths, global_tokens) in LONGFORMER.items():
        x, cotangent = draw(length)
        valid = torch.arange(length) < torch.tensor(lengths)[:, None]
        is_global = torch.zeros(BATCH, length, dtype=torch.bool)
        for row, tokens in enumerate(global_tokens):
            is_global[row, tokens] = True
        # The model pads to a multiple of the window, with masked tokens.
        more = -length % LONGFORMER_WINDOW
        padded = torch.nn.functional.pad(x, (0, 0, 0, more), value=1.0)
        is_masked = torch.nn.functional.pad(~valid, (0, more), value=True)
        is_global_padded = torch.nn.functional.pad(is_global, (0, more), value=False)
        mask = torch.zeros(is_masked.shape)
        mask[is_masked], mask[is_global_padded] = -10000.0, 10000.0
        heads = attention.self(
            padded,
            attention_mask=mask,
            is_index_masked=is_masked,
            is_index_global_attn=is_global_padded,
            is_global_attn=bool(is_global.any()),
        )[0][:, :length]
        case = results(attention, heads, x, cotangent, valid)
        case["lengths"] = np.array(lengths, np.int32)
        case["global_mask"] = is_global.numpy()
        arrays.update({f"{name}/{key}": value for key, value in case.items()})
    return arrays


def make_bigbird() -> dict[str, np.ndarray]:
    torch.manual_seed(1)
    arrays: dict[str, np.ndarray] = {}
    state = None
    for name, (blocks, random, lengths) in BIGBIRD.items():
        length = blocks * BIGBIRD_BLOCK
        config = transformers.BigBirdConfig(
            hidden_size=FEATURES,
            num_attention_heads=HEADS,
            num_hidden_layers=1,
            block_size=BIGBIRD_BLOCK,
            num_random_blocks=random or 0,
            attention_type="block_sparse" if random else "original_full",
            attention_probs_dropout_prob=0.0,
            hidden_dropout_prob=0.0,
            max_position_embeddings=length,
        )
        # Random blocks are drawn in training only.
        attention = big_bird.BigBirdAttention(config, seed=3).train()
        if state is None:
            randomise(attention)
            state = attention.state_dict()
            arrays.update(parameters_of(attention))
        attention.load_state_dict(state)
        x, cotangent = draw(length)
        valid = torch.arange(length) < torch.tensor(lengths)[:, None]
        drawn = []
        if random:
            heads = attend_sparsely(attention, x, valid, drawn)
        else:
            heads, _ = attention.self(x, attention_mask=(~valid)[:, None, None, :] * -1e9)
        case = results(attention, heads, x, cotangent, valid)
        case["lengths"] = np.array(lengths, np.int32)
        if random:
            # (heads, query blocks except the first and the last, random blocks)
            case["random_blocks"] = np.stack(drawn[0]).astype(np.int32)
        arrays.update({f"{name}/{key}": value for key, value in case.items()})
    return arrays


def attend_sparsely(attention, x, valid, drawn: list) -> torch.Tensor:
    """The heads' output; the random blocks that are drawn on the way are added to the list."""
    draw_blocks = attention.self._bigbird_block_rand_mask_with_head

    def record(*args, **kwargs):
        drawn.append(draw_blocks(*args, **kwargs))
        return drawn[-1]

    attention.self._bigbird_block_rand_mask_with_head = record
    blocked, band, from_mask, to_mask = big_bird.BigBirdModel.create_masks_for_block_sparse_attn(
        valid.float(), BIGBIRD_BLOCK
    )
    return attention.self(x, band, from_mask, to_mask, blocked, blocked)[0]


def make_nystromformer() -> dict[str, np.ndarray]:
    torch.manual_seed(2)
    arrays: dict[str, np.ndarray] = {}
    state = None
    for name, (length, landmarks) in NYSTROM.items():
        config = transformers.NystromformerConfig(
            hidden_size=FEATURES,
            num_attention_heads=HEADS,
            num_hidden_layers=1,
            num_landmarks=landmarks,
            segment_means_seq_len=length,
            conv_kernel_size=NYSTROM_KERNEL,
            attention_probs_dropout_prob=0.0,
            hidden_dropout_prob=0.0,
        )
        attention = nystromformer.NystromformerAttention(config).train()
        # The layer reads this option of the config under a wrong name.
        attention.self.init_option = "exact"
        if state is None:
            randomise(attention)
            state = attention.state_dict()
            arrays.update(parameters_of(attention))
        attention.load_state_dict(state)
        x, cotangent = draw(length)
        valid = torch.ones(BATCH, length, dtype=torch.bool)
        case = results(attention, attention.self(x)[0], x, cotangent, valid)
        case["num_landmarks"] = np.array(landmarks, np.int32)
        arrays.update({f"{name}/{key}": value for key, value in case.items()})
    return arrays


def make_reformer() -> dict[str, np.ndarray]:
    """LSH attention of one round; with more rounds, transformers counts a pair once a round."""
    torch.manual_seed(5)
    arrays: dict[str, np.ndarray] = {}
    for name, (length, factors) in REFORMER.items():
        config = transformers.ReformerConfig(
            hidden_size=FEATURES,
            num_attention_heads=HEADS,
            attention_head_size=FEATURES // HEADS,
            attn_layers=["lsh"],
            num_hashes=1,
            num_buckets=factors,
            lsh_attn_chunk_length=REFORMER_CHUNK,
            lsh_num_chunks_before=1,
            lsh_num_chunks_after=0,
            lsh_attention_probs_dropout_prob=0.0,
            hidden_dropout_prob=0.0,
            hash_seed=7,
            is_decoder=False,
        )
        attention = reformer.LSHSelfAttention(config).train()
        output = reformer.ReformerSelfOutput(config)
        randomise(attention)
        randomise(output)
        x, cotangent = draw(length)
        found = attention(x)
        y = output(found.hidden_states)
        (gradient,) = torch.autograd.grad((y * cotangent).sum(), x)
        torch.manual_seed(config.hash_seed)
        rotations = torch.randn(HEADS, FEATURES // HEADS, 1, sum(factors) // 2)
        case = {
            **parameters_of(attention),
            **parameters_of(output),
            "x": x.detach().numpy(),
            "cotangent": cotangent.numpy(),
            "output": y.detach().numpy(),
            "gradient": gradient.numpy(),
            # (heads, head size, rounds, columns)
            "rotations": rotations.numpy(),
            "factors": np.array(factors, np.int32),
            "buckets": found.buckets.numpy().astype(np.int32),
        }
        arrays.update({f"{name}/{key}": value for key, value in case.items()})
    return arrays


def make_mamba2() -> dict[str, np.ndarray]:
    torch.manual_seed(3)
    arrays: dict[str, np.ndarray] = {}
    for name, groups in MAMBA2_GROUPS.items():
        config = transformers.Mamba2Config(n_groups=groups, **MAMBA2)
        case = of_mixer(mamba2.Mamba2Mixer(config, layer_idx=0), config.hidden_size)
        arrays.update({f"{name}/{key}": value for key, value in case.items()})
    return arrays


def make_mamba() -> dict[str, np.ndarray]:
    torch.manual_seed(4)
    config = transformers.MambaConfig(**MAMBA)
    return of_mixer(mamba.MambaMixer(config, layer_idx=0), config.hidden_size)


def of_mixer(mixer: torch.nn.Module, features: int) -> dict[str, np.ndarray]:
    mixer.train()
    randomise(mixer)
    x, cotangent = draw(MAMBA_LENGTH, features)
    output = mixer(x)
    (gradient,) = torch.autograd.grad((output * cotangent).sum(), x)
    return {
        **parameters_of(mixer),
        "x": x.detach().numpy(),
        "cotangent": cotangent.numpy(),
        "output": output.detach().numpy(),
        "gradient": gradient.numpy(),
    }


def make_fnet() -> dict[str, np.ndarray]:
    torch.manual_seed(7)
    transform = fnet.FNetBasicFourierTransform(transformers.FNetConfig(hidden_size=FEATURES))
    x, cotangent = draw(MAMBA_LENGTH)
    output = transform(x)[0]
    (gradient,) = torch.autograd.grad((output * cotangent).sum(), x)
    arrays = {"x": x, "cotangent": cotangent, "output": output, "gradient": gradient}
    return {name: array.detach().numpy() for name, array in arrays.items()}


def make_rwkv() -> dict[str, np.ndarray]:
    torch.manual_seed(8)
    config = transformers.RwkvConfig(hidden_size=FEATURES, num_hidden_layers=1, context_length=32)
    layers = {
        "time": rwkv.RwkvSelfAttention(config),
        "channel": rwkv.RwkvFeedForward(config),
    }
    arrays = {}
    for name, layer in layers.items():
        # transformers does not initialise the parameters of this layer, nor `time_mix`.
        randomise(layer)
        for key, parameter in layer.named_parameters():
            if key.startswith("time_mix"):
                torch.nn.init.uniform_(parameter)
        x, cotangent = draw(MAMBA_LENGTH)
        output = layer(x)[0]
        (gradient,) = torch.autograd.grad((output * cotangent).sum(), x)
        found = {"x": x, "cotangent": cotangent, "output": output, "gradient": gradient}
        found = {key: array.detach().numpy() for key, array in found.items()}
        found.update(parameters_of(layer))
        arrays.update({f"{name}/{key}": array for key, array in found.items()})
    return arrays


def main() -> None:
    makers = {
        "longformer": make_longformer,
        "bigbird": make_bigbird,
        "nystromformer": make_nystromformer,
        "reformer": make_reformer,
        "mamba": make_mamba,
        "mamba2": make_mamba2,
        "fnet": make_fnet,
        "rwkv": make_rwkv,
    }
    for name, make in makers.items():
        np.savez_compressed(HERE / f"transformers_{name}.npz", **make())
    made_with = {
        "python": sys.version.split()[0],
        "numpy": np.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    (HERE / "transformers.json").write_text(json.dumps(made_with, indent=2) + "\n")


if __name__ == "__main__":
    main()
