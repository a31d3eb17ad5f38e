"""Functions that are affine in standard normal noise, such as Gaussian processes, and their scales.

The structure is read off any model with

    noises       latent sites [point, function], standard normal
    functions    deterministic sites [point, function], column k affine in column k of the noises
    scales       latent sites [function, ...]; entry k affects column k of the functions only

Nothing else in the model may depend on noises or scales. The noises of several sites are
concatenated, [noise, function], those of a latent history among them, and so are the functions.

Where the model computes the functions by the Cholesky factor of their covariance, times an
amplitude of each, covariance and factor are taken from its trace. Otherwise the factor is found by
evaluating the linear map once for each row of the noise, and the covariance is the product of the
factor with its transpose.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, random
from jax.core import eval_jaxpr
from numpyro.distributions import biject_to

from inference.program.program import Program
from inference.program.sites import StructureError, model_name, require
from inference.reading.proof import gap, prove, random_settings

__all__ = ["Affine", "Field", "read_field"]


# relative; rounding leaves some 1e-6 where points are so close that a Cholesky factor nearly fails
TOLERANCE = 1e-4

Values = Mapping[str, Any]


class Affine(NamedTuple):
    """function[i, k] = level[i, k] + sum_j root[k, i, j] noise[j, k]."""

    level: Array  # [point, function]
    root: Array  # [function, point, noise]
    covariance: Array  # [function, point, point], root root'


@dataclass(frozen=True)
class Field:
    """The names of the sites, with their densities and moves."""

    noises: tuple[str, ...]
    functions: tuple[str, ...]
    scales: tuple[str, ...]
    is_factorised: bool = False  # whether covariance and factor are in the trace; by `proved`

    def noise(self, values: Values) -> Array:
        """All noises, [noise, function]."""
        return jnp.concatenate([values[name] for name in self.noises])

    def with_noise(self, program: Program, values: Values, noise: Array) -> dict[str, Any]:
        """The values with other noises."""
        return {**values, **self._parts(program, self.noises, noise)}

    def function(self, program: Program, values: Values) -> Array:
        """All functions, [point, function]."""
        found = program.deterministics(values)
        return jnp.concatenate([found[name] for name in self.functions])

    def affine(self, program: Program, values: Values) -> Affine:
        """The functions as affine functions of the noise."""
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
        """`affine` by each matrix that the model factorises and that may be the covariance.

        The amplitude of a function is read at its first point, where the factor has one entry only.
        """
        (level, at_one), factors = _with_factors(
            jax.vmap(of_noise), jnp.stack([noise, jnp.ones_like(noise)])
        )
        found = []
        for covariance, root in factors:
            if covariance.shape == (noise.shape[1], len(level), len(noise)):
                size = ((at_one - level)[0] / root[:, 0, 0])[:, None, None]
                found.append(Affine(level, size * root, size**2 * covariance))
        return found

    def log_events(
        self, program: Program, values: Values, function: Array, apart: Sequence[str] = ()
    ) -> tuple[Array, Array]:
        """Log probability of all sites that are neither noise nor scale, given the functions.

        Args:
            program: the model with its data.
            values: the values of all sites.
            function: the values of the functions.
            apart: sites whose terms are returned separately.

        Returns:
            The sum of the other terms, and the terms of `apart` summed over these sites.
        """
        terms = program.log_probs(values, held=self._parts(program, self.functions, function))
        own = {*self.noises, *self.scales, *apart}
        rest = sum(jnp.sum(term) for name, term in terms.items() if name not in own)
        return jnp.asarray(rest), jnp.asarray(sum(terms[name] for name in apart))

    def log_scales(self, program: Program, values: Values) -> Array:
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
        self, program: Program, values: Values, steps: Mapping[str, Array]
    ) -> dict[str, Any]:
        """The values after a step of the scales in unconstrained space."""
        moved = dict(values)
        for name in self.scales:
            transform = biject_to(program.sites[name].support)
            moved[name] = transform(transform.inv(values[name]) + steps[name])
        return moved

    def proved(self, program: Program, rng_key: Array) -> "Field":
        """The field with `is_factorised` set.

        Raises:
            StructureError: where the sites do not play these parts.
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

    def _gaps(self, rng_key: Array, program: Program) -> tuple[dict[str, Array], Array]:
        start_key, noise_key, step_key = random.split(rng_key, 3)
        start = program.draw_initial(start_key)
        steps = {
            name: random.normal(random.fold_in(step_key, i), start[name].shape)
            for i, name in enumerate(self.scales)
        }
        last = {name: jnp.zeros_like(step).at[-1].set(step[-1]) for name, step in steps.items()}
        old_noise = self.noise(start)
        noise = random.normal(noise_key, old_noise.shape)
        end = self.stretched(program, self.with_noise(program, start, noise), steps)
        level, root, covariance = self.affine(program, start)
        of_noise = lambda noise: self.function(program, self.with_noise(program, start, noise))
        factorised = self._factorised(of_noise, jnp.zeros_like(noise))
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
                0.5 * jnp.sum(old_noise**2 - noise**2),
            ),
            f"sites {list(self.functions)}: found functions that are not affine, each in its "
            f"column of {list(self.noises)}": gap(
                level + jnp.einsum("kij,jk->ik", root, old_noise), function
            ),
            f"sites {list(self.scales)}: found scales of one function that affect another": gap(
                other[:, :-1], function[:, :-1]
            ),
            f"sites {list(own)}: found more in the model that depends on them than "
            f"{list(self.functions)}": gap(
                sum(each for name, each in change.items() if name not in own), events
            ),
        }
        if len(factorised) != 1:
            return wrong, jnp.asarray(jnp.inf)
        [by_model] = factorised
        return wrong, jnp.maximum(gap(by_model.root, root), gap(by_model.covariance, covariance))

    def _parts(self, program: Program, names: Sequence[str], whole: Array) -> dict[str, Array]:
        sizes = [program.sites[name].shape[0] for name in names]
        return dict(zip(names, jnp.split(whole, list(accumulate(sizes[:-1]))), strict=True))

    def _wanted(self, program: Program) -> str:
        return (
            f"Of {model_name(program.model)} are wanted: standard normal noises "
            f"{list(self.noises)}, numpyro.deterministic functions of them, used as it returns "
            "them, and scales with an entry for each function; give other sites to NUTS."
        )


