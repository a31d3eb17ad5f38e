"""Nested sampling that is finished by importance sampling from what it has found.

    q(z)  =  (1 - background) clumps(z)  +  background prior(z),      w(z)  =  prior(z) likelihood(z) / q(z)
    evidence  =  mean of w over draws from q

The nested sampling runs as it would alone. To its weighted points clumps are fitted
(`inference.maths.normal_mixture`), on the host, and given the tails of Student's t, for where a
parameter meets its bound the posterior has no Normal's. Draws from them with the prior in the
background are independent of each other, and the error of their mean weight falls with the root of
their number, where that of nested sampling falls with the root of the live points. As long as too
few of the draws are effective, clumps are fitted again, to the points and to the weighted draws, up
to twice as many as before, and drawn from anew; only the last draws count. Of members that may
change places (`inference.reading.exchangeable`) clumps know one arrangement, and draws of another
weigh nothing (`relabel`).

A mode that no clump is near to is a share of the posterior that draws do not know of. Points of the
nested sampling do: what they say is missed counts as long as it is more than the noise of the
weights, and is in the claimed error. What no live point has found is missed as before. The prior in
the background bounds the weights wherever the likelihood is bounded; how large they are in fact,
the check "importance" of `diagnostics.report` says.

Hesterberg (1995) for the prior in the background; Cappe, Guillin, Marin and Robert (2004),
"Population Monte Carlo". Cost: `NestedSampler`, and each round a fit of clumps and `num_draws`
evaluations of the model; its points are evaluated once more.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from jax.scipy.special import logsumexp

from inference.kernels.nested.kernel import Nest, NestedSampler, Shrinkage
from inference.kernels.nested.nesting import Nesting
from inference.kernels.nested.relabel import drawn_in_places, in_places, shown
from inference.kernels.nested.state import particles
from inference.maths.normal_mixture import Clumps, StateClumps
from inference.maths.resampling import resampled
from inference.maths.summary import Backed, Told
from inference.program.program import Program
from inference.program.sites import check_setting, check_whole, is_between
from inference.run.protocol import Algorithm, Results

__all__ = ["Finish", "ImportanceFinish"]

BATCH = 1000  # draws that are weighed together
# Degrees of freedom of what is drawn from, at least, and for each number: weights are small where
# the posterior falls slower than a Normal, and of a Normal some two thirds of the draws are
# effective, however many its numbers.
TAIL, TAIL_EACH = 6.0, 0.6
OWN_KEY = 2**31  # folded into the key of the nested sampling: none of its own


class Finish(NamedTuple):
    """Where a run stands.

    Until the nested sampling has finished there is room for the draws, with none in it, so that all
    states have the same shapes and one compiled loop.
    """

    nest: Nest
    z: Array  # [draw, size]
    log_weight: Array  # [draw]; -inf until then
    log_likelihood: Array  # [draw]
    num_rounds: Array  # 0 until then
    # share of the posterior, as points of the sampler have it, where no draw is expected
    missed: Array
    rng_key: Array


class ImportanceFinish(Algorithm):
    """A nested sampler, and importance sampling from what it has found.

    :param sampler: a `NestedSampler`; what it finds is in the tree as `nested_log_evidence`, with
    `nested_log_evidence_se`.
    :param num_draws: independent draws at the end, one evaluation of the model each.
    :param num_clumps: the most clumps of the first fit; as many as there are modes will do, where
    these are Normal.
    :param num_rounds: the most fits; each after the first may have twice as many clumps as the one
    before.
    :param enough: share of the draws that are effective, with which the rounds end.
    :param background: share of the prior in what is drawn from.
    """

    report = "nested"

    def __init__(
        self,
        sampler: NestedSampler,
        *,
        num_draws: int = 20_000,
        num_clumps: int = 8,
        background: float = 0.05,
        num_rounds: int = 4,
        enough: float = 0.3,
    ):
        if not isinstance(sampler, NestedSampler):
            raise TypeError(
                f"sampler: found {sampler!r}, wanted a NestedSampler: "
                "ImportanceFinish(NestedSampler(model))."
            )
        check_whole(100, num_draws=num_draws)
        check_whole(1, num_clumps=num_clumps, num_rounds=num_rounds)
        for name, value in {"background": background, "enough": enough}.items():
            check_setting(is_between(value, 0, 1), "a number between 0 and 1", **{name: value})
        self.model, self.sampler = sampler.model, sampler
        self.num_draws, self.num_clumps, self.background = (
            int(num_draws),
            int(num_clumps),
            background,
        )
        self.num_rounds, self.enough = int(num_rounds), enough

    def read(self, program: Program) -> tuple[Nesting, dict[str, Array]]:
        """As the sampler."""
        return self.sampler.read(program)

    def init(self, rng_key: Array, reading: Nesting, data: dict[str, Array]) -> Finish:
        """Where the sampler begins, with room for the draws."""
        nest = self.sampler.init(rng_key, reading, data)
        z = nest.live.z
        none = jnp.full(self.num_draws, -jnp.inf, z.dtype)
        own = random.key_data(random.fold_in(rng_key, OWN_KEY))
        return Finish(
            nest,
            jnp.zeros((self.num_draws, z.shape[1]), z.dtype),
            none,
            none,
            jnp.zeros((), jnp.int32),
            none[0],
            own,
        )

    def step(
        self, rng_key: Array, state: Finish, reading: Nesting, data: dict[str, Array]
    ) -> tuple[Finish, Shrinkage]:
        """One step of the nested sampling."""
        nest, info = self.sampler.step(rng_key, state.nest, reading, data)
        return state._replace(nest=nest), info

    def finished(self, state: Finish) -> Array:
        """After the importance sampling."""
        return state.num_rounds > 0

    def needs_host(self, state: Finish) -> Array:
        """Whether the sampler needs the host, or has finished: then comes the importance
        sampling.
        """
        return (state.num_rounds == 0) & (
            self.sampler.needs_host(state.nest) | self.sampler.finished(state.nest)
        )

    def on_host(
        self, states: Sequence[Finish], reading: Nesting, data: dict[str, Array]
    ) -> Sequence[Finish]:
        """What the sampler needs, or the importance sampling."""
        if any(
            self.sampler.needs_host(state.nest) and not self.sampler.finished(state.nest)
            for state in states
        ):
            nests = self.sampler.on_host([state.nest for state in states], reading, data)
            return [state._replace(nest=nest) for state, nest in zip(states, nests, strict=True)]
        if not all(self.sampler.finished(state.nest) for state in states):
            raise ValueError(
                "chain_method: replicates finish at different steps; use 'sequential'."
            )
        return [self._weighed(state, reading) for state in states]

    def _weighed(self, state: Finish, reading: Nesting) -> Finish:
        """Draws, and their weights."""
        split, places = reading.split, (reading.exchange, state.nest.reference)
        backed = Backed(StateClumps(split.size, max(TAIL, TAIL_EACH * split.size)), self.background)
        draw, densities = drawn_in_places(*places, split.draw), in_places(*places, split.densities)
        points, point_weight = reading.points(state.nest)
        point_weight = point_weight - logsumexp(point_weight)
        z, weight = points, point_weight
        known = jax.jit(lambda z: jax.lax.map(densities, z, batch_size=BATCH))(points)
        of_point = lambda clumps, point: backed.log_density(clumps, *point)
        said = jax.jit(
            lambda clumps: jax.lax.map(
                partial(of_point, clumps), (points, known[0]), batch_size=BATCH
            )
        )
        each = jax.jit(
            lambda clumps, keys: jax.lax.map(
                partial(_drawn, draw, densities, backed, clumps), keys, batch_size=BATCH
            )
        )
        for number in range(1, self.num_rounds + 1):
            fit_key, draw_key = random.split(
                random.fold_in(random.wrap_key_data(state.rng_key), number)
            )
            clumps = backed.summary.fitted(
                fit_key, Told(z), weight, self.num_clumps * 2 ** (number - 1)
            )
            drawn, log_weight, log_likelihood = each(clumps, random.split(draw_key, self.num_draws))
            missed = _missed(point_weight, sum(known) - said(clumps) - logsumexp(log_weight))
            share = jnp.exp(log_weight - logsumexp(log_weight))
            if 1 / jnp.sum(share**2) >= self.enough * self.num_draws and missed**2 <= jnp.sum(
                share**2
            ):
                break
            z = jnp.concatenate([points, drawn])
            weight = jnp.concatenate([point_weight, _cut(log_weight)])
        num_rounds = jnp.asarray(number, jnp.int32)
        return state._replace(
            z=drawn,
            log_weight=log_weight,
            log_likelihood=log_likelihood,
            num_rounds=num_rounds,
            missed=missed,
        )

    def draw(
        self,
        rng_key: Array,
        state: Finish,
        reading: Nesting,
        data: dict[str, Array],
        num_draws: int,
    ) -> dict[str, Array]:
        """Draws in proportion to their weights, by systematic resampling; of a run that was ended
        early, points of the sampler.
        """
        if not state.num_rounds:
            return self.sampler.draw(rng_key, state.nest, reading, data, num_draws)
        chosen = state.z[resampled(rng_key, state.log_weight, num_draws)]
        return shown(random.fold_in(rng_key, 1), reading.split, reading.exchange, chosen)

    def results(self, state: Finish, reading: Nesting, data: dict[str, Array]) -> Results:
        """The evidence by importance sampling and by nested sampling, and the draws with their
        weights, whose sum is the evidence. A run that was ended early has no draws: what the
        sampler has found is there in their place, without an error.
        """
        nested = self.sampler.results(state.nest, reading, data)
        before = {
            f"nested_{name}": nested.attrs[name] for name in ("log_evidence", "log_evidence_se")
        }
        if not state.num_rounds:
            points = {
                name: value for name, value in nested.groups["particles"].items() if name != "mode"
            }
            attrs = nested.attrs | before | {"log_evidence_se": jnp.nan, "ess": jnp.nan}
            return nested._replace(groups={"particles": points}, attrs=attrs)
        log_weight = state.log_weight - np.log(self.num_draws)
        log_evidence = logsumexp(log_weight)
        num_points = state.nest.num_dead + self.sampler.num_live
        ratio, share = jnp.exp(state.log_weight - log_evidence), jnp.exp(log_weight - log_evidence)
        attrs = before | {
            "log_evidence": log_evidence,
            # of the mean weight over it
            "log_evidence_se": jnp.sqrt(jnp.var(ratio, ddof=1) / self.num_draws + state.missed**2),
            "ess": 1 / jnp.sum(share**2),
            "missed": state.missed,
            "information": jnp.sum(jnp.where(share > 0, share * state.log_likelihood, 0.0))
            - log_evidence,
            "num_evaluations": nested.attrs["num_evaluations"]
            + num_points
            + state.num_rounds * self.num_draws,
            "num_rounds": state.num_rounds,
        }
        values = shown(random.key(0), reading.split, reading.exchange, state.z)
        found = particles(values, log_weight=log_weight, log_likelihood=state.log_likelihood)
        return found._replace(attrs=nested.attrs | attrs)


def _missed(log_share: Array, log_each: Array) -> Array:
    """Share of the posterior that draws may well miss, such as a mode that no clump is near to: of
    points with their shares of it, those of the largest weights, for as long as less than one draw
    is expected there. Weights are parts of that of all draws together.
    """
    largest = jnp.argsort(-log_each)
    num_draws = jnp.cumsum(jnp.exp(log_share - log_each)[largest])
    return jnp.sum(jnp.exp(log_share)[largest], where=num_draws < 1)


def _cut(log_weight: Array) -> Array:
    """Log weights of sum 1 at most, none above 1 / sqrt(number): a fit shall not go to a single
    draw (Ionides, 2008).
    """
    log_share = log_weight - logsumexp(log_weight)
    return jnp.minimum(log_share, -0.5 * np.log(len(log_share)))


def _drawn(
    draw: Callable, densities: Callable, backed: Backed, clumps: Clumps, rng_key: Array
) -> tuple[Array, Array, Array]:
    """A draw from clumps and prior, its log weight and its log likelihood.

    Where the model has no number, the weight is 0: there no walk goes either.
    """
    z = backed.draw(rng_key, clumps, draw)
    log_prior, log_likelihood = densities(z)
    log_weight = log_prior + log_likelihood - backed.log_density(clumps, z, log_prior)
    return z, jnp.where(jnp.isnan(log_weight), -jnp.inf, log_weight), log_likelihood
