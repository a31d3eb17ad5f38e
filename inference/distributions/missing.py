"""Any distribution of data with missing entries."""

from typing import override

import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array, lax
from jax.scipy.linalg import solve_triangular
from numpyro.distributions import constraints
from numpyro.distributions.util import sum_rightmost, validate_sample

__all__ = ["Missing"]


class Missing(dist.Distribution):
    """`base_dist` whose entries may be missing, NaN: the marginal density of the observed entries.

    The log probability is 0 where every entry is missing, and -inf where an observed entry is
    outside of the support of `base_dist`. Values are floats, because integers cannot be NaN. A draw
    has no missing entry.

    A part of an event may be missing where the marginal density is known: in an `Independent` of
    univariate distributions, and in a `MultivariateNormal`. In other families a partly missing
    event is outside of the support.

    Cost of a log probability: that of `base_dist`; for a `MultivariateNormal` of F features,
    O(F^3) a row.

    Args:
        base_dist: The distribution of complete data.
        validate_args: As for NumPyro's distributions.
    """

    arg_constraints = {}  # noqa: RUF012
    pytree_data_fields = ("base_dist",)

    def __init__(self, base_dist: dist.Distribution, *, validate_args=None):
        self.base_dist = base_dist
        super().__init__(base_dist.batch_shape, base_dist.event_shape, validate_args=validate_args)

    @property
    @override
    def has_rsample(self) -> bool:
        return self.base_dist.has_rsample

    @constraints.dependent_property
    @override
    def support(self):
        return _SupportOrMissing(self.base_dist.support, _has_marginals(self.base_dist))

    @override
    def sample(self, key, sample_shape=()):
        return jnp.asarray(self.base_dist.sample(key, sample_shape), jnp.result_type(float))

    @override
    @validate_sample
    def log_prob(self, value, intermediates=None):
        value = jnp.asarray(value)
        if not jnp.issubdtype(value.dtype, jnp.inexact):
            return self.base_dist.log_prob(value)
        value = jnp.broadcast_to(value, lax.broadcast_shapes(value.shape, self.shape()))
        return _log_prob_of_observed(self.base_dist, value)


def _has_marginals(base: dist.Distribution) -> bool:
    while isinstance(base, dist.ExpandedDistribution | dist.Independent):
        base = base.base_dist
    return isinstance(base, dist.MultivariateNormal) or base.event_dim == 0


def _log_prob_of_observed(base: dist.Distribution, value: Array) -> Array:
    """Log density of the entries that are not NaN.

    Values without a density are replaced before the density is evaluated: with a `where` after it
    alone the gradient would be NaN.
    """
    if isinstance(base, dist.ExpandedDistribution):
        return _log_prob_of_observed(base.base_dist, value)
    if isinstance(base, dist.Independent):
        log_prob = _log_prob_of_observed(base.base_dist, value)
        return sum_rightmost(log_prob, base.reinterpreted_batch_ndims)
    if isinstance(base, dist.MultivariateNormal):
        return _log_marginal(base, value)
    support = base.support
    assert support is not None
    entries, feasible = tuple(range(-base.event_dim, 0)), _feasible(support, value)
    missing = jnp.isnan(value).all(entries) if entries else jnp.isnan(value)
    filled = jnp.where(jnp.expand_dims(missing, entries), feasible, value)
    is_inside = support(filled)  # no support holds NaN
    filled = jnp.where(jnp.expand_dims(is_inside, entries), filled, feasible)
    log_prob = base.log_prob(filled.astype(jnp.result_type(int)) if base.is_discrete else filled)
    return jnp.where(missing, 0.0, jnp.where(is_inside, log_prob, -jnp.inf))


def _log_marginal(base: dist.MultivariateNormal, value: Array) -> Array:
    """Log density of the observed features of each row.

    In the covariance the rows and columns of missing features are those of the identity, and their
    distance from the mean is 0, so that they add nothing to the determinant and the square.
    """
    missing = jnp.isnan(value)
    loc = jnp.broadcast_to(base.loc, value.shape)
    distance = jnp.where(missing, loc, value) - loc
    covariance = jnp.broadcast_to(
        jnp.asarray(base.covariance_matrix), (*value.shape, value.shape[-1])
    )
    is_apart = missing[..., :, None] | missing[..., None, :]
    identity = jnp.broadcast_to(jnp.eye(value.shape[-1]), covariance.shape)
    root = jnp.linalg.cholesky(jnp.where(is_apart, identity, covariance))
    standard = solve_triangular(root, distance[..., None], lower=True)[..., 0]
    log_scale = jnp.log(jnp.diagonal(root, axis1=-2, axis2=-1)) + jnp.where(
        missing, 0.0, 0.5 * np.log(2 * np.pi)
    )
    return -jnp.sum(0.5 * standard**2 + log_scale, axis=-1)


def _feasible(support, prototype: Array) -> Array:
    return jnp.asarray(support.feasible_like(prototype), prototype.dtype)


class _SupportOrMissing(constraints.Constraint):
    """The support of complete data, or NaN: in any entry with `by_entry`, else in a whole event."""

    def __init__(self, base, by_entry: bool):
        self.base, self.by_entry = base, by_entry
        self.is_discrete, self.event_dim = base.is_discrete, base.event_dim

    def __call__(self, x):
        x = jnp.asarray(x)
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return self.base(x)
        missing = jnp.isnan(x)
        if not self.by_entry:
            missing = missing.all(tuple(range(-self.event_dim, 0)), keepdims=True)
        return self.base(jnp.where(missing, _feasible(self.base, x), x))

    def __repr__(self):
        return f"{self.base!r} or NaN"

    @override
    def feasible_like(self, prototype):
        return _feasible(self.base, jnp.asarray(prototype))

    @override
    def tree_flatten(self):
        fixed = {name: getattr(self, name) for name in ("by_entry", "is_discrete", "event_dim")}
        return (self.base,), (("base",), fixed)

    @override
    def eq(self, other, static=False):
        return (
            isinstance(other, _SupportOrMissing)
            and self.by_entry == other.by_entry
            and self.base.eq(other.base, static)
        )


@dist.biject_to.register(_SupportOrMissing)
def _transform_to_base(constraint):
    # A latent site is drawn without missing entries.
    return dist.biject_to(constraint.base)
