import numpy as np
import pytest

from experiments.harness.errors import UserError
from experiments.tasks.tokenizers import (
    LONGEST_WORD,
    BytePairTokenizer,
    ByteTokenizer,
    load,
    save,
)

TEXTS = [b"State of the Union", "naïve café \U0001f600\t\r\n  x".encode(), bytes(range(1, 128))]


@pytest.fixture
def byte_pairs(documents):
    return BytePairTokenizer.train(documents, 300)


def test_bytes_are_tokens():
    tokenizer = ByteTokenizer()
    assert tokenizer.encode([b"ab", b"c"]).tolist() == [97, 98, 10, 10, 99]
    assert tokenizer.decode(tokenizer.encode(TEXTS)).encode() == b"\n\n".join(TEXTS)
    assert tokenizer.decode(np.array([255])) == "\ufffd"


def test_byte_pairs_give_any_text_back(byte_pairs):
    assert byte_pairs.vocab_size == 300
    assert byte_pairs.decode(byte_pairs.encode(TEXTS)).encode() == b"\n\n".join(TEXTS)


def test_byte_pairs_know_how_many_bytes_they_stand_for(byte_pairs, documents):
    tokens = byte_pairs.encode([*documents, *TEXTS])
    assert byte_pairs.token_bytes[tokens].sum() == len(b"\n\n".join([*documents, *TEXTS]))
    assert len(tokens) < len(b"\n\n".join([*documents, *TEXTS])) / 2


def test_training_byte_pairs_is_deterministic(byte_pairs, documents):
    again = BytePairTokenizer.train(documents, 300)
    np.testing.assert_array_equal(again.encode(documents), byte_pairs.encode(documents))


def test_text_without_spaces_is_cut_to_words_that_are_soon_merged():
    text = "é".encode() * 3000
    tokenizer = BytePairTokenizer.train([text], 300)
    assert tokenizer.token_bytes.max() == LONGEST_WORD
    tokens = tokenizer.encode([text])
    assert tokenizer.token_bytes[tokens].sum() == len(text)
    assert tokenizer.decode(tokens).encode() == text


def test_no_room_is_made_for_more_tokens_than_the_text_has():
    # Memory for this many tokens would be 140 GB.
    assert BytePairTokenizer.train([b"ab ab"], 2**31 - 1).vocab_size == 258


def test_a_cached_vocabulary_is_read_not_trained_again(tmp_path, documents):
    cache = tmp_path / "tokenizer.json"
    first = load("bpe", 300, documents, cache)
    assert not cache.exists()
    save(first, cache)
    second = load("bpe", 300, [b"other text"], cache)
    np.testing.assert_array_equal(first.encode(documents), second.encode(documents))
    save(ByteTokenizer(), tmp_path / "bytes.json")
    assert not (tmp_path / "bytes.json").exists()


def test_a_damaged_vocabulary_is_one_sentence(tmp_path, documents):
    cache = tmp_path / "tokenizer.json"
    cache.write_text("{")
    with pytest.raises(UserError, match="is not a tokenizer .*delete"):
        load("bpe", 300, documents, cache)
