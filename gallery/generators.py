"""Synthetic data sets, with their truth beside them.

The truth is the hidden groups, means, ranks and probabilities.

Each data set is a function of its sizes and a seed, drawn with `numpy.random.default_rng(seed)`:
the same seed gives the same bytes. `load("pinwheel", seed=1, num_classes=3)` calls them by name.
"""

from collections.abc import Callable

import numpy as np

from gallery._dataset import Dataset

__all__ = [
    "GENERATORS",
    "crp_mixture",
    "gaussian_mixture",
    "large_categorical",
    "low_rank_matrix",
    "pinwheel",
    "three_gaussians",
]

LICENCE = "generated; Apache-2.0, as the code that generates it"
MEANS = np.array([[-3.0, 0.0], [1.0, 0.0], [5.0, 0.0]])
COVARIANCES = np.array(
    [[[0.52, -0.36], [-0.36, 0.73]], [[0.47, 0.19], [0.19, 0.7]], [[0.52, -0.36], [-0.36, 0.73]]]
)
# slope and intercept of each component's class boundary
LINES = np.array([[0.75, 2.25], [-0.58, 0.58], [0.75, -3.75]])


def pinwheel(
    num_classes: int = 3,
    num_per_class: int = 17,
    radial_std: float = 0.3,
    tangential_std: float = 0.1,
    rate: float = 0.25,
    seed: int = 0,
) -> Dataset:
    """Two-dimensional arms that bend, one a class.

    A Gaussian blob at (1, 0), turned by its class and by `rate` times the exponential of its first
    coordinate. With tangential_std=0.25 the arms touch (the hard variant).
    """
    _check(num_classes=num_classes, num_per_class=num_per_class)
    _check_scale(radial_std=radial_std, tangential_std=tangential_std)
    rng = np.random.default_rng(seed)
    y = np.repeat(np.arange(num_classes), num_per_class)
    blob = rng.normal(size=(len(y), 2)) * [radial_std, tangential_std] + [1.0, 0.0]
    angle = 2 * np.pi * y / num_classes + rate * np.exp(blob[:, 0])
    cos, sin = np.cos(angle), np.sin(angle)
    x = np.column_stack([cos * blob[:, 0] - sin * blob[:, 1], sin * blob[:, 0] + cos * blob[:, 1]])
    return Dataset(
        name="pinwheel",
        title=f"Pinwheel with {num_classes} noisy arms",
        arrays={"x": x, "y": y},
        feature_names=("x1", "x2"),
        class_names=tuple(f"arm {k + 1}" for k in range(num_classes)),
        description="Two-dimensional arms that bend; the toy problem of the Archipelago paper (its "
        "own noise is not stated there).",
        licence=LICENCE,
        citation="Adams and Ghahramani (2009), Archipelago: nonparametric Bayesian semi-supervised "
        "learning, ICML",
    )


def crp_mixture(
    num_classes: int = 2,
    num_per_class: int = 100,
    num_features: int = 50,
    alpha: float = 1.0,
    gamma: float = 0.5,
    missing: float = 0.0,
    seed: int = 0,
) -> Dataset:
    """Binary rows in classes, each class a Chinese restaurant process mixture.

    `alpha` is the concentration; a class has the sum of alpha / (alpha + i), i < num_per_class,
    groups on average. A group's probabilities are drawn from Beta(gamma, gamma). `group` numbers
    the groups across classes; `missing` is the share of the cells made NaN at random.
    """
    _check(num_classes=num_classes, num_per_class=num_per_class, num_features=num_features)
    _check_scale(alpha=alpha, gamma=gamma)
    if not 0 <= missing < 1:
        raise ValueError(f"missing={missing!r}: wanted a share, 0 <= missing < 1")
    rng = np.random.default_rng(seed)
    y = np.repeat(np.arange(num_classes), num_per_class)
    group, num_groups = np.empty(len(y), dtype=np.int64), 0
    for k in range(num_classes):
        seats = _seat(rng, num_per_class, alpha)
        group[y == k] = num_groups + seats
        num_groups += seats.max() + 1
    probabilities = rng.beta(gamma, gamma, size=(num_groups, num_features))
    x = (rng.random((len(y), num_features)) < probabilities[group]).astype(float)
    x[rng.random(x.shape) < missing] = np.nan
    return Dataset(
        name="crp_mixture",
        title=f"{num_classes} classes of binary rows in {num_groups} groups",
        arrays={"x": x, "y": y, "group": group, "probabilities": probabilities},
        feature_names=tuple(f"bit {d + 1}" for d in range(num_features)),
        class_names=tuple(f"class {k + 1}" for k in range(num_classes)),
        description="Drawn from AClass's own prior; `group` and `probabilities` [group, feature] "
        "are the truth.",
        licence=LICENCE,
        citation="Mansinghka, Roy, Rifkin and Tenenbaum (2007), AClass: an online algorithm for "
        "generative classification, AISTATS",
    )


