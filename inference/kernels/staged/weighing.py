"""What has been found in stages, weighed by all rows of a run.

A summary says nothing of where its stage has found nothing, and later rows may lead there: where
the model is wrong, such as for outliers, of which the first rows may have ten times as many as the
rest, further than any draw of its posterior goes. So when rows are twice as many as when it was
done last, and at the end, draws from what stands for all that has been found are weighed by the
prior and all rows so far:

    w(z)  =  prior(z) p(all rows so far | z) / q(z),        evidence  =  mean of w over draws from q

That is the evidence whatever summaries have lost, and how uneven weights are tells what is left
from q to the posterior. Where that is much, and stages are to come, these start from what clumps of
q come to along the slopes of all rows so far (`climbing`), if little is left from there. Else a run
begins again, with all rows so far as one stage, from the prior; walkers climb from where q has its
clumps, and a few from anywhere. Where stages are not explored, nested sampling goes over q itself
then, unless that is far off. What no clump is near to no weight tells. Rows of a run before an
update are gone: an update is not weighed. But its rows may lead to where clumps say less than the
prior in their background, and what earlier rows said is forgotten there: how much of what a stage
finds is there, its error has, and that is infinite where it is the half or more. Cost: draws x
rows, some three times in a run; a climb takes some ten times as many, and a run that begins again
some hundred times.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from jax.scipy.special import logsumexp

from inference.kernels.nested.relabel import Named
from inference.kernels.staged.search import FAR, FRESH, NEAR, Begin, Search, Start, centres
from inference.maths.summary import Loss, Mixture, loss_of, mean_of, no_loss
from inference.reading.stage_rows import StageData

__all__ = ["Account", "Evidence", "Weighed", "Weighing", "forgotten", "lacking_of", "unweighed"]

MOST_LEFT = 0.5  # nats to the posterior, or what a summary may cost where that is more
DRAWS = 200  # at least
MOST_BEHIND = 0.5  # share of what a stage has found that its clumps say nothing of


class Evidence(NamedTuple):
    """Of stages that are over; those of separate rows add up leaf by leaf."""

    log_evidence: Array
    variance: Array  # of its error, but for what summaries have lost
    lost: Loss  # by summaries

    def then(self, later: "Evidence") -> "Evidence":
        """With stages after these."""
        return Evidence(
            self.log_evidence + later.log_evidence,
            self.variance + later.variance,
            self.lost.then(later.lost),
        )

    def error(self, num_rows: Array, of_stage: Array) -> Array:
        """Claimed of so many rows, with the error of the stage that is not over."""
        return jnp.sqrt(self.variance + self.lost.error(num_rows) ** 2 + of_stage**2)


class Weighed(NamedTuple):
    """What draws say, weighed by all rows so far."""

    log_evidence: Array  # NaN: nothing has been weighed
    # of the evidence of a stage that starts from what they are draws of, with the background
    lacking: Array
    variance: Array  # of the error
    lost: Loss  # by what they are draws of

    @property
    def is_there(self) -> Array:
        """Whether anything has been weighed."""
        return ~jnp.isnan(self.log_evidence)

    @property
    def evidence(self) -> Evidence:
        """Of stages, for one that starts from what they are draws of."""
        return Evidence(self.log_evidence + self.lacking, self.variance, self.lost)


class Account(NamedTuple):
    """Of stages that are over; those of separate rows add up leaf by leaf."""

    corrected: Evidence  # by weights, where anything has been weighed
    nested: Evidence  # of nested sampling alone, since it was mended
    information: Array  # in nats, since then
    num_evaluations: Array  # of one row each

    def then(self, later: "Account") -> "Account":
        """With stages after these."""
        corrected, nested = self.corrected.then(later.corrected), self.nested.then(later.nested)
        return Account(
            corrected,
            nested,
            self.information + later.information,
            self.num_evaluations + later.num_evaluations,
        )

    def weighed(self, by_all: Weighed) -> "Account":
        """All rows of these stages have been weighed."""
        return self._replace(corrected=by_all.evidence)

    def mended(self, by_all: Weighed) -> "Account":
        """Something else stands for these stages than what nested sampling has found in them: the
        sum goes on from what weights say, whose error is none of live points.
        """
        log_evidence, variance, lost = by_all.evidence
        lost = lost._replace(
            variance=lost.variance + jnp.stack([variance, jnp.zeros_like(variance)])
        )
        nested = Evidence(log_evidence, jnp.zeros_like(variance), lost)
        return self._replace(nested=nested, information=jnp.zeros_like(self.information))


@dataclass(frozen=True)
class Weighing:
    """Weighs what has been found in stages, by all rows so far.

    States have `rows`, `num_rows` and `num_weighed`, the rows by which all was last weighed.
    """

    search: Search
    most_lost: float

    def is_due(self, state: Any) -> bool:
        """Whether all is to be weighed: rows are twice as many, or no stage is left."""
        more = state.num_rows > state.num_weighed
        return bool(more & ((state.num_rows >= 2 * state.num_weighed) | (state.num_left == 0)))

    def is_fine(self, weighed: Weighed) -> bool:
        """Whether little is left; where nobody knows, it is not."""
        return bool(weighed.lost.nats[0] <= max(MOST_LEFT, self.most_lost))

    def by_all(
        self, rng_key: Array, state: Any, found: Named, data: StageData
    ) -> tuple[Weighed, int]:
        """Draws from what stands for all that has been found; and evaluations."""
        search, rows = self.search, self.so_far(state, data)
        own, num_draws = search.rows.own(data, rows), max(DRAWS, search.usual)
        z, log_weight = search.drawn(rng_key, found, search.nothing.clumps, own, num_draws)
        log_weight = jnp.where(jnp.isnan(log_weight), -jnp.inf, log_weight)
        log_evidence = logsumexp(log_weight) - np.log(len(z))
        lost = loss_of(log_weight, state.num_rows)
        # few draws see little of tails
        variance = jnp.var(jnp.exp(log_weight - log_evidence), ddof=1) / len(z) + lost.nats[0] ** 2
        lacking = lacking_of(search.start, found.clumps, z, log_weight)
        return Weighed(log_evidence, lacking, variance, lost), len(z) * len(rows)

    def mended(
        self, rng_key: Array, state: Any, found: Named, weighed: Weighed, data: StageData
    ) -> tuple[Named, Weighed, int]:
        """What clumps come to by all rows so far, and what its draws say, if that is enough;
        else what was found; and evaluations.
        """
        search = self.search
        if not search.size or not weighed.lost.nats[0] < FAR:
            return found, weighed, 0
        climb_key, weigh_key = random.split(rng_key)
        rows = self.so_far(state, data)
        near = search.near_clumps(
            climb_key, Begin(found), search.nothing.clumps, search.rows.own(data, rows)
        )
        assert near is not None  # there are clumps
        again, spent = self.by_all(weigh_key, state, near.mixture, data)
        spent += round(near.evaluations) * len(rows)
        return (near.mixture, again, spent) if self.is_fine(again) else (found, weighed, spent)

    def so_far(self, state: Any, data: StageData) -> Array:
        """Rows of all stages that have begun."""
        begun = len(state.later) - int(state.num_left)
        first = np.setdiff1d(np.arange(int(data.num_rows)), np.asarray(state.later))
        return jnp.concatenate([jnp.asarray(first, jnp.int32), state.later[:begun].reshape(-1)])

    def begin_again(self, found: Named, weighed: Weighed) -> Begin:
        """With all rows so far: from where walkers climb, or what is gone over where there are
        none.
        """
        if not self.search.size:
            return Begin(found, is_found=bool(weighed.lost.nats[0] < NEAR))
        return Begin(self.search.nothing, centres(found), FRESH)


def unweighed(dtype: Any) -> Weighed:
    """Nothing has been weighed."""
    nobody_knows = jnp.full((), jnp.nan, dtype)
    return Weighed(nobody_knows, nobody_knows, nobody_knows, no_loss(nobody_knows.dtype))


def forgotten(start: Start, clumps: Mixture, z: Array, log_weight: Array) -> Array:
    """Nats by which the evidence of a stage may be off for those of its weighted points [point,
    size] that lie in the background of what it starts from, where clumps say less than that:
    earlier rows may exclude them. Infinite where that is the half of them or more.
    """
    # of workers, which all rows weigh; of a first stage
    if isinstance(clumps, Named) or not len(clumps.log_weight):
        return jnp.zeros((), start.split.dtype)
    behind = _share_behind(start, clumps, z, log_weight)
    return jnp.where(behind < MOST_BEHIND, -jnp.log1p(-behind), jnp.inf)


@partial(jax.jit, static_argnums=0)
def _share_behind(start: Start, clumps: Mixture, z: Array, log_weight: Array) -> Array:
    """The share of weighted points [point, size] that comes from the background."""
    return mean_of(
        log_weight, 1 - (1 - start.backed.background) * jnp.exp(-_log_share(start, clumps, z))
    )


def lacking_of(start: Start, found: Mixture, z: Array, log_weight: Array) -> Array:
    """Correction of a log-evidence: the mean of log(clumps / (clumps + background)), for the
    next stage starts from the latter.
    """
    return mean_of(log_weight, -_log_share(start, found, z))


@partial(jax.jit, static_argnums=0)
def _log_share(start: Start, found: Mixture, z: Array) -> Array:
    """Log ratio of the density that the next stage starts from to that of its clumps, at each of
    the vectors [point, size].
    """
    backed = start.backed
    one = lambda z: (
        backed.log_density(found, z, start.split.densities(z)[0])
        - backed.summary.log_density(found, z)
    )
    return jax.vmap(one)(z)
