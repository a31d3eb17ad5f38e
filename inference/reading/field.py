"""The Cholesky factors that a function takes on its way.

A model that makes functions of noise by the factor of their covariance has both at hand, but
returns neither; to find the factor from values alone takes as many of them as there is noise, and
the covariance a product of matrices more.

Functions that a model makes of standard normal noise, as Gaussian processes do: their values, and
the scales they hang on.

Read off any model with

    noises       latent sites [point, function], standard normal
    functions    deterministic sites [point, function], column k affine in column k of the noises
    scales       latent sites [function, ...], of which entry k bears on column k of the functions
                 alone

Nothing else in the model may depend on noises or scales. The noises of several sites are taken as
one, [noise, function], those of a latent history among them, and so are the functions.

Where the model makes the functions by the Cholesky factor of their covariance, up to a size of
each, both are the ones that the model computes. Elsewhere the factor is found from as many values
of the functions as there is noise.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, random
from jax.core import eval_jaxpr
from numpyro.distributions import biject_to

from inference.program.sites import StructureError, model_name
from inference.reading.proof import gap, prove, random_settings

if TYPE_CHECKING:
    from inference.program.program import Program

__all__ = ["Affine", "Field", "read_field", "with_factors"]


def with_factors(function: Callable, *arguments: Any) -> tuple[Any, list[tuple[Array, Array]]]:
    """What a function returns, and each matrix that `jnp.linalg.cholesky` is given, with its
    factor; within loops and compiled functions they are not seen.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    pairs = [
        (step.invars[0], step.outvars[0])
        for step in closed.jaxpr.eqns
        if step.params.get("name") == "cholesky"
    ]
    wanted = [*closed.jaxpr.outvars, *(each for pair in pairs for each in pair)]
    found = eval_jaxpr(
        closed.jaxpr.replace(outvars=wanted), closed.consts, *jax.tree.leaves(arguments)
    )
    rest = found[len(closed.jaxpr.outvars) :]
    result = jax.tree.unflatten(jax.tree.structure(shapes), found[: len(closed.jaxpr.outvars)])
    return result, list(zip(rest[::2], rest[1::2], strict=True))


# relative; rounding leaves some 1e-6 where points are so close that a Cholesky factor nearly fails
TOLERANCE = 1e-4

Values = Mapping[str, Any]


class Affine(NamedTuple):
    """How functions follow from noise: function[i, k] = level[i, k] + sum over j of root[k, i,
    j] noise[j, k].
    """

    level: Array  # [point, function]
    root: Array  # [function, point, noise]
    covariance: Array  # [function, point, point], root root'


