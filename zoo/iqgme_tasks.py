"""iQGME for several tasks at once: experts that tasks share, in shares of their own, by a
hierarchical Dirichlet process.

    beta           ~ Gamma(.05, .05),   U[s] ~ Beta(1, beta),       eta[s] = U[s] prod_{l < s} (1 - U[l])       of each expert
    alpha          ~ Gamma(.05, .05),   V[j, h] ~ Beta(1, alpha),   pi[j, h] = V[j, h] prod_{l < h} (1 - V[j, l])   of task j's group h
    c[j, h]        ~ Categorical(eta)                                          the expert that a group of a task is under
    z[i]           ~ Categorical(pi[task[i]])                                  group of a row, within its task
    x[i], t[i], y[i] as in `zoo.iqgme`, of the expert c[task[i], z[i]]         where it is in charge, and what it says

Experts are in charge of regions, so tasks may share some of them and not others. Two groups of a
task may be under one expert.

Wang (2010), "Bayesian approaches to learning from incomplete data", section 4.2, whose numbers are
the defaults. Cost of a log density: that of `zoo.iqgme`.
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
    title="Mixtures of experts of several tasks that share experts, for rows with missing features",
    paper="Wang (2010), Bayesian approaches to learning from incomplete data, dissertation, Duke "
    "University, chapter 4",
    bibtex=ONE_TASK.bibtex,
    data=("landmine", "letters16x8"),
    kernels=("CoordinateAscent",),
    sites={
        "beta": "how many experts to expect in all tasks together",
        "U": "what an expert takes of the weight that those before it have left",
        "alpha": "how many groups to expect in a task",
        "V": "what a group takes of the weight that those before it in its task have left",
        "c": "the expert of a group",
        "z": "the group of a row, within its task",
        **{
            name: words for name, words in ONE_TASK.sites.items() if name not in ("alpha", "V", "z")
        },
    },
    edits=(
        "expert=None: no labels, Gaussians that several data sets share",
        "expert=partial(soft_probit, sparse=True): weights that nothing asks for go to zero",
        "beta=1.0: a concentration that is known",
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
    """The model; it returns x and y.

    :param x: [row, feature], NaN where missing, not traced; None: drawn, of `shape` (rows,
    features).
    :param y: [row], 0 .. num_classes - 1, or -1 where unlabelled; None: drawn.
    :param task: [row], 0 .. num_tasks - 1, not traced; `num_tasks` is the last one's number and one
    by default.
    :param num_groups: of each task, the truncation; `num_experts` is that of all tasks together.
    :param gate: `(x, z, axes) -> x` draws where each expert is in charge, and observes the
    features; `z` is the expert of each row.
    :param expert: `(x, y, z, axes) -> y` draws the experts, and observes the labels; None: there
    are no labels.
    :param alpha: concentration within a task, `beta` of the experts; a distribution, or a number.
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
    """Data from the model itself, as the model's keyword arguments; `num_rows` of each task, for
    the rest see `zoo.iqgme.simulate`.
    """
    model_key, *keys = random.split(rng_key, 3)
    expert, concentration = (
        partial(soft_probit, precision=dist.Gamma(5.0, 5.0)),
        dist.Gamma(5.0, 5.0),
    )
    told: dict[str, Any] = {
        "alpha": concentration,
        "beta": concentration,
        "expert": expert,
        "num_tasks": num_tasks,
        **options,
    }
    task = np.repeat(np.arange(num_tasks), num_rows)
    with seed(rng_seed=model_key):
        x, y = iqgme_tasks(task=task, shape=(len(task), num_features), **told)
    return told | {"task": task} | incomplete(keys, x, y, missing, unlabelled)
