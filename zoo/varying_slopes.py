"""Logistic regression of rows in groups, each with its own level and slopes, which are related.

    level            ~ Normal(0, 3)
    slopes[d]        ~ Normal(0, 1)
    level_spread     ~ HalfNormal(1)
    slope_spread[d]  ~ HalfNormal(1)
    level_shift[t]   ~ Normal(0, 1)
    slope_shift[t,d] ~ Normal(0, 1)
    logit[i] = level + level_spread level_shift[task[i]]
               + sum_d x[i,d] (slopes[d] + slope_spread[d] slope_shift[task[i],d])
    y[i]             ~ Bernoulli(logit[i])

Shapes: x [row, feature]; task and y [row]. A group with few rows borrows from the others: its level
and slopes shrink towards the common ones, the more so the smaller the learned spreads are. Shifts
are in units of the spreads (non-centred), which NUTS explores well where groups are small. Features
should have variance about 1.

Gelman and Hill (2007), "Data analysis using regression and multilevel/hierarchical models",
chapter 14. Cost of a log density: rows x features.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import random

from zoo.card import Card

__all__ = ["CARD", "simulate", "varying_slopes"]

# numpyro.sample is declared to return a number as well, which cannot be indexed
sample: Any = numpyro.sample

CARD = Card(
    title="Logistic regression with slopes that vary by group",
    paper="Gelman and Hill (2007), Data analysis using regression and multilevel/hierarchical "
    "models, Cambridge University Press",
    doi="10.1017/CBO9780511790942",
    data=("landmine",),
    kernels=("NUTS", "NestedSampler", "SVI"),
    sites={
        "level": "the logit of a row of a typical group, where all features are 0",
        "slopes": "the slopes of a typical group",
        "level_spread": "how much the levels of groups differ",
        "slope_spread": "how much the slopes of each feature differ",
        "level_shift": "the level of each group, in units of level_spread from the common one",
        "slope_shift": "the slopes of each group, in units of slope_spread from the common ones",
        "y": "the class of a row, 0 or 1, and -1 in the data where it is unknown",
    },
    edits=(
        "vary=False: one slope of each feature for all groups, a varying intercept only",
        "dist.HalfNormal(0.1) for slope_spread: groups that are more alike beforehand",
        "dist.Poisson(jnp.exp(logit)) for y: counts",
    ),
)


def varying_slopes(
    x, task, y=None, *, num_tasks: int | None = None, num_classes: int = 2, vary: bool = True
):
    """The model.

    Args:
        x: [row, feature].
        task: the group of each row, 0 .. num_tasks - 1, [row].
        y: [row], 0 or 1, or -1 where unknown; None: drawn.
        num_tasks: number of groups; None: the largest of `task`, plus 1.
        num_classes: 2; the model has no other number of classes.
        vary: whether slopes vary by group; False: only levels do.

    Returns:
        y.
    """
    if num_classes != 2:
        raise ValueError(
            f"varying_slopes num_classes: found {num_classes}, wanted 2. Choose a model of more "
            "classes, such as iqgme_tasks."
        )
    x, num_features = jnp.asarray(x), x.shape[1]
    num_tasks = int(np.max(task)) + 1 if num_tasks is None else num_tasks
    level = sample("level", dist.Normal(0.0, 3.0))
    level_spread = sample("level_spread", dist.HalfNormal(1.0))
    with numpyro.plate("task", num_tasks, dim=-1):
        level_shift = sample("level_shift", dist.Normal(0.0, 1.0))
    with numpyro.plate("feature", num_features, dim=-1):
        slopes = sample("slopes", dist.Normal(0.0, 1.0))[None]
        if vary:
            slope_spread = sample("slope_spread", dist.HalfNormal(1.0))
            with numpyro.plate("task", num_tasks, dim=-2):
                slope_shift = sample("slope_shift", dist.Normal(0.0, 1.0))
            slopes = slopes + (slope_spread[None] * slope_shift)[task]
    logit = level + level_spread * level_shift[task] + jnp.sum(x * slopes, axis=-1)
    known = True if y is None else jnp.asarray(y) >= 0
    with numpyro.plate("row", len(x)), numpyro.handlers.mask(mask=known):
        obs = None if y is None else jnp.maximum(jnp.asarray(y), 0)
        return sample("y", dist.Bernoulli(logits=logit), obs=obs)


def simulate(rng_key, num_rows: int = 200, num_features: int = 2, num_tasks: int = 8, **options):
    """Draw data from the model.

    Args:
        rng_key: a key.
        num_rows: number of rows, divided evenly among the groups.
        num_features: number of features, which are standard Normal.
        num_tasks: number of groups.
        **options: other arguments of the model; they are returned as well.

    Returns:
        Keyword arguments of the model.
    """
    x_key, y_key = random.split(rng_key)
    given = options | {
        "x": random.normal(x_key, (num_rows, num_features)),
        "task": np.arange(num_rows) % num_tasks,
        "num_tasks": num_tasks,
    }
    return given | {"y": numpyro.handlers.seed(varying_slopes, y_key)(**given)}
