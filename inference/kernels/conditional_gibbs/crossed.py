"""Gibbs sweep over the sites of a crossed predictor, most of them jointly.

The entries of a matrix have a crossed predictor where each is linear in the sites of its row, and
in those of its column (`inference.reading.crossed`). It may be a sum of components that are
switched on and off: the number of those that are on is its rank.

The order is: the latent Normals of a probit, both sides, switches with amplitudes and shared sites,
births and deaths of components, scales, intercepts. Given the latent Normals everything else is
conjugate. Each part leaves the posterior invariant, so that any order would do. Sites outside the
predictor are not touched.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random

from inference.kernels.conditional_gibbs.crossed_births import birth_or_death
from inference.kernels.conditional_gibbs.crossed_components import rescaled, shifted, switched
from inference.kernels.conditional_gibbs.crossed_sides import Entries, pad_items, steps
from inference.kernels.conditional_gibbs.route import Route
from inference.program.compiling import is_traced
from inference.program.program import Program
from inference.program.sites import StructureError
from inference.reading.crossed import Crossed, Side, hold, rebuilt, respond

__all__ = ["CrossedRoute"]

NUM_CHECKED = 512  # entries whose predictor is checked after each draw of a side


class CrossedRoute(Route):
    """Draws the sites of a crossed predictor.

    Args:
        crossed: the sites and their parts in the predictor.
        program: the model with its data.
        num_births: proposed births or deaths of components in each sweep; a fraction is a chance.
            None: 1, and fewer with more than 16 000 entries, where one costs as much as a sweep.
    """

    name, drawn = "crossed", (("crossed predictor", "Normal"),)

    def __init__(self, crossed: Crossed, program: Program, num_births: float | None):
        usual = min(1.0, max(16_000 / crossed.num_entries(program), 0.02))
        self.crossed, self.num_births = crossed, usual if num_births is None else num_births
        self._index = self._index_of(program)
        if is_traced(self._index):
            raise StructureError(
                "no crossed predictor: the rows and columns of the entries are traced, and it must "
                "be known which they are."
            )
        width = lambda side: sum(int(np.prod(program.sites[name].shape[1:])) for name in side.sites)
        self._items = [
            pad_items(np.asarray(at), side.size, width(side))
            for at, side in zip(self._index, crossed.sides, strict=True)
        ]

    def _index_of(self, program: Program) -> list[Any]:
        return [program.arguments[side.index] for side in self.crossed.sides]

    def data(self, program: Program) -> dict[str, Any]:
        """The arrays of a program whose entries have the rows and columns seen at `init`."""
        index = self._index_of(program)
        if is_traced(index) or not all(map(np.array_equal, index, self._index)):
            raise StructureError(
                "crossed predictor: the rows and columns of the entries are others than at `init`, "
                "or traced. Run `init`."
            )
        by_entry = {name: jnp.asarray(program.arguments[name]) for name in self.crossed.by_entry}
        return {"arguments": by_entry, "items": self._items}

    def draw(
        self, rng_key: Array, program: Program, values: dict[str, Any], data: dict[str, Any]
    ) -> tuple[dict[str, Any], list[Array], Program]:
        """Draws the sites of the predictor; returns all values, the residual, and the model.

        The residual is the largest relative gap, over `NUM_CHECKED` entries, between the predictor
        after a side is drawn and the one that equation (1) of `inference.reading.crossed` gives. In
        the returned model the predictor is held fixed, so that the sites outside it are drawn
        without computing it again.
        """
        crossed, program = self.crossed, program.with_arguments(**data["arguments"])
        keys = random.split(rng_key, 8)
        response, weight, eta = self._response(keys[0], program, values)
        gaps = []
        for side, items, key in zip(crossed.sides, data["items"], keys[1:3], strict=True):
            values, eta, sums, gap = self._draw_side(
                key, program, values, (response, weight, eta), side, items
            )
            gaps.append(gap)
        values = values | switched(keys[3], crossed, program, values, sums)
        eta = crossed.predictor(program, values)
        if components := crossed.components:
            propose = lambda i, at: birth_or_death(
                random.fold_in(keys[4], i),
                crossed,
                components,
                program,
                at[0],
                (response, weight, at[1]),
                data["items"],
            )
            whole, rest = divmod(float(self.num_births), 1)
            num_births = int(whole) + random.bernoulli(keys[7], rest).astype(jnp.int32)
            values, eta = lax.fori_loop(0, num_births, propose, (values, eta))
            values = rescaled(keys[5], crossed, components, program, values)
        values = shifted(keys[6], crossed, program, values)
        return values, [jnp.max(jnp.stack(gaps))], hold(program, crossed.observed, eta)

    def draw_items(
        self, rng_key: Array, program: Program, values: dict[str, Any], plate: str, num_rounds: int
    ) -> dict[str, Any]:
        """Draws the sites of one side, given all other sites.

        Args:
            rng_key: a key.
            program: the model with its data.
            values: the values of all sites.
            plate: the side's.
            num_rounds: Gibbs rounds, each of the latent Normals of a probit and then of the side.
        """
        [side] = [each for each in self.crossed.sides if each.plate == plate]
        items = self._items[self.crossed.sides.index(side)]

        def draw_round(i: Array, values: dict[str, Any]) -> dict[str, Any]:
            latent_key, side_key = random.split(random.fold_in(rng_key, i))
            entries = self._response(latent_key, program, values)
            return self._draw_side(side_key, program, values, entries, side, items)[0]

        return lax.fori_loop(0, num_rounds, draw_round, values)

    def _response(
        self, rng_key: Array, program: Program, values: dict[str, Any]
    ) -> tuple[Array, Array, Array]:
        eta = self.crossed.predictor(program, values)
        site = program.trace(values)[self.crossed.observed]
        return *respond(rng_key, rebuilt(site["fn"], eta), site["value"]), eta

    def _draw_side(
        self,
        rng_key: Array,
        program: Program,
        values: dict[str, Any],
        entries: tuple[Array, Array, Array],
        side: Side,
        items: tuple,
    ) -> tuple[dict[str, Any], Array, tuple[Array, Array], Array]:
        """Draws all sites of one side, given the other side.

        Returns the values, the predictor there, the sums that `switched` takes, and the relative
        gap between that predictor and the linear update of the one before.
        """
        crossed, (response, weight, eta) = self.crossed, entries
        [other] = (each for each in crossed.sides if each.plate != side.plate)
        index, of_other = (jnp.asarray(program.arguments[each.index]) for each in (side, other))
        table, scale = crossed.unit_table(program, values, side)
        start, prior = crossed.flat(values, side), crossed.prior(program, values, side)
        own = [(response - eta)[:, None], crossed.shared_slopes(program, values)]
        padded = Entries.of(table, of_other, jnp.concatenate(own, axis=1), weight)
        step, (square, linear) = steps(rng_key, padded, start, prior, scale, items)
        values = {**values, **crossed.unflat(program, side, start + step)}
        new, some = crossed.predictor(program, values), slice(0, NUM_CHECKED)
        wanted = eta[some] + jnp.sum(table[of_other[some]] * (scale * step)[index[some]], axis=1)
        gap = jnp.max(jnp.abs(new[some] - wanted)) / (1 + jnp.max(jnp.abs(wanted)))
        keep = np.r_[crossed.factor_columns(program, side), len(scale) : len(linear)]
        return values, new, (square[keep][:, keep], linear[keep]), gap
