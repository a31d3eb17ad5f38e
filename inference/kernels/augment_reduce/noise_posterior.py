"""Variational distributions of a number eps that each row of the data has, and the step that each
takes towards its optimum.

`LogExponential`: where the log joint is, in u = exp(-eps), log u - eta* u + const (Gumbel noise,
and whatever falls with exp(-eps)), the optimum is eps ~ Gumbel(log eta*, 1), and the bound is
closed. The slope in u is read off the model; a natural gradient step is eta <- (1 - rate) eta +
rate eta*.

`LocationScale`: else eps = loc + scale z, with z distributed as the site's own prior. A step goes
along the gradient over the Fisher information of loc and log scale, both read from draws of z, and
is cut where it would be longer than one scale. The entropy is log scale, whose slope counts, and
that of the prior.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array

from inference.distributions.noise import expectation_nodes

__all__ = ["Local", "LocationScale", "LogExponential", "Terms"]

# Of eps [row]: the log joint of each row, and the terms that were sampled, before they are scaled
# up, [any, row].
Terms = Callable[[Array], tuple[Array, Array]]

type Local = LogExponential | LocationScale


class LogExponential(NamedTuple):
    """eps ~ Gumbel(log rate, 1), so that u = exp(-eps) ~ Exponential(rate)."""

    def start(self, num_rows: int) -> dict[str, Array]:
        """Any rate would do: the first step of a row forgets it."""
        return {"rate": jnp.ones(num_rows)}

    def target(self, terms: Terms, num_rows: int) -> tuple[Array, Array]:
        """The rate that is optimal, and one that it must exceed, [row].

        Both are minus slopes in u, which are the same at any u.
        """
        of_u = lambda u: terms(-jnp.log(u))
        one = jnp.ones(num_rows)
        _, (total, sampled) = jax.jvp(of_u, (one,), (one,))
        own = 1.0 - total  # the prior's log u is not part of the rate
        floor = -jnp.min(sampled, axis=0, initial=0.0)
        most = jnp.finfo(own.dtype).max
        return jnp.clip(own, max=most), jnp.clip(floor, max=most)

    def step(
        self,
        local: dict[str, Array],
        terms: Terms,
        at_means: Terms,
        step_size: Array,
        rng_key: Array,
    ) -> dict[str, Array]:
        """A step of natural gradient; never below what the optimum must exceed: where weights are
        drawn, it is the mean of what draws of them say, which may exceed it, and above what their
        means say.
        """
        target, _ = self.target(terms, len(local["rate"]))
        _, floor = self.target(at_means, len(local["rate"]))
        return {"rate": jnp.maximum((1 - step_size) * local["rate"] + step_size * target, floor)}

    def points(self, local: dict[str, Array], rng_key: Array | None) -> tuple[Array, Array]:
        """Where the log joint is evaluated, [point, row], and weights [point, 1]: in u it is
        linear but for the prior's log u.
        """
        return jnp.log(local["rate"])[None], jnp.ones((1, 1))

    def entropy(self, local: dict[str, Array]) -> Array:
        """What makes a bound of the log joint at `points`: 1 + gamma, less the gamma by which E
        log u falls short of log E u.
        """
        return jnp.ones_like(local["rate"])


class LocationScale(NamedTuple):
    """eps = loc + scale z, z as the prior; `num_draws` of z a step."""

    noise: dist.Distribution
    num_draws: int
    num_nodes: int = 101

    def start(self, num_rows: int) -> dict[str, Array]:
        """The prior."""
        return {"loc": jnp.zeros(num_rows), "log_scale": jnp.zeros(num_rows)}

    def step(
        self,
        local: dict[str, Array],
        terms: Terms,
        at_means: Terms,
        step_size: Array,
        rng_key: Array,
    ) -> dict[str, Array]:
        """A step along the gradient over the Fisher information."""
        z = self._draws(rng_key, local["loc"])
        info_loc, info_log_scale = self._information()

        def bound(local: dict[str, Array]) -> Array:
            log_joint = jax.vmap(lambda eps: terms(eps)[0])(self._at(local, z))
            return jnp.sum(log_joint.mean(0) + local["log_scale"])

        slope = jax.grad(bound)(local)
        scale = jnp.exp(local["log_scale"])
        by_scale = jnp.clip(step_size * scale * slope["loc"] / info_loc, -1.0, 1.0)
        by_log = jnp.clip(step_size * slope["log_scale"] / info_log_scale, -0.5, 0.5)
        return {"loc": local["loc"] + scale * by_scale, "log_scale": local["log_scale"] + by_log}

    def points(self, local: dict[str, Array], rng_key: Array | None) -> tuple[Array, Array]:
        """Draws of eps [draw, row] with equal weights; without a key the nodes of a quadrature
        with theirs.
        """
        if rng_key is None:
            z, weight = expectation_nodes(self.noise, self.num_nodes)
            return self._at(
                local, jnp.broadcast_to(z[:, None], (len(z), len(local["loc"])))
            ), weight[:, None]
        return self._at(local, self._draws(rng_key, local["loc"])), jnp.full(
            (self.num_draws, 1), 1 / self.num_draws
        )

    def entropy(self, local: dict[str, Array]) -> Array:
        """Of eps [row]."""
        z, weight = expectation_nodes(self.noise, self.num_nodes)
        return local["log_scale"] - jnp.sum(weight * self.noise.log_prob(z))

    def _draws(self, rng_key: Array, like: Array) -> Array:
        return jnp.asarray(self.noise.sample(rng_key, (self.num_draws, *like.shape)), like.dtype)

    @staticmethod
    def _at(local: dict[str, Array], z: Array) -> Array:
        return local["loc"][None] + jnp.exp(local["log_scale"])[None] * z

    def _information(self) -> tuple[Array, Array]:
        """Of loc, at scale 1, and of log scale."""
        z, weight = expectation_nodes(self.noise, self.num_nodes)
        score = jax.vmap(jax.grad(self.noise.log_prob))(z)
        return jnp.sum(weight * score**2), jnp.sum(weight * (1 + z * score) ** 2)
