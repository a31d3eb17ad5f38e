"""BSVD against its formula in numpy and scipy for each link, its simulator against moments of
the model, and NUTS against its kernel.
"""

from functools import cache, partial

import arviz as az
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random

# after arviz, `import numpyro.distributions` would load it twice
from numpyro import distributions as dist
from numpyro.infer import NUTS, DiscreteHMCGibbs
from scipy import stats

import zoo.bsvd as module
from gallery.datasets import names
from inference import ConditionalGibbs, Driver, Program
from tests.by_numpy import log_joint
from zoo.bsvd import CARD, binomial_probit, bsvd, gaussian, ordered_probit, simulate

pytestmark = pytest.mark.usefixtures("x64", "numpyro_promotion")

RNG = np.random.default_rng(0)
FEATURES = {"row_features": RNG.normal(size=(6, 2)), "column_features": RNG.normal(size=(5, 1))}


# The formulas, with loops: log probability of an entry `y` given its predictor and the values `v`
# of the latent sites.


def gaussian_entry(v, y, eta, trials):
    return stats.norm.logpdf(y, eta, 1 / np.sqrt(v["alpha"]))


def ordered_entry(v, y, eta, trials):
    ends = np.array([-np.inf, 0.0, *np.cumsum(v.get("gaps", [])), np.inf]) - eta
    # where scipy's differences are exact
    low, high = (ends[y], ends[y + 1]) if ends[y] + ends[y + 1] < 0 else (-ends[y + 1], -ends[y])
    return np.log(stats.norm.cdf(high) - stats.norm.cdf(low))


def binomial_entry(v, y, eta, trials):
    return stats.binom.logpmf(y, trials, stats.norm.cdf(eta))


def gaussian_prior(v):
    return stats.gamma.logpdf(v["alpha"], 10.0)


def ordered_prior(v):
    return stats.halfnorm.logpdf(v["gaps"], scale=10.0).sum()


def vague_gamma(x):
    """What `simulate` knows of a precision."""
    return np.sum(stats.gamma.logpdf(x, 5.0, scale=1 / 5))


def factors_prior(v, name):
    mean, precision = v.get(f"{name}_mean", np.zeros(3)), v.get(f"{name}_precision", np.ones(3))
    total = sum(stats.norm.logpdf(row, mean, 1 / np.sqrt(precision)).sum() for row in v[name])
    if f"{name}_mean" in v:
        total += (
            stats.norm.logpdf(mean, 0.0, 0.3).sum()
            + stats.gamma.logpdf(precision, 10.0, scale=1 / 10).sum()
        )
    return total


def weights_prior(v, name):
    precision = v[f"{name}_precision"]
    return vague_gamma(precision) + sum(
        stats.norm.logpdf(row, 0.0, 1 / np.sqrt(precision)).sum() for row in v[f"{name}_weights"]
    )


def formula(v, data, entry, prior, a, b):
    """The log joint of `simulate`'s model."""
    v = {name: np.asarray(value, float) for name, value in v.items()}
    k = len(v["z"])
    total = stats.bernoulli.logpmf(v["z"], a / (a + b * (k - 1))).sum() + vague_gamma(v["alpha_s"])
    total += stats.halfnorm.logpdf(
        v["s"], scale=1 / np.sqrt(v["alpha_s"])
    ).sum() + stats.norm.logpdf(v["intercept"])
    total += (
        factors_prior(v, "u")
        + factors_prior(v, "v")
        + weights_prior(v, "row")
        + weights_prior(v, "column")
        + prior(v)
    )
    of_rows, of_columns = (data.get(name) for name in ("row_features", "column_features"))
    for e, (i, j, y) in enumerate(
        zip(data["row"], data["column"], np.asarray(data["value"]), strict=True)
    ):
        eta = v["intercept"] + sum(
            v["s"][n] * v["z"][n] * v["u"][i, n] * v["v"][j, n] for n in range(k)
        )
        eta += v["row_weights"][i, 0] + (
            0.0 if of_columns is None else v["row_weights"][i, 1:] @ of_columns[j]
        )
        eta += v["column_weights"][j, 0] + (
            0.0 if of_rows is None else v["column_weights"][j, 1:] @ of_rows[i]
        )
        total += entry(v, y, eta, None if "trials" not in data else int(data["trials"][e]))
    return total


LINKS = {
    "gaussian": ({}, gaussian_entry, gaussian_prior),
    "two levels": ({"link": partial(ordered_probit, num_levels=2)}, ordered_entry, lambda v: 0.0),
    "five levels": ({"link": ordered_probit}, ordered_entry, ordered_prior),
    "binomial": ({"link": binomial_probit}, binomial_entry, lambda v: 0.0),
}
OPTIONS = {
    "plain": {},
    "features": FEATURES,
    "learned factors": {"learn_factors": True},
    "all": FEATURES | {"learn_factors": True, "b": 3.0},
}


