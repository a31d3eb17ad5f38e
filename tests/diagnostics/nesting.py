"""A nested sampler that is exact, in one dimension: new points above the limit can be drawn as they
should, or too low on purpose.

theta ~ Uniform(0, 1),   y = 0 ~ Normal(theta, 0.05):   the likelihood falls in theta, so the points
                                                        above that of theta* are
Uniform(0, theta*), and the evidence is 1 / 2.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax import Array, random
from jax.nn import logsumexp

from inference import Algorithm, Results

LOG_EVIDENCE = jnp.log(0.5)
MOST_STEPS = 1500


def half_normal(y=None):
    theta = numpyro.sample("theta", dist.Uniform(0.0, 1.0))
    numpyro.sample("y", dist.Normal(theta, 0.05), obs=y)


class Nest(NamedTuple):
    live: Array
    dead: Array
    log_weight: Array  # of the dead
    log_evidence: Array
    count: Array


class Shrinkage(NamedTuple):
    insertion_rank: Array
    log_volume: Array
    log_evidence: Array


class ExactNesting(Algorithm):
    """`low` above 1 draws new points too near to the limit."""

    report = "nested"

    def __init__(self, model, num_live: int = 50, low: float = 1.0):
        self.model, self.num_live, self.low = model, num_live, low

    def log_likelihood(self, theta: Array) -> Array:
        return dist.Normal(theta, 0.05).log_prob(0.0)

    def read(self, program):
        return program, {}

    def init(self, rng_key, program, data):
        live = random.uniform(rng_key, (self.num_live,))
        return Nest(
            live,
            jnp.zeros(MOST_STEPS),
            jnp.full(MOST_STEPS, -jnp.inf),
            jnp.array(-jnp.inf),
            jnp.zeros((), jnp.int32),
        )

    def step(self, rng_key, state, program, data):
        worst, volume = jnp.argmax(state.live), -state.count / self.num_live
        theta = state.live[worst]
        log_weight = volume + jnp.log(-jnp.expm1(-1 / self.num_live)) + self.log_likelihood(theta)
        new = theta * random.uniform(rng_key) ** (1 / self.low)
        rank = jnp.sum((state.live > new) & (jnp.arange(self.num_live) != worst))
        state = Nest(
            state.live.at[worst].set(new),
            state.dead.at[state.count].set(theta),
            state.log_weight.at[state.count].set(log_weight),
            jnp.logaddexp(state.log_evidence, log_weight),
            state.count + 1,
        )
        return state, Shrinkage(rank, -state.count / self.num_live, state.log_evidence)

    def finished(self, state):
        left = -state.count / self.num_live + self.log_likelihood(state.live.min())
        return (left < state.log_evidence - 6.0) | (state.count >= MOST_STEPS)

    def _points(self, state):
        left = (
            -state.count / self.num_live - jnp.log(self.num_live) + self.log_likelihood(state.live)
        )
        return jnp.concatenate([state.dead, state.live]), jnp.concatenate([state.log_weight, left])

    def draw(self, rng_key, state, program, data, num_draws):
        theta, log_weight = self._points(state)
        return {"theta": theta[random.categorical(rng_key, log_weight, shape=(num_draws,))]}

    def results(self, state, program, data):
        theta, log_weight = self._points(state)
        log_evidence = logsumexp(log_weight)
        information = (
            jnp.sum(jnp.exp(log_weight - log_evidence) * self.log_likelihood(theta)) - log_evidence
        )
        attrs = {
            "log_evidence": log_evidence,
            "log_evidence_se": jnp.sqrt(information / self.num_live),
            "information": information,
        }
        return Results(
            {"particles": {"log_weight": log_weight}}, attrs, {"log_weight": ("particle",)}
        )
