"""AFT-local mixer."""

from typing import Unpack

from effattn.arrays import checks
from effattn.nn.aft_full import AFTFull
from effattn.nn.options import Projected


class AFTLocal(AFTFull):
    """AFT with biases in a window (Zhai et al. 2021, section 3.2).

    As `AFTFull`, with w_ts = 0 if t and s are more than `local_window_size` apart: tokens outside
    the window contribute without a bias. Time is O(T W D).

    Args:
      max_length: number of positions with factors; maximum number of tokens per row.
      local_window_size: W, maximum distance of a pair with a bias.
      rank: R, size of the factors u_t and c_s.
      **options: see `effattn.nn.options.Projected`.

    Raises:
      ValueError: as `AFTFull`.
    """

    _mechanism = "aft_local"

    def __init__(
        self,
        in_features: int,
        *,
        max_length: int,
        local_window_size: int = 31,
        rank: int = 128,
        **options: Unpack[Projected],
    ):
        super().__init__(in_features, max_length=max_length, rank=rank, **options)
        self.window = checks.at_least("local_window_size", local_window_size, 0, "tokens")
