"""Exact answers for CRP mixtures of a few rows: every partition is written down.

Nothing here comes from `inference`.

    Z = sum over classes y of the unlabelled rows, sum over partitions z within each class, of
        p(y)  prod_c CRP(z of the rows of class c)  prod_groups p(rows of the group),

with p(rows of a group) in closed form, the group integrated out at once and not row by row: ratios
of beta and gamma functions, a multivariate t of the rows of a column, a ratio of Wishart
normalisers. A row of partitions counts 1, 2, 5, 15, 52, 203, 877, 4140.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import numpy as np
from scipy import stats
from scipy.special import betaln, gammaln, logsumexp, multigammaln

__all__ = [
    "Exact",
    "Mixture",
    "bernoulli",
    "categorical",
    "codes",
    "normal",
    "ordered",
    "partitions",
    "poisson",
    "together",
    "total_variation",
    "wishart",
]


@cache
def partitions(num_rows: int) -> np.ndarray:
    """Every partition, [partition, row], as labels in order of appearance."""
    found = [[]]
    for _ in range(num_rows):
        found = [
            [*labels, group] for labels in found for group in range(max(labels, default=-1) + 2)
        ]
    return np.array(found, int).reshape(len(found), num_rows)


def log_crp(
    sizes: np.ndarray, alpha: float, max_groups: int | None = None, discount: float = 0.0
) -> float:
    """Log probability of a partition from the sizes of its groups; with a discount that of
    Pitman and Yor.
    """
    n, num_groups = sum(sizes), len(sizes)
    whole = gammaln(alpha) - gammaln(alpha + n)
    if discount:
        opened = (
            num_groups * np.log(discount)
            + gammaln(alpha / discount + num_groups)
            - gammaln(alpha / discount)
        )
        return whole + opened + (gammaln(sizes - discount) - gammaln(1 - discount)).sum()
    if max_groups is None:
        return whole + num_groups * np.log(alpha) + gammaln(sizes).sum()
    if num_groups > max_groups:
        return -np.inf
    share = alpha / max_groups
    ways = gammaln(max_groups + 1) - gammaln(max_groups - num_groups + 1)
    return whole + ways + (gammaln(sizes + share) - gammaln(share)).sum()


# Log density of the rows of one group [row, column], NaN where missing.


def bernoulli(x: np.ndarray, ones: Any = 0.5, zeros: Any = 0.5) -> float:
    """Columns of 0 and 1, each with its own Beta(ones, zeros)."""
    return (
        betaln(ones + np.nansum(x, 0), zeros + np.nansum(1 - x, 0))
        - betaln(ones, zeros) * np.ones(x.shape[1])
    ).sum()


def categorical(x: np.ndarray, num_values: int, beta: float = 0.5) -> float:
    """Columns of codes with Dirichlet(beta, ..., beta)."""
    counts = (x[..., None] == np.arange(num_values)).sum(0)
    norm = lambda c: gammaln(c).sum(-1) - gammaln(c.sum(-1))
    return (norm(counts + beta) - norm(np.full(counts.shape, beta))).sum()


def poisson(x: np.ndarray, shape: float = 1.0, rate: float = 0.1) -> float:
    """Columns of counts with Gamma(shape, rate)."""
    total, seen = np.nansum(x, 0), (~np.isnan(x)).sum(0)
    closed = (
        gammaln(shape + total)
        - gammaln(shape)
        + shape * np.log(rate)
        - (shape + total) * np.log(rate + seen)
    )
    return closed.sum() - np.nansum(gammaln(x + 1))


def normal(
    x: np.ndarray, mean: float = 0.0, kappa: float = 0.1, nu: float = 2.0, scale: float = 1.0
) -> float:
    """Columns with a scaled inverse chi2(nu, scale^2) variance and a mean of variance / kappa."""
    seen = [column[~np.isnan(column)] for column in x.T]
    shape = lambda n: scale**2 * (np.eye(n) + np.ones((n, n)) / kappa)
    return sum(
        stats.multivariate_t(np.full(len(c), mean), shape(len(c)), df=nu).logpdf(c)
        for c in seen
        if len(c)
    )


def wishart(
    x: np.ndarray,
    mean: float = 0.0,
    kappa: float = 0.1,
    nu: float | None = None,
    scale: float = 1.0,
) -> float:
    """Rows with an inverse Wishart(nu, nu scale^2 I) covariance and a mean of covariance /
    kappa; a row is seen whole or not at all.
    """
    x, width = x[~np.isnan(x).any(1)] - mean, x.shape[1]
    nu, n = width + 1.0 if nu is None else nu, len(x)
    prior = nu * scale**2 * np.eye(width)
    centre = x.sum(0) / (kappa + n)
    after = prior + x.T @ x - (kappa + n) * np.outer(centre, centre)
    half = lambda nu, matrix: multigammaln(nu / 2, width) - nu / 2 * np.linalg.slogdet(matrix)[1]
    return (
        half(nu + n, after)
        - half(nu, prior)
        + width / 2 * (np.log(kappa / (kappa + n)) - n * np.log(np.pi))
    )


def together(*parts: tuple[Any, Callable]) -> Callable:
    """Columns of several kinds: (columns, density) each."""
    return lambda x: sum(density(x[:, columns]) for columns, density in parts)


@dataclass(frozen=True)
class Exact:
    """Every (classes, partition) of the rows, and the log of its joint probability with the
    data.
    """

    labels: np.ndarray  # [answer, row]
    groups: np.ndarray  # [answer, row], within the class
    log_joint: np.ndarray

    @property
    def log_evidence(self) -> float:
        """log Z."""
        return float(logsumexp(self.log_joint))

    @property
    def posterior(self) -> np.ndarray:
        """Probability of each answer."""
        return np.exp(self.log_joint - self.log_evidence)


@dataclass(frozen=True)
class Mixture:
    """A model whose every answer can be written down.

    :param density: log density of the rows of a group; of (rows, class) where `by_class`.
    :param gamma: Dirichlet concentration of the classes [class]; None: they have no prior.
    :param shares: fixed probabilities of the classes instead.
    """

    density: Callable
    alpha: float = 1.0
    max_groups: int | None = None
    discount: float = 0.0
    gamma: tuple[float, ...] | None = (1.0,)
    shares: tuple[float, ...] | None = None
    num_classes: int = 1
    by_class: bool = False

    def answers(self, x: np.ndarray, y: np.ndarray | None = None) -> Exact:
        """All of them, for rows `x` [row, column] of the classes `y`, -1 where it is summed
        over.
        """
        y = np.zeros(len(x), int) if y is None else np.asarray(y)
        density = cache(
            lambda rows, c: float(
                self.density(x[list(rows)], c) if self.by_class else self.density(x[list(rows)])
            )
        )
        found = []
        for labels in product(*([c] if c >= 0 else range(self.num_classes) for c in y)):
            labels = np.array(labels, int)
            own = [np.flatnonzero(labels == c) for c in range(self.num_classes)]
            each = [
                [(z, self._log_term(rows, z, c, density)) for z in partitions(len(rows))]
                for c, rows in enumerate(own)
            ]
            for chosen in product(*each):
                groups = np.zeros(len(x), int)
                for rows, (z, _) in zip(own, chosen, strict=True):
                    groups[rows] = z
                found.append(
                    (labels, groups, self.log_classes(labels) + sum(term for _, term in chosen))
                )
        labels, groups, log_joint = zip(*found, strict=True)
        return Exact(np.array(labels), np.array(groups), np.array(log_joint))

    def log_evidence(self, x: np.ndarray, y: np.ndarray | None = None) -> float:
        """log Z of these rows."""
        return self.answers(x, y).log_evidence

    def log_predictive(
        self, x: np.ndarray, row: np.ndarray, y: np.ndarray | None = None
    ) -> np.ndarray:
        """log p(class, row | rows) for each class, by Z(n + 1) / Z(n)."""
        y = np.zeros(len(x), int) if y is None else np.asarray(y)
        more = [
            self.log_evidence(np.vstack([x, row]), np.append(y, c)) for c in range(self.num_classes)
        ]
        return np.array(more) - self.log_evidence(x, y)

    def log_classes(self, labels: np.ndarray) -> float:
        """log p(y), the shares integrated out."""
        counts = np.bincount(labels, minlength=self.num_classes)
        if self.shares is not None:
            return float(counts @ np.log(self.shares))
        if self.gamma is None:
            return 0.0
        gamma = np.array(self.gamma)
        return float(
            gammaln(gamma + counts).sum()
            - gammaln(gamma).sum()
            + gammaln(gamma.sum())
            - gammaln(gamma.sum() + len(labels))
        )

    def _log_term(self, rows: np.ndarray, z: np.ndarray, c: int, density: Callable) -> float:
        if not len(rows):
            return 0.0
        groups = [rows[z == group] for group in range(z.max() + 1)]
        sizes = np.array([len(each) for each in groups])
        return log_crp(sizes, self.alpha, self.max_groups, self.discount) + sum(
            density(tuple(g), c) for g in groups
        )


def ordered(labels: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Canonical labels of groups [..., row]: their order of appearance within each class."""
    is_same_class = labels[..., :, None] == labels[..., None, :]
    first = (is_same_class & (groups[..., :, None] == groups[..., None, :])).argmax(-1)
    row = np.arange(labels.shape[-1])
    opens = (first == row)[..., None, :] & is_same_class & (row < first[..., None])
    return opens.sum(-1)


def codes(labels: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """One number for each (classes, partition), [..., row] -> [...]; for at most 8 rows and 4
    classes.
    """
    digits = (np.asarray(groups, np.int64) * 4 + np.asarray(labels, np.int64)) * 32 ** np.arange(
        np.shape(groups)[-1]
    )
    return digits.sum(-1)


def total_variation(
    exact: Exact, labels: np.ndarray, groups: np.ndarray, weight: np.ndarray | None = None
) -> float:
    """Between the posterior and weighted answers [..., row]; what is no answer at all counts as
    wrong.
    """
    found = codes(labels, groups).ravel()
    weight = np.ones(len(found)) if weight is None else np.asarray(weight, float).ravel()
    known = codes(exact.labels, exact.groups)
    order = np.argsort(known)
    at = np.minimum(np.searchsorted(known, found, sorter=order), len(known) - 1)
    is_known = known[order[at]] == found
    share = np.bincount(order[at], weight * is_known / weight.sum(), len(known))
    return 0.5 * (np.abs(share - exact.posterior).sum() + (weight * ~is_known).sum() / weight.sum())
