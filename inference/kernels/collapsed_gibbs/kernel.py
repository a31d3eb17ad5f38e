"""Gibbs sampling of the partition of a mixture whose groups, and shares of classes, are integrated
out: a chain.

A draw is one sweep: every row, in a new random order, is taken out of its group and put into one of
the others or a new one by its complete conditional

    p(z_n, y_n | other rows)  ~  p(y_n | other classes)  p(z_n | groups of class y_n)  p(x_n | rows
    of group z_n).

Rows of known class keep it. Shares of classes, and on request the parameters of groups, are then
drawn given the partition, exactly. The random order makes the chain reversible. It is slower than
`ParticleFilter`, but its posterior does not depend on the order of the data and becomes exact with
the number of draws. What the model says is read off its trace and proved on a few rows
(`inference.reading.crp_mixture`): edit the model, and the kernel follows or refuses.

A group is kept up to date as rows come and go, and computed anew from its rows at each sweep, so
that rounding does not add up.

Cost of a sweep: O(rows x classes x groups in use x columns), one class where all labels are known;
2 to 4 us a row for 100 binary columns and a few groups. From 64 groups in a class on, a row costs
O(classes x room) more. Memory: O(classes x room x columns), where the room for groups is the
`capacity` of the partition: by default one group a row, which is never too little. With a smaller
one the chain stops where a class is full: get_diagnostics_str raises (`Driver` asks it between its
chunks, `MCMC` for its bar), and from there on draws are void: z is the capacity, which is outside
of its support, and numbers are NaN. Numbers are of JAX's default float; give columns of float32 a
scale near one.

A latent scalar, such as a random concentration, belongs to another kernel beside this one in
NumPyro's `Gibbs`, which hands its value over with each call; the structure is read once, from the
model itself.

Neal (2000), "Markov chain sampling methods for Dirichlet process mixture models", algorithm 3.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, random
from numpyro.distributions.util import clamp_probs
from numpyro.util import is_prng_key

from inference.distributions import ExchangeablePartition
from inference.kernels.collapsed_gibbs.sweep import (
    FULL,
    Seats,
    Table,
    empty,
    in_order,
    seated,
    sweep,
)
from inference.kernels.particle_filter.groups import Rules
from inference.program.compiling import is_traced
from inference.program.program import Program
from inference.program.sites import StructureError, unwrap
from inference.reading.crp_mixture import (
    Parameters,
    Partition,
    Rows,
    labelled,
    labels_of,
    read_partition,
)
from inference.reading.mixture_trace import columns, term
from inference.run.protocol import GibbsBlock, Reading

__all__ = ["CollapsedGibbs", "GibbsState", "PartitionReading"]


@dataclass(frozen=True, eq=False)
class PartitionReading(Reading):
    """Which site of a model plays which part."""

    partition: Partition

    @property
    def attributes(self) -> dict[str, str]:
        """For the tree: the sites of the partition and of its classes."""
        return self.partition.attributes


class GibbsState(NamedTuple):
    """A draw, and what the next one needs."""

    values: dict[str, Array]  # of every site that is drawn
    prior: Parameters
    num_groups: Array  # [class]
    failed: Array  # 0, or why the draws are void from here on
    rng_key: Array


class _Mixture(NamedTuple):
    """A model with its arguments, as a sweep needs it."""

    found: Partition
    program: Program
    rules: Rules
    rows: Rows
    classes: Array  # [row], as the partition has them
    shape: tuple[int, int]  # classes, and room for groups in each


class CollapsedGibbs(GibbsBlock):
    """Sweeps over the rows of `model`; runs in `Driver`, in `numpyro.infer.MCMC`, and as a block of
    NumPyro's `Gibbs`.

    As a block it owns the partition, classes and shares, and the parameters of groups, and another
    kernel owns latent scalars: `Gibbs([(CollapsedGibbs(model, parameters=True), ["z", "share",
    "p"]), (NUTS(model), ["alpha"])])`.

    :param model: a model with one partition of its rows, by `CRP`, `PitmanYor` or another
    `ExchangeablePartition`, and conjugate
        components, such as `zoo.load("aclass").model`.
    :param parameters: whether the parameters of groups are drawn as well, so that a draw is one of
    all latent sites. Costs
        O(classes x room x columns) a draw.
    """

    sample_field = "values"
    default_fields = ("values", "num_groups")
    reading: PartitionReading

    @staticmethod
    def _init_strategy(message: dict[str, Any]) -> Array | None:
        """Where `Driver` looks first for a finite density: one group in each class, which there
        is always room for.
        """
        is_partition = message["type"] == "sample" and isinstance(
            unwrap(message["fn"]), ExchangeablePartition
        )
        return jnp.zeros(message["fn"].shape(), jnp.int32) if is_partition else None

    def __init__(self, model: Callable, *, parameters: bool = False):
        self.model, self.parameters = model, parameters

    # The protocol of NumPyro's kernels.

    def init(self, rng_key, num_warmup, init_params, model_args, model_kwargs) -> GibbsState:
        """Reads the model.

        The rows are seated one after the other, each given those before it, unless `init_params`
        says where they are: values of the partition and of latent classes, and of other sites that
        are drawn where these are to be kept.
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
        found = self._bind(program, [], lambda: self._read(program)).partition
        self._refuse_blocks(found, program, others)
        given = self._start(found, program, others, init_params or {})
        mixture, prior = _mixture(found, program, given | others), _prior(found, program, others)
        rng_key, seat_key, draw_key = random.split(rng_key, 3)
        if given:
            seats = Seats(mixture.classes, given[found.z])
            table, failed = (
                seated(mixture.rules, prior, mixture.rows, seats, mixture.shape[1]),
                jnp.zeros((), jnp.int32),
            )
        else:
            labels = mixture.rows.labels
            seats, table = (
                Seats(jnp.maximum(labels, 0), jnp.full_like(labels, -1)),
                empty(mixture.rules, prior, mixture.shape[1]),
            )
            seats, table, failed = _swept(mixture, prior, seats, table, seat_key)
        values = self._values(draw_key, mixture, prior, seats, table, failed) | given
        state = GibbsState(values, prior, _num_groups(table), failed, rng_key)
        if not is_traced(state):
            self.get_diagnostics_str(state)
        return state

    def sample(self, state: GibbsState, model_args, model_kwargs) -> GibbsState:
        """One sweep."""
        if not is_prng_key(state.rng_key):
            return jax.vmap(lambda one: self.sample(one, model_args, model_kwargs))(state)
        program, others = self._program(model_args, model_kwargs)
        mixture = _mixture(self.reading.partition, program, state.values | others)
        rng_key, seat_key, draw_key = random.split(state.rng_key, 3)
        seats = Seats(mixture.classes, state.values[mixture.found.z])
        table = seated(mixture.rules, state.prior, mixture.rows, seats, mixture.shape[1])
        seats, table, failed = _swept(mixture, state.prior, seats, table, seat_key)
        failed = jnp.maximum(state.failed, failed)
        values = self._values(draw_key, mixture, state.prior, seats, table, failed)
        return GibbsState(values, state.prior, _num_groups(table), failed, rng_key)

    def refresh(self, state: GibbsState, model_args, model_kwargs) -> GibbsState:
        """Hyper-parameters anew, where another kernel has moved what they are computed from."""
        return state._replace(
            prior=_prior(self.reading.partition, *self._program(model_args, model_kwargs))
        )

    def postprocess_fn(self, model_args, model_kwargs) -> Callable:
        """Adds deterministic sites, where a draw has all latent ones."""
        program, _ = self._program(model_args, model_kwargs)
        if not program.deterministic or set(program.latent) - set(
            self._drawn_sites(self.reading.partition, program)
        ):
            return lambda values: values
        return lambda values: values | program.deterministics(values)

    def get_diagnostics_str(self, state: GibbsState) -> str:
        """How many groups there are; raises where the chain has failed."""
        z, failed = self.reading.partition.z, int(state.failed)
        if failed >= FULL:
            raise ValueError(
                f"site {z!r}: class {failed - FULL} has {int(state.values[z][0])} groups, all that "
                "the capacity of its "
                f"{type(state.prior.seating).__name__} has room for; "
                "its rows can open no more. Leave the capacity at None, give more, or bound the "
                "number of groups itself: max_groups."
            )
        if failed:
            raise ValueError(
                f"site {z!r}: the groups of a row have no finite weight; rounding has spoilt the "
                "hyper-parameters of a group. Standardise "
                f"the columns of real numbers, or use float64: jax.enable_x64(True)."
            )
        return f"{int(jnp.sum(state.num_groups))} groups"

    # What it knows of the model.

    def _read(self, program: Program) -> PartitionReading:
        """The structure. Traced arguments play no part in it: others stand in."""
        found = read_partition(program.with_stand_ins())
        if not is_traced(program.arguments):
            found.rows(program)  # refuses what the likelihoods cannot have
        return PartitionReading(found)

    def _refuse_blocks(self, found: Partition, program: Program, others: Mapping[str, Any]) -> None:
        """Every latent scalar must belong to another block, and nothing else may."""
        own = self._drawn_sites(found, program)
        for name in (name for name in found.scalars if name not in others):
            raise StructureError(
                f"site {name!r}: a latent scalar, which CollapsedGibbs does not draw. Fix its "
                "value; learn it by ParticleFilter(model, "
                f"grid={{{name!r}: [...]}}); or give it to another kernel: "
                "Gibbs([(CollapsedGibbs(model, parameters=True), [...]), "
                f"(NUTS(model), [{name!r}])])."
            )
        for name in (name for name in others if name not in found.scalars):
            raise StructureError(
                f"site {name!r}: it belongs to another block of Gibbs, but CollapsedGibbs "
                f"integrates it out; wanted for this block {own}"
                f"{'' if self.parameters else ' and the parameters of groups, parameters=True'}."
            )

    def _start(
        self,
        found: Partition,
        program: Program,
        others: dict[str, Any],
        init_params: Mapping[str, Any],
    ) -> dict[str, Array]:
        """The given values, checked."""
        drawn = self._drawn_sites(found, program)
        needed = drawn[: 1 + (_classes_site(found, program) is not None)]
        if init_params and not set(needed) <= set(init_params) <= set(drawn):
            more = (
                "" if self.parameters else "; parameters of groups are drawn with parameters=True"
            )
            raise ValueError(
                f"init_params: found {sorted(init_params)}, wanted {needed}, and of {drawn} what "
                f"is to be kept{more}."
            )
        for name, value in init_params.items():
            site, dtype = program.sites[name], jnp.result_type(value)
            if jnp.shape(value) != site.shape or (
                site.is_discrete and not jnp.issubdtype(dtype, jnp.integer)
            ):
                raise ValueError(
                    f"init_params: found {name!r} of {dtype}{list(jnp.shape(value))}, wanted "
                    f"{site.dtype}{list(site.shape)}."
                )
        given = {
            name: jnp.asarray(value, program.sites[name].dtype)
            for name, value in init_params.items()
        }
        if given and not is_traced((given, others, program.arguments)):
            self._refuse_start(found, program, given, others)
        return given

    def _refuse_start(
        self, found: Partition, program: Program, given: dict[str, Array], others: dict[str, Any]
    ) -> None:
        @jax.jit
        def is_possible(given):
            trace = found.trace(program, {**given, **others})
            inside = lambda message: jnp.all(message["fn"].support(message["value"]))
            return {
                name: inside(trace[name])
                if program.sites[name].is_discrete
                else jnp.isfinite(term(trace[name]))
                for name in given
            }

        for name in (name for name, flag in is_possible(given).items() if not flag):
            groups = (
                "groups numbered from 0 in order of appearance within each class, and no more "
                "than the partition has room for"
            )
            wanted = groups if name == found.z else f"values of a {program.sites[name].family}"
            raise ValueError(f"init_params: {name!r} is outside of its support; wanted {wanted}.")

    def _drawn_sites(self, found: Partition, program: Program) -> list[str]:
        groups = (
            [name for block in found.blocks for name in block.priors] if self.parameters else []
        )
        return [
            name for name in (found.z, _classes_site(found, program), found.shares, *groups) if name
        ]

    def _values(
        self,
        rng_key: Array,
        mixture: _Mixture,
        prior: Parameters,
        seats: Seats,
        table: Table,
        failed: Array,
    ) -> dict[str, Array]:
        """A draw of every site of the kernel, given where the rows are; void where the chain has
        failed.
        """
        found, (shares_key, *keys) = (
            mixture.found,
            random.split(rng_key, 1 + len(mixture.found.blocks)),
        )
        groups, table = in_order(seats, table)
        values = {found.z: jnp.where(failed > 0, mixture.shape[1], groups)}
        if site := _classes_site(found, mixture.program):
            values[site] = seats.cls
        weights = prior.class_weights + jnp.sum(table.count, axis=1).astype(
            prior.class_weights.dtype
        )
        real = {found.shares: random.dirichlet(shares_key, weights)} if found.shares else {}
        for block, key in zip(found.blocks if self.parameters else (), keys, strict=False):
            real |= zip(block.priors, block.family.draw(key, table.hyper[block.site]), strict=True)
        sites = {
            name: mixture.program.sites[name] for name in self._drawn_sites(found, mixture.program)
        }
        for name, value in real.items():
            # Rounded to 0 or 1, a probability may have an infinite density.
            value = clamp_probs(value) if sites[name].family in ("Beta", "Dirichlet") else value
            values[name] = jnp.where(failed > 0, jnp.nan, value)
        return {
            name: values[name].reshape(site.shape).astype(site.dtype)
            for name, site in sites.items()
        }