@dataclass(frozen=True)
class Field:
    """The names of the sites, and what may be asked of them."""

    noises: tuple[str, ...]
    functions: tuple[str, ...]
    scales: tuple[str, ...]
    # by the model itself, so that it has the covariance; found by `proved`
    is_factorised: bool = False

    def noise(self, values: Values) -> Array:
        """All noises, [noise, function]."""
        return jnp.concatenate([values[name] for name in self.noises])

    def with_noise(self, program: "Program", values: Values, noise: Array) -> dict[str, Any]:
        """The values with other noises."""
        return {**values, **self._parts(program, self.noises, noise)}

    def function(self, program: "Program", values: Values) -> Array:
        """All functions, [point, function]."""
        found = program.deterministics(values)
        return jnp.concatenate([found[name] for name in self.functions])

    def affine(self, program: "Program", values: Values) -> Affine:
        """All of what noise does to the functions."""
        noise = jnp.zeros_like(self.noise(values))
        of_noise = lambda noise: self.function(program, self.with_noise(program, values, noise))
        if self.is_factorised:
            return self._factorised(of_noise, noise)[0]
        level, effect = jax.linearize(of_noise, noise)
        one_noise = jnp.broadcast_to(
            jnp.eye(len(noise), dtype=noise.dtype)[:, :, None], (len(noise), *noise.shape)
        )
        root = jnp.transpose(jax.vmap(effect)(one_noise), (2, 1, 0))
        return Affine(level, root, jnp.einsum("kia,kja->kij", root, root))

    def _factorised(self, of_noise: Callable, noise: Array) -> list[Affine]:
        """The same by each matrix that the model factorises and that may be the covariance; the
        size of a function is seen at its first point, where the factor has one entry alone.
        """
        (level, at_one), factors = with_factors(
            jax.vmap(of_noise), jnp.stack([noise, jnp.ones_like(noise)])
        )
        found = []
        for covariance, root in factors:
            if covariance.shape == (noise.shape[1], len(level), len(noise)):
                size = ((at_one - level)[0] / root[:, 0, 0])[:, None, None]
                found.append(Affine(level, size * root, size**2 * covariance))
        return found

    def log_events(
        self, program: "Program", values: Values, function: Array, apart: Sequence[str] = ()
    ) -> tuple[Array, Array]:
        """Log probability of all that is neither noise nor scale, given the values of the
        functions: of the sites `apart` the sum of their terms, entry by entry, and before it that
        of all others.
        """
        terms = program.log_probs(values, held=self._parts(program, self.functions, function))
        own = {*self.noises, *self.scales, *apart}
        rest = sum(jnp.sum(term) for name, term in terms.items() if name not in own)
        return jnp.asarray(rest), jnp.asarray(sum(terms[name] for name in apart))

    def log_scales(self, program: "Program", values: Values) -> Array:
        """Log prior of the scales of each function, in unconstrained space."""
        terms, total = program.log_probs(values), jnp.zeros(self.noise(values).shape[1])
        for name in self.scales:
            transform = biject_to(program.sites[name].support)
            jacobian = transform.log_abs_det_jacobian(transform.inv(values[name]), values[name])
            total += sum(
                jnp.reshape(term, (len(total), -1)).sum(1) for term in (terms[name], jacobian)
            )
        return total

    def stretched(
        self, program: "Program", values: Values, steps: Mapping[str, Array]
    ) -> dict[str, Any]:
        """The values after a step of the scales in unconstrained space."""
        moved = dict(values)
        for name in self.scales:
            transform = biject_to(program.sites[name].support)
            moved[name] = transform(transform.inv(values[name]) + steps[name])
        return moved

    def proved(self, program: "Program", rng_key: Array) -> "Field":
        """Raises StructureError unless the sites are what their names here say; returns the
        field with what else was found.
        """
        refusal = lambda what, missed: (
            f"{what} (relative gap {missed:.1g}). {self._wanted(program)}"
        )
        others = prove(
            lambda: lambda key: self._gaps(key, program),
            random_settings(rng_key),
            refusal,
            tolerance=TOLERANCE,
        )
        return replace(self, is_factorised=all(bool(other < TOLERANCE) for other in others))

    def _gaps(self, rng_key: Array, program: "Program") -> tuple[dict[str, Array], Array]:
        start_key, noise_key, step_key = random.split(rng_key, 3)
        start = program.draw_initial(start_key)
        steps = {
            name: random.normal(random.fold_in(step_key, i), start[name].shape)
            for i, name in enumerate(self.scales)
        }
        last = {name: jnp.zeros_like(step).at[-1].set(step[-1]) for name, step in steps.items()}
        noise = random.normal(noise_key, self.noise(start).shape)
        end = self.stretched(program, self.with_noise(program, start, noise), steps)
        level, root, covariance = self.affine(program, start)
        factorised = self._factorised(
            lambda noise: self.function(program, self.with_noise(program, start, noise)),
            jnp.zeros_like(noise),
        )
        function, other, moved = (
            self.function(program, at) for at in (start, self.stretched(program, start, last), end)
        )

        before, after = program.log_probs(start), program.log_probs(end)
        change = {name: jnp.sum(after[name]) - jnp.sum(before[name]) for name in before}
        own = (*self.noises, *self.scales)
        events = (
            self.log_events(program, start, moved)[0] - self.log_events(program, start, function)[0]
        )
        wrong = {
            f"sites {list(self.noises)}: found another prior than the standard normal": gap(
                sum(change[name] for name in self.noises),
                0.5 * jnp.sum(self.noise(start) ** 2 - noise**2),
            ),
            f"sites {list(self.functions)}: found functions that are not affine, each in its "
            f"column of {list(self.noises)}": gap(
                level + jnp.einsum("kij,jk->ik", root, self.noise(start)), function
            ),
            f"sites {list(self.scales)}: found scales of one function that bear on another": gap(
                other[:, :-1], function[:, :-1]
            ),
            f"sites {list(own)}: found more in the model that depends on them than "
            f"{list(self.functions)}": gap(
                sum(each for name, each in change.items() if name not in own), events
            ),
        }
        is_one = len(factorised) == 1
        other = (
            jnp.maximum(gap(factorised[0].root, root), gap(factorised[0].covariance, covariance))
            if is_one
            else jnp.inf
        )
        return wrong, jnp.asarray(other)

    def _parts(self, program: "Program", names: Sequence[str], whole: Array) -> dict[str, Array]:
        sizes = [program.sites[name].shape[0] for name in names]
        return dict(zip(names, jnp.split(whole, list(accumulate(sizes[:-1]))), strict=True))

    def _wanted(self, program: "Program") -> str:
        return (
            f"Of {model_name(program.model)} are wanted: standard normal noises "
            f"{list(self.noises)}, numpyro.deterministic functions of "
            "them, used as it returns them, and scales with an entry for each function; give other "
            "sites to NUTS."
        )


def read_field(program: "Program", noise: str, owned: Sequence[str]) -> Field:
    """The field that a noise belongs to, of the sites `owned` by a kernel; `Field.proved` shows
    that it is one.
    """
    sites, width = program.sites, program.sites[noise].shape[1]
    is_noise = lambda name: (
        sites[name].family == "Normal"
        and len(sites[name].shape) == 2
        and sites[name].shape[1] == width
    )
    functions = [
        name
        for name in program.deterministic
        if len(sites[name].shape) == 2 and sites[name].shape[1] == width
    ]
    functions = tuple(
        name
        for name in functions
        if noise in program.parents[name] or any(map(is_noise, program.parents[name]))
    )
    bearing = frozenset().union(*(program.parents[name] for name in functions))
    noises = tuple(
        name
        for name in sites
        if name == noise or (name in owned and is_noise(name) and name in bearing)
    )
    scales = tuple(name for name in owned if name not in noises)
    if others := [name for name in scales if name not in bearing]:
        raise StructureError(
            f"LatentHistory draws a history, noise and scales of its functions, and {others} are "
            "neither; give them to NUTS: "
            "Gibbs([(LatentHistory(model), [...]), (NUTS(model), None)])."
        )
    for name in scales:
        if sites[name].is_discrete or sites[name].shape[:1] != (width,):
            raise StructureError(
                f"site {name!r}: found shape {sites[name].shape}, wanted a real scale with an "
                f"entry for each of {width} functions; give it "
                "to NUTS: Gibbs([(LatentHistory(model), [...]), (NUTS(model), None)])."
            )
        if parents := program.support_parents.get(name):
            raise StructureError(
                f"site {name!r}: its support depends on {sorted(parents)}, and its steps need one "
                "that stays; give it to NUTS: "
                "Gibbs([(LatentHistory(model), [...]), (NUTS(model), None)])."
            )
    return Field(noises, functions, scales)
