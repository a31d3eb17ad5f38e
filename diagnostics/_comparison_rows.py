"""Pointwise log-likelihoods of several runs on the same data, in the same order."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr

from diagnostics._verdict import group_of

__all__ = ["ROW", "difference_of_data", "held_out_rows", "joined"]

ROW = "observation"


def joined(
    trees: Mapping[str, xr.DataTree], who: str = "trees", zero: bool = False
) -> dict[str, xr.DataArray]:
    """Join the log-likelihoods of all observed sites of each tree.

    Args:
        trees: name of a model -> tree of its run.
        who: the argument that holds the trees, for error messages.
        zero: whether a draw may give an observation probability 0.

    Returns:
        Name of a model -> log-likelihoods (chain, draw, observation), in the order of the first
        tree's data.
    """
    found, first = {}, None
    for name, tree in trees.items():
        sites = (
            list(group_of(tree, "log_likelihood").data_vars)
            if first is None
            else _matched(first, tree)
        )
        first = tree if first is None else first
        if not sites:
            raise ValueError(
                f"{who}[{name!r}]: no log-likelihood; found the groups {list(tree.children)}."
            )
        parts = [_flat(group_of(tree, "log_likelihood")[site], tree) for site in sites]
        found[name] = xr.DataArray(np.concatenate(parts, axis=-1), dims=("chain", "draw", ROW))
        if not (found[name] < np.inf).all() or not (zero or np.isfinite(found[name]).all()):
            raise ValueError(
                f"{who}[{name!r}]: its log-likelihood has NaN or infinite values; sites "
                f"{list(map(str, sites))}."
            )
    sizes = {name: values.sizes[ROW] for name, values in found.items()}
    for name, size in sizes.items():
        if size != next(iter(sizes.values())):
            other = next(iter(sizes))
            raise ValueError(
                f"{who}: {other!r} has {sizes[other]} log-likelihood terms, {name!r} has {size}: "
                "wanted the same rows."
            )
    return found


def held_out_rows(test: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return log-likelihoods of held-out rows, [chain, draw, row].

    Args:
        test: name of a model -> array or tree; a draw may give a row probability 0. An array [row]
            becomes one chain of one draw.
    """
    trees = {name: values for name, values in test.items() if isinstance(values, xr.DataTree)}
    if (difference := difference_of_data(trees, "test")) is not None:
        raise difference
    of_trees = joined(trees, "test", zero=True)
    found = {
        name: of_trees[name].values if name in of_trees else _array(name, values)
        for name, values in test.items()
    }
    first = next(iter(found))
    for name, values in found.items():
        if values.shape[-1] != found[first].shape[-1]:
            raise ValueError(
                f"test: {first!r} has {found[first].shape[-1]} held-out rows, {name!r} has "
                f"{values.shape[-1]}."
            )
    return found


def difference_of_data(trees: Mapping[str, xr.DataTree], who: str = "trees") -> ValueError | None:
    """Return the error of trees that observe different arrays; names of sites do not matter."""
    holders = {
        name: group_of(tree, "observed_data")
        for name, tree in trees.items()
        if "observed_data" in tree.children
    }
    first = next(iter(holders), None)
    for name, data in holders.items():
        left = [values.values for values in data.data_vars.values()]
        for site, values in holders[str(first)].data_vars.items():
            at = next((i for i, other in enumerate(left) if _equal(other, values.values)), None)
            if at is None:
                return _other_data(who, str(first), holders[str(first)], name, data, str(site))
            del left[at]
        if left:
            return _other_data(who, str(first), holders[str(first)], name, data, "a further site")
    return None


def _other_data(
    who: str, first: str, mine: xr.Dataset, name: str, theirs: xr.Dataset, site: str
) -> ValueError:
    shapes = [
        {str(key): values.shape for key, values in data.data_vars.items()}
        for data in (mine, theirs)
    ]
    why = (
        "the values differ"
        if sorted(map(str, shapes[0].values())) == sorted(map(str, shapes[1].values()))
        else "the shapes differ"
    )
    return ValueError(
        f"{who}: {first!r} and {name!r} observe different data ({why} at {site}): {first!r} has "
        f"{shapes[0]}, {name!r} has {shapes[1]}. Only runs on the same data can be compared. "
        "Predictions of the same new rows can be compared by `diagnostics.log_score` and others."
    )


def _array(name: str, values: Any) -> np.ndarray:
    array = np.asarray(
        values.transpose("chain", "draw", ...) if isinstance(values, xr.DataArray) else values,
        float,
    )
    array = array[None, None] if array.ndim == 1 else array
    if array.ndim < 3 or not (array < np.inf).all():
        bad = int(np.sum(~(array < np.inf)))
        raise ValueError(
            f"test[{name!r}]: log-likelihoods (chain, draw, row), finite or -inf; found shape "
            f"{array.shape}, {bad} NaN or infinite."
        )
    return array.reshape(*array.shape[:2], -1)


def _flat(values: xr.DataArray, tree: xr.DataTree) -> np.ndarray:
    """Values [chain, draw, entry] without the entries that are NaN in the data."""
    array = values.astype(float).transpose("chain", "draw", ...).values
    observed = group_of(tree, "observed_data")
    data = observed[values.name].values if values.name in observed else None
    flat = array.reshape(*array.shape[:2], -1)
    if data is not None and data.dtype.kind == "f" and data.shape == array.shape[2:]:
        flat = flat[..., ~np.isnan(data.ravel())]
    return flat


def _matched(first: xr.DataTree, tree: xr.DataTree) -> list[Any]:
    """The sites of `tree` in the order of the same data in `first`, matched by name where there are
    no data or equal arrays.
    """
    left, order = list(group_of(tree, "log_likelihood").data_vars), []
    mine, theirs = group_of(tree, "observed_data"), group_of(first, "observed_data")
    for site in group_of(first, "log_likelihood").data_vars:
        same = [
            other
            for other in left
            if other in mine and site in theirs and _equal(mine[other].values, theirs[site].values)
        ]
        same = same or [
            other for other in left if other == site and not (other in mine and site in theirs)
        ]
        order += sorted(same, key=lambda other: other != site)[:1]
        left = [other for other in left if other not in order]
    return order + left


def _equal(one: np.ndarray, other: np.ndarray) -> bool:
    """Arrays are compared in the lower of two precisions, for kernels may differ in it."""
    floats = one.dtype.kind == "f" and other.dtype.kind == "f"
    if floats:
        lower = min(one.dtype, other.dtype, key=lambda dtype: dtype.itemsize)
        one, other = one.astype(lower), other.astype(lower)
    return one.shape == other.shape and bool(np.array_equal(one, other, equal_nan=floats))
