"""Gibbs sampling of the partition of a mixture whose groups and class shares are integrated out.

A draw is one sweep. Every row, in a new random order, is taken out of its group, and put into one
of the others or a new one by its complete conditional

    p(z_n, y_n | other rows)
        ~  p(y_n | other classes)  p(z_n | groups of class y_n)  p(x_n | rows of group z_n).    (1)

The factors are `log_class`, `log_seating` of the model's partition and `score` of the conjugate
pairs, as in the particle filter.

A known class stays. Class shares, and on request the parameters of groups, are then drawn exactly
given the partition. The random order makes the chain reversible. It is slower than
`ParticleFilter`, but its posterior does not depend on the order of the data, and becomes exact with
the number of draws. The structure of the model is read off its trace and proved on a few rows
(`inference.reading.crp_mixture`): the kernel follows an edit of the model, or refuses it.

A group is updated as rows come and go, and computed anew from its rows at each sweep, so that
rounding errors do not add up.

Cost of a sweep: O(rows x classes x groups in use x columns), with one class where all labels are
known; 2 to 4 us a row for 100 binary columns and a few groups. Groups are scored in blocks of
`BLOCK`. From `NARROW` groups in a class on, a row costs O(classes x room) more. Memory: O(classes x
room x columns). The room for groups is the `capacity` of the partition: by default one group for
each row, which always suffices. With less the chain fails where a class is full:
`get_diagnostics_str` raises, which `Driver` calls between its chunks and `MCMC` for its progress
bar. Later draws are invalid: z is the capacity, outside of its support, and numbers are NaN.
Numbers have JAX's default float type; scale float32 columns to a standard deviation near one.

A latent scalar, such as a random concentration, belongs to another kernel of NumPyro's `Gibbs`,
which passes its value with each call. The structure is read once, from the model itself.

Neal (2000), "Markov chain sampling methods for Dirichlet process mixture models", algorithm 3.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, override

import jax
import jax.numpy as jnp
from jax import Array, lax, random
from jaxtyping import Bool, Float, Int
from numpyro.distributions.util import clamp_probs
from numpyro.util import is_prng_key

from inference.distributions.partitions import ExchangeablePartition
from inference.kernels.particle_filter.particles import Rules, block_scores, log_class
from inference.program.compiling import is_traced, once
from inference.program.program import Program
from inference.program.sites import StructureError, unwrap
from inference.reading.conjugate.pairs import term
from inference.reading.crp_mixture import (
    Parameters,
    Partition,
    PartitionRows,
    labels_of,
    read_partition,
)
from inference.run.command import Command
from inference.run.protocol import GibbsBlock, Reading

__all__ = [
    "FULL",
    "LOST",
    "CollapsedGibbs",
    "GibbsState",
    "GroupTable",
    "PartitionReading",
    "Seats",
    "empty",
    "in_order",
    "seated",
    "sweep",
]

BLOCK = 16  # groups that are scored at once
NARROW = 64  # groups of a class that are weighed while no class has more
LOST = 1  # a sweep failed: no weight of a row is a positive number
FULL = 2  # a sweep failed: class c has no room for another group; the value is FULL + c


class GroupTable(NamedTuple):
    """All groups; a group without rows holds the prior."""

    count: Array  # [class, group]: rows in it
    hyper: dict[str, Any]  # posteriors of each site, [class, group, column, ...]
    cache: dict[str, Any]  # what scores are computed from


class Seats(NamedTuple):
    """The class and the group of each row."""

    cls: Int[Array, " row"]
    group: Int[Array, " row"]  # -1 for a row that has no group yet


def empty(rules: Rules, prior: Parameters, num_groups: int) -> GroupTable:
    """Returns a table without rows.

    Args:
        rules: The settings of the run.
        prior: The numbers of the priors.
        num_groups: Groups of each class that there is room for.
    """
    wide = lambda leaf: jnp.broadcast_to(
        leaf[:, None], (leaf.shape[0], num_groups, *leaf.shape[1:])
    )
    cache = rules.each(lambda family, hyper: family.cache(hyper), prior.priors)
    count = jnp.zeros((len(prior.class_weights), num_groups), jnp.int32)
    return GroupTable(count, *jax.tree.map(wide, (prior.priors, cache)))


def seated(
    rules: Rules, prior: Parameters, rows: PartitionRows, seats: Seats, num_groups: int
) -> GroupTable:
    """Returns the groups of a partition.

    Args:
        rules: The settings of the run.
        prior: The numbers of the priors.
        rows: The data.
        seats: The class and the group of each row.
        num_groups: Groups of each class that there is room for.
    """

    def add(table, row):
        cls, group, x = row
        return _put(rules, table, cls, group, x), None

    table, _ = lax.scan(add, empty(rules, prior, num_groups), (*seats, rows.values))
    return table


@partial(jax.jit, static_argnames=("rules", "is_joint"))
def sweep(
    rules: Rules,
    prior: Parameters,
    rows: PartitionRows,
    seats: Seats,
    table: GroupTable,
    rng_key: Array,
    *,
    is_joint: bool,
) -> tuple[Seats, GroupTable, Array]:
    """Draws the group of every row once, in random order, by (1).

    Args:
        rules: The settings of the run.
        prior: The numbers of the priors.
        rows: The data.
        seats: The class and the group of each row; a row without a group is given one.
        table: The groups.
        rng_key: For the order and the draws.
        is_joint: Whether a row of unknown class may change its class.

    Returns:
        The new classes and groups, the new table, and 0, `LOST`, or `FULL` + a full class.
    """
    order_key, draw_key = random.split(rng_key)
    order = random.permutation(order_key, len(rows.labels))
    uniform = random.uniform(draw_key, order.shape, prior.class_weights.dtype)

    def redraw(carry, row):
        seats, table, failed = carry
        i, uniform = row
        x = {site: value[i] for site, value in rows.values.items()}
        table = _without(rules, prior, table, seats.cls[i], seats.group[i], x)
        first = jnp.zeros_like(rows.labels[i]) if is_joint else rows.labels[i]
        cls, group, why = _redrawn(rules, prior, table, rows.labels[i], first, x, uniform, is_joint)
        seats = Seats(seats.cls.at[i].set(cls), seats.group.at[i].set(group))
        return (seats, _put(rules, table, cls, group, x), jnp.maximum(failed, why)), None

    (seats, table, failed), _ = lax.scan(
        redraw, (seats, table, jnp.zeros((), jnp.int32)), (order, uniform)
    )
    return seats, table, failed


def in_order(seats: Seats, table: GroupTable) -> tuple[Array, GroupTable]:
    """Returns groups in order of appearance within each class, [row], and the table in that order.

    Args:
        seats: The class and the group of each row.
        table: The groups.
    """
    never = len(seats.cls)
    first = jnp.full(table.count.shape, never).at[seats].min(jnp.arange(never))
    order = jnp.argsort(first, axis=1)
    classes = jnp.arange(len(order))[:, None]
    return jnp.argsort(order, axis=1)[seats], jax.tree.map(lambda leaf: leaf[classes, order], table)


def _redrawn(
    rules: Rules,
    prior: Parameters,
    table: GroupTable,
    label: Int[Array, ""],
    first: Int[Array, ""],
    x: dict[str, Array],
    uniform: Float[Array, ""],
    is_joint: bool,
):
    """A class and a group drawn by (1), and 0, `LOST`, or `FULL` + a full class."""

    def among(width: int):
        log_weight, full = _log_weights(rules, prior, table, label, first, x, width, is_joint)
        place, is_lost = _drawn(log_weight.ravel(), uniform)
        why = jnp.where(is_lost, LOST, jnp.where(jnp.any(full), FULL + first + jnp.argmax(full), 0))
        return first + place // width, place % width, why.astype(jnp.int32)

    room = table.count.shape[1]
    if room <= NARROW:
        return among(room)
    return lax.cond(
        jnp.any(table.count[:, NARROW - 1 :] > 0), lambda: among(room), lambda: among(NARROW)
    )


def _log_weights(
    rules: Rules,
    prior: Parameters,
    table: GroupTable,
    label: Int[Array, ""],
    first: Int[Array, ""],
    x: dict[str, Array],
    width: int,
    is_joint: bool,
) -> tuple[Float[Array, "class group"], Bool[Array, " class"]]:
    """The logarithm of (1) up to a constant, [class, group], and which classes are full, [class].

    The classes are those from `first` on. A class is full if it has no room for a new group.
    """
    num_classes, room = table.count.shape
    count = lax.dynamic_slice_in_dim(table.count[:, :width], first, num_classes if is_joint else 1)
    size = count.astype(prior.class_weights.dtype)
    num_used = 2 + jnp.max(jnp.where(count > 0, jnp.arange(width), -1))  # with the next group
    scores = block_scores(rules, table.cache, (first, len(count)), num_used, x, BLOCK)[:, :width]
    log_weight = prior.seating.log_seating(size) + scores
    is_possible = (label < 0) | (first + jnp.arange(len(count)) == label)
    if is_joint:
        about_class = log_class(rules, prior.class_weights, jnp.sum(size, axis=1))
        log_weight = log_weight + jnp.where(is_possible, about_class, -jnp.inf)[:, None]
    has_room = prior.seating.max_groups is not None and prior.seating.max_groups <= room
    return log_weight, is_possible & jnp.all(count > 0, axis=1) & (not has_room)


def _drawn(
    log_weight: Float[Array, " index"], uniform: Float[Array, ""]
) -> tuple[Int[Array, ""], Bool[Array, ""]]:
    """An index drawn in proportion to its weight, and whether no weight is positive.

    An index of weight 0 is never drawn, although rounded sums need not increase.
    """
    weight = jnp.exp(log_weight - jnp.max(log_weight))
    total = jnp.where(weight > 0, jnp.cumsum(weight), 0)
    return jnp.argmax(total > uniform * jnp.max(total)).astype(jnp.int32), ~(jnp.max(total) > 0)


def _put(
    rules: Rules, table: GroupTable, cls: Int[Array, ""], group: Int[Array, ""], x: dict[str, Array]
) -> GroupTable:
    before = jax.tree.map(lambda leaf: leaf[cls, group], table.hyper)
    after = rules.each(lambda family, hyper, entry: family.add(hyper, entry), before, x)
    return _written(rules, table, cls, group, after, 1)


def _without(
    rules: Rules,
    prior: Parameters,
    table: GroupTable,
    cls: Int[Array, ""],
    group: Int[Array, ""],
    x: dict[str, Array],
) -> GroupTable:
    """The table without a row, if the row has a group; an emptied group is the prior again."""
    is_seated, group = group >= 0, jnp.maximum(group, 0)
    before = jax.tree.map(lambda leaf: leaf[cls, group], table.hyper)
    after = rules.each(lambda family, hyper, entry: family.remove(hyper, entry), before, x)
    is_left = table.count[cls, group] > 1
    pick = lambda old, new, first: jnp.where(is_seated, jnp.where(is_left, new, first[cls]), old)
    after = jax.tree.map(pick, before, after, prior.priors)
    return _written(rules, table, cls, group, after, jnp.where(is_seated, -1, 0))


def _written(
    rules: Rules,
    table: GroupTable,
    cls: Int[Array, ""],
    group: Int[Array, ""],
    hyper: dict[str, Any],
    change: Any,
) -> GroupTable:
    """The table with one group replaced.

    Without the barrier XLA computes the new values while it writes them, for which it copies the
    whole table.
    """
    cache = rules.each(lambda family, one: family.cache(one), hyper)
    new = lax.optimization_barrier((hyper, cache))
    # Indices of one type, which `dynamic_update_slice` wants: constants are int64 with x64.
    index = lambda value: [jnp.asarray(i, jnp.int32) for i in (cls, group, *(0,) * value.ndim)]
    write = lambda leaf, value: lax.dynamic_update_slice(leaf, value[None, None], index(value))
    count = table.count.at[cls, group].add(change)
    return GroupTable(count, *jax.tree.map(write, (table.hyper, table.cache), new))


# The kernel.


@dataclass(frozen=True, eq=False)
class PartitionReading(Reading):
    """The structure of a model."""

    partition: Partition

    @property
    def attributes(self) -> dict[str, str]:
        """For the tree: the site of the partition, and the site of its classes."""
        return self.partition.attributes


class GibbsState(NamedTuple):
    """A draw, and what the next one needs."""

    values: dict[str, Array]  # of every site that is drawn
    prior: Parameters
    num_groups: Array  # [class]
    failed: Array  # 0, or why this draw and later ones are invalid
    rng_key: Array


class _Mixture(NamedTuple):
    found: Partition
    program: Program
    rules: Rules
    rows: PartitionRows
    classes: Array  # [row], as the partition has them
    shape: tuple[int, int]  # classes, and room for groups in each


class CollapsedGibbs(GibbsBlock):
    """Gibbs sweeps over the rows of `model`, in `Driver` and in NumPyro's `MCMC` and `Gibbs`.

    In `Gibbs` it owns the partition, the classes and their shares, and the parameters of groups;
    another kernel owns latent scalars: `Gibbs([(CollapsedGibbs(model, parameters=True), ["z",
    "share", "p"]), (NUTS(model), ["alpha"])])`.

    Args:
        model: A model with one partition of its rows, by `CRP`, `PitmanYor` or another
            `ExchangeablePartition`, and conjugate components, such as `zoo.load("aclass").model`.
        parameters: Whether the parameters of groups are drawn as well, so that a draw has all
            latent sites. Costs O(classes x room x columns) a draw.
    """

    sample_field = "values"
    default_fields = ("values", "num_groups")
    command = Command(is_marginal=True)
    reading: PartitionReading

    @staticmethod
    def _init_strategy(message: dict[str, Any]) -> Array | None:
        """Where `Driver` first looks for a finite density: one group in each class."""
        is_partition = message["type"] == "sample" and isinstance(
            unwrap(message["fn"]), ExchangeablePartition
        )
        return jnp.zeros(message["fn"].shape(), jnp.int32) if is_partition else None

    def __init__(self, model: Callable, *, parameters: bool = False):
        self.model, self.parameters = model, parameters

    def init(self, rng_key, num_warmup, init_params, model_args, model_kwargs) -> GibbsState:
        """Reads the model, and returns the start of a chain.

        Without `init_params` the group of each row is drawn given the rows before it. `init_params`
        has values of the partition and of latent classes, and may have values of other sites that
        the kernel draws.
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
            table = seated(mixture.rules, prior, mixture.rows, seats, mixture.shape[1])
            failed = jnp.zeros((), jnp.int32)
        else:
            labels = mixture.rows.labels
            seats = Seats(jnp.maximum(labels, 0), jnp.full_like(labels, -1))
            table = empty(mixture.rules, prior, mixture.shape[1])
            seats, table, failed = _swept(mixture, prior, seats, table, seat_key)
        values = self._values(draw_key, mixture, prior, seats, table, failed) | given
        state = GibbsState(values, prior, jnp.sum(table.count > 0, axis=1), failed, rng_key)
        if not is_traced(state):
            self.get_diagnostics_str(state)
        return state

    @override
    def sample(self, state: GibbsState, model_args, model_kwargs) -> GibbsState:
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
        return GibbsState(values, state.prior, jnp.sum(table.count > 0, axis=1), failed, rng_key)

    @override
    def refresh(self, state: GibbsState, model_args, model_kwargs) -> GibbsState:
        return state._replace(
            prior=_prior(self.reading.partition, *self._program(model_args, model_kwargs))
        )

    @override
    def postprocess_fn(self, model_args, model_kwargs) -> Callable:
        program, _ = self._program(model_args, model_kwargs)
        if not program.deterministic or set(program.latent) - set(
            self._drawn_sites(self.reading.partition, program)
        ):
            return lambda values: values
        return lambda values: values | program.deterministics(values)

    @override
    def get_diagnostics_str(self, state: GibbsState) -> str:
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
                f"site {z!r}: the groups of a row have no finite weight, because of rounding "
                "errors in the hyper-parameters of a group. Standardise the columns of real "
                "numbers, or use float64: jax.enable_x64(True)."
            )
        return f"{int(jnp.sum(state.num_groups))} groups"

    def _read(self, program: Program) -> PartitionReading:
        """The structure of the model, with other numbers in place of traced arguments."""
        found = read_partition(program.with_stand_ins())
        if not is_traced(program.arguments):
            found.rows(program)  # refuses data outside of the supports
        return PartitionReading(found)

    def _refuse_blocks(self, found: Partition, program: Program, others: Mapping[str, Any]) -> None:
        """Refuses latent scalars without another block, and other sites that have one."""
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
        if not given or is_traced((given, others, program.arguments)):
            return given

        def is_possible(given):
            trace = found.trace(program, {**given, **others})
            inside = lambda message: jnp.all(message["fn"].support(message["value"]))
            return {
                name: inside(trace[name])
                if program.sites[name].is_discrete
                else jnp.isfinite(term(trace[name]))
                for name in given
            }

        for name in (name for name, flag in once(is_possible, given)(given).items() if not flag):
            groups = (
                "groups numbered from 0 in order of appearance within each class, and no more "
                "than the partition has room for"
            )
            wanted = groups if name == found.z else f"values of a {program.sites[name].family}"
            raise ValueError(f"init_params: {name!r} is outside of its support; wanted {wanted}.")
        return given

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
        table: GroupTable,
        failed: Array,
    ) -> dict[str, Array]:
        """A draw of every site of the kernel given the partition; invalid after a failure."""
        found = mixture.found
        shares_key, *keys = random.split(rng_key, 1 + len(found.blocks))
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
            # The density at a probability that is rounded to 0 or 1 may be infinite.
            value = clamp_probs(value) if sites[name].family in ("Beta", "Dirichlet") else value
            values[name] = jnp.where(failed > 0, jnp.nan, value)
        return {
            name: values[name].reshape(site.shape).astype(site.dtype)
            for name, site in sites.items()
        }