@cache
def drawn(link="gaussian", options="plain"):
    """Data of 6 x 5, and values of the latent sites with the second component off."""
    data = simulate(random.key(1), 6, 5, 0.6, 3, **LINKS[link][0], **OPTIONS[options])
    values = Program(bsvd, **data).draw_prior(random.key(2))
    known = {"z": jnp.array([1, 0, 1]), "gaps": jnp.array([0.5, 0.8, 1.1])}
    return data, {name: known.get(name, value) for name, value in values.items()}


def check_formula(link, options, changes=()):
    """`changes` are arguments of the model that the formula does not know of."""
    data, values = drawn(link, options)
    _, entry, prior = LINKS[link]
    found = log_joint(bsvd, data | dict(changes), values)
    np.testing.assert_allclose(
        found, formula(values, data, entry, prior, 3.0, data.get("b", 1.0)), rtol=1e-9
    )


@pytest.mark.slow_after(4)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("link", LINKS)
def test_log_joint_equals_its_formula(link, options):
    check_formula(link, options)


def forgets_the_root(predictor, value, trials, entries):
    """A precision for a standard deviation."""
    alpha = module.sample("alpha", dist.Gamma(10.0, 1.0))
    with entries:
        return module.sample("y", dist.Normal(predictor, 1 / alpha), obs=value)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("link", "options", "changes"),
    [
        ("gaussian", "plain", {"a": 2.0}),
        ("gaussian", "plain", {"b": 2.0}),
        ("gaussian", "plain", {"alpha_s": dist.Gamma(5.0, 4.0)}),
        ("gaussian", "plain", {"precision": dist.Gamma(5.0, 4.0)}),
        ("gaussian", "plain", {"intercept": dist.Normal(0.0, 2.0)}),
        ("gaussian", "plain", {"link": forgets_the_root}),
        ("gaussian", "features", {"row_features": FEATURES["row_features"][::-1]}),
        ("gaussian", "features", {"column_features": 2 * FEATURES["column_features"]}),
        ("five levels", "plain", {"link": partial(ordered_probit, spread=9.0)}),
        ("binomial", "plain", {"counts": np.arange(18) > 0}),
    ],
    ids=[
        "a",
        "b",
        "alpha_s",
        "precision",
        "intercept",
        "root",
        "other rows",
        "other columns",
        "spread",
        "an entry less",
    ],
)
def test_a_term_that_is_wrong_is_seen(link, options, changes):
    with pytest.raises(AssertionError):
        check_formula(link, options, changes)


@pytest.mark.parametrize(
    ("name", "planted", "options"),
    [
        (
            "_factors",
            lambda name, *rest, own=module._factors: own(name, *rest[:-1], False),
            "learned factors",
        ),
        (
            "_with_constant",
            lambda x, size, name, own=module._with_constant: 2 * own(x, size, name),
            "features",
        ),
        (
            "_with_constant",
            lambda x, size, name, own=module._with_constant: own(x, size, name)[:, ::-1],
            "features",
        ),
    ],
    ids=["factors that are not learned", "twice the features", "the constant last"],
)
def test_a_part_that_is_wrong_is_seen(name, planted, options, monkeypatch):
    drawn("gaussian", options)  # of the right model
    monkeypatch.setattr(module, name, planted)
    with pytest.raises((AssertionError, ValueError)):  # ValueError: sites that are no longer there
        check_formula("gaussian", options)


def test_entries_that_do_not_count_are_as_good_as_not_observed():
    data, values = drawn("binomial")
    kept = np.arange(18) % 3 > 0
    some = data | {name: data[name][kept] for name in ("row", "column", "value", "trials")}
    found = log_joint(bsvd, data | {"counts": kept}, values)
    np.testing.assert_allclose(found, log_joint(bsvd, some, values), rtol=1e-12)


def test_hyper_parameters_may_be_known():
    data, values = drawn()
    known = {
        "alpha_s": float(values["alpha_s"]),
        "intercept": float(values["intercept"]),
        "precision": 2.0,
    }
    program = Program(bsvd, **data | known)
    assert set(program.latent) == {"z", "s", "u", "v", "row_weights", "column_weights", "alpha"}
    terms = jax.jit(program.log_probs)({name: values[name] for name in program.latent})
    np.testing.assert_allclose(terms["s"], jax.jit(Program(bsvd, **data).log_probs)(values)["s"])
    np.testing.assert_allclose(
        terms["row_weights"], stats.norm.logpdf(values["row_weights"], 0, 1 / np.sqrt(2))
    )


