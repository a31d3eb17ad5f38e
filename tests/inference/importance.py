"""Importance sampling from the prior, as an `Algorithm`: the smallest one whose evidence has an
exact answer to compare with.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, random
from jax.scipy.special import logsumexp

from inference import Algorithm, Program, Results


class Pool(NamedTuple):
    values: dict[str, Array]  # [particle, ...] of every batch so far
    log_weight: Array  # [particle], -inf where no batch has been yet
    batch: Array


class Batch(NamedTuple):
    ess: Array


class ImportanceSampling(Algorithm):
    """`num_batches` batches of `batch_size` draws from the prior, weighted by the likelihood."""

    report = "smc"

    def __init__(self, model, num_batches: int, batch_size: int = 64):
        self.model, self.num_batches, self.batch_size = model, num_batches, batch_size

    def read(self, program: Program) -> tuple[Program, dict]:
        program.check()
        return program, {}

    def init(self, rng_key: Array, program: Program, data: dict) -> Pool:
        values = jax.tree.map(
            jnp.zeros_like, program.draw_prior(rng_key, self.num_batches * self.batch_size)
        )
        return Pool(
            values, jnp.full(self.num_batches * self.batch_size, -jnp.inf), jnp.zeros((), jnp.int32)
        )

    def step(self, rng_key: Array, state: Pool, program: Program, data: dict) -> tuple[Pool, Batch]:
        drawn = program.draw_prior(rng_key, self.batch_size)
        weigh = lambda values: sum(
            jnp.sum(term) for term in program.log_likelihood(values).values()
        )
        first = state.batch * self.batch_size
        put = lambda pool, new: jax.lax.dynamic_update_slice_in_dim(pool, new, first, 0)
        log_weight = put(state.log_weight, jax.vmap(weigh)(drawn))
        ess = jnp.exp(2 * logsumexp(log_weight) - logsumexp(2 * log_weight))
        return Pool(jax.tree.map(put, state.values, drawn), log_weight, state.batch + 1), Batch(ess)

    def finished(self, state: Pool) -> Array:
        return state.batch >= self.num_batches

    def draw(
        self, rng_key: Array, state: Pool, program: Program, data: dict, num_draws: int
    ) -> dict[str, Array]:
        index = random.categorical(rng_key, state.log_weight, shape=(num_draws,))
        return jax.tree.map(lambda pool: pool[index], state.values)

    def results(self, state: Pool, program: Program, data: dict) -> Results:
        count = self.num_batches * self.batch_size
        mean = logsumexp(state.log_weight) - jnp.log(count)
        error = jnp.std(jnp.exp(state.log_weight - mean)) / jnp.sqrt(count)
        groups = {"particles": {"log_weight": state.log_weight, **state.values}}
        dims = dict.fromkeys(groups["particles"], ("particle",))
        return Results(groups, {"log_evidence": mean, "log_evidence_se": error}, dims)
