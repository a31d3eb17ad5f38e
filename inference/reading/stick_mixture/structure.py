"""A truncated stick-breaking mixture: the part of each site, hyper-parameters, data by row."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int
from numpyro.distributions import biject_to

from inference.program.compiling import traced_once
from inference.program.interpreting import interpreted
from inference.program.program import Program
from inference.program.sites import require, unwrap
from inference.reading.conjugate.pairs import columns, log_sticks
from inference.reading.conjugate.quadratic import Common

__all__ = [
    "WAY_OUT",
    "Assignment",
    "ConjugateBlock",
    "Experts",
    "MixtureRows",
    "Prior",
    "StickLevel",
    "event_dim",
    "random_start",
    "refuse_infinite",
    "refuse_other_children",
    "values_by_group",
    "with_class_axis",
]

AT_ONCE = 200_000  # rows
WAY_OUT = "Use SVI with an autoguide for this model, or put there what is wanted."


def refuse_other_children(few: Program, allowed: Mapping[str, set]) -> None:
    """Raises StructureError where a site is not among the allowed children of a parameter."""
    for name, parents in few.parents.items():
        for parent in sorted(parents & set(allowed)):
            require(
                name in allowed[parent] or few.sites[name].kind == "deterministic",
                f"site {name!r} ({few.sites[name].family}): it depends on {parent!r}, which was "
                f"read as part of {sorted(filter(None, allowed[parent]))}. {WAY_OUT}",
            )


def random_start(program: Program, seed: int, indices: Mapping[Any, int]) -> dict[str, np.ndarray]:
    """Random unconstrained values of the latent sites of a program.

    They are drawn by NumPy, because JAX would compile code for them.

    Args:
        program: The model with its data.
        seed: The seed.
        indices: Sites that hold indices, each with the number of its values.
    """
    rng, found = np.random.default_rng(seed), {}
    for name in sorted(program.latent, key=lambda name: name in indices):
        site = program.sites[name]
        if name in indices:
            value = rng.integers(0, indices[name], site.shape)
        else:
            # Small entries keep large matrices invertible.
            radius = min(1.0, 3 / np.sqrt(site.shape[-1])) if site.support.event_dim == 2 else 1.0
            value = rng.uniform(-radius, radius, biject_to(site.support).inverse_shape(site.shape))
        found[name] = value.astype(site.dtype)
    return found


def refuse_infinite(site: str, features: np.ndarray) -> None:
    """Raises ValueError where an entry of the features of a site is infinite."""
    for row, column in np.argwhere(np.isinf(features)):
        raise ValueError(
            f"site {site!r}: row {row}, column {column} is infinite; wanted numbers, NaN where "
            "missing."
        )


class ConjugateBlock(NamedTuple):
    """An observed site, and the sites of its group parameters, which have a conjugate prior."""

    site: str
    priors: tuple[str, ...]  # names of sites, in the order of the family
    family: Any  # `Columns`, or `NormalWishart` of the features


class Experts(NamedTuple):
    """The sites of the probit experts."""

    soft: str  # soft labels t ~ Normal(w . d, 1)
    label: str  # observed; the signs of the soft labels decide it
    weights: str
    loc: str | None  # zeta; None where it is known
    precision: str | None  # lambda; None where it is known


class StickLevel(NamedTuple):
    """A site of indices, and the stick-breaking weights from which they are drawn."""

    site: str
    sticks: str
    concentration: str | None  # None where it is known


class Prior(NamedTuple):
    """The hyper-parameters of a mixture."""

    concentration: Any  # (concentration, rate) of alpha; where alpha is known, (alpha, infinity)
    upper: Any  # the same of the level above, or None
    columns: tuple[Any, ...]  # of each block of columns, [group, column, ...]
    features: Any  # WishartHyper [group, ...], or None
    experts: Common | None


class MixtureRows(NamedTuple):
    """The data by row. A row's entries are u = (features, 1, extras)."""

    features: np.ndarray  # [row, feature], NaN where missing; [row, 0] without such a site
    holes: np.ndarray  # (row, feature) of each latent missing entry, in the order of their site
    columns: tuple[np.ndarray, ...]  # of each block of columns, [row, column], NaN where missing
    extras: np.ndarray  # [row, extra] other inputs of the experts than features and the constant
    design: tuple[int, ...]  # which entry of u each weight of an expert multiplies
    signs: np.ndarray  # of the soft labels [row, class]; 0 where the label leaves the sign open
    task: np.ndarray  # [row]: whose sticks its group is drawn from; 0 without tasks


