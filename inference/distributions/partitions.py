"""Partitions of rows by a rule of seating: the Chinese restaurant process and the Pitman-Yor
process.

A draw is written as labels 0, 1, ... of groups in order of appearance. Rows of different classes
are partitioned independently. Below, n rows of a class are in G groups of n_1 .. n_G rows. `CRP`
with concentration a has

    p(z) = a^G  Gamma(a) / Gamma(a + n)  prod_g Gamma(n_g)                                                    (1)
    next row: group g with probability n_g / (n + a), a new one with a / (n + a).

`max_groups` = K bounds its number of groups: the partition made by n draws from K groups with
Dirichlet(a/K, ..., a/K) weights,

    p(z) = K! / (K - G)!  Gamma(a) / Gamma(a + n)  prod_g Gamma(n_g + a/K) / Gamma(a/K)                       (2)
    next row: group g with probability (n_g + a/K) / (n + a), a new one with a (1 - G/K) / (n + a).

(2) tends to (1) as K grows, and K = 1 puts all rows in one group. `PitmanYor` with concentration a
and discount d has

    p(z) = prod_{k < G} (a + k d)  Gamma(a) / Gamma(a + n)  prod_g Gamma(n_g - d) / Gamma(1 - d)              (3)
    next row: group g with probability (n_g - d) / (n + a), a new one with (a + G d) / (n + a),

which is (1) where d = 0. With d > 0 the number of groups grows like n^d instead of log n, and most
of them are small.

The probability of a partition and the rule for the next row are written independently; a kernel
that seats rows proves that they agree. Cost: rows + classes x capacity for a log probability; rows
x groups for a draw, one row after the other.
"""

from copy import copy
from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array, lax, random
from jax.core import Tracer
from jax.scipy.special import gammaln
from numpyro.distributions import constraints
from numpyro.distributions.util import validate_sample

__all__ = ["CRP", "ExchangeablePartition", "PitmanYor"]

NARROW = 64  # groups of a class: most draws have fewer, and then no more are looked at


