"""Every conjugate pair against NumPyro's own densities by one identity, and what holds of all of
them.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy.stats
from jax import random

from inference.program.sites import StructureError, unwrap
from inference.reading.conjugate.normal import NormalHyper
from inference.reading.conjugate.table import (
    TABLE,
    BetaBernoulli,
    BetaHyper,
    DirichletCategorical,
    DirichletHyper,
    GammaHyper,
    GammaPoisson,
    NormalInverseGamma,
    NormalWishart,
    pair_of,
)
from tests.inference.families import (
    BETA,
    CASES,
    CODES,
    COLUMNS,
    COUNTS,
    DIRICHLET,
    GAMMA,
    INVERSE_WISHART,
    NORMAL,
    WISHART,
    assert_close,
    call,
    hyper_of,
    name_of,
    repeat,
    row_of,
)

LEADS = ((2, 5), ())
each_case = pytest.mark.parametrize("case", CASES, ids=name_of)


def log_pmf(case, hyper, num_codes):
    """Log probability of every count from 0 [num_codes, columns]."""
    rows = np.broadcast_to(np.arange(float(num_codes))[:, None], (num_codes, COLUMNS))
    return np.asarray(call(case.family, "log_predictive", repeat(hyper, num_codes), rows))


def log_prob(make, value):
    """NumPyro's own, which promotes."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        distribution = make()
        return distribution.log_prob(
            value.astype(int) if distribution.support.is_discrete else value
        )


def identity_gap(case, family, seed):
    """How far log p(phi | h) + log p(x | phi) - log p(phi | add(h, x)) is from log p(x | h), for
    random phi.
    """
    hyper, x = hyper_of(case, seed=seed), row_of(case, seed=seed)
    values = call(case.family, "draw", random.key(seed + 100), hyper)
    return np.max(np.abs(gaps(case, family, hyper, x, values)))


@partial(jax.jit, static_argnums=(0, 1))
def gaps(case, family, hyper, x, values):
    likelihood = log_prob(lambda: case.likelihood(values), x)
    left = (
        family.log_prior(hyper, values)
        + likelihood
        - family.log_prior(family.add(hyper, x), values)
    )
    return left - family.log_predictive(hyper, x)


@each_case
@pytest.mark.usefixtures("x64")
def test_prior_times_likelihood_is_posterior_times_predictive(case):
    assert max(identity_gap(case, case.family, seed) for seed in range(4)) < 1e-9


def twin(case, **methods):
    return type("Twin", (type(case.family),), methods)()


def add_and(edit):
    """`add` whose result is edited, given what was before."""
    return {
        "add": lambda self, hyper, x, weight=1.0: edit(
            hyper, super(type(self), self).add(hyper, x, weight)
        )
    }


def predict_at(edit):
    """`log_predictive` at edited hyper-parameters."""
    return {
        "log_predictive": lambda self, hyper, x: super(type(self), self).log_predictive(
            edit(hyper), x
        )
    }


def prior_plus(edit):
    """`log_prior` and a term."""
    return {
        "log_prior": lambda self, hyper, values: (
            super(type(self), self).log_prior(hyper, values) + edit(hyper, values)
        )
    }


def full_square(self, hyper, x, weight=1.0):
    after = NormalInverseGamma().add(hyper, x, weight)
    return after._replace(
        rate=hyper.rate + (jnp.broadcast_to(x, hyper.loc.shape) - hyper.loc) ** 2 / 2
    )


