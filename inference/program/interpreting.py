"""Run traced code in NumPy, without a compiler: for a handful of calls on a few numbers.

    interpreted(function, *arguments)(*arguments)
    split(rng_key, num)                                `jax.random.split` into a tuple of keys

A proof, or the start of a run, takes microseconds and would be compiled for seconds. So the
function is traced, and NumPy runs its operations one after the other, by the table `RULES`. One
that is not in it, such as singular values, is left to JAX, which compiles it alone. Random bits are
those of JAX, and other numbers agree with compiled code up to rounding. A key of random numbers is
an opaque entry of eight bytes (`KEY`).

Cost: one trace, and some microseconds for each operation, those inside of a loop at each trip.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import jax
import numpy as np
import scipy.special as special
from jax import random
from jax.extend.core import Jaxpr, JaxprEqn, Literal, jaxprs_in_params
from jax.interpreters.partial_eval import dce_jaxpr
from jax.lax import GatherScatterMode, RoundingMethod
from scipy.linalg import get_blas_funcs, get_lapack_funcs

from inference.program.compiling import as_numpy, is_traced, once

__all__ = ["interpreted", "split"]

MOST = 30_000  # operations, some .1 seconds
ENTRIES = 1_500  # that take as long as one operation more
MOST_GAMMAS = 100  # draws, each about a millisecond, that take less than one compilation
KEY = np.dtype((np.void, 8))  # a threefry key


def interpreted(function: Callable, *arguments: Any) -> Callable:
    """Traces a function; what is returned runs it in NumPy, and returns NumPy arrays and keys.

    Inside of other traced code it returns the function. It returns compiled code where this pays,
    and where JAX is told to make random numbers otherwise than by default.

    Args:
        function: a function of arrays.
        *arguments: arrays, or trees of them, of the shapes and types that it will be called with.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    if is_traced((closed.consts, arguments)):
        return function
    jaxpr, _ = dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
    is_default = jax.config.jax_default_prng_impl == "threefry2x32"
    if not (is_default and jax.config.jax_threefry_partitionable) or _cost(jaxpr) > MOST:
        return once(function, *arguments)
    constants = [_from_jax(value) for value in closed.consts]

    def run(*arguments: Any) -> Any:
        given = [_from_jax(leaf) for leaf in jax.tree.leaves(arguments)]
        typed = [
            value if value.dtype == KEY else value.astype(_type(variable).dtype, copy=False)
            for value, variable in zip(given, jaxpr.invars, strict=True)
        ]
        with np.errstate(all="ignore"):
            found = _run(jaxpr, constants, typed)
        results = [_to_jax(value) if value.dtype == KEY else value.copy() for value in found]
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return run


def split(rng_key: jax.Array, num: int) -> tuple[jax.Array, ...]:
    """`jax.random.split` into a tuple of keys."""
    keys = lambda rng_key: tuple(random.split(rng_key, num))
    return interpreted(keys, rng_key)(rng_key)


def _cost(jaxpr: Any) -> float:
    """The number of operations and of their entries; a loop without a known end is one trip."""
    total = 0.0
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        inner = sum(map(_cost, jaxprs_in_params(equation.params)))
        entries = sum(prod(_type(variable).shape) for variable in equation.outvars)
        total += 1 + entries / ENTRIES + inner * equation.params.get("length", 1)
    return total


def _run(jaxpr: Jaxpr, constants: Sequence[np.ndarray], arguments: Sequence[np.ndarray]) -> list:
    known = dict(zip(jaxpr.constvars, constants, strict=True))
    known |= zip(jaxpr.invars, arguments, strict=True)
    read = lambda atom: _from_jax(atom.val) if isinstance(atom, Literal) else known[atom]
    for equation in jaxpr.eqns:
        found = RULES.get(equation.primitive.name, _by_jax)(equation, *map(read, equation.invars))
        found = found if isinstance(found, list) else [found]
        for variable, value in zip(equation.outvars, found, strict=True):
            dtype = _type(variable).dtype
            known[variable] = np.asarray(value, dtype if isinstance(dtype, np.dtype) else KEY)
    return [read(atom) for atom in jaxpr.outvars]


def _inner(jaxpr: Any, arguments: Sequence[np.ndarray]) -> list:
    """Runs a jaxpr among the settings of an operation."""
    constants = [_from_jax(value) for value in getattr(jaxpr, "consts", ())]
    return _run(getattr(jaxpr, "jaxpr", jaxpr), constants, arguments)


