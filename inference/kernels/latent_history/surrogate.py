"""Moves of functions and their scales by surrogate data (Murray and Adams 2010).

With the noise of a function held, a small step of its scales changes all values; with the values
held, the scales can hardly move. In between are surrogate data, noisy observations of a function at
points where something happened,

    u[i] ~ Normal(function[i], variance).

Given them the noise of a function is Normal. A draw of it is a draw from the prior, corrected by
the surrogate data (Matheron's rule):

    noise = before + root' inverse(covariance + variance) (u - level - root before - error),
    before, error ~ Normal

where function = level + root noise and covariance = root root'. The scales move by Metropolis with
u, before and error held. Where the points inform a function it stays as it is; elsewhere it follows
the scales. All functions propose at once and are accepted one by one. The variance of the surrogate
data is 4, one over the largest information that a binary outcome has about its log odds.

With scales held, all noise moves by Hamiltonian Monte Carlo, in coordinates in which noise given
surrogate data is standard normal. No binary outcome curves the log density more than its surrogate
datum does, so that one range of step sizes serves everywhere.

Cost of a step of the scales: two Cholesky factors of points^3 for each function, and two products
of matrices where the model does not compute the covariance (`inference.reading.field`); points^3
once for all trajectories; points^2 for each leap.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax, random
from jax.scipy.linalg import solve_triangular
from jaxtyping import Float

from inference.program.program import Program
from inference.reading.field import Field

__all__ = ["AffineMap", "FieldState", "Whitening", "move_field"]

# of surrogate data: the second derivative of the log probability of a binary outcome is 1/4 at most
VARIANCE = 4.0


class AffineMap(NamedTuple):
    """The functions as affine functions of noise, and the covariance of surrogate data."""

    level: Array  # [point, function]
    root: Array  # [function, point, noise]
    # [function, point, point], Cholesky factor of the covariance of surrogate data over VARIANCE
    spread: Array
    half: Array  # [point], one over the standard deviation of surrogate data, 0 without them

    @classmethod
    def of(cls, field: Field, program: Program, values: dict[str, Any], half: Array) -> "AffineMap":
        """The map for these values of the scales."""
        level, root, covariance = field.affine(program, values)
        spread = jnp.linalg.cholesky(half[:, None] * covariance * half + jnp.eye(len(half)))
        return cls(level, root, spread, half)

    def function(self, noise: Array) -> Array:
        """The values of the functions with noise [function, noise]."""
        return self.level + jnp.einsum("kia,ka->ik", self.root, noise)

    def seen(self, noise: Array) -> Array:
        """The part of noise in surrogate data, over their standard deviation, [function, point]."""
        return self.half * jnp.einsum("kia,ka->ki", self.root, noise)

    def given(
        self,
        surrogate: Float[Array, "point function"],
        before: Float[Array, "function noise"],
        error: Float[Array, "function point"],
    ) -> tuple[Float[Array, "function noise"], Float[Array, " function"]]:
        """The noise by Matheron's rule, and the log density of the surrogate data.

        Args:
            surrogate: surrogate data.
            before: noise drawn from the prior.
            error: drawn errors of the surrogate data.
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


class Whitening(NamedTuple):
    """Coordinates in which noise given surrogate data is standard normal around its mean."""

    root: Array  # [function, noise, noise], of the precision of the noise

    @classmethod
    def of(cls, here: AffineMap) -> "Whitening":
        """The coordinates for these scales."""
        seen = here.half[:, None] * here.root
        return cls(
            jnp.linalg.cholesky(jnp.einsum("kia,kib->kab", seen, seen) + jnp.eye(seen.shape[-1]))
        )

    def rest(self, noise: Array) -> Array:
        """The coordinates of noise [function, noise]."""
        return jnp.einsum("kba,kb->ka", self.root, noise)

    def noise(self, rest: Array) -> Array:
        """The noise with these coordinates."""
        return solve_triangular(self.root, rest[..., None], lower=True, trans=1)[..., 0]


class FieldState(NamedTuple):
    """The present scales, noise and functions."""

    scales: dict[str, Array]
    noise: Array  # [function, noise]
    function: Array  # [point, function]
    map: AffineMap


