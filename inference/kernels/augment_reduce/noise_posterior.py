"""Variational distributions q(eps) of the noise of each row, and their steps to the optimum.

`LogExponential` is for a log joint that is, in u = exp(-eps), log u - eta* u + const: Gumbel noise,
and whatever falls with exp(-eps). Then the optimum is eps ~ Gumbel(log eta*, 1), and the bound is
closed. The slope in u is read off the model; a natural-gradient step is eta <- (1 - rate) eta +
rate eta*.

`LocationScale` is for all others: eps = loc + scale z, with z distributed as the site's own prior.
A step goes along the gradient over the Fisher information of loc and log scale, both read from
draws of z, and is clipped to one scale. The entropy is log scale, whose slope counts, plus that of
the prior.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array

from inference.distributions.noise import expectation_nodes

__all__ = ["LocationScale", "LogExponential", "NoisePosterior", "Terms"]

# a function of eps [row]: the log joint of each row, and the sampled terms before they are scaled
# up, [any, row]
Terms = Callable[[Array], tuple[Array, Array]]

type NoisePosterior = LogExponential | LocationScale


class LogExponential(NamedTuple):
    """eps ~ Gumbel(log rate, 1), so that u = exp(-eps) ~ Exponential(rate)."""

    route = "closed form"  # the attribute of the tree

    def start(self, num_rows: int) -> dict[str, Array]:
        """A rate of 1. Any rate would do: the first step of a row forgets it."""
        return {"rate": jnp.ones(num_rows)}

    def target(self, terms: Terms, num_rows: int) -> tuple[Array, Array]:
        """The optimal rate, and its lower bound, [row]: minus slopes in u, the same at any u."""
        one = jnp.ones(num_rows)
        _, (total, sampled) = jax.jvp(lambda u: terms(-jnp.log(u)), (one,), (one,))
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
        """A natural-gradient step on the rate, clipped below at the floor at the mean weights.

        With drawn weights the optimum is a mean over draws; the floor of one draw may lie above it.

        Args:
            local: the rate of each row.
            terms: the log joint at drawn weights.
            at_means: the log joint at the mean weights; `terms` itself where nothing is drawn.
            step_size: from 0 to 1.
            rng_key: not used.
        """
        target, floor = self.target(terms, len(local["rate"]))
        if at_means is not terms:
            _, floor = self.target(at_means, len(local["rate"]))
        return {"rate": jnp.maximum((1 - step_size) * local["rate"] + step_size * target, floor)}

    def points(self, local: dict[str, Array], rng_key: Array | None) -> tuple[Array, Array]:
        """The point where the log joint is evaluated, [point, row], and its weight, [point, 1].

        One point suffices, because the log joint is linear in u, but for the prior's log u.
        """
        return jnp.log(local["rate"])[None], jnp.ones((1, 1))

    def entropy(self, local: dict[str, Array]) -> Array:
        """The entropy 1 + gamma less gamma, by which E log u falls short of log E u at `points`."""
        return jnp.ones_like(local["rate"])


class LocationScale(NamedTuple):
    """eps = loc + scale z, with z distributed as the prior."""

    noise: dist.Distribution
    num_draws: int  # of z a step
    num_nodes: int = 101  # of quadratures

    route = "by draws"  # the attribute of the tree

    def start(self, num_rows: int) -> dict[str, Array]:
        """The parameters with which q is the prior."""
        return {"loc": jnp.zeros(num_rows), "log_scale": jnp.zeros(num_rows)}

    def step(
        self,
        local: dict[str, Array],
        terms: Terms,
        at_means: Terms,
        step_size: Array,
        rng_key: Array,
    ) -> dict[str, Array]:
        """A step along the gradient over the Fisher information.

        Args:
            local: loc and log scale of each row.
            terms: the log joint at drawn weights.
            at_means: not used.
            step_size: from 0 to 1.
            rng_key: for draws of z.
        """
        z, (nodes, weight) = self._draws(rng_key, local["loc"]), self._nodes()
        score = jax.vmap(jax.grad(self.noise.log_prob))(nodes)
        info_loc = jnp.sum(weight * score**2)  # at scale 1
        info_log_scale = jnp.sum(weight * (1 + nodes * score) ** 2)

        def bound(local: dict[str, Array]) -> Array:
            log_joint = jax.vmap(lambda eps: terms(eps)[0])(self._at(local, z))
            return jnp.sum(log_joint.mean(0) + local["log_scale"])

        slope = jax.grad(bound)(local)
        scale = jnp.exp(local["log_scale"])
        by_scale = jnp.clip(step_size * scale * slope["loc"] / info_loc, -1.0, 1.0)
        by_log = jnp.clip(step_size * slope["log_scale"] / info_log_scale, -0.5, 0.5)
        return {"loc": local["loc"] + scale * by_scale, "log_scale": local["log_scale"] + by_log}

    def points(self, local: dict[str, Array], rng_key: Array | None) -> tuple[Array, Array]:
        """Draws of eps [draw, row], and equal weights.

        Without a key they are the nodes and weights of a quadrature.
        """
        if rng_key is None:
            z, weight = self._nodes()
            each = jnp.broadcast_to(z[:, None], (len(z), len(local["loc"])))
            return self._at(local, each), weight[:, None]
        weight = jnp.full((self.num_draws, 1), 1 / self.num_draws)
        return self._at(local, self._draws(rng_key, local["loc"])), weight

    def entropy(self, local: dict[str, Array]) -> Array:
        """The entropy of eps [row]."""
        z, weight = self._nodes()
        return local["log_scale"] - jnp.sum(weight * self.noise.log_prob(z))

    def _nodes(self) -> tuple[Array, Array]:
        return expectation_nodes(self.noise, self.num_nodes)

    def _draws(self, rng_key: Array, like: Array) -> Array:
        return jnp.asarray(self.noise.sample(rng_key, (self.num_draws, *like.shape)), like.dtype)

    @staticmethod
    def _at(local: dict[str, Array], z: Array) -> Array:
        return local["loc"][None] + jnp.exp(local["log_scale"])[None] * z
