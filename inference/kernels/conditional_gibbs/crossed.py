"""A sweep over the sites of a crossed predictor: side by side, then switches, amplitudes and shared
sites, births, scales and levels.

The latent Normals of a probit are drawn first; given these, all that follows is conjugate, and they
are forgotten afterwards. Every part leaves the posterior as it is, so that their order is free.
Sites that have no part in the predictor are not touched.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random

from inference.kernels.conditional_gibbs.crossed_births import born
from inference.kernels.conditional_gibbs.crossed_components import rescaled, shifted, switched
from inference.kernels.conditional_gibbs.crossed_sides import Entries, buckets, steps
from inference.kernels.conditional_gibbs.route import Route
from inference.program.compiling import is_traced
from inference.program.program import Program
from inference.program.sites import StructureError
from inference.reading.crossed import Crossed, hold, rebuilt, respond

__all__ = ["CrossedSweep"]

FEW = 512  # entries on which the predictor is checked after each draw of a side
# entries from which on births are rarer, for they cost about as much as a sweep; how rare at most
MANY, LEAST = 16_000, 0.02


class CrossedSweep(Route):
    """What a program's entries need for a sweep; `num_births` components try to be born or to
    die in each, a fraction is a chance.
    """

    name, drawn = "crossed", (("crossed predictor", "Normal"),)

    def __init__(self, crossed: Crossed, program: Program, num_births: float | None):
        usual = min(1.0, max(MANY / crossed.num_entries(program), LEAST))
        self.crossed, self.num_births = crossed, usual if num_births is None else num_births
        self._index = [program.arguments[side.index] for side in crossed.sides]
        if is_traced(self._index):
            raise StructureError(
                "no crossed predictor: the rows and columns of the entries are traced, and it must "
                "be known which they are."
            )
        width = lambda side: sum(int(np.prod(program.sites[name].shape[1:])) for name in side.sites)
        self._plan = [
            buckets(np.asarray(at), side.size, width(side))
            for at, side in zip(self._index, crossed.sides, strict=True)
        ]

    def data(self, program: Program) -> dict[str, Any]:
        """The arrays of a program whose entries are at the places that are known."""
        index = [program.arguments[side.index] for side in self.crossed.sides]
        if is_traced(index) or not all(map(np.array_equal, index, self._index)):
            raise StructureError(
                "crossed predictor: the rows and columns of the entries are others than at `init`, "
                "or traced. Run `init`."
            )
        return {
            "arguments": {
                name: jnp.asarray(program.arguments[name]) for name in self.crossed.by_entry
            },
            "plan": self._plan,
        }

    def draw(
        self, rng_key: Array, program: Program, values: dict[str, Any], data: dict[str, Any]
    ) -> tuple[dict[str, Any], list[Array], Program]:
        """All values after a sweep, the largest gap met, and the model with the predictor as it
        then is.
        """
        crossed, program = self.crossed, program.with_arguments(**data["arguments"])
        eta, keys = crossed.predictor(program, values), random.split(rng_key, 8)
        site = program.trace(values)[crossed.observed]
        response, weight = respond(keys[0], rebuilt(site["fn"], eta), site["value"])
        gaps = []
        for side, plan, key in zip(crossed.sides, data["plan"], keys[1:3], strict=True):
            values, eta, found, gap = self._side(
                key, program, values, (response, weight, eta), side, plan
            )
            gaps.append(gap)
        values = values | switched(keys[3], crossed, program, values, found)
        eta = crossed.predictor(program, values)
        if parts := crossed.components:
            again = lambda i, at: born(
                random.fold_in(keys[4], i),
                crossed,
                parts,
                program,
                at[0],
                (response, weight, at[1]),
                data["plan"],
            )
            whole, rest = divmod(float(self.num_births), 1)
            num_births = int(whole) + random.bernoulli(keys[7], rest).astype(jnp.int32)
            values, eta = lax.fori_loop(0, num_births, again, (values, eta))
            values = rescaled(keys[5], crossed, parts, program, values)
        values = shifted(keys[6], crossed, program, values)
        return values, [jnp.max(jnp.stack(gaps))], hold(program, crossed.observed, eta)

    def draw_items(
        self, rng_key: Array, program: Program, values: dict[str, Any], plate: str, num_rounds: int
    ) -> dict[str, Any]:
        """The sites of one side alone, all else as it is: exactly where entries are Normal, else
        after some rounds of their latents.
        """
        [(side, plan)] = [
            each
            for each in zip(self.crossed.sides, self._plan, strict=True)
            if each[0].plate == plate
        ]

        def once(i, values):
            latent_key, side_key = random.split(random.fold_in(rng_key, i))
            eta, site = (
                self.crossed.predictor(program, values),
                program.trace(values)[self.crossed.observed],
            )
            response, weight = respond(latent_key, rebuilt(site["fn"], eta), site["value"])
            return self._side(side_key, program, values, (response, weight, eta), side, plan)[0]

        return lax.fori_loop(0, num_rounds, once, values)

    def _side(
        self,
        rng_key: Array,
        program: Program,
        values: dict[str, Any],
        entries: tuple,
        side: Any,
        plan: tuple,
    ):
        """The values with a side drawn anew, the predictor there, the sums for `switched`, and how
        far the predictor is from what the table says.
        """
        crossed, (response, weight, eta) = self.crossed, entries
        [other] = (each for each in crossed.sides if each.plate != side.plate)
        index, of_other = (jnp.asarray(program.arguments[each.index]) for each in (side, other))
        (table, scale), start = (
            crossed.unit_table(program, values, side),
            crossed.flat(values, side),
        )
        own = jnp.concatenate(
            [(response - eta)[:, None], crossed.shared_slopes(program, values)], axis=1
        )
        entries = Entries.of(table, of_other, own, weight)
        step, (square, linear) = steps(
            rng_key, entries, start, crossed.prior(program, values, side), scale, plan
        )
        values = {**values, **crossed.unflat(program, side, start + step)}
        new, few = crossed.predictor(program, values), slice(0, FEW)
        wanted = eta[few] + jnp.sum(table[of_other[few]] * (scale * step)[index[few]], axis=1)
        gap = jnp.max(jnp.abs(new[few] - wanted)) / (1 + jnp.max(jnp.abs(wanted)))
        keep = np.r_[crossed.factor_columns(program, side), len(scale) : len(linear)]
        return values, new, (square[keep][:, keep], linear[keep]), gap