def gaussian_mixture(
    num_groups: int = 3,
    num_rows: int = 300,
    num_features: int = 2,
    separation: float = 4.0,
    seed: int = 0,
) -> Dataset:
    """Rows without labels, in Gaussian groups.

    Groups have unit variance, means drawn from N(0, separation²) and weights drawn from
    Dirichlet(1, ..., 1).
    """
    _check(num_groups=num_groups, num_rows=num_rows, num_features=num_features)
    _check_scale(separation=separation)
    rng = np.random.default_rng(seed)
    weights = rng.dirichlet(np.ones(num_groups))
    means = separation * rng.normal(size=(num_groups, num_features))
    group = rng.choice(num_groups, size=num_rows, p=weights)
    return Dataset(
        name="gaussian_mixture",
        title=f"{num_groups} Gaussian groups in {num_features} dimensions",
        arrays={
            "x": means[group] + rng.normal(size=(num_rows, num_features)),
            "group": group,
            "means": means,
            "weights": weights,
        },
        feature_names=tuple(f"x{d + 1}" for d in range(num_features)),
        description="Unlabelled rows; `group`, `means` [group, feature] and `weights` are the "
        "truth.",
        licence=LICENCE,
    )


def three_gaussians(num_rows: int = 450, seed: int = 0) -> Dataset:
    """Two classes that no line parts: three Gaussians in a row, each cut by its own.

    Class 1 lies above the line x2 = slope x1 + intercept of the row's own component (`group`).
    """
    _check(num_rows=num_rows)
    rng = np.random.default_rng(seed)
    group = rng.integers(3, size=num_rows)
    roots = np.linalg.cholesky(COVARIANCES)
    x = MEANS[group] + np.einsum("nij,nj->ni", roots[group], rng.normal(size=(num_rows, 2)))
    slope, intercept = LINES[group].T
    return Dataset(
        name="three_gaussians",
        title="Three Gaussians, each with its own linear class boundary",
        arrays={
            "x": x,
            "y": (x[:, 1] > slope * x[:, 0] + intercept).astype(np.int64),
            "group": group,
            "means": MEANS.copy(),
            "covariances": COVARIANCES.copy(),
            "boundaries": LINES.copy(),
        },
        feature_names=("x1", "x2"),
        class_names=("below", "above"),
        description="The synthetic demonstration of the infinite quadratically gated mixture of "
        "experts (thesis, section 3.5.1); "
        "the thesis does not say which side of a line is which class, here class 1 is above.",
        licence=LICENCE,
        citation="Wang (2010), Missing data, multi-task learning and matrix completion, PhD "
        "thesis, Duke University",
    )


