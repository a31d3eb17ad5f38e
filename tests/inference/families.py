"""Conjugate families with hyper-parameters and the same pair in NumPyro; shared by their tests."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import random

from inference.reading.conjugate.normal import NormalHyper, WishartHyper
from inference.reading.conjugate.table import (
    BetaBernoulli,
    BetaHyper,
    ConjugatePair,
    DirichletCategorical,
    DirichletHyper,
    GammaHyper,
    GammaPoisson,
    NormalInverseGamma,
    NormalInverseWishart,
    NormalWishart,
)

COLUMNS, CODES, FEATURES = 3, 4, 3


class Case(NamedTuple):
    """A family, hyper-parameters from `uniform(*event_shape)`, and the same pair in NumPyro."""

    family: ConjugatePair
    hyper: Callable
    priors: Callable[..., tuple[dist.Distribution, ...]]  # of hyper, values
    likelihood: Callable[..., dist.Distribution]  # of values


def wishart_hyper(uniform):
    root = np.tril(uniform(FEATURES, FEATURES)) / 2 + np.eye(FEATURES)
    return WishartHyper(uniform(FEATURES), uniform(), uniform() + FEATURES, root @ root.mT)


def normal_priors(hyper, values):
    return dist.InverseGamma(hyper.concentration, hyper.rate), dist.Normal(
        hyper.loc, jnp.sqrt(values[0] / hyper.kappa)
    )


def wishart_priors(hyper, values):
    normal = dist.MultivariateNormal(
        hyper.loc, precision_matrix=hyper.kappa[..., None, None] * values[0]
    )
    return dist.Wishart(hyper.concentration, rate_matrix=hyper.rate), normal


def inverse_wishart_priors(hyper, values):
    normal = dist.MultivariateNormal(
        hyper.loc, covariance_matrix=values[0] / hyper.kappa[..., None, None]
    )
    return dist.InverseWishart(hyper.concentration, scale_matrix=hyper.rate), normal


BETA = Case(
    BetaBernoulli(),
    lambda u: BetaHyper(u(), u()),
    lambda h, v: (dist.Beta(*h),),
    lambda v: dist.BernoulliProbs(*v),
)
DIRICHLET = Case(
    DirichletCategorical(),
    lambda u: DirichletHyper(u(CODES)),
    lambda h, v: (dist.Dirichlet(*h),),
    lambda v: dist.CategoricalProbs(*v),
)
GAMMA = Case(
    GammaPoisson(),
    lambda u: GammaHyper(4 * u(), u()),
    lambda h, v: (dist.Gamma(*h),),
    lambda v: dist.Poisson(*v),
)
NORMAL = Case(
    NormalInverseGamma(),
    lambda u: NormalHyper(u(), u(), u(), u()),
    normal_priors,
    lambda v: dist.Normal(v[1], jnp.sqrt(v[0])),
)
WISHART = Case(
    NormalWishart(),
    wishart_hyper,
    wishart_priors,
    lambda v: dist.MultivariateNormal(v[1], precision_matrix=v[0]),
)
INVERSE_WISHART = Case(
    NormalInverseWishart(),
    wishart_hyper,
    inverse_wishart_priors,
    lambda v: dist.MultivariateNormal(v[1], covariance_matrix=v[0]),
)
CASES = [BETA, DIRICHLET, GAMMA, NORMAL, WISHART, INVERSE_WISHART]
COUNTS = CASES[:3]
name_of = lambda case: type(case.family).__name__


def hyper_of(case, lead=(2, 5), dtype=float, seed=0):
    rng = np.random.default_rng(seed)
    hyper = case.hyper(lambda *shape: rng.uniform(0.5, 3.0, (*lead, COLUMNS, *shape)))
    return jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf, dtype)), hyper)


@partial(jax.jit, static_argnums=(0, 1))
def call(family, method, *given):
    """A method, compiled."""
    return getattr(family, method)(*given)


def row_of(case, dtype=float, seed=0):
    return call(case.family, "draw_row", random.key(seed), hyper_of(case, (), dtype, seed))


def repeat(hyper, num_rows):
    return jax.tree.map(lambda leaf: np.broadcast_to(leaf, (num_rows, *leaf.shape)), hyper)


def assert_close(found, wanted, rtol=1e-9, atol=1e-9):
    jax.tree.map(partial(np.testing.assert_allclose, rtol=rtol, atol=atol), found, wanted)
