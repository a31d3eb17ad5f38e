"""Moves of functions and their scales by way of surrogate data (Murray and Adams 2010).

With the noise of a function held, a small step of its scales changes all values, and with the
values held the scales can hardly move. Between the two are surrogate data: what would be seen of a
function at points where something happened,

    u[i] ~ Normal(function[i], variance).

Given them the noise of a function is Normal, and a draw of it is made of one from the prior by what
that draw would have made of the surrogate data (Matheron's rule):

    noise = before + root' inverse(covariance + variance) (u - level - root before - error),    before, error ~ Normal

where function = level + root noise and covariance = root root'. The scales move by Metropolis with
u, before and error held: as far as the points say how they lie, the function stays, elsewhere it
follows. All functions propose at once and are accepted one by one. The variance is that of the most
that a yes or no can say of its log odds.

With scales held, all noise moves by Hamiltonian Monte Carlo, in coordinates in which noise given
surrogate data is standard normal: no yes or no bends the density more than that, so that one size
of leaps serves everywhere.

Cost of a step of the scales: two Cholesky factors of points^3 for each function, and two products
of matrices where the model does not compute the covariance (`inference.reading.field`); of what all
trajectories share: points^3; of a leap of a trajectory: points^2.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax, random
from jax.scipy.linalg import solve_triangular

from inference.program.program import Program
from inference.reading.field import Field

__all__ = ["At", "Axes", "Map", "moved"]

VARIANCE = 4.0  # of surrogate data: the log probability of a yes or no is bent by a quarter at most
SMALLEST, LARGEST = -1.5, 0.3  # decimal logarithms of the steps of scales, in unconstrained space
LEAPS = 20  # of a trajectory
SHORTEST, LONGEST = 1.0, 3.0  # leaps, over the fourth root of the number of dimensions


class Map(NamedTuple):
    """How functions follow from noise, and how surrogate data lie."""

    level: Array  # [point, function]
    root: Array  # [function, point, noise]
    # [function, point, point], the Cholesky factor of the covariance of surrogate data over their
    # variance
    spread: Array
    # [point], one over the standard deviation of surrogate data, 0 where there are none
    half: Array

    @classmethod
    def of(cls, field: Field, program: Program, values: dict[str, Any], half: Array) -> "Map":
        """At these values of the scales."""
        level, root, covariance = field.affine(program, values)
        spread = jnp.linalg.cholesky(half[:, None] * covariance * half + jnp.eye(len(half)))
        return cls(level, root, spread, half)

    def function(self, noise: Array) -> Array:
        """The values that noise [function, noise] makes."""
        return self.level + jnp.einsum("kia,ka->ik", self.root, noise)

    def seen(self, noise: Array) -> Array:
        """What noise adds to surrogate data, over their standard deviation, [function, point]."""
        return self.half * jnp.einsum("kia,ka->ki", self.root, noise)

    def given(self, surrogate: Array, before: Array, error: Array) -> tuple[Array, Array]:
        """The noise [function, noise] that surrogate data [point, function] make of a draw from the
        prior, `before` and `error`, and the log density of the surrogate data, by function.
        """
        apart = self.half * (surrogate - self.level).T
        both = solve_triangular(
            self.spread, jnp.stack([apart, self.seen(before) + error], -1), lower=True
        )
        missing = solve_triangular(self.spread, both[..., :1] - both[..., 1:], lower=True, trans=1)[
            ..., 0
        ]
        log_density = -0.5 * jnp.sum(both[..., 0] ** 2, -1) - jnp.sum(
            jnp.log(jnp.diagonal(self.spread, 0, 1, 2)), -1
        )
        return before + jnp.einsum("kia,ki->ka", self.root, self.half * missing), log_density


class Axes(NamedTuple):
    """Coordinates in which noise given surrogate data is standard normal around its mean."""

    root: Array  # [function, noise, noise], of the precision of the noise

    @classmethod
    def of(cls, here: Map) -> "Axes":
        """Of the noise at these scales."""
        seen = here.half[:, None] * here.root
        return cls(
            jnp.linalg.cholesky(jnp.einsum("kia,kib->kab", seen, seen) + jnp.eye(seen.shape[-1]))
        )

    def rest(self, noise: Array) -> Array:
        """Where noise [function, noise] is."""
        return jnp.einsum("kba,kb->ka", self.root, noise)

    def noise(self, rest: Array) -> Array:
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
    """The values after so many steps of the scales and so many trajectories, and the shares of both
    that were taken.

    :param is_seen: [point], where something happened, or may have, that tells of the functions.
    :param log_events: log probability of that, given the values of the functions [point, function].
    """
    step_key, flight_key = random.split(rng_key)
    noise = field.noise(values).T
    here = Map.of(field, program, values, jnp.where(is_seen, VARIANCE**-0.5, 0.0))
    at = At({name: values[name] for name in field.scales}, noise, here.function(noise), here)
    rescaled, flown = jnp.ones(()), jnp.ones(())
    if field.scales and num_steps:
        step = lambda at, key: _step(key, field, program, values, log_events, at)
        at, taken = lax.scan(step, at, random.split(step_key, num_steps))
        rescaled = jnp.mean(taken, dtype=rescaled.dtype)
    if num_trajectories:
        at, taken = _flown(flight_key, log_events, at, num_trajectories)
        flown = jnp.mean(taken, dtype=flown.dtype)
    return {**field.with_noise(program, values, at.noise.T), **at.scales}, rescaled, flown


def _surrogate(rng_key: Array, at: At) -> tuple[Array, Array, Array, Array]:
    """Surrogate data, and the draw from the prior of which they make the noise; their log
    density as well.
    """
    data_key, before_key, error_key = random.split(rng_key, 3)
    surrogate = at.function + jnp.sqrt(VARIANCE) * random.normal(data_key, at.function.shape)
    surrogate = jnp.where(at.map.half[:, None] > 0, surrogate, at.map.level)
    before, error = (
        random.normal(before_key, at.noise.shape),
        random.normal(error_key, at.function.T.shape),
    )
    drawn, log_density = at.map.given(surrogate, before, error)
    # the same in `before` and, taken back, in what it adds to surrogate data leaves all else as it
    # was
    change = at.noise - drawn
    return surrogate, before + change, error - at.map.seen(change), log_density


def _step(
    rng_key: Array,
    field: Field,
    program: Program,
    values: dict[str, Any],
    log_events: Callable,
    at: At,
) -> tuple[At, Array]:
    """Every function proposes other scales."""
    surrogate_key, size_key, step_key, accept_key = random.split(rng_key, 4)
    *told, log_density = _surrogate(surrogate_key, at)
    width = len(at.noise)
    size = 10.0 ** random.uniform(size_key, (width,), minval=SMALLEST, maxval=LARGEST)
    steps = {}
    for i, (name, scale) in enumerate(at.scales.items()):
        steps[name] = jnp.reshape(size, (width, *(1,) * (scale.ndim - 1))) * random.normal(
            random.fold_in(step_key, i), scale.shape
        )
    start = {**values, **at.scales}
    end = field.stretched(program, start, steps)
    there = Map.of(field, program, end, at.map.half)
    noise, new_log_density = there.given(*told)
    proposed = At({name: end[name] for name in at.scales}, noise, there.function(noise), there)
    gain = (
        field.log_scales(program, end)
        - field.log_scales(program, start)
        + new_log_density
        - log_density
    )
    height = jnp.log(random.uniform(accept_key, (width,)))

    def decide(k: Array, so_far: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        function, events, taken = so_far
        other = function.at[:, k].set(proposed.function[:, k])
        others = log_events(other)
        accepts = height[k] < gain[k] + others - events
        return (
            jnp.where(accepts, other, function),
            jnp.where(accepts, others, events),
            taken.at[k].set(accepts),
        )

    none = jnp.zeros(width, bool)
    *_, taken = lax.fori_loop(0, width, decide, (at.function, log_events(at.function), none))
    by_row = lambda new, old: jnp.where(jnp.reshape(taken, (-1, *(1,) * (new.ndim - 1))), new, old)
    by_column = lambda new, old: jnp.where(taken, new, old)
    chosen = Map(
        by_column(there.level, at.map.level),
        by_row(there.root, at.map.root),
        by_row(there.spread, at.map.spread),
        at.map.half,
    )
    scales = jax.tree.map(by_row, proposed.scales, at.scales)
    return At(
        scales, by_row(noise, at.noise), by_column(proposed.function, at.function), chosen
    ), taken


def _flown(rng_key: Array, log_events: Callable, at: At, num_trajectories: int) -> tuple[At, Array]:
    """The noise at the end of so many trajectories, and which were taken."""
    here, axes = at.map, Axes.of(at.map)
    # [function, point, rest]
    effect = jnp.moveaxis(
        solve_triangular(axes.root, jnp.moveaxis(here.root, 1, 2), lower=True), 1, 2
    )

    def log_density(rest: Array) -> Array:
        apart = jnp.einsum("kia,ka->ik", effect, rest)
        return (
            log_events(here.level + apart)
            + 0.5 * jnp.sum((here.half[:, None] * apart) ** 2)
            - 0.5 * jnp.sum(rest**2)
        )

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
        end, end_speed, *there = lax.fori_loop(
            0, LEAPS, partial(leap, size=size), (rest, speed, height, pull)
        )
        gain = there[0] - height + 0.5 * jnp.sum(speed**2 - end_speed**2)
        accepts = jnp.log(random.uniform(accept_key)) < gain  # never of what is not a number
        return tuple(
            jnp.where(accepts, new, old) for new, old in zip((end, *there), start, strict=True)
        ), accepts

    start = axes.rest(at.noise)
    (rest, *_), taken = lax.scan(
        trajectory, (start, *slope(start)), random.split(rng_key, num_trajectories)
    )
    noise = axes.noise(rest)
    return at._replace(noise=noise, function=here.function(noise)), taken
