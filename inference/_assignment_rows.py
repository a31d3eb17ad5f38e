"""The data of a mixture that `inference.assignment` has read, one entry a row."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from inference._mixture_trace import columns
from inference._some_rows import arguments_by_row, on_rows
from inference.compiling import once
from inference.mean_field import log_sticks
from inference.sites import StructureError, unwrap

if TYPE_CHECKING:
    from inference._assignment_parts import Assignment, Experts
    from inference.program import Program

__all__ = ["Rows", "by_class", "rows_of"]


AT_ONCE = 200_000  # rows


class Rows(NamedTuple):
    """The data. A row's entries are u = (features, 1, extras)."""

    features: np.ndarray  # [row, feature], NaN where missing; no columns where the model has no such site
    holes: np.ndarray  # (row, feature) of each latent missing entry, in the order of their site
    columns: tuple[np.ndarray, ...]  # of each block of columns, [row, column], NaN where missing
    extras: np.ndarray  # [row, extra] what the experts see beside the features and the one
    design: tuple[int, ...]  # which entry of u each weight of an expert is for
    signs: np.ndarray  # [row, class]: the side of 0 on which a soft label lies; 0 where the label does not tell
    task: np.ndarray  # [row]: whose sticks draw its group; 0 where there is one row of sticks


def by_class(value: Array, ndim: int) -> Array:
    """Experts without an axis of classes get one."""
    return value if value.ndim == ndim else value[None]


