"""Distributions that NumPyro lacks: the Chinese restaurant process, and any distribution of data with missing entries.

`CRP` is a distribution over partitions of rows, written as labels 0, 1, ... in order of appearance. With n rows, G groups of n_1 .. n_G
rows and concentration a,

    p(z) = a^G  Gamma(a) / Gamma(a + n)  prod_g Gamma(n_g)                                                    (1)
    next row: group g with probability n_g / (n + a), a new one with a / (n + a).

`max_groups` = K bounds the number of groups: the partition made by n draws from K groups with Dirichlet(a/K, ..., a/K) weights,

    p(z) = K! / (K - G)!  Gamma(a) / Gamma(a + n)  prod_g Gamma(n_g + a/K) / Gamma(a/K)                       (2)
    next row: group g with probability (n_g + a/K) / (n + a), a new one with a (1 - G/K) / (n + a).

Both are exchangeable; (2) tends to (1) as K grows, and K = 1 puts all rows in one group. Rows of different classes are partitioned
independently. Cost: rows + classes x capacity for a log probability, rows for a draw, one after the other.

`Missing(base)` is `base` where a value is NaN with probability one: the density of the entries that are seen. Cost: that of `base`; for a
MultivariateNormal of width F, F^3 a row.
"""

import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array, lax, random
from jax.core import Tracer
from jax.scipy.linalg import solve_triangular
from jax.scipy.special import gammaln
from numpyro.distributions import biject_to, constraints
from numpyro.distributions.util import sum_rightmost, validate_sample

__all__ = ["CRP", "Missing"]


class CRP(dist.Distribution):
    """Chinese restaurant process over `num_rows` rows, apart in each class; a draw is [row] int32.

    Labels count the groups of a row's own class in order of appearance; anything else has log probability -inf.

    :param concentration: a > 0 of (1) and (2).
    :param labels: class of each row [row], 0 .. num_classes - 1; None: one class.
    :param capacity: how many groups of a class there is room for; None: as many as may occur. It truncates nothing: a partition of more
        groups has log probability -inf and the others keep theirs. A draw that needs more is an error; inside compiled code, where there
        are no errors, its labels beyond the capacity are `capacity`, which is outside of the support.
    :param max_groups: K of (2); None: no bound, (1).
    """

    arg_constraints = {  # noqa: RUF012
        "concentration": constraints.positive,
        "labels": constraints.dependent(is_discrete=True, event_dim=1),
    }
    pytree_data_fields = ("concentration", "labels")
    pytree_aux_fields = ("num_rows", "num_classes", "capacity", "max_groups")

    def __init__(
        self, concentration, num_rows: int, labels=None, num_classes: int = 1, capacity=None, max_groups=None, *, validate_args=None
    ):
        for name, size in {"num_rows": num_rows, "num_classes": num_classes, "capacity": capacity, "max_groups": max_groups}.items():
            if size is not None and (isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 1):
                raise ValueError(f"CRP {name}: found {size!r}, wanted a whole number, at least 1.")
        labels = np.zeros(num_rows, np.int32) if labels is None else labels
        if np.shape(labels)[-1:] != (num_rows,) or not jnp.issubdtype(jnp.result_type(labels), jnp.integer):
            found = f"{jnp.result_type(labels)}{list(np.shape(labels))}"
            raise ValueError(f"CRP labels: found {found}, wanted the class of each row, integers [{num_rows}].")
        self.concentration = jnp.asarray(concentration, jnp.result_type(float))
        self.labels, self.num_rows, self.num_classes, self.max_groups = labels, num_rows, num_classes, max_groups
        self.capacity = capacity or min(num_rows, max_groups or num_rows)
        batch_shape = lax.broadcast_shapes(jnp.shape(concentration), np.shape(labels)[:-1])
        super().__init__(batch_shape, (num_rows,), validate_args=validate_args)

    @constraints.dependent_property(is_discrete=True, event_dim=1)
    def support(self):
        """Labels in order of appearance, below the capacity."""
        return _Partition(self.labels, self.num_classes, min(self.capacity, self.max_groups or self.capacity))

    @validate_sample
    def log_prob(self, value, intermediates=None):
        """The logarithm of (1) or (2), summed over the classes."""
        is_partition = self.support(value)
        log_prob = jnp.vectorize(self._log_prob_of_sizes, signature="(n),(n),()->()")(value, self.labels, self.concentration)
        return jnp.where(is_partition, log_prob, -jnp.inf)

    def _log_prob_of_sizes(self, z, labels, concentration) -> Array:
        """Finite for whatever labels, and so is its gradient."""
        sizes = jnp.zeros((self.num_classes, self.capacity), concentration.dtype).at[labels, z].add(1.0, mode="drop")
        num_groups, num_rows = jnp.sum(sizes > 0, axis=1).astype(sizes.dtype), jnp.sum(sizes, axis=1)
        if self.max_groups is None:
            opened, joined = num_groups * jnp.log(concentration), gammaln(jnp.maximum(sizes, 1.0))
        else:
            share = concentration / self.max_groups
            left = jnp.maximum(self.max_groups - num_groups, 0.0)  # negative only where there is no such partition
            opened, joined = gammaln(self.max_groups + 1.0) - gammaln(left + 1.0), gammaln(sizes + share) - gammaln(share)
        return jnp.sum(opened + joined.sum(axis=1) + gammaln(concentration) - gammaln(concentration + num_rows))

    def sample(self, key, sample_shape=()):
        """Row after row. See `capacity` for a draw that has no room."""
        uniform = random.uniform(key, (*sample_shape, *self.shape(), 2), self.concentration.dtype)
        z = jnp.vectorize(self._seat, signature="(n,k),(n),()->(n)")(uniform, self.labels, self.concentration)
        if not isinstance(z, Tracer) and z.max() >= self.capacity:
            raise ValueError(
                f"CRP capacity: there is room for {self.capacity} groups, and a draw has {int(z.max()) + 1}. Leave capacity at None, or "
                f"bound the number of groups itself: max_groups={self.capacity}."
            )
        return jnp.minimum(z, self.capacity)

    def _seat(self, uniform, labels, concentration) -> Array:
        """With n rows of its class before it, a row sits beside one of them, chosen evenly, with probability n / (n + a).

        Otherwise it opens a group; with `max_groups` it picks one of these K evenly, of which the groups in use are the first.
        """
        order = jnp.argsort(labels, stable=True)
        by_class = jnp.asarray(labels)[order]
        start = jnp.searchsorted(by_class, by_class).astype(jnp.int32)

        def seat(state, row):
            z, num_groups = state
            place, start, (side, which) = row  # two uniforms
            num_before = place - start
            num_groups = jnp.where(num_before == 0, 0, num_groups)
            weight = num_before.astype(side.dtype)
            beside = z[start + _pick(which, num_before)]
            apart = num_groups if self.max_groups is None else jnp.minimum(_pick(which, self.max_groups), num_groups)
            group = jnp.where(side * (weight + concentration) < weight, beside, apart)
            return (z.at[place].set(group), jnp.maximum(num_groups, group + 1)), None

        first = (jnp.zeros(self.num_rows, jnp.int32), jnp.zeros((), jnp.int32))
        rows = (jnp.arange(self.num_rows, dtype=jnp.int32), start, uniform[order])
        (z, _), _ = lax.scan(seat, first, rows)
        return jnp.zeros_like(z).at[order].set(z)


