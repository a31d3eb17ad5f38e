"""What `inference.reading.stick_mixture.read` has read of a mixture: which site plays which part,
the numbers of its priors, its data by row.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.distributions import biject_to

from inference.program.compiling import once
from inference.program.program import Program
from inference.program.sites import StructureError, unwrap
from inference.reading.conjugate.pairs import log_sticks
from inference.reading.conjugate.quadratic import Common
from inference.reading.mixture_trace import columns

__all__ = [
    "Assignment",
    "Block",
    "Experts",
    "Level",
    "Prior",
    "Rows",
    "by_class",
    "event_dim",
    "precision_and_loc",
    "values_by_group",
]

AT_ONCE = 200_000  # rows


class Block(NamedTuple):
    """An observed site and the group parameters behind it."""

    site: str
    priors: tuple[str, ...]  # names of sites, in the order of the family
    family: Any  # `Columns`, or `NormalWishart` of the features


class Experts(NamedTuple):
    """Soft labels, and what is behind them."""

    soft: str
    label: str
    weights: str
    loc: str | None  # zeta; None where it is known
    precision: str | None  # lambda


class Level(NamedTuple):
    """Indices that are drawn by stick-breaking weights."""

    site: str
    sticks: str
    concentration: str | None  # None where it is known


class Prior(NamedTuple):
    """The numbers of the priors."""

    concentration: Any  # (concentration, rate) of alpha; where alpha is known, (alpha, infinity)
    upper: Any  # the same of the level above, or None
    columns: tuple[Any, ...]  # of each block of columns, [group, column, ...]
    features: Any  # WishartHyper [group, ...], or None
    experts: Common | None


class Rows(NamedTuple):
    """The data. A row's entries are u = (features, 1, extras)."""

    # [row, feature], NaN where missing; no columns where the model has no such site
    features: np.ndarray
    holes: np.ndarray  # (row, feature) of each latent missing entry, in the order of their site
    columns: tuple[np.ndarray, ...]  # of each block of columns, [row, column], NaN where missing
    extras: np.ndarray  # [row, extra] what the experts see beside the features and the one
    design: tuple[int, ...]  # which entry of u each weight of an expert is for
    # [row, class]: the side of 0 on which a soft label lies; 0 where the label does not tell
    signs: np.ndarray
    task: np.ndarray  # [row]: whose sticks draw its group; 0 where there is one row of sticks