def rows_of(found: "Assignment", program: "Program") -> Rows:
    """Looks at the whole data; where they are many, at some of them at a time, for a look costs several copies."""
    num_rows = program.sites[found.z].shape[0]
    if num_rows <= AT_ONCE:
        return _rows_at_once(found, program)
    by_row, numbers = arguments_by_row(program, num_rows), np.array_split(np.arange(num_rows), -(-num_rows // AT_ONCE))
    parts = [_rows_at_once(found, on_rows(program, found.z, by_row, some)) for some in numbers]
    if any(part.design != parts[0].design for part in parts):  # in some rows a column of data looks like another, or like the one
        return _rows_at_once(found, program)
    features, _, columns, extras, design, signs, task = zip(*parts, strict=True)
    joined = [np.concatenate(part) for part in (features, extras, signs, task)]
    seen = {"features": joined[0], "coded": _coded(found, program)}
    whole = tuple(np.concatenate(part) for part in zip(*columns, strict=True))
    return Rows(joined[0], _places(_with_holes(found, program), seen), whole, joined[1], design[0], joined[2], joined[3])


def _with_holes(found: "Assignment", program: "Program") -> "Assignment":
    """Other rows than those that were read may miss nothing, or something."""
    return replace(found, holes=next((name for name in program.latent if program.sites[name].family == "ImproperUniform"), None))


def _coded(found: "Assignment", program: "Program") -> np.ndarray | None:
    """The features, their missing entries numbered."""
    found = _with_holes(found, program)
    holes = found.holes
    if not holes or not found.features:
        return None
    site, start = found.features.site, found.start(program, 0)
    number = lambda values: jnp.arange(len(values[holes]), dtype=values[holes].dtype)
    at = lambda values: program.trace({**values, holes: number(values)})[site]["value"]
    return jax.device_get(once(lambda start: at(program.constrain(start)), start)(start))


def _rows_at_once(found: "Assignment", program: "Program") -> Rows:
    found = _with_holes(found, program)
    starts = [found.start(program, seed) for seed in range(2)]
    seen = jax.device_get(once(lambda one, other: _look(found, program, program.constrain(one), other), *starts)(*starts))
    num_rows = program.sites[found.z].shape[0]
    places = _places(found, seen)
    features = seen["features"] if found.features else np.zeros((num_rows, 0))
    task = _tasks(found, seen) if "sticks" in seen else np.zeros(num_rows, np.int32)
    if found.experts is None:
        return Rows(features, places, tuple(seen["columns"]), np.zeros((num_rows, 0)), (), np.zeros((num_rows, 0)), task)
    extras, design = _design(found.experts, seen, features.shape[1])
    return Rows(features, places, tuple(seen["columns"]), extras, design, _signs(found.experts, seen), task)


def _look(found: "Assignment", program: "Program", values: dict[str, Array], other: dict[str, Array]) -> dict[str, Any]:
    """What the model shows at several values of its latent sites."""
    seen: dict[str, Any] = {}
    at = lambda changes: program.trace({**values, **changes})
    if found.holes:
        fills = [values[found.holes], other[found.holes]]
        empty = at({found.holes: jnp.full_like(values[found.holes], jnp.nan)})
        coded = at({found.holes: jnp.arange(len(values[found.holes]), dtype=values[found.holes].dtype)})
        seen["coded"] = coded[found.features.site]["value"] if found.features else None
    else:
        fills, empty = [None, None], at({})
    if values[found.sticks].ndim == 2:
        weights = jnp.broadcast_to(unwrap(empty[found.z]["fn"]).probs, (*program.sites[found.z].shape, found.num_own))
        seen |= {"sticks": values[found.sticks], "weights": weights}
    seen["columns"] = [columns(empty[block.site]) for block in found.columns]
    if found.features:
        seen["features"] = empty[found.features.site]["value"]
    if found.experts:
        seen["filled"], seen["design"] = zip(*(_seen_by_experts(found, at, values, fill) for fill in fills), strict=True)
        seen |= _tried_labels(found.experts, at, values)
    return seen


def _places(found: "Assignment", seen: Mapping[str, Any]) -> np.ndarray:
    """Where each missing entry is."""
    if not found.holes:
        return np.zeros((0, 2), int)
    places = np.argwhere(np.isnan(seen["features"]))
    order = seen["coded"][tuple(places.T)]
    if not np.array_equal(np.sort(order), np.arange(len(order))):
        raise StructureError(
            f"site {found.holes!r}: its entries are not, each of them, one entry of {found.features.site if found.features else None!r}; "
            f"wanted x.at[places].set({found.holes})."
        )
    return places[np.argsort(order)]


def _tasks(found: "Assignment", seen: Mapping[str, Any]) -> np.ndarray:
    """By the sticks whose weights draw the group of a row."""
    weights = np.exp(log_sticks(np.log(seen["sticks"]), np.log1p(-seen["sticks"])))
    first = np.argsort(weights[:, 0])
    place = np.searchsorted((weights[first[1:], 0] + weights[first[:-1], 0]) / 2, seen["weights"][:, 0])
    task = first[place].astype(np.int32)
    if not np.allclose(weights[task], seen["weights"], atol=1e-5):
        row = np.argmax(abs(weights[task] - seen["weights"]).max(1))
        raise StructureError(
            f"site {found.z!r}: the probabilities of row {row} are the stick-breaking weights of no row of {found.sticks!r}; wanted "
            f"V_h prod_(l<h) (1 - V_l), the last stick 1. Use SVI with an autoguide for this model."
        )
    return task


# Experts.


def _seen_by_experts(found: "Assignment", at: Any, values: Mapping[str, Array], fill: Array | None) -> tuple[Array, Array]:
    """The features with their missing entries filled in, and what the soft labels make of each weight alone, [weight, class, row]."""
    experts = found.experts
    assert experts is not None
    changes = {} if fill is None else {found.holes: fill}
    weights = values[experts.weights]
    unit = jnp.eye(weights.shape[-1], dtype=weights.dtype)

    def loc(one: Array) -> Array:
        trace = at({**changes, experts.weights: jnp.broadcast_to(one, weights.shape)})
        fn = unwrap(trace[experts.soft]["fn"])
        return by_class(jnp.broadcast_to(fn.loc, values[experts.soft].shape), 2)

    filled = at(changes)[found.features.site]["value"] if found.features else jnp.zeros((values[found.z].shape[0], 0))
    return filled, jax.lax.map(loc, unit)


def _design(experts: "Experts", seen: Mapping[str, Any], num_features: int) -> tuple[np.ndarray, tuple[int, ...]]:
    """Data columns beside the features and the one, and the place of each weight among them all."""
    extras, design = [], []
    for j in range(seen["design"][0].shape[0]):
        first, second = (each[j] for each in seen["design"])
        if not all((each == each[:1]).all() for each in (first, second)):
            raise StructureError(
                f"site {experts.soft!r}: weight {j} sees another column for each class; wanted one design for all classes."
            )
        same = [_equal(filled, each[0][:, None]).all(0) for filled, each in zip(seen["filled"], (first, second), strict=True)]
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
                f"site {experts.soft!r}: what it sees of weight {j} moves with missing entries and is no column of the features; wanted "
                f"the features as they are, or data. Use SVI with an autoguide for this model."
            )
    return np.stack(extras, 1) if extras else np.zeros((seen["design"][0].shape[-1], 0)), tuple(design)


def _equal(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """But for rounding, whatever the units."""
    return np.isclose(one, other, rtol=100 * np.finfo(np.result_type(one, np.float32)).eps, atol=0)  # whole numbers are features too


def _tried_labels(experts: "Experts", at: Any, values: Mapping[str, Array]) -> dict[str, Array]:
    """Which labels are possible when one class alone says yes, or none does; and from a possible case on, when one answer changes."""
    shape = values[experts.soft].shape
    answers = (len(shape) > 1 and shape[0]) or 1

    def is_possible(t: Array) -> Array:
        message = at({experts.soft: t.reshape(shape)})[experts.label]
        return jnp.broadcast_to(message["fn"].log_prob(message["value"]) == 0, shape[-1:])

    cases = 2 * jnp.eye(answers + 1, answers, -1, dtype=values[experts.soft].dtype) - 1
    tried = jax.lax.map(lambda case: is_possible(jnp.broadcast_to(case[:, None], (answers, shape[-1]))), cases)
    start = cases[jnp.argmax(tried, 0)].T
    flip = 1 - 2 * jnp.eye(answers, dtype=start.dtype)
    changed = jax.lax.map(lambda signs: is_possible(start * signs[:, None]), flip)
    return {"tried": tried, "start": start, "changed": changed}


def _signs(experts: "Experts", seen: Mapping[str, Any]) -> np.ndarray:
    if not seen["tried"].any(0).all():
        raise StructureError(
            f"site {experts.label!r}: no signs of {experts.soft!r} make its value possible; wanted a label that the signs decide, say 1 "
            f"where {experts.soft!r} is positive. Use SVI with an autoguide for this model."
        )
    return np.where(seen["changed"], 0, seen["start"]).T
