"""The cases of a seed, by number."""

import gc
import re
import traceback
from typing import Any, Protocol

import jax
import numpy as np

from tests.random_programs import calls, modules

CASES = 4  # cases of a program
KINDS = (calls.draw, calls.draw, modules.draw)


class Runner(Protocol):
    """A program and its compiled functions."""

    def failures(self, rng: np.random.Generator) -> Any:
        """Yields the failures of the case that these random numbers give."""

    def may_refuse(self) -> bool:
        """Returns whether the program names an implementation that may refuse the call."""


class Cases:
    """All cases of a seed; only the present program keeps its compiled functions.

    Attributes:
      programs: number of programs so far.
    """

    def __init__(self, seed: int, only: str = ""):
        self.seed, self.only = seed, re.compile(only)
        self.place, self.runner, self.programs = -1, None, 0

    def program(self, case: int) -> Runner | None:
        """The case's program, or None if its mechanism does not match `only`."""
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
        """Failures of a case, or None if the named implementation refuses the call."""
        program = self.program(case)
        try:
            return list(program.failures(np.random.default_rng([self.seed, 1, case])))
        except NotImplementedError as error:
            return None if program.may_refuse() else [f"NotImplementedError: {error}"]
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            text = " ".join(str(error).split())[:300]
            return [f"{type(error).__name__}: {text} ({where.filename}:{where.lineno})"]
