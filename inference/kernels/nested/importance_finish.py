"""Importance sampling from a Normal mixture that is fitted to the points of nested sampling.

    q(z)  =  (1 - background) mixture(z)  +  background prior(z)
    evidence  =  mean over draws from q of  w,      w(z)  =  prior(z) likelihood(z) / q(z)

Nested sampling runs as it would alone. Then, on the host, a mixture is fitted to its weighted
points (`inference.maths.normal_mixture`), and its components get Student's t tails, because a
posterior near the bound of a parameter has heavier tails than a Normal. The draws are independent,
so that the error of the evidence falls with the root of their number; that of nested sampling falls
with the root of the live points. While the effective sample size is too small, a mixture with up to
twice as many components is fitted to the points and the weighted draws together, and draws are made
anew; only the last draws count. Where members are exchangeable, the mixture covers canonical
vectors alone, and other draws have weight 0 (`inference.reading.density`).

Draws do not know of a mode that no component is near to, but points of the nested sampling do. The
share of the posterior that they show to be missed is in the claimed error, and leads to another
round where it is more than the noise of the weights. A mode that no live point has found is missed
in any case. The prior in q bounds the weights wherever the likelihood is bounded; the check
"importance" of `diagnostics.report` says how large they are.

Hesterberg (1995) for the defensive mixture; Cappe, Guillin, Marin and Robert (2004), "Population
Monte Carlo". Cost: `NestedSampler`, one more evaluation of its points, and for each round a fit of
the mixture and `num_draws` evaluations of the model.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import random
from jaxtyping import Float

from inference.kernels.nested.kernel import NestedSampler, Nesting, Shrinkage
from inference.kernels.nested.state import Nest, particles
from inference.maths.host import Array, generator, in_chunks
from inference.maths.normal_mixture import Defensive, FitPoints, NormalSummary
from inference.maths.resampling import resampled
from inference.program.compiling import compiled
from inference.program.program import Program
from inference.program.sites import check_setting, check_whole, is_between
from inference.reading.density import canonical_densities, relabel, site_values
from inference.run.protocol import Algorithm, Results

__all__ = ["Finish", "ImportanceFinish"]


class Finish(NamedTuple):
    """The state of a run; before the importance sampling there is room for its draws alone."""

    nest: Nest
    z: Float[Array, "draw size"]
    log_weight: Float[Array, " draw"]  # -inf before
    log_likelihood: Float[Array, " draw"]
    num_rounds: Array  # 0 before
    missed: Array  # share of the posterior, by points of the sampler, where no draw is expected
    rng_key: Array


class ImportanceFinish(Algorithm):
    """A nested sampler, followed by importance sampling from what it has found.

    Args:
        sampler: a `NestedSampler`; its own evidence is in the tree as `nested_log_evidence`, with
            `nested_log_evidence_se`.
        num_draws: independent draws at the end, each of one evaluation of the model.
        num_clumps: the most components of the first mixture; as many as there are modes are enough
            where these are Normal.
        background: share of the prior in the proposal.
        num_rounds: the most mixtures; each may have twice as many components as the one before.
        enough: effective sample size at which the rounds end, as a share of the draws.
    """

    report = "nested"
    draws_at_end = True

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
        self.num_draws, self.num_clumps = int(num_draws), int(num_clumps)
        self.num_rounds, self.enough, self.background = int(num_rounds), enough, background

    def read(self, program: Program) -> tuple[Nesting, dict[str, Array]]:
        """What the sampler reads."""
        return self.sampler.read(program)

    def init(self, rng_key: Array, reading: Nesting, data: dict[str, Array]) -> Finish:
        """The start of the sampler, with room for the draws."""
        nest = self.sampler.init(rng_key, reading, data)
        size, dtype = nest.live.z.shape[1], nest.live.z.dtype
        none = jnp.full(self.num_draws, -jnp.inf, dtype)
        # no key of the nested sampling, which folds in numbers of steps
        own = random.key_data(random.fold_in(rng_key, 2**31))
        z, num_rounds = jnp.zeros((self.num_draws, size), dtype), jnp.zeros((), jnp.int32)
        return Finish(nest, z, none, none, num_rounds, none[0], own)

    def step(
        self, rng_key: Array, state: Finish, reading: Nesting, data: dict[str, Array]
    ) -> tuple[Finish, Shrinkage]:
        """One step of the nested sampling."""
        nest, info = self.sampler.step(rng_key, state.nest, reading, data)
        return state._replace(nest=nest), info

    def finished(self, state: Finish) -> Array:
        """Whether the importance sampling is over."""
        return state.num_rounds > 0

    def needs_host(self, state: Finish) -> Array:
        """Whether the sampler needs the host, or the importance sampling is to come."""
        is_over = self.sampler.needs_host(state.nest) | self.sampler.finished(state.nest)
        return (state.num_rounds == 0) & is_over

    def on_host(
        self, states: Sequence[Finish], reading: Nesting, data: dict[str, Array]
    ) -> Sequence[Finish]:
        """What the nested sampler needs from the host; after its end, the importance sampling."""
        nests = [state.nest for state in states]
        is_over = [bool(self.sampler.finished(nest)) for nest in nests]
        if any(
            self.sampler.needs_host(nest) and not over
            for nest, over in zip(nests, is_over, strict=True)
        ):
            nests = self.sampler.on_host(nests, reading, data)
            return [state._replace(nest=nest) for state, nest in zip(states, nests, strict=True)]
        if not all(is_over):
            raise ValueError(
                "chain_method: replicates finish at different steps; use 'sequential'."
            )
        return [self._importance_sampled(state, reading) for state in states]

    def _importance_sampled(self, state: Finish, reading: Nesting) -> Finish:
        split, exchange, reference = reading.split, reading.exchange, state.nest.reference
        # Weights are small where the posterior falls slower than the proposal. Of proposals with
        # this many degrees of freedom for a Normal posterior, some two thirds of the draws are
        # effective in any dimension.
        family = NormalSummary(split.size, max(6.0, 0.6 * split.size))
        proposal = Defensive(family, self.background)
        densities = canonical_densities(exchange, reference, split.densities)
        points, point_weight = reading.points(state.nest)
        point_weight = point_weight - np.logaddexp.reduce(point_weight)
        z, weight, of_points = points, point_weight, _mapped(densities, points)
        rng = generator(state.rng_key)
        for number in range(1, self.num_rounds + 1):
            mixture = family.fitted(rng, FitPoints(z), weight, self.num_clumps * 2 ** (number - 1))
            log_density = lambda *at, mixture=mixture: in_chunks(
                lambda some: proposal.log_densities(mixture, *some), at
            )
            of_prior = relabel(exchange, split.draws(rng, self.num_draws), reference)
            drawn = proposal.draws(rng, mixture, of_prior)
            log_prior, log_likelihood = _mapped(densities, drawn)
            log_weight = log_prior + log_likelihood - log_density(drawn, log_prior)
            log_weight = np.where(np.isnan(log_weight), -np.inf, log_weight)
            log_total = np.logaddexp.reduce(log_weight)
            log_each = sum(of_points) - log_density(points, of_points[0]) - log_total
            missed = _missed(point_weight, log_each)
            square = np.sum(np.exp(log_weight - log_total) ** 2)
            if 1 / square >= self.enough * self.num_draws and missed**2 <= square:
                break
            z = np.concatenate([points, drawn])
            # at most 1 / sqrt(number), lest a fit go to a single draw (Ionides 2008)
            truncated = np.minimum(log_weight - log_total, -0.5 * np.log(self.num_draws))
            weight = np.concatenate([point_weight, truncated])
        return state._replace(
            z=drawn,
            log_weight=log_weight.astype(drawn.dtype),
            log_likelihood=log_likelihood,
            num_rounds=np.asarray(number, np.int32),
            missed=np.asarray(missed, drawn.dtype),
        )

    def draw(
        self,
        rng_key: Array,
        state: Finish,
        reading: Nesting,
        data: dict[str, Array],
        num_draws: int,
    ) -> dict[str, Array]:
        """Draws in proportion to their weights, by systematic resampling.

        Before the importance sampling they are points of the sampler.
        """
        if not state.num_rounds:
            return self.sampler.draw(rng_key, state.nest, reading, data, num_draws)
        rng = generator(rng_key)
        chosen = np.asarray(state.z)[resampled(rng, state.log_weight, num_draws)]
        return site_values(rng, reading.split, reading.exchange, chosen)

    def results(self, state: Finish, reading: Nesting, data: dict[str, Array]) -> Results:
        """The evidence by importance sampling and by nested sampling, and the weighted draws.

        The weights sum to the evidence. Before the importance sampling the results are those of the
        sampler.
        """
        nested = self.sampler.results(state.nest, reading, data)
        before = {
            f"nested_{name}": nested.attrs[name] for name in ("log_evidence", "log_evidence_se")
        }
        if not state.num_rounds:
            every = nested.groups["particles"].items()
            points = {name: value for name, value in every if name != "mode"}
            return nested._replace(groups={"particles": points}, attrs=nested.attrs | before)
        log_weight = state.log_weight - np.log(self.num_draws)
        log_evidence = jax.nn.logsumexp(log_weight)
        ratio, share = jnp.exp(state.log_weight - log_evidence), jnp.exp(log_weight - log_evidence)
        mean = jnp.sum(jnp.where(share > 0, share * state.log_likelihood, 0.0))
        attrs = before | {
            "log_evidence": log_evidence,
            "log_evidence_se": jnp.sqrt(jnp.var(ratio, ddof=1) / self.num_draws + state.missed**2),
            "ess": 1 / jnp.sum(share**2),
            "missed": state.missed,
            "information": mean - log_evidence,
            "num_evaluations": nested.attrs["num_evaluations"]
            + len(nested.groups["particles"]["log_weight"])
            + state.num_rounds * self.num_draws,
            "num_rounds": state.num_rounds,
        }
        found = particles(
            site_values(np.random.default_rng(0), reading.split, reading.exchange, state.z),
            log_weight=log_weight,
            log_likelihood=state.log_likelihood,
        )
        return found._replace(attrs=nested.attrs | attrs)


def _mapped(densities: Callable, z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    mapped = lambda z: jax.lax.map(densities, z, batch_size=1000)
    return jax.device_get(compiled(mapped, z)(z))


def _missed(
    log_share: Float[np.ndarray, " point"], log_each: Float[np.ndarray, " point"]
) -> np.floating:
    """The share of the posterior where less than one draw is expected, by points of the sampler.

    It is that of the points of the largest weights, as many as hold less than one expected draw.

    Args:
        log_share: of the points, as shares of the posterior.
        log_each: the importance weight at each point, as a part of the sum over the draws.
    """
    largest = np.argsort(-log_each)
    num_draws = np.cumsum(np.exp(log_share - log_each)[largest])
    return np.sum(np.exp(log_share)[largest], where=num_draws < 1)
