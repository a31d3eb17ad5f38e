"""Switches, amplitudes and shared sites of a crossed predictor, and moves along its flat lines.

The entries enter the first three by their sums of squares and products alone, G = sum_e w slopes
slopes' and g = sum_e w slopes residual, which drawing a side leaves behind. As a function of the
amplitude x of component k the entries are exp(b x - G[k, k] x^2 / 2), and

    p(entries | z = 1) / p(entries | z = 0) = Z(p + b, q + G[k, k]) / Z(p, q),                  (1)
    Z(p, q) = integral of exp(p x - q x^2 / 2) over the support of the amplitude,

where the amplitude has the prior exp(p x - q x^2 / 2). A switch is drawn by (1), with its amplitude
integrated out.

The likelihood knows the product of factors and amplitude alone, so (u, s) -> (c u, s / c) leaves it
as it is. So does a constant moved from a shared site to all items of a side. Both moves depend on
the priors alone.

Cost: components^2.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax, random
from jax.scipy.special import log_ndtr
from jaxtyping import Float

from inference.distributions.truncated_normal import TruncatedNormal
from inference.program.program import Program
from inference.reading.crossed import Components, Crossed

__all__ = ["Tilted", "lower_bound", "rescaled", "shifted", "switched"]


def switched(
    rng_key: Array,
    crossed: Crossed,
    program: Program,
    values: dict[str, Any],
    sums: tuple[Float[Array, "column column"], Float[Array, " column"]],
) -> dict[str, Array]:
    """Draws every switch with its amplitude, and every shared site, in turn.

    Args:
        rng_key: a key.
        crossed: the structure.
        program: the model with its data.
        values: the values of all sites.
        sums: over the entries, of w slopes slopes' and of w slopes residual.
    """
    (gram, linear), (start, place) = sums, crossed.global_values(values)
    slope, fall = crossed.prior(program, values)
    name = crossed.components.switch if crossed.components else ""
    switch = values[name] if name else jnp.zeros(0)
    width, low = len(switch), lower_bound(program, crossed.components)
    linear = linear + gram @ _switched_on(crossed, values, start)

    def draw_one(k, drawn):
        x, on = drawn
        switch_key, value_key = random.split(random.fold_in(rng_key, k))
        prior = Tilted(slope[k] + fall[k] * start[k], fall[k], jnp.where(k < width, low, -jnp.inf))
        given = prior.times(linear[k] - gram[k] @ (x * on) + gram[k, k] * x[k] * on[k], gram[k, k])
        is_on = jnp.ones((), bool)
        if name:
            at = {**values, name: on[:width].astype(switch.dtype)}
            odds = crossed.log_odds(program, at, name, jnp.minimum(k, width - 1))
            odds = odds + given.log_mass() - prior.log_mass()
            is_on = (k >= width) | (random.logistic(switch_key, dtype=x.dtype) < odds)
        chosen = jax.tree.map(lambda new, old: jnp.where(is_on, new, old), given, prior)
        return x.at[k].set(chosen.draw(value_key)), on.at[k].set(is_on.astype(x.dtype))

    on = jnp.ones_like(start).at[:width].set(switch)
    x, on = lax.fori_loop(0, len(start), draw_one, (start, on))
    return place(x) | ({name: on[:width].astype(switch.dtype)} if name else {})


class Tilted(NamedTuple):
    """Density proportional to exp(p x - q x^2 / 2), elementwise, above `low` if that is given."""

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

    def draw(self, rng_key: Array) -> Array:
        """A draw of each element."""
        loc, scale = self.p / self.q, 1 / jnp.sqrt(self.q)
        if self.low is None:
            return loc + scale * random.normal(rng_key, loc.shape, loc.dtype)
        low = jnp.broadcast_to(self.low, loc.shape).astype(loc.dtype)
        return TruncatedNormal(loc, scale, low, jnp.full_like(low, jnp.inf)).sample(rng_key)

    def overrelaxed(self, rng_key: Array, x: Array, correlation: float) -> Array:
        """A draw that has this correlation with the draw x; without bounds."""
        mean, noise = self.p / self.q, random.normal(rng_key, x.shape, x.dtype)
        return mean + correlation * (x - mean) + jnp.sqrt((1 - correlation**2) / self.q) * noise

    def times(self, p: Array, q: Array) -> "Tilted":
        """The density times exp(p x - q x^2 / 2)."""
        return self._replace(p=self.p + p, q=self.q + q)

    def mixed(self, other: "Tilted", share: Array) -> "Tilted":
        """The geometric mixture: this one to the power `share`, the other to the rest."""
        mix = lambda own, its: its + share * (own - its)
        return self._replace(p=mix(self.p, other.p), q=mix(self.q, other.q))


def rescaled(
    rng_key: Array,
    crossed: Crossed,
    components: Components,
    program: Program,
    values: dict[str, Any],
) -> dict[str, Any]:
    """Moves scale between the factors and the amplitude of every component, by Metropolis."""
    _, amplitude, factors = components
    for name, side in zip(factors, crossed.sides, strict=True):
        rng_key, step_key, accept_key = random.split(rng_key, 3)
        s = values[amplitude]
        # about the width of the conditional of the logarithm
        log_c = 1.7 / jnp.sqrt(side.size) * random.normal(step_key, s.shape, s.dtype)
        new = {name: values[name] * jnp.exp(log_c), amplitude: s * jnp.exp(-log_c)}
        old, then = (_log_priors(program, at, tuple(new)) for at in (values, {**values, **new}))
        log_ratio = then - old + (side.size - 1) * log_c
        is_taken = jnp.log(random.uniform(accept_key, s.shape, s.dtype)) < log_ratio
        taken = {each: jnp.where(is_taken, new[each], values[each]) for each in new}
        values = {**values, **taken}
    return values


def shifted(
    rng_key: Array, crossed: Crossed, program: Program, values: dict[str, Any]
) -> dict[str, Any]:
    """Draws how each intercept is shared out between its shared site and the items of a side.

    The predictor does not change, so the draw is from the priors along that line.
    """
    for i, intercept in enumerate(crossed.intercepts):
        slope, fall = crossed.line(program, values, intercept)
        noise = random.normal(random.fold_in(rng_key, i), (), fall.dtype)
        step = slope / fall + noise / jnp.sqrt(fall)
        values = crossed.shifted(program, values, intercept, step)
    return values


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
