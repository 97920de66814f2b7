"""Power laws of the loss against parameters, tokens and compute, with bootstrap intervals."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from scipy import optimize, special

HUBER = 1e-3
RESAMPLES = 100
MOST_STEPS = 300  # of one fit; more than points of a real grid need
INTERVAL = (2.5, 97.5)
EDGE = 1e-3  # share of a value's range; values nearer to an end are at their bound


@dataclasses.dataclass(frozen=True)
class Law:
    """A form of L(N, D) for N parameters and D tokens.

    Attributes:
      reference: the publication.
      names: names of the fitted values.
      log_loss: `(values, log N, log D) -> log L`.
      slopes: the derivatives of `log_loss` by the values, `(points, values)`.
      starts: values from which the fits begin.
    """

    reference: str
    names: tuple[str, ...]
    log_loss: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
    slopes: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
    starts: tuple[tuple[float, ...], ...]


def _chinchilla_terms(values, log_n, log_d):
    log_e, log_a, alpha, log_b, beta = values
    return np.stack([np.full_like(log_n, log_e), log_a - alpha * log_n, log_b - beta * log_d])


def _chinchilla(values: np.ndarray, log_n: np.ndarray, log_d: np.ndarray) -> np.ndarray:
    return special.logsumexp(_chinchilla_terms(values, log_n, log_d), axis=0)


def _chinchilla_slopes(values: np.ndarray, log_n: np.ndarray, log_d: np.ndarray) -> np.ndarray:
    e, a, b = special.softmax(_chinchilla_terms(values, log_n, log_d), axis=0)
    return np.stack([e, a, -a * log_n, b, -b * log_d], -1)


def _kaplan(values: np.ndarray, log_n: np.ndarray, log_d: np.ndarray) -> np.ndarray:
    log_nc, alpha, log_dc, beta = values
    return beta * np.logaddexp(alpha / beta * (log_nc - log_n), log_dc - log_d)


def _kaplan_slopes(values: np.ndarray, log_n: np.ndarray, log_d: np.ndarray) -> np.ndarray:
    log_nc, alpha, log_dc, beta = values
    of_n, of_d = alpha / beta * (log_nc - log_n), log_dc - log_d
    share = special.expit(of_n - of_d)
    by_beta = np.logaddexp(of_n, of_d) - share * of_n
    return np.stack([alpha * share, share * (log_nc - log_n), beta * (1 - share), by_beta], -1)


LAWS: Mapping[str, Law] = {
    "chinchilla": Law(
        "Hoffmann et al. 2022, approach 3: L = E + A / N^alpha + B / D^beta",
        ("log E", "log A", "alpha", "log B", "beta"),
        _chinchilla,
        _chinchilla_slopes,
        tuple(
            (np.log(e), a, alpha, b, beta)
            for e in (0.3, 0.8)
            for a, alpha in ((3.0, 0.3), (6.0, 0.6))
            for b, beta in ((4.0, 0.3), (8.0, 0.6))
        ),
    ),
    "kaplan": Law(
        "Kaplan et al. 2020, equation 1.5: L = ((Nc / N)^(alpha / beta) + Dc / D)^beta",
        ("log Nc", "alpha", "log Dc", "beta"),
        _kaplan,
        _kaplan_slopes,
        tuple(
            (n, alpha, d, beta)
            for n in (5.0, 15.0)
            for d in (10.0, 20.0)
            for alpha, beta in ((0.1, 0.1), (0.3, 0.3))
        ),
    ),
}


@dataclasses.dataclass(frozen=True)
class Fit:
    """Fitted values of a law by name, and their 95 % bootstrap intervals.

    Attributes:
      values: least Huber loss of log L, as in Hoffmann et al. 2022.
      intervals: percentiles over resampled cells; a cell is all points of one N and D.
      resampled: values of each resample, `(R,)` by name.
      residual: root mean square of the error of log L.
      at_bound: names of values at an end of their range, which the points do not determine.
    """

    values: Mapping[str, float]
    intervals: Mapping[str, tuple[float, float]]
    resampled: Mapping[str, np.ndarray]
    residual: float
    at_bound: tuple[str, ...]


def fit(
    law: Law,
    parameters: Sequence[float],
    tokens: Sequence[float],
    loss: Sequence[float],
    seed: int = 0,
) -> Fit:
    """Fits a law to the losses of models of several sizes and numbers of training tokens.

    Points of the same size and number of tokens differ in their seeds. Their errors are not
    independent, as the law may be wrong there, so they are resampled together.

    Raises:
      ValueError: no more cells than values.
    """
    log_n, log_d, log_l = (np.log(np.asarray(x, float)) for x in (parameters, tokens, loss))
    _, cell_of = np.unique(np.stack([log_n, log_d]), axis=1, return_inverse=True)
    cells = [np.flatnonzero(cell_of == cell) for cell in range(max(cell_of) + 1)]
    if len(cells) <= len(law.names):
        raise ValueError(
            f"a fit of {len(law.names)} values needs more pairs of size and tokens than that, got "
            f"{len(cells)}"
        )
    found = _least(law, law.starts, log_n, log_d, log_l)
    rng = np.random.default_rng(seed)
    again = []
    for _ in range(RESAMPLES):
        at = np.concatenate([cells[n] for n in rng.integers(len(cells), size=len(cells))])
        again.append(_least(law, (tuple(found),), log_n[at], log_d[at], log_l[at]))
    columns = dict(zip(law.names, np.array(again).T, strict=True))
    low_high = {n: tuple(map(float, np.percentile(c, INTERVAL))) for n, c in columns.items()}
    error = law.log_loss(found, log_n, log_d) - log_l
    low, high = _bounds(law)
    near = np.minimum(found - low, high - found) < EDGE * (high - low)
    return Fit(
        dict(zip(law.names, map(float, found), strict=True)),
        low_high,  # type: ignore[arg-type]
        columns,
        float(np.sqrt(np.mean(error**2))),
        tuple(name for name, is_near in zip(law.names, near, strict=True) if is_near),
    )


def _bounds(law: Law) -> tuple[np.ndarray, np.ndarray]:
    """Returns the least and the largest value that a fit may take, for each name."""
    low, high = zip(
        *((0.01, 3.0) if n in ("alpha", "beta") else (-10.0, 60.0) for n in law.names), strict=True
    )
    return np.array(low), np.array(high)


def _least(
    law: Law,
    starts: Sequence[Sequence[float]],
    log_n: np.ndarray,
    log_d: np.ndarray,
    log_l: np.ndarray,
) -> np.ndarray:
    def errors(values: np.ndarray) -> np.ndarray:
        return law.log_loss(values, log_n, log_d) - log_l

    def slopes(values: np.ndarray) -> np.ndarray:
        return law.slopes(values, log_n, log_d)

    each = [
        optimize.least_squares(
            errors,
            start,
            jac=slopes,
            bounds=_bounds(law),
            x_scale="jac",
            loss="huber",
            f_scale=HUBER,
            max_nfev=MOST_STEPS,
        )
        for start in starts
    ]
    return min(each, key=lambda result: result.cost).x


def frontier(compute: Sequence[float], loss: Sequence[float]) -> list[int]:
    """Returns the indices of the points below all others with at most their compute, in order."""
    kept: list[int] = []
    for index in np.lexsort((loss, compute)):
        if not kept or loss[index] < loss[kept[-1]]:
            kept.append(int(index))
    return kept


def power(x: Sequence[float], y: Sequence[float]) -> float:
    """Returns the exponent b of y = a x^b, by least squares of the logarithms."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])