@dataclass(frozen=True)
class Assignment:
    """The part of each site in the mixture."""

    few: Program  # the model on a few of its rows
    z: str  # the group of each row
    sticks: str
    concentration: str | None
    upper: StickLevel | None  # draws which shared group each group of a task is
    columns: tuple[ConjugateBlock, ...]
    features: ConjugateBlock | None
    holes: str | None  # the missing entries of the features
    experts: Experts | None
    prior: Any = None  # `Prior`, once it is read and proved

    @property
    def lower(self) -> StickLevel:
        """The assignment of rows to groups."""
        return StickLevel(self.z, self.sticks, self.concentration)

    @property
    def levels(self) -> tuple[StickLevel, ...]:
        """The lower level, and the upper one where there is one."""
        return (self.lower, self.upper) if self.upper else (self.lower,)

    @property
    def blocks(self) -> tuple[ConjugateBlock, ...]:
        """All conjugate blocks, the features last."""
        return (*self.columns, self.features) if self.features else self.columns

    @property
    def num_own(self) -> int:
        """The number of groups of a task."""
        return self.few.sites[self.sticks].shape[-1] + 1

    @property
    def num_groups(self) -> int:
        """The number of groups that have parameters: the shared groups, where tasks share them."""
        return self.few.sites[self.upper.sticks].shape[0] + 1 if self.upper else self.num_own

    @property
    def known(self) -> set[str]:
        """Every site that was read."""
        of_blocks = ((block.site, *block.priors) for block in self.blocks)
        parts = (*self.levels, *of_blocks, (self.holes,), self.experts or ())
        return {name for part in parts for name in part if name}

    @property
    def of_rows(self) -> set[str]:
        """The latent sites that have values for each row."""
        return {name for name in (self.z, self.holes, *(self.experts or ())[:1]) if name}

    @property
    def by_number(self) -> set[str]:
        """The latent sites whose values change when groups are relabelled."""
        named = {name for block in self.blocks for name in block.priors}
        named |= {name for level in self.levels for name in (level.site, level.sticks)}
        return named | ({self.experts.weights} if self.experts else set())

    def start(self, program: Program, seed: int) -> dict[str, np.ndarray]:
        """Random unconstrained values of the latent sites of a program."""
        pairs = zip(self.levels, (self.num_own, self.num_groups), strict=False)
        return random_start(program, seed, {level.site: num for level, num in pairs})

    def group_of_rows(self, values: Mapping[str, Array], task: Any) -> Array:
        """The group whose parameters a row has, by row.

        Args:
            values: The values of the sites.
            task: The task of each row.
        """
        z = values[self.z]
        return values[self.upper.site][task, z] if self.upper else z

    def share_at(self, values: Mapping[str, Array]) -> Array | None:
        """The shared group of each group of a task, one-hot, [task, own group, group].

        None where tasks share no groups.
        """
        one_hot = partial(jax.nn.one_hot, dtype=values[self.sticks].dtype)
        return one_hot(values[self.upper.site], self.num_groups) if self.upper else None

    def prior_at(self, program: Program, values: Mapping[str, Array]) -> Prior:
        """The hyper-parameters, as the model has them at these values of the latent sites."""
        trace = program.trace(values)
        fn = lambda name: unwrap(trace[name]["fn"])

        def concentration(level: StickLevel) -> tuple[Array, ...]:
            pair = (jnp.ravel(fn(level.sticks).concentration0)[0], jnp.inf)
            if level.concentration:
                pair = (fn(level.concentration).concentration, fn(level.concentration).rate)
            return tuple(jnp.asarray(number, float) for number in pair)

        def hyper(block: ConjugateBlock) -> Any:
            found = block.family.read(
                tuple(fn(name) for name in block.priors),
                tuple(values[name] for name in block.priors),
            )
            return jax.tree.map(lambda leaf: self.by_column(leaf, block), found)

        return Prior(
            concentration(self.lower),
            concentration(self.upper) if self.upper else None,
            tuple(map(hyper, self.columns)),
            hyper(self.features) if self.features else None,
            _experts_prior(self.experts, fn, values) if self.experts else None,
        )

    def by_column(self, leaf: Array, block: ConjugateBlock) -> Array:
        """A parameter of a block: [group, column, ...] for columns, [group, ...] for features.

        Where the model has no axis of columns, one is inserted.
        """
        first = block.priors[0]
        return (
            leaf
            if block == self.features
            or (len(self.few.sites[first].shape) - event_dim(self.few, first)) > 1
            else leaf[:, None]
        )

    def rows(self, program: Program) -> MixtureRows:
        """The data of a program by row; raises ValueError for values outside of a support."""
        rows = _rows_of(self, program)
        for block, x in zip(self.columns, rows.columns, strict=True):
            block.family.refuse(block.site, x)
        if self.features:
            refuse_infinite(self.features.site, rows.features)
        return rows


