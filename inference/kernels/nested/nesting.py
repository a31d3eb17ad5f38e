"""The steps of nested sampling on a model: shared by `NestedSampler` and the stages of `Staged`.

While the limit is low, independent draws from what the sampler starts from are cheaper than walks
and have no memory. The host makes such *offers*, many at a time: inside a step, code that draws
from a Dirichlet would take as long to compile as half of the rest.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import random
from jaxtyping import Array, Float, Int

from inference.kernels.nested.state import (
    Dead,
    Death,
    Nest,
    Offers,
    all_points,
    covariance_roots,
    initial_state,
    insertion_rank,
    lowest,
    parents_of,
    remaining,
    share_volumes,
    shrink_volumes,
    split_modes,
    with_room,
)
from inference.maths.slice_walk import (
    Limit,
    Particles,
    Walk,
    deviations_by_mode,
    direction,
    walk,
)
from inference.program.compiling import QUICKLY, once
from inference.program.program import Program
from inference.program.sites import StructureError
from inference.reading.density import NO_REFERENCE, Exchangeable, Split, exchangeable, relabel

__all__ = ["Nesting", "Settings", "Shrinkage", "lengthened", "limit_of"]

FIRST_FOLDS = 96  # e-folds of volume that there is room for at the start
BLOCK = 500  # draws that are made in one call


class Shrinkage(NamedTuple):
    """What a step reports."""

    insertion_rank: Int[Array, " batch"]  # in its mode, scaled to all live points
    log_volume: Array
    log_evidence: Array
    log_likelihood: Array  # of the highest point that died
    num_modes: Array
    # mean square distance of walks from their starts after half of the steps, over that after all
    halfway: Array
    evaluations: Array
    num_nan: Array  # evaluations with a likelihood of NaN, which counts as 0


class Settings(NamedTuple):
    """The settings of `NestedSampler`."""

    num_live: int
    batch: int
    num_sweeps: float
    memory: float
    tolerance: float
    track_modes: bool
    rename: bool


@dataclass(frozen=True)
class Nesting:
    """What was read of a model, and the steps of a nested sampler on it.

    A sampler starts from draws of a static, hashable function `drawing`: `drawing(given)`, for
    arrays `given`, returns a function of a key that draws a vector.
    """

    sampler: Settings
    split: Split
    exchange: Exchangeable | None  # None where no members are relabelled

    @classmethod
    def of(cls, sampler: Settings, program: Program) -> "Nesting":
        """Reads a program and proves the reading."""
        split = Split(program)
        program.check()
        split.prove()
        return cls(sampler, split, exchangeable(split) if sampler.rename else None)

    def from_prior(self, given: None) -> Callable[[Array], Array]:
        """The `drawing` of a sampler that starts from the prior."""
        return self.split.draw

    # The start.

    def started(
        self,
        rng_key: Array,
        drawing: Callable,
        given: Any,
        densities: Callable,
        is_exchangeable: bool = True,
    ) -> Nest:
        """The state at the start: live points that are the first draws.

        Args:
            rng_key: a JAX key.
            drawing: what the sampler starts from.
            given: the arrays of `drawing`.
            densities: a function of a vector that returns its log prior and log likelihood.
            is_exchangeable: whether members that may change places in the model are exchangeable
                in the draws as well, so that live points need to be relabelled.
        """
        draw_key, label_key = random.split(rng_key)
        num_live = self.sampler.num_live
        # some more than live points, since some may be infinite
        offers, taken = self._offers(draw_key, drawing, given), int(1.1 * num_live) + 1
        drawn = np.asarray(offers.z[:taken])
        z = jnp.asarray(drawn[np.argsort(~np.isfinite(drawn).all(1), kind="stable")[:num_live]])
        offers = offers._replace(num_used=offers.num_used + taken)
        log_prior, log_likelihood = once(jax.vmap(densities), z)(z)
        self.split.check_start(z, log_likelihood)
        relabels = self.exchange is not None and is_exchangeable
        reference = self.exchange.first_reference if relabels else lambda z: NO_REFERENCE
        # no more modes than these are split off: they would have few points each
        num_modes = max(1, 2 * num_live // self._least) if self.sampler.track_modes else 1

        def begun(
            label_key: Array, z: Array, log_prior: Array, log_likelihood: Array, offers: Offers
        ) -> Nest:
            live = Particles(
                z, log_prior, log_likelihood, random.uniform(label_key, (num_live,), z.dtype)
            )
            return initial_state(live, offers, reference(z), num_modes, FIRST_FOLDS * num_live)

        found = (label_key, z, log_prior, log_likelihood, offers)
        nest = once(begun, *found)(*found)
        z = relabel(self.exchange, offers.z, nest.reference)
        return nest._replace(offers=offers._replace(z=z))

    @property
    def _least(self) -> int:
        """Points of the smallest component that becomes a mode."""
        return max(10, 2 * self.split.size)

    # A step.

    def shrunk(self, rng_key: Array, state: Nest, densities: Callable) -> tuple[Nest, Shrinkage]:
        """One batch of deaths and births; twice in an e-fold of volume a search for modes.

        Args:
            rng_key: a JAX key.
            state: the state before.
            densities: a function of a vector that returns its log prior and log likelihood.
        """
        batch = self.sampler.batch
        volume_key, birth_key, mode_key = random.split(rng_key, 3)
        death = lowest(
            state.live,
            state.mode,
            jnp.zeros(len(state.volumes.log_volume), jnp.int32).at[state.mode].add(1),
            batch,
        )
        lost = jax.tree.map(lambda leaf: leaf[death.chosen], state.live)
        lost_mode = state.mode[death.chosen]
        places = lost_mode, death.rank, death.count[lost_mode]
        shell, volumes = shrink_volumes(volume_key, state.volumes, lost.log_likelihood, *places)
        dead = Dead(lost.z, lost.log_likelihood, shell, lost_mode)
        put = lambda room, new: jax.lax.dynamic_update_slice_in_dim(room, new, state.num_dead, 0)
        share_key, parent_key, birth_key = random.split(birth_key, 3)
        mode = self._birth_modes(share_key, state._replace(volumes=volumes), death)
        parent = parents_of(parent_key, state.live.z, state.mode, death, mode)
        born, ranks, halfway = self._births(birth_key, state, death, mode, parent, densities)
        state = state._replace(
            live=jax.tree.map(lambda old, new: old.at[death.chosen].set(new), state.live, born.at),
            mode=state.mode.at[death.chosen].set(mode),
            ancestor=state.ancestor.at[:, death.chosen].set(state.ancestor[:, parent]),
            volumes=volumes,
            dead=jax.tree.map(put, state.dead, dead),
            num_dead=state.num_dead + batch,
            num_steps=state.num_steps + 1,
            num_evaluations=state.num_evaluations + born.num_evaluations,
            longer=lengthened(state.longer, halfway, self.sampler.memory),
        )
        state = state._replace(offers=self.used(state, born.num_offered))
        if self.sampler.track_modes or len(state.reference.location):
            state = jax.lax.cond(
                state.num_steps % (max(1, self.sampler.num_live // batch // 2)) == 0,
                partial(self._with_modes, densities),
                lambda _, state: state,
                mode_key,
                state,
            )
        log_left = remaining(state, slice(1))[0]
        return state, Shrinkage(
            ranks,
            jax.nn.logsumexp(state.volumes.log_volume[:, 0]),
            jnp.logaddexp(state.volumes.log_evidence[0], log_left),
            lost.log_likelihood.max(),
            state.num_modes,
            halfway,
            born.num_evaluations,
            born.num_nan,
        )

    def _birth_modes(self, rng_key: Array, state: Nest, death: Death) -> Array:
        """[batch]: the mode of each birth, in rising order.

        In time a mode has points in proportion to the fourth root of its volume, because a small
        mode may be what counts in the end. A mode that can add no evidence gets no births.
        """
        survivors, sampler, dtype = death.count - death.dying, self.sampler, state.live.z.dtype
        highest = jnp.full(len(survivors), -jnp.inf, dtype)
        highest = highest.at[state.mode].max(state.live.log_likelihood)
        negligible = state.volumes.log_evidence[0] + np.log(0.1 * sampler.tolerance)
        is_open = survivors > 0
        counts = is_open & (state.volumes.log_volume[:, 0] + highest > negligible)
        is_open = jnp.where(counts.any(), counts, is_open)
        log_volume = jnp.where(is_open, state.volumes.log_volume[:, 0], -jnp.inf)
        wanted = sampler.num_live * jax.nn.softmax(log_volume * 0.25)
        missing = jnp.maximum(wanted - survivors.astype(wanted.dtype), 0)
        grid = jnp.arange(sampler.batch) + random.uniform(rng_key, dtype=wanted.dtype)
        places = grid / sampler.batch * missing.sum()
        return jnp.searchsorted(jnp.cumsum(missing), places, side="right").astype(state.mode.dtype)

    def _births(
        self,
        rng_key: Array,
        state: Nest,
        death: Death,
        mode: Array,
        parent: Array,
        densities: Callable,
    ) -> tuple[Walk, Array, Array]:
        """The births after their walks, their insertion ranks, and how far walks were halfway."""
        walk_key, rank_key = random.split(rng_key)
        limit = limit_of(state, death, mode)
        own = jnp.argsort(death.order)[parent] - death.first[mode]
        start = jax.tree.map(lambda leaf: leaf[parent], state.live)
        deviation = deviations_by_mode(state.live.z, state.mode, len(death.count))[mode]
        turn = partial(
            direction,
            points=state.live.z[death.order],
            first=death.first[mode],
            count=death.count[mode],
            own=own,
            deviation=deviation,
        )
        num_steps = self._num_steps(state)
        offers = state.offers.z, state.offers.num_used, self._num_offers(state)
        born = walk(walk_key, densities, start, limit, turn, num_steps, 4.0, *offers)
        scale = jnp.maximum(deviation, jnp.finfo(deviation.dtype).tiny)
        distance = lambda z: jnp.mean(((z - start.z) / scale) ** 2)
        rank = insertion_rank(rank_key, state.live, state.mode, death, born.at, mode)
        return born, rank, distance(born.halfway) / distance(born.at.z)

    def _with_modes(self, densities: Callable, rng_key: Array, state: Nest) -> Nest:
        """The state after exchangeable members are relabelled, and then modes split."""
        live, offers = state.live, state.offers
        if self.exchange is not None and len(state.reference.location):
            both = jnp.concatenate([live.z, offers.z])
            both = relabel(self.exchange, both, state.reference)
            z, offer = both[: len(live.z)], both[len(live.z) :]
            # the prior of the unconstrained numbers, whose Jacobian depends on the labels
            log_prior = jax.vmap(lambda z: densities(z)[0])(z)
            state = state._replace(
                live=live._replace(z=z, log_prior=log_prior),
                offers=offers._replace(z=offer),
                reference=self.exchange.reference(z),
            )
        if not self.sampler.track_modes:
            return state
        mode, origin, num_modes = split_modes(
            state.live.z,
            state.mode,
            covariance_roots(state.live.z, state.mode, len(state.volumes.log_volume)),
            state.num_modes,
            self._least,
        )
        volumes = share_volumes(rng_key, state.volumes, mode, origin, state.ancestor[-1])
        own = jnp.arange(self.sampler.num_live, dtype=jnp.int32)[None]
        return state._replace(
            mode=mode,
            num_modes=num_modes,
            volumes=volumes,
            ancestor=jnp.concatenate([own, state.ancestor[:-1]]),
        )

    def _num_steps(self, state: Nest) -> Array:
        first = max(1.0, self.sampler.num_sweeps * self.split.size)
        return jnp.round(first * jnp.exp(state.longer)).astype(jnp.int32)

    # Offers.

    def draws(
        self, rng_key: Array, num_draws: int, drawing: Callable, given: Any
    ) -> Float[Array, "draw size"]:
        """Draws by `drawing(given)`, in blocks that share one compiled program."""
        numbers = range(-(-num_draws // BLOCK))
        parts = [_block(drawing, random.fold_in(rng_key, number), given) for number in numbers]
        return jnp.concatenate(parts)[:num_draws]

    def _offers(self, rng_key: Array, drawing: Callable, given: Any) -> Offers:
        own_key, next_key = random.split(rng_key)
        return Offers(
            self.draws(own_key, max(BLOCK, 10 * self.sampler.num_live), drawing, given),
            jnp.zeros((), jnp.int32),
            jnp.zeros((), bool),
            random.key_data(next_key),
        )

    def used(self, state: Nest, count: Array) -> Offers:
        """The offers after births have used `count` more; they are worn once half are used."""
        num_used = state.offers.num_used + count
        return state.offers._replace(
            num_used=num_used,
            are_worn=(2 * num_used > len(state.offers.z)) & (self._num_offers(state) > 0),
        )

    def _num_offers(self, state: Nest) -> Array:
        """How many offers a birth gets before it walks.

        Offers are made while they lie above the limit more often than once in the steps of a walk.
        With several modes there are none, because the mode of a draw would not be known. All
        offers of a birth fail with probability e^-4 at most.
        """
        num_steps = self._num_steps(state)
        is_cheap = state.volumes.log_volume[0, 0] > -jnp.log(num_steps.astype(state.live.z.dtype))
        return jnp.where((state.num_modes == 1) & is_cheap, 4 * num_steps, 0)

    # The host.

    def on_host(self, states: Sequence[Nest], drawing: Callable, given: Sequence) -> list[Nest]:
        """New offers where they are worn; if none are, twice the room for all dead points.

        Args:
            states: of the replicates, of which one needs the host.
            drawing: what the samplers start from.
            given: the arrays of `drawing`, of each replicate.
        """
        if any(state.offers.are_worn for state in states):
            return [
                self._with_offers(state, drawing, arrays) if state.offers.are_worn else state
                for state, arrays in zip(states, given, strict=True)
            ]
        return [self._with_more_room(state) for state in states]

    def _with_offers(self, state: Nest, drawing: Callable, given: Any) -> Nest:
        offers = self._offers(random.wrap_key_data(state.offers.rng_key), drawing, given)
        z = relabel(self.exchange, offers.z, state.reference)
        return state._replace(offers=offers._replace(z=z))

    def _with_more_room(self, state: Nest, most_folds: int = 1500) -> Nest:
        folds = 2 * len(state.dead.mode) // self.sampler.num_live
        if folds > most_folds:
            raise StructureError(
                f"sites {list(self.split.program.observed)}: after {folds // 2} e-folds of prior "
                "volume the likelihood still rises, to "
                f"{float(state.live.log_likelihood.max()):.4g}; wanted one with a bound. Look for "
                "a scale that may shrink to 0, or data that are far from all that is likely under "
                "the prior."
            )
        return state._replace(dead=with_room(state.dead, folds * self.sampler.num_live))

    def points(self, state: Nest) -> tuple[Float[Array, "point size"], Float[Array, " point"]]:
        """All points, relabelled alike, and their log weights."""
        z, log_weight, _, _ = all_points(state)
        return relabel(self.exchange, z, state.reference), log_weight


# takes a third of the time to compile, and 4 times as long to run
@partial(jax.jit, static_argnums=0, compiler_options=QUICKLY)
def _block(drawing: Callable, rng_key: Array, given: Any) -> Array:
    return jax.vmap(drawing(given))(random.split(rng_key, BLOCK))


def limit_of(state: Nest, death: Death, mode: Int[Array, " birth"]) -> Limit:
    """The last point that died, which is the limit of births in every mode."""
    last = death.chosen[-1]
    return Limit(state.live.log_likelihood[last], state.live.label[last])


def lengthened(
    longer: Array, halfway: Array, memory: float, pace: float = 0.1, longest: float = 30.0
) -> Array:
    """The log length of walks, adapted to the correlation that they keep with their starts.

    With a correlation c left after all steps, the mean square distance after half of the steps is
    1 / (1 + sqrt(c)) of that after all.

    Args:
        longer: log of the length so far, relative to the first one.
        halfway: the ratio of the mean square distances.
        memory: the correlation that is aimed at.
        pace: how fast the length is adapted.
        longest: the largest relative length.
    """
    kept = jnp.clip(1 / halfway - 1, 0, 1)
    return jnp.clip(longer + pace * (kept - np.sqrt(memory)), 0, np.log(longest))