def _mixture(found: Partition, program: Program, given: Mapping[str, Any]) -> _Mixture:
    def read():
        trace = found.trace(program, given)
        return found.rows_of(trace), labels_of(unwrap(trace[found.z]["fn"]))

    rows, classes = once(read)()
    shares = "dirichlet" if found.shares else "fixed" if found.labels else None
    # nothing is resampled
    rules = Rules(tuple((block.site, block.family) for block in found.blocks), shares, scheme="")
    return _Mixture(
        found, program, rules, rows, classes, (found.num_classes, _capacity(found, program))
    )


def _classes_site(found: Partition, program: Program) -> str | None:
    """The site of latent classes, which `obs_mask` gives a name of its own."""
    return next(
        (name for name in (found.labels, f"{found.labels}_unobserved") if name in program.latent),
        None,
    )


def _capacity(found: Partition, program: Program) -> int:
    block = found.blocks[0]
    own = program.sites[block.site].plates
    return program.plates[
        [plate for plate in program.sites[block.priors[0]].plates if plate not in own][-1]
    ].size


def _prior(found: Partition, program: Program, scalars: Mapping[str, Any]) -> Parameters:
    return once(lambda: replace(found, few=program).parameters(scalars))()


def _swept(
    mixture: _Mixture, prior: Parameters, seats: Seats, table: GroupTable, rng_key: Array
) -> tuple[Seats, GroupTable, Array]:
    is_joint = _classes_site(mixture.found, mixture.program) is not None
    return sweep(mixture.rules, prior, mixture.rows, seats, table, rng_key, is_joint=is_joint)
