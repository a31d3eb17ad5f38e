"""Runs and other values as netCDF files, without pickle.

    write_tree(tree, path)               # as a whole or not at all; blocks have checksums
    tree = read_tree(path)
    dataset = packed(value)              # text and arrays
    value = unpacked(dataset)

A value may consist of numbers, texts, arrays, tuples, dictionaries, NamedTuples, dataclasses,
NumPyro's distributions, and functions of this project. It becomes text (JSON) with arrays beside
it, and a checksum of both. The text names functions and classes. Only those of this project and of
NumPyro are looked up, so that reading a file runs no code that came with it.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import version
from inspect import isclass, isfunction
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pandas as pd
import xarray as xr
from numpyro.distributions import Distribution

__all__ = [
    "FORMAT",
    "best_state",
    "held_estimator",
    "packed",
    "read_tree",
    "unpacked",
    "write_group",
    "write_tree",
]

FORMAT = 2  # of files; another one cannot be read
LARGE = 2**16  # bytes of an array that is compressed, for much of a filter's room may be empty
COMPRESSED = {"zlib": True, "complevel": 1}
ROOTS = ("gallery", "inference", "numpyro", "zoo")  # packages that a file may name
DAMAGED = "the file is damaged; save it anew, or fit again"
# what HDF5, h5netcdf and xarray raise for a file that is damaged or is no netCDF file
UNREADABLE = (OSError, ValueError, KeyError, RuntimeError, TypeError, AttributeError, IndexError)


def write_tree(tree: xr.DataTree, path: Path) -> None:
    """Write a netCDF file, as a whole or not at all."""
    tree.attrs |= {"format": FORMAT}
    encoding = {
        node.path: {
            str(name): {"fletcher32": True} | (COMPRESSED if values.nbytes > LARGE else {})
            for name, values in node.to_dataset(inherit=False).variables.items()
            if values.size and values.ndim and values.dtype.kind in "biuf"
        }
        for node in tree.subtree
    }
    with _replaced(path) as partial_path:
        tree.to_netcdf(partial_path, engine="h5netcdf", encoding=encoding)


def write_group(group: xr.Dataset, name: str, path: Path) -> None:
    """Add a group to a file, as a whole or not at all."""
    with _replaced(path) as partial_path:
        shutil.copyfile(path, partial_path)
        group.to_netcdf(partial_path, mode="a", group=name, engine="h5netcdf")


@contextmanager
def _replaced(path: Path) -> Generator[Path]:
    """A path to write to, which then takes the place of the file."""
    partial_path = path.with_name(f".{path.name}.partial")
    try:
        yield partial_path
        os.replace(partial_path, path)
    finally:
        partial_path.unlink(missing_ok=True)


def read_tree(path: Path, what: str, wanted: str) -> xr.DataTree:
    """Read a tree into memory; ValueError where the file is none of this format.

    Args:
        path: of the file.
        what: the content that is wanted, for messages: "a run".
        wanted: what writes such files, for messages.
    """
    if path.is_dir():
        raise ValueError(f"{path}: a folder; name a netCDF file of {wanted}")
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    try:
        with xr.open_datatree(path, engine="h5netcdf") as tree:
            tree = tree.load()
    except UNREADABLE as error:
        raise ValueError(
            f"{path}: not {what}, or damaged; wanted a netCDF file of {wanted}"
        ) from error
    if (found := tree.attrs.get("format", FORMAT)) != FORMAT:
        raise ValueError(
            f"{path}: written by another version of this project (format {found}, wanted {FORMAT});"
            " fit again"
        )
    return tree


def held_estimator(kind: str) -> str:
    """Return what a file of an estimator holds, and how to read it, for messages."""
    article = "an" if kind[0] in "AEIOU" else "a"
    return f"holds {article} {kind}; load it in Python by {kind}.load"


def packed(value: Any) -> xr.Dataset:
    """Return text and arrays that hold a value; ValueError where a part cannot be held."""
    arrays: dict[str, np.ndarray] = {}
    text = json.dumps(_packed(value, "value", arrays))
    variables = {
        name: ([f"{name}_dim_{i}" for i in range(array.ndim)], array)
        for name, array in arrays.items()
    }
    written_by = version("bayes-model-zoo")
    attrs = {"content": text, "checksum": _checksum(text, arrays), "version": written_by}
    return xr.Dataset(variables, attrs=attrs)


def unpacked(dataset: xr.Dataset) -> Any:
    """Return the value that `packed` was given; arrays are NumPy's."""
    try:
        text, arrays = dataset.attrs["content"], _arrays(dataset)
        is_whole = dataset.attrs["checksum"] == _checksum(text, arrays)
    except UNREADABLE:
        is_whole = False
    if not is_whole:
        raise ValueError(DAMAGED)
    try:
        return _unpacked(json.loads(text), arrays)
    except (ImportError, *UNREADABLE) as error:
        raise ValueError(
            f"written by version {dataset.attrs.get('version')}, which this version, "
            f"{version('bayes-model-zoo')}, cannot read ({error}); fit again"
        ) from error


def _arrays(dataset: xr.Dataset) -> dict[str, np.ndarray]:
    return {str(name): values.values for name, values in dataset.data_vars.items()}


def _checksum(text: str, arrays: Mapping[str, np.ndarray]) -> str:
    found = hashlib.sha256(text.encode())
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        found.update(f"{name} {array.dtype.str} {array.shape}".encode())
        found.update(array.tobytes())
    return found.hexdigest()


