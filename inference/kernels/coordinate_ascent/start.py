"""The groups of the rows before the first sweep: by k-means, at random, or by task."""

from typing import Any

import numpy as np
from jaxtyping import Float, Int

from inference.kernels.coordinate_ascent.rows import SufficientSums, as_floats
from inference.reading.stick_mixture.structure import Assignment, MixtureRows

__all__ = ["STARTS", "by_size", "column_means", "kmeans", "start_groups", "start_sums"]


def kmeans(
    points: np.ndarray, num_groups: int, rng: np.random.Generator, most_rows: int = 20_000
) -> np.ndarray:
    """The group of each row, by Lloyd's algorithm from k-means++ centres.

    Args:
        points: The rows [row, column].
        num_groups: The number of groups.
        rng: A random generator.
        most_rows: The number of rows that the centres are found from.
    """
    some = (
        points[rng.choice(len(points), most_rows, replace=False)]
        if len(points) > most_rows
        else points
    )
    centres = some[rng.integers(len(some))][None]
    distance = np.full(len(some), np.inf)
    while len(centres) < num_groups:
        distance = np.minimum(distance, ((some - centres[-1]) ** 2).sum(1))
        share = distance / distance.sum() if distance.sum() > 0 else None
        centres = np.vstack([centres, some[rng.choice(len(some), p=share)]])
    for _ in range(10):
        own = _nearest(some, centres)
        count = np.bincount(own, minlength=num_groups)[:, None]
        total = np.stack([np.bincount(own, column, num_groups) for column in some.T], 1)
        centres = np.where(count > 0, total / np.maximum(count, 1), centres)
    return _nearest(points, centres)


STARTS = {
    "kmeans": kmeans,
    "random": lambda points, num_groups, rng: rng.integers(0, num_groups, len(points)),
}
TOGETHER = "task"  # the start where all rows of a task are in one group


def _nearest(
    points: Float[np.ndarray, "row column"], centres: Float[np.ndarray, "group column"]
) -> Int[np.ndarray, " row"]:
    return ((centres**2).sum(1) - 2 * points @ centres.T).argmin(1)


def by_size(group: np.ndarray, num_groups: int) -> np.ndarray:
    """The same groups relabelled, the largest first."""
    return np.argsort(np.argsort(-np.bincount(group, minlength=num_groups), kind="stable"))[group]


def start_sums(
    rows: MixtureRows,
    statistics: np.ndarray,
    found: Assignment,
    num_tasks: int,
    init: str,
    rng: np.random.Generator,
) -> tuple[SufficientSums, Any]:
    """The sums over the rows of each task's groups at a start, and `share`.

    A missing feature is taken as the mean of its column, a soft label as its sign. `share` and the
    arguments are those of `start_groups`.
    """
    group, share = start_groups(rows, statistics, found, num_tasks, init, rng)
    filled = column_means(rows.features)
    u = np.concatenate([filled, np.ones((len(filled), 1)), rows.extras], 1)
    num_classes, size, num_own = rows.signs.shape[1], u.shape[1], found.num_own
    moments = np.zeros((num_tasks, num_own, size, size))
    columns = np.zeros((num_tasks, statistics.shape[1], num_own))
    asked = np.zeros((num_tasks, num_classes, num_own, size, size))
    products = np.zeros((num_tasks, num_classes, num_own, size))
    for j, h in np.unique(np.stack([rows.task, group]), axis=1).T:
        own = np.flatnonzero((group == h) & (rows.task == j))
        v, signs = u[own], rows.signs[own]
        moments[j, h], columns[j, :, h] = v.T @ v, statistics[own].sum(0)
        asked[j, :, h] = np.einsum("nc,ni,nj->cij", signs != 0, v, v, optimize=True)
        products[j, :, h] = signs.T @ v
    *sums, share = as_floats((moments, asked, products, columns, 0.0, share))
    return SufficientSums(*sums), share


def start_groups(
    rows: MixtureRows,
    statistics: np.ndarray,
    found: Assignment,
    num_tasks: int,
    init: str,
    rng: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray | None]:
    """The group of each row within its task, and `share`.

    `share` [task, own, group] is the probability that a group of a task is each shared group; None
    where tasks do not share groups. Groups are found among the rows of all tasks. A task keeps the
    largest of the groups that its rows are in, as many as it may have, the largest first. Its other
    rows go to the nearest of these.

    Args:
        rows: The data by row.
        statistics: The sufficient statistics of the columns [row, statistic].
        found: The mixture.
        num_tasks: The number of tasks.
        init: A name in `STARTS`, or `TOGETHER`.
        rng: A random generator.
    """
    points = np.concatenate([column_means(rows.features), statistics], 1)
    scale = points.std(0)
    points = (points - points.mean(0)) / np.where(scale > 0, scale, 1)
    shape = (num_tasks, found.num_own, found.num_groups)
    if init == TOGETHER:
        share = _one_group(points, rows.task, shape, rng) if found.upper else None
        return np.zeros(len(points), int), share
    group = by_size(STARTS[init](points, found.num_groups, rng), found.num_groups)
    return _own_groups(points, group, rows.task, shape) if found.upper else (group, None)


def _one_group(
    points: Float[np.ndarray, "row column"],
    task: Int[np.ndarray, " row"],
    shape: tuple[int, int, int],
    rng: np.random.Generator,
) -> Float[np.ndarray, "task own group"]:
    # The share that puts the first group of each task under a shared group of its own; where there
    # are too few, similar tasks under one.
    of_task = np.arange(shape[0])
    if shape[0] > shape[2]:
        of_task = kmeans(np.stack([points[task == j].mean(0) for j in of_task]), shape[2], rng)
    share = np.full(shape, 1 / shape[2])
    share[:, 0] = np.eye(shape[2])[of_task]
    return share


def _own_groups(
    points: Float[np.ndarray, "row column"],
    group: Int[np.ndarray, " row"],
    task: Int[np.ndarray, " row"],
    shape: tuple[int, int, int],
) -> tuple[Int[np.ndarray, " row"], Float[np.ndarray, "task own group"]]:
    num_tasks, num_own, num_groups = shape
    share, found = np.full(shape, 1 / num_groups), np.zeros_like(group)
    centres = (
        np.eye(num_groups)[group].T
        @ points
        / np.maximum(np.bincount(group, minlength=num_groups)[:, None], 1)
    )
    for j in range(num_tasks):
        own = np.flatnonzero(task == j)
        kept = np.argsort(-np.bincount(group[own], minlength=num_groups), kind="stable")[:num_own]
        share[j, : len(kept)] = np.eye(num_groups)[kept]
        is_own = group[own][:, None] == kept
        found[own] = np.where(is_own.any(1), is_own.argmax(1), _nearest(points[own], centres[kept]))
    return found, share


def column_means(features: np.ndarray) -> np.ndarray:
    """The features, with column means in the place of missing ones."""
    is_seen = ~np.isnan(features)
    return np.where(
        is_seen, features, np.where(is_seen, features, 0).sum(0) / np.maximum(is_seen.sum(0), 1)
    )
