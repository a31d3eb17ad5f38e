"""Importance weighting by all rows so far, and the account of evidence and errors over stages.

A mixture between stages has no density where its stage has found nothing, and later rows may lead
there: under a misspecified model, for instance, the first rows may have ten times as many outliers
as the rest. So whenever the rows have doubled, and at the end, draws from the mixture q that stands
for all that was found are weighted by the prior and all rows so far:

    w(z)  =  prior(z) p(all rows so far | z) / q(z),        evidence  =  mean of w over draws from q

That is the evidence whatever the mixtures have lost, and the spread of the weights gives the
Kullback-Leibler divergence from q to the posterior. Where it is large and stages are to come, they
start from Normals that batch and match finds from the components of q with all rows so far, if
these have a small divergence. Otherwise the run begins again, with all rows so far as one stage
from the prior; walkers climb from the components of q, and a few from anywhere. Where there is no
search, nested sampling draws from q then, unless q is far off. The weights do not see a mode that
no component is near to.

The rows of a run before an update are gone, so that an update is not weighted. Its rows may lead to
a region where the components have less density than the prior in their background. What earlier
rows said of that region is forgotten. Therefore the share of the posterior there is in the error of
the stage. The error is infinite where that share is a half or more.

Cost: draws x rows, some three times in a run; ten times as many for batch and match, and a hundred
times as many for a run that begins again.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int

from inference.kernels.staged.search import (
    FAR,
    FRESH,
    NEAR,
    Begin,
    LabelledMixture,
    Search,
    Start,
    component_means,
)
from inference.maths.host import Array, generator
from inference.maths.normal_mixture import Mixture, importance_shares
from inference.reading.stage_rows import StageData, known

__all__ = [
    "Account",
    "Evidence",
    "Loss",
    "Weighed",
    "Weighing",
    "background_correction",
    "forgotten",
    "loss_of",
    "no_loss",
    "unweighed",
    "weighted_mean",
]

MOST_LEFT = 0.5  # nats to the posterior up to which weights are fine
DRAWS = 200  # the fewest draws that are weighted


class Loss(NamedTuple):
    """What the log-evidence of later rows loses because mixtures q replace posteriors p.

    The log-evidence of later rows is off by the log of the mean of q / p over the final posterior.
    Over draws from p the mean of log q / p is minus the divergence from q to p. The final posterior
    of N rows has n / N of the variance of p, which has learned from n rows. Averaged over it, a
    term of degree k in z counts by (1 - n / N)^k, which is at most 1 - n / N.

    The errors of successive mixtures are correlated, because the rows that they have in common lead
    all of them away from the final z to the same side. Linear log ratios of m rows and of n > m
    rows that lean to one side have the correlation (m / n)^.5 over draws from p, of which N rows
    remove (m n)^.5 / N. The errors of separate workers, with no rows in common, are independent.

    Each array has two entries: the quantity, and n times the quantity, where n are the rows of p.
    For deviations they are the quantity over the root of n, and times the root of n.
    """

    nats: Float[Array, "2"]  # divergence
    variance: Float[Array, "2"]  # of log q / p
    deviation: Float[Array, "2"]  # its root
    count: Array  # mixtures

    def then(self, later: "Loss") -> "Loss":
        """The loss by successive mixtures; losses of workers are added leaf by leaf instead."""
        added = jax.tree.map(np.add, self, later)
        return added._replace(variance=added.variance + 2 * self.deviation[1] * later.deviation)

    def error(self, num_rows: Array) -> Array:
        """The expected root mean square error of the log-evidence of `num_rows` rows.

        The bias is taken as the divergence, or as half of the variance where that is more: by so
        much logarithms of unbiased evidences are too small.
        """
        nats, variance = (each[0] - each[1] / np.asarray(num_rows, float) for each in self[:2])
        variance = np.maximum(variance, 0)
        return np.sqrt(np.maximum(nats, 0.5 * variance) ** 2 + variance)


def loss_of(log_weight: Float[Array, " draw"], num_rows: Array) -> Loss:
    """The loss by one mixture, by the log weights p / q of its draws; NaN where all are 0."""
    share, log_ratio = importance_shares(log_weight)
    nats, rows = np.sum(share * log_ratio), float(num_rows)
    variance = np.sum(share * (log_ratio - nats) ** 2)
    times, root = np.array([1.0, rows]), np.sqrt(rows)
    deviation = np.sqrt(variance) * np.array([1 / root, root])
    return Loss(nats * times, variance * times, deviation, np.ones(()))


def no_loss(dtype: Any) -> Loss:
    """The loss before any mixture."""
    return Loss(*np.zeros((3, 2), dtype), np.zeros((), dtype))


class Evidence(NamedTuple):
    """The evidence of finished stages; evidences of workers are added leaf by leaf."""

    log_evidence: Array
    variance: Array  # of its error, without what mixtures have lost
    lost: Loss

    def then(self, later: "Evidence") -> "Evidence":
        """The evidence of these stages and later ones."""
        return jax.tree.map(np.add, self, later)._replace(lost=self.lost.then(later.lost))

    def error(self, num_rows: Int[Array, ""], of_stage: Float[Array, ""]) -> Float[Array, ""]:
        """The error for `num_rows` rows, with that of the stage that is not finished."""
        return np.sqrt(self.variance + self.lost.error(num_rows) ** 2 + of_stage**2)


class Weighed(NamedTuple):
    """The evidence of all rows so far, by weighted draws."""

    log_evidence: Array  # NaN where nothing was weighted
    correction: Array  # for the next stage, which starts with the prior in the background
    variance: Array  # of the error
    lost: Loss  # by the mixture of the draws

    @property
    def is_there(self) -> Array:
        """Whether anything was weighted."""
        return ~np.isnan(self.log_evidence)

    @property
    def evidence(self) -> Evidence:
        """The evidence before a stage that starts from the mixture of the draws."""
        return Evidence(self.log_evidence + self.correction, self.variance, self.lost)


class Account(NamedTuple):
    """Evidence and cost of finished stages; accounts of workers are added leaf by leaf."""

    corrected: Evidence  # by importance weights, where anything was weighted
    nested: Evidence  # by nested sampling alone, since the last refit
    information: Array  # in nats, since the last refit
    num_evaluations: Array  # of one row each

    def then(self, later: "Account") -> "Account":
        """The account of these stages and later ones."""
        corrected, nested = self.corrected.then(later.corrected), self.nested.then(later.nested)
        return jax.tree.map(np.add, self, later)._replace(corrected=corrected, nested=nested)

    def refitted(self, weighed: Weighed) -> "Account":
        """The account after another mixture has replaced what nested sampling has found.

        The sum goes on from the weighted evidence, whose error is not one of live points.
        """
        log_evidence, variance, lost = weighed.evidence
        zero = np.zeros_like(variance)
        lost = lost._replace(variance=lost.variance + np.stack([variance, zero]))
        return self._replace(
            nested=Evidence(log_evidence, zero, lost), information=np.zeros_like(self.information)
        )


@dataclass(frozen=True)
class Weighing:
    """Weights draws by all rows so far.

    Args:
        search: of the stages.
        most_lost: nats that a mixture may lose.
    """

    search: Search
    most_lost: float

    def is_due(self, state: Any) -> bool:
        """Whether the rows have doubled since the last weighting, or no stage is left."""
        is_time = (state.num_rows >= 2 * state.num_weighed) | (state.num_left == 0)
        return bool((state.num_rows > state.num_weighed) & is_time)

    def is_fine(self, weighed: Weighed) -> bool:
        """Whether the divergence is small; it is not where it is NaN."""
        return bool(weighed.lost.nats[0] <= max(MOST_LEFT, self.most_lost))

    def by_all(
        self, rng_key: Any, state: Any, found: LabelledMixture, data: StageData
    ) -> tuple[Weighed, int]:
        """The evidence by draws that are weighted by all rows so far, and evaluations.

        Args:
            rng_key: a JAX key.
            state: at the end of a stage.
            found: the mixture that stands for all that was found.
            data: the rows.
        """
        search, rows = self.search, self.so_far(state, data)
        arrays = search.arrays(search.nothing.mixture, data, rows)
        z, log_weight = search.weighted_draws(rng_key, arrays, found, max(DRAWS, search.usual))
        log_weight = np.where(np.isnan(log_weight), -np.inf, log_weight)
        log_evidence = np.logaddexp.reduce(log_weight) - np.log(len(z))
        lost = loss_of(log_weight, state.num_rows)
        ratio = np.exp(log_weight - log_evidence) if np.isfinite(log_evidence) else np.nan * z[:, 0]
        # the square, because few draws see little of the tails
        variance = np.var(ratio, ddof=1) / len(z) + lost.nats[0] ** 2
        correction = background_correction(search.start, found.mixture, z, log_weight)
        return Weighed(log_evidence, correction, variance, lost), len(z) * len(rows)

    def refitted(
        self, rng_key: Any, state: Any, found: LabelledMixture, weighed: Weighed, data: StageData
    ) -> tuple[LabelledMixture, Weighed, int]:
        """Normals by batch and match with all rows so far, if their divergence is small.

        Returned are the mixture, the evidence by its draws, and evaluations.

        Args:
            rng_key: a JAX key.
            state: at the end of a stage.
            found: the mixture before, returned where the divergence of the Normals is not small.
            weighed: the evidence by its draws.
            data: the rows.
        """
        search = self.search
        if not search.size or not weighed.lost.nats[0] < FAR:
            return found, weighed, 0
        rng, rows = generator(rng_key), self.so_far(state, data)
        arrays = search.arrays(search.nothing.mixture, data, rows)
        near = search.near_components(rng, arrays, Begin(found))
        assert near is not None  # there are components
        again, spent = self.by_all(rng, state, near.proposal, data)
        spent += round(near.evaluations) * len(rows)
        return (near.proposal, again, spent) if self.is_fine(again) else (found, weighed, spent)

    def so_far(self, state: Any, data: StageData) -> np.ndarray:
        """The places of the rows of all stages that have begun."""
        begun = len(state.later) - int(state.num_left)
        first = np.setdiff1d(np.arange(int(data.num_rows)), np.asarray(state.later))
        return np.concatenate([first.astype(np.int32), known(state.later[:begun])])

    def begin_again(self, found: LabelledMixture, weighed: Weighed) -> Begin:
        """How the search begins where all rows so far become the first stage."""
        if not self.search.size:
            return Begin(found, is_final=bool(weighed.lost.nats[0] < NEAR))
        return Begin(self.search.nothing, component_means(found), FRESH)


def unweighed(dtype: Any) -> Weighed:
    """The `Weighed` of a run that has weighted nothing."""
    unknown = np.full((), np.nan, dtype)
    return Weighed(unknown, unknown, unknown, no_loss(dtype))


def forgotten(
    start: Start,
    mixture: Mixture,
    z: Float[Array, "point size"],
    log_weight: Float[Array, " point"],
) -> float:
    """Nats that the evidence of a stage may be off, because earlier rows are forgotten.

    Earlier rows are forgotten where the mixture that the stage starts from has less density than
    its background: they may exclude that region.

    Args:
        start: of the stage.
        mixture: of the stages before.
        z: points of the stage.
        log_weight: of the points.
    """
    # no rows are forgotten by workers, which are weighted by all rows, and in a first stage
    if isinstance(mixture, LabelledMixture) or not len(mixture.log_weight):
        return 0.0
    of_mixture = (1 - start.defensive.background) * np.exp(-_log_ratio(start, mixture, z))
    share = weighted_mean(log_weight, 1 - of_mixture)  # of the points from the background
    return -np.log1p(-share) if share < 0.5 else np.inf


def background_correction(
    start: Start,
    found: Mixture,
    z: Float[Array, "draw size"],
    log_weight: Float[Array, " draw"],
) -> np.floating:
    """Correction of a log-evidence, because the next stage starts with the prior in the background.

    It is the posterior mean of log(mixture / (mixture with background)), by weighted draws.
    """
    return weighted_mean(log_weight, -_log_ratio(start, found, z))


def weighted_mean(log_weight: Float[Array, " draw"], values: Float[Array, " draw"]) -> np.floating:
    """The mean of values, by log importance weights."""
    return np.sum(importance_shares(log_weight)[0] * values)


def _log_ratio(start: Start, found: Mixture, z: np.ndarray) -> np.ndarray:
    """[draw]: log density of the mixture with the prior in the background, over the mixture's."""

    with_background = start.defensive.log_densities(found, z, start.split.log_priors(z))
    return with_background - start.defensive.summary.log_densities(found, z)
