"""Makes the golden file of native sparse attention with flash-linear-attention (torch, on a CPU).

    python -m venv /tmp/fla && /tmp/fla/bin/pip install torch einops numpy
    /tmp/fla/bin/pip install --no-deps fla-core
    /tmp/fla/bin/python tests/golden/make_fla_sparse.py

The naive form of the package runs on small random inputs. It compresses blocks that do not overlap
by their means, selects blocks of the same size, and has no window here, as a window needs a GPU.
Its file imports two helpers that need Triton; the mean of blocks is given in their place, and the
other helper is for packed documents. `fla_sparse.npz` holds, with B = 2, T = 23, N = 16 heads,
K = 1 key head, H = 4 and Hv = 6, all float32:

    query               (B, T, N, H)
    key, value          (B, T, K, H), (B, T, K, Hv)
    compressed_gate, selected_gate  (B, T, N), in (0, 1)
    cotangent           (B, T, N, Hv), of the output
    output              (B, T, N, Hv), of blocks of 3 tokens, of which a query selects 4
    d_<input>           the gradients of sum(output * cotangent)
"""

import importlib.metadata
import importlib.util
import json
import pathlib
import sys
import types

import einops
import numpy as np
import torch

HERE = pathlib.Path(__file__).parent
BATCH, LENGTH, HEADS, SIZE, VALUE_SIZE = 2, 23, 16, 4, 6
BLOCK, SELECTED = 3, 4


def mean_pooling(x: torch.Tensor, block: int, cu_seqlens: None) -> torch.Tensor:
    """Means of the blocks of tokens; the last block may be short."""
    return torch.stack([part.mean(1) for part in x.split(block, 1)], 1)


def naive() -> types.ModuleType:
    """Loads the module from its file, because the package around the file asks for Triton."""
    (root,) = importlib.util.find_spec("fla").submodule_search_locations
    for name in ("fla.ops", "fla.ops.utils", "fla.ops.utils.pooling"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["fla.ops.utils"].prepare_chunk_offsets = None
    sys.modules["fla.ops.utils.pooling"].mean_pooling = mean_pooling
    path = pathlib.Path(root, "ops", "nsa", "naive.py")
    spec = importlib.util.spec_from_file_location("naive_nsa", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make() -> dict[str, np.ndarray]:
    torch.manual_seed(0)
    tokens = BATCH, LENGTH
    given = {
        "query": torch.randn(*tokens, HEADS, SIZE),
        "key": torch.randn(*tokens, 1, SIZE),
        "value": torch.randn(*tokens, 1, VALUE_SIZE),
        "compressed_gate": torch.rand(*tokens, HEADS),
        "selected_gate": torch.rand(*tokens, HEADS),
    }
    cotangent = torch.randn(*tokens, HEADS, VALUE_SIZE)
    for x in given.values():
        x.requires_grad_()
    output = naive().naive_nsa(
        *(given[name] for name in ("query", "key", "value")),
        g_cmp=given["compressed_gate"],
        g_slc=given["selected_gate"],
        block_counts=SELECTED,
        block_size=BLOCK,
    )
    gradients = torch.autograd.grad((output * cotangent).sum(), [*given.values()])
    return {
        **{name: x.detach().numpy() for name, x in given.items()},
        **{f"d_{name}": x.numpy() for name, x in zip(given, gradients, strict=True)},
        "cotangent": cotangent.numpy(),
        "output": output.detach().numpy(),
    }


def main() -> None:
    np.savez_compressed(HERE / "fla_sparse.npz", **make())
    made_with = {
        "python": sys.version.split()[0],
        "numpy": np.__version__,
        "torch": torch.__version__,
        "einops": einops.__version__,
        "fla-core": importlib.metadata.version("fla-core"),
    }
    (HERE / "fla_sparse.json").write_text(json.dumps(made_with, indent=2) + "\n")


if __name__ == "__main__":
    main()
