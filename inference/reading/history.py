"""A latent history: the number of points that left no data, their places, and functions there.

The structure is read off any model with

    a count      one discrete latent site, 0 .. capacity
    slots        a plate of `capacity` places; those below the count are used, the others masked
    places       latent sites of the slots, masked: where a point was
    noise        a latent site of the slots, standard normal: the innovation of the functions at a
                 slot, given the slots before it
    function     a deterministic site of the slots: the values of functions, affine in the noise of
                 this slot and of those before it
    events       observed sites of the slots, masked: what happened there, given the values of the
                 functions

`HistorySites.prove` proves it at random values of the sites. In particular, used slots are
exchangeable once their noise is computed anew. Unused slots are auxiliary variables: they are drawn
from the prior before a kernel uses them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, random
from jax.scipy.linalg import solve_triangular
from jaxtyping import Bool, Float

from inference.program.interpreting import interpreted
from inference.program.program import Program
from inference.program.sites import StructureError, model_name, require
from inference.reading.proof import gap, prove, random_settings

__all__ = ["HistorySites", "like", "read_history", "shuffled"]

# relative; rounding leaves some 1e-6 where points are so close that a Cholesky factor nearly fails
TOLERANCE = 1e-4

Values = Mapping[str, Any]


@dataclass(frozen=True)
class HistorySites:
    """The names of the sites, with their densities and moves."""

    count: str
    plate: str
    capacity: int
    places: tuple[str, ...]
    noise: str
    function: str
    events: tuple[str, ...]

    @property
    def sites(self) -> tuple[str, ...]:
        """The sites that a kernel of the history draws."""
        return (self.count, *self.places, self.noise)

    def all_used(self, program: Program, values: Values) -> dict[str, Any]:
        """The values with the count at the capacity, so that all slots are used."""
        return {**values, self.count: jnp.asarray(self.capacity, program.sites[self.count].dtype)}

    def log_count(self, program: Program, values: Values) -> Array:
        """Log prior of each count, [capacity + 1]."""
        fn = program.trace(values)[self.count]["fn"]
        return jax.vmap(fn.log_prob)(
            jnp.arange(self.capacity + 1, dtype=program.sites[self.count].dtype)
        )

    def log_places(self, program: Program, values: Values) -> Array:
        """Log prior of each slot's places."""
        terms = program.log_probs(self.all_used(program, values))
        return sum((terms[name] for name in self.places), jnp.zeros(self.capacity))

    def log_events(self, program: Program, values: Values, function: Array) -> Array:
        """Log likelihood of the events of each slot, as if it were used, given the functions."""
        terms = program.log_probs(self.all_used(program, values), held={self.function: function})
        return sum((terms[name] for name in self.events), jnp.zeros(self.capacity))

    def function_of(self, program: Program, values: Values) -> tuple[Array, Array]:
        """Level and root of the functions, which are affine in the noise.

        function[slot, k] = level[slot, k] + sum_j root[k, slot, j] noise[j, k], j up to this slot.
        """
        shape, at_noise = (
            program.sites[self.noise].shape,
            lambda noise: {**values, self.noise: noise},
        )
        function = lambda noise: program.deterministics(at_noise(noise))[self.function]
        level, effect = jax.linearize(function, jnp.zeros(shape))
        one_slot = jnp.broadcast_to(jnp.eye(self.capacity)[:, :, None], (self.capacity, *shape))
        return level, jnp.transpose(jax.vmap(effect)(one_slot), (2, 1, 0))

    def noise_of(
        self,
        level: Float[Array, "slot function"],
        root: Float[Array, "function slot slot"],
        function: Float[Array, "slot function"],
    ) -> Float[Array, "slot function"]:
        """The noise that gives the functions these values."""
        rest = jnp.moveaxis(function - level, -1, 0)[..., None]
        return solve_triangular(root, rest, lower=True)[..., 0].T

    def values_of(
        self,
        level: Float[Array, "slot function"],
        root: Float[Array, "function slot slot"],
        noise: Float[Array, "slot function"],
    ) -> Float[Array, "slot function"]:
        """The values of the functions with this noise."""
        return level + jnp.einsum("kij,jk->ik", root, noise)

    def refreshed(self, rng_key: Array, program: Program, values: Values) -> dict[str, Any]:
        """All values, the unused slots drawn from the prior."""
        slots = (*self.places, self.noise)
        others = {name: value for name, value in values.items() if name not in slots}
        fresh = program.trace(others, rng_key)
        is_used = jnp.arange(self.capacity) < values[self.count]
        drawn = {
            name: jnp.where(like(is_used, values[name]), values[name], fresh[name]["value"])
            for name in slots
        }
        return {**values, **drawn}

    def scale_of_places(self, program: Program, rng_key: Array) -> dict[str, Array]:
        """The standard deviation of each place over the slots of a draw from the prior."""
        drawn = interpreted(program.draw_prior, rng_key)(rng_key)
        for name in self.places:
            require(
                not program.sites[name].is_discrete,
                f"site {name!r}: found a discrete place, wanted a real one.",
            )
        return {name: drawn[name].std(axis=0) for name in self.places}

    def prove(self, program: Program, rng_key: Array) -> None:
        """Raises StructureError where the sites do not play these parts."""
        refusal = lambda what, missed: f"{what} (relative gap {missed:.1g}). {_wanted(program)}"
        prove(
            lambda: lambda key: self._gaps(key, program),
            random_settings(rng_key),
            refusal,
            tolerance=TOLERANCE,
        )

    def _gaps(self, rng_key: Array, program: Program) -> dict[str, Array]:
        start_key, count_key, noise_key, order_key, fresh_key = random.split(rng_key, 5)
        drawn = program.draw_initial(start_key)
        count = random.randint(count_key, (), 1, self.capacity + 1).astype(
            program.sites[self.count].dtype
        )
        noise = random.normal(noise_key, program.sites[self.noise].shape)
        values = {**drawn, self.count: count, self.noise: noise}
        function, joint = program.deterministics(values)[self.function], program.log_joint(values)
        level, root = self.function_of(program, values)

        ladder = self.log_count(program, values) + jnp.append(
            0.0,
            jnp.cumsum(
                self.log_places(program, values) + self.log_events(program, values, function)
            ),
        )
        empty = program.log_joint({**values, self.count: jnp.zeros_like(count)})
        standard = {**values, self.noise: jnp.zeros_like(noise)}
        prior = lambda at: jnp.sum(program.log_probs(at)[self.noise])
        shuffled = self._shuffled(order_key, program, values, function)
        moved, other_root = program.log_joint(shuffled), self.function_of(program, shuffled)[1]
        is_used = (jnp.arange(self.capacity) < count)[:, None]
        other = program.deterministics(self.refreshed(fresh_key, program, values))[self.function]
        size = lambda root: jnp.sum(
            jnp.where(is_used[:, 0], jnp.log(jnp.diagonal(root, 0, 1, 2)), 0.0)
        )
        return {
            f"site {self.noise!r}: found another prior than the standard normal": gap(
                prior(values) - prior(standard), -0.5 * jnp.sum(noise**2)
            ),
            f"site {self.function!r}: found a function that is not affine in {self.noise!r}, slot "
            "by slot": gap(self.values_of(level, root, noise), function),
            f"site {self.function!r}: found values of a slot that depend on later "
            "slots": jnp.maximum(
                gap(jnp.triu(root, 1), 0.0), gap(is_used * other, is_used * function)
            ),
            f"site {self.count!r}: found a log joint that is not its prior and one term for each "
            "used slot": gap(joint - empty, ladder[count] - ladder[0]),
            f"sites {list(self.places)}: found slots whose order counts": gap(
                moved - size(other_root), joint - size(root)
            ),
        }

    def _shuffled(
        self, rng_key: Array, program: Program, values: dict[str, Any], function: Array
    ) -> dict[str, Any]:
        is_used = jnp.arange(self.capacity) < values[self.count]
        order = shuffled(rng_key, values[self.count], self.capacity)
        moved = {**values, **{name: values[name][order] for name in self.places}}
        noise = self.noise_of(*self.function_of(program, moved), function[order])
        return {**moved, self.noise: jnp.where(is_used[:, None], noise, values[self.noise])}


