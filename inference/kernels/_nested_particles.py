"""Weighted points of a nested sampler: as a group of the tree, and as draws of equal weight."""

import numpy as np
from jax import Array, random

from inference.protocol import Results

__all__ = ["particles", "resampled"]


def resampled(rng_key: Array, log_weight: Array, num_draws: int) -> np.ndarray:
    """Indices in proportion to the weights, by systematic resampling, in random order."""
    share = np.cumsum(np.exp(np.asarray(log_weight, float) - np.logaddexp.reduce(np.asarray(log_weight, float))))
    place_key, order_key = random.split(rng_key)
    places = (np.arange(num_draws) + float(random.uniform(place_key))) / num_draws
    index = np.minimum(np.searchsorted(share / share[-1], places), len(share) - 1)
    return np.asarray(random.permutation(order_key, index))


def particles(named: dict[str, Array], **beside: Array) -> Results:
    """The group `particles`: what is known of each point, and its sites."""
    named = {name.replace("/", "."): value for name, value in named.items()}
    return Results({"particles": beside | named}, {}, dict.fromkeys(beside | named, ("particle",)))
