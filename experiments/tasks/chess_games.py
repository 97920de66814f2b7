"""Chess: which piece stands on the squares of each move of a random game?"""

import dataclasses
import functools
import random
from typing import ClassVar

import chess
import numpy as np

from experiments.tasks.task import NOTHING, Batch, Task
from experiments.tasks.tracking import StateTracking

# Tokens are the 64 squares, a1, b1, ..., h8; a token for each piece that pawns become; and padding.
PROMOTIONS = {piece: 62 + piece for piece in (chess.KNIGHT, chess.BISHOP, chess.ROOK, chess.QUEEN)}
PADDING = 68


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChessGames(StateTracking):
    """Pieces of the moves of random chess games.

    Tokens are the moves in (source, target) notation: the square that a piece leaves, the square
    that the piece enters, and for a pawn on the last rank the piece that it becomes. The target at
    the first square is the piece that moves, and at the second square the piece that is captured
    there, if any; pieces are pawn, knight, bishop, rook, queen and king, 0 to 5. In the game
    1. e4 d5 2. exd5:

        inputs   e2  e4  d7  d5  e4  d5
        targets   0   .   0   .   0   0

    Each move is a random move of a random piece among those that have a legal move. Games end when
    no legal move is left.
    """

    reference: ClassVar[str] = (
        "Merrill et al. 2024, The Illusion of State in State-Space Models, whose notation this is; "
        "Toshniwal et al. 2022, Chess as a Testbed for Language Model State Tracking; the games "
        "are random, and the question, which needs no list of legal moves, is our own"
    )

    @property
    def vocab_size(self) -> int:
        return PADDING + 1

    @property
    def num_classes(self) -> int:
        return 6

    def _examples(self, rng: np.random.Generator, lengths: np.ndarray, longest: int) -> Batch:
        games = [_game(int(seed), longest) for seed in rng.integers(2**62, size=len(lengths))]
        inputs, targets = np.stack(games, 1).astype(np.int32)
        return Batch((inputs,), targets)


# Different models are trained on the same games.
@functools.lru_cache(maxsize=100_000)
def _game(seed: int, length: int) -> np.ndarray:
    """Returns the first tokens of a random game and their targets: int8 `(2, length)`."""
    rng, board = random.Random(seed), chess.Board()
    tokens: list[tuple[int, int]] = []
    while len(tokens) < length and (move := _random_move(rng, board)):
        for square in (move.from_square, move.to_square):
            piece = board.piece_type_at(square)
            tokens.append((square, NOTHING if piece is None else piece - 1))
        if move.promotion is not None:
            tokens.append((PROMOTIONS[move.promotion], NOTHING))
        board.push(move)
    tokens += [(PADDING, NOTHING)] * (length - len(tokens))
    return np.array(tokens[:length], np.int8).T


def _random_move(rng: random.Random, board: chess.Board) -> chess.Move | None:
    squares = list(chess.scan_forward(board.occupied_co[board.turn]))
    rng.shuffle(squares)
    for square in squares:
        moves = list(board.generate_legal_moves(chess.BB_SQUARES[square]))
        if moves:
            return rng.choice(moves)
    return None


TASKS: dict[str, dict[str, Task]] = {
    "chess": {
        "small": ChessGames(trained=(64, 64), tested=((128, 128), (256, 256)), held_out_size=256),
        "published": ChessGames(
            trained=(128, 128), tested=((256, 256), (512, 512)), held_out_size=4096
        ),
    }
}
