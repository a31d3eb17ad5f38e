"""Importance sampling from the prior: the smallest `Algorithm` whose evidence is known exactly.

`zoo new --kernel NAME` begins a kernel with a copy of this file and of its test.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.special import logsumexp

from inference.run.protocol import Algorithm, Results

__all__ = ["ImportanceSampling"]


class _Pool(NamedTuple):
    particles: dict[str, jax.Array]  # [particle, ...] of every batch so far, and their `log_weight`
    batch: jax.Array


class _Batch(NamedTuple):
    ess: jax.Array


class ImportanceSampling(Algorithm):
    """Draws from the prior, weighted by the likelihood.

    Cost: `num_batches` x `batch_size` evaluations of the likelihood.

    Args:
        model: a model.
        num_batches: number of steps.
        batch_size: draws a step.
    """

    report = "smc"

    def __init__(self, model, num_batches: int = 100, batch_size: int = 64):
        self.model, self.num_batches, self.batch_size = model, num_batches, batch_size

    def read(self, program):
        """Everything that a step asks of the model is a function of `Program`."""
        program.check()
        return program, {}

    def init(self, rng_key, program, data):
        """No particle has a weight yet."""
        count = self.num_batches * self.batch_size
        empty = {"log_weight": jnp.full(count, -jnp.inf)}
        return _Pool(empty | program.draw_prior(rng_key, count), jnp.zeros((), int))

    def step(self, rng_key, state, program, data):
        """Draw a batch, and weight it."""
        drawn = program.draw_prior(rng_key, self.batch_size)
        terms = jax.vmap(program.log_likelihood)(drawn)
        new = {"log_weight": sum(map(jax.vmap(jnp.sum), terms.values()))} | drawn
        index = state.batch * self.batch_size + jnp.arange(self.batch_size)
        particles = jax.tree.map(lambda old, new: old.at[index].set(new), state.particles, new)
        share = jax.nn.softmax(particles["log_weight"])
        return _Pool(particles, state.batch + 1), _Batch(1 / jnp.sum(share**2))

    def finished(self, state):
        """Whether all batches are drawn."""
        return state.batch >= self.num_batches

    def draw(self, rng_key, state, program, data, num_draws):
        """Particles by their weights."""
        index = jax.random.categorical(rng_key, state.particles["log_weight"], shape=(num_draws,))
        return {name: state.particles[name][index] for name in program.latent}

    def results(self, state, program, data):
        """The particles, and the mean weight, which estimates the evidence."""
        log_weight = state.particles["log_weight"]
        mean = logsumexp(log_weight) - jnp.log(log_weight.size)
        error = jnp.std(jnp.exp(log_weight - mean)) / jnp.sqrt(log_weight.size)
        attrs = {"log_evidence": mean, "log_evidence_se": error}
        dims = dict.fromkeys(state.particles, ("particle",))
        return Results({"particles": state.particles}, attrs, dims)
