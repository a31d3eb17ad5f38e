"""Traced code that NumPy runs gives what compiled code gives."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax, random
from jax.scipy import special
from jax.scipy.linalg import solve_triangular

from inference.program import interpreting
from inference.program.interpreting import interpreted

X = jnp.linspace(-1.7, 2.3, 12).reshape(3, 4)
P = jnp.exp(X)
I = jnp.arange(-6, 6).reshape(3, 4)  # noqa: E741
ODD = jnp.array([jnp.nan, jnp.inf, -jnp.inf, 0.0, -0.0, 1e10, -1e10, 2.5])
KEY = random.key(3)


def agree(function, *arguments):
    found = interpreted(function, *arguments)(*arguments)
    wanted = jax.jit(function)(*arguments)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        if jax.dtypes.issubdtype(other.dtype, jax.dtypes.prng_key):
            one, other = random.key_data(one), random.key_data(other)
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    "function",
    [
        jnp.sin, jnp.cos, jnp.tan, jnp.sinh, jnp.cosh, jnp.tanh, jnp.arctan, jnp.arcsinh, jnp.exp,
        jnp.exp2, jnp.expm1, jnp.abs, jnp.sign, jnp.floor, jnp.ceil, jnp.round, jnp.square,
        jnp.isfinite, jnp.isnan, jnp.cbrt, jnp.negative, jnp.logical_not, special.erf,
        special.erfc, special.expit, special.ndtr, jax.nn.softplus, jax.nn.softmax, special.i0e,
        special.gammaln, jnp.nan_to_num, partial(jnp.clip, min=-0.5, max=1.0),
        lambda x: x**3, lambda x: x**-2, lambda x: lax.round(x, lax.RoundingMethod.AWAY_FROM_ZERO),
        lambda x: x.astype(jnp.int32), lambda x: x.astype(jnp.uint8), lambda x: x.astype(bool),
    ],
)  # fmt: skip
def test_functions_of_an_entry(function):
    agree(function, X)
    agree(function, ODD)


@pytest.mark.parametrize(
    "function",
    [
        jnp.log, jnp.log1p, jnp.sqrt, lax.rsqrt, special.digamma, special.gammaln, special.logit,
        special.ndtri, lambda x: special.gammainc(x, x / 2), lambda x: special.gammaincc(x, 2 * x),
        lambda x: special.betainc(x, 2 * x, 0.3), lambda x: x**1.7, lambda x: jnp.arccosh(1 + x),
        lambda x: jnp.arcsin(x / 20), lambda x: jnp.arctanh(x / 20), jnp.cumsum, jnp.cumprod,
        lambda x: special.polygamma(1, x), lambda x: jnp.nextafter(x, 2 * x),
        lambda x: special.erfinv(x / 20), lambda x: special.log_ndtr(-x),
        jax.grad(lambda x: special.gammaln(x).sum() + jnp.log(x).sum()),
        jax.grad(lambda x: special.betainc(2.0, 3.0, x / 20).sum()),
    ],
)  # fmt: skip
def test_functions_of_positive_entries(function):
    agree(function, P)


@pytest.mark.parametrize(
    "function",
    [
        lambda i: i // 4, lambda i: i % 4, lambda i: lax.div(i, 4), lambda i: lax.rem(i, -4),
        lambda i: i << 2, lambda i: i >> 1, lambda i: lax.shift_right_logical(i, 3),
        lambda i: lax.shift_left(i, 40), lambda i: i & 3, lambda i: i | 8, lambda i: i ^ 5,
        lambda i: ~i, lambda i: i**2, jnp.sign, jnp.abs, jnp.sum, jnp.prod, jnp.cumsum,
        lambda i: i.astype(jnp.uint32), lambda i: i.astype(jnp.float32) / 3, lambda i: i > 2,
        lambda i: (i > 2) & (i < 4) | (i == 0), lambda i: (i > 0).sum(), lambda i: (i > 0).any(1),
        lambda i: jnp.minimum(i, 3), lambda i: jnp.where(i > 1, i, -i), lambda i: i / 7,
        lambda i: lax.bitcast_convert_type(i, jnp.float32), lambda i: lax.bitcast_convert_type(i, jnp.int16),
        lambda i: lax.bitcast_convert_type(i.astype(jnp.uint8), jnp.uint32), lambda i: lax.population_count(i),
    ],
)  # fmt: skip
def test_functions_of_integers(function):
    agree(function, I)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.sum(0), lambda x: x.sum((0, 1)), lambda x: x.mean(1), lambda x: x.max(1),
        lambda x: x.min(), lambda x: x[:0].max(0, initial=0), lambda x: x[:0].sum(), lambda x: x.prod(0), lambda x: x.argmax(0), lambda x: x.argmin(1),
        lambda x: x.argmax(), lambda x: jnp.cumsum(x, 1), lambda x: lax.cumsum(x, 0, True),
        lambda x: lax.cummax(x, 1), lambda x: lax.cummin(x, 1), lambda x: lax.cumlogsumexp(x, 1),
        jax.nn.logsumexp, lambda x: x.T, lambda x: x[::-1], lambda x: x[1:, ::2], jnp.ravel,
        lambda x: x[:, None] + jnp.zeros((1, 1, 4)), lambda x: jnp.pad(x, ((1, 2), (0, 1))),
        lambda x: lax.pad(x, 7.0, ((-1, 2, 1), (1, -2, 2))), lambda x: jnp.stack([x, x], 1),
        lambda x: jnp.concatenate([x, x[:1]]), lambda x: jnp.split(x, 2, 1), jnp.unstack,
        lambda x: jnp.tile(x, (2, 1)), lambda x: jnp.repeat(x, 2, 0), lambda x: x @ x.T,
        lambda x: jnp.einsum("ij,kj->ik", x, x), lambda x: jnp.einsum("ij,ij->i", x, x),
        lambda x: jnp.tensordot(x, x, 2), lambda x: jnp.roll(x, 1, 0), lambda x: jnp.sort(x, 1),
        lambda x: jnp.argsort(-x, 1), jnp.diag, lambda x: jnp.tril(x), lambda x: jnp.eye(3) @ x,
        lambda x: jnp.linalg.cholesky(x @ x.T + jnp.eye(3)), lambda x: lax.top_k(x, 2),
        lambda x: jnp.linalg.solve(x @ x.T + jnp.eye(3), x), lambda x: jnp.median(x, 0),
        lambda x: jnp.linalg.slogdet(x @ x.T + jnp.eye(3)), lambda x: jnp.linalg.inv(x[:, :3]),
        lambda x: jnp.searchsorted(jnp.sort(x[0]), x[1]), lambda x: jnp.select([x > 1, x > 0], [x, 2 * x]),
        lambda x: lax.select_n((x > 0).astype(int) + (x > 1).astype(int), x, 2 * x, 3 * x), jnp.linalg.norm,
        lambda x: lax.clamp(-0.2, x, 0.7), lambda x: jnp.arange(5.0) * x[0, 0], lambda x: x.var(0),
    ],
)  # fmt: skip
def test_arrays(function):
    agree(function, X)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, i: x[i], lambda x, i: x[:, i], lambda x, i: x[i, i], lambda x, i: x[i, 1:3],
        lambda x, i: x.at[i].get(mode="fill"), lambda x, i: x.at[i].get(mode="clip"),
        lambda x, i: x.at[i].set(1.0), lambda x, i: x.at[i].add(1.0), lambda x, i: x.at[i, i].max(1),
        lambda x, i: x.at[:, i].min(0.0), lambda x, i: x.at[i, 1:3].multiply(2.0),
        lambda x, i: x.at[i].set(1.0, mode="clip"), lambda x, i: x[0, i[0]].at[...].add(1.0), lambda x, i: x.at[i[0]].set(x[0]),
        lambda x, i: x.at[i].add(x[:2] if len(i) == 2 else x[0], mode="drop"),
        lambda x, i: lax.dynamic_slice(x, (i[0], i[-1]), (2, 2)), lambda x, i: x[i[0], i[-1]],
        lambda x, i: lax.dynamic_update_slice(x, x[:2, :2], (i[0], i[-1])),
        lambda x, i: jax.vmap(lambda row, at: row[at], (0, None))(x, i),
        lambda x, i: jax.vmap(lambda row, at: row[at])(x[: len(i)], i),
        lambda x, i: jax.vmap(lambda row, at: row.at[at].set(9.0))(x[: len(i)], i),
        lambda x, i: jax.vmap(lambda r, at: lax.dynamic_slice(r, (at,), (2,)))(x[: len(i)], i),
        lambda x, i: jnp.take_along_axis(x, i[None].repeat(3, 0), 1), lambda x, i: jnp.bincount(i, length=4),
        lambda x, i: x[i, None, :], lambda x, i: x[jnp.stack([i, i])], lambda x, i: jnp.take(x, i, 1),
        jax.grad(lambda x, i: (x[i] ** 2).sum()), lambda x, i: jax.ops.segment_sum(x[: len(i)], i, 4),
    ],
)  # fmt: skip
@pytest.mark.parametrize("indices", [[2, 0], [1, -1], [2, 5], [-9, 1], [1, 1]])
def test_indices(function, indices):
    agree(function, X, jnp.array(indices))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: lax.scan(lambda c, row: (c + row.sum(), (c, row)), 0.0, x),
        lambda x: lax.scan(lambda c, row: (c + row.sum(), row[0]), 0.0, x, reverse=True),
        lambda x: lax.scan(lambda c, _: (c * 2, None), x, length=3),
        lambda x: lax.scan(lambda c, row: (c, row), 0.0, x[:0]), lambda x: lax.map(jnp.sum, x),
        lambda x: lax.map(lambda row: row * 2, x, batch_size=2),
        lambda x: lax.while_loop(lambda c: c.sum() < 40, lambda c: c + 1, x),
        lambda x: lax.fori_loop(0, 4, lambda i, c: c.at[0, i].add(i), x),
        lambda x: lax.cond(x[0, 0] > 0, lambda: x, lambda: 2 * x),
        lambda x: jax.vmap(lambda row: lax.cond(row[0] > 0, jnp.sum, jnp.max, row))(x),
        lambda x: lax.switch(jnp.array(7), [lambda: x, lambda: 2 * x, lambda: 3 * x]),
        jax.jit(lambda x: x + 1), jax.checkpoint(jnp.sin), jax.nn.relu, jax.jacfwd(jnp.sin),
        lambda x: jax.hessian(lambda v: (v**3).sum())(x[0]), jax.nn.gelu,
        jax.grad(lambda x: lax.scan(lambda c, row: (c * row, None), x[0], x)[0].sum()),
    ],
)  # fmt: skip
def test_loops_and_branches(function):
    agree(function, X)


@pytest.mark.parametrize(
    "function",
    [
        lambda key: random.split(key, 5), lambda key: random.split(key, (2, 3))[1, ::2],
        lambda key: random.fold_in(key, 7), lambda key: random.key(jnp.array(-5)),
        lambda key: random.uniform(key, (7,)), lambda key: random.normal(key, (3, 5)),
        lambda key: random.bits(key, (6,), jnp.uint8), lambda key: random.bits(key, ()),
        lambda key: random.randint(key, (20,), -3, 9), lambda key: random.permutation(key, 11),
        lambda key: random.categorical(key, X), lambda key: random.bernoulli(key, 0.3, (9,)),
        lambda key: random.choice(key, X[0], (4,), p=jnp.array([0.1, 0.2, 0.3, 0.4])),
        lambda key: random.exponential(key, (4,)), lambda key: random.dirichlet(key, P),
        lambda key: random.gamma(key, P), lambda key: random.cauchy(key), random.key_data,
        lambda key: random.wrap_key_data(random.key_data(key)), random.rademacher,
        lambda key: jnp.where(X[0] > 0, random.split(key, 4), random.split(key, 4)[::-1]),
        lambda key: jax.vmap(lambda k: random.uniform(k, (2,)))(random.split(key, 3)),
        lambda key: lax.scan(lambda k, _: (random.split(k)[0], random.normal(k)), key, length=4),
        lambda key: jax.vmap(random.fold_in, (None, 0))(key, jnp.arange(3)),
        lambda key: random.multivariate_normal(key, jnp.zeros(3), jnp.eye(3)),
    ],
)  # fmt: skip
def test_random_numbers(function):
    agree(function, KEY)


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b: jnp.linalg.cholesky(a), lambda a, b: jnp.linalg.cholesky(-a),
        lambda a, b: jnp.linalg.cholesky(a + b, symmetrize_input=False), jnp.linalg.solve,
        partial(solve_triangular, lower=True), partial(solve_triangular, trans="T"),
        partial(solve_triangular, lower=True, unit_diagonal=True), lambda a, b: jnp.linalg.det(a),
        lambda a, b: lax.linalg.triangular_solve(a, b, lower=True, transpose_a=True),
        lambda a, b: jnp.linalg.eigvalsh(a), lambda a, b: lax.linalg.lu(b), lambda a, b: jnp.linalg.cholesky(a[:0]),
        lambda a, b: jnp.stack(jnp.tril_indices(4)), lambda a, b: lax.optimization_barrier((a, b)),
    ],
)  # fmt: skip
def test_matrices(function):
    b = random.normal(KEY, (2, 3, 3))
    agree(function, b @ b.mT + jnp.eye(3)[None], b)


def test_double_precision():
    with jax.enable_x64(True):
        agree(lambda x: (jnp.log(x), x.astype(int), x @ x.T), np.linspace(1, 2, 6).reshape(2, 3))
        agree(lambda key: (random.normal(key, (4,)), random.bits(key, (3,), jnp.uint64)), KEY)


def test_constants_and_trees():
    known = np.arange(3.0)
    agree(lambda tree: {"sum": tree["a"] + known, "same": tree["b"]}, {"a": X[:, 0], "b": (1, 2.5)})


def test_only_what_is_wanted_runs():
    def never(x):
        raise AssertionError

    unwanted = lambda x: jax.pure_callback(never, jax.ShapeDtypeStruct((), jnp.float32), x)
    assert interpreted(lambda x: (unwanted(x), x + 1)[1], 1.0)(1.0) == 2


def test_in_traced_code_the_function_itself():
    found = jax.jit(lambda x: interpreted(jnp.sin, x)(x))(X)
    np.testing.assert_allclose(found, jnp.sin(X), rtol=1e-6)


@pytest.mark.parametrize(("name", "value"), [("MOST", 1), ("ENTRIES", 1e-5)])
def test_many_operations_and_large_arrays_are_compiled(name, value, monkeypatch):
    compiled = []
    monkeypatch.setattr(interpreting, "once", lambda function, *_: compiled.append(1) or function)
    half_of_squares = lambda x: x * x / 2
    interpreted(half_of_squares, np.ones(10))
    assert not compiled
    monkeypatch.setattr(interpreting, name, value)
    interpreted(half_of_squares, np.ones(10))
    assert compiled
