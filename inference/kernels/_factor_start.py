"""Where coordinate ascent among common factors starts: principal components of the features as factors, groups found among those."""

import jax.numpy as jnp
import numpy as np

from inference.factors import FactorMixture, FactorRows
from inference.kernels._clusters import STARTS
from inference.kernels._row_block import Sums
from inference.loadings import Linear, LinearPrior, LinearSums

__all__ = ["start_linear", "start_sums"]

SHOWN = 0.9  # of each factor in each group, at the start
SPREAD = 0.1  # variance of the factors of a row, at the start


def start_sums(found: FactorMixture, rows: FactorRows, init: str, rng: np.random.Generator) -> tuple[Sums, LinearSums]:
    """The sums over rows that components and groups imply, a missing feature taken for its mean, a soft label for its sign."""
    seen = ~np.isnan(rows.features)
    count = np.maximum(seen.sum(0), 1)
    x = np.where(seen, rows.features, 0)
    centred = np.where(seen, x - x.sum(0) / count, 0)
    scores = _components(centred, found.num_factors, rng)
    num_groups, size = found.given.num_own, found.num_factors + 1
    group = STARTS[init](scores, num_groups, rng)
    group = np.argsort(np.argsort(-np.bincount(group, minlength=num_groups), kind="stable"))[group]
    u = np.concatenate([scores, np.ones((len(x), 1))], 1)
    second = u[:, :, None] * u[:, None] + SPREAD * np.diag([*np.ones(size - 1), 0.0])
    rho = np.eye(num_groups)[group]
    is_asked = (rows.signs != 0).astype(float)
    moments = np.einsum("nh,nij->hij", rho, second)
    asked = np.einsum("nc,nh,nij->chij", is_asked, rho, second, optimize=True)
    products = np.einsum("nc,nh,ni->chi", rows.signs, rho, u, optimize=True)
    sums = (moments, asked, products, np.zeros((0, num_groups)))
    shown = np.array([*np.ones(size - 1), float(found.linked.centre is not None)])
    linear = (np.tensordot(seen.astype(float), second * np.outer(shown, shown), ((0,), (0,))), x.T @ (u * shown))
    sums = Sums(*(jnp.asarray(part, float)[None] for part in sums), jnp.zeros((), float))
    return sums, LinearSums(*(jnp.asarray(part, float) for part in linear))


def start_linear(prior: LinearPrior, is_centred: bool, is_shown: bool) -> Linear:
    """Before the first update of the loadings: noise and precisions of 1 where they are not known."""
    known = lambda pair: (jnp.where(jnp.isinf(pair[1]), pair[0], 1.0), jnp.where(jnp.isinf(pair[1]), pair[1], 1.0))
    size = prior.loc.shape[1]
    covariance = jnp.broadcast_to(jnp.eye(size), (*prior.loc.shape, size))
    shown = jnp.full(prior.share.shape, SHOWN if is_shown else 1.0)
    last = jnp.full((len(shown), 1), float(is_centred))
    return Linear(prior.loc, covariance, known(prior.beta), known(prior.noise), jnp.concatenate([shown, last], 1))


def _components(x: np.ndarray, num: int, rng: np.random.Generator) -> np.ndarray:
    """Scores of variance 1; where there are fewer components, noise."""
    left, values, _ = np.linalg.svd(x, full_matrices=False)
    kept = values[:num] > 1e-8 * max(values[0], 1e-300)
    scores = rng.normal(size=(len(x), num))
    scores[:, : kept.sum()] = left[:, :num][:, kept] * np.sqrt(len(x))
    return scores