def _pick(uniform: Array, number) -> Array:
    """One of 0 .. number - 1, evenly."""
    number = jnp.asarray(number, jnp.int32)
    return jnp.minimum(jnp.floor(uniform * number.astype(uniform.dtype)).astype(jnp.int32), number - 1)


class _Partition(constraints.Constraint):
    """Labels of groups in order of appearance within each class."""

    is_discrete, event_dim = True, 1

    def __init__(self, labels, num_classes: int, capacity: int):
        self.labels, self.num_classes, self.capacity = labels, num_classes, capacity

    def __call__(self, x):
        return jnp.vectorize(self._holds, signature="(n),(n)->()")(x, self.labels)

    def _holds(self, z, labels) -> Array:
        """The groups of a class appear one after the other: each later than the one before it, those that never do at the end."""
        never = z.shape[0]
        inside = (z >= 0) & (z < self.capacity) & (labels >= 0) & (labels < self.num_classes)
        appeared = jnp.full((self.num_classes, self.capacity), never)
        appeared = appeared.at[jnp.where(inside, labels, self.num_classes), z].min(jnp.arange(never), mode="drop")
        in_order = (appeared[:, 1:] > appeared[:, :-1]) | (appeared[:, 1:] == never)
        return inside.all() & in_order.all()

    def __repr__(self):
        return f"Partition(num_classes={self.num_classes}, capacity={self.capacity})"

    def feasible_like(self, prototype):
        """One group a class."""
        return jnp.zeros_like(prototype)

    def tree_flatten(self):
        return (self.labels,), (("labels",), {"num_classes": self.num_classes, "capacity": self.capacity})

    def eq(self, other, static=False):
        if not isinstance(other, _Partition) or (self.num_classes, self.capacity) != (other.num_classes, other.capacity):
            return False
        return self.labels is other.labels or (not static and jnp.array_equal(self.labels, other.labels))


class Missing(dist.Distribution):
    """`base_dist` of which any entry may be missing, NaN: the density of the entries that are seen; 0 in logarithms where none is.

    Data are floats, so that they can be NaN; draws are floats too and have nothing missing. What is seen outside of the support of
    `base_dist` has log probability -inf. Of an event with several entries (a row of a MultivariateNormal, an Independent) a part may
    be missing: the density is the marginal one. No other family of events is known by its parts: there a partly missing event is
    outside of the support.
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
    """What has no density is replaced before the density is evaluated: behind a `where` alone its gradient would be NaN."""
    if isinstance(base, dist.ExpandedDistribution):
        return _log_prob_of_seen(base.base_dist, value)
    if isinstance(base, dist.Independent):
        return sum_rightmost(_log_prob_of_seen(base.base_dist, value), base.reinterpreted_batch_ndims)
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
    """Of a Normal with the covariance of the seen entries, and ones on the diagonal for the others, at zero distance there."""
    missing = jnp.isnan(value)
    loc = jnp.broadcast_to(base.loc, value.shape)
    distance = jnp.where(missing, loc, value) - loc
    covariance = jnp.broadcast_to(jnp.asarray(base.covariance_matrix), (*value.shape, value.shape[-1]))
    apart = missing[..., :, None] | missing[..., None, :]
    root = jnp.linalg.cholesky(jnp.where(apart, jnp.broadcast_to(jnp.eye(value.shape[-1]), covariance.shape), covariance))
    standard = solve_triangular(root, distance[..., None], lower=True)[..., 0]
    log_scale = jnp.log(jnp.diagonal(root, axis1=-2, axis2=-1)) + jnp.where(missing, 0.0, 0.5 * np.log(2 * np.pi))
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
        return isinstance(other, _OrMissing) and self.by_parts == other.by_parts and self.base.eq(other.base, static)


@biject_to.register(_OrMissing)
def _transform_to_seen(constraint):
    """A latent site is drawn and has nothing missing."""
    return biject_to(constraint.base)
