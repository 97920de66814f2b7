"""Mapping of atoms in chemical reactions by one attention head of a pretrained encoder.

Schwaller et al. 2021, "Extraction of organic chemistry grammar from unsupervised learning of
chemical reactions": in an ALBERT model of reactions, one head attends from each atom of the
products to the atom of the reactants that it was. Reactions are SMILES, such as `CCO.Br>>CCBr`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import effattn
from experiments.encoder import Encoder

PATH = Path(__file__).parent / "data" / "rxnmapper.npz"

# The model of rxnmapper 0.4.3: `data/make_rxnmapper.py`.
NUM_HEADS, NUM_LAYERS = 8, 12
LAYER, HEAD = 10, 5  # the head whose weights map atoms
NEIGHBOURS = 90.0  # factor for neighbours of atoms that are mapped to each other

TOKEN = re.compile(
    r"\[[^\]]+]|Br?|Cl?|[NOSPFIbcnosp().=#+\\/:~@?*$-]|>>?|%[0-9]{2}|[0-9]",
)
SYMBOL = re.compile(r"\[?[0-9]*([A-Z][a-z]?|[a-z]{1,2}|\*)")


class AtomMap(NamedTuple):
    """Atoms of the products and of the reactants, numbered in the order of the SMILES.

    Attributes:
      reactant: for each atom of the products, the atom of the reactants, or -1.
      confidence: product of the shares of attention of all pairs.
    """

    reactant: list[int]
    confidence: float


class Molecules(NamedTuple):
    """Atoms of a list of tokens.

    Attributes:
      places: index of each atom's token.
      elements: symbols of the elements.
      bonded: `(atoms, atoms)` bool.
    """

    places: list[int]
    elements: list[str]
    bonded: np.ndarray


def load() -> tuple[Encoder, dict[str, int]]:
    """Returns the encoder of reactions and its vocabulary."""
    with np.load(PATH) as arrays:
        parameters = {name: jnp.asarray(arrays[name]) for name in arrays if name != "vocabulary"}
        vocabulary = {token: index for index, token in enumerate(arrays["vocabulary"].tolist())}
    return Encoder(parameters, NUM_HEADS, repeats=NUM_LAYERS), vocabulary


def tokens_of(reaction: str) -> list[str]:
    """Returns the tokens of a reaction.

    Raises:
      ValueError: letters that are not SMILES, or no `>>`.
    """
    tokens = TOKEN.findall(reaction)
    if "".join(tokens) != reaction or tokens.count(">>") != 1:
        raise ValueError(f"a reaction must be SMILES with one >>, got {reaction!r}")
    return ["[CLS]", *tokens, "[SEP]"]


def molecules(tokens: Sequence[str]) -> Molecules:
    """Returns the atoms of the tokens, and which atoms are bonded; unknown elements are "?".

    Raises:
      ValueError: a bracket is closed that was not opened.
    """
    places = [
        place
        for place, token in enumerate(tokens)
        if (token[0].isalpha() or token[0] in "[*") and token not in ("[CLS]", "[SEP]")
    ]
    numbers = {place: number for number, place in enumerate(places)}
    bonded = np.zeros((len(places), len(places)), bool)
    last: int | None = None
    branches: list[int | None] = []
    rings: dict[str, int | None] = {}

    def bond(atom):
        if last is not None and atom is not None:
            bonded[last, atom] = bonded[atom, last] = True

    for place, token in enumerate(tokens):
        if place in numbers:
            bond(numbers[place])
            last = numbers[place]
        elif token == "(":
            branches.append(last)
        elif token == ")":
            if not branches:
                raise ValueError(f"no ( before the ) in {''.join(tokens)!r}")
            last = branches.pop()
        elif token in (".", ">>"):
            last = None
        elif token[-1].isdigit():
            if token in rings:
                bond(rings.pop(token))
            else:
                rings[token] = last
    found = [SYMBOL.match(tokens[place]) for place in places]
    return Molecules(places, [match[1].capitalize() if match else "?" for match in found], bonded)


def token_ids(vocabulary: Mapping[str, int], tokens: Sequence[str]) -> list[int]:
    """Returns the ids of tokens; unknown tokens have the id of [UNK]."""
    return [vocabulary.get(token, vocabulary["[UNK]"]) for token in tokens]


def attention_weights(
    encoder: Encoder,
    tokens: jax.Array,
    attention: Callable[..., Any] = effattn.dot_product_attention,
) -> jax.Array:
    """Returns the weights `(B, T, T)` of the head that maps atoms.

    Args:
      encoder: the result of `load`.
      tokens: `(B, T)` int.
      attention: function of queries, keys and values in all layers; linear in the values.
    """
    _, heads = encoder(tokens, attention)
    query, key, _ = heads[LAYER]
    one_hot = jnp.broadcast_to(jnp.eye(tokens.shape[1])[:, None], (*query.shape[:-1], key.shape[1]))
    return attention(query, key, one_hot)[:, :, HEAD]


def atom_map(tokens: Sequence[str], weights: np.ndarray) -> AtomMap:
    """Returns the map of atoms from the attention weights `(tokens, tokens)` of a reaction.

    The pair of atoms of one element with the largest share of the attention is mapped first. Pairs
    of its neighbours then count `NEIGHBOURS` times, and both atoms are done.
    """
    arrow = tokens.index(">>")
    reactants, products = molecules(tokens[:arrow]), molecules(tokens[arrow + 1 :])
    to, of = np.array(reactants.places, int), np.array(products.places, int) + arrow + 1
    scores = weights[np.ix_(of, to)] + weights[np.ix_(to, of)].T
    same = np.array(products.elements)[:, None] == np.array(reactants.elements)
    scores = np.where(same, scores, 0).astype(np.float64)
    reactant, confidence = [-1] * len(of), 1.0
    for _ in of:
        total = scores.sum(1, keepdims=True)
        shares = np.divide(scores, total, out=np.zeros_like(scores), where=total != 0)
        product = int(shares.max(1).argmax())
        atom = int(shares[product].argmax())
        if np.isclose(shares[product, atom], 0):
            break
        reactant[product] = atom
        confidence *= float(shares[product, atom])
        scores[np.ix_(products.bonded[product], reactants.bonded[atom])] *= NEIGHBOURS
        scores[product] = scores[:, atom] = 0
    return AtomMap(reactant, confidence)
