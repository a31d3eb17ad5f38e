"""Random partitions of rows: the Chinese restaurant process and the Pitman-Yor process.

A draw is a vector of labels 0, 1, ... of groups, in order of appearance. Rows of different classes
are partitioned independently. Below, n rows of a class are in G groups of n_1 .. n_G rows. `CRP`
with concentration a has

    p(z) = a^G  Gamma(a) / Gamma(a + n)  prod_g Gamma(n_g)                                 (1)
    next row: group g with probability n_g / (n + a), a new one with a / (n + a).

With `max_groups` = K it is the partition made by n draws from K groups with
Dirichlet(a/K, ..., a/K) weights,

    p(z) = K! / (K - G)!  Gamma(a) / Gamma(a + n)  prod_g Gamma(n_g + a/K) / Gamma(a/K)    (2)
    next row: group g with (n_g + a/K) / (n + a), a new one with a (1 - G/K) / (n + a).

(2) tends to (1) as K grows, and K = 1 puts all rows in one group. `PitmanYor` with concentration a
and discount d has

    p(z) = prod_{0 < k < G} (a + k d)  Gamma(a + 1) / Gamma(a + n)                         (3)
           prod_g Gamma(n_g - d) / Gamma(1 - d)
    next row: group g with (n_g - d) / (n + a), a new one with (a + G d) / (n + a),

which is (1) where d = 0, and (2) where d = -a/K. With d > 0 the number of groups grows like n^d
instead of log n, and most of them are small.

The probability of a partition and the rule for the next row are written independently; a kernel
that seats rows proves that they agree. Cost: O(rows + classes x capacity) for a log probability,
O(rows x groups) for a draw.
"""

from copy import copy
from functools import partial
from typing import Any, Self, override

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array, lax, random
from jax.core import Tracer
from jax.scipy.special import gammaln
from jaxtyping import Float, Num
from numpyro.distributions import constraints
from numpyro.distributions.util import validate_sample

__all__ = ["CRP", "ExchangeablePartition", "PitmanYor"]

NARROW = 64  # groups of a class that a draw looks at unless it has more