def _by_jax(equation: JaxprEqn, *given: np.ndarray) -> list:
    settings = equation.primitive.get_bind_params(equation.params)
    with jax.ensure_compile_time_eval(), equation.ctx.manager:
        found = equation.primitive.bind(*map(_to_jax, given), **settings)
    return [_from_jax(value) for value in jax.tree.leaves(found)]


def _from_jax(value: Any) -> np.ndarray:
    if jax.dtypes.issubdtype(getattr(value, "dtype", None), jax.dtypes.prng_key):
        return _as_keys(as_numpy(value))
    array = np.asarray(value)
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)


def _to_jax(value: np.ndarray) -> Any:
    return random.wrap_key_data(jax.device_put(_as_pairs(value))) if value.dtype == KEY else value


def _type(variable: Any) -> Any:
    """The shape and type of a variable of traced code."""
    return variable.aval


def _shape(equation: JaxprEqn) -> tuple[int, ...]:
    return _type(equation.outvars[0]).shape


# The table of operations: functions of an equation and of its arguments.


def _rule(name: str) -> Callable:
    """A decorator that puts a function into `RULES`."""

    def put(function: Callable) -> Callable:
        RULES[name] = function
        return function

    return put


def _by_entry(function: Callable) -> Callable:
    return lambda equation, *arrays: function(*arrays)