half_log_det = lambda matrix: jnp.linalg.slogdet(matrix).logabsdet / 2
TWINS = {
    "zeros are not counted": (
        BETA,
        add_and(lambda h, after: after._replace(concentration0=h.concentration0)),
    ),
    "one row too many in the Beta predictive": (
        BETA,
        predict_at(lambda h: h._replace(concentration1=h.concentration1 + 1)),
    ),
    "no normaliser of the Beta": (BETA, prior_plus(lambda h, v: jnp.log(sum(h)))),
    "no normaliser of the Dirichlet": (
        DIRICHLET,
        prior_plus(lambda h, v: jnp.log(h.concentration.sum(-1))),
    ),
    "codes count half": (
        DIRICHLET,
        add_and(lambda h, after: DirichletHyper((h.concentration + after.concentration) / 2)),
    ),
    "rows do not count in the rate": (GAMMA, add_and(lambda h, after: after._replace(rate=h.rate))),
    "rate of one row more in the negative binomial": (
        GAMMA,
        predict_at(lambda h: h._replace(rate=h.rate + 1)),
    ),
    "kappa + 1 forgotten": (NORMAL, add_and(lambda h, after: after._replace(kappa=h.kappa))),
    "a + 1/2 forgotten": (
        NORMAL,
        add_and(lambda h, after: after._replace(concentration=h.concentration)),
    ),
    "kappa / (kappa + 1) forgotten": (NORMAL, {"add": full_square}),
    "too few degrees of freedom": (
        NORMAL,
        predict_at(lambda h: h._replace(concentration=h.concentration - 0.4)),
    ),
    "no spread of loc in the predictive": (
        NORMAL,
        predict_at(lambda h: h._replace(kappa=1e9 * h.kappa)),
    ),
    "no normaliser of loc": (NORMAL, prior_plus(lambda h, v: jnp.log(v[0] / h.kappa) / 2)),
    "nu + 1 forgotten": (
        WISHART,
        add_and(lambda h, after: after._replace(concentration=h.concentration)),
    ),
    "nu - D degrees of freedom": (
        WISHART,
        predict_at(lambda h: h._replace(concentration=h.concentration - 1)),
    ),
    "the multivariate kappa + 1 forgotten": (
        WISHART,
        add_and(lambda h, after: after._replace(kappa=h.kappa)),
    ),
    "features are independent": (
        WISHART,
        add_and(lambda h, after: after._replace(rate=after.rate * np.eye(3)[None, None, None])),
    ),
    "no determinant of loc": (WISHART, prior_plus(lambda h, v: -half_log_det(h.rate))),
    "nu + 1 of the covariance forgotten": (
        INVERSE_WISHART,
        add_and(lambda h, after: after._replace(concentration=h.concentration)),
    ),
    "covariance taken for precision": (INVERSE_WISHART, {"log_prior": NormalWishart.log_prior}),
}


@pytest.mark.slow_after(4)
@pytest.mark.parametrize("name", TWINS)
@pytest.mark.usefixtures("x64")
def test_the_identity_refuses(name):
    case, methods = TWINS[name]
    assert identity_gap(case, twin(case), 0) < 1e-9
    assert max(identity_gap(case, twin(case, **methods), seed) for seed in range(4)) > 1e-2


@each_case
@pytest.mark.usefixtures("x64")
def test_log_prior_is_numpyros(case):
    """The identity does not see a factor that the prior and the posterior share."""
    hyper = hyper_of(case)
    values = call(case.family, "draw", random.key(0), hyper)
    density = jax.jit(
        lambda values: sum(
            log_prob(lambda i=i: case.priors(hyper, values)[i], value)
            for i, value in enumerate(values)
        )
    )
    assert_close(call(case.family, "log_prior", hyper, values), density(values))


@each_case
@pytest.mark.usefixtures("x64", "numpyro_promotion")
def test_read_inverts_the_priors(case):
    hyper = hyper_of(case)
    values = call(case.family, "draw", random.key(0), hyper)
    found = jax.jit(lambda hyper, values: case.family.read(case.priors(hyper, values), values))(
        hyper, values
    )
    assert_close(found, hyper)