class ExchangeablePartition(dist.Distribution):
    """Base class of partitions whose probability depends on the sizes of the groups alone.

    A draw is [row] int32: labels that count the groups of a row's own class in order of appearance.
    Any other vector has log probability -inf.

    A subclass names its parameters in `arg_constraints`, passes them to this `__init__`, and
    defines `log_prob_of_sizes` and `log_seating`. Kernels find the partition of a model by this
    class, and use its `log_seating`.

    Args:
        num_rows: Number of rows.
        labels: Class of each row, [row], from 0 to num_classes - 1; None: one class.
        num_classes: Number of classes.
        capacity: Groups of a class that there is room for; None: as many as may occur. A partition
            of more groups has log probability -inf, and the others keep theirs. A draw of more
            groups raises ValueError. In compiled code, which cannot raise, the labels beyond are
            `capacity`, outside of the support.
        max_groups: Groups of a class that the rule allows; None: any number.
        validate_args: As for NumPyro's distributions.
        parameters: Parameters of the rule, by name.
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
            raise ValueError(
                f"{type(self).__name__} labels: found "
                f"{jnp.result_type(labels)}{list(np.shape(labels))}, wanted the class of each row, "
                f"integers [{num_rows}]."
            )
        for name, value in parameters.items():
            setattr(self, name, jnp.asarray(value, jnp.result_type(float)))
        self.labels, self.num_rows, self.num_classes = labels, num_rows, num_classes
        self.max_groups = max_groups
        self.capacity = capacity or min(num_rows, max_groups or num_rows)
        batch_shape = lax.broadcast_shapes(
            np.shape(labels)[:-1], *map(jnp.shape, parameters.values())
        )
        super().__init__(batch_shape, (num_rows,), validate_args=validate_args)

    @classmethod
    @override
    def gather_pytree_data_fields(cls):
        # NumPyro's order is that of a set, which differs between processes: the code that takes
        # the leaves would not be found in JAX's persistent cache.
        return tuple(sorted(super().gather_pytree_data_fields()))

    def log_prob_of_sizes(self, sizes: Array) -> Array:
        """Returns the log probability of a partition, [...].

        It and its gradient must be finite for any sizes.

        Args:
            sizes: Rows in each group, [..., class, group]; 0 where there is no group.
        """
        raise NotImplementedError

    def log_seating(self, sizes: Array) -> Array:
        """Returns the log probability that the next row of a class joins each group, [..., group].

        The first group of size 0 stands for a new group; the others of size 0 have -inf.

        Args:
            sizes: Rows in each group of the class, [..., group].
        """
        raise NotImplementedError

    def without_rows(self) -> Self:
        """Returns the same rule over no rows, which is all that `log_seating` needs.

        As a pytree its leaves are the parameters of the rule.
        """
        rule = copy(self)
        rule.labels, rule.num_rows, rule.capacity, rule._event_shape = None, 0, 0, (0,)
        return rule

    @constraints.dependent_property(is_discrete=True, event_dim=1)
    @override
    def support(self):
        most = min(self.capacity, self.max_groups or self.capacity)
        return _Partition(self.labels, self.num_classes, most)

    @override
    @validate_sample
    def log_prob(self, value, intermediates=None):
        empty = jnp.zeros((self.num_classes, self.capacity), jnp.result_type(float))
        count = lambda z, labels: empty.at[labels, z].add(1.0, mode="drop")
        sizes = jnp.vectorize(count, signature="(n),(n)->(c,g)")(value, self.labels)
        return jnp.where(self.support(value), self.log_prob_of_sizes(sizes), -jnp.inf)

    @override
    def sample(self, key, sample_shape=()):
        uniform = random.uniform(key, self.shape(sample_shape), jnp.result_type(float))
        z = self._seated(uniform, min(NARROW, self.capacity + 1))
        if self.capacity + 1 > NARROW:  # again with all groups where one draw has not room enough

            def again(pair):
                # the barrier keeps XLA from moving this out of the loop, where it would always run
                given, _ = lax.optimization_barrier((uniform, pair[1]))
                return jnp.zeros((), bool), self._seated(given, self.capacity + 1)

            _, z = lax.while_loop(lambda pair: pair[0], again, (jnp.any(z >= NARROW - 1), z))
        if not isinstance(z, Tracer) and z.max() >= self.capacity:
            raise ValueError(
                f"{type(self).__name__} capacity: there is room for {self.capacity} groups, and a "
                "draw has more. Leave capacity at "
                f"None, or bound the number of groups itself: CRP(..., max_groups={self.capacity})."
            )
        return z

    def _seated(self, uniform: Array, room: int) -> Array:
        """Labels drawn by the rule, [..., row].

        Args:
            uniform: Random numbers from 0 to 1, [..., row].
            room: Groups of a class; the last one holds all rows that there is no room for.
        """
        leaves, form = jax.tree.flatten(self.without_rows())
        empty = jnp.zeros((self.num_classes, room), uniform.dtype)

        @partial(jnp.vectorize, signature=f"(n),(n){',()' * len(leaves)}->(n)")
        def seated(uniform, labels, *leaves):
            rule = jax.tree.unflatten(form, leaves)

            def seat(sizes, row):
                label, uniform = row
                total = jnp.cumsum(jnp.exp(rule.log_seating(sizes[label])))
                group = jnp.argmax(total > uniform * total[-1]).astype(jnp.int32)
                return sizes.at[label, group].add(1.0), group

            return lax.scan(seat, empty, (labels, uniform))[1]

        return seated(uniform, self.labels, *leaves)


class CRP(ExchangeablePartition):
    """Chinese restaurant process over the rows of each class.

    Args:
        concentration: a > 0 of (1) and (2).
        num_rows: Number of rows.
        labels: As for `ExchangeablePartition`, and so are the arguments that follow.
        num_classes: Number of classes.
        capacity: Groups of a class that there is room for.
        max_groups: K of (2); None: (1), any number of groups.
        validate_args: As for NumPyro's distributions.
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

    @override
    def log_prob_of_sizes(self, sizes):
        return _log_prob(sizes, self.concentration, *self._discount_and_most())

    @override
    def log_seating(self, sizes):
        return _log_seating(sizes, self.concentration, *self._discount_and_most())

    def _discount_and_most(self) -> tuple[Array, float]:
        most = float(self.max_groups or np.inf)
        return -self.concentration / most, most


