"""The search for a proposal q, from which the nested sampling of a stage draws.

A stage starts from a density pi_s: the mixture that the stages before have left, with the prior in
the background. Nested sampling of (likelihood pi_s / q) from q has the same evidence as that of the
likelihood from pi_s, but less information. Candidates for q are Normal mixtures with pi_s in the
background. They are tried from the cheapest on:

 1. Normals by batch and match (`peaks`) from each component of pi_s;
 2. Normals by batch and match from the peaks of the posterior, to which walkers climb that begin at
    draws from pi_s, and at the peaks that fewer rows had;
 3. the same with more walkers, which begin at the heaviest draws from the candidate before;
 4. a mixture that is fitted to walkers, which go outwards by slice sampling from the candidate
    before, where that is near enough.

The first candidate is accepted whose Kullback-Leibler divergence to the posterior, estimated with
importance weights, is small. Unless the divergence is next to nothing, a mixture is fitted to its
weighted draws, and taken if it is better. Where no candidate is accepted, nested sampling draws
from pi_s itself, because walks over a bad approximation are long. What q misses is found in any
case, by live points that begin in its background.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import random
from jaxtyping import Bool, Float, Int

from inference.kernels.staged.peaks import (
    CURVATURE,
    GRADIENT,
    batch_and_match,
    combined,
    distinct,
    find_peaks,
    is_within,
    laplace,
    values,
    walk_outwards,
    with_scores,
    worthwhile,
)
from inference.maths.host import Array, generator, key_data
from inference.maths.normal_mixture import (
    Defensive,
    FitPoints,
    Mixture,
    NormalMixture,
    divergence,
    pushed_forward,
)
from inference.reading.density import (
    NO_REFERENCE,
    Exchangeable,
    Reference,
    Split,
    canonical_densities,
    relabel,
    relabel_alike,
)
from inference.reading.stage_rows import StageData, StageRows, padded, room_for, row_terms

__all__ = [
    "Begin",
    "Candidate",
    "LabelledMixture",
    "Search",
    "StageArrays",
    "Start",
    "component_means",
]

# nats to the posterior: a candidate is accepted up to LITTLE, or up to this part of the information
# of the stage
LITTLE, PART = 1.0, 0.01
NEAR = 2.0  # nats up to which a candidate may lead to something better
FAR = 10.0  # nats beyond which a failed search does not show what mixtures could do
MOST_PEAKS = 8  # peaks from which batch and match begins
FRESH = 5  # walkers from draws of pi_s beside those from known peaks
TRIED = 500  # draws by which a candidate is judged


class LabelledMixture(NamedTuple):
    """A mixture over vectors that are canonical for a reference: label switching is undone."""

    mixture: Mixture
    reference: Reference = NO_REFERENCE

    @property
    def log_weight(self) -> Array:
        """[component], normalised; empty where there is no mixture."""
        return self.mixture.log_weight


class StageArrays(NamedTuple):
    """The arrays that the posterior of a stage depends on."""

    mixture: Mixture  # of pi_s; no component where that is the prior
    rows: dict[str, Array]
    reference: Reference = NO_REFERENCE  # of canonical vectors
    is_row: Bool[Array, " row"] | None = None  # False for rows that fill up the arrays


@dataclass(frozen=True)
class Start:
    """The density pi_s that a stage starts from, and its likelihood; functions of arrays.

    Args:
        split: prior and likelihood of the model.
        defensive: the family of mixtures between stages, with its share of the prior.
        exchange: the members that may change places; None for none.
        axis: of the rows among the batch dimensions.
    """

    split: Split
    defensive: Defensive
    exchange: Exchangeable | None
    axis: int = -1

    def __call__(self, arrays: StageArrays) -> Callable:
        """A function of a vector: log pi_s and log likelihood, of canonical vectors."""
        return canonical_densities(self.exchange, arrays.reference, self.densities(arrays))

    def densities(self, arrays: StageArrays) -> Callable:
        """A function of a vector: log pi_s and log likelihood."""
        program = self.split.program.with_arguments(**arrays.rows)

        def densities(z: Array) -> tuple[Array, Array]:
            if arrays.is_row is None:
                log_prior, log_likelihood = self.split.densities(z, program)
            else:
                log_prior, terms = row_terms(self.split, self.axis, z, program)
                log_likelihood = jnp.sum(jnp.where(arrays.is_row, terms, 0.0))
            if len(arrays.mixture.log_weight):
                log_prior = self.defensive.log_density(arrays.mixture, z, log_prior)
            return log_prior, log_likelihood

        return densities

    @property
    def with_background(self) -> Defensive:
        """The family of proposals: a fifth is pi_s, should the search have missed something."""
        return Defensive(self.defensive.summary, 0.2)

    def draws(
        self, rng: np.random.Generator, num_draws: int, given: tuple[Mixture, LabelledMixture]
    ) -> Float[np.ndarray, "draw size"]:
        """Draws from the density that nested sampling starts from.

        Args:
            rng: a generator.
            num_draws: how many.
            given: the mixture of pi_s, and the proposal; without components for pi_s itself.
        """
        mixture, proposal = given
        z = self.split.draws(rng, num_draws)
        if len(mixture.log_weight):
            z = self.defensive.draws(rng, mixture, z)
        if not len(proposal.log_weight):
            return z
        z = relabel(self.exchange, z, proposal.reference)
        return self.with_background.draws(rng, proposal.mixture, z)

    def nested_densities(self, arrays: StageArrays, proposal: LabelledMixture) -> Callable:
        """A function of a vector: log prior and log likelihood, as nested sampling takes them.

        With a proposal q these are log q and log (likelihood pi_s / q).
        """
        if not len(proposal.log_weight):
            return self.densities(arrays)
        start = self(arrays._replace(reference=proposal.reference))

        def densities(z: Array) -> tuple[Array, Array]:
            log_start, log_likelihood = start(z)
            log_proposal = self.with_background.log_density(proposal.mixture, z, log_start)
            return log_proposal, log_likelihood + log_start - log_proposal

        return densities

    def values(
        self, arrays: StageArrays, z: Float[np.ndarray, "point size"]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Log pi_s and log likelihood at vectors, on the host; of canonical vectors."""
        log_start, log_likelihood = values(z, arrays._replace(reference=NO_REFERENCE), self)
        if self.exchange is None or not len(arrays.reference.location):
            return log_start, log_likelihood
        is_canonical = (relabel(self.exchange, z, arrays.reference) == z).all(1)
        return np.where(is_canonical, log_start + self.exchange.log_copies, -np.inf), log_likelihood

    def nested_values(
        self, arrays: StageArrays, proposal: LabelledMixture, z: Float[np.ndarray, "point size"]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """`nested_densities` at vectors, on the host; and the log likelihood."""
        log_start, log_likelihood = self.values(arrays._replace(reference=proposal.reference), z)
        if not len(proposal.log_weight):
            return log_start, log_likelihood, log_likelihood
        log_proposal = self.with_background.log_densities(proposal.mixture, z, log_start)
        with np.errstate(invalid="ignore"):
            return log_proposal, log_likelihood + log_start - log_proposal, log_likelihood


class Begin(NamedTuple):
    """What is known when a search begins."""

    near: LabelledMixture  # what was found before; without components where nothing was
    peaks: Float[Array, "peak size"] | None = None  # of fewer rows; None where none were looked for
    # walkers from draws of pi_s beside the known peaks; None: until the highest is found often
    most_fresh: int | None = None
    heaviest: Float[Array, "draw size"] | None = None  # draws from a candidate that was rejected
    is_final: bool = False  # whether `near` is the proposal where there is no search


class Candidate(NamedTuple):
    """A candidate for the proposal."""

    proposal: LabelledMixture
    evaluations: float
    peaks: Float[Array, "peak size"] | None = None  # the highest that walkers came to
    left: float = np.inf  # nats to the posterior, of the best candidate so far


@dataclass(frozen=True)
class Search:
    """The search for a proposal.

    Args:
        start: what stages start from.
        rows: the rows of the model.
        num_clumps: the most components of a mixture.
        num_walkers: the most walkers; None for the usual number, 0 for no search.
    """

    start: Start
    rows: StageRows
    num_clumps: int
    num_walkers: int | None

    @property
    def family(self) -> Any:
        """The family of mixtures."""
        return self.start.defensive.summary

    @property
    def nothing(self) -> LabelledMixture:
        """A mixture without components."""
        return LabelledMixture(self.family.empty(0))

    @property
    def usual(self) -> int:
        """The usual number of walkers, and of draws."""
        return max(50, 4 * self.start.split.size)

    @property
    def size(self) -> int:
        """The most walkers of a stage; none where the family takes no scores."""
        if not self.family.uses_scores:
            return 0
        return self.usual if self.num_walkers is None else self.num_walkers

    def searched(self, rng_key: Any, arrays: StageArrays, begin: Begin) -> Candidate:
        """Searches for a proposal; it has no components where no candidate was accepted.

        Args:
            rng_key: a JAX key.
            arrays: of the stage.
            begin: what is known.
        """
        if not self.size:
            return Candidate(begin.near if begin.is_final else self.nothing, 0.0)
        rng = generator(rng_key)
        spent, left = 0.0, np.inf
        looks = (self.near_components, self.near_peaks, self.near_heaviest, self.outwards)
        for look in looks:
            candidate = look(rng, arrays, begin)
            if candidate is None:
                continue
            proposal, evaluations, peaks, _ = candidate
            begin = begin if peaks is None else begin._replace(peaks=peaks)
            nats, is_accepted, heaviest = self.trial(rng, arrays, proposal)
            spent, left = spent + evaluations + TRIED, min(left, nats)
            if is_accepted:
                peaks = component_means(proposal) if begin.peaks is None else begin.peaks
                if nats < 0.3:
                    return Candidate(proposal, spent, peaks, left)
                finer, evaluations = self._refined(rng, arrays, proposal)
                best = finer if self.trial(rng, arrays, finer)[0] < nats else proposal
                return Candidate(best, spent + evaluations + TRIED, peaks, left)
            near = proposal if nats < NEAR else self.nothing
            begin = begin._replace(near=near, heaviest=heaviest)
        return Candidate(self.nothing, spent, begin.peaks, left)

    def trial(
        self, rng_key: Any, arrays: StageArrays, proposal: LabelledMixture
    ) -> tuple[float, bool, Float[Array, "draw size"]]:
        """Judges a proposal, with pi_s in its background, by draws from it.

        Returned are the Kullback-Leibler divergence to the posterior in nats, which depends less on
        the largest weight than an effective sample size does; whether the proposal is accepted; and
        the draws of the largest weights.
        """
        z = self.start.draws(generator(rng_key), TRIED, (arrays.mixture, proposal))
        _, log_weight, log_likelihood = self.start.nested_values(arrays, proposal, z)
        log_weight = np.where(np.isnan(log_weight), -np.inf, log_weight)
        heaviest = np.argsort(-log_weight)[: min(5, np.isfinite(log_weight).sum())]
        # an infinite likelihood is refused by nested sampling
        if not len(heaviest) or log_weight[heaviest[0]] == np.inf:
            return np.inf, False, z[heaviest]
        log_total = np.logaddexp.reduce(log_weight)
        weight = np.exp(log_weight - log_total)
        mean = np.sum(weight * np.where(weight > 0, log_likelihood, 0.0))
        information = float(mean - log_total + np.log(TRIED))
        nats = divergence(log_weight)
        return nats, nats <= max(LITTLE, PART * information), z[heaviest]

    def _refined(
        self, rng_key: Any, arrays: StageArrays, proposal: LabelledMixture
    ) -> tuple[LabelledMixture, float]:
        rng = generator(rng_key)
        z, log_weight = self.weighted_draws(rng, arrays, proposal, 4 * self.usual)
        log_weight = np.where(np.isfinite(log_weight), log_weight, -np.inf)
        points, spent = self.fit_points(z, arrays)
        fitted = self.family.fitted(rng, points, log_weight, self.num_clumps)
        return proposal._replace(mixture=fitted), float(len(z) + spent)

    # Candidates.

    def near_components(self, rng_key: Any, arrays: StageArrays, begin: Begin) -> Candidate | None:
        """Batch and match from each component that was found before; None where there is none."""
        if not len(begin.near.log_weight):
            return None
        return self._matched(rng_key, arrays, _components(begin.near.mixture))

    def near_peaks(self, rng_key: Any, arrays: StageArrays, begin: Begin) -> Candidate | None:
        """Batch and match from the peaks of the posterior; None where no walker can start."""
        rng = generator(rng_key)
        drawn = self.start.draws(rng, self.size, (arrays.mixture, self.nothing))
        start = drawn[np.isfinite(drawn).all(1)]
        if not len(start):
            return None  # nested sampling refuses such a prior
        if begin.peaks is None:
            z, height, spent = find_peaks(start, self.start, arrays)
        else:  # the highest peak of few rows need not be near that of more
            z, height, spent = find_peaks(
                np.concatenate([np.asarray(begin.peaks), start[: begin.most_fresh]]),
                self.start,
                arrays,
                least=len(begin.peaks) + FRESH,
            )
        # in the first stage members are not labelled yet
        is_labelled = self.start.exchange is None or len(arrays.mixture.log_weight)
        z = z if is_labelled else relabel_alike(self.start.exchange, z)
        peaks, height = distinct(z, height, start.std(0), MOST_PEAKS)
        normals = [laplace(peak, start, arrays, self.start) for peak in peaks]
        matched = self._matched(rng, arrays, worthwhile(normals, height))
        spent += matched.evaluations + CURVATURE * len(normals) * self.start.split.size
        return Candidate(matched.proposal, spent, peaks if len(peaks) else None)

    def near_heaviest(self, rng_key: Any, arrays: StageArrays, begin: Begin) -> Candidate | None:
        """`near_peaks` with walkers from the heaviest draws, which may show another peak."""
        if begin.heaviest is None or begin.peaks is None:
            return None
        known = np.concatenate([begin.peaks, begin.heaviest])
        return self.near_peaks(rng_key, arrays, begin._replace(peaks=known, most_fresh=FRESH))

    def outwards(self, rng_key: Any, arrays: StageArrays, begin: Begin) -> Candidate | None:
        """A mixture fitted to walkers, which slice sample outwards from draws of a near mixture."""
        near = begin.near
        if not len(near.log_weight):
            return None
        rng = generator(rng_key)
        z, log_weight = self.weighted_draws(rng, arrays, near)
        walk_key = random.wrap_key_data(jax.device_put(key_data(rng)))
        z, evaluations = walk_outwards(
            walk_key, z, log_weight, arrays._replace(reference=near.reference), self.start
        )
        points, spent = self.fit_points(np.asarray(z), arrays)
        fitted = self.family.fitted(rng, points, np.zeros(len(z)), self.num_clumps)
        return Candidate(near._replace(mixture=fitted), float(evaluations) + spent + 2 * len(z))

    def _matched(self, rng_key: Any, arrays: StageArrays, starts: list[NormalMixture]) -> Candidate:
        """Batch and match from each Normal whose mean is not within one found before."""
        rng = generator(rng_key)
        found, log_evidence, spent = [], [], 0
        for start in starts:
            if not any(is_within(start.mean[0], other) for other in found):
                normal, own, cost = batch_and_match(rng, start, self.start, arrays, self.usual)
                found, log_evidence, spent = [*found, normal], [*log_evidence, own], spent + cost
        none = self.family.empty(self.num_clumps)
        mixture = combined(found, log_evidence, self.num_clumps) if found else none
        is_labelled = len(arrays.mixture.log_weight) or not np.isfinite(mixture.log_weight).any()
        proposal = LabelledMixture(mixture) if is_labelled else self.labelled(rng, mixture)
        return Candidate(proposal, float(spent))

    # What candidates are made of.

    def labelled(self, rng_key: Any, mixture: Mixture) -> LabelledMixture:
        """A mixture over canonical vectors; the reference is its heaviest component."""
        exchange, family = self.start.exchange, self.family
        if exchange is None:
            return LabelledMixture(mixture)
        is_normal = isinstance(mixture, NormalMixture)
        first = _components(mixture)[0] if is_normal else mixture
        drawn = family.draws(generator(rng_key), first, self.usual)
        reference = exchange.reference(drawn.astype(self.start.split.dtype))
        if is_normal:
            mixture = pushed_forward(mixture, lambda z: relabel(exchange, z, reference))
        return LabelledMixture(mixture, reference)

    def weighted_draws(
        self, rng_key: Any, arrays: StageArrays, found: LabelledMixture, num_draws: int = 0
    ) -> tuple[Float[Array, "draw size"], Float[Array, " draw"]]:
        """Draws from a mixture, and their log importance weights for the posterior of a stage.

        Args:
            rng_key: a JAX key.
            arrays: of the stage.
            found: the mixture.
            num_draws: how many draws; 0 for the usual number.
        """
        z = self.family.draws(generator(rng_key), found.mixture, num_draws or self.usual)
        rounded = z.astype(self.start.split.dtype)
        log_density = sum(self.start.values(arrays._replace(reference=found.reference), rounded))
        return rounded, log_density - self.family.log_densities(found.mixture, z)

    def arrays(
        self, mixture: Mixture, data: StageData, rows: Int[np.ndarray, " row"]
    ) -> StageArrays:
        """The arrays of a stage of these rows, filled up so that few sizes occur."""
        places = padded(rows, room_for(len(rows)))
        return StageArrays(mixture, self.rows.cut(data, places), is_row=jax.device_put(places >= 0))

    def fit_points(
        self, z: Float[Array, "point size"], arrays: StageArrays
    ) -> tuple[FitPoints, int]:
        """Points, with scores if the family uses them, and the evaluations that this took."""
        if not self.family.uses_scores:
            return FitPoints(z), 0
        return FitPoints(z, with_scores(z, arrays, self.start)[1]), GRADIENT * len(z)


def _components(mixture: Mixture) -> list[NormalMixture]:
    one = lambda place: NormalMixture(*(np.asarray(leaf)[place][None] for leaf in mixture))
    each = [one(place) for place in mixture.present]
    return [part._replace(log_weight=np.zeros_like(part.log_weight)) for part in each]


def component_means(found: LabelledMixture) -> Float[Array, "component size"]:
    """The means of the components that have weight."""
    assert isinstance(found.mixture, NormalMixture)  # others have no scores and no search
    return np.asarray(found.mixture.mean)[np.isfinite(np.asarray(found.log_weight))]
