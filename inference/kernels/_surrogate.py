"""Moves of functions and their scales by way of surrogate data (Murray and Adams 2010).

With the noise of a function held, a small step of its scales changes all values, and with the values held the scales can hardly move.
Between the two are surrogate data: what would be seen of a function at points where something happened,

    u[i] ~ Normal(function[i], variance).

Given them the noise of a function is Normal in closed form, noise = mean(u, scales) + inverse(root)' rest with rest ~ Normal(0, 1) and
root root' its precision. The scales move with u and rest held, by Metropolis: as far as the points say how they lie, the function stays,
elsewhere it follows. All functions propose at once and are accepted one by one. The variance is that of the most that a yes or no can say
of its log odds.

With scales held, all noise moves by Hamiltonian Monte Carlo, in coordinates in which noise given surrogate data is standard normal: no yes
or no bends the density more than that, so that one size of leaps serves everywhere.

Cost of a step of the scales: points^3 for each function, and so of what all trajectories share; of a leap of a trajectory: points^2.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax, random
from jax.scipy.linalg import solve_triangular

from inference.field import Field
from inference.program import Program

__all__ = ["moved"]

VARIANCE = 4.0  # of surrogate data: the log probability of a yes or no is bent by a quarter at most
SMALLEST, LARGEST = -1.5, 0.3  # decimal logarithms of the steps of scales, in unconstrained space
LEAPS = 20  # of a trajectory
SHORTEST, LONGEST = 1.0, 3.0  # leaps, over the fourth root of the number of dimensions


class Map(NamedTuple):
    """How functions follow from noise, and the root of the precision of the noise given surrogate data."""

    level: Array  # [point, function]
    effect: Array  # [function, point, noise]
    root: Array  # [function, noise, noise]

    @classmethod
    def of(cls, field: Field, program: Program, values: dict[str, Any], weight: Array) -> "Map":
        """`weight` [point]: precision of the surrogate data, 0 where there are none."""
        level, effect = field.affine(program, values)
        precision = jnp.einsum("kia,kib->kab", effect * weight[:, None], effect) + jnp.eye(effect.shape[-1])
        return cls(level, effect, jnp.linalg.cholesky(precision))

    def function(self, noise: Array) -> Array:
        """The values that noise [function, noise] makes."""
        return self.level + jnp.einsum("kia,ka->ik", self.effect, noise)

    def given(self, surrogate: Array, weight: Array) -> tuple[Array, Array]:
        """Mean of the noise [function, noise] given surrogate data, and the log density of these, by function."""
        apart = (surrogate - self.level).T
        half = solve_triangular(self.root, jnp.einsum("kia,ki->ka", self.effect, weight * apart)[..., None], lower=True)
        mean = solve_triangular(self.root, half, lower=True, trans=1)[..., 0]
        size = jnp.sum(jnp.log(jnp.diagonal(self.root, 0, 1, 2)), -1)
        return mean, 0.5 * jnp.sum(half[..., 0] ** 2, -1) - 0.5 * jnp.sum(weight * apart**2, -1) - size

    def rest(self, apart: Array) -> Array:
        """What of the noise, away from its mean, surrogate data leave open."""
        return jnp.einsum("kba,kb->ka", self.root, apart)

    def apart(self, rest: Array) -> Array:
        """And back."""
        return solve_triangular(self.root, rest[..., None], lower=True, trans=1)[..., 0]


class At(NamedTuple):
    """Where the moves are."""

    scales: dict[str, Array]
    noise: Array  # [function, noise]
    function: Array  # [point, function]
    map: Map


def moved(
    rng_key: Array,
    field: Field,
    program: Program,
    values: dict[str, Any],
    is_seen: Array,
    log_events: Callable[[Array], Array],
    num_steps: int,
    num_trajectories: int,
) -> tuple[dict[str, Any], Array, Array]:
    """The values after so many steps of the scales and so many trajectories, and the shares of both that were taken.

    :param is_seen: [point], where something happened, or may have, that tells of the functions.
    :param log_events: log probability of that, given the values of the functions [point, function].
    """
    step_key, flight_key = random.split(rng_key)
    weight = jnp.where(is_seen, 1 / VARIANCE, 0.0)
    noise = field.noise(values).T
    here = Map.of(field, program, values, weight)
    at = At({name: values[name] for name in field.scales}, noise, here.function(noise), here)
    rescaled, flown = jnp.ones(()), jnp.ones(())
    if field.scales and num_steps:
        step = lambda at, key: _step(key, field, program, values, weight, log_events, at)
        at, taken = lax.scan(step, at, random.split(step_key, num_steps))
        rescaled = jnp.mean(taken, dtype=rescaled.dtype)
    if num_trajectories:
        at, taken = _flown(flight_key, weight, log_events, at, num_trajectories)
        flown = jnp.mean(taken, dtype=flown.dtype)
    return {**field.with_noise(program, values, at.noise.T), **at.scales}, rescaled, flown


def _surrogate(rng_key: Array, weight: Array, function: Array) -> Array:
    """Where there are none, they are 0 and count nothing."""
    drawn = function + jnp.sqrt(VARIANCE) * random.normal(rng_key, function.shape)
    return jnp.where(weight[:, None] > 0, drawn, 0.0)


def _step(rng_key: Array, field: Field, program: Program, values: dict[str, Any], weight: Array, log_events: Callable, at: At):
    """Every function proposes other scales."""
    surrogate_key, size_key, step_key, accept_key = random.split(rng_key, 4)
    surrogate = _surrogate(surrogate_key, weight, at.function)
    mean, log_density = at.map.given(surrogate, weight)
    width = len(mean)
    size = 10.0 ** random.uniform(size_key, (width,), minval=SMALLEST, maxval=LARGEST)
    steps = {}
    for i, (name, scale) in enumerate(at.scales.items()):
        steps[name] = jnp.reshape(size, (width, *(1,) * (scale.ndim - 1))) * random.normal(random.fold_in(step_key, i), scale.shape)
    start = {**values, **at.scales}
    end = field.stretched(program, start, steps)
    there = Map.of(field, program, end, weight)
    new_mean, new_log_density = there.given(surrogate, weight)
    noise = new_mean + there.apart(at.map.rest(at.noise - mean))
    proposed = At({name: end[name] for name in at.scales}, noise, there.function(noise), there)
    gain = field.log_scales(program, end) - field.log_scales(program, start) + new_log_density - log_density
    height = jnp.log(random.uniform(accept_key, (width,)))

    def decide(k: Array, so_far: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        function, events, taken = so_far
        other = function.at[:, k].set(proposed.function[:, k])
        others = log_events(other)
        accepts = height[k] < gain[k] + others - events
        return jnp.where(accepts, other, function), jnp.where(accepts, others, events), taken.at[k].set(accepts)

    none = jnp.zeros(width, bool)
    *_, taken = lax.fori_loop(0, width, decide, (at.function, log_events(at.function), none))
    by_row = lambda new, old: jnp.where(jnp.reshape(taken, (-1, *(1,) * (new.ndim - 1))), new, old)
    by_column = lambda new, old: jnp.where(taken, new, old)
    chosen = Map(by_column(there.level, at.map.level), by_row(there.effect, at.map.effect), by_row(there.root, at.map.root))
    scales = jax.tree.map(by_row, proposed.scales, at.scales)
    return At(scales, by_row(noise, at.noise), by_column(proposed.function, at.function), chosen), taken


def _flown(rng_key: Array, weight: Array, log_events: Callable, at: At, num_trajectories: int) -> tuple[At, Array]:
    """The noise at the end of so many trajectories, and which were taken."""
    here = at.map
    spread = jnp.moveaxis(solve_triangular(here.root, jnp.moveaxis(here.effect, 1, 2), lower=True), 1, 2)  # [function, point, rest]

    def log_density(rest: Array) -> Array:
        apart = jnp.einsum("kia,ka->ik", spread, rest)
        return log_events(here.level + apart) + 0.5 * jnp.sum(weight[:, None] * apart**2) - 0.5 * jnp.sum(rest**2)

    slope = jax.value_and_grad(log_density)

    def leap(_: Any, now: tuple[Array, ...], size: Array) -> tuple[Array, ...]:
        rest, speed, _, pull = now
        speed = speed + 0.5 * size * pull
        rest = rest + size * speed
        height, pull = slope(rest)
        return rest, speed + 0.5 * size * pull, height, pull

    def trajectory(start: tuple[Array, ...], key: Array) -> tuple[tuple[Array, ...], Array]:
        speed_key, size_key, accept_key = random.split(key, 3)
        rest, height, pull = start
        speed = random.normal(speed_key, rest.shape)
        size = random.uniform(size_key, minval=SHORTEST, maxval=LONGEST) * rest.size**-0.25
        end, end_speed, *there = lax.fori_loop(0, LEAPS, partial(leap, size=size), (rest, speed, height, pull))
        gain = there[0] - height + 0.5 * jnp.sum(speed**2 - end_speed**2)
        accepts = jnp.log(random.uniform(accept_key)) < gain  # never of what is not a number
        return tuple(jnp.where(accepts, new, old) for new, old in zip((end, *there), start, strict=True)), accepts

    start = here.rest(at.noise)
    (rest, *_), taken = lax.scan(trajectory, (start, *slope(start)), random.split(rng_key, num_trajectories))
    noise = here.apart(rest)
    return at._replace(noise=noise, function=here.function(noise)), taken
