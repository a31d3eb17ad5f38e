"""What a stage of learning may go over, in place of what it starts from: a mixture q, with pi_s in
the background.

Nested sampling of likelihood x pi_s / q from q is as right as that of the likelihood from pi_s,
with less to find out. Candidates for q come one after the other, the cheapest first:

 1. from each clump of pi_s, the Normal nearby that the slopes of the posterior tell (`climbing`);
 2. the same from the peaks that walkers come to, which begin as draws from pi_s, at peaks of fewer
    rows before (`peaks`);
 3. the same from the heaviest of its draws as well, where these tell of something better nearby;
 4. clumps fitted to walkers that slice sample outwards from those, where their Normals are not far
    off.

The first is taken from which few nats are left to the posterior, or, unless these are next to none,
what is fitted to its draws in proportion to their weights, if that is nearer; none of them, where
clumps cannot say what was found, and walks would be long. What q misses is found as ever, by live
points that begin in the background; but walks take long to find it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random

from inference.kernels.nested.nesting import Nesting
from inference.kernels.nested.relabel import Named, drawn_in_places, in_places, named_alike
from inference.kernels.staged.climbing import (
    GRADIENT,
    Climbed,
    climbed,
    drawn_from,
    is_within,
    joined,
    sloped,
)
from inference.kernels.staged.hilbert_clumps import CodeClumps
from inference.kernels.staged.peaks import Peaks, apart, around, outwards, peaks, worthwhile
from inference.maths.normal_mixture import Clumps, StateClumps, moved
from inference.maths.summary import Backed, Mixture, Told, divergence
from inference.program.compiling import once
from inference.program.program import Program
from inference.reading.density import Split
from inference.reading.exchangeable import NO_REFERENCE, Exchangeable, Reference
from inference.reading.stage_rows import StageRows

__all__ = [
    "FEWEST",
    "SUMMARIES",
    "Begin",
    "Candidate",
    "Given",
    "Search",
    "Start",
    "Tried",
    "centres",
]

SUMMARIES = {
    "state": lambda split: StateClumps(split.size),
    "code": lambda split: CodeClumps(split.blocks),
}
# walkers: at least; by default at least, and for each latent number. So many points has a climb,
# too
FEWEST, USUAL, EACH = 20, 50, 4
# share of what a stage starts from in what it goes over: a fifth of an e-fold, should a search miss
# something
BEHIND_SEARCH = 0.2
# nats that are left, or part of what pi_s leaves: walks over a bad approximation are long
LITTLE, PART = 1.0, 0.01
# nats that are left, up to which it is worth while to go on; and up to which nothing better is
# looked for
NEAR, FINE = 2.0, 0.3
# nats that are left where a search has failed, and says nothing of what clumps could say
FAR = 10.0
# draws, by which that is judged; and how many times as many as a climb has points, to which clumps
# are fitted
TRIED, FINER = 500, 4
# from which one climbs; beside peaks of fewer rows, walkers from anywhere, and from draws
MOST_PEAKS, FRESH, HEAVIEST = 8, 5, 5
# points whose slopes are computed in one go, and draws that are weighed side by side
CHUNK, BATCH = 500, 50


class Given(NamedTuple):
    """Where a density is asked for, in arrays alone."""

    clumps: Mixture  # of pi_s
    rows: dict[str, Array]
    reference: Reference = NO_REFERENCE  # of vectors that are alike


@dataclass(frozen=True)
class Start:
    """What a stage starts from; equal where all its parts are."""

    split: Split
    backed: Backed
    exchange: Exchangeable | None

    def __call__(self, given: Given) -> Callable:
        """With the rows of a stage."""
        return in_places(
            self.exchange,
            given.reference,
            self.densities(given.clumps, self.split.program.with_arguments(**given.rows)),
        )

    def densities(self, clumps: Mixture, program: Program) -> Callable:
        """The logarithms of pi_s, and of the likelihood."""

        def densities(z: Array) -> tuple[Array, Array]:
            log_prior, log_likelihood = self.split.densities(z, program)
            return (
                self.backed.log_density(clumps, z, log_prior)
                if len(clumps.log_weight)
                else log_prior
            ), log_likelihood

        return densities

    def drawing(self, given: tuple[Mixture, Named]) -> Callable[[Array], Array]:
        """Draws at clumps of pi_s, and at what is gone over in place of them, where that has
        any.
        """
        clumps, sampled = given
        before = self.before(clumps)
        if not len(sampled.log_weight):
            return before
        before = drawn_in_places(self.exchange, sampled.reference, before)
        return lambda key: self.behind.draw(key, sampled.clumps, before)

    def before(self, clumps: Mixture) -> Callable[[Array], Array]:
        """Draws from pi_s."""
        return (
            (lambda key: self.backed.draw(key, clumps, self.split.draw))
            if len(clumps.log_weight)
            else self.split.draw
        )

    @property
    def behind(self) -> Backed:
        """What is gone over."""
        return Backed(self.backed.summary, BEHIND_SEARCH)

    def rest(self, clumps: Mixture, program: Program, sampled: Named) -> Callable:
        """The logarithms of what nested sampling draws from, and of the rest of prior times
        likelihood.
        """
        start = self.densities(clumps, program)
        if not len(sampled.log_weight):
            return start
        start = in_places(self.exchange, sampled.reference, start)

        def densities(z: Array) -> tuple[Array, Array]:
            log_prior, log_likelihood = start(z)
            log_sampled = self.behind.log_density(sampled.clumps, z, log_prior)
            return log_sampled, log_likelihood + log_prior - log_sampled

        return densities


class Begin(NamedTuple):
    """Where a search begins."""

    near: Named  # what has been found; no place for a clump: nothing has been
    peaks: Array | None = None  # [peak, size]: that fewer rows have; None: nobody has looked
    # walkers from anywhere beside those; None: until the highest peak has been found often
    most_fresh: int | None = None
    heaviest: Array | None = None  # [draw, size], of what has been tried and was not believed
    is_found: bool = False  # what is near may be gone over as it is, where no stage is explored


class Candidate(NamedTuple):
    """What may be gone over, evaluations that it took, and the highest peaks that walkers came
    to.
    """

    mixture: Named
    evaluations: float
    peaks: Array | None = None
    left: float = np.inf  # nats to the posterior, of the nearest that has been tried


class Tried(NamedTuple):
    """What draws from a candidate say."""

    # nats to the posterior: how many draws are effective would depend on the largest weight
    left: float
    information: float  # nats, that the rows of the stage tell
    heaviest: Array  # [draw, size], of draws

    @property
    def is_believed(self) -> bool:
        """Whether it leaves little to find out, or little of what pi_s does."""
        return self.left <= max(LITTLE, PART * self.information)

    @property
    def is_near(self) -> bool:
        """Whether walks from it may come to something better."""
        return self.left < NEAR


@dataclass(frozen=True)
class Search:
    """Looks for what a stage may go over."""

    start: Start
    nesting: Nesting
    rows: StageRows
    num_clumps: int
    num_walkers: int | None

    @property
    def split(self) -> Split:
        """Prior and likelihood."""
        return self.start.split

    @property
    def exchange(self) -> Exchangeable | None:
        """Members that may change places."""
        return self.start.exchange

    @property
    def summary(self) -> Any:
        """The form of what is found."""
        return self.start.backed.summary

    def searched(
        self, rng_key: Array, clumps: Mixture, program: Program, begin: Begin
    ) -> Candidate:
        """The mixture, with no place for a clump where none is believed, and evaluations of all
        rows of the stage.
        """
        if not self.size:
            return Candidate(begin.near if begin.is_found else self.nothing, 0.0)
        spent, left = 0.0, np.inf
        for number, look in enumerate(
            (self.near_clumps, self.near_peaks, self.near_heaviest, self.walked_outwards)
        ):
            look_key, try_key, fit_key, last_key = random.split(random.fold_in(rng_key, number), 4)
            candidate = look(look_key, begin, clumps, program)
            if candidate is None:
                continue
            begin = begin if candidate.peaks is None else begin._replace(peaks=candidate.peaks)
            tried = self.tried(try_key, candidate.mixture, clumps, program)
            spent, left = spent + candidate.evaluations + TRIED, min(left, tried.left)
            if tried.is_believed:
                known = centres(candidate.mixture) if begin.peaks is None else begin.peaks
                if tried.left < FINE:
                    return Candidate(candidate.mixture, spent, known, left)
                finer = self._refined(fit_key, candidate.mixture, clumps, program)
                is_better = self.tried(last_key, finer.mixture, clumps, program).left < tried.left
                return Candidate(
                    (finer if is_better else candidate).mixture,
                    spent + finer.evaluations + TRIED,
                    known,
                    left,
                )
            begin = begin._replace(
                near=candidate.mixture if tried.is_near else self.nothing, heaviest=tried.heaviest
            )
        return Candidate(self.nothing, spent, begin.peaks, left)

    @property
    def nothing(self) -> Named:
        """A summary with no place for a clump."""
        return Named(self.summary.nothing(0))

    def _refined(self, rng_key: Array, near: Named, clumps: Mixture, program: Program) -> Candidate:
        """Clumps fitted to draws from a mixture in proportion to their weights."""
        draw_key, fit_key = random.split(rng_key)
        parts = [self.drawn(key, near, clumps, program) for key in random.split(draw_key, FINER)]
        z, log_weight = map(jnp.concatenate, zip(*parts, strict=True))
        told, cost = self.told(z, clumps, program)
        log_weight = jnp.where(jnp.isfinite(log_weight), log_weight, -jnp.inf)
        fitted = self.summary.fitted(fit_key, told, log_weight, self.num_clumps)
        return Candidate(near._replace(clumps=fitted), float(len(z) + cost))

    @property
    def size(self) -> int:
        """Walkers of a stage; none where summaries have no slopes."""
        if not self.summary.asks_for_slopes:
            return 0
        return self.usual if self.num_walkers is None else self.num_walkers

    @property
    def usual(self) -> int:
        """Walkers of a stage by default."""
        return max(USUAL, EACH * self.split.size)

    def near_clumps(
        self, rng_key: Array, begin: Begin, clumps: Mixture, program: Program
    ) -> Candidate | None:
        """Normals near the clumps that were found before; None where there are none."""
        given = Given(clumps, self._columns(program))
        return (
            self._climbs(rng_key, _apart(begin.near.clumps), given)
            if len(begin.near.log_weight)
            else None
        )

    def near_peaks(
        self, rng_key: Array, begin: Begin, clumps: Mixture, program: Program
    ) -> Candidate | None:
        """Normals near the peaks that walkers come to; None where no walker can start."""
        draw_key, climb_key = random.split(rng_key)
        given = Given(clumps, self._columns(program))
        drawn = self.nesting.draws(draw_key, self.size, self.start, (clumps, self.nothing))
        start = drawn[jnp.isfinite(drawn).all(1)]
        if not len(start):
            return None  # nested sampling says so
        found = self._climbed(begin, start, given)
        highest = apart(found._replace(z=self._alike(found.z, clumps)), start.std(0), MOST_PEAKS)
        curved = [around(peak, start, given, self.start) for peak in highest.z]
        near_them = self._climbs(climb_key, worthwhile(curved, highest.height), given)
        spent = near_them.evaluations + found.evaluations + GRADIENT * len(curved) * self.split.size
        return Candidate(near_them.mixture, spent, highest.z if len(highest.z) else None)

    def _climbed(self, begin: Begin, start: Array, given: Given) -> Peaks:
        """What is best of few rows need not be near to what is best of more: some walkers begin
        anywhere whatever is known.
        """
        if begin.peaks is None:
            return peaks(start, self.start, given)
        first = jnp.concatenate([begin.peaks, start[: begin.most_fresh]])
        return peaks(first, self.start, given, least=len(begin.peaks) + FRESH)

    def near_heaviest(
        self, rng_key: Array, begin: Begin, clumps: Mixture, program: Program
    ) -> Candidate | None:
        """Draws may tell of a better peak, within what another seems to be."""
        if begin.heaviest is None or begin.peaks is None:
            return None
        known = jnp.concatenate([begin.peaks, begin.heaviest])
        return self.near_peaks(
            rng_key, begin._replace(peaks=known, most_fresh=FRESH), clumps, program
        )

    def walked_outwards(
        self, rng_key: Array, begin: Begin, clumps: Mixture, program: Program
    ) -> Candidate | None:
        """Clumps fitted to what walkers come to that begin as draws from what is near."""
        near = begin.near
        if not len(near.log_weight):
            return None
        draw_key, walk_key, fit_key = random.split(rng_key, 3)
        z, log_weight = self.drawn(draw_key, near, clumps, program)
        z, cost = outwards(
            walk_key,
            z,
            log_weight,
            Given(clumps, self._columns(program), near.reference),
            self.start,
        )
        told, more = self.told(z, clumps, program)
        fitted = self.summary.fitted(fit_key, told, jnp.zeros(len(z)), self.num_clumps)
        return Candidate(near._replace(clumps=fitted), float(cost) + more + 2 * len(z))

    def drawn(
        self, rng_key: Array, found: Named, clumps: Mixture, program: Program, num_draws: int = 0
    ) -> tuple[Array, Array]:
        """Draws from a summary, as many as walkers or as told, and the logarithms of their
        weights as draws of the posterior of a stage.
        """
        given = Given(clumps, self._columns(program), found.reference)
        return drawn_from(
            rng_key, self.summary, found.clumps, given, self.start, num_draws or self.usual
        )

    def _columns(self, program: Program) -> dict[str, Array]:
        return {name: jnp.asarray(program.arguments[name]) for name in self.rows.names}

    def _climbs(self, rng_key: Array, starts: list[Clumps], given: Given) -> Candidate:
        """From clumps, but those that a climb before has come to."""
        own_key, rng_key = random.split(rng_key)
        each: list[Climbed] = []
        for number, start in enumerate(starts):
            if not any(is_within(start.mean[0], before.clump) for before in each):
                each.append(
                    climbed(random.fold_in(rng_key, number), start, self.start, given, self.usual)
                )
        mixture = joined(each, self.num_clumps) if each else self.summary.nothing(self.num_clumps)
        has_names = len(given.clumps.log_weight) or not np.isfinite(mixture.log_weight).any()
        found = Named(mixture) if has_names else self.named(own_key, mixture)
        return Candidate(found, float(sum(climb.evaluations for climb in each)))

    def named(self, rng_key: Array, found: Mixture) -> Named:
        """Of what is found the places of its members, where these have no names: those that they
        have in the heaviest of clumps.
        """
        exchange, summary = self.exchange, self.summary
        if exchange is None:
            return Named(found)
        first = _apart(found)[0] if isinstance(found, Clumps) else found
        z = jax.vmap(lambda key: summary.draw(key, first))(random.split(rng_key, self.usual))
        reference = exchange.reference(z)
        if isinstance(found, Clumps):
            move = lambda clumps: moved(clumps, lambda z: exchange.alike(z, reference))
            found = once(move, found)(found)
        return Named(found, reference)

    def tried(self, rng_key: Array, sampled: Named, clumps: Mixture, program: Program) -> Tried:
        """Draws from what may be gone over, with pi_s behind it."""
        z = self.nesting.draws(rng_key, TRIED, self.start, (clumps, sampled))
        log_weight, log_likelihood = map(
            np.asarray, _weighed(self.start, z, sampled, clumps, self._columns(program))
        )
        log_weight = np.where(np.isnan(log_weight), -np.inf, log_weight)
        heaviest = np.argsort(-log_weight)[: min(HEAVIEST, np.isfinite(log_weight).sum())]
        # of a likelihood without bound, which nested sampling refuses
        if not len(heaviest) or log_weight[heaviest[0]] == np.inf:
            return Tried(np.inf, 0.0, z[heaviest])
        weight = np.exp(log_weight - np.logaddexp.reduce(log_weight))
        information = (
            np.sum(weight * np.where(weight > 0, log_likelihood, 0.0))
            - np.logaddexp.reduce(log_weight)
            + np.log(TRIED)
        )
        return Tried(float(divergence(jnp.asarray(log_weight))), float(information), z[heaviest])

    def _alike(self, z: Array, clumps: Mixture) -> Array:
        """Members in the same places: in the first stage they have no names."""
        return z if not self.exchange or len(clumps.log_weight) else named_alike(self.exchange, z)

    def told(self, z: Array, clumps: Mixture, program: Program) -> tuple[Told, int]:
        """Points with the slopes of the posterior, for a summary that asks for them; and
        evaluations that these took.
        """
        if not self.summary.asks_for_slopes:
            return Told(z), 0
        given, parts = (
            Given(clumps, self._columns(program)),
            [z[at : at + CHUNK] for at in range(0, len(z), CHUNK)],
        )
        # what is compiled serves for all
        parts[-1] = jnp.pad(parts[-1], ((0, CHUNK - len(parts[-1])), (0, 0)), mode="edge")
        slope = jnp.concatenate([sloped(part, given, self.start)[1] for part in parts])
        return Told(z, slope[: len(z)]), GRADIENT * len(z)


@partial(jax.jit, static_argnums=0)
def _weighed(
    start: Start, z: Array, sampled: Named, clumps: Mixture, rows: dict[str, Array]
) -> tuple[Array, Array]:
    """Log weights of draws [draw, size], and their log likelihoods."""
    program = start.split.program.with_arguments(**rows)
    densities, rest = start.densities(clumps, program), start.rest(clumps, program, sampled)
    return jax.lax.map(lambda z: (rest(z)[1], densities(z)[1]), z, batch_size=BATCH)


def _apart(clumps: Mixture) -> list[Clumps]:
    """Each clump that is there by itself, the heaviest first."""
    log_weight = np.asarray(clumps.log_weight)
    there = [place for place in np.argsort(-log_weight) if np.isfinite(log_weight[place])]
    one = lambda place: jax.tree.map(lambda leaf: leaf[place][None], clumps)._replace(
        log_weight=jnp.zeros(1)
    )
    return [one(place) for place in there]


def centres(found: Named) -> Array:
    """Of the clumps that are there, [clump, size]."""
    assert isinstance(found.clumps, Clumps)  # others have no slopes, and are not searched for
    return found.clumps.mean[np.isfinite(np.asarray(found.log_weight))]
