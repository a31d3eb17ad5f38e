"""Any distribution of data with missing entries.

`Missing(base)` is `base` where a value is NaN with probability one: the density of the entries that
are seen. Cost: that of `base`; for a MultivariateNormal of width F, F^3 a row.
"""

import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array, lax
from jax.scipy.linalg import solve_triangular
from numpyro.distributions import biject_to, constraints
from numpyro.distributions.util import sum_rightmost, validate_sample

__all__ = ["Missing"]


class Missing(dist.Distribution):
    """`base_dist` of which any entry may be missing, NaN: the density of the entries that are seen;
    0 in logarithms where none is.

    Data are floats, so that they can be NaN; draws are floats too and have nothing missing. What is
    seen outside of the support of `base_dist` has log probability -inf. Of an event with several
    entries (a row of a MultivariateNormal, an Independent) a part may be missing: the density is
    the marginal one. No other family of events is known by its parts: there a partly missing event
    is outside of the support.
    """

    arg_constraints = {}  # noqa: RUF012
    pytree_data_fields = ("base_dist",)

    def __init__(self, base_dist: dist.Distribution, *, validate_args=None):
        self.base_dist = base_dist
        super().__init__(base_dist.batch_shape, base_dist.event_shape, validate_args=validate_args)

    @property
    def has_rsample(self) -> bool:
        """As of `base_dist`."""
        return self.base_dist.has_rsample

    @constraints.dependent_property
    def support(self):
        """That of `base_dist`, or NaN."""
        return _OrMissing(self.base_dist.support, _is_known_by_parts(self.base_dist))

    def sample(self, key, sample_shape=()):
        """A draw of `base_dist`, as floats."""
        return jnp.asarray(self.base_dist.sample(key, sample_shape), jnp.result_type(float))

    @validate_sample
    def log_prob(self, value, intermediates=None):
        """Log density of the entries that are seen."""
        value = jnp.asarray(value)
        if not jnp.issubdtype(value.dtype, jnp.inexact):
            return self.base_dist.log_prob(value)
        value = jnp.broadcast_to(value, lax.broadcast_shapes(value.shape, self.shape()))
        return _log_prob_of_seen(self.base_dist, value)


def _is_known_by_parts(base: dist.Distribution) -> bool:
    while isinstance(base, dist.ExpandedDistribution | dist.Independent):
        base = base.base_dist
    return isinstance(base, dist.MultivariateNormal) or base.event_dim == 0


def _log_prob_of_seen(base: dist.Distribution, value: Array) -> Array:
    """What has no density is replaced before the density is evaluated: behind a `where` alone
    its gradient would be NaN.
    """
    if isinstance(base, dist.ExpandedDistribution):
        return _log_prob_of_seen(base.base_dist, value)
    if isinstance(base, dist.Independent):
        return sum_rightmost(
            _log_prob_of_seen(base.base_dist, value), base.reinterpreted_batch_ndims
        )
    if isinstance(base, dist.MultivariateNormal):
        return _log_marginal(base, value)
    support = base.support
    assert support is not None
    entries, feasible = tuple(range(-base.event_dim, 0)), _feasible(support, value)
    missing = jnp.isnan(value).all(entries) if entries else jnp.isnan(value)
    whole = jnp.where(jnp.expand_dims(missing, entries), feasible, value)
    is_inside = support(whole)  # no support holds NaN
    whole = jnp.where(jnp.expand_dims(is_inside, entries), whole, feasible)
    log_prob = base.log_prob(whole.astype(jnp.result_type(int)) if base.is_discrete else whole)
    return jnp.where(missing, 0.0, jnp.where(is_inside, log_prob, -jnp.inf))


def _log_marginal(base: dist.MultivariateNormal, value: Array) -> Array:
    """Of a Normal with the covariance of the seen entries, and ones on the diagonal for the
    others, at zero distance there.
    """
    missing = jnp.isnan(value)
    loc = jnp.broadcast_to(base.loc, value.shape)
    distance = jnp.where(missing, loc, value) - loc
    covariance = jnp.broadcast_to(
        jnp.asarray(base.covariance_matrix), (*value.shape, value.shape[-1])
    )
    apart = missing[..., :, None] | missing[..., None, :]
    root = jnp.linalg.cholesky(
        jnp.where(apart, jnp.broadcast_to(jnp.eye(value.shape[-1]), covariance.shape), covariance)
    )
    standard = solve_triangular(root, distance[..., None], lower=True)[..., 0]
    log_scale = jnp.log(jnp.diagonal(root, axis1=-2, axis2=-1)) + jnp.where(
        missing, 0.0, 0.5 * np.log(2 * np.pi)
    )
    return -jnp.sum(0.5 * standard**2 + log_scale, axis=-1)


def _feasible(support, prototype: Array) -> Array:
    return jnp.asarray(support.feasible_like(prototype), prototype.dtype)


class _OrMissing(constraints.Constraint):
    """A constraint that NaN satisfies; of an event either `by_parts`, or all of it."""

    def __init__(self, base, by_parts: bool):
        self.base, self.by_parts = base, by_parts
        self.is_discrete, self.event_dim = base.is_discrete, base.event_dim

    def __call__(self, x):
        x = jnp.asarray(x)
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return self.base(x)
        missing = jnp.isnan(x)
        if not self.by_parts:
            missing = missing.all(tuple(range(-self.event_dim, 0)), keepdims=True)
        return self.base(jnp.where(missing, _feasible(self.base, x), x))

    def __repr__(self):
        return f"{self.base!r} or NaN"

    def feasible_like(self, prototype):
        """As of the constraint itself."""
        return _feasible(self.base, jnp.asarray(prototype))

    def tree_flatten(self):
        fixed = {name: getattr(self, name) for name in ("by_parts", "is_discrete", "event_dim")}
        return (self.base,), (("base",), fixed)

    def eq(self, other, static=False):
        return (
            isinstance(other, _OrMissing)
            and self.by_parts == other.by_parts
            and self.base.eq(other.base, static)
        )


@biject_to.register(_OrMissing)
def _transform_to_seen(constraint):
    """A latent site is drawn and has nothing missing."""
    return biject_to(constraint.base)