def _experts_prior(experts: Experts, fn: Any, values: Mapping[str, Array]) -> Common:
    _, _, weights, loc, precision = experts
    shape = with_class_axis(values[weights], 3).shape
    infinite = jnp.full((shape[0], shape[2]), jnp.inf)

    of_site = lambda number, name: jnp.broadcast_to(number, values[name].shape)
    common = lambda number: with_class_axis(of_site(number, weights), 3)[:, 0]
    of = lambda number, name: with_class_axis(of_site(number, name), 2)
    value = (
        with_class_axis(values[precision], 2) if precision else (common(fn(weights).scale) ** -2)
    )
    return Common(
        of(fn(loc).loc, loc) if loc else common(fn(weights).loc),
        of(fn(loc).scale, loc) ** -2 / value if loc else infinite,
        of(fn(precision).concentration, precision) if precision else value,
        of(fn(precision).rate, precision) if precision else infinite,
    )


def event_dim(program: Program, name: str) -> int:
    """The number of axes of one event of a site, those that `to_event` declared not counted."""
    return {"Dirichlet": 1, "MultivariateNormal": 1, "Wishart": 2, "InverseWishart": 2}.get(
        program.sites[name].family, 0
    )


def values_by_group(
    found: Assignment, block: ConjugateBlock, values: Mapping[str, Array]
) -> tuple[Array, ...]:
    """The parameters of a block, each as `Assignment.by_column` returns it."""
    return tuple(found.by_column(values[name], block) for name in block.priors)


def with_class_axis(value: Array, ndim: int) -> Array:
    """The value of an experts' site, whose first axis is that of classes, inserted if absent."""
    return value if value.ndim == ndim else value[None]


# The data by row.


