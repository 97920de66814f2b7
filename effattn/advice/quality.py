"""Measured quality of mechanisms, from the results that are packaged with effattn.

The file `quality.json` beside this module is optional. Its schema:

    {
      "schema": 2,
      "results": [
        {
          "mechanism": "linear",       name in the registry
          "task": "recall",            name of the task
          "is_causal": true,           direction of the measured models
          "score": 0.41,               from 0 to 1, more is better
          "typical": 0.35,             the score that a typical mechanism would have on the task
          "source": "experiments/results/recall: 3 seeds, effattn 0.1.0"
        },
        ...
      ]
    }

A score is an accuracy, rescaled so that guessing scores 0 if the task measures that; or, for tasks
with a loss, the smallest loss of all mechanisms divided by the loss of this mechanism. Mechanisms
are measured on different tasks, so their mean scores do not compare; means of the difference from
`typical` do. `source` names the table and its number of seeds; `python -m experiments.report`
writes the file from tables of twelve or more mechanisms, and leaves out mechanisms that are in
fewer than three such tables of a direction.
"""

import json
import numbers
import pathlib
from collections.abc import Mapping
from typing import NamedTuple

SCHEMA = 2
PATH = pathlib.Path(__file__).with_name("quality.json")


class Result(NamedTuple):
    """Score of a mechanism on a task; the fields are those of the file."""

    mechanism: str
    task: str
    is_causal: bool
    score: float
    typical: float
    source: str

    @property
    def in_words(self) -> str:
        """The score, beside that of a typical mechanism."""
        return f"score {self.score:.2f}, where a typical mechanism has {self.typical:.2f}"


_TYPES: Mapping[str, type] = {
    "mechanism": str,
    "task": str,
    "is_causal": bool,
    "score": numbers.Real,
    "typical": numbers.Real,
    "source": str,
}


def read(path: pathlib.Path | None = None) -> tuple[Result, ...]:
    """Returns all results in the order of the file; none if the file does not exist.

    Raises:
      ValueError: the file has another schema.
    """
    path = PATH if path is None else path
    if not path.exists():
        return ()
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} must be JSON ({error})") from None
    found = content.get("schema") if isinstance(content, dict) else None
    if found != SCHEMA or not isinstance(content.get("results"), list):
        raise ValueError(f"{path} must have schema {SCHEMA} and a list of results, got {found!r}")
    return tuple(_result(path, row) for row in content["results"])


def _result(path: pathlib.Path, row: object) -> Result:
    if not isinstance(row, dict) or row.keys() != _TYPES.keys():
        raise ValueError(f"each result in {path} must have {', '.join(_TYPES)}, got {row!r}")
    for name, needed in _TYPES.items():
        if not isinstance(row[name], needed):
            raise ValueError(f"{name} in {path} must be {needed.__name__}, got {row[name]!r}")
    return Result(**row)
