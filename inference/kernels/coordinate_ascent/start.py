"""Where coordinate ascent starts: every row in one group, by k-means, at random, the largest
group first, or by its task.
"""

import jax.numpy as jnp
import numpy as np

from inference.kernels.coordinate_ascent.rows import Sums
from inference.reading.stick_mixture.structure import Assignment, Rows

__all__ = ["STARTS", "at_random", "column_means", "kmeans", "start_groups", "start_sums"]

NUM_ROUNDS = 10
MOST_ROWS = 20_000  # that k-means looks at


def kmeans(points: np.ndarray, num_groups: int, rng: np.random.Generator) -> np.ndarray:
    """Lloyd's algorithm from k-means++ centres: the group of each row."""
    some = (
        points[rng.choice(len(points), MOST_ROWS, replace=False)]
        if len(points) > MOST_ROWS
        else points
    )
    centres = some[rng.integers(len(some))][None]
    distance = np.full(len(some), np.inf)
    while len(centres) < num_groups:
        distance = np.minimum(distance, ((some - centres[-1]) ** 2).sum(1))
        share = distance / distance.sum() if distance.sum() > 0 else None
        centres = np.vstack([centres, some[rng.choice(len(some), p=share)]])
    for _ in range(NUM_ROUNDS):
        own = _nearest(some, centres)
        count = np.bincount(own, minlength=num_groups)
        total = np.stack([np.bincount(own, column, num_groups) for column in some.T], 1)
        centres = np.where(count[:, None] > 0, total / np.maximum(count, 1)[:, None], centres)
    return _nearest(points, centres)


def at_random(points: np.ndarray, num_groups: int, rng: np.random.Generator) -> np.ndarray:
    """Each row anywhere."""
    return rng.integers(0, num_groups, len(points))


STARTS = {"kmeans": kmeans, "random": at_random}
TOGETHER = "task"  # the start where all rows of a task are together


def _nearest(points: np.ndarray, centres: np.ndarray) -> np.ndarray:
    return ((centres**2).sum(1) - 2 * points @ centres.T).argmin(1)


def start_sums(
    rows: Rows,
    statistics: np.ndarray,
    found: Assignment,
    num_tasks: int,
    init: str,
    rng: np.random.Generator,
) -> tuple[Sums, np.ndarray | None]:
    """The sums over rows that their groups imply, of each task; and the shared group that each
    group of a task is under [task, own, group].

    Groups are sought among the rows of all tasks. A task's own are the largest of those that its
    rows are in, as many as it may have, the largest first; rows of others go to the nearest. A
    missing feature is taken for the mean of its column, a soft label for its sign.
    """
    group, share = start_groups(rows, statistics, found, num_tasks, init, rng)
    filled = column_means(rows.features)
    u = np.concatenate([filled, np.ones((len(filled), 1)), rows.extras], 1)
    num_classes, size = rows.signs.shape[1], u.shape[1]
    shape = (num_tasks, num_classes, found.num_own, size)
    moments, columns = (
        np.zeros((num_tasks, found.num_own, size, size)),
        np.zeros((num_tasks, statistics.shape[1], found.num_own)),
    )
    of_asked, products = np.zeros((*shape, size)), np.zeros(shape)
    for j, h in np.unique(np.stack([rows.task, group]), axis=1).T:
        own = np.flatnonzero((group == h) & (rows.task == j))
        moments[j, h], columns[j, :, h] = u[own].T @ u[own], statistics[own].sum(0)
        for c, signs in enumerate(rows.signs[own].T):
            asked = u[own][signs != 0]
            of_asked[j, c, h], products[j, c, h] = asked.T @ asked, signs @ u[own]
    return Sums(
        *(jnp.asarray(part, float) for part in (moments, of_asked, products, columns, 0.0))
    ), share


def start_groups(
    rows: Rows,
    statistics: np.ndarray,
    found: Assignment,
    num_tasks: int,
    init: str,
    rng: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray | None]:
    """The group of each row within its task; and the shared group that each group of a task is
    under.
    """
    num_groups = found.num_groups
    filled = column_means(rows.features)
    points = np.concatenate([filled, statistics], 1)
    scale = points.std(0)
    points = (points - points.mean(0)) / np.where(scale > 0, scale, 1)
    if init == TOGETHER:
        return _together(
            points, rows.task, (num_tasks, found.num_own, num_groups), bool(found.upper), rng
        )
    group = STARTS[init](points, num_groups, rng)
    group = np.argsort(np.argsort(-np.bincount(group, minlength=num_groups), kind="stable"))[group]
    return (
        _ranked(points, group, rows.task, (num_tasks, found.num_own, found.num_groups))
        if found.upper
        else (group, None)
    )


def _together(
    points: np.ndarray,
    task: np.ndarray,
    shape: tuple[int, int, int],
    is_shared: bool,
    rng: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray | None]:
    """All rows of a task in its first group, under a shared group of its own; where there are
    fewer of these, tasks alike are under one.
    """
    num_tasks, _, num_groups = shape
    if not is_shared:
        return np.zeros(len(points), int), None
    of_task = np.arange(num_tasks)
    if num_tasks > num_groups:
        of_task = kmeans(np.stack([points[task == j].mean(0) for j in of_task]), num_groups, rng)
    share = np.full(shape, 1 / num_groups)
    share[:, 0] = np.eye(num_groups)[of_task]
    return np.zeros(len(points), int), share


def _ranked(
    points: np.ndarray, group: np.ndarray, task: np.ndarray, shape: tuple[int, int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """The number of each row's group within its task; and which of all groups those of a task
    are.
    """
    num_tasks, num_own, num_groups = shape
    share, found = np.full(shape, 1 / num_groups), np.zeros_like(group)
    centres = np.stack(
        [
            points[group == g].mean(0) if (group == g).any() else np.zeros(points.shape[1])
            for g in range(num_groups)
        ]
    )
    for j in range(num_tasks):
        own = np.flatnonzero(task == j)
        kept = np.argsort(-np.bincount(group[own], minlength=num_groups), kind="stable")[:num_own]
        share[j, : len(kept)] = np.eye(num_groups)[kept]
        is_own = group[own][:, None] == kept
        found[own] = np.where(is_own.any(1), is_own.argmax(1), _nearest(points[own], centres[kept]))
    return found, share


def column_means(features: np.ndarray) -> np.ndarray:
    """The features, means in the place of missing ones."""
    is_seen = ~np.isnan(features)
    mean = np.where(is_seen, features, 0).sum(0) / np.maximum(is_seen.sum(0), 1)
    return np.where(is_seen, features, mean)