def _rows_of(found: Assignment, program: Program) -> MixtureRows:
    # Reads many rows in parts, because a reading makes several copies of them.
    num_rows = program.sites[found.z].shape[0]
    if num_rows <= AT_ONCE:
        return _rows_at_once(found, program)
    parts = [
        _rows_at_once(found, program.on_rows(some, program.by_row(num_rows), found.z))
        for some in np.array_split(np.arange(num_rows), -(-num_rows // AT_ONCE))
    ]
    # Within a part a column of data may equal another one, or be constant.
    if any(part.design != parts[0].design for part in parts):
        return _rows_at_once(found, program)
    features, _, blocks, extras, _, signs, task = zip(*parts, strict=True)
    features, extras, signs, task = map(np.concatenate, (features, extras, signs, task))
    found = _with_holes(found, program)
    start, code = found.start(program, 0), lambda at: _coded(found, program, program.constrain(at))
    return MixtureRows(
        features,
        _places(found, features, interpreted(code, start)(start)),
        tuple(map(np.concatenate, zip(*blocks, strict=True))),
        extras,
        parts[0].design,
        signs,
        task,
    )


def _with_holes(found: Assignment, program: Program) -> Assignment:
    # The assignment for the rows of a program; `holes` is None where none of them has any.
    holes = (name for name in program.latent if program.sites[name].family == "ImproperUniform")
    return replace(found, holes=next(holes, None))


def _rows_at_once(found: Assignment, program: Program) -> MixtureRows:
    found = _with_holes(found, program)
    starts = [found.start(program, seed) for seed in range(2)]
    look = lambda one, other: _look(found, program, program.constrain(one), other)
    seen = interpreted(look, *starts)(*starts)
    num_rows = program.sites[found.z].shape[0]
    nothing = np.zeros((num_rows, 0))
    features = seen.get("features", nothing)
    task = _tasks(found, seen) if "sticks" in seen else np.zeros(num_rows, np.int32)
    extras, design, signs = nothing, (), nothing
    if found.experts:
        extras, design = _design(found.experts, seen, features.shape[1])
        signs = _signs(found.experts, seen)
    return MixtureRows(
        features,
        _places(found, features, seen["coded"]),
        tuple(seen["columns"]),
        extras,
        design,
        signs,
        task,
    )


def _look(
    found: Assignment, program: Program, values: dict[str, Array], other: dict[str, Array]
) -> dict[str, Any]:
    at = lambda changes: program.trace({**values, **changes})
    seen: dict[str, Any] = {"coded": _coded(found, program, values)}
    holes = found.holes
    fills = [{holes: some[holes]} for some in (values, other)] if holes else [{}]
    trace = at({holes: jnp.full_like(values[holes], jnp.nan)} if holes else {})
    if values[found.sticks].ndim == 2:
        shape = (*program.sites[found.z].shape, found.num_own)
        seen["sticks"] = values[found.sticks]
        seen["weights"] = jnp.broadcast_to(unwrap(trace[found.z]["fn"]).probs, shape)
    seen["columns"] = [columns(trace[block.site]) for block in found.columns]
    if found.features:
        seen["features"] = trace[found.features.site]["value"]
    if found.experts:
        each = [_seen_by_experts(found, found.experts, at, values, fill) for fill in fills]
        seen["filled"], seen["design"] = zip(each[0], each[-1], strict=True)
        seen |= _tried_labels(found.experts, at, values)
    return seen


def _coded(found: Assignment, program: Program, values: dict[str, Array]) -> Array | None:
    # The features, with the number of each missing entry in its place.
    if not found.holes or not found.features:
        return None
    numbers = jnp.arange(len(values[found.holes]), dtype=values[found.holes].dtype)
    return program.trace({**values, found.holes: numbers})[found.features.site]["value"]


def _places(
    found: Assignment,
    features: Float[np.ndarray, "row feature"],
    coded: Float[np.ndarray, "row feature"] | None,
) -> Int[np.ndarray, "hole 2"]:
    if coded is None:
        return np.zeros((0, 2), int)
    places = np.argwhere(np.isnan(features))
    order = coded[tuple(places.T)]
    require(
        np.array_equal(np.sort(order), np.arange(len(order))),
        f"site {found.holes!r}: its entries are not, each of them, one entry of "
        f"the features; wanted x.at[places].set({found.holes}).",
    )
    return places[np.argsort(order)]


def _tasks(found: Assignment, seen: Mapping[str, Any]) -> np.ndarray:
    # The task of each row: the row of sticks whose weights are the probabilities of its group.
    pair = np.log(seen["sticks"]), np.log1p(-seen["sticks"])
    weights = np.exp(interpreted(log_sticks, *pair)(*pair))
    first = np.argsort(weights[:, 0])
    task = first[
        np.searchsorted((weights[first[1:], 0] + weights[first[:-1], 0]) / 2, seen["weights"][:, 0])
    ].astype(np.int32)
    missed = abs(weights[task] - seen["weights"]).max(1)
    require(
        np.allclose(weights[task], seen["weights"], atol=1e-5),
        f"site {found.z!r}: the probabilities of row {np.argmax(missed)} are the stick-breaking "
        f"weights of no row of {found.sticks!r}; wanted V_h prod_(l<h) (1 - V_l), the last stick "
        "1. Use SVI with an autoguide for this model.",
    )
    return task


# Experts.


def _seen_by_experts(
    found: Assignment, experts: Experts, at: Any, values: Mapping[str, Array], fill: dict
) -> tuple[Array, Array]:
    # The features with their missing entries filled in; and the loc of the soft labels when each
    # weight alone is 1 [weight, class, row].
    weights = values[experts.weights]

    def loc(unit: Array) -> Array:
        trace = at({**fill, experts.weights: jnp.broadcast_to(unit, weights.shape)})
        return with_class_axis(
            jnp.broadcast_to(unwrap(trace[experts.soft]["fn"]).loc, values[experts.soft].shape), 2
        )

    filled = (
        at(fill)[found.features.site]["value"]
        if found.features
        else jnp.zeros((values[found.z].shape[0], 0))
    )
    return filled, jax.lax.map(loc, jnp.eye(weights.shape[-1], dtype=weights.dtype))


def _design(
    experts: Experts, seen: Mapping[str, Any], num_features: int
) -> tuple[np.ndarray, tuple[int, ...]]:
    # Data columns other than features and the constant 1, and the entry of u for each weight.
    extras, design = [], []
    for j, (first, second) in enumerate(zip(*seen["design"], strict=True)):
        require(
            (first == first[:1]).all() and (second == second[:1]).all(),
            f"site {experts.soft!r}: weight {j} multiplies a different column for each class; "
            "wanted one design for all classes.",
        )
        same = [
            _equal(filled, each[0][:, None]).all(0)
            for filled, each in zip(seen["filled"], (first, second), strict=True)
        ]
        is_feature = np.flatnonzero(same[0] & same[1])
        if _equal(np.stack([first, second]), 1.0).all():
            design.append(num_features)
        elif len(is_feature):
            design.append(int(is_feature[0]))
        else:
            require(
                _equal(first, second).all(),
                f"site {experts.soft!r}: what weight {j} multiplies changes with missing entries "
                "and is no column of the features; wanted the features as they are, or data. Use "
                "SVI with an autoguide for this model.",
            )
            design.append(num_features + 1 + len(extras))
            extras.append(first[0])
    return np.stack(extras, 1) if extras else np.zeros((seen["design"][0].shape[-1], 0)), tuple(
        design
    )


def _equal(one: np.ndarray, other: Any) -> np.ndarray:
    # Equality up to rounding, in any units.
    # Whole numbers are features too.
    return np.isclose(one, other, rtol=100 * np.finfo(np.result_type(one, np.float32)).eps, atol=0)


def _tried_labels(experts: Experts, at: Any, values: Mapping[str, Array]) -> dict[str, Array]:
    # Which labels are possible when one soft label alone is positive, or none; and, starting from a
    # possible case, when the sign of one soft label changes.
    shape, dtype = values[experts.soft].shape, values[experts.soft].dtype
    answers = (len(shape) > 1 and shape[0]) or 1

    @traced_once
    def is_possible(t: Array) -> Array:
        message = at({experts.soft: t.reshape(shape)})[experts.label]
        return jnp.broadcast_to(message["fn"].log_prob(message["value"]) == 0, shape[-1:])

    cases = 2 * jnp.eye(answers + 1, answers, -1, dtype=dtype) - 1
    try_case = lambda case: is_possible(jnp.broadcast_to(case[:, None], (answers, shape[-1])))
    tried = jax.lax.map(try_case, cases)
    start = cases[jnp.argmax(tried, 0)].T
    changed = jax.lax.map(
        lambda signs: is_possible(start * signs[:, None]), 1 - 2 * jnp.eye(answers, dtype=dtype)
    )
    return {"tried": tried, "start": start, "changed": changed}


def _signs(experts: Experts, seen: Mapping[str, Any]) -> np.ndarray:
    require(
        seen["tried"].any(0).all(),
        f"site {experts.label!r}: no signs of {experts.soft!r} make its value possible; wanted "
        f"a label that the signs decide, say 1 where {experts.soft!r} is positive. Use SVI with an "
        "autoguide for this model.",
    )
    return np.where(seen["changed"], 0, seen["start"]).T
