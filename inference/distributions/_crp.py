"""The Chinese restaurant process.

`CRP` is a distribution over partitions of rows, written as labels 0, 1, ... in order of appearance. With n rows, G groups of n_1 .. n_G
rows and concentration a,

    p(z) = a^G  Gamma(a) / Gamma(a + n)  prod_g Gamma(n_g)                                                    (1)
    next row: group g with probability n_g / (n + a), a new one with a / (n + a).

`max_groups` = K bounds the number of groups: the partition made by n draws from K groups with Dirichlet(a/K, ..., a/K) weights,

    p(z) = K! / (K - G)!  Gamma(a) / Gamma(a + n)  prod_g Gamma(n_g + a/K) / Gamma(a/K)                       (2)
    next row: group g with probability (n_g + a/K) / (n + a), a new one with a (1 - G/K) / (n + a).

Both are exchangeable; (2) tends to (1) as K grows, and K = 1 puts all rows in one group. Rows of different classes are partitioned
independently. Cost: rows + classes x capacity for a log probability, rows for a draw, one after the other.
"""

import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array, lax, random
from jax.core import Tracer
from jax.scipy.special import gammaln
from numpyro.distributions import constraints
from numpyro.distributions.util import validate_sample

__all__ = ["CRP"]


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
