"""Switches, amplitudes and shared sites of a crossed predictor, and what its entries cannot tell
apart.

The entries enter the first three by their sums of squares and products alone, G = sum_e w slopes
slopes' and g = sum_e w slopes residual, which are left over from drawing a side. As a function of
the amplitude x of component k the entries are exp(b x - G[k, k] x^2 / 2), and

    p(entries | z = 1) / p(entries | z = 0) = Z(p + b, q + G[k, k]) / Z(p, q),   Z(p, q) = integral of exp(p x - q x^2 / 2)      (1)

over the support of the amplitude, whose prior falls like that with p, q. A switch is drawn by (1),
with its amplitude integrated out.

Of factors and amplitude of a component only the product counts, (u, s) -> (c u, s / c), and the
level of all entries may be that of a shared site or that of all items of a side; both move by the
priors alone.

Cost: components^2.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax, random
from jax.scipy.special import log_ndtr

from inference.distributions.truncated_normal import TruncatedNormal
from inference.program.program import Program
from inference.reading.crossed import Components, Crossed

__all__ = ["Tilted", "lowest", "rescaled", "shifted", "switched"]


def switched(
    rng_key: Array,
    crossed: Crossed,
    program: Program,
    values: dict[str, Any],
    found: tuple[Array, Array],
) -> dict[str, Array]:
    """Every switch with its amplitude, and every shared site, drawn once in turn; `found` are
    the sums G, and of w slopes residual.
    """
    (gram, linear), (start, place), (slope, fall) = (
        found,
        crossed.global_values(values),
        crossed.prior(program, values),
    )
    name = crossed.components.switch if crossed.components else ""
    switch = values[name] if name else jnp.zeros(0)
    width, low = len(switch), lowest(program, crossed.components)
    linear = linear + gram @ _switched_on(crossed, values, start)

    def log_odds(z, k):
        prior = lambda on: crossed.log_prior(program, {**values, name: z.at[k].set(on)}, (name,))
        return prior(1) - prior(0)

    def one(k, drawn):
        x, on = drawn
        switch_key, value_key = random.split(random.fold_in(rng_key, k))
        prior = Tilted(slope[k] + fall[k] * start[k], fall[k], jnp.where(k < width, low, -jnp.inf))
        there = Tilted(
            prior.p + linear[k] - gram[k] @ (x * on) + gram[k, k] * x[k] * on[k],
            prior.q + gram[k, k],
            prior.low,
        )
        is_on = jnp.ones((), bool)
        if name:
            odds = (
                log_odds(on[:width].astype(switch.dtype), jnp.minimum(k, width - 1))
                + there.log_mass()
                - prior.log_mass()
            )
            is_on = (k >= width) | (random.logistic(switch_key, dtype=x.dtype) < odds)
        value = jax.tree.map(lambda new, old: jnp.where(is_on, new, old), there, prior).draw(
            value_key
        )
        return x.at[k].set(value), on.at[k].set(is_on.astype(x.dtype))

    on = jnp.ones_like(start).at[:width].set(switch)
    x, on = lax.fori_loop(0, len(start), one, (start, on))
    return place(x) | ({name: on[:width].astype(switch.dtype)} if name else {})


class Tilted(NamedTuple):
    """Density proportional to exp(p x - q x^2 / 2) above `low`, if any, elementwise; `log_mass`
    is log Z of (1), less log(2 pi) / 2.
    """

    p: Array
    q: Array
    low: Array | None = None

    def log_mass(self) -> Array:
        """Its normaliser."""
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

    def moved(self, rng_key: Array, x: Array, correlation: float) -> Array:
        """A draw that has this correlation with the draw x; without bounds."""
        mean, noise = self.p / self.q, random.normal(rng_key, x.shape, x.dtype)
        return mean + correlation * (x - mean) + jnp.sqrt((1 - correlation**2) / self.q) * noise

    def times(self, p: Array, q: Array) -> "Tilted":
        """With a factor exp(p x - q x^2 / 2)."""
        return self._replace(p=self.p + p, q=self.q + q)

    def mixed(self, other: "Tilted", share: Array) -> "Tilted":
        """To the power `share`, and the other one to the rest."""
        mix = lambda own, its: its + share * (own - its)
        return self._replace(p=mix(self.p, other.p), q=mix(self.q, other.q))


def rescaled(
    rng_key: Array,
    crossed: Crossed,
    components: Components,
    program: Program,
    values: dict[str, Any],
) -> dict[str, Any]:
    """Every component's factors and amplitude, a little longer here and shorter there."""
    _, amplitude, factors = components
    for name, side in zip(factors, crossed.sides, strict=True):
        rng_key, step_key, accept_key = random.split(rng_key, 3)
        width = len(values[amplitude])
        log_c = (
            1.7 / jnp.sqrt(side.size) * random.normal(step_key, (width,), values[amplitude].dtype)
        )
        moved = {
            **values,
            name: values[name] * jnp.exp(log_c),
            amplitude: values[amplitude] * jnp.exp(-log_c),
        }
        old, new = (_terms(program, at, (name, amplitude)) for at in (values, moved))
        is_taken = (
            jnp.log(random.uniform(accept_key, (width,), log_c.dtype))
            < new - old + (side.size - 1) * log_c
        )
        values = {
            **values,
            **{each: jnp.where(is_taken, moved[each], values[each]) for each in (name, amplitude)},
        }
    return values


def shifted(
    rng_key: Array, crossed: Crossed, program: Program, values: dict[str, Any]
) -> dict[str, Any]:
    """The level of all entries, between a shared site and the items of each side, by the priors:
    the entries cannot tell.
    """
    for i, level in enumerate(crossed.levels):
        slope, fall = crossed.line(program, values, level)
        step = slope / fall + random.normal(random.fold_in(rng_key, i), (), fall.dtype) / jnp.sqrt(
            fall
        )
        values = crossed.shifted(program, values, level, step)
    return values


def _terms(program: Program, values: dict[str, Any], names: tuple[str, ...]) -> Array:
    """Log probabilities of some sites, by component."""
    terms = program.log_probs(values)
    return jnp.sum(
        jnp.stack([terms[name].reshape(-1, terms[name].shape[-1]).sum(0) for name in names]), axis=0
    )


def lowest(program: Program, components: Components | None) -> float:
    """Where the amplitudes begin."""
    return (
        getattr(program.sites[components.amplitude].support, "lower_bound", -jnp.inf)
        if components
        else -jnp.inf
    )


def _switched_on(crossed: Crossed, values: dict[str, Any], x: Array) -> Array:
    """Amplitudes that are switched off count as 0."""
    if not crossed.components:
        return x
    switch = values[crossed.components.switch]
    return x.at[: len(switch)].multiply(switch)
