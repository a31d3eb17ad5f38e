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

from inference.distributions import BinomialProbit, OrderedProbit
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
    """The same distribution, mask included, with another predictor."""
    base = unwrap(distribution)
    name, others = LINKS[type(base)]
    return type(base)(**{name: eta}, **{other: getattr(base, other) for other in others}, validate_args=False).mask(_mask_of(distribution))


def respond(rng_key: Array, distribution, value: Array) -> tuple[Array, Array]:
    """Response and weight, for a draw of the latent Normal; of a Normal, the value itself and the precision. A masked value weighs 0."""
    base, mask = unwrap(distribution), _mask_of(distribution)
    if isinstance(base, dist.Normal):
        response, weight = value, jnp.broadcast_to(base.scale**-2.0, jnp.shape(value))
    else:
        response, weight = base.augment(rng_key, value)
    return jnp.where(mask, response, 0), jnp.where(mask, weight, 0)


def _mask_of(distribution) -> Any:
    """Which values count."""
    mask = True
    while isinstance(distribution, dist.Independent | dist.ExpandedDistribution | dist.MaskedDistribution):
        mask = mask & distribution._mask if isinstance(distribution, dist.MaskedDistribution) else mask
        distribution = distribution.base_dist
    return mask


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
