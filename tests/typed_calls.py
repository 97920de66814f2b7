"""Calls of effattn for type checkers; nothing runs this file, mypy reads it in `make lint`."""

import effattn


def names_that_are_not_there():
    return (
        effattn.dot_product_atention,  # type: ignore[attr-defined]
        effattn.nn.Transformr,  # type: ignore[attr-defined]
    )


def modules_of_first_use() -> effattn.patterns.Pattern:
    return effattn.patterns.Causal() & effattn.patterns.SlidingWindow(3, 0)
