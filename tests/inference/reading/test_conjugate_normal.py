"""The normal families against SciPy, their draws, and what float32 costs them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
import scipy.integrate
import scipy.special
import scipy.stats
from jax import lax, random
from jax.scipy.special import gammaln

from inference.reading.conjugate.normal import NormalHyper, WishartHyper
from inference.reading.conjugate.pairs import log_rising
from inference.reading.conjugate.table import (
    NormalInverseGamma,
    NormalInverseWishart,
    NormalWishart,
)
from tests.inference.families import (
    COLUMNS,
    FEATURES,
    INVERSE_WISHART,
    NORMAL,
    WISHART,
    assert_close,
    call,
    hyper_of,
    name_of,
    repeat,
)

MATRIX_CASES = [WISHART, INVERSE_WISHART]
FIELDS = NormalHyper._fields


def student_t(hyper):
    """SciPy's predictive of each column [columns]."""
    m, kappa, a, b = map(np.asarray, hyper)
    return scipy.stats.t(2 * a, m, np.sqrt(b * (kappa + 1) / (a * kappa)))


def multivariate_t(hyper, column):
    m, kappa, nu, rate = (np.asarray(leaf[column]) for leaf in hyper)
    freedom = nu - len(m) + 1
    return scipy.stats.multivariate_t(m, rate * (kappa + 1) / (kappa * freedom), freedom)


@pytest.mark.usefixtures("x64")
def test_predictive_is_student_t():
    hyper = hyper_of(NORMAL, ())
    x = np.random.default_rng(0).normal(size=COLUMNS) * 5
    family = NormalInverseGamma()
    found = call(family, "log_predictive", hyper, x)
    assert_close(found, student_t(hyper).logpdf(x))
    density = jax.jit(lambda x: jnp.exp(family.log_predictive(hyper, jnp.full(COLUMNS, x))[0]))
    total, _ = scipy.integrate.quad(lambda x: float(density(x)), -np.inf, np.inf)
    assert abs(total - 1) < 1e-7
    with pytest.raises(AssertionError):
        assert_close(
            found, student_t(hyper._replace(concentration=hyper.concentration - 0.1)).logpdf(x)
        )


@pytest.mark.parametrize("case", MATRIX_CASES, ids=name_of)
@pytest.mark.usefixtures("x64")
def test_predictive_is_multivariate_t(case):
    hyper = hyper_of(case, ())
    x = np.random.default_rng(0).normal(size=(COLUMNS, FEATURES)) * 3
    found = call(case.family, "log_predictive", hyper, x)
    assert_close(
        found,
        np.array([multivariate_t(hyper, column).logpdf(x[column]) for column in range(COLUMNS)]),
    )
    fewer = hyper._replace(concentration=hyper.concentration - 1)
    with pytest.raises(AssertionError):
        assert_close(
            found,
            np.array(
                [multivariate_t(fewer, column).logpdf(x[column]) for column in range(COLUMNS)]
            ),
        )


@pytest.mark.usefixtures("x64")
def test_one_feature_is_the_scalar_family():
    """Wishart of one feature: nu = 2 a, rate = 2 b."""
    scalar = hyper_of(NORMAL)
    matrix = WishartHyper(
        scalar.loc[..., None],
        scalar.kappa,
        2 * scalar.concentration,
        2 * scalar.rate[..., None, None],
    )
    for x in (0.3, -2.0, 7.0):
        x = np.full(COLUMNS, x)
        wanted = call(NormalInverseGamma(), "log_predictive", scalar, x)
        assert_close(call(NormalWishart(), "log_predictive", matrix, x[:, None]), wanted)
        scalar, matrix = (
            call(NormalInverseGamma(), "add", scalar, x),
            call(NormalWishart(), "add", matrix, x[:, None]),
        )