def _with_factors(function: Callable, *arguments: Any) -> tuple[Any, list[tuple[Array, Array]]]:
    """What a function returns, and each matrix of which it takes the Cholesky factor, with this.

    Those within loops and compiled functions are left out.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    outputs = closed.jaxpr.outvars
    pairs = [
        (step.invars[0], step.outvars[0])
        for step in closed.jaxpr.eqns
        if step.params.get("name") == "cholesky"
    ]
    wanted = [*outputs, *(each for pair in pairs for each in pair)]
    traced = closed.jaxpr.replace(outvars=wanted)
    found = eval_jaxpr(traced, closed.consts, *jax.tree.leaves(arguments))
    rest = found[len(outputs) :]
    result = jax.tree.unflatten(jax.tree.structure(shapes), found[: len(outputs)])
    return result, list(zip(rest[::2], rest[1::2], strict=True))


def read_field(program: Program, noise: str, owned: Sequence[str]) -> Field:
    """The field of a noise, found by shapes and dependencies of sites; `Field.proved` proves it.

    Args:
        program: the model with its data.
        noise: a site.
        owned: the sites that a kernel draws.
    """
    sites, width = program.sites, program.sites[noise].shape[1]
    has_width = lambda name: len(sites[name].shape) == 2 and sites[name].shape[1] == width
    is_noise = lambda name: has_width(name) and sites[name].family == "Normal"
    is_function = lambda name: (
        has_width(name)
        and (noise in program.parents[name] or any(map(is_noise, program.parents[name])))
    )
    functions = tuple(filter(is_function, program.deterministic))
    bearing = frozenset().union(*(program.parents[name] for name in functions))
    noises = tuple(
        name
        for name in sites
        if name == noise or (name in owned and is_noise(name) and name in bearing)
    )
    scales = tuple(name for name in owned if name not in noises)
    way_out = "give it to NUTS: Gibbs([(LatentHistory(model), [...]), (NUTS(model), None)])."
    if others := [name for name in scales if name not in bearing]:
        raise StructureError(
            f"LatentHistory draws a history, noise and scales of its functions, and {others} are "
            f"neither; {way_out.replace('it', 'them', 1)}"
        )
    for name in scales:
        require(
            not sites[name].is_discrete and sites[name].shape[:1] == (width,),
            f"site {name!r}: found shape {sites[name].shape}, wanted a real scale with an "
            f"entry for each of {width} functions; {way_out}",
        )
        if parents := program.support_parents.get(name):
            raise StructureError(
                f"site {name!r}: its support depends on {sorted(parents)}, and its steps need one "
                f"that stays; {way_out}"
            )
    return Field(noises, functions, scales)