def test_sites_plates_and_dims():
    program = Program(
        bsvd,
        **simulate(
            random.key(0), 6, 5, 0.6, 3, learn_factors=True, link=ordered_probit, **FEATURES
        ),
    )
    assert program.dims == {
        **dict.fromkeys(
            ("z", "s", "u_mean", "u_precision", "v_mean", "v_precision"), ("component",)
        ),
        **{"alpha_s": (), "rank": (), "intercept": (), "gaps": ("gap",), "y": ("entry",)},
        **{"u": ("row", "component"), "v": ("column", "component")},
        **{"row_precision": ("column_feature",), "row_weights": ("row", "column_feature")},
        **{"column_precision": ("row_feature",), "column_weights": ("column", "row_feature")},
    }
    values = program.draw_prior(random.key(1))
    assert program.deterministics(values)["rank"] == values["z"].sum()


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "link",
    ["gaussian", "five levels", "binomial"],
)
def test_slopes_are_finite(link):
    data, values = drawn(link)
    program = Program(bsvd, **data)
    free = {name: values[name] for name in program.latent if name != "z"}
    slopes = jax.jit(jax.grad(lambda free: program.log_joint(free | {"z": values["z"]})))(free)
    assert all(jnp.isfinite(slope).all() for slope in slopes.values())
    assert all((slope != 0).any() for slope in slopes.values())


def test_card_has_words_for_exactly_the_sites_and_knows_real_data():
    assert set(CARD.sites) == set(Program(bsvd, **simulate(random.key(0), 6, 5, 0.6, 3)).sites)
    assert set(CARD.data) <= set(names())
    assert CARD.kernels == ("ConditionalGibbs", "NUTS")


# Simulated data.


def test_simulate_returns_the_arguments_of_the_model():
    data = simulate(random.key(0), 6, 5, 0.6, 3, link=binomial_probit, learn_factors=True)
    assert data["shape"] == (6, 5)
    assert (len(data["row"]), data["num_components"], data["learn_factors"]) == (18, 3, True)
    assert (
        len(
            {
                (int(i), int(j))
                for i, j in zip(np.asarray(data["row"]), np.asarray(data["column"]), strict=True)
            }
        )
        == 18
    )
    assert (data["row"].max() < 6) & (data["column"].max() < 5)
    assert ((data["value"] >= 0) & (data["value"] <= data["trials"])).all()
    Program(bsvd, **data).check()
    again = simulate(random.key(0), 6, 5, 0.6, 3, link=binomial_probit, learn_factors=True)
    np.testing.assert_array_equal(data["value"], again["value"])
    told = simulate(random.key(0), 6, 5, 0.6, 3, link=binomial_probit, trials=np.full(18, 3))
    np.testing.assert_array_equal(told["trials"], 3)
    assert jax.eval_shape(lambda key: simulate(key, 4, 3, 0.0)["value"], random.key(0)).shape == (
        1,
    )


def test_simulated_levels_are_all_levels():
    data = simulate(random.key(2), 30, 20, link=partial(ordered_probit, num_levels=4, spread=1.0))
    assert set(np.unique(data["value"])) == {0, 1, 2, 3}


def check_entries(**options):
    """Covariances of entries: with itself, of one row, of one column, and of neither."""
    told = {"alpha_s": 1.0, "precision": 1.0, "link": partial(gaussian, alpha=4.0), **options}
    y = np.asarray(
        jax.jit(jax.vmap(lambda key: simulate(key, 2, 2, 1.0, 2, **told)["value"]))(
            random.split(random.key(0), 20_000)
        )
    )
    # share of components that are there, their variance; rows and columns
    of_components, effects = 2 * (2 / 3) * 1.0, 2.0
    wanted = [1 + effects + of_components + 1 / 4, 1 + 1, 1 + 1, 1.0]
    for other, expected in enumerate(wanted):
        product = y[:, 0] * y[:, other]
        assert abs(product.mean() - expected) < 4 * product.std() / np.sqrt(len(y)), other


def test_simulated_entries_covary_as_the_model_says():
    check_entries()


OTHERS = {
    "alpha_s": 2.0,
    "precision": 1.2,
    "intercept": dist.Normal(0.0, 1.2),
    "a": 1.0,
    "learn_factors": True,
}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", OTHERS)
def test_entries_of_another_model_are_seen(name):
    with pytest.raises(AssertionError):
        check_entries(**{name: OTHERS[name]})