class PitmanYor(ExchangeablePartition):
    """Pitman-Yor process over the rows of each class.

    Pitman and Yor (1997), "The two-parameter Poisson-Dirichlet distribution derived from a stable
    subordinator".

    Args:
        concentration: a > -d of (3).
        discount: d of (3), at least 0 and less than 1.
        num_rows: Number of rows.
        labels: As for `ExchangeablePartition`, and so are the arguments that follow.
        num_classes: Number of classes.
        capacity: Groups of a class that there is room for.
        validate_args: As for NumPyro's distributions.
    """

    concentration: Array
    discount: Array

    arg_constraints = ExchangeablePartition.arg_constraints | {
        "concentration": constraints.dependent(is_discrete=False, event_dim=0),
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
        super().__init__(
            num_rows,
            labels,
            num_classes,
            capacity,
            validate_args=validate_args,
            concentration=concentration,
            discount=discount,
        )

    @override
    def validate_args(self, strict=True):
        super().validate_args(strict)
        is_valid = jnp.all(self.concentration > -self.discount)
        if not isinstance(is_valid, Tracer) and not is_valid:
            raise ValueError(
                f"PitmanYor distribution got invalid concentration parameter: found "
                f"{self.concentration}, wanted more than minus the discount, {self.discount}."
            )

    @override
    def log_prob_of_sizes(self, sizes):
        return _log_prob(sizes, self.concentration, self.discount, np.inf)

    @override
    def log_seating(self, sizes):
        return _log_seating(sizes, self.concentration, self.discount, np.inf)


def _log_prob(sizes: Array, concentration: Array, discount: Array, most: float) -> Array:
    """The logarithm of (3), summed over classes: (1) is d = 0, and (2) is d = -a/K, most = K."""
    concentration, discount = concentration[..., None], discount[..., None, None]
    group = lax.broadcasted_iota(sizes.dtype, sizes.shape, sizes.ndim - 1)
    num_groups = jnp.sum(sizes > 0, axis=-1, keepdims=True, dtype=sizes.dtype)
    is_later = (group > 0) & (group < num_groups) & (group < most)
    opened = jnp.log(jnp.where(is_later, concentration[..., None] + group * discount, 1.0))
    joined = gammaln(jnp.where(sizes > 0, sizes, 1.0) - discount) - gammaln(1.0 - discount)
    num_rows = jnp.maximum(jnp.sum(sizes, axis=-1), 1.0)  # no rows are as probable as one
    whole = gammaln(concentration + 1.0) - gammaln(concentration + num_rows)
    return jnp.sum(jnp.sum(opened + joined, axis=-1) + whole, axis=-1)


@partial(jnp.vectorize, signature="(g),(),(),()->(g)")
def _log_seating(
    sizes: Num[Array, " group"],
    concentration: Float[Array, ""],
    discount: Float[Array, ""],
    most: Float[Array, ""],
) -> Float[Array, " group"]:
    sizes, group = sizes.astype(concentration.dtype), jnp.arange(len(sizes))
    is_open = sizes > 0
    num_groups = jnp.sum(is_open, dtype=sizes.dtype)
    is_next = group == jnp.min(jnp.where(is_open, len(sizes), group))
    # The first row opens a group for certain, also where the concentration is not positive.
    is_first = num_groups == 0
    new = jnp.where(is_first, 1, concentration + discount * num_groups)
    weight = jnp.where(is_open, sizes - discount, jnp.where(is_next & (num_groups < most), new, 0))
    return jnp.log(weight) - jnp.log(jnp.where(is_first, 1, jnp.sum(sizes) + concentration))


class _Partition(constraints.Constraint):
    """Labels of groups in order of appearance within each class."""

    is_discrete, event_dim = True, 1

    def __init__(self, labels, num_classes: int, capacity: int):
        self.labels, self.num_classes, self.capacity = labels, num_classes, capacity

    def __call__(self, x):
        return jnp.vectorize(self._holds, signature="(n),(n)->()")(x, self.labels)

    def _holds(self, z, labels) -> Array:
        """Whether each group of a class first appears after the group before it."""
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

    @override
    def feasible_like(self, prototype):
        return jnp.zeros_like(prototype)

    @override
    def tree_flatten(self):
        return (self.labels,), (
            ("labels",),
            {"num_classes": self.num_classes, "capacity": self.capacity},
        )

    @override
    def eq(self, other, static=False):
        return (
            isinstance(other, _Partition)
            and (self.num_classes, self.capacity) == (other.num_classes, other.capacity)
            and (
                self.labels is other.labels
                or (not static and jnp.array_equal(self.labels, other.labels))
            )
        )
