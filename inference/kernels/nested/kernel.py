"""Nested sampling of any model with continuous latent sites.

    evidence  =  sum over dead points of  likelihood x (prior volume of the point's shell)

`num_live` points are drawn from the prior. A step removes the lowest of them, a batch at a time. In
their place come copies of surviving points (`state`), each of which walks by slice sampling
through the prior above the likelihood of the last point that died (`inference.maths.slice_walk`).
Independent draws from the prior replace the copies as long as they cost fewer
evaluations than a walk. Twice in an e-fold of prior volume the sampler looks for separate modes
(`state`); each has points and a volume of its own from then on, also one of which there is a single
point, if the likelihood proves it separate. Modes that are copies of each other
by label switching are one, because live points are relabelled (`inference.reading.density`). Prior
volumes are simulated (`state`), and the spread of the simulated evidences is the error of the
log-evidence.

Prior and likelihood are read off the model and proved (`inference.reading.density`). A likelihood
that is constant, or has plateaus, is fine: points of equal likelihood are ordered by a random
label. Numbers have JAX's default precision. In float32 the errors are as good, but a log-likelihood
of 1e5 is rounded to about .01: use `jax.enable_x64(True)` for many rows.

While the limit is low, independent draws from what the sampler starts from are cheaper than walks
and have no memory. The host makes such *offers*, many at a time: inside a step, code that draws
from a Dirichlet would take as long to compile as half of the rest.

Cost: evaluations of the model = num_live x (information in nats + 5) x steps of a walk x about 2,
and num_live^2 x size for each e-fold.

Skilling (2006); Feroz, Hobson and Bridges (2009) for modes; Center (2009), "Learning complex
classification models from large data sets".
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import random
from jaxtyping import Bool, Float, Int

from inference.kernels.nested.state import (
    Dead,
    Death,
    Nest,
    Offers,
    all_points,
    covariance_roots,
    evidence,
    information_of,
    initial_state,
    insertion_rank,
    lowest,
    parents_of,
    particles,
    remaining,
    search_modes,
    share_volumes,
    shrink_volumes,
    with_lost,
    with_room,
)
from inference.maths.host import Array, generator, key_data
from inference.maths.resampling import resampled
from inference.maths.slice_walk import (
    Limit,
    Particles,
    Walk,
    deviations_by_mode,
    direction,
    means_by_mode,
    walk,
)
from inference.program.interpreting import interpreted
from inference.program.program import Program
from inference.program.sites import (
    StructureError,
    check_setting,
    check_whole,
    is_between,
    is_number,
    is_whole,
)
from inference.reading.density import (
    BLOCK,
    NO_REFERENCE,
    Exchangeable,
    Split,
    exchangeable,
    relabel,
    site_values,
)
from inference.run.command import Command
from inference.run.protocol import Algorithm, Results

__all__ = ["NestedSampler", "Nesting", "Shrinkage", "lengthened", "limit_of"]

BETWEEN = 8  # points on the way from a component to another
FIRST_FOLDS = 96  # e-folds of volume that there is room for at the start


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


@dataclass(frozen=True)
class Nesting:
    """What was read of a model, and the steps of a nested sampler on it.

    A sampler starts from draws by a function on the host: `drawing(rng, num_draws, given)`, for
    arrays `given`, returns vectors [draw, size].
    """

    sampler: "NestedSampler"  # has the settings
    split: Split
    exchange: Exchangeable | None  # None where no members are relabelled

    @classmethod
    def of(cls, sampler: "NestedSampler", program: Program) -> "Nesting":
        """Reads a program and proves the reading."""
        split = Split(program)
        program.check()
        split.prove()
        return cls(sampler, split, exchangeable(split) if sampler.rename else None)

    def from_prior(
        self, rng: np.random.Generator, num_draws: int, given: None
    ) -> Float[np.ndarray, "draw size"]:
        """The `drawing` of a sampler that starts from the prior."""
        return self.split.draws(rng, num_draws)

    # The start.

    def started(
        self,
        rng_key: Any,
        drawing: Callable,
        given: Any,
        densities: Callable,
        is_exchangeable: bool = True,
    ) -> Nest:
        """The state at the start: live points that are the first draws.

        Args:
            rng_key: a JAX key, or a generator of NumPy.
            drawing: what the sampler starts from.
            given: the arrays of `drawing`.
            densities: a function of vectors [point, size] that returns their log priors and log
                likelihoods.
            is_exchangeable: whether members that may change places in the model are exchangeable
                in the draws as well, so that live points need to be relabelled.
        """
        rng, num_live = generator(rng_key), self.sampler.num_live
        # some more than live points, since some may be infinite
        offers, taken = self._offers(rng, drawing, given), int(1.1 * num_live) + 1
        drawn = offers.z[:taken]
        z = drawn[np.argsort(~np.isfinite(drawn).all(1), kind="stable")[:num_live]]
        log_prior, log_likelihood = densities(z)
        self.split.check_start(z, log_likelihood)
        relabels = self.exchange is not None and is_exchangeable
        reference = self.exchange.first_reference(z) if relabels else NO_REFERENCE
        # no more modes than these are split off: they would have few points each
        num_modes = max(1, 2 * num_live // self._least) if self.sampler.track_modes else 1
        label = rng.random(num_live).astype(z.dtype)
        offers = offers._replace(
            z=relabel(self.exchange, offers.z, reference), num_used=np.asarray(taken, np.int32)
        )
        live = Particles(z, log_prior, log_likelihood, label)
        return initial_state(live, offers, reference, num_modes, FIRST_FOLDS * num_live)

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
        number_key, walk_key, mode_key = random.split(rng_key, 3)
        of_volumes, of_modes, of_parents, of_ranks = self._numbers(number_key, state)
        death = lowest(
            state.live,
            state.mode,
            jnp.zeros(len(state.volumes.log_volume), jnp.int32).at[state.mode].add(1),
            batch,
        )
        lost = jax.tree.map(lambda leaf: leaf[death.chosen], state.live)
        lost_mode = state.mode[death.chosen]
        places = lost_mode, death.rank, death.count[lost_mode]
        shell, volumes = shrink_volumes(of_volumes, state.volumes, lost.log_likelihood, *places)
        dead = Dead(lost.z, lost.log_likelihood, shell, lost_mode)
        put = lambda room, new: jax.lax.dynamic_update_slice_in_dim(room, new, state.num_dead, 0)
        mode = self._birth_modes(of_modes, state._replace(volumes=volumes), death)
        parent = parents_of(of_parents, state.live.z, state.mode, death, mode)
        born, halfway = self._births(walk_key, state, death, mode, parent, densities)
        ranks = insertion_rank(of_ranks, state.live, state.mode, death, born.at, mode)
        state = state._replace(
            live=jax.tree.map(lambda old, new: old.at[death.chosen].set(new), state.live, born.at),
            mode=state.mode.at[death.chosen].set(mode),
            ancestor=state.ancestor.at[:, death.chosen].set(state.ancestor[:, parent]),
            volumes=volumes,
            dead=jax.tree.map(put, state.dead, dead),
            num_dead=state.num_dead + batch,
            num_steps=state.num_steps + 1,
            num_evaluations=state.num_evaluations + born.num_evaluations,
            lost=with_lost(state.lost, state.live, death, self._dies_out(state, death)),
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

    def _numbers(self, rng_key: Array, state: Nest) -> list[Array]:
        """Uniform numbers of a step, all at once, since each call takes long to compile.

        They are for the shrinking volumes, the modes of births, their parents and their ranks.
        """
        num_modes, num_columns = state.volumes.log_volume.shape
        batch, dtype = self.sampler.batch, state.live.z.dtype
        shapes = [(batch, num_columns - 1), (), (num_modes,), (batch,)]
        ends = np.cumsum([int(np.prod(shape)) for shape in shapes])
        uniform = random.uniform(rng_key, (int(ends[-1]),), dtype, minval=jnp.finfo(dtype).tiny)
        parts = jnp.split(uniform, ends[:-1])
        return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]

    def _birth_modes(self, uniform: Array, state: Nest, death: Death) -> Array:
        """[batch]: the mode of each birth, in rising order.

        In time a mode has points in proportion to the fourth root of its volume, because a small
        mode may be what counts in the end. A mode that can add no evidence gets no births.
        """
        survivors, sampler = death.count - death.dying, self.sampler
        is_open = survivors > 0
        counts = is_open & self._count(state)
        is_open = jnp.where(counts.any(), counts, is_open)
        log_volume = jnp.where(is_open, state.volumes.log_volume[:, 0], -jnp.inf)
        wanted = sampler.num_live * jax.nn.softmax(log_volume * 0.25)
        missing = jnp.maximum(wanted - survivors.astype(wanted.dtype), 0)
        places = (jnp.arange(sampler.batch) + uniform) / sampler.batch * missing.sum()
        return jnp.sum(jnp.cumsum(missing) <= places[:, None], 1, dtype=state.mode.dtype)

    def _count(self, state: Nest) -> Bool[Array, " mode"]:
        """Which modes may still add to the evidence."""
        log_volume = state.volumes.log_volume[:, 0]
        highest = jnp.full(len(log_volume), -jnp.inf, state.live.z.dtype)
        highest = highest.at[state.mode].max(state.live.log_likelihood)
        negligible = state.volumes.log_evidence[0] + np.log(0.1 * self.sampler.tolerance)
        return log_volume + highest > negligible

    def _dies_out(self, state: Nest, death: Death) -> Bool[Array, " mode"]:
        """Modes that counted, and of which no point survives."""
        return (death.count > 0) & (death.count == death.dying) & self._count(state)

    def _births(
        self,
        rng_key: Array,
        state: Nest,
        death: Death,
        mode: Int[Array, " birth"],
        parent: Int[Array, " birth"],
        densities: Callable,
    ) -> tuple[Walk, Float[Array, ""]]:
        """The births after their walks, and how far walks were halfway."""
        limit = limit_of(state, death, mode)
        own = jnp.argsort(death.order)[parent] - death.first[mode]
        start = jax.tree.map(lambda leaf: leaf[parent], state.live)
        deviation = _deviations(state, death.count)[mode]
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
        born = walk(rng_key, densities, start, limit, turn, num_steps, 4.0, *offers)
        scale = jnp.maximum(deviation, jnp.finfo(deviation.dtype).tiny)
        distance = lambda z: jnp.mean(((z - start.z) / scale) ** 2)
        return born, distance(born.halfway) / distance(born.at.z)

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
        live, most = state.live, len(state.volumes.log_volume)
        found = search_modes(
            live,
            state.mode,
            covariance_roots(live.z, state.mode, most),
            state.num_modes,
            self._least,
            state.dead.log_likelihood[state.num_dead - 1],
            state.lost,
            partial(_are_apart, densities),
        )
        own = jnp.arange(self.sampler.num_live, dtype=jnp.int32)[None]
        return state._replace(
            mode=found.mode,
            num_modes=found.num_modes,
            lost=found.lost,
            num_evaluations=state.num_evaluations + found.num_evaluations,
            volumes=share_volumes(
                rng_key, state.volumes, state.mode, found.mode, state.ancestor[-1]
            ),
            ancestor=jnp.concatenate([own, state.ancestor[:-1]]),
        )

    def _num_steps(self, state: Nest) -> Array:
        first = max(1.0, self.sampler.num_sweeps * self.split.size)
        return jnp.round(first * jnp.exp(state.longer)).astype(jnp.int32)

    # Offers.

    def _offers(self, rng_key: Any, drawing: Callable, given: Any) -> Offers:
        rng = generator(rng_key)
        z = drawing(rng, max(BLOCK, 10 * self.sampler.num_live), given)
        return Offers(z, np.zeros((), np.int32), np.zeros((), bool), key_data(rng))

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
        offers = self._offers(state.offers.rng_key, drawing, given)
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

    def points(
        self, state: Nest
    ) -> tuple[Float[np.ndarray, "point size"], Float[np.ndarray, " point"]]:
        """All points, relabelled alike, and their log weights."""
        z, log_weight, _, _ = all_points(state)
        return relabel(self.exchange, z, state.reference), log_weight


def _are_apart(
    densities: Callable,
    limit: Float[Array, " trial"],
    here: Float[Array, "trial size"],
    there: Float[Array, "trial end size"],
    is_open: Bool[Array, " trial"],
) -> tuple[Bool[Array, " trial"], Array]:
    """Whether the likelihood falls below the limit on the straight way to each of the ends.

    Ways are tried until there is one on which it does not. Also returned are the evaluations.
    """
    part = jnp.arange(1, BETWEEN + 1, dtype=here.dtype)[:, None] / (BETWEEN + 1)

    def one_way(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        number, is_open, evaluations = state
        between = here[:, None] + part * (there[:, number] - here)[:, None]
        _, log_likelihood = jax.vmap(jax.vmap(densities))(between)
        falls = jnp.any(~(log_likelihood >= limit[:, None]), axis=1)
        evaluations += BETWEEN * jnp.sum(is_open, dtype=jnp.int32)
        return number + 1, is_open & falls, evaluations

    goes_on = lambda state: (state[0] < there.shape[1]) & jnp.any(state[1])
    zero = jnp.zeros((), jnp.int32)
    return jax.lax.while_loop(goes_on, one_way, (zero, is_open, zero))[1:]


def _deviations(state: Nest, count: Int[Array, " mode"]) -> Float[Array, "mode size"]:
    """The standard deviations of modes; for a mode of few points, what keeps walks in it.

    That is a quarter of the way to the nearest point of another mode: intervals of slice sampling
    are four deviations wide, and shrink to a mode that is narrower.
    """
    z, mode = state.live.z, state.mode
    one_mode = jnp.zeros_like(mode)
    whole = jnp.maximum(deviations_by_mode(z, one_mode, 1), jnp.finfo(z.dtype).tiny)
    mean = means_by_mode(z, mode, len(count)) / whole
    square = jnp.sum((mean[:, None] - (z / whole)[None]) ** 2, -1)
    is_other = mode[None] != jnp.arange(len(count))[:, None]
    nearest = jnp.sqrt(jnp.min(jnp.where(is_other, square, jnp.inf), 1))[:, None]
    is_few = (count <= z.shape[1])[:, None]
    near = whole * jnp.minimum(nearest / 4, 1)
    return jnp.where(is_few, near, deviations_by_mode(z, mode, len(count)))


def limit_of(state: Nest, death: Death, mode: Int[Array, " birth"]) -> Limit:
    """The last point that died, which is the limit of births in every mode."""
    last = death.chosen[-1]
    return Limit(state.live.log_likelihood[last], state.live.label[last])


def lengthened(
    longer: Float[Array, ""],
    halfway: Float[Array, ""],
    memory: float,
    pace: float = 0.1,
    longest: float = 30.0,
) -> Float[Array, ""]:
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


class NestedSampler(Algorithm):
    """Nested sampling of `model`.

    Args:
        model: a NumPyro model whose latent sites are continuous and have proper priors.
        num_live: live points; the error of the log-evidence is about sqrt(information / num_live).
        batch: points that are replaced in a step; None: a tenth of the live points.
        num_sweeps: sweeps of the coordinates in a walk, at first and at least.
        memory: the correlation with its start that a walk may keep; while walks keep more they
            become longer. 1: they stay as they are. (The check "walks" of `diagnostics.report`
            finds walks that keep much more.)
        tolerance: the run ends when the live points hold less than this share of the evidence.
        track_modes: whether separate modes get points and volumes of their own. Without, a mode
            of less than the volume of a few points is lost.
        rename: whether exchangeable members of a plate (`inference.reading.density`), such as the
            clusters of a mixture, are relabelled, so that modes which are copies of each other by
            label switching are one.
    """

    report = "nested"
    draws_at_end = True
    command = Command({"num_live": 100, "num_sweeps": 2.0}, {"num_warmup": None, "num_chains": 2})

    def __init__(
        self,
        model: Any,
        *,
        num_live: int = 500,
        batch: int | None = None,
        num_sweeps: float = 3.0,
        memory: float = 0.25,
        tolerance: float = 0.01,
        track_modes: bool = True,
        rename: bool = True,
    ):
        check_whole(20, num_live=num_live)
        batch = max(1, num_live // 10) if batch is None else batch
        check_setting(
            is_whole(batch) and 1 <= batch <= num_live // 2,
            f"an integer from 1 to num_live / 2 = {num_live // 2}",
            batch=batch,
        )
        check_setting(is_between(num_sweeps, 0, np.inf), "a number above 0", num_sweeps=num_sweeps)
        check_setting(
            is_number(memory) and 0 < memory <= 1, "a number above 0, up to 1", memory=memory
        )
        check_setting(is_between(tolerance, 0, 1), "a number between 0 and 1", tolerance=tolerance)
        self.model, self.num_live, self.batch = model, int(num_live), int(batch)
        self.num_sweeps, self.memory, self.tolerance = num_sweeps, memory, tolerance
        self.track_modes, self.rename = track_modes, rename

    def read(self, program: Program) -> tuple[Nesting, dict[str, Array]]:
        """Prior and likelihood, proved, and the arrays among the arguments of the model.

        Where the model needs to know their values, the arrays stay constants of the program, and
        none is returned.
        """
        reading = Nesting.of(self, program)
        split = reading.split
        arrays = {
            # a view: JAX gives the very same array the type that it had before `jax_enable_x64`
            name: jnp.asarray(value.view() if isinstance(value, np.ndarray) else value)
            for name, value in program.arguments.items()
            if isinstance(value, np.ndarray | jax.Array)
        }
        densities = lambda data: split.densities(
            jnp.zeros(split.size), program.with_arguments(**data)
        )
        try:
            jax.eval_shape(densities, arrays)
        except jax.errors.JAXTypeError:  # the model needs the value of an array
            return reading, {}
        return reading, arrays

    def init(self, rng_key: Array, reading: Nesting, data: dict[str, Array]) -> Nest:
        """Live points that are draws from the prior."""
        densities = jax.vmap(reading.split.densities)
        return reading.started(
            rng_key, reading.from_prior, None, lambda z: interpreted(densities, z)(z)
        )

    def step(
        self, rng_key: Array, state: Nest, reading: Nesting, data: dict[str, Array]
    ) -> tuple[Nest, Shrinkage]:
        """One batch of deaths and births; twice in an e-fold a search for modes."""
        program = reading.split.program.with_arguments(**data)
        return reading.shrunk(rng_key, state, lambda z: reading.split.densities(z, program))

    def finished(self, state: Nest) -> Array:
        """Whether the live points hold less than the tolerated share of the evidence."""
        log_left = remaining(state, slice(1))[0]
        return log_left < state.volumes.log_evidence[0] + np.log(self.tolerance)

    def needs_host(self, state: Nest) -> Array:
        """Whether new offers are wanted, or room for dead points."""
        is_full = state.num_dead + self.batch > len(state.dead.mode)
        return state.offers.are_worn | is_full

    def on_host(
        self, states: Sequence[Nest], reading: Nesting, data: dict[str, Array]
    ) -> Sequence[Nest]:
        """New offers where they are worn; else more room for dead points in all replicates."""
        nests = [jax.device_get(state) for state in states]
        return reading.on_host(nests, reading.from_prior, [None] * len(states))

    def draw(
        self, rng_key: Array, state: Nest, reading: Nesting, data: dict[str, Array], num_draws: int
    ) -> dict[str, Array]:
        """Points in proportion to their weights, by systematic resampling, in random order."""
        z, log_weight, _, _ = all_points(state)
        rng = generator(rng_key)
        chosen = z[resampled(rng, log_weight, num_draws)]
        return site_values(rng, reading.split, reading.exchange, chosen)

    def results(self, state: Nest, reading: Nesting, data: dict[str, Array]) -> Results:
        """The evidence, and all points with their weights.

        `ess` is the effective sample size of the weights; the draws, which repeat points, are worth
        no more.
        """
        state = jax.device_get(state)
        z, log_weight, log_likelihood, mode = all_points(state)
        log_evidence, error = evidence(state)
        share = np.exp(log_weight - np.logaddexp.reduce(log_weight))
        attrs = {
            "log_evidence": log_evidence,
            "log_evidence_se": error,
            "ess": 1 / np.sum(share**2),
            "information": information_of(state),
            "num_live": self.num_live,
            "num_modes": state.num_modes,
            "num_lost_modes": state.lost.num_others + np.sum(state.lost.is_lost),
            "num_evaluations": state.num_evaluations,
        }
        found = particles(
            site_values(np.random.default_rng(0), reading.split, reading.exchange, z),
            log_weight=log_weight,
            log_likelihood=log_likelihood,
            mode=mode,
        )
        return found._replace(attrs=attrs)
