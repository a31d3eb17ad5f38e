"""Gibbs sampling of any model with conjugate sites: a chain, and a block of NumPyro's `Gibbs`.

A draw is one sweep: every site in the order of the trace, from its complete conditional. The
conditional is read off the model by differentiating the log joint
(`inference.reading.conditional`). `init` proves that each site has a family that can be drawn from.
It refuses, by name, a site that has none; such a site belongs to another kernel:

    ConditionalGibbs(model)                                            # draws all sites
    Gibbs([(ConditionalGibbs(model), ["mean", "variance"]),            # NUTS draws the others
           (NUTS(model), None)])

Every reading is checked again while the chain runs. The statistic `residual` is the largest
relative gap between the log joint and the conditionals of a sweep. A chain stops where it exceeds
`MAX_RESIDUAL`, for the model then differs from what was proved.

`init` chooses a route, which draws some sites jointly; the tree's attribute `route` names it:

- "mixture" (`mixture`): all sites of a truncated stick-breaking mixture of conjugate blocks, with
  missing entries and probit experts. It shares reading, proof and computations with
  `CoordinateAscent`, so that the two can be compared.
- "crossed" (`crossed`): the sites of a crossed predictor, such as matrix factors and effects of
  rows and columns: all of a row, all of a column, all components with their number.
- "each": no site is drawn jointly.

Cost of a sweep: for each site 4 gradients of the log joint; K + 3 for elements that are drawn
jointly in blocks of K, and as many for each column where columns take turns; V log joints for a
site of V values. Crossed: O(entries x columns^2 + items x columns^3), for sites of so many numbers
a row or column. Mixture: see `mixture`, and one log joint for the record.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random
from numpyro.util import is_prng_key

from inference.kernels.conditional_gibbs.crossed import CrossedRoute
from inference.kernels.conditional_gibbs.mixture import MixtureRoute
from inference.kernels.conditional_gibbs.mixture_predict import AssignmentDraws
from inference.kernels.conditional_gibbs.route import Route
from inference.program.compiling import compiled, is_traced
from inference.program.interpreting import interpreted, split
from inference.program.program import Program
from inference.program.sites import StructureError, check_setting
from inference.reading.conditional import draw_together, identify_all, settings_of
from inference.reading.crossed import hold, read_crossed
from inference.run.command import Command
from inference.run.protocol import GibbsBlock, Reading

__all__ = [
    "AssignmentDraws",
    "ConditionalGibbs",
    "ConditionalReading",
    "ConditionalState",
    "draw_items",
]

MAX_RESIDUAL = 1e-2  # rounding of long sums in float32 stays below


class ConditionalState(NamedTuple):
    """A draw, and what the next one needs."""

    values: dict[str, Array]  # of the sites that the kernel owns, constrained
    residual: Array  # the largest of the last sweep
    # 1 + the place of the site whose residual exceeded the limit; 0 as long as there was none
    failed: Array
    rng_key: Array
    num_groups: Array | None = None  # of a mixture: how many groups have rows
    potential_energy: Array | None = None  # of a mixture: minus the log joint; 0 at the start


@dataclass(frozen=True, eq=False)
class ConditionalReading(Reading):
    """How the sites of a model are drawn."""

    route: Route  # draws some sites jointly
    # the families of the other sites; sites of one key are drawn together
    families: dict[tuple[str, ...], Any]

    @property
    def attributes(self) -> dict[str, str]:
        """Attributes of the tree."""
        return {"route": self.route.name}

    @property
    def not_identified(self) -> tuple[str, ...]:
        """Sites that label switching affects, for `diagnostics`."""
        return self.route.not_identified


class ConditionalGibbs(GibbsBlock):
    """Draws sites of a model from their complete conditionals.

    It runs in `Driver`, in `numpyro.infer.MCMC`, and as a block of `Gibbs`.

    Args:
        model: a NumPyro model.
        route: "mixture", where all sites are then drawn here; "crossed"; "each"; or "auto" for the
            first of them that the model allows.
        num_births: how many births or deaths of components of a crossed predictor are proposed in
            each sweep; a fraction is a probability. None: 1, or down to 0.02 with many entries.
    """

    checks_itself = True  # `init` refuses a model without a finite density
    command = Command(
        {"num_births": 1.0},
        {"num_chains": 2, "num_warmup": 200, "num_samples": 300},
        double_below=500_000,
        held_out=0.2,
    )
    reading: ConditionalReading

    def __init__(self, model: Callable, *, route: str = "auto", num_births: float | None = None):
        route = "mixture" if route == "assignment" else route  # its name in former versions
        check_setting(route in READERS, f"one of {tuple(READERS)}", route=route)
        self.model, self.route, self.num_births = model, route, num_births

    @property
    def default_fields(self) -> tuple[str, ...]:
        """The fields of the state that a run records."""
        return ("values", "residual", *(self.reading.route.fields if self.reading else ()))

    # The protocol of NumPyro's kernels.

    def init(self, rng_key, num_warmup, init_params, model_args, model_kwargs) -> ConditionalState:
        """Reads the model, proves a family for each site that no other block owns, and starts.

        Args:
            rng_key: a key, or one for each chain.
            num_warmup: not used.
            init_params: values of some sites; the others are drawn.
            model_args: positional arguments of the model.
            model_kwargs: its keyword arguments.
        """
        if not is_prng_key(rng_key):
            own = lambda i: {name: value[i] for name, value in (init_params or {}).items()}
            each = [
                self.init(key, num_warmup, own(i), model_args, model_kwargs)
                for i, key in enumerate(rng_key)
            ]
            return jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
        program, others = self._program(model_args, model_kwargs)
        start_key, chain_key = split(rng_key, 2)
        owned = [name for name in program.latent if name not in others]
        given = _checked(program, owned, init_params or {})
        start = interpreted(program.draw_initial, start_key)(start_key) | given | others
        read = lambda: self._read(program, owned, start)
        route = self._bind(program, owned, read, start).route
        start = start | route.start(start_key) | given
        values = {name: jnp.asarray(start[name]) for name in owned}
        zero = jnp.asarray(np.zeros((), jnp.result_type(float)))
        recorded = route.recorded(values, lambda _: zero)
        return ConditionalState(values, zero, jnp.asarray(np.int32(0)), chain_key, *recorded)

    def _read(
        self, program: Program, owned: list[str], values: dict[str, Array]
    ) -> ConditionalReading:
        *preferred, last = READERS[self.route]
        for reader in preferred:
            try:
                return reader(program, owned, values, self.num_births)
            except StructureError:
                continue
        return last(program, owned, values, self.num_births)

    def data(self, model_args, model_kwargs) -> Any:
        """The arrays that `sample` takes as `data`, for drivers that compile it; after `init`."""
        return self.reading.route.data(self._program(model_args, model_kwargs)[0])

    def sample(
        self, state: ConditionalState, model_args, model_kwargs, data: Any = None
    ) -> ConditionalState:
        """One sweep."""
        if not is_prng_key(state.rng_key):
            return jax.vmap(lambda one: self.sample(one, model_args, model_kwargs, data))(state)
        program, others = self._program(model_args, model_kwargs)
        route, families = self.reading.route, self.reading.families
        rng_key, joint_key, *keys = random.split(state.rng_key, 2 + len(families))
        data = route.data(program) if data is None else data
        values, residuals, conditioned = route.draw(joint_key, program, state.values | others, data)
        for key, (names, family) in zip(keys, families.items(), strict=True):
            drawn, residual = draw_together(key, conditioned, names, values, family)
            values |= drawn
            residuals.append(residual)
        found = jnp.stack(residuals).astype(state.residual.dtype)
        place = 1 + jnp.arange(len(residuals), dtype=jnp.int32)
        failed = jnp.where(found <= MAX_RESIDUAL, 0, place).max()  # also where it is no number
        return ConditionalState(
            {name: values[name] for name in state.values},
            found.max(),
            jnp.where(state.failed > 0, state.failed, failed),
            rng_key,
            *route.recorded(values, program.log_joint),
        )

    def postprocess_fn(self, model_args, model_kwargs, data: Any = None) -> Callable:
        """A function that adds deterministic sites, where a draw has all latent ones.

        Args:
            model_args, model_kwargs: the model's arguments.
            data: as for `sample`.
        """
        program, others = self._program(model_args, model_kwargs)
        program = self.reading.route.seen(program, data)
        if others or not program.deterministic:
            return lambda values: values
        return lambda values: values | program.deterministics(values)

    def get_diagnostics_str(self, state: ConditionalState) -> str:
        """The residual.

        Raises:
            StructureError: where a residual was too large.
        """
        if failed := int(state.failed):
            families = self.reading.families.items()
            named = lambda names: f"site {' or '.join(map(repr, names))}"
            alone = [(named(names), family.name) for names, family in families]
            what, family = [*self.reading.route.drawn, *alone][failed - 1]
            raise StructureError(
                f"{what}: its complete conditional is not the {family} that it was at the start, "
                f"by more than {MAX_RESIDUAL} (relative). Use float64, jax.enable_x64(True), in "
                "which sums over many data do not round; or give the site to NUTS: "
                "Gibbs([(ConditionalGibbs(model), [...]), (NUTS(model), [...])])."
            )
        return f"residual {float(state.residual):.1e}"


def draw_items(
    rng_key: Array, program: Program, draws: Mapping[str, Any], plate: str, num_rounds: int = 20
) -> dict[str, Array]:
    """Draws the sites of new items of one side of a crossed predictor, given each of many draws.

    Args:
        rng_key: a key.
        program: the model on the entries of the new items alone.
        draws: {site: [draw, ...]} of an earlier run; the sites of `plate` are ignored.
        plate: the plate of the new items.
        num_rounds: Gibbs rounds for a probit, each of its latent Normals and then of the sites;
            with a Normal one round is exact.
    """
    crossed = read_crossed(program, rng_key)
    [side] = [side for side in crossed.sides if side.plate == plate]
    route, num_draws = CrossedRoute(crossed, program, 0), len(next(iter(draws.values())))
    start = {name: jnp.zeros((num_draws, *program.sites[name].shape)) for name in side.sites}
    others = [name for name in program.latent if name not in side.sites]
    values = {name: jnp.asarray(draws[name]) for name in others} | start
    at_draw = lambda at: route.draw_items(at[1], program, at[0], plate, num_rounds)
    given = values, random.split(rng_key, num_draws)
    return compiled(lambda *given: lax.map(at_draw, given), *given)(*given)


# The readings of the routes.


def _read_mixture(
    program: Program, owned: list[str], values: Any, num_births: float | None
) -> ConditionalReading:
    if is_traced(program.arguments):
        raise StructureError(
            "no assignment of rows: its data are traced, and it must be known which entries are "
            "missing."
        )
    _refuse_elsewhere("assignment of rows", program.latent, owned)
    return ConditionalReading(MixtureRoute(program), {})


def _read_crossed(
    program: Program, owned: list[str], values: Any, num_births: float | None
) -> ConditionalReading:
    shown, at, key = _shown(program, values)
    crossed = read_crossed(shown, key)
    _refuse_elsewhere("crossed predictor", crossed.sites, owned)
    route = CrossedRoute(crossed, program, num_births)
    others = [name for name in owned if name not in crossed.sites]
    predictor = lambda at: crossed.predictor(shown, at)
    held = hold(shown, crossed.observed, interpreted(predictor, at)(at))
    _refuse_infinite(program, owned)
    return ConditionalReading(route, _families(held, others, at, key))


def _read_each(
    program: Program, owned: list[str], values: Any, num_births: float | None
) -> ConditionalReading:
    _refuse_infinite(program, owned)
    shown, at, key = _shown(program, values)
    return ConditionalReading(Route(), _families(shown, owned, at, key))


# the readers that are tried for each setting of `route`; the error of the last one stands
READERS: dict[str, tuple[Callable, ...]] = {
    "auto": (_read_mixture, _read_crossed, _read_each),
    "mixture": (_read_mixture,),
    "crossed": (_read_crossed,),
    "each": (_read_each,),
}


def _shown(program: Program, values: Any) -> tuple[Program, Any, Array]:
    """The model with stand-ins for traced arguments, values of its sites, and a key."""
    shown, key = program.with_stand_ins(), random.key(0)
    is_known = not is_traced((program.arguments, values))
    return shown, values if is_known else shown.draw_initial(key), key


def _families(
    program: Program, names: list[str], values: Any, rng_key: Array
) -> dict[tuple[str, ...], Any]:
    if not names:
        return {}
    return identify_all(program, names, settings_of(program, values, rng_key), rng_key)


def _refuse_infinite(program: Program, owned: list[str]) -> None:
    """Refuses a model without a finite density, where this kernel draws all its sites.

    `Driver` checks the models of `Gibbs`.
    """
    if len(owned) == len(program.latent) and not is_traced(program.arguments):
        program.check()


def _refuse_elsewhere(what: str, sites: tuple[str, ...], owned: list[str]) -> None:
    if elsewhere := sorted(set(sites) - set(owned)):
        raise StructureError(f"no {what}: its sites {elsewhere} are drawn by another kernel.")


def _checked(
    program: Program, owned: list[str], init_params: Mapping[str, Any]
) -> dict[str, Array]:
    if unknown := sorted(set(init_params) - set(owned)):
        raise ValueError(f"init_params: found {unknown}, wanted sites of {owned}.")
    for name, value in init_params.items():
        if jnp.shape(value) != program.sites[name].shape:
            raise ValueError(
                f"init_params: {name!r} has the shape {jnp.shape(value)}, wanted "
                f"{program.sites[name].shape}."
            )
    return {
        name: jnp.asarray(value, program.sites[name].dtype) for name, value in init_params.items()
    }
