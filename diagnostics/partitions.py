"""Posterior summaries of partitions: groups, co-clustering, point estimate, credible ball.

Labels are integers (chain, draw, row). Only which rows share a label matters, so label switching
has no effect. With n_g, m_h and n_gh the sizes of the groups of two partitions and of their
intersections, both losses are

    sum_g f(n_g) + sum_h f(m_h) - 2 sum_gh f(n_gh)

    "vi":      f(x) = x log x / n          in nats
    "binder":  f(x) = x^2 / (n (n - 1))    share of pairs

VI is Meila's variation of information, H(a) + H(b) - 2 I(a, b). Binder's loss with equal costs is
the share of pairs of rows on which the partitions disagree, one minus the Rand index. Wade and
Ghahramani (2018), "Bayesian cluster analysis: point estimation and credible balls", Bayesian
Analysis 13. The search is similar to Dahl, Johnson and Mueller (2022), "Search algorithms and loss
functions for Bayesian clustering", JCGS 31.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Float, Int

__all__ = [
    "CredibleBall",
    "PartitionEstimate",
    "coclustering",
    "credible_ball",
    "distances",
    "expected_loss",
    "num_groups",
    "partition_of",
    "point_estimate",
]

LOSSES = ("vi", "binder")
MOST_COUNTS = 2**21  # intersections of groups that are counted at once: 16 MB an array


@dataclass(frozen=True)
class PartitionEstimate:
    """A point estimate of a partition."""

    labels: np.ndarray  # [row]
    expected_loss: float  # over the draws
    loss: str
    losses: np.ndarray  # the expected loss at which each start of the search ended


@dataclass(frozen=True)
class CredibleBall:
    """The partitions at a distance of at most `radius` from `center`.

    The bounds are distinct draws in the ball, [bound, row]; there may be ties. `upper` are the
    draws farthest from the center among those with the fewest groups, `lower` among those with the
    most groups, and `horizontal` among all.
    """

    center: np.ndarray
    radius: float
    level: float
    probability: float  # of the ball; at least `level`, for distances are discrete
    upper: np.ndarray
    lower: np.ndarray
    horizontal: np.ndarray


def partition_of(tree: xr.DataTree) -> xr.DataArray:
    """Return the labels of a run on a CRP mixture, with different groups in different classes.

    The model's own labels count the groups within each class from 0.

    Args:
        tree: a run that names its partition in `attrs["partition"]`.

    Returns:
        Labels (chain, draw, row).
    """
    if "partition" not in tree.attrs:
        raise ValueError(
            "partition_of: the run does not say which site is a partition; pass the draws of that "
            "site to the functions of this module."
        )
    z, classes = (name and name.replace("/", ".") for name in json.loads(tree.attrs["partition"]))
    if z not in tree["posterior"]:
        raise ValueError(
            f"partition_of: the run has no draws of {z!r}; run the filter with "
            "keep_assignments=True."
        )
    labels: Any = tree["posterior"][z]
    if classes is None:
        return labels
    groups = [
        tree[name].to_dataset() for name in ("posterior", "observed_data") if name in tree.children
    ]
    # NumPyro's names where some labels are missing
    names = (classes, f"{classes}_unobserved", f"{classes}_observed")
    found = [group[name] for group in groups for name in names if name in group]
    if not found:
        raise ValueError(
            f"partition_of: the run has no classes {classes!r}, within which {z!r} counts groups."
        )
    return (found[0] * (labels.max() + 1) + labels).transpose(*labels.dims).rename(z)


def num_groups(labels: Any) -> xr.DataArray:
    """Return the posterior probability of each number of groups. Cost: n for each draw.

    Args:
        labels: labels (chain, draw, row).

    Returns:
        Probabilities over "groups" = 1, 2, ... up to the largest number drawn.
    """
    draws, weights = _distinct(labels)
    counts = draws.max(1) + 1
    mass = np.bincount(counts, weights=weights, minlength=counts.max() + 1)[1:]
    return xr.DataArray(
        mass, dims=("groups",), coords={"groups": np.arange(1, len(mass) + 1)}, name="probability"
    )


def coclustering(labels: Any) -> xr.DataArray:
    """Return the posterior probability that two rows share a group.

    Cost: n^2 for each distinct draw.

    Args:
        labels: labels (chain, draw, row).

    Returns:
        Probabilities (row, row_other).
    """
    draws, weights = _distinct(labels)
    together = np.zeros((draws.shape[1],) * 2)
    for draw, weight in zip(draws, weights, strict=True):
        together += weight * (draw[:, None] == draw)
    return xr.DataArray(together, dims=("row", "row_other"), name="probability")


def distances(labels: Any, center: Any, loss: str = "vi") -> np.ndarray:
    """Return the loss between each draw and one partition.

    Cost: n + K K' for each distinct draw, with K groups of the center and K' of a draw. Memory:
    about 100 MB, or one draw if that is more.

    Args:
        labels: labels (chain, draw, row) or [draw, row].
        center: labels [row].
        loss: "vi" or "binder".

    Returns:
        Losses [chain, draw] or [draw].
    """
    array = _draws_of(labels)
    draws, inverse = np.unique(_canonical(array), axis=0, return_inverse=True)
    return _losses(draws, _one(center, draws.shape[1]), loss)[inverse.ravel()].reshape(
        array.shape[:-1]
    )


def expected_loss(labels: Any, center: Any, loss: str = "vi") -> float:
    """Return the mean loss of one partition over the draws. Cost: that of `distances`.

    Args:
        labels: labels (chain, draw, row).
        center: labels [row].
        loss: "vi" or "binder".
    """
    draws, weights = _distinct(labels)
    return float(weights @ _losses(draws, _one(center, draws.shape[1]), loss))


def point_estimate(
    labels: Any, loss: str = "vi", restarts: int = 8, seed: int = 0
) -> PartitionEstimate:
    """Find a partition of minimal expected loss by greedy search from several starts.

    Starts are random draws, one group of all rows, and a group for each row. Each start moves
    single rows, merges pairs of groups and splits groups while the expected loss falls. The result
    may be a local optimum: raise `restarts` when `losses` of the starts differ. Cost for D distinct
    draws of n rows and K groups: D n K for a sweep of moves, D K^3 for a round of merges, D n for
    each split tried; D K^2 numbers of memory.

    Args:
        labels: labels (chain, draw, row).
        loss: "vi" or "binder".
        restarts: number of draws to start from.
        seed: of the search.

    Returns:
        The best partition, and the losses of all starts.
    """
    if restarts < 0:
        raise ValueError(f"restarts: at least 0, got {restarts}.")
    draws, weights = _distinct(labels)
    rng = np.random.default_rng(seed)
    picked = rng.choice(len(draws), size=min(restarts, len(draws)), replace=False, p=weights)
    starts = [np.zeros(draws.shape[1], int), np.arange(draws.shape[1]), *draws[picked]]
    found = [_Search(draws, weights, loss, start, rng).run() for start in starts]
    losses = np.array([float(weights @ _losses(draws, each, loss)) for each in found])
    best = int(losses.argmin())
    return PartitionEstimate(_canonical(found[best]), float(losses[best]), loss, losses)


def credible_ball(labels: Any, center: Any, level: float = 0.95, loss: str = "vi") -> CredibleBall:
    """Return the smallest ball about a partition with a given posterior probability.

    Cost: that of `distances`.

    Args:
        labels: labels (chain, draw, row).
        center: labels [row], such as a point estimate.
        level: the posterior probability of the ball is at least this.
        loss: "vi" or "binder".

    Returns:
        The ball with its bounds.
    """
    if not 0 < level <= 1:
        raise ValueError(f"level: a probability above 0, got {level}.")
    draws, weights = _distinct(labels)
    middle = _one(center, draws.shape[1])
    apart = np.round(_losses(draws, middle, loss), 12)  # so that rounding does not break ties
    order = np.argsort(apart)
    enough = min(int(np.searchsorted(np.cumsum(weights[order]), level - 1e-12)), len(order) - 1)
    radius = float(apart[order][enough])
    inside = apart <= radius
    counts = draws.max(1) + 1

    def furthest(chosen: np.ndarray) -> np.ndarray:
        return draws[chosen & (apart == apart[chosen].max())]

    fewest, most = counts[inside].min(), counts[inside].max()
    return CredibleBall(
        center=middle,
        radius=radius,
        level=level,
        probability=float(weights[inside].sum()),
        upper=furthest(inside & (counts == fewest)),
        lower=furthest(inside & (counts == most)),
        horizontal=furthest(inside),
    )


class _Search:
    """One greedy search.

    `crossing[d, g, h]` is the number of rows of group g of the candidate in group h of draw d.
    """

    def __init__(
        self,
        draws: Int[np.ndarray, "draw row"],
        weights: Float[np.ndarray, " draw"],
        loss: str,
        start: Int[np.ndarray, " row"],
        rng: np.random.Generator,
    ):
        self.draws, self.weights, self.rng = draws, weights, rng
        self.f = _size_function(loss, draws.shape[1])
        self.each = np.arange(len(draws))
        self._adopt(start)

    def run(self) -> np.ndarray:
        """Repeat moves, merges and splits until none of them gains."""
        while self._moves() or self._merges() or self._splits():
            pass
        return self.labels

    def _adopt(self, labels: np.ndarray) -> None:
        self.labels = _canonical(labels)
        groups = self.labels.max() + 2  # the last group is empty, for a row that starts a new one
        self.crossing = np.zeros((len(self.draws), groups, self.draws.max() + 1), int)
        np.add.at(self.crossing, (self.each[:, None], self.labels[None], self.draws), 1)
        self.sizes = np.bincount(self.labels, minlength=groups)

    def _moves(self) -> bool:
        """Move rows, in random order, to the group of least expected loss, until none moves."""
        gained = False
        while True:
            moved = [self._move(row) for row in self.rng.permutation(len(self.labels))]
            if not any(moved):
                return gained
            gained = True
            self._adopt(self.labels)  # drops empty groups

    def _move(self, row: int) -> bool:
        here, there = self.labels[row], self.draws[:, row]
        self._shift(row, here, -1)
        cell = self.crossing[self.each, :, there]
        cost = self._step(self.sizes) - 2 * self.weights @ self._step(cell)
        best = int(cost.argmin())
        target = best if cost[best] < cost[here] - 1e-12 else here
        self._shift(row, target, 1)
        self.labels[row] = target
        if self.sizes[-1]:  # the empty group is in use: add another one
            self.crossing = np.concatenate(
                [self.crossing, np.zeros_like(self.crossing[:, :1])], axis=1
            )
            self.sizes = np.append(self.sizes, 0)
        return target != here

    def _shift(self, row: int, group: int, sign: int) -> None:
        self.crossing[self.each, group, self.draws[:, row]] += sign
        self.sizes[group] += sign

    def _step(self, count: np.ndarray) -> np.ndarray:
        return self.f(count + 1) - self.f(count)

    def _merges(self) -> bool:
        """Make the best merge of two groups, if one gains."""
        groups = len(self.sizes) - 1
        best, pair = -1e-12, None
        for g in range(groups):
            others = np.arange(g + 1, groups)
            joint = self._sum_f(self.crossing[:, others] + self.crossing[:, [g]]) - self._sum_f(
                self.crossing[:, others]
            )
            gain = (
                self.f(self.sizes[others] + self.sizes[g])
                - self.f(self.sizes[others])
                - self.f(self.sizes[g])
            )
            change = gain - 2 * (joint - self._sum_f(self.crossing[:, [g]]))
            if len(others) and change.min() < best:
                best, pair = change.min(), (g, int(others[change.argmin()]))
        if pair is None:
            return False
        self._adopt(np.where(self.labels == pair[1], pair[0], self.labels))
        return True

    def _sum_f(self, crossing: np.ndarray) -> np.ndarray:
        return self.weights @ self.f(crossing).sum(-1)

    def _splits(self) -> bool:
        """Make the first split that gains: by the groups of a random draw, or by similarity to two
        random rows.
        """
        before = self._total(self.labels)
        for group in self.rng.permutation(self.labels.max() + 1):
            rows = np.flatnonzero(self.labels == group)
            for candidate in self._divisions(rows) if len(rows) > 1 else ():
                labels = self.labels.copy()
                labels[rows] = self.labels.max() + 1 + candidate
                if self._total(labels) < before - 1e-12:
                    self._adopt(labels)
                    return True
        return False

    def _divisions(self, rows: np.ndarray, tries: int = 4) -> list[np.ndarray]:
        found = [
            self.draws[d][rows]
            for d in self.rng.choice(len(self.draws), size=tries, p=self.weights)
        ]
        for _ in range(tries):
            first, second = self.rng.choice(rows, size=2, replace=False)
            similarity = [
                self.weights @ (self.draws[:, rows] == self.draws[:, [seed]])
                for seed in (first, second)
            ]
            found.append((similarity[1] > similarity[0]).astype(int))
        return found

    def _total(self, labels: np.ndarray) -> float:
        return float(self.weights @ _losses_f(self.draws, _canonical(labels), self.f))


def _size_function(loss: str, n: int) -> Callable[[np.ndarray], np.ndarray]:
    if loss not in LOSSES:
        raise ValueError(f"loss: {loss!r} unknown; choose from {list(LOSSES)}.")
    counts = np.arange(n + 2, dtype=float)
    table = (
        counts * np.log(np.maximum(counts, 1)) / n
        if loss == "vi"
        else counts**2 / max(n * (n - 1), 1)
    )
    return lambda x: table[x]


def _losses(
    draws: Int[np.ndarray, "draw row"], one: Int[np.ndarray, " row"], loss: str
) -> Float[np.ndarray, " draw"]:
    return _losses_f(draws, one, _size_function(loss, draws.shape[1]))


def _losses_f(
    draws: Int[np.ndarray, "draw row"],
    one: Int[np.ndarray, " row"],
    f: Callable[[np.ndarray], np.ndarray],
) -> Float[np.ndarray, " draw"]:
    """The loss between each draw and one partition, [draw], computed in blocks of draws."""
    found, groups = [], one.max() + 1
    block = max(1, MOST_COUNTS // max(groups * (draws.max() + 1), draws.shape[1]))
    for part in (draws[i : i + block] for i in range(0, len(draws), block)):
        others = part.max() + 1
        index = (np.arange(len(part))[:, None] * groups + one) * others + part
        crossing = np.bincount(index.ravel(), minlength=len(part) * groups * others).reshape(
            len(part), groups, others
        )
        found.append(
            f(crossing.sum(2)).sum(1) + f(crossing.sum(1)).sum(1) - 2 * f(crossing).sum((1, 2))
        )
    return np.maximum(np.concatenate(found), 0.0)


def _draws_of(labels: Any) -> np.ndarray:
    """Labels [chain, draw, row] or [draw, row]; dimensions of a DataArray may have any order."""
    if isinstance(labels, xr.DataArray):
        labels = labels.transpose(*(dim for dim in ("chain", "draw") if dim in labels.dims), ...)
    array = np.asarray(labels)
    if array.ndim not in (2, 3):
        raise ValueError(f"labels: (chain, draw, row) or [draw, row]; found shape {array.shape}.")
    return array


def _distinct(labels: Any) -> tuple[np.ndarray, np.ndarray]:
    draws, counts = np.unique(_canonical(_draws_of(labels)), axis=0, return_counts=True)
    return draws, counts / counts.sum()


def _canonical(array: np.ndarray) -> np.ndarray:
    """Labels [draw, row] or [row], renumbered 0, 1, ... in the order of their first row."""
    if array.dtype.kind not in "iu" or array.size == 0:
        raise ValueError(
            f"labels: integers (chain, draw, row), at least one; found {array.dtype} of shape "
            f"{array.shape}."
        )
    flat = array.reshape(-1, array.shape[-1])
    dense = np.unique(flat, return_inverse=True)[1].reshape(flat.shape)
    first = np.full((len(flat), dense.max() + 1), flat.shape[1])
    np.minimum.at(first, (np.arange(len(flat))[:, None], dense), np.arange(flat.shape[1]))
    rank = np.argsort(np.argsort(first, axis=1), axis=1)
    found = np.take_along_axis(rank, dense, axis=1)
    return found[0] if array.ndim == 1 else found


def _one(center: Any, n: int) -> np.ndarray:
    array = np.asarray(center)
    if array.shape != (n,) or array.dtype.kind not in "iu":
        raise ValueError(
            f"center: one label a row, shape ({n},), integers; found {array.dtype} of shape "
            f"{array.shape}."
        )
    return _canonical(array)