@dataclass(frozen=True)
class Assignment:
    """Who is who among the sites."""

    few: Program  # the model on a few of its rows
    z: str
    sticks: str
    concentration: str | None
    upper: Level | None  # of the groups of tasks: which group of all each is
    columns: tuple[Block, ...]
    features: Block | None
    holes: str | None  # the missing entries of the features
    experts: Experts | None
    prior: Prior | None = None  # the numbers of the priors

    @property
    def lower(self) -> Level:
        """The assignment of rows to groups."""
        return Level(self.z, self.sticks, self.concentration)

    @property
    def num_own(self) -> int:
        """Groups of a task."""
        return self.few.sites[self.sticks].shape[-1] + 1

    @property
    def num_groups(self) -> int:
        """Groups that say something of rows: those of all tasks together, where tasks share
        them.
        """
        return self.few.sites[self.upper.sticks].shape[0] + 1 if self.upper else self.num_own

    @property
    def known(self) -> set[str]:
        """Every site that plays a part."""
        blocks = (*self.columns, *([self.features] if self.features else []))
        named = {name for block in blocks for name in (block.site, *block.priors)}
        return named | {
            name
            for name in (*self.lower, *(self.upper or ()), self.holes, *(self.experts or ()))
            if name
        }

    def start(self, program: Program, seed: int) -> dict[str, np.ndarray]:
        """Values at random, unconstrained; made here, for code that draws them is slow to
        compile.
        """
        rng, found = np.random.default_rng(seed), {}
        indices = {self.z: self.num_own} | (
            {self.upper.site: self.num_groups} if self.upper else {}
        )
        for name in (name for name in program.latent if name not in indices):
            site = program.sites[name]
            # so that large matrices can be inverted
            radius = min(1.0, 3 / np.sqrt(site.shape[-1])) if site.support.event_dim == 2 else 1.0
            found[name] = rng.uniform(
                -radius, radius, biject_to(site.support).inverse_shape(site.shape)
            ).astype(site.dtype)
        drawn = lambda name, most: rng.integers(0, most, program.sites[name].shape).astype(
            program.sites[name].dtype
        )
        return found | {name: drawn(name, most) for name, most in indices.items()}

    def group_of_rows(self, values: Mapping[str, Array], task: Any) -> Array:
        """What says something of each row."""
        z = values[self.z]
        return values[self.upper.site][task, z] if self.upper else z

    @property
    def of_rows(self) -> set[str]:
        """The latent sites that have values for each row."""
        return {
            name
            for name in (self.z, self.holes, self.experts.soft if self.experts else None)
            if name
        }

    @property
    def by_row(self) -> set[str]:
        """The sites that say something of each row, or of each group of a task."""
        observed = {
            block.site for block in (*self.columns, *([self.features] if self.features else []))
        }
        labels = {self.experts.soft, self.experts.label} if self.experts else set()
        return {self.z, *([self.upper.site] if self.upper else [])} | observed | labels

    @property
    def by_number(self) -> set[str]:
        """The latent sites whose values depend on what groups are called."""
        blocks = (*self.columns, *([self.features] if self.features else []))
        named = {name for block in blocks for name in block.priors} | (
            {self.experts.weights} if self.experts else set()
        )
        return (
            named
            | {self.z, self.sticks}
            | ({self.upper.site, self.upper.sticks} if self.upper else set())
        )

    def share_at(self, values: Mapping[str, Array]) -> Array | None:
        """1 where a group of a task is the shared group, else 0 [task, own group, group]; None
        where there is no level above.
        """
        return (
            jax.nn.one_hot(
                values[self.upper.site], self.num_groups, dtype=values[self.sticks].dtype
            )
            if self.upper
            else None
        )

    def prior_at(self, program: Program, values: Mapping[str, Array]) -> Prior:
        """The numbers of the priors at values of the latent sites, on which they must not
        depend.
        """
        trace = program.trace(values)
        fn = lambda name: unwrap(trace[name]["fn"])

        def concentration(level: Level) -> tuple[Array, ...]:
            name = level.concentration
            known = (jnp.ravel(fn(level.sticks).concentration0)[0], jnp.inf)
            return tuple(
                jnp.asarray(number, float)
                for number in ((fn(name).concentration, fn(name).rate) if name else known)
            )

        read = lambda block: block.family.read(
            tuple(fn(name) for name in block.priors), tuple(values[name] for name in block.priors)
        )
        columns = tuple(
            jax.tree.map(lambda leaf, block=block: self.by_column(leaf, block), read(block))
            for block in self.columns
        )
        features, experts = (
            read(self.features) if self.features else None,
            self._experts_prior(fn, values),
        )
        return Prior(
            concentration(self.lower),
            concentration(self.upper) if self.upper else None,
            columns,
            features,
            experts,
        )

    def by_column(self, leaf: Array, block: Block) -> Array:
        """A parameter [group, ...] without an axis of columns gets one."""
        first = self.few.sites[block.priors[0]]
        return (
            leaf if len(first.shape) - event_dim(self.few, block.priors[0]) > 1 else leaf[:, None]
        )

    def _experts_prior(self, fn: Any, values: Mapping[str, Array]) -> Common | None:
        if self.experts is None:
            return None
        weights, loc, precision = self.experts.weights, self.experts.loc, self.experts.precision
        shape = by_class(values[weights], 3).shape
        common = lambda number: by_class(jnp.broadcast_to(number, values[weights].shape), 3)[:, 0]
        of = lambda number, name: by_class(jnp.broadcast_to(number, values[name].shape), 2)
        value = by_class(values[precision], 2) if precision else common(fn(weights).scale) ** -2
        infinite = jnp.full((shape[0], shape[2]), jnp.inf)
        return Common(
            of(fn(loc).loc, loc) if loc else common(fn(weights).loc),
            of(fn(loc).scale, loc) ** -2 / value if loc else infinite,
            of(fn(precision).concentration, precision) if precision else value,
            of(fn(precision).rate, precision) if precision else infinite,
        )

    def rows(self, program: Program) -> Rows:
        """The data by row, refused where a family cannot have them."""
        rows = _rows_of(self, program)
        for block, x in zip(self.columns, rows.columns, strict=True):
            block.family.refuse(block.site, x)
        if self.features and np.isinf(rows.features).any():
            row, column = np.argwhere(np.isinf(rows.features))[0]
            raise ValueError(
                f"site {self.features.site!r}: row {row}, column {column} is infinite; wanted "
                "numbers, NaN where missing."
            )
        return rows


