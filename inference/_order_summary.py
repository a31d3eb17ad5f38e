"""What is known of the order of a model between parts of the data, with something left for orders that nobody has tried:

    pi(m)  =  p(m | data so far) (1 - rest)                     of orders that were tried
    pi(m)  =  untried x (Poisson(m; rate) + zeta(m)) / 2        of others,         rest = the sum of these

Both terms begin at 1 and add up to 1 from there (`inference.distributions`). The Poisson has the expected order, as greatest likelihood
gives it: rate / (1 - exp(-rate)) = E[m | data so far]. Weights of terms stay as they are: of orders that have each a probability of their
own, a fit would leave nothing to terms that all of them share.

Center (2009), "Learning complex classification models from large data sets", whose terms begin at 0 and so lose a part of what they have.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from scipy.special import lambertw

from inference.distributions import PositivePoisson, Zeta

__all__ = ["Entry", "OrderSummary", "rate_of"]

LEAST_RATE = 1e-6  # next to which all is at 1


class Entry(NamedTuple):
    """With what an order begins, and from which data on."""

    log_prior: float
    log_evidence: float = 0.0  # of the family, of the data before
    error: float = 0.0
    update: int = 0  # the first that it has learned from; 0: the run


class OrderSummary(NamedTuple):
    """Of orders that were tried, with their probabilities."""

    orders: np.ndarray
    probability: np.ndarray  # of sum 1
    untried: float  # share of the terms, were no order tried

    @property
    def rest(self) -> float:
        """Of all orders that were not tried."""
        return self.untried * float(1 - np.exp(self._terms(self.orders)).sum())

    def log_prob(self, order: int) -> float:
        """Of any order, 1 and above."""
        if order in self.orders:
            return float(np.log(self.probability[self.orders == order].item()) + np.log1p(-self.rest))
        return float(np.log(self.untried)) + self._terms(np.array([order])).item()

    def _terms(self, orders: np.ndarray) -> np.ndarray:
        """Logarithms of what both terms say together."""
        terms = [PositivePoisson(rate_of(float(self.probability @ self.orders))), Zeta()]
        return np.asarray(dist.MixtureGeneral(dist.Categorical(jnp.full(2, 0.5)), terms).log_prob(jnp.asarray(orders)))


def rate_of(mean: float) -> float:
    """The rate of a Poisson without its zero that has this mean, 1 or above."""
    return LEAST_RATE if mean < 1 + LEAST_RATE / 2 else float(np.real(lambertw(-mean * np.exp(-mean)))) + mean