def _packed(value: Any, name: str, arrays: dict[str, np.ndarray]) -> Any:
    """What JSON holds of a value; its arrays are put into `arrays`."""
    each = lambda values: [_packed(one, name, arrays) for one in values]
    named = lambda values: {key: _packed(one, key, arrays) for key, one in values.items()}
    if value is None or type(value) in (bool, int, float):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, list):
        return each(value)
    if isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        return {"key": _packed(jax.random.key_data(value), name, arrays)}
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        return _packed_array(np.asarray(value), isinstance(value, np.generic), name, arrays)
    if isinstance(value, Integral | Real):
        return value.item() if hasattr(value, "item") else float(value)
    if isinstance(value, Mapping):
        own = lambda key: key if isinstance(key, str) else name
        pairs = value.items()
        return {"pairs": [[*each([key]), _packed(one, own(key), arrays)] for key, one in pairs]}
    if isinstance(value, partial):
        return {"partial": each([value.func, value.args, dict(value.keywords)])}
    if isinstance(value, Distribution):
        return {"distribution": _name_of(type(value), name), "fields": named(_fields_of(value))}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {"record": _name_of(type(value), name), "fields": named(value._asdict())}
    if isinstance(value, tuple):
        return {"tuple": each(value)}
    if is_dataclass(value) and not isclass(value):
        own = {field.name: getattr(value, field.name) for field in fields(value)}
        return {"record": _name_of(type(value), name), "fields": named(own)}
    if isinstance(value, pd.CategoricalDtype):
        return {"categories": each(value.categories.tolist()), "is_ordered": bool(value.ordered)}
    if isinstance(value, np.dtype):
        return {"dtype": value.str}
    if isinstance(value, pd.api.extensions.ExtensionDtype):
        return {"pandas": str(value)}
    if isfunction(value):
        return {"function": _name_of(value, name)}
    raise _refusal(value, name)


def _packed_array(array: np.ndarray, is_scalar: bool, name: str, arrays: Any) -> Any:
    if array.dtype.kind in "biuf":
        key = f"array_{len(arrays)}"
        arrays[key] = array
        return {"array": key, "is_scalar": is_scalar}
    if array.dtype.kind in "OU":
        values = [_packed(one, name, arrays) for one in array.ravel().tolist()]
        return {"texts": values, "dtype": array.dtype.str, "shape": list(array.shape)}
    raise _refusal(array, name)


def _unpacked(content: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    again = partial(_unpacked, arrays=arrays)
    if isinstance(content, list):
        return [again(one) for one in content]
    match content:
        case {"array": key, "is_scalar": is_scalar}:
            return arrays[key][()] if is_scalar else arrays[key]
        case {"key": data}:
            return jax.random.wrap_key_data(again(data))
        case {"texts": values, "dtype": dtype, "shape": shape}:
            found = np.empty(len(values), np.dtype(dtype))
            found[:] = [again(one) for one in values]
            return found.reshape(shape)
        case {"pairs": pairs}:
            return {again(key): again(value) for key, value in pairs}
        case {"partial": parts}:
            function, args, keywords = again(parts)
            return partial(function, *args, **keywords)
        case {"distribution": name, "fields": found}:
            return _distribution(_found(name), {key: again(one) for key, one in found.items()})
        case {"record": name, "fields": found}:
            return _found(name)(**{key: again(one) for key, one in found.items()})
        case {"tuple": values}:
            return tuple(again(values))
        case {"categories": values, "is_ordered": is_ordered}:
            return pd.CategoricalDtype(again(values), is_ordered)
        case {"dtype": name}:
            return np.dtype(name)
        case {"pandas": name}:
            return pd.api.types.pandas_dtype(name)
        case {"function": name}:
            return _found(name)
    return content


def _fields_of(value: Distribution) -> dict[str, Any]:
    """The leaves and the static fields of a distribution, by name; NumPyro's order is no order."""
    data, static = value.tree_flatten()
    names = (*value.gather_pytree_data_fields(), *value.gather_pytree_aux_fields())
    return dict(zip(names, (*data, *static), strict=True))


def _distribution(kind: type[Distribution], values: dict[str, Any]) -> Distribution:
    each = kind.gather_pytree_data_fields(), kind.gather_pytree_aux_fields()
    data, static = (tuple(values[name] for name in names) for names in each)
    return kind.tree_unflatten(static, data)


def _name_of(value: Any, name: str) -> str:
    """Module and name of a function or class, by which `_found` finds it again."""
    found = f"{value.__module__}:{value.__qualname__}"
    try:
        is_same = _found(found) is value
    except (ImportError, AttributeError):
        is_same = False
    if not is_same:
        raise _refusal(value, name)
    return found


def _found(name: str) -> Any:
    module, _, attribute = name.partition(":")
    if module.split(".")[0] not in ROOTS:
        raise ImportError(f"found {name}, wanted a name of {', '.join(ROOTS)}")
    found = getattr(import_module(module), attribute)
    if not (isfunction(found) or isclass(found)):
        raise ImportError(f"{name} is neither a function nor a class")
    return found


def _refusal(value: Any, name: str) -> ValueError:
    return ValueError(
        f"save: {name} is {value!r}, which a file cannot hold; wanted numbers, texts, arrays, "
        "NumPyro's distributions, or functions of zoo and inference. A pickle holds others."
    )


def best_state(states: list[Any]) -> Any:
    """The best state of coordinate ascent, without what predictions do not need."""
    best = max(states, key=lambda state: float(state.elbo))
    return best._replace(
        score=jax.tree.map(lambda leaf: leaf[:0] if leaf.ndim else leaf, best.score)
    )