@pytest.mark.usefixtures("x64", "numpyro_promotion")
def test_read_spreads_numbers_over_the_plates():
    """As the priors stand in a trace, under plates."""

    def model():
        with (
            numpyro.plate("class", 2, dim=-3),
            numpyro.plate("group", 5, dim=-2),
            numpyro.plate("feature", COLUMNS, dim=-1),
        ):
            p = numpyro.sample("p", dist.Beta(0.5, jnp.array([1.0, 2.0, 3.0])))
            rate = numpyro.sample("rate", dist.Gamma(2.0))
            variance = numpyro.sample("variance", dist.InverseGamma(2.0, 3.0))
            loc = numpyro.sample("loc", dist.Normal(1.0, jnp.sqrt(variance / 0.1)))
            weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(CODES)))
            return p, rate, variance, loc, weights

    spread = lambda *numbers: [np.broadcast_to(number, (2, 5, COLUMNS)) for number in numbers]

    @jax.jit
    def found(key):
        trace = numpyro.handlers.trace(numpyro.handlers.seed(model, key)).get_trace()

        def read(family, *sites):
            return family.read(
                tuple(unwrap(trace[site]["fn"]) for site in sites),
                tuple(trace[site]["value"] for site in sites),
            )

        of_normal = read(NormalInverseGamma(), "variance", "loc")
        return (
            read(BetaBernoulli(), "p"),
            read(GammaPoisson(), "rate"),
            of_normal,
            read(DirichletCategorical(), "weights"),
        )

    beta, gamma, normal, dirichlet = found(random.key(0))
    assert_close(beta, BetaHyper(*spread(0.5, [1.0, 2.0, 3.0])))
    assert_close(gamma, GammaHyper(*spread(2.0, 1.0)))
    assert_close(normal, NormalHyper(*spread(1.0, 0.1, 2.0, 3.0)))
    assert_close(dirichlet, DirichletHyper(np.ones((2, 5, COLUMNS, CODES))))


@partial(jax.jit, static_argnums=0)
def call_everything(family, hyper, x):
    values, cache = family.draw(random.key(0), hyper), family.cache(hyper)
    terms, row = family.log_predictive(hyper, x), family.draw_row(random.key(1), hyper)
    changed = values, family.add(hyper, x), family.remove(hyper, x)
    return (
        terms,
        family.score(cache, x),
        cache,
        row,
        (changed, family.log_prior(hyper, values), family.mean_row(hyper)),
    )


@pytest.mark.slow_after(len(CASES))
@each_case
@pytest.mark.parametrize("lead", LEADS, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.usefixtures("x64")
def test_score_sums_the_predictive_in_the_dtype_of_the_hyper_parameters(case, lead, dtype):
    family, hyper, x = case.family, hyper_of(case, lead, dtype), np.array(row_of(case))
    x[1] = np.nan
    terms, score, cache, row, everything = call_everything(family, hyper, x)
    assert {
        str(leaf.dtype) for leaf in jax.tree.leaves((terms, score, cache, row, everything))
    } == {dtype}
    assert terms.shape == (*lead, COLUMNS)
    assert row.shape == (*lead, *x.shape)
    assert all(leaf.shape[: len(lead)] == lead for leaf in jax.tree.leaves(cache))
    tolerance = 1e-5 if dtype == "float32" else 1e-12
    assert_close(score, np.asarray(terms).sum(-1), tolerance, tolerance)


@pytest.mark.slow
@each_case
def test_nothing_asks_for_float64(case):
    found = call_everything(case.family, hyper_of(case, dtype="float32"), row_of(case, "float32"))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))


@each_case
@pytest.mark.usefixtures("x64")
def test_jit_and_vmap_over_rows(case):
    hyper, rows = hyper_of(case), np.stack([row_of(case, seed=seed) for seed in range(4)])

    @partial(jax.jit, static_argnums=0)
    def scores(family, hyper, rows):
        return jax.vmap(family.score, (None, 0))(family.cache(hyper), rows)

    wanted = [np.asarray(call(case.family, "log_predictive", hyper, x)).sum(-1) for x in rows]
    assert_close(scores(case.family, hyper, rows), np.stack(wanted))


@each_case
@pytest.mark.usefixtures("x64")
def test_remove_inverts_add(case):
    hyper, rows = hyper_of(case), [row_of(case, seed=seed) for seed in range(4)]
    after = hyper
    for x in rows:
        after = call(case.family, "add", after, x)
    for x in reversed(rows[1:]):
        after = call(case.family, "remove", after, x)
    assert_close(after, call(case.family, "add", hyper, rows[0]))
    assert_close(call(case.family, "remove", after, rows[0]), hyper)