def shuffled(rng_key: Array, count: Array, capacity: int) -> Array:
    """A random order of the slots in which the first `count` ones stay first."""
    return jnp.argsort(random.uniform(rng_key, (capacity,)) + (jnp.arange(capacity) >= count))


def like(flags: Bool[Array, " slot"], values: Array) -> Array:
    """Flags of slots, reshaped to broadcast against values [slot, ...]."""
    return flags.reshape(-1, *(1,) * (values.ndim - 1))


def read_history(program: Program) -> HistorySites:
    """The history of a model, found by its sites; `HistorySites.prove` proves it."""
    sites = program.sites
    counts = [
        name for name in program.latent if sites[name].is_discrete and sites[name].shape == ()
    ]
    for count in counts:
        follow = [
            name
            for name in (*program.observed, *program.latent)
            if count in program.parents[name] and name != count
        ]
        plates = {sites[name].plates for name in follow}
        if list(map(len, plates)) != [1]:
            continue
        [[plate]] = plates
        own = [name for name in program.latent if sites[name].plates == (plate,)]
        noise = [name for name in own if name not in follow and sites[name].family == "Normal"]
        places = tuple(name for name in own if name in follow)
        functions = [
            name
            for name in program.deterministic
            if sites[name].plates == (plate,) and set(noise) & program.parents[name]
        ]
        events = tuple(name for name in program.observed if name in follow)
        rest = [name for name in own if name not in noise and name not in places]
        if bearing := sorted(program.parents[count] - {count}):
            raise StructureError(
                f"site {count!r}: its prior depends on {bearing}. It ends at the capacity, so that "
                "this would be learned as if no more points could be rejected; wanted a prior of "
                "numbers."
            )
        if (
            events
            and len(noise) == len(functions) == 1
            and not rest
            and sites[noise[0]].shape == sites[functions[0]].shape
        ):
            return HistorySites(
                count, plate, program.plates[plate].size, places, noise[0], functions[0], events
            )
    raise StructureError(
        f"found no latent history; discrete scalar sites are {counts}. {_wanted(program)}"
    )


def _wanted(program: Program) -> str:
    return (
        f"LatentHistory wants of {model_name(program.model)}: one discrete count; a plate of "
        "slots; in it a masked site for places, a standard normal site [slot, function], "
        "numpyro.deterministic values of the same shape that are used as it returns them, and "
        f"masked observed sites. It looks at sums to {TOLERANCE}: use float64, "
        "jax.enable_x64(True)."
    )