class ExchangeablePartition(dist.Distribution):
    """Base of the partitions whose probability depends on the sizes of the groups alone; a draw is
    [row] int32.

    A subclass names its parameters in `arg_constraints`, hands them to this `__init__`, and defines
    `log_prob_of_sizes` and `log_seating`. Kernels find the partition of a model by this class, and
    read the rule off `log_seating`.

    Labels count the groups of a row's own class in order of appearance; anything else has log
    probability -inf.

    :param labels: class of each row [row], 0 .. num_classes - 1; None: one class.
    :param capacity: how many groups of a class there is room for; None: as many as may occur. It
    truncates nothing: a partition
        of more groups has log probability -inf and the others keep theirs. A draw that needs more
        is an error; inside compiled code, where there are no errors, its labels beyond the capacity
        are `capacity`, which is outside of the support.
    :param max_groups: how many groups of a class the rule itself allows; None: any number.
    :param parameters: parameters of the rule, by name.
    """

    arg_constraints = {"labels": constraints.dependent(is_discrete=True, event_dim=1)}  # noqa: RUF012
    pytree_aux_fields = ("num_rows", "num_classes", "capacity", "max_groups")

    def __init__(
        self,
        num_rows: int,
        labels: Any = None,
        num_classes: int = 1,
        capacity: int | None = None,
        max_groups: int | None = None,
        *,
        validate_args: bool | None = None,
        **parameters: Any,
    ):
        sizes = {
            "num_rows": num_rows,
            "num_classes": num_classes,
            "capacity": capacity,
            "max_groups": max_groups,
        }
        for name, size in sizes.items():
            if size is not None and (
                isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 1
            ):
                raise ValueError(
                    f"{type(self).__name__} {name}: found {size!r}, wanted a whole number, at "
                    "least 1."
                )
        labels = np.zeros(num_rows, np.int32) if labels is None else labels
        if np.shape(labels)[-1:] != (num_rows,) or not jnp.issubdtype(
            jnp.result_type(labels), jnp.integer
        ):
            found = f"{jnp.result_type(labels)}{list(np.shape(labels))}"
            raise ValueError(
                f"{type(self).__name__} labels: found {found}, wanted the class of each row, "
                f"integers [{num_rows}]."
            )
        vars(self).update(
            {name: jnp.asarray(value, jnp.result_type(float)) for name, value in parameters.items()}
        )
        self.labels, self.num_rows, self.num_classes, self.max_groups = (
            labels,
            num_rows,
            num_classes,
            max_groups,
        )
        self.capacity = capacity or min(num_rows, max_groups or num_rows)
        batch_shape = lax.broadcast_shapes(
            np.shape(labels)[:-1], *map(jnp.shape, parameters.values())
        )
        super().__init__(batch_shape, (num_rows,), validate_args=validate_args)

    def log_prob_of_sizes(self, sizes: Array) -> Array:
        """Log probability of a partition from the sizes of its groups, [...] from [..., class,
        group]; 0 where there is no group.

        It must be finite for whatever sizes, and so must be its gradient.
        """
        raise NotImplementedError

    def log_seating(self, sizes: Array) -> Array:
        """Log probability that the next row of a class joins each of its groups, [..., group], from
        their sizes.

        The first group of size 0 stands for a new group; the others of size 0 have -inf.
        """
        raise NotImplementedError

    def without_rows(self) -> Self:
        """The same rule over no rows: all that `log_seating` needs.

        Its leaves are the parameters of the rule.
        """
        rule = copy(self)
        rule.labels, rule.num_rows, rule.capacity, rule._event_shape = None, 0, 0, (0,)
        return rule

    @constraints.dependent_property(is_discrete=True, event_dim=1)
    def support(self):
        """Labels in order of appearance, below the capacity."""
        return _Partition(
            self.labels, self.num_classes, min(self.capacity, self.max_groups or self.capacity)
        )

    @validate_sample
    def log_prob(self, value, intermediates=None):
        """The logarithm of (1), (2) or (3), summed over the classes."""
        empty = jnp.zeros((self.num_classes, self.capacity), jnp.result_type(float))
        count = lambda z, labels: empty.at[labels, z].add(1.0, mode="drop")
        sizes = jnp.vectorize(count, signature="(n),(n)->(c,g)")(value, self.labels)
        return jnp.where(self.support(value), self.log_prob_of_sizes(sizes), -jnp.inf)

    def sample(self, key, sample_shape=()):
        """Row after row by `log_seating`. See `capacity` for a draw that has no room."""
        leaves, form = jax.tree.flatten(self.without_rows())
        uniform = random.uniform(key, self.shape(sample_shape), jnp.result_type(float))
        # the last: all that there is no room for
        empty = jnp.zeros((self.num_classes, self.capacity + 1), uniform.dtype)

        def seated(uniform, labels, *leaves):
            rule = jax.tree.unflatten(form, leaves)

            def drawn(sizes, uniform):
                total = jnp.cumsum(jnp.exp(rule.log_seating(sizes)))
                return jnp.argmax(total > uniform * total[-1]).astype(jnp.int32)

            def seat(sizes, row):
                label, uniform = row
                few = sizes[label, :NARROW]
                group = lax.cond(
                    few[-1] > 0, lambda: drawn(sizes[label], uniform), lambda: drawn(few, uniform)
                )
                return sizes.at[label, group].add(1.0), group

            return lax.scan(seat, empty, (labels, uniform))[1]

        z = jnp.vectorize(seated, signature=f"(n),(n){',()' * len(leaves)}->(n)")(
            uniform, self.labels, *leaves
        )
        if not isinstance(z, Tracer) and z.max() >= self.capacity:
            raise ValueError(
                f"{type(self).__name__} capacity: there is room for {self.capacity} groups, and a "
                "draw has more. Leave capacity at "
                f"None, or bound the number of groups itself: CRP(..., max_groups={self.capacity})."
            )
        return z


class CRP(ExchangeablePartition):
    """Chinese restaurant process over `num_rows` rows, apart in each class; its other arguments are
    explained in the base.

    :param concentration: a > 0 of (1) and (2).
    :param max_groups: K of (2); None: no bound, (1).
    """

    concentration: Array

    arg_constraints = ExchangeablePartition.arg_constraints | {
        "concentration": constraints.positive
    }

    def __init__(
        self,
        concentration,
        num_rows: int,
        labels=None,
        num_classes: int = 1,
        capacity=None,
        max_groups=None,
        *,
        validate_args=None,
    ):
        super().__init__(
            num_rows,
            labels,
            num_classes,
            capacity,
            max_groups,
            validate_args=validate_args,
            concentration=concentration,
        )

    def log_prob_of_sizes(self, sizes):
        """(1) or (2)."""
        concentration = self.concentration[..., None]
        num_groups, num_rows = (
            jnp.sum(sizes > 0, axis=-1).astype(sizes.dtype),
            jnp.sum(sizes, axis=-1),
        )
        if self.max_groups is None:
            opened, joined = num_groups * jnp.log(concentration), gammaln(jnp.maximum(sizes, 1.0))
        else:
            share = concentration / self.max_groups
            # negative only where there is no such partition
            left = jnp.maximum(self.max_groups - num_groups, 0.0)
            opened = gammaln(self.max_groups + 1.0) - gammaln(left + 1.0)
            joined = gammaln(sizes + share[..., None]) - gammaln(share[..., None])
        whole = gammaln(concentration) - gammaln(concentration + num_rows)
        return jnp.sum(opened + joined.sum(axis=-1) + whole, axis=-1)

    def log_seating(self, sizes):
        """The rule of (1) or (2)."""
        most = float(self.max_groups or np.inf)
        return _log_seating(sizes, self.concentration, -self.concentration / most, most)