@pytest.mark.slow
@pytest.mark.parametrize("link", ["gaussian", "five levels", "binomial"])
def test_tables_of_numpy_in_single_precision(link):
    """As the gallery hands them over: float64 and int64, in a session of float32."""
    with jax.enable_x64(False):
        data = simulate(random.key(0), 6, 5, 0.6, 3, **LINKS[link][0])
        kind = lambda value: float if jnp.issubdtype(value.dtype, jnp.floating) else int
        tables = {
            name: np.asarray(value, kind(value))
            for name, value in data.items()
            if isinstance(value, jax.Array)
        }
        program = Program(bsvd, **data | tables)
        program.check()
        values = program.draw_prior(random.key(1))
        np.testing.assert_allclose(
            program.log_joint(values), Program(bsvd, **data).log_joint(values), rtol=1e-5
        )


# Wrong arguments.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"row_features": np.ones(6)},
            r"bsvd row_features: found shape \(6,\), wanted \(6, features\)",
        ),
        (
            {"column_features": np.ones((6, 1))},
            r"bsvd column_features: found shape \(6, 1\), wanted \(5, features\)",
        ),
        (
            {"value": np.full(18, np.nan)},
            r"site 'y': 18 of its observations are NaN .* of argument 'value'",
        ),
        pytest.param(
            {"value": np.arange(18) % 6, "link": ordered_probit},
            r"site 'y': 3 of its observations are outside the support",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"value": jnp.full(18, 3), "trials": np.full(18, 2), "link": binomial_probit},
            r"18 of its observations are outside the support",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["row_features", "column_features", "NaN", "too many levels", "too many successes"],
)
def test_wrong_arguments_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        Program(bsvd, **drawn()[0] | changes).check()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"row": np.arange(18)}, "bsvd row"),
        ({"column": np.full(18, -1)}, "bsvd column"),
        ({"row": np.zeros(17, int)}, r"bsvd column: found int64 \(18,\), wanted integers \(17,\)"),
        ({"row": np.zeros(18)}, "bsvd row"),
        (
            {"row": np.zeros(0, int), "column": np.zeros(0, int), "value": np.zeros(0)},
            r"bsvd row: found int64 \(0,\), wanted integers \(1,\)",
        ),
        ({"num_components": 0}, "bsvd num_components: found 0"),
        ({"link": binomial_probit, "value": np.zeros(18, int)}, "trials"),
        ({"link": partial(ordered_probit, num_levels=1), "value": np.zeros(18, int)}, "num_levels"),
    ],
    ids=[
        "row too large",
        "column negative",
        "row too short",
        "row no integer",
        "no entries",
        "no components",
        "no trials",
        "one level",
    ],
)
def test_what_no_entry_can_have_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        Program(bsvd, **drawn()[0] | changes).check()


# Two kernels.


def beside(kernel, data, num_samples, num_warmup=500, num_chains=2):
    """Means of some entries, of their squares and of the rank, and their standard errors."""
    driver = Driver(
        kernel,
        num_warmup=num_warmup,
        num_samples=num_samples,
        num_chains=num_chains,
        progress_bar=False,
    )
    draws = driver.run(0, **data)["posterior"]
    z, s, u, v, rows, columns = (
        draws[name].values for name in ("z", "s", "u", "v", "row_weights", "column_weights")
    )
    eta = np.einsum("cnik,cnjk,cnk->cnij", u, v, s * z) + draws["intercept"].values[..., None, None]
    eta = (eta + rows + np.swapaxes(columns, 2, 3))[..., [0, 2, 5], [0, 3, 4]]
    of = np.concatenate(
        [eta, eta**2, z.sum(-1, keepdims=True), (s * z).sum(-1, keepdims=True)], axis=-1
    )
    return of.mean((0, 1)), np.array([x.std() / np.sqrt(az.ess(x)) for x in np.moveaxis(of, -1, 0)])


@cache
def few():
    """18 entries with known precisions."""
    return simulate(
        random.key(6), 6, 5, 0.6, 2, alpha_s=1.0, precision=1.0, link=partial(gaussian, alpha=4.0)
    ) | {"a": 1.0}


@cache
def by_nuts():
    return beside(DiscreteHMCGibbs(NUTS(bsvd)), few(), 4000)


def gaps(**changes):
    """Between the two, in standard errors."""
    (mean, error), (other, other_error) = (
        beside(ConditionalGibbs(bsvd), few() | changes, 4000),
        by_nuts(),
    )
    return np.abs(mean - other) / np.hypot(error, other_error)


@pytest.mark.slow
def test_nuts_and_gibbs_have_the_same_posterior():
    assert gaps().max() < 4


@pytest.mark.slow
def test_the_posterior_of_another_model_is_seen():
    assert gaps(a=0.5).max() > 5
