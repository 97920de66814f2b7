"""The atom mapper finds the maps that the tests of rxnmapper expect."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import effattn
from experiments import atom_mapper, downstream


def test_maps_and_confidences_are_those_of_rxnmapper():
    cases = json.loads(downstream.REACTIONS.read_text())
    every = [atom_mapper.tokens_of(case["reaction"]) for case in cases]
    model, vocabulary = atom_mapper.load()
    longest = max(map(len, every))
    ids = [atom_mapper.token_ids(vocabulary, tokens) for tokens in every]
    padded = jnp.array([row + [0] * (longest - len(row)) for row in ids])
    lengths = jnp.array(list(map(len, every)))
    attend = functools.partial(effattn.dot_product_attention, key_value_seq_lengths=lengths)
    weights = jax.jit(lambda m, t: atom_mapper.attention_weights(m, t, attend))(model, padded)
    assert len(cases) == 14
    for case, tokens, of in zip(cases, every, np.asarray(weights), strict=True):
        size = len(tokens)
        np.testing.assert_allclose(of[:size, :size].sum(-1), 1, atol=1e-5)
        found = atom_mapper.atom_map(tokens, of[:size, :size])
        assert found.reactant == case["reactant"]
        if case["confidence"] is not None:
            assert found.confidence == pytest.approx(case["confidence"], rel=1e-5)


def test_tokens_of_a_reaction():
    tokens = "[CLS] C [C@@H] ( Cl ) c %10 Br - > . [Na+] >> [nH] * [SEP]".split()
    assert atom_mapper.tokens_of("C[C@@H](Cl)c%10Br->.[Na+]>>[nH]*") == tokens


@pytest.mark.parametrize("reaction", ["CC", "CC>>C>>C", "C C>>CC", "[CC>>C"])
def test_what_is_no_reaction_is_named(reaction):
    with pytest.raises(ValueError, match="a reaction must be SMILES with one >>"):
        atom_mapper.tokens_of(reaction)


def test_atoms_and_bonds_of_molecules():
    tokens = atom_mapper.tokens_of("C1C(=O)[nH]c1.[13CH3]%10Br~Cl%10.*>>C")
    molecules = atom_mapper.molecules(tokens)
    assert molecules.elements == ["C", "C", "O", "N", "C", "C", "Br", "Cl", "*", "C"]
    pairs = {(i, j) for i, j in np.argwhere(molecules.bonded).tolist() if i < j}
    assert pairs == {(0, 1), (1, 2), (1, 3), (3, 4), (0, 4), (5, 6), (6, 7), (5, 7)}
    assert (molecules.bonded == molecules.bonded.T).all()
    assert [tokens[place] for place in molecules.places[:4]] == ["C", "C", "O", "[nH]"]


def test_an_unknown_atom_keeps_its_place():
    molecules = atom_mapper.molecules(["C", "[?]", "O"])
    assert molecules.elements == ["C", "?", "O"] and molecules.places == [0, 1, 2]


def test_a_bracket_that_was_not_opened_is_one_sentence():
    tokens = atom_mapper.tokens_of("CC)O>>CCO")
    with pytest.raises(ValueError, match=r"no \( before the \) in '\[CLS\]CC\)O'"):
        atom_mapper.atom_map(tokens, np.ones((len(tokens), len(tokens))))


def test_neighbours_of_mapped_atoms_come_first():
    tokens = atom_mapper.tokens_of("CO.CN>>NC")
    weights = np.full((len(tokens), len(tokens)), 0.1)
    # N is mapped with certainty; then its neighbour, although the other C has more weight.
    product, other = tokens.index(">>") + 2, 1
    weights[product, other] = 1.0
    assert atom_mapper.atom_map(tokens, weights).reactant == [3, 2]
    assert atom_mapper.atom_map(atom_mapper.tokens_of("C>>O"), np.ones((5, 5))).reactant == [-1]