def _mixture(found: Partition, program: Program, given: Mapping[str, Any]) -> _Mixture:
    """Pure, for concrete arguments and for traced ones; latent classes are those `given`."""

    @jax.jit
    def read():
        trace = found.trace(program, given)
        classes = labels_of(unwrap(trace[found.z]["fn"]))
        labels = jnp.where(labelled(trace, found.labels, len(classes)), classes, -1)
        return Rows(
            {block.site: columns(trace[block.site]) for block in found.blocks}, labels
        ), classes

    rows, classes = read()
    shares = "dirichlet" if found.shares else "fixed" if found.labels else None
    # nothing is resampled
    rules = Rules(tuple((block.site, block.family) for block in found.blocks), shares, scheme="")
    return _Mixture(
        found, program, rules, rows, classes, (found.num_classes, _capacity(found, program))
    )


def _classes_site(found: Partition, program: Program) -> str | None:
    """The site of the classes, where some are latent; `obs_mask` gives it a name of its own."""
    return next(
        (name for name in (found.labels, f"{found.labels}_unobserved") if name in program.latent),
        None,
    )


def _capacity(found: Partition, program: Program) -> int:
    """Size of the plate of groups."""
    block = found.blocks[0]
    own = program.sites[block.site].plates
    return program.plates[
        [plate for plate in program.sites[block.priors[0]].plates if plate not in own][-1]
    ].size


def _prior(found: Partition, program: Program, scalars: Mapping[str, Any]) -> Parameters:
    """Of this program: its other arguments may be traced, where those that were read are
    stand-ins.
    """
    return jax.jit(lambda: replace(found, few=program).parameters(scalars))()


def _swept(
    mixture: _Mixture, prior: Parameters, seats: Seats, table: Table, rng_key: Array
) -> tuple[Seats, Table, Array]:
    is_joint = _classes_site(mixture.found, mixture.program) is not None
    return sweep(mixture.rules, prior, mixture.rows, seats, table, rng_key, is_joint=is_joint)


def _num_groups(table: Table) -> Array:
    return jnp.sum(table.count > 0, axis=1)
