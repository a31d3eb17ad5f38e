"""Nested sampling for any model with continuous latent sites.

    evidence  =  sum over dead points of  likelihood x (prior volume that it stands for)

`num_live` points are drawn from the prior. A step takes the lowest, a batch of them. In their place come copies of points that are left
(`_nested_lineage`), each of which walks through the prior above the likelihood of the last that died (`_nested_moves`,
`_nested_directions`); or draws from the prior (`_nested_offers`), as long as these reach above it in fewer evaluations than a walk has
steps. Twice in an e-fold of volume the modes are looked at (`_nested_modes`): what has come apart has points and an account of its volume
of its own from then on. Modes that are copies of each other, for members of a plate have no names, are one (`_nested_names`). Volumes are
simulated (`_nested_volumes`), and the spread of the histories is the error of the log-evidence.

Prior and likelihood are read off the model and proved (`inference.split`): edit the model, and the sampler follows or refuses. Likelihoods
that are constant, or flat in places, are no trouble: points of equal likelihood are ordered by a random label. Numbers are of JAX's default
float. In float32 claimed errors are as good; but log-likelihoods of 1e5 are rounded to some .01: `jax.enable_x64(True)` for many rows.

Cost: evaluations of the model = num_live x (information in nats + 5) x steps of a walk x about 2; each e-fold num_live^2 x size on top.

Skilling (2006); Feroz, Hobson and Bridges (2009) for modes; Center (2009), "Learning complex classification models from large data sets".
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from jax.scipy.special import logsumexp

from inference._counts import is_between, is_number, is_whole
from inference.compiling import once
from inference.exchangeable import NO_REFERENCE, Exchangeable, exchangeable
from inference.kernels._nested_curve import curve, reach
from inference.kernels._nested_directions import Around, centre_of, direction, spread_of
from inference.kernels._nested_lineage import Death, insertion_rank, lowest, parents_of
from inference.kernels._nested_modes import parts_of, roots_of
from inference.kernels._nested_moves import STRAIGHT, Ended, Limit, Points, walk
from inference.kernels._nested_names import renamed, shown, together
from inference.kernels._nested_offers import Offering
from inference.kernels._nested_state import Dead, Nest, Offers, begun_with, information_of, particles, points_of, with_room
from inference.kernels._nested_volumes import evidence, remaining, shared, shrunk
from inference.kernels._resampling import resampled
from inference.program import Program
from inference.protocol import Results
from inference.sites import StructureError
from inference.split import Split

__all__ = ["Dead", "Death", "Nest", "NestedSampler", "Shrinkage"]

WIDTH = 4.0  # of the interval of a walk, in standard deviations of a mode
FIRST_FOLDS, MOST_FOLDS = 96, 1500  # e-folds of volume: room to begin with, and where a run is given up
SHARING = 0.25  # power of its volume with which a mode gets points
LOOKS = 2  # at the modes, in an e-fold
SPARE = 1.1  # draws from the prior for each live point
PACE, LONGEST = 0.1, 30.0  # how fast walks grow with what they remember; how many times `num_sweeps` they come to be at most


class Shrinkage(NamedTuple):
    """What a step reports."""

    insertion_rank: Array  # [batch]: where new points came to lie among those of their mode, as if it had all live points
    log_volume: Array
    log_evidence: Array
    log_likelihood: Array  # the highest that died
    num_modes: Array
    halfway: Array  # of walks: squared distance from their origins after half of the steps, over that after all
    evaluations: Array
    num_nan: Array  # of them whose likelihood is NaN, which counts as 0


class NestedSampler(Offering):
    """Nested sampling of `model`.

    :param model: a NumPyro model whose latent sites are continuous and have proper priors.
    :param num_live: live points; the error of the log-evidence is about sqrt(information / num_live).
    :param batch: points that are replaced in a step; None: a tenth of the live points.
    :param num_sweeps: sweeps of a walk at first, and at least, each of as many steps as there are latent numbers.
    :param memory: the correlation with its origin that a walk may keep: as long as walks keep more they grow. 1: they do not grow.
        (The check "walks" of `diagnostics.report` tells of walks that keep much more.)
    :param along_curve: steps of a walk along a Hilbert curve through its mode, before the straight ones and as a share of them. 0: none.
    :param tolerance: ends when the live points hold less than this share of the evidence.
    :param track_modes: whether modes that come apart become runs of their own.
    :param rename: whether members of a plate that may change places (`inference.exchangeable`), such as the clusters of a mixture, are put
        in the places of those of other points, so that modes which are copies of each other are one.
    """

    def __init__(
        self,
        model: Any,
        *,
        num_live: int = 500,
        batch: int | None = None,
        num_sweeps: float = 3.0,
        memory: float = 0.25,
        along_curve: float = 0.0,
        tolerance: float = 0.01,
        track_modes: bool = True,
        rename: bool = True,
    ):
        if not is_whole(num_live) or num_live < 20:
            raise ValueError(f"num_live: found {num_live!r}, wanted an integer, at least 20.")
        batch = max(1, num_live // 10) if batch is None else batch
        if not is_whole(batch) or not 1 <= batch <= num_live // 2:
            raise ValueError(f"batch: found {batch!r}, wanted an integer from 1 to num_live / 2 = {num_live // 2}.")
        if not is_between(num_sweeps, 0, np.inf):
            raise ValueError(f"num_sweeps: found {num_sweeps!r}, wanted a number above 0.")
        if not is_number(memory) or not 0 < memory <= 1:
            raise ValueError(f"memory: found {memory!r}, wanted a number above 0, up to 1.")
        if not is_number(along_curve) or not 0 <= along_curve < np.inf:
            raise ValueError(f"along_curve: found {along_curve!r}, wanted a number, 0 or more.")
        if not is_between(tolerance, 0, 1):
            raise ValueError(f"tolerance: found {tolerance!r}, wanted a number between 0 and 1.")
        self.model, self.num_live, self.batch, self.num_sweeps = model, int(num_live), int(batch), num_sweeps
        self.memory, self.along_curve, self.tolerance = memory, along_curve, tolerance
        self.track_modes, self.rename = track_modes, rename

    def check(self, program: Program) -> None:
        """The model is read, and the reading proved."""
        split = Split(program)
        program.check()
        split.prove()

    def init(self, rng_key: Array, program: Program) -> Nest:
        """Draws from the prior."""
        self._read(program)
        return self._started(rng_key, None, self.split.densities)

    def _read(self, program: Program) -> None:
        if getattr(self, "split", None) is not None and self.split.program is program:
            return  # another replicate of the same run
        self.split = Split(program)
        self.exchange: Exchangeable | None = exchangeable(self.split) if self.rename else None

    def _started(self, rng_key: Array, given: Any, densities: Callable, is_even: bool = True) -> Nest:
        """Live points, the first of what is drawn from what is given, and nothing dead. `is_even`: members that may change places in the
        model may do so in what is drawn as well."""
        draw_key, label_key = random.split(rng_key)
        offers, taken = self._offers(draw_key, self.split, given), int(SPARE * self.num_live) + 1
        drawn = np.asarray(offers.z[:taken])
        z = jnp.asarray(drawn[np.isfinite(drawn).all(1)][: self.num_live])
        offers = offers._replace(num_used=offers.num_used + taken)
        log_prior, log_likelihood = once(jax.vmap(densities), z)(z)
        self._check_start(np.asarray(log_likelihood), self.num_live)
        reference = self.exchange.first_reference if self.exchange and is_even else lambda z: NO_REFERENCE
        num_modes = max(1, 2 * self.num_live // self._least) if self.track_modes else 1  # a mode that finds no place is left whole

        def begun(label_key: Array, z: Array, log_prior: Array, log_likelihood: Array, offers: Offers) -> Nest:
            live = Points(z, log_prior, log_likelihood, random.uniform(label_key, (self.num_live,), z.dtype))
            return begun_with(live, offers, reference(z), num_modes, FIRST_FOLDS * self.num_live)

        found = (label_key, z, log_prior, log_likelihood, offers)
        nest = once(begun, *found)(*found)
        return nest._replace(offers=offers._replace(z=together(self.exchange, offers.z, nest.reference)))

    def data(self, program: Program) -> dict[str, Array] | None:
        """The arrays among the model's arguments, unless the model must look at them."""
        arrays = {name: jnp.asarray(value) for name, value in program.arguments.items() if isinstance(value, np.ndarray | Array)}
        try:
            jax.eval_shape(lambda data: self.split.densities(jnp.zeros(self.split.size), program.with_arguments(**data)), arrays)
        except jax.errors.JAXTypeError:  # a number was needed
            return None
        return arrays or None

    @property
    def _least(self) -> int:
        """Points of the smallest part that is a mode of its own."""
        return max(10, 2 * self.split.size)

    def _check_start(self, log_likelihood: np.ndarray, wanted: int) -> None:
        sites = " and ".join(map(repr, self.split.program.observed)) or "none observed"
        count = len(log_likelihood)
        if count < wanted:
            raise ValueError(f"{count} of {wanted} draws from the prior are finite; look for a prior that is too wide for its dtype.")
        if np.isnan(log_likelihood).any() or np.isposinf(log_likelihood).any():
            what = "NaN" if np.isnan(log_likelihood).any() else "infinite"
            raise ValueError(f"site {sites}: its likelihood is {what} at some of {count} draws from the prior; wanted a number.")
        if not np.isfinite(log_likelihood).any():
            raise ValueError(
                f"site {sites}: its likelihood is 0 at all of {count} draws from the prior; wanted a prior that reaches the data."
            )

    def step(self, rng_key: Array, state: Nest, program: Any) -> tuple[Nest, Shrinkage]:
        """One batch of deaths and births; twice in an e-fold a look at the modes."""
        return self._shrunk(rng_key, state, lambda z: self.split.densities(z, self._program(program)))

    def _program(self, data: Any) -> Program:
        """What a step is given, as a program."""
        return data if isinstance(data, Program) else self.split.program.with_arguments(**data)

    def _shrunk(self, rng_key: Array, state: Nest, densities: Callable) -> tuple[Nest, Shrinkage]:
        volume_key, birth_key, mode_key = random.split(rng_key, 3)
        death = lowest(state.live, state.mode, self._count(state), self.batch)
        lost = jax.tree.map(lambda leaf: leaf[death.chosen], state.live)
        lost_mode = state.mode[death.chosen]
        shells = shrunk(volume_key, state.volumes, lost.log_likelihood, lost_mode, death.rank, death.count[lost_mode])
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
            num_dead=state.num_dead + self.batch,
            num_steps=state.num_steps + 1,
            num_evaluations=state.num_evaluations + born.num_evaluations,
            longer=self._lengthened(state.longer, halfway),
        )
        state = state._replace(offers=self._used(state, born.num_offered))
        if self.track_modes or state.reference.gives_names:
            is_time = state.num_steps % (max(1, self.num_live // self.batch // LOOKS)) == 0
            state = jax.lax.cond(is_time, partial(self._looked, densities), lambda _, at: at, mode_key, state)
        log_evidence = jnp.logaddexp(state.volumes.log_evidence[0], self._left(state))
        log_volume = logsumexp(state.volumes.log_volume[:, 0])
        highest, took = lost.log_likelihood.max(), (born.num_evaluations, born.num_nan)
        return state, Shrinkage(ranks, log_volume, log_evidence, highest, state.num_modes, halfway, *took)

    def _lengthened(self, longer: Array, halfway: Array) -> Array:
        """After half of the steps of a walk that keeps a correlation c it is 1 / (1 + sqrt(c)) as far, in squares, as after all."""
        kept = jnp.clip(1 / halfway - 1, 0, 1)
        return jnp.clip(longer + PACE * (kept - np.sqrt(self.memory)), 0, np.log(LONGEST))

    def _left(self, state: Nest) -> Array:
        """log of the evidence that the live points stand for."""
        return remaining(state.volumes.log_volume[:, :1], state.live.log_likelihood, state.mode, self._count(state))[0]

    def _count(self, state: Nest) -> Array:
        return jnp.zeros(len(state.volumes.log_volume), jnp.int32).at[state.mode].add(1)

    def _limit(self, state: Nest, death: Death, mode: Array) -> Limit:
        """The last that died; of births to any mode."""
        last = death.chosen[-1]
        return Limit(state.live.log_likelihood[last], state.live.label[last])

    def _shared_out(self, rng_key: Array, state: Nest, death: Death) -> Array:
        """[batch]: the mode that each birth goes to. In time a mode gets points as the root of its volume, for a small one may be what
        counts in the end; those that have no more to give die out."""
        survivors = death.count - death.dying
        highest = jnp.full(len(survivors), -jnp.inf, state.live.z.dtype).at[state.mode].max(state.live.log_likelihood)
        has_more = state.volumes.log_volume[:, 0] + highest > state.volumes.log_evidence[0] + np.log(0.1 * self.tolerance)
        is_open = (survivors > 0) & has_more
        is_open = jnp.where(is_open.any(), is_open, survivors > 0)
        log_volume = jnp.where(is_open, state.volumes.log_volume[:, 0], -jnp.inf)
        wanted = self.num_live * jax.nn.softmax(log_volume * SHARING)
        missing = jnp.maximum(wanted - survivors.astype(wanted.dtype), 0)
        places = (jnp.arange(self.batch) + random.uniform(rng_key, dtype=wanted.dtype)) / self.batch * missing.sum()
        return jnp.searchsorted(jnp.cumsum(missing), places, side="right").astype(state.mode.dtype)

    def _births(
        self, rng_key: Array, state: Nest, death: Death, mode: Array, parent: Array, densities: Callable
    ) -> tuple[Ended, Array, Array]:
        """Copies of survivors of the given modes, after their walks, or draws; where they came to lie among the survivors; and how far
        walks were halfway."""
        walk_key, rank_key = random.split(rng_key)
        limit = self._limit(state, death, mode)
        own = jnp.argsort(death.order)[parent] - death.first[mode]
        start = jax.tree.map(lambda leaf: leaf[parent], state.live)
        spread = spread_of(state.live.z, state.mode, len(death.count))[mode]
        around = Around(state.live.z[death.order], death.first[mode], death.count[mode], own, spread)
        num_steps = self._num_steps(state)
        before = self._round_the_curve(walk_key, densities, state, start, limit, mode, spread, num_steps)
        start = before.at
        turn, offers = partial(direction, around=around), (state.offers.z, state.offers.num_used, self._num_offers(state))
        born = walk(walk_key, densities, start, limit, turn, num_steps, WIDTH, STRAIGHT, *offers)
        apart = lambda z: jnp.mean(((z - start.z) / jnp.maximum(spread, jnp.finfo(z.dtype).tiny)) ** 2)
        rank = insertion_rank(rank_key, state.live, state.mode, death, born.at, mode)
        took = {name: getattr(before, name) + getattr(born, name) for name in ("num_evaluations", "num_nan")}
        return born._replace(**took), rank, apart(born.halfway) / apart(born.at.z)

    def _round_the_curve(
        self, rng_key: Array, densities: Callable, state: Nest, start: Points, limit: Limit, mode: Array, spread: Array, num_steps: Array
    ) -> Ended:
        """After steps along the curve, if any."""
        if not self.along_curve:
            return Ended(start, start.z, *3 * (jnp.zeros((), jnp.int32),))
        centre = centre_of(state.live.z, state.mode, len(state.volumes.log_volume))[mode]
        turn = partial(reach, num_lanes=self.batch, size=self.split.size, dtype=start.z.dtype)
        count = jnp.ceil(self.along_curve * num_steps).astype(jnp.int32)
        chart = curve(centre, spread, WIDTH)
        return walk(random.fold_in(rng_key, 1), densities, start, limit, turn, count, WIDTH, chart)

    def _roots(self, state: Nest) -> Array:
        return roots_of(state.live.z, state.mode, len(state.volumes.log_volume))

    def _looked(self, densities: Callable, rng_key: Array, state: Nest) -> Nest:
        if state.reference.gives_names:
            assert self.exchange is not None
            live, z, reference = renamed(self.exchange, state.live, state.offers.z, state.reference, densities)
            state = state._replace(live=live, offers=state.offers._replace(z=z), reference=reference)
        if not self.track_modes:
            return state
        parts = parts_of(state.live.z, state.mode, self._roots(state), state.num_modes, self._least)
        state = state._replace(mode=parts.mode, num_modes=parts.num_modes)
        volumes = shared(rng_key, state.volumes, parts.mode, parts.origin, state.ancestor[-1])
        own = jnp.arange(self.num_live, dtype=jnp.int32)[None]
        return state._replace(volumes=volumes, ancestor=jnp.concatenate([own, state.ancestor[:-1]]))

    def is_waiting(self, state: Nest) -> Array:
        """Whether new offers are wanted."""
        return state.offers.are_worn

    def served(self, state: Nest, program: Program) -> Nest:
        """New offers, of the program that is given: another run of this kernel may have read one since."""
        return self._with_offers(state, self.split if program is self.split.program else Split(program), None)

    def finished(self, state: Nest) -> Array:
        """When the live points hold next to nothing of the evidence."""
        return self._left(state) < state.volumes.log_evidence[0] + np.log(self.tolerance)

    def is_full(self, state: Nest) -> Array:
        """Whether the next of the dead find no room."""
        return state.num_dead + self.batch > len(state.dead.mode)

    def grown(self, state: Nest, program: Program) -> Nest:
        """Twice the room, up to where a run is given up."""
        folds = 2 * len(state.dead.mode) // self.num_live
        if folds > MOST_FOLDS:
            raise StructureError(
                f"sites {list(self.split.program.observed)}: after {folds // 2} e-folds of prior volume the likelihood still rises, to "
                f"{float(state.live.log_likelihood.max()):.4g}; wanted one with a bound. Look for a scale that may shrink to 0, or data "
                f"that are far from all that the prior has likely."
            )
        return state._replace(dead=with_room(state.dead, folds * self.num_live))

    def _evidence(self, state: Nest) -> tuple[Array, Array]:
        return jax.jit(lambda state: evidence(state.volumes, state.live.log_likelihood, state.mode, self._count(state)))(state)

    def draw(self, rng_key: Array, state: Nest, program: Program, num_draws: int) -> dict[str, Array]:
        """Points in proportion to their weights, by systematic resampling, in random order."""
        z, log_weight, _, _ = points_of(state)
        chosen = np.asarray(z)[resampled(rng_key, log_weight, num_draws)]
        return shown(random.fold_in(rng_key, 1), self.split, self.exchange, jnp.asarray(chosen))

    def _together(self, state: Nest) -> tuple[Array, Array]:
        """All points, their members named alike, with log weights: what a summary is fitted to."""
        z, log_weight, _, _ = points_of(state)
        return together(self.exchange, z, state.reference), log_weight

    def results(self, state: Nest, program: Program) -> Results:
        """The evidence, and all points with their weights. Before the end nobody knows how far up the likelihood still goes, so that
        the log-evidence then has no error: NaN."""
        return self._found(state, self.finished(state))

    def _found(self, state: Nest, is_finished: Array) -> Results:
        z, log_weight, log_likelihood, mode = points_of(state)
        log_evidence, error = self._evidence(state)
        attrs = {
            "log_evidence": log_evidence,
            "log_evidence_se": jnp.where(is_finished, error, jnp.nan),
            "information": information_of(state),
            "num_live": self.num_live,
            "num_modes": state.num_modes,
            "num_evaluations": state.num_evaluations,
        }
        values = shown(random.key(0), self.split, self.exchange, z)
        found = particles(values, log_weight=log_weight, log_likelihood=log_likelihood, mode=mode)
        return found._replace(attrs=attrs)
