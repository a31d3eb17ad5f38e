"""Gibbs sweep over the sites of a crossed predictor, most of them jointly.

A crossed predictor is linear in the sites of the rows and in those of the columns, such as
sum_k s[k] u[row, k] v[column, k] (`inference.reading.crossed`). The rows are one *side*, the
columns the other; an *item* is one row or one column, and an *entry* has an item of each side.

The order is: the latent Normals of a probit, births and deaths of components, both sides, switches
with amplitudes and shared sites, scales, intercepts. Given the latent Normals everything else is
conjugate. Births and deaths do not use the factors and amplitudes of components that are switched
off, and leave the posterior of all else invariant. The sides and the amplitudes, which come next,
draw these from their priors. Each other part leaves the posterior invariant. Sites outside the
predictor are not touched.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random

from inference.kernels.conditional_gibbs.crossed_births import birth_or_death, num_random
from inference.kernels.conditional_gibbs.crossed_components import (
    rescaled,
    shifted,
    switched,
    uniforms,
)
from inference.kernels.conditional_gibbs.crossed_sides import (
    Entries,
    PaddedItems,
    pad_items,
    steps,
    steps_in_use,
)
from inference.kernels.conditional_gibbs.route import Route
from inference.program.compiling import is_traced
from inference.program.program import Program
from inference.program.sites import StructureError
from inference.reading.crossed import Crossed, hold, rebuilt, respond

__all__ = ["CrossedRoute"]

NUM_CHECKED = 512  # entries whose predictor is checked after each draw of a side
# multiplications of a sweep from which on not every sweep draws switches, births and deaths
COST = 2e7


class CrossedRoute(Route):
    """Draws the sites of a crossed predictor.

    Args:
        crossed: the sites and their parts in the predictor.
        program: the model with its data.
        num_births: proposed births or deaths of components in each sweep; a fraction is a
            probability. None: 1, or less where a sweep costs more than `COST`.
    """

    name, drawn = "crossed", (("crossed predictor", "Normal"),)

    def __init__(self, crossed: Crossed, program: Program, num_births: float | None):
        self.crossed = crossed
        self._index = self._index_of(program)
        if is_traced(self._index):
            raise StructureError(
                "no crossed predictor: the rows and columns of the entries are traced; wanted "
                "known numbers."
            )
        widths = [crossed.width(program, side) for side in crossed.sides]
        self._items = [
            pad_items(np.asarray(at), side.size, width)
            for at, side, width in zip(self._index, crossed.sides, widths, strict=True)
        ]
        cost = sum(
            side.size * width**3 / 3 + crossed.num_entries(program) * width**2
            for side, width in zip(crossed.sides, widths, strict=True)
        )
        self.share_whole = min(1.0, max(COST / cost, 0.02))
        self.num_births = self.share_whole if num_births is None else num_births
        self._is_tied = any(program.parents[each] & set(crossed.sites) for each in crossed.sites)

    def _index_of(self, program: Program) -> list[Any]:
        return [program.arguments[side.index] for side in self.crossed.sides]

    def data(self, program: Program) -> dict[str, Any]:
        """The arrays that `draw` takes; rows and columns of the entries must be those at `init`."""
        index = self._index_of(program)
        if is_traced(index) or not all(map(np.array_equal, index, self._index)):
            raise StructureError(
                "crossed predictor: the rows and columns of the entries differ from those at "
                "`init`, or are traced. Run `init` again."
            )
        by_entry = {name: jnp.asarray(program.arguments[name]) for name in self.crossed.by_entry}
        return {"arguments": by_entry, "items": self._items}

    def seen(self, program: Program, data: dict[str, Any] | None) -> Program:
        """The model with the entries of `data`, which are arguments of compiled code."""
        return program.with_arguments(**data["arguments"]) if data else program

    def draw(
        self, rng_key: Array, program: Program, values: dict[str, Any], data: dict[str, Any]
    ) -> tuple[dict[str, Any], list[Array], Program]:
        """All values after a sweep, the gap of the draws, and the model with its predictor fixed.

        The gap is between the predictor of the model and the one that the draws took for it.
        """
        crossed, program = self.crossed, self.seen(program, data)
        items = data["items"]
        # random numbers of the sweep begin at 0, and do not come so far
        latent_key = random.fold_in(rng_key, np.uint32(2**32 - 1))
        response, weight, eta = self._response(latent_key, program, values)
        drawn = self._random(rng_key, program, values)
        is_whole = drawn.chance < self.share_whole
        priors = _Priors(crossed, program, values, self._is_tied)
        gaps = []
        if components := crossed.components:
            propose = lambda i, at: birth_or_death(
                *(x[i] for x in drawn.births),
                crossed,
                components,
                program,
                at[0],
                (response, weight, at[1]),
                priors.at(at[0]),
            )
            whole, rest = divmod(float(self.num_births), 1)
            num_births = int(whole) + (drawn.chance < rest).astype(jnp.int32)
            values, eta = lax.fori_loop(0, num_births, propose, (values, eta))
        for i in (0, 1):
            values, eta, sums, gap = self._draw_side(
                drawn.sides[i],
                program,
                values,
                (response, weight, eta),
                i,
                items[i],
                priors.at(values)[i],
                is_whole,
            )
            gaps.append(gap)
        values = values | switched(
            drawn.switches, crossed, program, values, priors.at(values)[2], sums, is_whole
        )
        eta = crossed.predictor(program, values)
        if components:
            values = rescaled(*drawn.scales, crossed, components, program, values)
        values = shifted(drawn.intercepts, crossed, program, values)
        return values, [jnp.max(jnp.stack(gaps))], hold(program, crossed.observed, eta)

    def draw_items(
        self, rng_key: Array, program: Program, values: dict[str, Any], plate: str, num_rounds: int
    ) -> dict[str, Any]:
        """Draws the sites of one side, given all other sites.

        Args:
            rng_key: a key.
            program: the model with its data.
            values: the values of all sites.
            plate: the plate of the side.
            num_rounds: Gibbs rounds, each of the latent Normals of a probit and then of the side.
        """
        [i] = [i for i, side in enumerate(self.crossed.sides) if side.plate == plate]

        def draw_round(turn: Array, values: dict[str, Any]) -> dict[str, Any]:
            latent_key, side_key = random.split(random.fold_in(rng_key, turn))
            entries = self._response(latent_key, program, values)
            prior = self.crossed.priors(program, values)[i]
            noise = self._random(side_key, program, values).sides[i]
            return self._draw_side(noise, program, values, entries, i, self._items[i], prior)[0]

        return lax.fori_loop(0, num_rounds, draw_round, values)

    def _random(self, rng_key: Array, program: Program, values: dict[str, Any]) -> "_Random":
        crossed, (flat, _) = self.crossed, self.crossed.global_values(values)
        num = len(values[crossed.components.switch]) if crossed.components else 0
        shapes = [
            *((side.size, crossed.width(program, side)) for side in crossed.sides),
            (2, num),
            (len(crossed.intercepts),),
            (len(flat), 2),
            (2, num),
            (),
            (int(np.ceil(self.num_births)) if num else 0, num_random(crossed, program)),
        ]
        ends = np.cumsum([int(np.prod(shape)) for shape in shapes])
        both = uniforms(rng_key, int(ends[-1]), flat.dtype)
        uniform, noise = (
            [
                part.reshape(shape)
                for part, shape in zip(jnp.split(x, ends[:-1]), shapes, strict=True)
            ]
            for x in both
        )
        births = uniform[7], noise[7]
        return _Random(noise[:2], (noise[2], uniform[5]), noise[3], uniform[4], uniform[6], births)

    def _response(
        self, rng_key: Array, program: Program, values: dict[str, Any]
    ) -> tuple[Array, Array, Array]:
        eta = self.crossed.predictor(program, values)
        site = program.trace(values)[self.crossed.observed]
        return *respond(rng_key, rebuilt(site["fn"], eta), site["value"]), eta

    def _draw_side(
        self,
        noise: Array,
        program: Program,
        values: dict[str, Any],
        entries: tuple[Array, Array, Array],
        number: int,
        items: PaddedItems,
        prior: tuple[Array, Array],
        is_whole: Array | bool = True,
    ) -> tuple[dict[str, Any], Array, tuple[Array, Array], Array]:
        """The values with a side drawn anew, the new predictor, the sums for `switched`, and a gap.

        The gap is between the new predictor and the one that follows from the table.
        """
        crossed, (response, weight, eta) = self.crossed, entries
        side, other = crossed.sides[number], crossed.sides[1 - number]
        index, of_other = (jnp.asarray(program.arguments[each.index]) for each in (side, other))
        table, scale = crossed.unit_table(program, values, side)
        start = crossed.flat(values, side)
        own = [(response - eta)[:, None], crossed.shared_slopes(program, values)]
        padded = Entries.of(table, of_other, jnp.concatenate(own, axis=1), weight)
        given = noise.astype(start.dtype), padded, start, prior, scale, items
        is_long = self.share_whole < 1
        step, (square, linear) = steps_in_use(*given, is_whole) if is_long else steps(*given)
        values = {**values, **crossed.unflat(program, side, start + step)}
        new, some = crossed.predictor(program, values), slice(0, NUM_CHECKED)
        wanted = eta[some] + jnp.sum(table[of_other[some]] * (scale * step)[index[some]], axis=1)
        gap = jnp.max(jnp.abs(new[some] - wanted)) / (1 + jnp.max(jnp.abs(wanted)))
        keep = np.r_[crossed.factor_columns(program, side), len(scale) : len(linear)]
        return values, new, (square[keep][:, keep], linear[keep]), gap


class _Random(NamedTuple):
    """All that a sweep draws at random but for a probit; by one call, whose code is long."""

    sides: list[Array]  # standard Normals
    scales: tuple[Array, Array]  # standard Normals, and numbers between 0 and 1
    intercepts: Array  # standard Normals
    switches: Array  # numbers between 0 and 1
    chance: Array  # one more
    births: tuple[Array, Array]  # for each birth or death numbers between 0 and 1, and Normals


class _Priors:
    """The priors of the crossed sites, by `Crossed.priors`, as values change.

    Unless the sites are parents of each other, their log priors are computed once: they are
    quadratic, so that slopes elsewhere follow.
    """

    def __init__(self, crossed: Crossed, program: Program, values: dict[str, Any], is_tied: bool):
        self.crossed, self.program, self.is_tied = crossed, program, is_tied
        self.start, self.first = self._places(values), crossed.priors(program, values)

    def at(self, values: dict[str, Any]) -> list[tuple[Array, Array]]:
        """Slopes and falls."""
        if self.is_tied:
            return self.crossed.priors(self.program, values)
        moved = zip(self.first, self.start, self._places(values), strict=True)
        return [(slope - fall * (x - start), fall) for (slope, fall), start, x in moved]

    def _places(self, values: dict[str, Any]) -> list[Array]:
        flat = [self.crossed.flat(values, side) for side in self.crossed.sides]
        return [*flat, self.crossed.global_values(values)[0]]
