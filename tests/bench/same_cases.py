"""What the cases of `tests.bench.same` are made of: how one is added, what it records, data."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import xarray as xr
from arviz import mcse

from inference import Driver

type Record = dict[str, Any]
type Run = Callable[[], Record]

KEY = 3
NO_FIGURES = ("residual",)  # what rounding has left
MEAN, ERROR = "long run/mean/", "long run/error/"
QUIET: Record = {"num_samples": 20, "progress_bar": False}
CASES: dict[str, "Case"] = {}


class Case(NamedTuple):
    """What is run, whether JAX has float64, and whether numbers are to agree as those do."""

    run: Run
    x64: bool
    is_double: bool


def case(x64: bool = True, is_double: bool | None = None) -> Callable[[Run], Run]:
    """Adds a case. An estimator may compute in float64 wherever it is called."""

    def added(run: Run) -> Run:
        CASES[run.__name__] = Case(run, x64, x64 if is_double is None else is_double)
        return run

    return added


# What is recorded.


def told(tree: xr.DataTree, name: str = "") -> Record:
    """All variables of all groups, and evidences."""
    found = {}
    for group in tree.subtree:
        path = f"{name}{group.path}".strip("/")
        of = {str(each): values.values for each, values in group.data_vars.items()}
        attrs = {name: value for name, value in group.attrs.items() if "log_evidence" in name}
        of |= {f"attrs/{each}": value for each, value in attrs.items()}
        found |= {f"{path}/{each}".strip("/"): of[each] for each in of if each not in NO_FIGURES}
    return found


def run(
    kernel: Any,
    *args: Any,
    steps: int | None = None,
    draws: int = 20,
    chains: int = 1,
    groups: tuple[str, ...] = (),
    **model: Any,
) -> Record:
    """The tree of an algorithm."""
    settings = {"num_warmup": steps, "num_samples": draws, "num_chains": chains, "groups": groups}
    return told(Driver(kernel, progress_bar=False, **settings).run(KEY, *args, **model))


def chain(
    kernel: Callable[[], Any],
    seen: Callable[[xr.Dataset], Record],
    *args: Any,
    warmup: int = 100,
    draws: int = 400,
    **model: Any,
) -> Record:
    """One step of two chains, and means over a longer run.

    :param seen: of the posterior, what has a mean; [chain, draw, ...].
    """
    quiet: Record = {"num_chains": 2, "progress_bar": False}
    step = Driver(kernel(), num_warmup=0, num_samples=1, **quiet).run(KEY, *args, **model)
    quiet["groups"] = ("log_likelihood",)
    long = Driver(kernel(), num_warmup=warmup, num_samples=draws, **quiet)
    tree = long.run(KEY, *args, **model)
    parts = seen(tree["posterior"].to_dataset())
    parts |= {f"log p({name})": each for name, each in tree["log_likelihood"].data_vars.items()}
    return told(step, "one step") | means(parts)


def means(parts: Record) -> Record:
    """The mean of each quantity [chain, draw, ...], with its Monte Carlo error."""
    found = {}
    for name, values in parts.items():
        draws = np.asarray(values, float)
        dims = ["chain", "draw", *(f"dim_{i}" for i in range(draws.ndim - 2))]
        found[MEAN + name] = draws.mean((0, 1))
        found[ERROR + name] = mcse(xr.DataArray(draws, dims=dims)).values
    return found


def together(z: xr.DataArray) -> np.ndarray:
    """Whether two rows are of one group, [chain, draw, pair]."""
    first, second = np.triu_indices(z.shape[-1], 1)
    return z.values[..., first] == z.values[..., second]


def named(*names: str) -> Callable[[xr.Dataset], Record]:
    """These variables, as they are."""
    return lambda posterior: {name: posterior[name].values for name in names}


# Data, by numpy alone.


def reals(rows: int = 36, columns: int = 3, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Rows of three groups, with holes; two classes, some of them unknown."""
    rng = np.random.default_rng(seed)
    group = rng.integers(0, 3, rows)
    x = 2.0 * rng.normal(size=(3, columns))[group] + 0.7 * rng.normal(size=(rows, columns))
    y = np.where(rng.random(rows) < 0.15, -1, (group + (rng.random(rows) < 0.1)) % 2)
    y[:2] = 0, 1
    return np.where(rng.random(x.shape) < 0.15, np.nan, x), y


def bits(rows: int = 36, columns: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """The same as bits, all classes known."""
    x, y = reals(rows, columns, seed=1)
    return np.where(np.isnan(x), np.nan, x > 0), np.abs(y)


def clusters(rows: int = 40) -> np.ndarray:
    """Numbers in two clusters, a column."""
    rng = np.random.default_rng(2)
    return (rng.normal(size=rows) * 0.4 + 1.5 * (-1.0) ** np.arange(rows))[:, None]


def line_data(rows: int = 12) -> tuple[np.ndarray, np.ndarray]:
    """The data of a linear model with two weights."""
    rng = np.random.default_rng(7)
    x = rng.normal(size=(rows, 2))
    return x, x @ [1.0, -0.5] + 0.5 * rng.normal(size=rows)


def entries(rows: int = 8, columns: int = 6) -> dict[str, Any]:
    """Some entries of a noisy matrix of rank 2."""
    rng = np.random.default_rng(4)
    whole = rng.normal(size=(rows, 2)) @ rng.normal(size=(2, columns))
    whole += 0.3 * rng.normal(size=whole.shape)
    row, column = np.nonzero(rng.random(whole.shape) < 0.7)
    return {"row": row, "column": column, "value": whole[row, column], "shape": whole.shape}


def choices(rows: int = 60, columns: int = 3, classes: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """Features, and the best of noisy utilities."""
    rng = np.random.default_rng(5)
    x = rng.normal(size=(rows, columns))
    utility = x @ rng.normal(size=(columns, classes)) + rng.gumbel(size=(rows, classes))
    return x, utility.argmax(1)


def islands(rows: int = 14) -> tuple[np.ndarray, np.ndarray]:
    """Two classes side by side, of which few rows are labelled."""
    rng = np.random.default_rng(6)
    y = np.arange(rows) % 2
    x = rng.normal(size=(rows, 2)) * 0.4 + np.where(y, 1.0, -1.0)[:, None]
    return (x - x.mean(0)) / x.std(0), np.where(np.arange(rows) < 6, y, -1)
