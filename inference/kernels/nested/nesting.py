"""A nested sampler at work on a model that has been read: what `NestedSampler` and each stage of
`Staged` are made of.

While the limit is low, draws from where the sampler starts are cheaper than walks and remember
nothing. The host makes them, many at a time: within a step, code that draws from a Dirichlet would
take as long to compile as half of the rest.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from jax.scipy.special import logsumexp

from inference.kernels.nested.deaths import Death, insertion_rank, lowest, parents_of
from inference.kernels.nested.modes import parts_of, roots_of
from inference.kernels.nested.relabel import renamed, together
from inference.kernels.nested.state import Dead, Nest, Offers, begun_with, points_of, with_room
from inference.kernels.nested.volumes import evidence, remaining, shared, shrunk
from inference.maths.slice_walk import (
    STRAIGHT,
    Around,
    Ended,
    Limit,
    Points,
    direction,
    spread_of,
    walk,
)
from inference.program.compiling import once
from inference.program.program import Program
from inference.program.sites import StructureError
from inference.reading.density import Split
from inference.reading.exchangeable import NO_REFERENCE, Exchangeable, exchangeable

__all__ = [
    "FromPrior",
    "Nesting",
    "Settings",
    "Shrinkage",
    "Source",
    "evidence_of",
    "is_finished",
    "is_full",
    "left",
    "lengthened",
    "limit_of",
]

WIDTH = 4.0  # of the interval of a walk, in standard deviations of a mode
# e-folds of volume: room to begin with, and where a run is given up
FIRST_FOLDS, MOST_FOLDS = 96, 1500
SHARING = 0.25  # power of its volume with which a mode gets points
LOOKS = 2  # at the modes, in an e-fold
SPARE = 1.1  # draws from the prior for each live point
# how fast walks grow with what they remember; how many times `num_sweeps` they come to be at most
PACE, LONGEST = 0.1, 30.0
OFFERS = 4  # for each step of a walk: all fail where one in e^4 births should
IN_STORE = 10  # for each live point; new ones when half of them are used
BLOCK = 500  # draws that are made in one go


class Shrinkage(NamedTuple):
    """What a step reports."""

    # [batch]: where new points came to lie among those of their mode, as if it had all live points
    insertion_rank: Array
    log_volume: Array
    log_evidence: Array
    log_likelihood: Array  # the highest that died
    num_modes: Array
    # of walks: squared distance from their origins after half of the steps, over that after all
    halfway: Array
    evaluations: Array
    num_nan: Array  # of them whose likelihood is NaN, which counts as 0


class Settings(NamedTuple):
    """Those of `NestedSampler`."""

    num_live: int
    batch: int
    num_sweeps: float
    memory: float
    tolerance: float
    track_modes: bool
    rename: bool


class Source(Protocol):
    """What a nested sampling starts from; static and hashable."""

    def drawing(self, given: Any) -> Callable[[Array], Array]:
        """A function of a key that draws a vector, by what is given in arrays."""
        ...


@dataclass(frozen=True)
class FromPrior:
    """The prior of a model; nothing is given."""

    split: Split

    def drawing(self, given: None) -> Callable[[Array], Array]:
        """Draws from the prior."""
        return self.split.draw


@dataclass(frozen=True)
class Nesting:
    """What a sampler has read of a model, with all that a step does."""

    sampler: Settings
    split: Split
    # None where no members may change places, or where they are not to be renamed
    exchange: Exchangeable | None

    @classmethod
    def of(cls, sampler: Settings, program: Program) -> "Nesting":
        """Reads and proves."""
        split = Split(program)
        program.check()
        split.prove()
        return cls(sampler, split, exchangeable(split) if sampler.rename else None)

    def program(self, data: dict[str, Array]) -> Program:
        """The model with arrays in place of some of its arguments."""
        return self.split.program.with_arguments(**data)

    # The start.

    def started(
        self, rng_key: Array, source: Source, given: Any, densities: Callable, is_even: bool = True
    ) -> Nest:
        """Live points, the first of what is drawn from the source, and nothing dead.

        `is_even`: members that may change places in the model may do so in what is drawn as well.
        """
        draw_key, label_key = random.split(rng_key)
        num_live = self.sampler.num_live
        offers, taken = self._offers(draw_key, source, given), int(SPARE * num_live) + 1
        drawn = np.asarray(offers.z[:taken])
        z = jnp.asarray(drawn[np.isfinite(drawn).all(1)][:num_live])
        offers = offers._replace(num_used=offers.num_used + taken)
        log_prior, log_likelihood = once(jax.vmap(densities), z)(z)
        self._check_start(np.asarray(log_likelihood), num_live)
        reference = (
            self.exchange.first_reference if self.exchange and is_even else lambda z: NO_REFERENCE
        )
        # a mode that finds no place is left whole
        num_modes = max(1, 2 * num_live // self._least) if self.sampler.track_modes else 1

        def begun(
            label_key: Array, z: Array, log_prior: Array, log_likelihood: Array, offers: Offers
        ) -> Nest:
            live = Points(
                z, log_prior, log_likelihood, random.uniform(label_key, (num_live,), z.dtype)
            )
            return begun_with(live, offers, reference(z), num_modes, FIRST_FOLDS * num_live)

        found = (label_key, z, log_prior, log_likelihood, offers)
        nest = once(begun, *found)(*found)
        return nest._replace(
            offers=offers._replace(z=together(self.exchange, offers.z, nest.reference))
        )

    @property
    def _least(self) -> int:
        """Points of the smallest part that is a mode of its own."""
        return max(10, 2 * self.split.size)

    def _check_start(self, log_likelihood: np.ndarray, wanted: int) -> None:
        sites = " and ".join(map(repr, self.split.program.observed)) or "none observed"
        count = len(log_likelihood)
        if count < wanted:
            raise ValueError(
                f"{count} of {wanted} draws from the prior are finite; look for a prior that is "
                "too wide for its dtype."
            )
        if np.isnan(log_likelihood).any() or np.isposinf(log_likelihood).any():
            what = "NaN" if np.isnan(log_likelihood).any() else "infinite"
            raise ValueError(
                f"site {sites}: its likelihood is {what} at some of {count} draws from the prior; "
                "wanted a number."
            )
        if not np.isfinite(log_likelihood).any():
            raise ValueError(
                f"site {sites}: its likelihood is 0 at all of {count} draws from the prior; wanted "
                "a prior that reaches the data."
            )

    # A step.

    def shrunk(self, rng_key: Array, state: Nest, densities: Callable) -> tuple[Nest, Shrinkage]:
        """One batch of deaths and births; twice in an e-fold a look at the modes."""
        batch = self.sampler.batch
        volume_key, birth_key, mode_key = random.split(rng_key, 3)
        death = lowest(state.live, state.mode, _count(state), batch)
        lost = jax.tree.map(lambda leaf: leaf[death.chosen], state.live)
        lost_mode = state.mode[death.chosen]
        shells = shrunk(
            volume_key,
            state.volumes,
            lost.log_likelihood,
            lost_mode,
            death.rank,
            death.count[lost_mode],
        )
        dead = Dead(lost.z, lost.log_likelihood, shells.log_volume, lost_mode)
        put = lambda room, new: jax.lax.dynamic_update_slice_in_dim(room, new, state.num_dead, 0)
        share_key, parent_key, birth_key = random.split(birth_key, 3)
        mode = self._shared_out(share_key, state._replace(volumes=shells.volumes), death)
        parent = parents_of(parent_key, state.live.z, state.mode, death, mode)
        born, ranks, halfway = self._births(birth_key, state, death, mode, parent, densities)
        state = state._replace(
            live=jax.tree.map(lambda old, new: old.at[death.chosen].set(new), state.live, born.at),
            mode=state.mode.at[death.chosen].set(mode),
            ancestor=state.ancestor.at[:, death.chosen].set(state.ancestor[:, parent]),
            volumes=shells.volumes,
            dead=jax.tree.map(put, state.dead, dead),
            num_dead=state.num_dead + batch,
            num_steps=state.num_steps + 1,
            num_evaluations=state.num_evaluations + born.num_evaluations,
            longer=lengthened(state.longer, halfway, self.sampler.memory),
        )
        state = state._replace(offers=self.used(state, born.num_offered))
        if self.sampler.track_modes or state.reference.gives_names:
            is_time = state.num_steps % (max(1, self.sampler.num_live // batch // LOOKS)) == 0
            state = jax.lax.cond(
                is_time, partial(self._looked, densities), lambda _, at: at, mode_key, state
            )
        log_evidence = jnp.logaddexp(state.volumes.log_evidence[0], left(state))
        log_volume = logsumexp(state.volumes.log_volume[:, 0])
        highest, took = lost.log_likelihood.max(), (born.num_evaluations, born.num_nan)
        return state, Shrinkage(
            ranks, log_volume, log_evidence, highest, state.num_modes, halfway, *took
        )

    def _shared_out(self, rng_key: Array, state: Nest, death: Death) -> Array:
        """[batch]: the mode that each birth goes to.

        In time a mode gets points as the root of its volume, for a small one may be what counts in
        the end; those that have no more to give die out.
        """
        survivors, sampler = death.count - death.dying, self.sampler
        highest = (
            jnp.full(len(survivors), -jnp.inf, state.live.z.dtype)
            .at[state.mode]
            .max(state.live.log_likelihood)
        )
        has_more = state.volumes.log_volume[:, 0] + highest > state.volumes.log_evidence[
            0
        ] + np.log(0.1 * sampler.tolerance)
        is_open = (survivors > 0) & has_more
        is_open = jnp.where(is_open.any(), is_open, survivors > 0)
        log_volume = jnp.where(is_open, state.volumes.log_volume[:, 0], -jnp.inf)
        wanted = sampler.num_live * jax.nn.softmax(log_volume * SHARING)
        missing = jnp.maximum(wanted - survivors.astype(wanted.dtype), 0)
        places = (
            (jnp.arange(sampler.batch) + random.uniform(rng_key, dtype=wanted.dtype))
            / sampler.batch
            * missing.sum()
        )
        return jnp.searchsorted(jnp.cumsum(missing), places, side="right").astype(state.mode.dtype)

    def _births(
        self,
        rng_key: Array,
        state: Nest,
        death: Death,
        mode: Array,
        parent: Array,
        densities: Callable,
    ) -> tuple[Ended, Array, Array]:
        """Copies of survivors of the given modes, after their walks, or draws; where they came to
        lie among the survivors; and how far walks were halfway.
        """
        walk_key, rank_key = random.split(rng_key)
        limit = limit_of(state, death, mode)
        own = jnp.argsort(death.order)[parent] - death.first[mode]
        start = jax.tree.map(lambda leaf: leaf[parent], state.live)
        spread = spread_of(state.live.z, state.mode, len(death.count))[mode]
        around = Around(
            state.live.z[death.order], death.first[mode], death.count[mode], own, spread
        )
        turn, offers = (
            partial(direction, around=around),
            (state.offers.z, state.offers.num_used, self._num_offers(state)),
        )
        born = walk(
            walk_key,
            densities,
            start,
            limit,
            turn,
            self._num_steps(state),
            WIDTH,
            STRAIGHT,
            *offers,
        )
        apart = lambda z: jnp.mean(
            ((z - start.z) / jnp.maximum(spread, jnp.finfo(z.dtype).tiny)) ** 2
        )
        rank = insertion_rank(rank_key, state.live, state.mode, death, born.at, mode)
        return born, rank, apart(born.halfway) / apart(born.at.z)

    def _looked(self, densities: Callable, rng_key: Array, state: Nest) -> Nest:
        if state.reference.gives_names:
            assert self.exchange is not None
            live, z, reference = renamed(
                self.exchange, state.live, state.offers.z, state.reference, densities
            )
            state = state._replace(
                live=live, offers=state.offers._replace(z=z), reference=reference
            )
        if not self.sampler.track_modes:
            return state
        roots = roots_of(state.live.z, state.mode, len(state.volumes.log_volume))
        parts = parts_of(state.live.z, state.mode, roots, state.num_modes, self._least)
        state = state._replace(mode=parts.mode, num_modes=parts.num_modes)
        volumes = shared(rng_key, state.volumes, parts.mode, parts.origin, state.ancestor[-1])
        own = jnp.arange(self.sampler.num_live, dtype=jnp.int32)[None]
        return state._replace(volumes=volumes, ancestor=jnp.concatenate([own, state.ancestor[:-1]]))

    # Draws that births are offered.

    def draws(self, rng_key: Array, num_draws: int, source: Source, given: Any) -> Array:
        """[draw, size], from a source. What is compiled for one block serves for all."""
        numbers = range(-(-num_draws // BLOCK))
        return jnp.concatenate(
            [_block(source, random.fold_in(rng_key, number), given) for number in numbers]
        )[:num_draws]

    def _offers(self, rng_key: Array, source: Source, given: Any) -> Offers:
        own_key, next_key = random.split(rng_key)
        z = self.draws(own_key, max(BLOCK, IN_STORE * self.sampler.num_live), source, given)
        return Offers(z, jnp.zeros((), jnp.int32), jnp.zeros((), bool), random.key_data(next_key))

    def with_offers(self, state: Nest, source: Source, given: Any) -> Nest:
        """New offers, their members named as those of the live points."""
        offers = self._offers(random.wrap_key_data(state.offers.rng_key), source, given)
        return state._replace(
            offers=offers._replace(z=together(self.exchange, offers.z, state.reference))
        )

    def used(self, state: Nest, count: Array) -> Offers:
        """The offers without so many more."""
        num_used = state.offers.num_used + count
        return state.offers._replace(
            num_used=num_used,
            are_worn=(2 * num_used > len(state.offers.z)) & (self._num_offers(state) > 0),
        )

    def _num_offers(self, state: Nest) -> Array:
        """Draws that each birth may be, before it walks: some, while they lie above the limit more
        often than a walk has steps. Of modes that have come apart, a draw would not know which it
        is in.
        """
        num_steps = self._num_steps(state)
        is_cheap = (state.num_modes == 1) & (
            state.volumes.log_volume[0, 0] > -jnp.log(num_steps.astype(state.live.z.dtype))
        )
        return jnp.where(is_cheap, OFFERS * num_steps, 0)

    def _num_steps(self, state: Nest) -> Array:
        """How many steps a walk takes."""
        return jnp.round(
            max(1.0, self.sampler.num_sweeps * self.split.size) * jnp.exp(state.longer)
        ).astype(jnp.int32)

    # The host.

    def with_more_room(self, state: Nest) -> Nest:
        """Twice the room for the dead, up to where a run is given up."""
        folds = 2 * len(state.dead.mode) // self.sampler.num_live
        if folds > MOST_FOLDS:
            raise StructureError(
                f"sites {list(self.split.program.observed)}: after {folds // 2} e-folds of prior "
                "volume the likelihood still rises, to "
                f"{float(state.live.log_likelihood.max()):.4g}; wanted one with a bound. Look for "
                "a scale that may shrink to 0, or data "
                f"that are far from all that the prior has likely."
            )
        return state._replace(dead=with_room(state.dead, folds * self.sampler.num_live))

    def points(self, state: Nest) -> tuple[Array, Array]:
        """All points, their members named alike, with log weights: what a summary is fitted to."""
        z, log_weight, _, _ = points_of(state)
        return together(self.exchange, z, state.reference), log_weight


# a third to compile, 4 times to run
@partial(jax.jit, static_argnums=0, compiler_options={"xla_backend_optimization_level": 0})
def _block(source: Source, rng_key: Array, given: Any) -> Array:
    return jax.vmap(source.drawing(given))(random.split(rng_key, BLOCK))


def limit_of(state: Nest, death: Death, mode: Array) -> Limit:
    """The last that died; of births to any mode."""
    last = death.chosen[-1]
    return Limit(state.live.log_likelihood[last], state.live.label[last])


def lengthened(longer: Array, halfway: Array, memory: float) -> Array:
    """After half of the steps of a walk that keeps a correlation c it is 1 / (1 + sqrt(c)) as
    far, in squares, as after all.
    """
    kept = jnp.clip(1 / halfway - 1, 0, 1)
    return jnp.clip(longer + PACE * (kept - np.sqrt(memory)), 0, np.log(LONGEST))


def is_finished(state: Nest, tolerance: float) -> Array:
    """Whether the live points hold less than this share of the evidence."""
    return left(state) < state.volumes.log_evidence[0] + np.log(tolerance)


def is_full(state: Nest, batch: int) -> Array:
    """Whether the next of the dead find no room."""
    return state.num_dead + batch > len(state.dead.mode)


def left(state: Nest) -> Array:
    """The logarithm of the evidence that the live points stand for."""
    return remaining(
        state.volumes.log_volume[:, :1], state.live.log_likelihood, state.mode, _count(state)
    )[0]


@jax.jit
def evidence_of(state: Nest) -> tuple[Array, Array]:
    """The log-evidence and its error."""
    return evidence(state.volumes, state.live.log_likelihood, state.mode, _count(state))


def _count(state: Nest) -> Array:
    """Live points of each mode."""
    return jnp.zeros(len(state.volumes.log_volume), jnp.int32).at[state.mode].add(1)
