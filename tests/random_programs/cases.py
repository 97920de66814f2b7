"""The cases of a seed, by number."""

import gc
import re
import traceback
from typing import Any, Protocol

import jax
import numpy as np

from tests.random_programs import calls, modules

CASES = 4  # of a program
KINDS = (calls.draw, calls.draw, modules.draw)


class Runner(Protocol):
    """A program, with what it compiled."""

    def failures(self, rng: np.random.Generator) -> Any:
        """What is wrong with the case of those random numbers."""

    def may_refuse(self) -> bool:
        """Whether it names an implementation that need not take it."""


class Cases:
    """One program at a time keeps what it compiled.

    Attributes:
      programs: how many there were.
    """

    def __init__(self, seed: int, only: str = ""):
        self.seed, self.only = seed, re.compile(only)
        self.place, self.runner, self.programs = -1, None, 0

    def program(self, case: int) -> Runner | None:
        """The case's program; None where its mechanism was not asked for."""
        if self.place != case // CASES:
            self.place = case // CASES
            rng = np.random.default_rng([self.seed, 0, self.place])
            kind = KINDS[rng.integers(len(KINDS))]
            self.runner = kind(rng, self.only)
            self.programs += self.runner is not None
            if self.programs % 50 == 49:
                jax.clear_caches()
                gc.collect()
        return self.runner

    def run(self, case: int) -> list[str] | None:
        """What is wrong with a case; None where the implementation that it names refuses it."""
        program = self.program(case)
        try:
            return list(program.failures(np.random.default_rng([self.seed, 1, case])))
        except NotImplementedError as error:
            return None if program.may_refuse() else [f"NotImplementedError: {error}"]
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            text = " ".join(str(error).split())[:300]
            return [f"{type(error).__name__}: {text} ({where.filename}:{where.lineno})"]
