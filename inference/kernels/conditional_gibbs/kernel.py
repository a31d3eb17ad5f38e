"""Gibbs sampling of any model with conjugate sites: a chain, and a block of NumPyro's `Gibbs`.

A draw is one sweep: every site in the order of the trace, from its complete conditional, which is
read off the model by differentiating the log joint (`inference.reading.conditional`). At `init`
each site is proved to be of a family that can be drawn from; a site that is not is refused by name,
and belongs to another kernel:

    ConditionalGibbs(model)                                                                  # all sites
    Gibbs([(ConditionalGibbs(model), ["mean", "variance"]), (NUTS(model), None)])            # NUTS takes the others

Every reading is checked again while the chain runs: the largest gap met between the log joint and
the conditional is the statistic `residual`, and a chain that meets one above `MOST` stops, for the
model is then not what it looked like at `init`.

Where the observed entries have a crossed predictor (`inference.reading.crossed`: matrix factors,
features, row and column effects), its sites are drawn jointly: all of a row, all of a column, all
components with their number. Where rows are assigned to the groups of a truncated mixture of
conjugate blocks (`inference.reading.stick_mixture.read`: sticks, normal-Wishart features, missing
entries, probit experts), a sweep is some splits and merges of groups, all that belongs to groups,
then all rows, much of it integrated out meanwhile (`mixture`); it reads, proves and computes by the
same code as `CoordinateAscent`, so that the two may be compared. The three ways are routes of one
kernel, because nothing but the blocks differs: what is drawn is drawn from complete conditionals
that were read off the model, and the residual tells how far the model has gone from them. `init`
chooses the route; the attribute `route` of the tree names it.

Cost of a sweep: for each site 4 gradients of the log joint, K + 3 for elements that are drawn
jointly in blocks of K, and as many for each column where columns take turns; V log joints for a
site of V values. Crossed: O(entries x columns^2 + items x columns^3), where columns are the sites'
numbers for each row or column. Mixture: as in `mixture`, and one log joint, for the record.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax, random
from numpyro.util import is_prng_key

from inference.kernels.conditional_gibbs.crossed import CrossedSweep
from inference.kernels.conditional_gibbs.mixture import AssignmentSweep
from inference.kernels.conditional_gibbs.mixture_predict import AssignmentDraws
from inference.kernels.conditional_gibbs.route import Route
from inference.program.compiling import is_traced
from inference.program.program import Program
from inference.program.sites import StructureError, check_setting
from inference.reading.conditional import draw, identify_among, settings_of
from inference.reading.crossed import hold, read_crossed
from inference.run.protocol import GibbsBlock, Reading

__all__ = [
    "AssignmentDraws",
    "ConditionalGibbs",
    "ConditionalReading",
    "ConditionalState",
    "draw_items",
]

ROUTES = ("auto", "mixture", "crossed", "each")
MOST = 1e-2  # residual; what rounding of long sums in float32 may leave


class ConditionalState(NamedTuple):
    """A draw, and what the next one needs."""

    values: dict[str, Array]  # of the sites that the kernel owns, constrained
    residual: Array  # the largest of the last sweep
    # 1 + the place of the site whose residual was above MOST; 0 as long as there was none
    failed: Array
    rng_key: Array
    num_groups: Array | None = None  # of a mixture, those that have rows
    # of a mixture, minus the log joint; 0 before the first draw
    potential_energy: Array | None = None


@dataclass(frozen=True, eq=False)
class ConditionalReading(Reading):
    """How the sites of a model are drawn."""

    route: Route  # draws some sites jointly
    families: dict[str, Any]  # of each of the others

    @property
    def attributes(self) -> dict[str, str]:
        """For the tree."""
        return {"route": self.route.name}

    @property
    def not_identified(self) -> tuple[str, ...]:
        """Sites of which `diagnostics` asks nothing."""
        return self.route.not_identified


class ConditionalGibbs(GibbsBlock):
    """Draws sites of `model` from their complete conditionals; runs in `Driver`, in
    `numpyro.infer.MCMC`, and as a block of `Gibbs`.

    :param route: "mixture" for a mixture, all of whose sites are then drawn here, "crossed" for the
    sites of a crossed predictor,
        "each" for one site after the other, "auto" for what the model allows.
    :param num_births: how many components of a crossed predictor try to be born, or to die, in each
    sweep; a fraction is a
        chance. None: 1, and down to 1 in 50 where entries are many.
    """

    checks_itself = True  # whether `init` refuses what has no finite density
    reading: ConditionalReading

    def __init__(self, model: Callable, *, route: str = "auto", num_births: float | None = None):
        route = "mixture" if route == "assignment" else route  # its name in former versions
        check_setting(route in ROUTES, f"one of {ROUTES}", route=route)
        self.model, self.route, self.num_births = model, route, num_births

    @property
    def default_fields(self) -> tuple[str, ...]:
        """What a run records."""
        return ("values", "residual", *(self.reading.route.fields if self.reading else ()))

    # The protocol of NumPyro's kernels.

    def init(self, rng_key, num_warmup, init_params, model_args, model_kwargs) -> ConditionalState:
        """Proves a family for each site that no other block owns.

        `init_params` are values of sites, drawn where there are none.
        """
        if not is_prng_key(rng_key):
            of = lambda i: (
                None if init_params is None else jax.tree.map(lambda leaf: leaf[i], init_params)
            )
            each = [
                self.init(key, num_warmup, of(i), model_args, model_kwargs)
                for i, key in enumerate(rng_key)
            ]
            return jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
        program, others = self._program(model_args, model_kwargs)
        start_key, chain_key = random.split(rng_key)
        owned = [name for name in program.latent if name not in others]
        given = _checked(program, owned, init_params or {})
        values = jax.jit(program.draw_initial)(start_key) | given | others
        route = self._bind(program, owned, lambda: self._read(program, owned, values)).route
        values = values | route.start(start_key) | given
        drawn, zero = (
            {name: jnp.asarray(values[name]) for name in owned},
            jnp.zeros((), jnp.result_type(float)),
        )
        num_groups = route.num_groups(drawn)
        return ConditionalState(
            drawn,
            zero,
            jnp.zeros((), jnp.int32),
            chain_key,
            num_groups,
            None if num_groups is None else zero,
        )

    def _read(
        self, program: Program, owned: list[str], values: dict[str, Array]
    ) -> ConditionalReading:
        """The best route that the model allows.

        Of traced arguments stand-ins are read, at values of their own.

        What has no finite density is refused, where all sites are drawn here; `Driver` sees to the
        models of `Gibbs`. Of a mixture, where soft labels at random have no finite density, the
        rows are read instead.
        """
        # Also no mixture: a model with data that a mixture cannot have, or that does not run on
        # some of its rows.
        if mixture := self._tried(
            "mixture", (TypeError, ValueError), lambda: _mixture(program, owned)
        ):
            return ConditionalReading(mixture, {})
        if len(owned) == len(program.latent) and not is_traced(program.arguments):
            program.check()
        shown, key, route = program.with_stand_ins(), random.key(0), Route()
        at = shown.draw_initial(key) if is_traced((program.arguments, values)) else values
        if crossed := self._tried(
            "crossed", StructureError, lambda: self._crossed(program, shown, owned, key)
        ):
            route, found = crossed, crossed.crossed
            shown = hold(shown, found.observed, found.predictor(shown, at))
            owned = [name for name in owned if name not in found.sites]
        settings = settings_of(shown, at, key) if owned else {}
        families = {
            name: identify_among(shown, name, settings, random.fold_in(key, i))
            for i, name in enumerate(owned)
        }
        return ConditionalReading(route, families)

    def _tried(self, route: str, errors: Any, read: Callable[[], Any]) -> Any:
        """What `read()` finds, where the route is asked for, or none is and the model allows it."""
        if self.route not in ("auto", route):
            return None
        try:
            return read()
        except errors:
            if self.route == route:
                raise
            return None

    def _crossed(
        self, program: Program, shown: Program, owned: list[str], rng_key: Array
    ) -> CrossedSweep:
        """The sweep over a crossed predictor, all of whose sites are drawn here."""
        crossed = read_crossed(shown, rng_key)
        if elsewhere := sorted(set(crossed.sites) - set(owned)):
            raise StructureError(
                f"no crossed predictor: its sites {elsewhere} are drawn by another kernel."
            )
        return CrossedSweep(crossed, program, self.num_births)

    def data(self, model_args, model_kwargs) -> Any:
        """Arrays that `sample` takes, for a driver that gives compiled code its data as
        arguments; after `init`.
        """
        return self.reading.route.data(self._program(model_args, model_kwargs)[0])

    def sample(
        self, state: ConditionalState, model_args, model_kwargs, data: Any = None
    ) -> ConditionalState:
        """One sweep."""
        if not is_prng_key(state.rng_key):
            return jax.vmap(lambda one: self.sample(one, model_args, model_kwargs, data))(state)
        (program, others), route, families = (
            self._program(model_args, model_kwargs),
            self.reading.route,
            self.reading.families,
        )
        rng_key, joint_key, *keys = random.split(state.rng_key, 2 + len(families))
        data = route.data(program) if data is None else data
        values, residuals, conditioned = route.draw(joint_key, program, state.values | others, data)
        for key, (name, family) in zip(keys, families.items(), strict=True):
            values[name], residual = draw(key, conditioned, name, values, family)
            residuals.append(residual)
        found = jnp.stack(residuals).astype(state.residual.dtype)
        failed = jnp.where(
            ~(found <= MOST), 1 + jnp.arange(len(residuals), dtype=jnp.int32), 0
        ).max()
        failed = jnp.where(state.failed > 0, state.failed, failed)
        num_groups = route.num_groups(values)
        energy = None if num_groups is None else -program.log_joint(values)
        return ConditionalState(
            {name: values[name] for name in state.values},
            found.max(),
            failed,
            rng_key,
            num_groups,
            energy,
        )

    def postprocess_fn(self, model_args, model_kwargs) -> Callable:
        """Adds deterministic sites, where a draw has all latent ones."""
        program, others = self._program(model_args, model_kwargs)
        if others or not program.deterministic:
            return lambda values: values
        return lambda values: values | program.deterministics(values)

    def get_diagnostics_str(self, state: ConditionalState) -> str:
        """The residual; raises where one was too large."""
        if failed := int(state.failed):
            alone = [
                (f"site {name!r}", family.name) for name, family in self.reading.families.items()
            ]
            who, family = [*self.reading.route.drawn, *alone][failed - 1]
            raise StructureError(
                f"{who}: its complete conditional is not the {family} that it was at the start, by "
                f"more than {MOST} (relative). Use "
                "float64, jax.enable_x64(True), in which sums over many data do not round; or "
                "give the site to NUTS: "
                f"Gibbs([(ConditionalGibbs(model), [...]), (NUTS(model), [...])])."
            )
        return f"residual {float(state.residual):.1e}"


def draw_items(
    rng_key: Array, program: Program, draws: Mapping[str, Any], plate: str, num_rounds: int = 20
) -> dict[str, Array]:
    """New items of one side of a crossed predictor: their sites given each of many draws of all
    others.

    :param program: the model on the entries of the new items alone.
    :param draws: {site: [draw, ...]} of an earlier run; the sites of `plate` are not looked at.
    :param num_rounds: draws of the latents of a probit, each followed by the sites; of a Normal one
    is exact.
    """
    crossed = read_crossed(program, rng_key)
    [side] = [side for side in crossed.sides if side.plate == plate]
    sweep, num_draws = CrossedSweep(crossed, program, 0), len(next(iter(draws.values())))
    start = {name: jnp.zeros((num_draws, *program.sites[name].shape)) for name in side.sites}
    values = {
        name: jnp.asarray(draws[name]) for name in program.latent if name not in side.sites
    } | start
    each = jax.jit(
        lambda values, keys: lax.map(
            lambda at: sweep.draw_items(at[1], program, at[0], plate, num_rounds), (values, keys)
        )
    )
    return each(values, random.split(rng_key, num_draws))


def _mixture(program: Program, owned: list[str]) -> AssignmentSweep:
    """The route of a mixture, all of whose sites are drawn here."""
    if is_traced(program.arguments):
        raise StructureError(
            "no assignment of rows: its data are traced, and it must be known which entries are "
            "missing."
        )
    if elsewhere := sorted(set(program.latent) - set(owned)):
        raise StructureError(
            f"no assignment of rows: its sites {elsewhere} are drawn by another kernel."
        )
    return AssignmentSweep(program)


def _checked(
    program: Program, owned: list[str], init_params: Mapping[str, Any]
) -> dict[str, Array]:
    """The given values, in the shapes of their sites."""
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
