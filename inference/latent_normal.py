"""Observed sites with a Normal behind them: the predictor of each value, and what a value says of it.

eta = predictor(program, "y", values)                    # mean of the latent Normal
response, weight = respond(rng_key, distribution, value)  # given a draw of the latent: Normal(response | eta, 1 / sqrt(weight))
held = hold(program, "y", eta)                            # the model with eta as it is now, for sites that have no part in it
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array
from numpyro.primitives import Messenger

from inference.distributions import BinomialProbit, Missing, OrderedProbit
from inference.program import Program
from inference.sites import unwrap

__all__ = ["LINKS", "hold", "predictor", "rebuilt", "respond"]

LINKS = {  # class -> name of the mean of the latent Normal among its parameters, the others
    dist.Normal: ("loc", ("scale",)),
    OrderedProbit: ("predictor", ("cutpoints",)),
    BinomialProbit: ("predictor", ("trials",)),
}


def predictor(program: Program, site: str, values: Mapping[str, Any]) -> Array:
    """Of an observed site, one for each of its values."""
    fn = unwrap(program.trace(values)[site]["fn"])
    return jnp.broadcast_to(getattr(fn, LINKS[type(fn)][0]), program.sites[site].shape)


def rebuilt(distribution, eta: Array):
    """The same distribution, what is masked and missing included, with another predictor."""
    if isinstance(distribution, Missing):
        return Missing(rebuilt(distribution.base_dist, eta), validate_args=False)
    if isinstance(distribution, dist.MaskedDistribution):
        return rebuilt(distribution.base_dist, eta).mask(distribution._mask)
    if isinstance(distribution, dist.Independent | dist.ExpandedDistribution):  # of whole shape by its predictor
        return rebuilt(distribution.base_dist, eta)
    name, others = LINKS[type(distribution)]
    return type(distribution)(**{name: eta}, **{other: getattr(distribution, other) for other in others}, validate_args=False)


def respond(rng_key: Array, distribution, value: Array) -> tuple[Array, Array]:
    """Response and weight, for a draw of the latent Normal; of a Normal, the value itself and the precision. What is masked or missing
    weighs 0."""
    base, counts = unwrap(distribution), _counts(distribution, value)
    value = jnp.where(counts, value, 0)
    if isinstance(base, dist.Normal):
        response, weight = value, jnp.broadcast_to(base.scale**-2.0, jnp.shape(value))
    else:
        response, weight = base.augment(rng_key, value)
    return jnp.where(counts, response, 0), jnp.where(counts, weight, 0)


def _counts(distribution, value: Array) -> Array:
    """Which values say something."""
    counts = jnp.ones(jnp.shape(value), bool)
    while distribution is not unwrap(distribution):
        if isinstance(distribution, Missing) and jnp.issubdtype(jnp.result_type(value), jnp.inexact):
            counts = counts & ~jnp.isnan(value)
        if isinstance(distribution, dist.MaskedDistribution):
            counts = counts & distribution._mask
        distribution = distribution.base_dist
    return counts


class _Hold(Messenger):
    """Gives one site a predictor that is known."""

    def __init__(self, fn, site: str, eta: Array):
        super().__init__(fn)
        self.site, self.eta = site, eta

    def process_message(self, msg):
        if msg["name"] == self.site:
            msg["fn"] = rebuilt(msg["fn"], self.eta)


def hold(program: Program, site: str, eta: Array) -> Program:
    """The model with a predictor that is known: nothing of it is computed."""
    return Program(_Hold(program.model, site, eta), *program.args, **program.kwargs)
