"""Chess: which piece stands on the squares of each move of a random game?"""

import dataclasses
import functools
import random
from typing import ClassVar

import chess
import numpy as np

from experiments.tasks.task import NOTHING, Batch, Task, generator, require
from experiments.tasks.tracking import StateTracking, padded

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

    Attributes:
      games: number of different training games; no held-out game is one of them.
    """

    title = "Chess pieces after random moves"
    reference: ClassVar[str] = (
        "Merrill et al. 2024, The Illusion of State in State-Space Models, whose notation this is; "
        "Toshniwal et al. 2022, Chess as a Testbed for Language Model State Tracking; the games "
        "are random, and the question, which needs no list of legal moves, is our own; "
        "training repeats a fixed number of games"
    )

    games: int

    vocab_size = PADDING + 1
    num_classes = 6

    def __post_init__(self) -> None:
        super().__post_init__()
        require(1 <= self.games <= 2**31, f"games must be 1 to {2**31}, got {self.games}")

    def training(self, size: int, seed: int, step: int) -> Batch:
        rng = generator(seed, step)
        games = _batch(rng.integers(self.games, size=size), self.trained_length)
        lengths = rng.integers(self.trained[0], self.trained[1] + 1, size)
        return padded(games.inputs[0], games.targets, lengths, PADDING)

    def _examples(self, rng: np.random.Generator, lengths: np.ndarray, longest: int) -> Batch:
        # Games of training have smaller numbers.
        games = _batch(rng.integers(2**31, 2**62, size=len(lengths)), longest)
        return padded(games.inputs[0], games.targets, lengths, PADDING)


def _batch(numbers: np.ndarray, length: int) -> Batch:
    games = [_game(int(number), length) for number in numbers]
    inputs, targets = np.stack(games, 1).astype(np.int32)
    return Batch((inputs,), targets)


# The games are read in many steps, and by all models.
@functools.lru_cache(maxsize=300_000)
def _game(number: int, length: int) -> np.ndarray:
    """Returns the first tokens of a random game and their targets: int8 `(2, length)`."""
    rng, board = random.Random(number), chess.Board()
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
        "small": ChessGames(
            trained=(64, 64), tested=((128, 128), (256, 256)), held_out_size=256, games=20_000
        ),
        "published": ChessGames(
            trained=(128, 128),
            tested=((256, 256), (512, 512)),
            held_out_size=4096,
            games=200_000,
        ),
    }
}