@pytest.mark.parametrize("argument", ["rate_matrix", "scale_matrix", "scale_tril"])
@pytest.mark.usefixtures("x64", "numpyro_promotion")
def test_read_takes_every_argument_of_the_wishart(argument):
    hyper = jax.tree.map(np.asarray, hyper_of(WISHART, ()))
    precision, loc = map(np.asarray, call(NormalWishart(), "draw", random.key(0), hyper))
    scale = np.linalg.inv(hyper.rate)
    given = {
        "rate_matrix": hyper.rate,
        "scale_matrix": scale,
        "scale_tril": np.linalg.cholesky(scale),
    }[argument]
    covariance = np.linalg.inv(hyper.kappa[:, None, None] * precision)
    other = {
        "rate_matrix": "covariance_matrix",
        "scale_matrix": "covariance_matrix",
        "scale_tril": "scale_tril",
    }[argument]
    moment = np.linalg.cholesky(covariance) if other == "scale_tril" else covariance

    @jax.jit
    def read(loc, moment, concentration, given, values):
        normal = dist.MultivariateNormal(loc, **{other: moment})
        return NormalWishart().read(
            (dist.Wishart(concentration, **{argument: given}), normal), values
        )

    assert_close(read(hyper.loc, moment, hyper.concentration, given, (precision, loc)), hyper)


def pivots_normal(hyper, values):
    """Functions of the draws whose laws do not depend on the hyper-parameters, if these are
    right.
    """
    (variance, value), (m, kappa, a, b) = values, hyper
    yield 2 * b / variance, scipy.stats.chi2(2 * a)
    yield (value - m) * np.sqrt(kappa / variance), scipy.stats.norm()


def pivots_matrix(hyper, values, is_covariance):
    (matrix, value), (m, kappa, nu, rate) = values, hyper
    precision = np.linalg.inv(matrix) if is_covariance else matrix
    yield np.einsum("ij,nji->n", rate, precision), scipy.stats.chi2(nu * FEATURES)
    for i in range(FEATURES):  # the covariance of one feature, of two, of three
        block, covariance = rate[: i + 1, : i + 1], np.linalg.inv(precision)[:, : i + 1, : i + 1]
        yield (
            np.linalg.inv(covariance)[:, i, i] / np.linalg.inv(block)[i, i],
            scipy.stats.chi2(nu - FEATURES + i + 1),
        )
    whitened = np.einsum("nji,nj->ni", np.linalg.cholesky(precision), value - m) * np.sqrt(kappa)
    for i in range(FEATURES):
        yield whitened[:, i], scipy.stats.norm()


def pivots_of(case, hyper, values):
    """For the first column."""
    hyper, values = (
        [np.asarray(leaf)[0] for leaf in hyper],
        [np.asarray(leaf)[:, 0] for leaf in values],
    )
    return (
        pivots_normal(hyper, values)
        if case is NORMAL
        else pivots_matrix(hyper, values, case is INVERSE_WISHART)
    )


def least_p(pivots):
    return min(scipy.stats.kstest(sample, law.cdf).pvalue for sample, law in pivots)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("case", [NORMAL, *MATRIX_CASES], ids=name_of)
@pytest.mark.usefixtures("x64")
def test_draws_have_the_posteriors_law(case):
    """And not that of hyper-parameters of which one is a fifth larger."""
    hyper = hyper_of(case, ())
    values = call(case.family, "draw", random.key(0), repeat(hyper, 8000))
    assert least_p(pivots_of(case, hyper, values)) > 1e-3
    for field in FIELDS:
        wrong = hyper._replace(**{field: 1.2 * getattr(hyper, field)})
        assert least_p(pivots_of(case, wrong, values)) < 1e-3, field


def row_pivots(case, hyper, rows):
    """The rows of the first column, whitened: each feature is a t, the square of the length an
    F.
    """
    m, kappa, nu, rate = (np.asarray(leaf)[0] for leaf in hyper)
    if case is NORMAL:
        yield rows[:, 0], scipy.stats.t(2 * nu, m, np.sqrt(rate * (kappa + 1) / (nu * kappa)))
        return
    freedom = nu - FEATURES + 1
    root = np.linalg.cholesky(rate * (kappa + 1) / (kappa * freedom))
    whitened = np.linalg.solve(root, (rows[:, 0] - m)[..., None])[..., 0]
    yield (whitened**2).sum(-1) / FEATURES, scipy.stats.f(FEATURES, freedom)
    for i in range(FEATURES):
        yield whitened[:, i], scipy.stats.t(freedom)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("case", [NORMAL, *MATRIX_CASES], ids=name_of)
