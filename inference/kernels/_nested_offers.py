"""Draws from where nested sampling starts, for births to take in place of a walk.

While the limit is low, draws above it are cheaper than walks and remember nothing. The host makes them, many at a time: within a step, code
that draws from a Dirichlet would take as long to compile as half of the rest.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, random

from inference.exchangeable import Exchangeable
from inference.kernels._nested_names import together
from inference.kernels._nested_state import Nest, Offers
from inference.protocol import Algorithm
from inference.split import Split

__all__ = ["Offering"]

OFFERS = 4  # for each step of a walk: all fail where one in e^4 births should
IN_STORE = 10  # for each live point; new ones when half of them are used
BLOCK = 500  # draws that are made in one go


class Offering(Algorithm):
    """A kernel whose births are offered draws."""

    split: Split
    exchange: Exchangeable | None
    num_live: int
    num_sweeps: float

    def _draw_from(self, split: Split, given: Any) -> Callable:
        """What draws a vector from where this starts; None is given where that is the prior."""
        return split.draw

    def _draws(self, rng_key: Array, num_draws: int, split: Split, given: Any) -> Array:
        """[draw, size], from where this starts with what is given. What is compiled for one block serves for all."""
        numbers = range(-(-num_draws // BLOCK))
        return jnp.concatenate([self._block(split, random.fold_in(rng_key, number), given) for number in numbers])[:num_draws]

    @partial(jax.jit, static_argnums=(0, 1), compiler_options={"xla_backend_optimization_level": 0})  # a third to compile, 4 times to run
    def _block(self, split: Split, rng_key: Array, given: Any) -> Array:
        return jax.vmap(self._draw_from(split, given))(random.split(rng_key, BLOCK))

    def _offers(self, rng_key: Array, split: Split, given: Any) -> Offers:
        own_key, next_key = random.split(rng_key)
        z = self._draws(own_key, max(BLOCK, IN_STORE * self.num_live), split, given)
        return Offers(z, jnp.zeros((), jnp.int32), jnp.zeros((), bool), random.key_data(next_key))

    def _used(self, state: Nest, count: Array) -> Offers:
        """The offers without so many more."""
        num_used = state.offers.num_used + count
        return state.offers._replace(num_used=num_used, are_worn=(2 * num_used > len(state.offers.z)) & (self._num_offers(state) > 0))

    def _with_offers(self, state: Nest, split: Split, given: Any) -> Nest:
        """New ones, their members named as those of the live points."""
        offers = self._offers(random.wrap_key_data(state.offers.rng_key), split, given)
        return state._replace(offers=offers._replace(z=together(self.exchange, offers.z, state.reference)))

    def _num_offers(self, state: Nest) -> Array:
        """Draws that each birth may be, before it walks: some, while they lie above the limit more often than a walk has steps. Of modes
        that have come apart, a draw would not know which it is in."""
        num_steps = self._num_steps(state)
        is_cheap = (state.num_modes == 1) & (state.volumes.log_volume[0, 0] > -jnp.log(num_steps.astype(state.live.z.dtype)))
        return jnp.where(is_cheap, OFFERS * num_steps, 0)

    def _num_steps(self, state: Nest) -> Array:
        """Of a walk."""
        return jnp.round(max(1.0, self.num_sweeps * self.split.size) * jnp.exp(state.longer)).astype(jnp.int32)
