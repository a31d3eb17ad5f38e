"""What a summary of weighted points is, whatever its form; how many clumps it has; and the prior
behind it.

Of several fits, such as with 1, 2, 4, ... clumps, the one is taken that, fitted to half of the
points, says most of the other half. A point with much weight is in one half only, so that a clump
which sits on it says nothing of the other.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from jax.scipy.special import logsumexp

from inference.maths.resampling import systematic

__all__ = [
    "Backed",
    "Loss",
    "Mixture",
    "Summary",
    "Told",
    "chosen",
    "counts",
    "divergence",
    "loss_of",
    "mean_of",
    "no_loss",
]

NUM_POINTS = 2000  # that a fit looks at, at least


class Mixture(Protocol):
    """What a state keeps of a summary: arrays alone.

    Places are fixed in number; a clump that is not there has the weight -inf.
    """

    @property
    def log_weight(self) -> Array:
        """[clump], of all clumps together 1."""
        ...


class Summary(Protocol):
    """A family of densities over vectors [size] without bounds."""

    @property
    def asks_for_slopes(self) -> bool:
        """Whether a fit is better for them."""
        ...

    def nothing(self, num_clumps: int) -> Any:
        """No clump at all: the background is everything."""
        ...

    def log_density(self, clumps: Any, z: Array) -> Array:
        """Of one vector [size]."""
        ...

    def draw(self, rng_key: Array, clumps: Any) -> Array:
        """A vector; there must be a clump."""
        ...

    def fitted(
        self, rng_key: Array, told: "Told", log_weight: Array, num_clumps: int, known: Any = None
    ) -> Any:
        """To points in proportion to their weights; or what is known of them, if that says as
        much.
        """
        ...


class Told(NamedTuple):
    """What is known of a density at points."""

    z: Array  # [point, size]
    slope: Array | None = None  # [point, size]: the gradient of the log density


class Loss(NamedTuple):
    """What summaries q in place of p cost the log-evidence of rows to come.

    What is [2] is as it is, and times the rows that p has learned from (of deviations: over their
    root, and times it).

    Later rows tell more and more closely where z is, and the log-evidence is off by the logarithm
    of the mean of q / p over what is left in the end. If it were a draw of p: on average by minus
    the divergence of q from p. A posterior of N rows leaves n / N of the variance that one of n
    rows has; averaged over that, of a term of degree k in z the part (1 - n / N)^k counts, of each
    at most 1 - n / N.

    Errors of one after the other go together, for the rows that they have in common lead all of
    them away from where z is in the end, to the same side of what clumps cannot say. Straight lines
    log q / p that lean one way have, of m rows and of n > m, the correlation (m / n)^.5 as draws of
    p, of which N rows leave out (m n)^.5 / N. Those of workers, who have no rows in common, may
    lean anywhere.
    """

    nats: Array  # [2]: the divergence
    variance: Array  # [2]: of log q / p
    deviation: Array  # [2]: its root
    count: Array  # summaries

    def then(self, later: "Loss") -> "Loss":
        """With summaries of these rows and more. Those of other rows are added leaf by leaf."""
        apart = jax.tree.map(jnp.add, self, later)
        return apart._replace(variance=apart.variance + 2 * self.deviation[1] * later.deviation)

    def error(self, num_rows: Array) -> Array:
        """Of the log-evidence of so many rows, as large as may be expected.

        Where evidences are right on average, their logarithms are too small, by half of the
        variance.
        """
        nats, variance = (each[0] - each[1] / num_rows.astype(each.dtype) for each in self[:2])
        variance = jnp.maximum(variance, 0)
        return jnp.sqrt(jnp.maximum(nats, 0.5 * variance) ** 2 + variance)

    @property
    def each(self) -> Array:
        """Nats that one summary costs."""
        return self.nats[0] / jnp.maximum(self.count, 1)


def loss_of(log_weight: Array, num_rows: Array) -> Loss:
    """Of one summary, from draws of it with the logarithms of their weights, p / q up to a
    constant. NaN where no draw has any.
    """
    share, log_ratio = _ratios(log_weight)
    nats = jnp.sum(share * log_ratio)
    variance, one = jnp.sum(share * (log_ratio - nats) ** 2), jnp.ones_like(nats)
    times, root = (
        jnp.stack([one, num_rows.astype(nats.dtype)]),
        jnp.sqrt(num_rows.astype(nats.dtype)),
    )
    return Loss(
        nats * times, variance * times, jnp.sqrt(variance) * jnp.stack([1 / root, root]), one
    )


def no_loss(dtype: Any) -> Loss:
    """Of no summary."""
    return Loss(*jnp.zeros((3, 2), dtype), jnp.zeros((), dtype))


def divergence(log_weight: Array) -> Array:
    """Nats from q to p, as draws of q say with the logarithms of their weights, p / q up to a
    constant. NaN where no draw has any.
    """
    share, log_ratio = _ratios(log_weight)
    return jnp.sum(share * log_ratio)


def _ratios(log_weight: Array) -> tuple[Array, Array]:
    """Weights of sum 1, and the logarithms of p / q."""
    share = _shares(log_weight)
    return share, jnp.where(share > 0, jnp.log(share * len(share)), 0.0)


def mean_of(log_weight: Array, each: Array) -> Array:
    """Of something at draws with the logarithms of their weights."""
    return jnp.sum(_shares(log_weight) * each)


def _shares(log_weight: Array) -> Array:
    log_weight = jnp.where(jnp.isnan(log_weight), -jnp.inf, log_weight)
    total = logsumexp(log_weight)
    return jnp.where(jnp.isfinite(total), jnp.exp(log_weight - total), jnp.nan)


class Backed(NamedTuple):
    """A summary with a share of the prior in the background, so that it bounds what the prior
    bounds.
    """

    summary: Summary
    background: float

    def log_density(self, clumps: Any, z: Array, log_prior: Array) -> Array:
        """Of one vector, where the prior has this density."""
        return jnp.logaddexp(
            np.log1p(-self.background) + self.summary.log_density(clumps, z),
            np.log(self.background) + log_prior,
        )

    def draw(self, rng_key: Array, clumps: Any, draw_prior: Callable) -> Array:
        """A vector."""
        which_key, draw_key = random.split(rng_key)
        is_background = random.bernoulli(which_key, self.background)
        return jnp.where(is_background, draw_prior(draw_key), self.summary.draw(draw_key, clumps))


def counts(most: int) -> list[int]:
    """1, 2, 4, ..., of clumps."""
    return [2**power for power in range(most.bit_length())]


def chosen(
    rng_key: Array,
    told: Told,
    log_weight: Array,
    fits: Sequence[Callable[[Told], Any]],
    summary: Summary,
    known: Any = None,
    num_points: int = NUM_POINTS,
) -> Any:
    """The fit to all points that says most of points that it has not seen, what is known among
    them; of those of equal merit the first.
    """
    if known is not None and len(known.log_weight):
        fits = [*fits, lambda told: known]
    rng = np.random.default_rng(np.asarray(random.key_data(rng_key)))
    points, weight = (
        jax.tree.map(np.asarray, told),
        np.exp(np.asarray(log_weight - jnp.max(log_weight), float)),
    )
    order = rng.permutation(len(weight))
    learnt, asked = (
        _even(rng, points, weight, half, num_points // 2) for half in (order[::2], order[1::2])
    )
    scores = [float(_score(summary, fit(learnt), asked.z)) for fit in fits]
    best = int(np.argmax([-np.inf if np.isnan(score) else score for score in scores]))
    return fits[best](_even(rng, points, weight, order, num_points))


@partial(jax.jit, static_argnums=0)
def _score(summary: Summary, clumps: Any, points: Array) -> Array:
    return jnp.mean(jax.vmap(lambda z: summary.log_density(clumps, z))(points))


def _even(
    rng: np.random.Generator, told: Told, weight: np.ndarray, among: np.ndarray, size: int
) -> Told:
    """Points of equal weight, by systematic resampling of some, in random order."""
    index = among[rng.permutation(systematic(weight[among], rng.random(), size))]
    return jax.tree.map(lambda each: jnp.asarray(each[index]), told)