@pytest.mark.usefixtures("x64")
def test_rows_have_the_predictives_law(case):
    hyper = hyper_of(case, ())
    rows = np.asarray(call(case.family, "draw_row", random.key(0), repeat(hyper, 8000)))
    assert least_p(row_pivots(case, hyper, rows)) > 1e-3
    for wrong in (hyper._replace(rate=1.2 * hyper.rate), hyper._replace(loc=1.2 * hyper.loc)):
        assert least_p(row_pivots(case, wrong, rows)) < 1e-3
    assert_close(call(case.family, "mean_row", hyper), hyper.loc)


def test_a_row_that_is_partly_missing():
    """The host refuses it; past the host it is NaN and not a number that is wrong."""
    rows = np.ones((5, 1, FEATURES))
    rows[1] = np.nan
    for family in (NormalWishart(), NormalInverseWishart()):
        family.refuse("x", rows)
        rows[3, 0, 1] = np.nan
        message = (
            "site 'x': row 3 misses 1 of 3 features and MultivariateNormal couples them; use "
            "normal_inverse_chi2, or drop the row."
        )
        with pytest.raises(ValueError, match=message):
            family.refuse("x", rows)
        rows[3, 0, 1] = 1.0
    with pytest.raises(ValueError, match="row 2, column 1 misses 2 of 3 features"):
        NormalWishart().refuse("x", np.where(np.arange(18.0).reshape(3, 2, 3) > 15, np.nan, 1.0))
    rows[4, 0, 2] = np.inf
    with pytest.raises(ValueError, match="site 'x': row 4, column 0, feature 2 is inf"):
        NormalWishart().refuse("x", rows)
    hyper = hyper_of(WISHART)
    row = np.ones((COLUMNS, FEATURES), np.float32)
    row[1, 0] = np.nan
    broken = np.asarray(call(NormalWishart(), "log_predictive", hyper, row))
    assert np.isnan(broken[..., 1]).all()
    assert np.isfinite(broken[..., 0]).all()


@partial(jax.jit, static_argnums=(0, 3))
def after_rows(family, hyper, rows, method="add"):
    return lax.scan(lambda hyper, x: (getattr(family, method)(hyper, x), None), hyper, rows)[0]


def raw_sums(hyper, rows):
    """The posterior from running sums of x and x^2."""
    running = lambda terms: jnp.asarray(np.cumsum(np.asarray(terms), axis=0)[-1])
    n, total, square = len(rows), running(rows), running(rows**2)
    kappa = hyper.kappa + n
    m = (hyper.kappa * hyper.loc + total) / kappa
    rate = hyper.rate + (square + hyper.kappa * hyper.loc**2 - kappa * m**2) / 2
    return NormalHyper(m, kappa, hyper.concentration + n / 2, rate)


PRIOR = NormalHyper(1e3, 0.1, 1.0, 1.0)


def prior_of(dtype, size=20, **changes):
    return NormalHyper(*(jnp.full(size, value, dtype) for value in PRIOR._replace(**changes)))


@pytest.mark.usefixtures("x64")
def test_float32_far_from_zero():
    """1e4 rows of mean 1e3 and standard deviation 1: the figures of the module's docstring."""
    family, rows = NormalInverseGamma(), 1e3 + np.random.default_rng(0).normal(size=(10_000, 20))
    x = rows[0]
    exact = after_rows(family, prior_of("float64"), jnp.asarray(rows))
    found = after_rows(family, prior_of("float32"), jnp.asarray(rows, "float32"))
    assert_close(exact, raw_sums(prior_of("float64"), jnp.asarray(rows)), 1e-6, 1e-6)
    assert np.max(np.abs(np.asarray(found.loc, float) - exact.loc)) < 5e-3
    gap = lambda hyper: np.max(
        np.abs(np.asarray(family.log_predictive(hyper, x), float) - family.log_predictive(exact, x))
    )
    assert gap(found) < 1e-2
    # NaN, of a negative rate
    assert not gap(raw_sums(prior_of("float32"), jnp.asarray(rows, "float32"))) < 0.5