class PitmanYor(ExchangeablePartition):
    """Pitman-Yor process over `num_rows` rows, apart in each class; its other arguments are
    explained in the base.

    Pitman and Yor (1997), "The two-parameter Poisson-Dirichlet distribution derived from a stable
    subordinator".

    :param concentration: a > 0 of (3).
    :param discount: d of (3), at least 0 and less than 1.
    """

    concentration: Array
    discount: Array

    arg_constraints = ExchangeablePartition.arg_constraints | {
        "concentration": constraints.positive,
        "discount": constraints.unit_interval,
    }

    def __init__(
        self,
        concentration,
        discount,
        num_rows: int,
        labels=None,
        num_classes: int = 1,
        capacity=None,
        *,
        validate_args=None,
    ):
        parameters = {"concentration": concentration, "discount": discount}
        super().__init__(
            num_rows, labels, num_classes, capacity, validate_args=validate_args, **parameters
        )

    def log_prob_of_sizes(self, sizes):
        """(3)."""
        concentration, discount = self.concentration[..., None], self.discount[..., None, None]
        # groups before each
        before = lax.broadcasted_iota(sizes.dtype, sizes.shape, sizes.ndim - 1)
        opened = jnp.log(concentration[..., None] + before * discount)
        opened = jnp.where(before < jnp.sum(sizes > 0, axis=-1, keepdims=True), opened, 0.0)
        joined = jnp.where(
            sizes > 0, gammaln(jnp.maximum(sizes, 1.0) - discount) - gammaln(1.0 - discount), 0.0
        )
        whole = gammaln(concentration) - gammaln(concentration + jnp.sum(sizes, axis=-1))
        return jnp.sum(jnp.sum(opened + joined, axis=-1) + whole, axis=-1)

    def log_seating(self, sizes):
        """The rule of (3)."""
        return _log_seating(sizes, self.concentration, self.discount, np.inf)


@partial(jnp.vectorize, signature="(g),(),(),()->(g)")
def _log_seating(sizes: Array, concentration: Array, discount: Array, most: Array) -> Array:
    """The rule of (3) for at most so many groups; (1) is the case d = 0, and (2) the case d =
    -a/K.
    """
    sizes, group = sizes.astype(concentration.dtype), jnp.arange(len(sizes))
    is_open = sizes > 0
    num_groups = jnp.sum(is_open, dtype=sizes.dtype)
    is_next = group == jnp.min(jnp.where(is_open, len(sizes), group))
    new = jnp.where(is_next & (num_groups < most), concentration + discount * num_groups, 0)
    return jnp.log(jnp.where(is_open, sizes - discount, new)) - jnp.log(
        jnp.sum(sizes) + concentration
    )


class _Partition(constraints.Constraint):
    """Labels of groups in order of appearance within each class."""

    is_discrete, event_dim = True, 1

    def __init__(self, labels, num_classes: int, capacity: int):
        self.labels, self.num_classes, self.capacity = labels, num_classes, capacity

    def __call__(self, x):
        return jnp.vectorize(self._holds, signature="(n),(n)->()")(x, self.labels)

    def _holds(self, z, labels) -> Array:
        """The groups of a class appear one after the other: each later than the one before it,
        those that never do at the end.
        """
        never = z.shape[0]
        inside = (z >= 0) & (z < self.capacity) & (labels >= 0) & (labels < self.num_classes)
        appeared = jnp.full((self.num_classes, self.capacity), never)
        appeared = appeared.at[jnp.where(inside, labels, self.num_classes), z].min(
            jnp.arange(never), mode="drop"
        )
        in_order = (appeared[:, 1:] > appeared[:, :-1]) | (appeared[:, 1:] == never)
        return inside.all() & in_order.all()

    def __repr__(self):
        return f"Partition(num_classes={self.num_classes}, capacity={self.capacity})"

    def feasible_like(self, prototype):
        """One group a class."""
        return jnp.zeros_like(prototype)

    def tree_flatten(self):
        return (self.labels,), (
            ("labels",),
            {"num_classes": self.num_classes, "capacity": self.capacity},
        )

    def eq(self, other, static=False):
        if not isinstance(other, _Partition) or (self.num_classes, self.capacity) != (
            other.num_classes,
            other.capacity,
        ):
            return False
        return self.labels is other.labels or (
            not static and jnp.array_equal(self.labels, other.labels)
        )