def low_rank_matrix(
    num_rows: int = 50,
    num_cols: int = 50,
    rank: int = 5,
    num_entries: int | None = None,
    snr_db: float | None = None,
    seed: int = 0,
) -> Dataset:
    """Entries (row, column, value) of a matrix of known rank.

    The matrix is the product of two Gaussian factors. `num_entries` (half of the matrix by default)
    are drawn without replacement. `snr_db` is the signal-to-noise ratio in decibels: the noise's
    variance is the mean square of the whole matrix over 10^(snr_db / 10). Without it there is no
    noise.
    """
    num_entries = num_rows * num_cols // 2 if num_entries is None else num_entries
    _check(num_rows=num_rows, num_cols=num_cols, rank=rank, num_entries=num_entries)
    if rank > min(num_rows, num_cols):
        raise ValueError(
            f"rank={rank}: wanted at most min(num_rows, num_cols) = {min(num_rows, num_cols)}"
        )
    if num_entries > num_rows * num_cols:
        raise ValueError(f"num_entries={num_entries}: the matrix has only {num_rows * num_cols}")
    rng = np.random.default_rng(seed)
    matrix = rng.normal(size=(num_rows, rank)) @ rng.normal(size=(rank, num_cols))
    rows, cols = np.divmod(
        rng.choice(num_rows * num_cols, size=num_entries, replace=False), num_cols
    )
    noise_std = 0.0 if snr_db is None else np.sqrt(np.mean(matrix**2) / 10 ** (snr_db / 10))
    values = matrix[rows, cols] + noise_std * rng.normal(size=num_entries)
    noise = "no noise" if snr_db is None else f"{snr_db:g} dB"
    return Dataset(
        name="low_rank_matrix",
        title=f"{num_entries} entries of a {num_rows} x {num_cols} matrix of rank {rank}, {noise}",
        arrays={
            "rows": rows,
            "cols": cols,
            "values": values,
            "matrix": matrix,
            "noise_std": np.array(noise_std),
        },
        description="The synthetic matrices of Bayesian singular value decomposition; `matrix` is "
        "the truth without noise.",
        licence=LICENCE,
        citation="Wang (2010), Missing data, multi-task learning and matrix completion, PhD "
        "thesis, Duke University",
    )


def large_categorical(num_classes: int = 10_000, num_rows: int = 300_000, seed: int = 0) -> Dataset:
    """Labels alone, of very many classes.

    The probability of class k is proportional to u_k squared, u_k uniform on (0, 1). `x` is a
    column of ones, so that a model's weights are the classes' biases. Some classes are never drawn:
    `counts` tells.
    """
    _check(num_classes=num_classes, num_rows=num_rows)
    rng = np.random.default_rng(seed)
    probabilities = rng.random(num_classes) ** 2
    probabilities /= probabilities.sum()
    y = rng.choice(num_classes, size=num_rows, p=probabilities)
    counts = np.bincount(y, minlength=num_classes)
    return Dataset(
        name="large_categorical",
        title=f"{num_rows} labels of {num_classes} classes",
        arrays={
            "x": np.ones((num_rows, 1)),
            "y": y,
            "probabilities": probabilities,
            "counts": counts,
        },
        feature_names=("one",),
        description=f"The synthetic experiment of augment and reduce; {np.count_nonzero(counts)} "
        f"of {num_classes} classes occur.",
        licence=LICENCE,
        citation="Ruiz, Titsias, Dieng and Blei (2018), Augment and reduce: stochastic inference "
        "for large categorical distributions, ICML",
    )


GENERATORS: dict[str, Callable[..., Dataset]] = {
    generator.__name__: generator
    for generator in (
        crp_mixture,
        gaussian_mixture,
        large_categorical,
        low_rank_matrix,
        pinwheel,
        three_gaussians,
    )
}


def _seat(rng: np.random.Generator, num_customers: int, alpha: float) -> np.ndarray:
    """Tables of a Chinese restaurant process: with i seated, a new one has probability alpha /
    (alpha + i).
    """
    seats, num_tables = np.zeros(num_customers, dtype=np.int64), 1
    for i in range(1, num_customers):
        if rng.random() * (alpha + i) < alpha:
            seats[i], num_tables = num_tables, num_tables + 1
        else:
            seats[i] = seats[rng.integers(i)]  # beside someone: a table's chance is its size
    return seats


def _check(**sizes: int) -> None:
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 1:
            raise ValueError(f"{name}={size!r}: wanted a whole number, at least 1")


def _check_scale(**scales: float) -> None:
    for name, scale in scales.items():
        if not (np.isfinite(scale) and scale > 0):
            raise ValueError(f"{name}={scale!r}: wanted a positive number")
