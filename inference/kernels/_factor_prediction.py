"""What the mean-field posterior of a mixture among common factors says of other rows, their missing entries integrated out.

A row's group and factors follow from what it shows: an entry that is missing has no part. The factors of a group are taken for normal with
the mean and covariance of their predictive, a Student t, and the loadings come in by their means and covariances under q, as in a sweep.
What an expert then says is that of a score with the mean and variance that it has under q(w) and those factors.

Cost of a row with P features, K factors, H groups: P K^2 + H K^3.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from inference.compiling import compiled
from inference.factors import FactorMixture, FactorRows
from inference.kernels._factor_rows import Chunks, Said, given_group, lay_out, place
from inference.kernels._factors import Factors, Shape
from inference.kernels._mixture_prediction import Prediction, log_label, log_weights
from inference.loadings import Linear, Told, told
from inference.quadratic import gate_natural

__all__ = ["predict_factors"]


def predict_factors(found: FactorMixture, shape: Shape, factors: Factors, linear: Linear, rows: FactorRows) -> Prediction:
    """Of rows other than those that were fitted, or the same ones as if they were new."""
    said, at_once, size = _said(factors), told(linear), shape.num_entries
    num_rows, num_groups = len(rows.features), found.given.num_own
    chunks = lay_out(jnp.asarray(rows.features, float), jnp.asarray(rows.signs, float), num_groups * size**2)
    noise = _variance(linear)

    def of_chunk(chunk: Chunks) -> Prediction:
        return _predicted(said, at_once, noise, factors, shape, chunk)

    parts = compiled(lambda chunks: lax.map(of_chunk, chunks), chunks)(chunks)
    whole = jax.tree.map(lambda leaf: leaf.reshape(leaf.shape[0] * leaf.shape[1], *leaf.shape[2:])[:num_rows], parts)
    seen = jnp.asarray(~np.isnan(rows.features))
    mean = jnp.where(seen, jnp.nan_to_num(jnp.asarray(rows.features, float)), whole.mean)
    return whole._replace(mean=mean, deviation=jnp.where(seen, 0, whole.deviation))


def _predicted(said: Said, at_once: Told, noise: Array, factors: Factors, shape: Shape, chunk: Chunks) -> Prediction:
    """Mean and deviation of all features, those that are seen as well."""
    silent = chunk._replace(signs=chunk.signs[:, :0])
    no_labels = jnp.zeros((*silent.signs.shape, len(said.const)), said.const.dtype)
    given = given_group(said, at_once, silent, no_labels)
    placed = place(said, at_once, silent, no_labels)
    rho, size = jnp.exp(placed.log_rho), placed.mean.shape[-1]
    first = jnp.einsum("nh,hi,nhi->ni", rho, at_once.shown, placed.mean)
    second = jnp.einsum("nh,hij,nhij->nij", rho, at_once.both, placed.second).reshape(-1, size * size)
    mean = first @ at_once.mean.T
    variance = noise[None] + second @ at_once.second.reshape(-1, size * size).T - mean**2
    log_side = jnp.zeros_like(placed.log_rho)
    if factors.weights is not None:
        weights = factors.weights
        of_row = lambda signs, entries, covariance: log_label(weights, signs, shape.design, entries, covariance)
        log_side = jax.vmap(of_row)(chunk.signs, placed.mean, given.covariance)
    return Prediction(placed.log_rho, jax.nn.logsumexp(placed.log_rho + log_side, axis=1), mean, jnp.sqrt(variance))


def _said(factors: Factors) -> Said:
    """What groups say of factors when all that is known of the groups is integrated out; of experts nothing."""
    loc, kappa, nu, rate = factors.features
    freedom = nu + 1 - loc.shape[1]
    freedom = jnp.where(freedom > 2, freedom - 2, freedom)  # a covariance, or where there is none the scale
    precision = jnp.linalg.inv(rate * ((kappa + 1) / (kappa * freedom))[:, None, None])
    form = gate_natural(precision, loc)
    nothing = jnp.zeros((0, *form.matrix.shape[:2]), loc.dtype)
    return Said(form.const + log_weights(factors)[0], form.matrix, nothing, nothing[..., None])


def _variance(linear: Linear) -> Array:
    """Of the noise of each feature; where it has no mean, about as much."""
    concentration, rate = linear.noise
    is_known = jnp.isinf(rate)
    free = jnp.where(concentration > 1, concentration - 1, concentration)
    return jnp.where(is_known, 1 / concentration, jnp.where(is_known, 1, rate) / free)
