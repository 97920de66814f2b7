"""Chess games against a replay of their moves."""

import dataclasses

import chess
import numpy as np

from experiments.tasks.chess_games import PADDING, TASKS, _game
from experiments.tasks.task import NOTHING

TASK = dataclasses.replace(TASKS["chess"]["small"], held_out_size=128)
PIECES = ["", "", "n", "b", "r", "q"]


def replay(tokens: list[int], targets: list[int]) -> tuple[chess.Board, bool]:
    """Replays a game of whole moves, checks its targets, and returns the board and its end."""
    board, at = chess.Board(), 0
    while at + 1 < len(tokens) and tokens[at] != PADDING:
        source, target = tokens[at : at + 2]
        text = chess.square_name(source) + chess.square_name(target)
        becomes = at + 2 < len(tokens) and 64 <= tokens[at + 2] < PADDING
        assert targets[at] == board.piece_type_at(source) - 1
        captured = board.piece_type_at(target)
        assert targets[at + 1] == (NOTHING if captured is None else captured - 1)
        if becomes:
            text += PIECES[tokens[at + 2] - 62]
            assert targets[at + 2] == NOTHING
        elif at + 2 == len(tokens) and board.piece_type_at(source) == chess.PAWN:
            return board, False  # the piece that the pawn becomes may have been cut off
        board.push_uci(text)  # refuses illegal moves
        at += 2 + becomes
    if at < len(tokens) and tokens[at] != PADDING:  # the second half of the move was cut off
        assert targets[at] == board.piece_type_at(tokens[at]) - 1
        return board, False
    return board, at < len(tokens)


def test_moves_are_legal_and_targets_are_the_pieces_of_the_board():
    (inputs,), targets = TASK.held_out()["256 tokens"]
    ended = 0
    for tokens, expected in zip(inputs.tolist(), targets.tolist(), strict=True):
        board, is_over = replay(tokens, expected)
        ended += is_over
        assert not (is_over and any(board.legal_moves))
        padding = tokens.index(PADDING) if PADDING in tokens else len(tokens)
        assert set(tokens[padding:]) <= {PADDING} and set(expected[padding:]) <= {NOTHING}
    assert 0 < ended < 32


def test_all_pieces_move_and_the_first_squares_do_not_tell_which():
    (inputs,), targets = TASK.held_out()["256 tokens"]
    counts = targets != NOTHING
    shares = np.bincount(targets[counts], minlength=6) / counts.sum()
    assert shares.min() > 0.05 and shares.max() < 0.45
    begin = chess.Board()
    first = [begin.piece_type_at(square) or 0 for square in chess.SQUARES]
    guesses = np.array([*first, 0, 0, 0, 0, 0])[inputs] - 1
    assert (guesses == targets)[counts].mean() < 0.5


def test_promotions_have_a_token():
    (inputs,), _ = TASK.held_out()["256 tokens"]
    assert {64, 65, 66, 67} <= set(np.unique(inputs).tolist()) <= set(range(PADDING + 1))


def test_games_are_as_long_as_asked_for():
    task = dataclasses.replace(TASK, trained=(4, 9))
    for batch in (task.training(64, 0, 0), task.held_out()["4 to 9 tokens"]):
        lengths = (batch.inputs[0] != PADDING).sum(1)
        assert set(lengths) == set(range(4, 10))
        assert (batch.targets[np.arange(9) >= lengths[:, None]] == NOTHING).all()


def test_training_repeats_a_number_of_games_that_are_not_held_out():
    task = dataclasses.replace(TASK, games=3)
    batches = [task.training(16, 0, step).inputs[0] for step in range(3)]
    trained = {game.tobytes() for batch in batches for game in batch}
    assert len(trained) == 3
    held_out = task.held_out()["64 tokens"].inputs[0]
    assert not trained & {game.tobytes() for game in held_out}
    before = _game.cache_info().misses
    task.training(16, 1, 0)
    assert _game.cache_info().misses == before