def _divided(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Integers are divided towards zero."""
    if x.dtype.kind in "iu":
        return (x - np.fmod(x, y)) // np.where(y == 0, 1, y)
    return np.divide(x, y)


def _log_gamma(x: np.ndarray) -> np.ndarray:
    return np.where(np.isinf(x), np.inf, special.gammaln(x))


def _shifted_right(x: np.ndarray, by: np.ndarray) -> np.ndarray:
    unsigned = f"u{x.dtype.itemsize}"
    return np.right_shift(x.view(unsigned), by.view(unsigned)).view(x.dtype)


def _placed(x: np.ndarray, axes: Sequence[int], ndim: int) -> np.ndarray:
    """The array with its axes at these places, in rising order, among `ndim`."""
    return np.expand_dims(x, tuple(axis for axis in range(ndim) if axis not in axes))


def _broadcast(equation: JaxprEqn, x: np.ndarray, axes: Sequence[int]) -> np.ndarray:
    shape = _shape(equation)
    return np.broadcast_to(_placed(x, axes, len(shape)), shape)


# operations that NumPy has by the same name
SAME = """
    abs add cbrt ceil cos cosh exp exp2 expm1 floor log log1p nextafter sign sin sinh sqrt square
    tan tanh
"""
OTHERS: dict[str, Callable] = {
    "acos": np.arccos,
    "acosh": np.arccosh,
    "add_any": np.add,
    "and": np.bitwise_and,
    "asin": np.arcsin,
    "asinh": np.arcsinh,
    "atan": np.arctan,
    "atan2": np.arctan2,
    "atanh": np.arctanh,
    "bessel_i0e": special.i0e,
    "bessel_i1e": special.i1e,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "copy": np.asarray,
    "digamma": special.digamma,
    "div": _divided,
    "eq": np.equal,
    "erf": special.erf,
    "erf_inv": special.erfinv,
    "erfc": special.erfc,
    "ge": np.greater_equal,
    "gt": np.greater,
    "igamma": special.gammainc,
    "igammac": special.gammaincc,
    "is_finite": np.isfinite,
    "le": np.less_equal,
    "lgamma": _log_gamma,
    "logistic": special.expit,
    "lt": np.less,
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "ne": np.not_equal,
    "neg": np.negative,
    "not": np.invert,
    "or": np.bitwise_or,
    "pow": np.power,
    "regularized_incomplete_beta": special.betainc,
    "rem": np.fmod,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "shift_left": np.left_shift,
    "shift_right_arithmetic": np.right_shift,
    "shift_right_logical": _shifted_right,
    "stop_gradient": np.asarray,
    "sub": np.subtract,
    "xor": np.bitwise_xor,
}
RULES: dict[str, Callable] = {
    **{name: _by_entry(getattr(np, name)) for name in SAME.split()},
    **{name: _by_entry(function) for name, function in OTHERS.items()},
    "bitcast_convert_type": lambda e, x: (
        np.ascontiguousarray(x).view(e.params["new_dtype"]).reshape(_shape(e))
    ),
    "broadcast_in_dim": lambda e, x: _broadcast(e, x, e.params["broadcast_dimensions"]),
    "closed_call": lambda e, *given: _inner(e.params["call_jaxpr"], given),
    "concatenate": lambda e, *parts: np.concatenate(parts, e.params["dimension"]),
    "custom_jvp_call": lambda e, *given: _inner(e.params["call_jaxpr"], given),
    "custom_vjp_call": lambda e, *given: _inner(e.params["call_jaxpr"], given),
    "dynamic_slice": lambda e, x, *starts: x[_window(starts, e.params["slice_sizes"], x.shape)],
    "expand_dims": lambda e, x: x.reshape(_shape(e)),
    "integer_pow": lambda e, x: np.power(x, x.dtype.type(e.params["y"])),
    "iota": lambda e: _broadcast(
        e, np.arange(_shape(e)[e.params["dimension"]]), [e.params["dimension"]]
    ),
    "jit": lambda e, *given: _inner(e.params["jaxpr"], given),
    "optimization_barrier": lambda e, *x: list(x),
    "remat2": lambda e, *given: _inner(e.params["jaxpr"], given),
    "reshape": lambda e, x: x.reshape(_shape(e)),
    "rev": lambda e, x: np.flip(x, e.params["dimensions"]),
    "round": lambda e, x: (
        np.round(x)
        if e.params["rounding_method"] == RoundingMethod.TO_NEAREST_EVEN
        else _by_jax(e, x)
    ),
    "split": lambda e, x: np.split(x, np.cumsum(e.params["sizes"])[:-1], e.params["axis"]),
    "squeeze": lambda e, x: x.reshape(_shape(e)),
    "stack": lambda e, *parts: np.stack(parts, e.params["axis"]),
    "transpose": lambda e, x: x.transpose(e.params["permutation"]),
    "unstack": lambda e, x: list(np.moveaxis(x, e.params["axis"], 0)),
}


@_rule("call_hi_primitive")
def _expanded(equation: JaxprEqn, *given: np.ndarray) -> list:
    types = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in given]
    return _inner(jax.make_jaxpr(equation.params["_prim"].expand)(*types), given)


@_rule("random_gamma")
def _gamma(equation: JaxprEqn, keys: np.ndarray, shape: np.ndarray) -> list:
    if shape.size > MOST_GAMMAS:
        return _by_jax(equation, keys, shape)
    drawn = partial(equation.primitive.impl, **equation.params)
    return _inner(jax.make_jaxpr(drawn)(_to_jax(keys), shape), (keys, shape))


@_rule("cond")
def _cond(equation: JaxprEqn, which: np.ndarray, *given: np.ndarray) -> list:
    branches = equation.params["branches"]
    return _inner(branches[min(max(int(which), 0), len(branches) - 1)], given)


@_rule("while")
def _while(equation: JaxprEqn, *given: np.ndarray) -> list:
    setting, of_cond = equation.params, equation.params["cond_nconsts"]
    of_both = of_cond + setting["body_nconsts"]
    carry = list(given[of_both:])
    while _inner(setting["cond_jaxpr"], (*given[:of_cond], *carry))[0]:
        carry = _inner(setting["body_jaxpr"], (*given[of_cond:of_both], *carry))
    return carry


@_rule("scan")
def _scan(equation: JaxprEqn, *given: np.ndarray) -> list:
    setting, each = equation.params, []
    inner = setting["jaxpr"].jaxpr
    # what a trip takes, or gives, a row of has an axis less inside
    is_whole = lambda pair: _type(pair[0]).shape == _type(pair[1]).shape
    num_whole = sum(map(is_whole, zip(equation.invars, inner.invars, strict=True)))
    num_carry = sum(map(is_whole, zip(equation.outvars, inner.outvars, strict=True)))
    constants, rows = given[: num_whole - num_carry], given[num_whole:]
    carry, order = list(given[num_whole - num_carry : num_whole]), range(setting["length"])
    for i in reversed(order) if setting["reverse"] else order:
        found = _inner(setting["jaxpr"], (*constants, *carry, *(row[i] for row in rows)))
        carry = found[:num_carry]
        each.append(found[num_carry:])
    each = each[::-1] if setting["reverse"] else each
    shapes = [_type(variable) for variable in equation.outvars[num_carry:]]
    empty = [np.zeros(aval.shape, aval.dtype) for aval in shapes] if not each else []
    return carry + (empty or [np.stack(parts) for parts in zip(*each, strict=True)])


@_rule("select_n")
def _select(equation: JaxprEqn, which: np.ndarray, *cases: np.ndarray) -> np.ndarray:
    if len(cases) == 2:
        return np.where(which.astype(bool), cases[1], cases[0])
    return np.choose(which, cases)


def _bounds(dtype: np.dtype) -> tuple[Any, Any]:
    """The smallest and the largest number of a type."""
    limits = np.iinfo(dtype) if dtype.kind in "iu" else None
    return (limits.min, limits.max) if limits else (-np.inf, np.inf)


@_rule("convert_element_type")
def _convert(equation: JaxprEqn, x: np.ndarray) -> np.ndarray:
    dtype: Any = np.dtype(equation.params["new_dtype"])
    if x.dtype.kind == "f" and dtype.kind in "iu":  # beyond the integers: the nearest; NaN: 0
        low, high = _bounds(dtype)
        found = np.where(np.isnan(x), 0, np.clip(x, low, high)).astype(dtype)
        return np.where(x >= high, high, np.where(x <= low, low, found))
    return x.astype(dtype)


@_rule("pad")
def _pad(equation: JaxprEqn, x: np.ndarray, value: np.ndarray) -> Any:
    found, places = np.full(_shape(equation), value), []
    for size, (low, high, gap) in zip(x.shape, equation.params["padding_config"], strict=True):
        if min(low, high) < 0:
            return _by_jax(equation, x, value)
        places.append(slice(low, low + max(size * (gap + 1) - gap, 0), gap + 1))
    found[tuple(places)] = x
    return found


@_rule("slice")
def _slice(equation: JaxprEqn, x: np.ndarray) -> np.ndarray:
    setting = equation.params
    strides = setting["strides"] or [1] * x.ndim
    return x[tuple(map(slice, setting["start_indices"], setting["limit_indices"], strides))]


def _window(starts: Sequence[np.ndarray], sizes: Sequence[int], shape: Sequence[int]) -> tuple:
    first = np.clip(np.array(starts, int), 0, np.array(shape, int) - np.array(sizes, int))
    return tuple(map(slice, first, first + np.array(sizes, int)))


@_rule("dynamic_update_slice")
def _dynamic_update(equation: JaxprEqn, x: np.ndarray, new: np.ndarray, *starts) -> np.ndarray:
    found = x.copy()
    found[_window(starts, new.shape, x.shape)] = new
    return found


def _places(numbers: Any, names: Sequence[str], shapes: tuple, indices: np.ndarray) -> tuple:
    """For each axis of an operand, the indices of a gather or scatter; and which are within bounds.

    Args:
        numbers: the dimension numbers.
        names: of those of their fields that differ between gather and scatter.
        shapes: of the operand, of a slice, and of all slices together.
        indices: where slices start, [..., axis].
    """
    operand, sizes, whole = shapes
    window, dropped, start_map, batch = (getattr(numbers, name) for name in names)
    ndim, outer = len(whole), [axis for axis in range(len(whole)) if axis not in window]
    batched = dict(zip(numbers.operand_batching_dims, batch, strict=True))
    kept = [axis for axis in range(len(operand)) if axis not in {*dropped, *batched}]
    places: list[Any] = [0] * len(operand)
    is_inside = np.ones([1] * ndim, bool)
    for axis, at in batched.items():
        places[axis] = _placed(np.arange(whole[outer[at]]), [outer[at]], ndim)
    for axis, each in zip(start_map, np.moveaxis(indices, -1, 0), strict=True):
        start, last = _placed(each.astype(np.int64), outer, ndim), operand[axis] - sizes[axis]
        is_inside = is_inside & (start >= 0) & (start <= last)
        places[axis] = np.clip(start, 0, last)
    for axis, at in zip(kept, window, strict=True):
        places[axis] = places[axis] + _placed(np.arange(sizes[axis]), [at], ndim)
    return tuple(places), is_inside


@_rule("gather")
def _gather(equation: JaxprEqn, x: np.ndarray, indices: np.ndarray) -> np.ndarray:
    setting, shape = equation.params, _shape(equation)
    names = (
        "offset_dims",
        "collapsed_slice_dims",
        "start_index_map",
        "start_indices_batching_dims",
    )
    shapes = x.shape, setting["slice_sizes"], shape
    places, is_inside = _places(setting["dimension_numbers"], names, shapes, indices)
    found, fill = np.broadcast_to(x[places], shape), setting["fill_value"]
    if setting["mode"] != GatherScatterMode.FILL_OR_DROP:
        return found
    if fill is None:
        fill = np.nan if x.dtype.kind == "f" else _bounds(x.dtype)[x.dtype.kind != "i"]
    return np.where(is_inside, found, np.asarray(fill, x.dtype))


def _scatter(put: Callable) -> Callable:
    def rule(equation: JaxprEqn, x: np.ndarray, indices: np.ndarray, new: np.ndarray) -> np.ndarray:
        numbers, found = equation.params["dimension_numbers"], x.copy()
        names = (
            "update_window_dims",
            "inserted_window_dims",
            "scatter_dims_to_operand_dims",
            "scatter_indices_batching_dims",
        )
        dropped = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
        window = iter(numbers.update_window_dims)
        sizes = [1 if axis in dropped else new.shape[next(window)] for axis in range(x.ndim)]
        places, is_inside = _places(numbers, names, (x.shape, sizes, new.shape), indices)
        *places, is_inside, _ = np.broadcast_arrays(*places, is_inside, new)
        is_put = is_inside | (equation.params["mode"] == GatherScatterMode.CLIP)
        # a number has no places
        put(found, tuple(place[is_put] for place in places), new[is_put] if places else new)
        return found

    return rule


def _reduced(function: np.ufunc, which: int | None = None) -> Callable:
    """A rule for a reduction; the largest of no entries is the smallest number of the type."""

    def rule(equation: JaxprEqn, x: np.ndarray) -> np.ndarray:
        start = {} if which is None else {"initial": _bounds(x.dtype)[which]}
        return function.reduce(x, tuple(equation.params["axes"]), dtype=x.dtype, **start)

    return rule


def _best(function: Callable) -> Callable:
    return lambda equation, x: function(x, int(equation.params["axes"][0]))


def _running(function: np.ufunc) -> Callable:
    def rule(equation: JaxprEqn, x: np.ndarray) -> np.ndarray:
        axis, step = equation.params["axis"], -1 if equation.params["reverse"] else 1
        order = (*[slice(None)] * axis, slice(None, None, step))
        return function.accumulate(x[order], axis, dtype=x.dtype)[order]

    return rule


RULES |= {
    "argmax": _best(np.argmax),
    "argmin": _best(np.argmin),
    "cumlogsumexp": _running(np.logaddexp),
    "cummax": _running(np.maximum),
    "cummin": _running(np.minimum),
    "cumprod": _running(np.multiply),
    "cumsum": _running(np.add),
    "reduce_and": _reduced(np.bitwise_and),
    "reduce_max": _reduced(np.maximum, 0),
    "reduce_min": _reduced(np.minimum, 1),
    "reduce_or": _reduced(np.bitwise_or),
    "reduce_prod": _reduced(np.multiply),
    "reduce_sum": _reduced(np.add),
    "scatter": _scatter(np.ndarray.__setitem__),
    "scatter-add": _scatter(np.add.at),
    "scatter-max": _scatter(np.maximum.at),
    "scatter-min": _scatter(np.minimum.at),
    "scatter-mul": _scatter(np.multiply.at),
}


@_rule("dot_general")
def _dot(equation: JaxprEqn, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    (over_x, over_y), (batch_x, batch_y) = equation.params["dimension_numbers"]

    def matrices(array: np.ndarray, batch: Any, over: Any) -> np.ndarray:
        free = [axis for axis in range(array.ndim) if axis not in (*batch, *over)]
        sizes = [prod(array.shape[axis] for axis in axes) for axes in (free, over)]
        whole = array.transpose(*batch, *free, *over)
        return whole.reshape(*whole.shape[: len(batch)], *sizes).astype(dtype)

    dtype = _type(equation.outvars[0]).dtype
    found = matrices(x, batch_x, over_x) @ matrices(y, batch_y, over_y).mT
    return found.reshape(_shape(equation))


# Matrices, by the functions of LAPACK that JAX calls on a CPU.


def _of_matrices(equation: JaxprEqn, function: Callable, *arrays: np.ndarray) -> list[np.ndarray]:
    """What a function returns for each matrix, or each pair of matrices, in arrays of them."""
    if not all(array.size for array in arrays):
        return [np.zeros(_type(each).shape) for each in equation.outvars]
    flat = [array.reshape(-1, *array.shape[-2:]) for array in arrays]
    each = [function(*pair) for pair in zip(*flat, strict=True)]
    batch = arrays[0].shape[:-2]
    return [np.stack(parts).reshape(*batch, *parts[0].shape) for parts in zip(*each, strict=True)]


@_rule("cholesky")
def _cholesky(equation: JaxprEqn, x: np.ndarray) -> list[np.ndarray]:
    (factor,) = get_lapack_funcs(("potrf",), (x,))

    def root(matrix: np.ndarray) -> list[np.ndarray]:
        found, failed = factor(matrix, lower=True, clean=True)
        return [np.full_like(found, np.nan) if failed else found]

    return _of_matrices(equation, root, x)


@_rule("triangular_solve")
def _triangular_solve(equation: JaxprEqn, a: np.ndarray, b: np.ndarray) -> list[np.ndarray]:
    setting = equation.params
    (solve,) = get_blas_funcs(("trsm",), (a, b))
    how = {"side": not setting["left_side"], "lower": setting["lower"]}
    how |= {"trans_a": setting["transpose_a"], "diag": setting["unit_diagonal"]}
    return _of_matrices(equation, lambda a, b: [solve(1.0, a, b, **how)], a, b)


@_rule("sort")
def _sort(equation: JaxprEqn, *parts: np.ndarray) -> list[np.ndarray]:
    axis, num_keys = equation.params["dimension"], equation.params["num_keys"]
    order = np.lexsort(parts[:num_keys][::-1], axis=axis)
    return [np.take_along_axis(part, order, axis) for part in parts]


@_rule("lu")
def _lu(equation: JaxprEqn, x: np.ndarray) -> list[np.ndarray]:
    (factor,) = get_lapack_funcs(("getrf",), (x,))

    def parts(matrix: np.ndarray) -> list[np.ndarray]:
        found, pivots, _ = factor(matrix)
        order = np.arange(len(matrix))
        for i, pivot in enumerate(pivots):
            order[[i, pivot]] = order[[pivot, i]]
        return [found, pivots, order]

    return _of_matrices(equation, parts, x)


# Random bits, as JAX's threefry generator makes them.


def _as_pairs(keys: np.ndarray) -> np.ndarray:
    """Keys as pairs of 32 bits, [..., 2]."""
    return np.ascontiguousarray(keys).reshape(keys.shape)[..., None].view(np.uint32)


def _as_keys(pairs: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(pairs).view(KEY)[..., 0]


def _hashed(keys: np.ndarray, number: np.ndarray) -> np.ndarray:
    """Pairs of 32 bits, [..., 2], by threefry of keys and of numbers of 64 bits."""
    first, second = np.moveaxis(_as_pairs(keys), -1, 0)
    schedule = [first, second, first ^ second ^ np.uint32(0x1BD11BDA)]
    x = (number >> np.uint64(32)).astype(np.uint32) + first
    y = number.astype(np.uint32) + second
    for i in range(5):
        for turn in ((13, 15, 26, 6), (17, 29, 16, 24))[i % 2]:
            x = x + y
            y = x ^ ((y << np.uint32(turn)) | (y >> np.uint32(32 - turn)))
        x, y = x + schedule[(i + 1) % 3], y + schedule[(i + 2) % 3] + np.uint32(i + 1)
    return np.stack([x, y], -1)


def _bits(keys: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Pairs of 32 bits, [*keys, *shape, 2]."""
    number = np.arange(prod(shape), dtype=np.uint64).reshape(shape)
    return _hashed(keys[(..., *[None] * len(shape))], number)


@_rule("random_seed")
def _seeded(equation: JaxprEqn, seed: np.ndarray) -> np.ndarray:
    wide = seed.astype(np.int64).view(np.uint64)
    high = wide >> np.uint64(32) if seed.dtype.itemsize == 8 else np.zeros_like(wide)
    return _as_keys(np.stack([high, wide], -1).astype(np.uint32))


@_rule("random_bits")
def _random_bits(equation: JaxprEqn, keys: np.ndarray) -> np.ndarray:
    width = equation.params["bit_width"]
    first, second = np.moveaxis(_bits(keys, equation.params["shape"]), -1, 0)
    if width == 64:
        return (first.astype(np.uint64) << np.uint64(32)) | second
    return (first ^ second).astype(f"u{width // 8}")


RULES |= {
    "random_fold_in": lambda e, keys, data: _as_keys(
        _hashed(keys, data.astype(np.uint32).astype(np.uint64))
    ),
    "random_split": lambda e, keys: _as_keys(_bits(keys, e.params["shape"])),
    "random_unwrap": lambda e, keys: _as_pairs(keys),
    "random_wrap": lambda e, data: _as_keys(data),
}
