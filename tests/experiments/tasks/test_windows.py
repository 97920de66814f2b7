import numpy as np
import pytest

from experiments.harness.errors import UserError
from experiments.tasks.corpora import Corpus
from experiments.tasks.text import NextToken
from experiments.tasks.tokenizers import ByteTokenizer
from experiments.tasks.windows import Windows, batches


def take(order, steps):
    return np.stack([order[step] for step in steps])


def test_windows_cover_the_stream_and_share_no_target():
    windows = Windows(np.arange(100), context=9)
    assert len(windows) == 11
    targets = np.concatenate([windows[i][1:] for i in range(len(windows))])
    np.testing.assert_array_equal(targets, np.arange(1, 100))
    assert len(Windows(np.arange(0), 9)) == 0


def test_the_order_depends_on_the_seed_alone():
    windows = Windows(np.arange(1000), context=9)
    first = take(batches(windows, 4, seed=3), range(5))
    assert first.shape == (5, 4, 10)
    np.testing.assert_array_equal(first, take(batches(windows, 4, seed=3), range(5)))
    assert not np.array_equal(first, take(batches(windows, 4, seed=4), range(5)))


def test_an_epoch_shows_every_window_once_and_the_next_is_ordered_anew():
    windows = Windows(np.arange(109), context=9)
    epochs = take(batches(windows, 4, seed=0), range(6))[:, :, 0].reshape(2, 12)
    np.testing.assert_array_equal(np.sort(epochs, axis=1), [np.arange(0, 108, 9)] * 2)
    assert not np.array_equal(*epochs)


def test_a_batch_is_the_same_whichever_were_read_before():
    windows = Windows(np.arange(1000), context=9)
    order, backwards = batches(windows, 4, seed=0), batches(windows, 4, seed=0)
    steps = range(60)  # more than two epochs, of 27 batches and three windows each
    np.testing.assert_array_equal(take(order, steps)[::-1], take(backwards, steps[::-1]))


def test_validation_windows_are_fixed_and_spread_over_the_held_out_text(documents):
    corpus = Corpus(tuple(documents[:15]), tuple(documents[15:]))
    task = NextToken.of(corpus, ByteTokenizer(), context=16, batch=2, eval_windows=5)
    again = NextToken.of(corpus, ByteTokenizer(), context=16, batch=4, eval_windows=5)
    np.testing.assert_array_equal(task.valid, again.valid)
    stream = b"\n\n".join(documents[15:])
    starts = [stream.index(window.tobytes()) for window in task.valid]
    assert starts[0] == 0 and starts[-1] > len(stream) - 64
    assert len(set(np.diff(starts) // 64)) <= 2
    assert task.held_out()["validation"].targets.shape == (5, 16)


def test_fewer_windows_than_asked_for_are_all_used(documents):
    corpus = Corpus(tuple(documents[:19]), (b"x" * 50,))
    task = NextToken.of(corpus, ByteTokenizer(), context=16, batch=2, eval_windows=100)
    assert task.valid.shape == (3, 17)


def test_windows_of_whole_documents_extend_over_no_end():
    windows = Windows(np.arange(100), context=9, ends=[40, 49, 100])
    assert [window[0] for window in windows] == [0, 9, 18, 27, 49, 58, 67, 76, 85]
    assert {len(windows[i]) for i in range(len(windows))} == {10}


def test_whole_documents_are_those_of_the_corpus(documents):
    corpus = Corpus(tuple(documents[:15]), tuple(documents[15:]))
    sizes = {"context": 100, "batch": 2, "eval_windows": 100}
    task = NextToken.of(corpus, ByteTokenizer(), whole_documents=True, **sizes)
    assert len(task.valid) == sum((len(document) - 1) // 100 for document in documents[15:])
    for window in task.valid:
        assert sum(window.tobytes() in document for document in documents[15:]) == 1


@pytest.mark.parametrize(
    ("train", "valid", "sentence"),
    [
        (128, 100, "its training part has 128 tokens, and 8 windows of 16 need 129"),
        (129, 16, "its validation part has 16 tokens, and 1 window of 16 need 17"),
    ],
)
def test_too_little_text_is_refused_with_numbers(train, valid, sentence):
    corpus = Corpus((b"x" * train,), (b"x" * valid,))
    with pytest.raises(UserError, match=sentence):
        NextToken.of(corpus, ByteTokenizer(), context=16, batch=8, eval_windows=4)


def test_documents_that_are_too_short_are_named():
    corpus = Corpus((b"x" * 40,) * 9, (b"x" * 16,) * 9)
    sizes = {"context": 16, "batch": 8, "eval_windows": 4, "whole_documents": True}
    sentence = "has documents for 0 windows, and needs 1 window of 16 tokens; give more or longer"
    with pytest.raises(UserError, match=sentence):
        NextToken.of(corpus, ByteTokenizer(), **sizes)