@each_case
@pytest.mark.usefixtures("x64")
def test_weights_add_up(case):
    hyper, x, add = hyper_of(case), row_of(case), partial(call, case.family, "add")
    once = add(hyper, x)
    assert_close(add(hyper, x, 2.0), add(once, x))
    assert_close(add(add(hyper, x, 0.3), x, 0.7), once)
    groups = np.broadcast_to(np.arange(5.0)[None, :, None], (2, 5, COLUMNS))
    weighted = add(hyper, x, groups)
    of_group = lambda tree, group: jax.tree.map(lambda leaf: np.asarray(leaf)[:, group], tree)
    assert_close(of_group(weighted, 0), of_group(hyper, 0))
    assert_close(of_group(weighted, 1), of_group(once, 1))


@each_case
@pytest.mark.usefixtures("x64")
def test_a_missing_entry_tells_nothing(case):
    family, hyper, full = case.family, hyper_of(case), np.asarray(row_of(case))
    x = full.copy()
    x[1] = np.nan
    column = lambda tree, index: jax.tree.map(lambda leaf: np.asarray(leaf)[:, :, index], tree)
    for change in (partial(call, family, "add"), partial(call, family, "remove")):
        assert_close(column(change(hyper, x), 1), column(hyper, 1), 0, 0)
        assert_close(
            column(change(hyper, x), np.array([0, 2])),
            column(change(hyper, full), np.array([0, 2])),
            0,
            0,
        )
    terms, wanted = (np.array(call(family, "log_predictive", hyper, row)) for row in (x, full))
    wanted[..., 1] = 0.0
    assert_close(terms, wanted, 0, 0)
    assert not np.any(call(family, "score", call(family, "cache", hyper), np.full_like(x, np.nan)))


@pytest.mark.parametrize("case", COUNTS, ids=name_of)
@pytest.mark.usefixtures("x64")
def test_predictive_of_counts_sums_to_one_and_is_scipys(case):
    hyper = hyper_of(case, ())
    num_codes = {BETA: 2, DIRICHLET: CODES, GAMMA: 3000}[case]
    found, support = log_pmf(case, hyper, num_codes), np.arange(num_codes)[:, None]
    if case is BETA:
        wanted = scipy.stats.betabinom(1, *map(np.asarray, hyper)).logpmf(support)
    elif case is DIRICHLET:
        concentration = np.asarray(hyper.concentration)
        wanted = np.log(concentration / concentration.sum(-1, keepdims=True)).T
    else:
        concentration, rate = map(np.asarray, hyper)
        wanted = scipy.stats.nbinom(concentration, rate / (rate + 1)).logpmf(support)
    assert_close(found, wanted)
    assert_close(np.exp(found).sum(0), np.ones(COLUMNS))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("case", COUNTS, ids=name_of)
@pytest.mark.usefixtures("x64")
def test_draws_of_counts(case):
    """Parameters have the marginals of the posterior, rows the frequencies of the predictive;
    other hyper-parameters fail.
    """
    hyper = hyper_of(case, ())
    many = repeat(hyper, 8000)
    (values,), rows = (
        jax.tree.map(np.asarray, call(case.family, how, random.key(i), many))
        for i, how in enumerate(("draw", "draw_row"))
    )

    def fits(at):
        first = jax.tree.map(lambda leaf: np.asarray(leaf)[0], at)
        if case is DIRICHLET:
            sample, (c,) = values[:, 0, 1], first
            marginal = scipy.stats.beta(c[1], c.sum() - c[1])
        else:
            sample, (a, b) = values[:, 0], first
            marginal = scipy.stats.beta(a, b) if case is BETA else scipy.stats.gamma(a, scale=1 / b)
        share = np.exp(log_pmf(case, at, {BETA: 2, DIRICHLET: CODES, GAMMA: 12}[case]))[:, 0]
        seen = np.array([(rows[:, 0] == code).sum() for code in range(len(share))])
        seen, share = (
            np.append(seen, len(rows) - seen.sum()),
            np.append(share, max(1 - share.sum(), 1e-12)),
        )
        chance = scipy.stats.chisquare(seen, share * len(rows), sum_check=False).pvalue
        return min(scipy.stats.kstest(sample, marginal.cdf).pvalue, chance)

    larger = lambda first: first * np.linspace(1.2, 1.5, first.size).reshape(first.shape)
    wrong = jax.tree.map(
        lambda leaf: np.concatenate([larger(np.asarray(leaf)[:1]), np.asarray(leaf)[1:]]), hyper
    )
    assert fits(hyper) > 1e-3
    assert fits(wrong) < 1e-3