@pytest.mark.usefixtures("x64")
def test_float32_far_from_zero_with_features():
    rng = np.random.default_rng(0)
    rows = (
        1e3
        + rng.normal(size=(10_000, 1, FEATURES))
        @ np.array([[1.0, 0.0, 0.0], [0.5, 1.0, 0.0], [0.2, 0.7, 0.5]]).T
    )
    prior = WishartHyper(
        jnp.full((1, FEATURES), 1e3), jnp.full(1, 0.1), jnp.full(1, 4.0), jnp.eye(FEATURES)[None]
    )
    exact = after_rows(NormalWishart(), prior, jnp.asarray(rows))
    found = after_rows(
        NormalWishart(),
        jax.tree.map(lambda leaf: leaf.astype("float32"), prior),
        jnp.asarray(rows, "float32"),
    )
    centred = rows[:, 0] - rows[:, 0].mean(0)
    shift = 10_000 * 0.1 / 10_000.1 * np.outer(rows[:, 0].mean(0) - 1e3, rows[:, 0].mean(0) - 1e3)
    assert_close(exact.rate[0], np.eye(FEATURES) + centred.T @ centred + shift, 1e-7)
    assert_close(found.rate, np.asarray(exact.rate), 1e-3)
    gap = np.asarray(
        NormalWishart().log_predictive(found, rows[0]), float
    ) - NormalWishart().log_predictive(exact, rows[0])
    assert np.max(np.abs(gap)) < 2e-2


@pytest.mark.usefixtures("x64")
def test_drift_of_removing_and_adding():
    """1000 sweeps over a group of 100: the figures of the module's docstring; float64 drifts by
    nothing that matters.
    """
    noise = np.random.default_rng(0).normal(size=(100, 20))

    @partial(jax.jit, static_argnums=2)
    def sweeps(hyper, rows, num_sweeps):
        one = lambda hyper, x: (
            NormalInverseGamma().add(NormalInverseGamma().remove(hyper, x), x),
            None,
        )
        return lax.fori_loop(0, num_sweeps, lambda _, hyper: lax.scan(one, hyper, rows)[0], hyper)

    for dtype, m, drift in (("float32", 0.0, 0.05), ("float32", 1e3, 1.0), ("float64", 1e3, 1e-8)):
        rows = jnp.asarray(m + noise, dtype)
        before = after_rows(NormalInverseGamma(), prior_of(dtype, loc=m), rows)
        after = sweeps(before, rows, 1000)
        assert np.max(np.abs(after.rate - before.rate)) < drift
        assert_close(after._replace(rate=before.rate), before, 1e-6, 1e-6)


@pytest.mark.usefixtures("x64")
def test_an_emptied_group_is_not_the_prior():
    """So a sampler starts it afresh; float64 could do without."""
    rows = 1e3 + np.random.default_rng(0).normal(size=(100, 20))
    gaps = {}
    for dtype in ("float32", "float64"):
        full = after_rows(NormalInverseGamma(), prior_of(dtype), jnp.asarray(rows, dtype))
        empty = after_rows(NormalInverseGamma(), full, jnp.asarray(rows, dtype), "remove")
        gaps[dtype] = np.max(np.abs(empty.loc - prior_of(dtype).loc))
    assert 0.05 < gaps["float32"] < 2.0
    assert gaps["float64"] < 1e-8


@pytest.mark.usefixtures("x64")
def test_an_outlier_that_was_removed_leaves_its_rounding():
    family, noise = NormalInverseGamma(), np.random.default_rng(0).normal(size=200)
    off = lambda dtype, k: np.max(
        np.abs(
            family.remove(family.add(prior_of(dtype, 200, loc=0.0), k * noise), k * noise).rate
            - prior_of(dtype, 200).rate
        )
    )
    assert off("float32", 1e2) < 0.1
    assert off("float32", 1e4) > 1.0  # more than the prior's rate
    assert off("float64", 1e4) < 1e-6


@pytest.mark.parametrize("x", [0.0, 0.5, 1.0, 30.0])
@pytest.mark.usefixtures("x64")
def test_log_rising(x):
    """Against lgamma, and in float32 where the difference of two lgamma has lost its digits."""
    a = np.geomspace(1e-3, 1e3, 200)
    assert_close(
        log_rising(jnp.asarray(a), x),
        scipy.special.gammaln(a + x) - scipy.special.gammaln(a),
        1e-10,
        1e-10,
    )
    large = np.float32(1e5) + np.arange(50, dtype="float32")
    wanted = np.log(scipy.special.poch(large.astype(float), x))
    off = lambda found: np.max(np.abs(np.asarray(found, float) - wanted))
    assert off(log_rising(jnp.asarray(large), x)) < 1e-5 * (1 + 10 * x)
    if x:
        assert off(gammaln(jnp.asarray(large + np.float32(x))) - gammaln(jnp.asarray(large))) > 1e-2
