"""Switches, amplitudes and shared sites of a crossed predictor; moves along flat directions.

The first three depend on the entries only through sums, G = sum_e w slopes slopes' and
g = sum_e w slopes residual, which the draw of a side returns. As a function of the amplitude x of
component k the likelihood is exp(b x - G[k, k] x^2 / 2), where b is g[k] less what the other
components explain, and

    p(entries | z = 1) / p(entries | z = 0) = Z(p + b, q + G[k, k]) / Z(p, q),                  (1)
    Z(p, q) = integral of exp(p x - q x^2 / 2) over the support of the amplitude,

where the amplitude has the prior exp(p x - q x^2 / 2). A switch is drawn by (1), with its amplitude
integrated out.

The likelihood depends only on the product of factors and amplitude, so (u, s) -> (c u, s / c) does
not change it. Nor does a constant that is moved from a shared site to all items of a side. In these
flat directions moves depend on the priors alone.

Cost: components^2.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax, random
from jax.scipy.special import log_ndtr, logit
from jaxtyping import Float

from inference.distributions.truncated_normal import TruncatedNormal
from inference.program.program import Program
from inference.reading.crossed import Components, Crossed

__all__ = ["Tilted", "lower_bound", "rescaled", "shifted", "switched", "uniforms"]


def switched(
    uniform: Float[Array, "column two"],
    crossed: Crossed,
    program: Program,
    values: dict[str, Any],
    prior: tuple[Array, Array],
    sums: tuple[Float[Array, "column column"], Float[Array, " column"]],
    switches: Array | bool = True,
) -> dict[str, Array]:
    """Draws every switch with its amplitude, and every shared site, in turn.

    Args:
        uniform: numbers between 0 and 1 at random.
        crossed: the structure.
        program: the model with its data.
        values: the values of all sites.
        prior: slope and fall of amplitudes and shared sites, by `crossed.priors`.
        sums: over the entries, of w slopes slopes' and of w slopes residual.
        switches: whether switches are drawn; they stay otherwise, and the sums of components that
            are switched off are not used.
    """
    (gram, linear), (start, place), (slope, fall) = sums, crossed.global_values(values), prior
    name = crossed.components.switch if crossed.components else ""
    switch = values[name] if name else jnp.zeros(0)
    width, low = len(switch), lower_bound(program, crossed.components)
    linear = linear + gram @ _switched_on(crossed, values, start)

    def draw_one(k, drawn):
        x, on = drawn
        prior = Tilted(slope[k] + fall[k] * start[k], fall[k], jnp.where(k < width, low, -jnp.inf))
        given = prior.times(linear[k] - gram[k] @ (x * on) + gram[k, k] * x[k] * on[k], gram[k, k])
        is_on = jnp.ones((), bool)
        if name:
            at = {**values, name: on[:width].astype(switch.dtype)}
            odds = crossed.log_odds(program, at, name, jnp.minimum(k, width - 1))
            both = jax.tree.map(lambda *each: jnp.stack(each), prior, given)
            before, after = both.log_mass()
            odds = odds + after - before
            is_on = logit(uniform[k, 0]) < odds
            is_on = (k >= width) | jnp.where(switches, is_on, on[k] > 0)
        chosen = jax.tree.map(lambda new, old: jnp.where(is_on, new, old), given, prior)
        return x.at[k].set(chosen.icdf(uniform[k, 1])), on.at[k].set(is_on.astype(x.dtype))

    on = jnp.ones_like(start).at[:width].set(switch)
    x, on = lax.fori_loop(0, len(start), draw_one, (start, on))
    return place(x) | ({name: on[:width].astype(switch.dtype)} if name else {})


class Tilted(NamedTuple):
    """Normals of density ~ exp(p x - q x^2 / 2), elementwise; truncated below at a given `low`."""

    p: Array
    q: Array
    low: Array | None = None

    def log_mass(self) -> Array:
        """The log normaliser, log Z of (1), less log(2 pi) / 2."""
        mean = self.p / self.q
        above = 0.0 if self.low is None else log_ndtr((mean - self.low) * jnp.sqrt(self.q))
        return self.p * mean / 2 - jnp.log(self.q) / 2 + above

    def log_prob(self, x: Array) -> Array:
        """Log density of each element."""
        return self.p * x - self.q * x * x / 2 - self.log_mass() - jnp.log(2 * jnp.pi) / 2

    def at(self, noise: Array) -> Array:
        """The elements at standard Normals; only without `low`."""
        return self.p / self.q + noise / jnp.sqrt(self.q)

    def icdf(self, uniform: Array) -> Array:
        """The elements at numbers between 0 and 1, by the inverse of the distribution function."""
        loc, scale = self.p / self.q, 1 / jnp.sqrt(self.q)
        low = jnp.broadcast_to(-jnp.inf if self.low is None else self.low, loc.shape)
        high = jnp.full(loc.shape, jnp.inf, loc.dtype)
        return TruncatedNormal(loc, scale, low.astype(loc.dtype), high).icdf(uniform)

    def overrelaxed(self, noise: Array, x: Array, correlation: float) -> Array:
        """A draw that has this correlation with an earlier draw x; only without `low`."""
        mean = self.p / self.q
        return mean + correlation * (x - mean) + jnp.sqrt((1 - correlation**2) / self.q) * noise

    def times(self, p: Array, q: Array) -> "Tilted":
        """The density times exp(p x - q x^2 / 2)."""
        return self._replace(p=self.p + p, q=self.q + q)

    def mixed(self, other: "Tilted", share: Array) -> "Tilted":
        """The geometric mixture: this density to the power `share`, the other to 1 - `share`."""
        mix = lambda own, its: its + share * (own - its)
        return self._replace(p=mix(self.p, other.p), q=mix(self.q, other.q))


def uniforms(rng_key: Array, size: int, dtype: Any) -> tuple[Array, Array]:
    """Numbers between 0 and 1 at random, never 0 or 1; and the standard Normals at them."""
    uniform = random.uniform(rng_key, (size,), dtype, jnp.finfo(dtype).eps / 2)
    return uniform, jnp.sqrt(2.0).astype(dtype) * lax.erf_inv(2 * uniform - 1)


def rescaled(
    noise: Float[Array, "side component"],
    uniform: Float[Array, "side component"],
    crossed: Crossed,
    components: Components,
    program: Program,
    values: dict[str, Any],
) -> dict[str, Any]:
    """Moves scale between the factors and the amplitude of every component, by Metropolis."""
    _, amplitude, factors = components
    names, sizes = (*factors, amplitude), jnp.array([side.size for side in crossed.sides])

    def move(values, given):
        noise, uniform, size, powers = given
        # about the width of the conditional of the logarithm
        log_c = 1.7 / jnp.sqrt(size) * noise.astype(values[amplitude].dtype)
        moved_by = lambda log_c: {
            name: values[name] * jnp.exp(power * log_c)
            for name, power in zip(names, powers, strict=True)
        }
        log_prior = lambda log_c: _log_priors(program, {**values, **moved_by(log_c)}, names)
        old, then = lax.map(log_prior, jnp.stack([jnp.zeros_like(log_c), log_c]))
        moved = moved_by(log_c)
        log_ratio = then - old + (size - 1) * log_c
        is_taken = jnp.log(uniform) < log_ratio
        taken = {name: jnp.where(is_taken, moved[name], values[name]) for name in names}
        return {**values, **taken}, None

    # the factors of a side times c, the amplitude divided by it
    powers = jnp.array([[1.0, 0.0, -1.0], [0.0, 1.0, -1.0]])
    return lax.scan(move, values, (noise, uniform, sizes, powers))[0]


def shifted(
    noise: Float[Array, " intercept"], crossed: Crossed, program: Program, values: dict[str, Any]
) -> dict[str, Any]:
    """Draws how each intercept is split between its shared site and the items of a side.

    The predictor does not change, so the split depends on the priors alone.
    """
    if not crossed.intercepts:
        return values

    def move(values, given):
        noise, direction = given
        slope, fall = crossed.along(program, values, direction)
        step = slope / fall + noise / jnp.sqrt(fall)
        return {**values, **{k: values[k] + step * each for k, each in direction.items()}}, None

    directions = [crossed.direction(program, each) for each in crossed.intercepts]
    both = jax.tree.map(lambda *each: jnp.stack(each), *directions)
    return lax.scan(move, values, (noise, both))[0]


def _log_priors(program: Program, values: dict[str, Any], names: tuple[str, ...]) -> Array:
    terms = program.log_probs(values)
    each = [terms[name].reshape(-1, terms[name].shape[-1]).sum(0) for name in names]
    return jnp.sum(jnp.stack(each), axis=0)


def lower_bound(program: Program, components: Components | None) -> float:
    """The lower bound of the amplitudes; -inf where there is none."""
    support = program.sites[components.amplitude].support if components else None
    return getattr(support, "lower_bound", -jnp.inf)


def _switched_on(crossed: Crossed, values: dict[str, Any], x: Array) -> Array:
    """Amplitudes and shared sites, 0 for amplitudes that are switched off."""
    if not crossed.components:
        return x
    switch = values[crossed.components.switch]
    return x.at[: len(switch)].multiply(switch)
