"""iQGME for several tasks that share experts, by a hierarchical Dirichlet process.

    beta     ~ Gamma(.05, .05)                          concentration of the experts
    U[s]     ~ Beta(1, beta)
    eta[s]   = U[s] prod_{l < s} (1 - U[l])             weight of expert s in all tasks together
    alpha    ~ Gamma(.05, .05)                          concentration of the groups of a task
    V[j, h]  ~ Beta(1, alpha)
    pi[j, h] = V[j, h] prod_{l < h} (1 - V[j, l])       weight of group h in task j
    c[j, h]  ~ Categorical(eta)                         expert of a group
    z[i]     ~ Categorical(pi[task[i]])                 group of a row within its task
    x[i], t[i], y[i]         as in `zoo.iqgme`, by expert c[task[i], z[i]]

Shapes: x [row, feature]; y, z and task [row]; U [expert - 1]; V [task, group - 1]; c [task, group].

Each expert covers a region of the features, so tasks may share some experts and not others. Two
groups of a task may have the same expert.

Wang (2010), "Bayesian approaches to learning from incomplete data", section 4.2, with the numbers
of the thesis as defaults. Cost of a log density: that of `zoo.iqgme`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array, random
from numpyro import plate
from numpyro.handlers import seed

from zoo.card import Card
from zoo.iqgme import CARD as ONE_TASK
from zoo.iqgme import (
    FEW_EXPERTS,
    Axes,
    checked,
    drawn,
    incomplete,
    normal_wishart,
    soft_probit,
    sticks,
)

__all__ = ["CARD", "iqgme_tasks", "simulate"]

sample: Any = numpyro.sample

CARD = Card(
    title="Mixtures of experts for several tasks that share experts, with missing features",
    paper="Wang (2010), Bayesian approaches to learning from incomplete data, dissertation, Duke "
    "University, chapter 4",
    bibtex=ONE_TASK.bibtex,
    data=("landmine", "letters16x8"),
    kernels=("CoordinateAscent",),
    sites={
        "beta": "concentration of the experts of all tasks together",
        "U": "stick-breaking fraction of an expert",
        "alpha": "concentration of the groups of a task",
        "V": "stick-breaking fraction of a group of a task",
        "c": "the expert of a group",
        "z": "the group of a row, within its task",
        **{
            name: words for name, words in ONE_TASK.sites.items() if name not in ("alpha", "V", "z")
        },
    },
    edits=(
        "expert=None: no labels, Gaussians that several data sets share",
        "expert=partial(soft_probit, sparse=True): sparse weights",
        "beta=1.0: a known concentration",
    ),
)


def iqgme_tasks(
    x=None,
    y=None,
    task=None,
    *,
    shape: tuple[int, int] | None = None,
    num_tasks: int | None = None,
    num_classes: int = 2,
    num_groups: int = 20,
    num_experts: int = 50,
    gate: Callable = normal_wishart,
    expert: Callable | None = soft_probit,
    alpha: Any = FEW_EXPERTS,
    beta: Any = FEW_EXPERTS,
):
    """The model.

    Args:
        x: [row, feature], NaN where missing, not traced; None: drawn with the shape `shape`.
        y: [row], 0 .. num_classes - 1, or -1 where unlabelled; None: drawn.
        task: [row], 0 .. num_tasks - 1, not traced.
        shape: (rows, features) where x is None.
        num_tasks: number of tasks; None: the largest of `task`, plus 1.
        num_classes: number of classes.
        num_groups: truncation of the number of groups of each task.
        num_experts: truncation of the number of experts of all tasks together.
        gate: `(x, z, axes) -> x` draws the Gaussians of the experts, and observes the features;
            `z` is the expert of each row.
        expert: `(x, y, z, axes) -> y` draws the classifiers of the experts, and observes the
            labels; None: there are no labels.
        alpha: concentration of the groups of a task, a distribution or a number.
        beta: concentration of the experts, a distribution or a number.

    Returns:
        x and y.
    """
    num_rows, num_features = checked(x, y, shape, num_classes, min(num_experts, num_groups))
    task, num_tasks = _checked_tasks(task, num_tasks, num_rows)
    alpha, beta = drawn("alpha", alpha), drawn("beta", beta)
    tasks, in_parallel = plate("task", num_tasks, dim=-2), {"enumerate": "parallel"}
    with plate("expert_stick", num_experts - 1, dim=-1):
        U = sample("U", dist.Beta(1.0, beta))
    with tasks, plate("stick", num_groups - 1, dim=-1):
        V = sample("V", dist.Beta(1.0, alpha))
    with tasks, plate("group", num_groups, dim=-1):
        c = sample("c", dist.Categorical(sticks(U)), infer=in_parallel)
    at = Axes(
        plate("expert", num_experts, dim=-1),
        plate("row", num_rows, dim=-1),
        num_features,
        num_classes,
    )
    with at.rows:
        z = sample("z", dist.Categorical(sticks(V)[task]), infer=in_parallel)
    own = c[task, z]
    x = gate(x, own, at)
    return x, expert(x, y, own, at) if expert else y


def _checked_tasks(task, num_tasks: int | None, num_rows: int) -> tuple[np.ndarray, int]:
    if np.shape(task) != (num_rows,) or not np.issubdtype(np.asarray(task).dtype, np.integer):
        raise ValueError(
            f"iqgme_tasks task: found shape {np.shape(task)}, wanted the number of the task of "
            f"each of {num_rows} rows."
        )
    task = np.asarray(task)
    num_tasks = int(task.max()) + 1 if num_tasks is None else num_tasks
    if task.min() < 0 or task.max() >= num_tasks:
        raise ValueError(
            f"iqgme_tasks task: found {task.min()} .. {task.max()}, wanted numbers from 0, less "
            f"than num_tasks={num_tasks}."
        )
    return task, num_tasks


def simulate(
    rng_key: Array,
    num_rows: int = 40,
    num_tasks: int = 4,
    num_features: int = 2,
    missing: float = 0.0,
    unlabelled: float = 0.0,
    **options,
) -> dict[str, Any]:
    """Draw data from the model, with more informative default priors.

    Args:
        rng_key: a key.
        num_rows: number of rows of each task.
        num_tasks: number of tasks.
        num_features: number of features.
        missing: share of the features that are set to NaN at random.
        unlabelled: share of the labels that are set to -1 at random.
        **options: other arguments of the model; they are returned as well.

    Returns:
        Keyword arguments of the model.
    """
    model_key, *keys = random.split(rng_key, 3)
    expert = partial(soft_probit, precision=dist.Gamma(5.0, 5.0))
    concentration = dist.Gamma(5.0, 5.0)
    arguments: dict[str, Any] = {
        "alpha": concentration,
        "beta": concentration,
        "expert": expert,
        "num_tasks": num_tasks,
        **options,
    }
    task = np.repeat(np.arange(num_tasks), num_rows)
    with seed(rng_seed=model_key):
        x, y = iqgme_tasks(task=task, shape=(len(task), num_features), **arguments)
    return arguments | {"task": task} | incomplete(keys, x, y, missing, unlabelled)