def event_dim(program: Program, name: str) -> int:
    """Dimensions of one event of a site, those that `to_event` declared not counted."""
    return {"Dirichlet": 1, "MultivariateNormal": 1, "Wishart": 2, "InverseWishart": 2}.get(
        program.sites[name].family, 0
    )


def values_by_group(found: Assignment, block: Block, values: Any) -> tuple[Array, ...]:
    """The parameters of a block of columns [group, column, ...]."""
    return tuple(found.by_column(values[name], block) for name in block.priors)


def precision_and_loc(block: Block, values: Any) -> tuple[Array, Array]:
    """The parameters of the features, their precision whichever of it and its inverse the model
    has.
    """
    return block.family.precision_and_loc(tuple(values[name] for name in block.priors))


# The data by row.


def by_class(value: Array, ndim: int) -> Array:
    """Experts without an axis of classes get one."""
    return value if value.ndim == ndim else value[None]


def _rows_of(found: Assignment, program: Program) -> Rows:
    """Looks at the whole data; where they are many, at some of them at a time, for a look costs
    several copies.
    """
    num_rows = program.sites[found.z].shape[0]
    if num_rows <= AT_ONCE:
        return _rows_at_once(found, program)
    numbers = np.array_split(np.arange(num_rows), -(-num_rows // AT_ONCE))
    parts = [
        _rows_at_once(found, program.on_rows(some, program.by_row(num_rows), found.z))
        for some in numbers
    ]
    # in some rows a column of data looks like another, or like the one
    if any(part.design != parts[0].design for part in parts):
        return _rows_at_once(found, program)
    features, _, columns, extras, design, signs, task = zip(*parts, strict=True)
    joined = [np.concatenate(part) for part in (features, extras, signs, task)]
    seen = {"features": joined[0], "coded": _coded(found, program)}
    whole = tuple(np.concatenate(part) for part in zip(*columns, strict=True))
    return Rows(
        joined[0],
        _places(_with_holes(found, program), seen),
        whole,
        joined[1],
        design[0],
        joined[2],
        joined[3],
    )


def _with_holes(found: Assignment, program: Program) -> Assignment:
    """Other rows than those that were read may miss nothing, or something."""
    return replace(
        found,
        holes=next(
            (name for name in program.latent if program.sites[name].family == "ImproperUniform"),
            None,
        ),
    )


def _coded(found: Assignment, program: Program) -> np.ndarray | None:
    """The features, their missing entries numbered."""
    found = _with_holes(found, program)
    holes = found.holes
    if not holes or not found.features:
        return None
    site, start = found.features.site, found.start(program, 0)
    number = lambda values: jnp.arange(len(values[holes]), dtype=values[holes].dtype)
    at = lambda values: program.trace({**values, holes: number(values)})[site]["value"]
    return jax.device_get(once(lambda start: at(program.constrain(start)), start)(start))


def _rows_at_once(found: Assignment, program: Program) -> Rows:
    found = _with_holes(found, program)
    starts = [found.start(program, seed) for seed in range(2)]
    seen = jax.device_get(
        once(lambda one, other: _look(found, program, program.constrain(one), other), *starts)(
            *starts
        )
    )
    num_rows = program.sites[found.z].shape[0]
    places = _places(found, seen)
    features = seen["features"] if found.features else np.zeros((num_rows, 0))
    task = _tasks(found, seen) if "sticks" in seen else np.zeros(num_rows, np.int32)
    if found.experts is None:
        return Rows(
            features,
            places,
            tuple(seen["columns"]),
            np.zeros((num_rows, 0)),
            (),
            np.zeros((num_rows, 0)),
            task,
        )
    extras, design = _design(found.experts, seen, features.shape[1])
    return Rows(
        features, places, tuple(seen["columns"]), extras, design, _signs(found.experts, seen), task
    )


def _look(
    found: Assignment, program: Program, values: dict[str, Array], other: dict[str, Array]
) -> dict[str, Any]:
    """What the model shows at several values of its latent sites."""
    seen: dict[str, Any] = {}
    at = lambda changes: program.trace({**values, **changes})
    if found.holes:
        fills = [values[found.holes], other[found.holes]]
        empty = at({found.holes: jnp.full_like(values[found.holes], jnp.nan)})
        coded = at(
            {found.holes: jnp.arange(len(values[found.holes]), dtype=values[found.holes].dtype)}
        )
        seen["coded"] = coded[found.features.site]["value"] if found.features else None
    else:
        fills, empty = [None, None], at({})
    if values[found.sticks].ndim == 2:
        weights = jnp.broadcast_to(
            unwrap(empty[found.z]["fn"]).probs, (*program.sites[found.z].shape, found.num_own)
        )
        seen |= {"sticks": values[found.sticks], "weights": weights}
    seen["columns"] = [columns(empty[block.site]) for block in found.columns]
    if found.features:
        seen["features"] = empty[found.features.site]["value"]
    if found.experts:
        seen["filled"], seen["design"] = zip(
            *(_seen_by_experts(found, at, values, fill) for fill in fills), strict=True
        )
        seen |= _tried_labels(found.experts, at, values)
    return seen


def _places(found: Assignment, seen: Mapping[str, Any]) -> np.ndarray:
    """Where each missing entry is."""
    if not found.holes:
        return np.zeros((0, 2), int)
    places = np.argwhere(np.isnan(seen["features"]))
    order = seen["coded"][tuple(places.T)]
    if not np.array_equal(np.sort(order), np.arange(len(order))):
        raise StructureError(
            f"site {found.holes!r}: its entries are not, each of them, one entry of "
            f"{found.features.site if found.features else None!r}; "
            f"wanted x.at[places].set({found.holes})."
        )
    return places[np.argsort(order)]


def _tasks(found: Assignment, seen: Mapping[str, Any]) -> np.ndarray:
    """By the sticks whose weights draw the group of a row."""
    weights = np.exp(log_sticks(np.log(seen["sticks"]), np.log1p(-seen["sticks"])))
    first = np.argsort(weights[:, 0])
    place = np.searchsorted(
        (weights[first[1:], 0] + weights[first[:-1], 0]) / 2, seen["weights"][:, 0]
    )
    task = first[place].astype(np.int32)
    if not np.allclose(weights[task], seen["weights"], atol=1e-5):
        row = np.argmax(abs(weights[task] - seen["weights"]).max(1))
        raise StructureError(
            f"site {found.z!r}: the probabilities of row {row} are the stick-breaking weights of "
            f"no row of {found.sticks!r}; wanted "
            f"V_h prod_(l<h) (1 - V_l), the last stick 1. Use SVI with an autoguide for this model."
        )
    return task


# Experts.


def _seen_by_experts(
    found: Assignment, at: Any, values: Mapping[str, Array], fill: Array | None
) -> tuple[Array, Array]:
    """The features with their missing entries filled in, and what the soft labels make of each
    weight alone, [weight, class, row].
    """
    experts = found.experts
    assert experts is not None
    changes = {} if fill is None else {found.holes: fill}
    weights = values[experts.weights]
    unit = jnp.eye(weights.shape[-1], dtype=weights.dtype)

    def loc(one: Array) -> Array:
        trace = at({**changes, experts.weights: jnp.broadcast_to(one, weights.shape)})
        fn = unwrap(trace[experts.soft]["fn"])
        return by_class(jnp.broadcast_to(fn.loc, values[experts.soft].shape), 2)

    filled = (
        at(changes)[found.features.site]["value"]
        if found.features
        else jnp.zeros((values[found.z].shape[0], 0))
    )
    return filled, jax.lax.map(loc, unit)


def _design(
    experts: Experts, seen: Mapping[str, Any], num_features: int
) -> tuple[np.ndarray, tuple[int, ...]]:
    """Data columns beside the features and the one, and the place of each weight among them all."""
    extras, design = [], []
    for j in range(seen["design"][0].shape[0]):
        first, second = (each[j] for each in seen["design"])
        if not all((each == each[:1]).all() for each in (first, second)):
            raise StructureError(
                f"site {experts.soft!r}: weight {j} sees another column for each class; wanted one "
                "design for all classes."
            )
        same = [
            _equal(filled, each[0][:, None]).all(0)
            for filled, each in zip(seen["filled"], (first, second), strict=True)
        ]
        is_feature = np.flatnonzero(same[0] & same[1])
        if _equal(first, np.ones_like(first)).all() and _equal(second, np.ones_like(second)).all():
            design.append(num_features)
        elif len(is_feature):
            design.append(int(is_feature[0]))
        elif _equal(first, second).all():
            design.append(num_features + 1 + len(extras))
            extras.append(first[0])
        else:
            raise StructureError(
                f"site {experts.soft!r}: what it sees of weight {j} moves with missing entries and "
                "is no column of the features; wanted "
                f"the features as they are, or data. Use SVI with an autoguide for this model."
            )
    return np.stack(extras, 1) if extras else np.zeros((seen["design"][0].shape[-1], 0)), tuple(
        design
    )


def _equal(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """But for rounding, whatever the units."""
    # whole numbers are features too
    return np.isclose(one, other, rtol=100 * np.finfo(np.result_type(one, np.float32)).eps, atol=0)


def _tried_labels(experts: Experts, at: Any, values: Mapping[str, Array]) -> dict[str, Array]:
    """Which labels are possible when one class alone says yes, or none does; and from a possible
    case on, when one answer changes.
    """
    shape = values[experts.soft].shape
    answers = (len(shape) > 1 and shape[0]) or 1

    def is_possible(t: Array) -> Array:
        message = at({experts.soft: t.reshape(shape)})[experts.label]
        return jnp.broadcast_to(message["fn"].log_prob(message["value"]) == 0, shape[-1:])

    cases = 2 * jnp.eye(answers + 1, answers, -1, dtype=values[experts.soft].dtype) - 1
    tried = jax.lax.map(
        lambda case: is_possible(jnp.broadcast_to(case[:, None], (answers, shape[-1]))), cases
    )
    start = cases[jnp.argmax(tried, 0)].T
    flip = 1 - 2 * jnp.eye(answers, dtype=start.dtype)
    changed = jax.lax.map(lambda signs: is_possible(start * signs[:, None]), flip)
    return {"tried": tried, "start": start, "changed": changed}


def _signs(experts: Experts, seen: Mapping[str, Any]) -> np.ndarray:
    if not seen["tried"].any(0).all():
        raise StructureError(
            f"site {experts.label!r}: no signs of {experts.soft!r} make its value possible; wanted "
            "a label that the signs decide, say 1 "
            f"where {experts.soft!r} is positive. Use SVI with an autoguide for this model."
        )
    return np.where(seen["changed"], 0, seen["start"]).T