def move_field(
    rng_key: Array,
    field: Field,
    program: Program,
    values: dict[str, Any],
    is_seen: Array,
    log_events: Callable[[Array], Array],
    num_steps: int,
    num_trajectories: int,
) -> tuple[dict[str, Any], Array, Array]:
    """Moves scales and noise.

    Args:
        rng_key: a key.
        field: the functions.
        program: the model with its data.
        values: the values of all sites.
        is_seen: [point], whether an event may have happened there that depends on the functions.
        log_events: log probability of all events, given the functions' values [point, function].
        num_steps: of the scales.
        num_trajectories: of the noise.

    Returns:
        All values, and the acceptance rates of steps and trajectories.
    """
    step_key, flight_key = random.split(rng_key)
    noise = field.noise(values).T
    here = AffineMap.of(field, program, values, jnp.where(is_seen, VARIANCE**-0.5, 0.0))
    at = FieldState(
        {name: values[name] for name in field.scales}, noise, here.function(noise), here
    )
    rescaled, flown = jnp.ones(()), jnp.ones(())
    if field.scales and num_steps:
        step = lambda at, key: _step(key, field, program, values, log_events, at)
        at, taken = lax.scan(step, at, random.split(step_key, num_steps))
        rescaled = jnp.mean(taken, dtype=rescaled.dtype)
    if num_trajectories:
        at, taken = _flown(flight_key, log_events, at, num_trajectories)
        flown = jnp.mean(taken, dtype=flown.dtype)
    return {**field.with_noise(program, values, at.noise.T), **at.scales}, rescaled, flown


def _surrogate(rng_key: Array, at: FieldState) -> tuple[Array, Array, Array, Array]:
    """Surrogate data, prior draws that they turn into the present noise, and their log density."""
    data_key, before_key, error_key = random.split(rng_key, 3)
    surrogate = at.function + jnp.sqrt(VARIANCE) * random.normal(data_key, at.function.shape)
    surrogate = jnp.where(at.map.half[:, None] > 0, surrogate, at.map.level)
    before, error = (
        random.normal(before_key, at.noise.shape),
        random.normal(error_key, at.function.T.shape),
    )
    drawn, log_density = at.map.given(surrogate, before, error)
    # added to `before` and taken from `error`, the change leaves all else as it was
    change = at.noise - drawn
    return surrogate, before + change, error - at.map.seen(change), log_density


def _step(
    rng_key: Array,
    field: Field,
    program: Program,
    values: dict[str, Any],
    log_events: Callable,
    at: FieldState,
) -> tuple[FieldState, Array]:
    """The state after every function has proposed new scales, and which are accepted."""
    surrogate_key, size_key, step_key, accept_key = random.split(rng_key, 4)
    *given, log_density = _surrogate(surrogate_key, at)
    width = len(at.noise)
    # in unconstrained space
    size = 10.0 ** random.uniform(size_key, (width,), minval=-1.5, maxval=0.3)
    steps = {
        name: jnp.reshape(size, (width, *(1,) * (scale.ndim - 1)))
        * random.normal(random.fold_in(step_key, i), scale.shape)
        for i, (name, scale) in enumerate(at.scales.items())
    }
    start = {**values, **at.scales}
    end = field.stretched(program, start, steps)
    there = AffineMap.of(field, program, end, at.map.half)
    noise, new_log_density = there.given(*given)
    proposed = FieldState(
        {name: end[name] for name in at.scales}, noise, there.function(noise), there
    )
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
    chosen = AffineMap(
        by_column(there.level, at.map.level),
        by_row(there.root, at.map.root),
        by_row(there.spread, at.map.spread),
        at.map.half,
    )
    scales = jax.tree.map(by_row, proposed.scales, at.scales)
    return FieldState(
        scales, by_row(noise, at.noise), by_column(proposed.function, at.function), chosen
    ), taken


def _flown(
    rng_key: Array, log_events: Callable, at: FieldState, num_trajectories: int
) -> tuple[FieldState, Array]:
    """The state after Hamiltonian trajectories of the noise, and which are accepted."""
    here, axes = at.map, Whitening.of(at.map)
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
        size = random.uniform(size_key, minval=1.0, maxval=3.0) * rest.size**-0.25
        end, end_speed, *there = lax.fori_loop(
            0, 20, partial(leap, size=size), (rest, speed, height, pull)
        )
        gain = there[0] - height + 0.5 * jnp.sum(speed**2 - end_speed**2)
        accepts = jnp.log(random.uniform(accept_key)) < gain  # False where it is not a number
        return tuple(
            jnp.where(accepts, new, old) for new, old in zip((end, *there), start, strict=True)
        ), accepts

    start = axes.rest(at.noise)
    (rest, *_), taken = lax.scan(
        trajectory, (start, *slope(start)), random.split(rng_key, num_trajectories)
    )
    noise = axes.noise(rest)
    return at._replace(noise=noise, function=here.function(noise)), taken