@pytest.mark.usefixtures("x64")
def test_mean_row():
    """The mean of the predictive; of codes the probability of each."""
    for case, num_codes in ((BETA, 2), (GAMMA, 3000)):
        hyper = hyper_of(case, ())
        assert_close(
            call(case.family, "mean_row", hyper),
            np.arange(num_codes) @ np.exp(log_pmf(case, hyper, num_codes)),
        )
    codes = call(
        DirichletCategorical(),
        "mean_row",
        DirichletHyper(np.array([[1.0, 3.0, 4.0], [4.0, 3.0, 1.0]])),
    )
    assert codes.tolist() == [[0.125, 0.375, 0.5], [0.5, 0.375, 0.125]]


def test_pair_of_takes_the_priors_in_any_order():
    for pair in TABLE.values():
        sites = {f"site {kind}": kind for kind in reversed(pair.priors)}
        assert pair_of("x", sites, pair.likelihood) == (
            tuple(f"site {kind}" for kind in pair.priors),
            pair,
        )
        assert hash(pair) == hash(type(pair)())
    assert len({*TABLE.values()}) == len(TABLE)


@pytest.mark.parametrize(
    ("priors", "likelihood", "message"),
    [
        (
            {"mu": "Normal"},
            "Normal",
            "site 'x': Normal with 'mu' ~ Normal is not in the table of conjugate pairs; register "
            "it with ",
        ),
        (
            {"p": "Beta"},
            "BernoulliLogits",
            "BernoulliLogits with 'p' ~ Beta is not in .* inference.register_conjugate, see its "
            "docstring",
        ),
        (
            {"a": "Gamma", "b": "Beta"},
            "Poisson",
            "Poisson with 'a' ~ Gamma and 'b' ~ Beta .* In the table: Beta -> BernoulliProbs; Dir",
        ),
        (
            {},
            "Poisson",
            "site 'x': no group parameter is behind its Poisson; wanted one of Beta -> "
            "BernoulliProbs; .* Leave.$",
        ),
    ],
)
def test_what_is_not_in_the_table_is_refused_with_the_way_into_it(priors, likelihood, message):
    with pytest.raises(StructureError, match=message) as refused:
        pair_of("x", priors, likelihood, "Leave.")
    assert "not conjugate" not in str(refused.value)


@pytest.mark.parametrize(
    ("case", "value", "message"),
    [
        (
            BETA,
            2.0,
            "site 'x': row 3, column 1 is 2.0 .one of 1 such values.; BernoulliProbs takes 0, 1, "
            "or NaN",
        ),
        (BETA, np.inf, "row 3, column 1 is inf .*BernoulliProbs"),
        (
            DIRICHLET,
            0.5,
            "row 3, column 1 is 0.5 .*CategoricalProbs takes the codes 0 to 3, or NaN",
        ),
        (DIRICHLET, 4.0, "row 3, column 1 is 4.0 .*codes 0 to 3"),
        (DIRICHLET, -1.0, "row 3, column 1 is -1.0"),
        (GAMMA, -2.0, "row 3, column 1 is -2.0 .*Poisson takes whole numbers from 0"),
        (GAMMA, 1.5, "row 3, column 1 is 1.5"),
        (GAMMA, np.inf, "row 3, column 1 is inf"),
        (NORMAL, -np.inf, "row 3, column 1 is -inf .*Normal takes finite numbers"),
    ],
)
def test_refuse_names_the_value(case, value, message):
    rows = np.ones((5, COLUMNS))
    rows[2] = np.nan
    case.family.refuse("x", rows, hyper_of(case))
    rows[3, 1] = value
    with pytest.raises(ValueError, match=message):
        case.family.refuse("x", rows, hyper_of(case))


def test_codes_without_hyper_parameters_have_no_end():
    DirichletCategorical().refuse("x", np.array([[7.0, np.nan]]))
    with pytest.raises(ValueError, match="codes 0, 1, 2"):
        DirichletCategorical().refuse("x", np.array([[np.inf, np.nan]]))
