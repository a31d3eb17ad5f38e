"""The mixture that classifies against its formula in numpy and scipy, and its simulator against
moments of the model.
"""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from jax.scipy.special import gammaln
from numpyro import distributions as dist
from numpyro.handlers import scope
from scipy import stats

from gallery.datasets import names
from inference import Program
from inference.distributions import PositivePoisson, Zeta
from tests.by_numpy import by_numpy, simulated, sites_of
from zoo.staged_learning import CARD, diagonal, family, full, order_prior, simulate, staged_learning

pytestmark = pytest.mark.usefixtures("x64", "numpyro_promotion")

CASES = {
    "diagonal": {"order": 3, "num_classes": 2},
    "full": {"order": 2, "num_classes": 3, "cluster": full},
    "one cluster": {"order": 1, "num_classes": 2},
    "no classes": {"order": 2, "num_classes": 0},
    "other numbers": {
        "order": 2,
        "cluster": partial(diagonal, loc=1.0, scale=2.0, log_width=0.1, log_range=0.4),
        "concentration": 2.5,
        "class_concentration": 0.5,
    },
}


# The formula of the paper, with loops: values of the latent sites `v`, the model's arguments
# `data`.


def formula(v, data):
    v = {name: np.asarray(value) for name, value in v.items()}
    words = getattr(data.get("cluster"), "keywords", {})
    loc, scale = words.get("loc", 0.0), words.get("scale", 3.0)
    log_width, log_range = words.get("log_width", -0.5), words.get("log_range", 0.6)
    order, num_classes = data["order"], data.get("num_classes", 2)
    total = dirichlet(v["beta"], data.get("concentration", 1.0))
    total += stats.norm.logpdf(v["mu"], loc, scale).sum()
    total += stats.lognorm.logpdf(v["sigma"], log_range, scale=np.exp(log_width)).sum()
    if "corr" in v:
        total += sum(lkj(corr) for corr in v["corr"])
    for c in range(order if num_classes else 0):
        total += dirichlet(v["gamma"][c], data.get("class_concentration", 1.0))
    for i, x in enumerate(np.asarray(data["x"])):
        density = 0.0
        for c in range(order):
            root = np.diag(v["sigma"][c]) @ v["corr"][c] if "corr" in v else np.diag(v["sigma"][c])
            share = v["gamma"][c][data["y"][i]] if num_classes and data["y"][i] >= 0 else 1.0
            density += (
                share * v["beta"][c] * stats.multivariate_normal.pdf(x, v["mu"][c], root @ root.T)
            )
        total += np.log(density)
    return total


def dirichlet(value, concentration):
    return (
        stats.dirichlet.logpdf(value / value.sum(), np.full(len(value), concentration))
        if len(value) > 1
        else 0.0
    )


def lkj(corr, independence=2.0):
    """Two features: the correlation r has the density (1 - r^2)^(independence - 1), and r is the
    entry of the Cholesky factor.
    """
    return stats.beta.logpdf((corr[1, 0] + 1) / 2, independence, independence) - np.log(2)


@cache
def drawn(name):
    told = CASES[name]
    found = sites_of(partial(staged_learning, shape=(7, 2), **told), 1)
    data = told | {"x": found["x"]}
    if told.get("num_classes", 2):
        data["y"] = np.where(np.arange(7) % 3 == 2, -1, np.asarray(found["y"]))
    program = Program(staged_learning, **data)
    return data, {site: found[site] for site in program.latent}, program


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("name", CASES, ids=CASES)
def test_log_joint_equals_its_formula(name):
    data, values, program = drawn(name)
    np.testing.assert_allclose(
        by_numpy(program.log_joint)(values), formula(values, data), rtol=1e-10
    )


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("diagonal", {"cluster": partial(diagonal, scale=3.1)}),
        ("diagonal", {"cluster": partial(diagonal, log_range=0.7)}),
        ("full", {"cluster": partial(full, independence=2.1)}),
        ("other numbers", {"concentration": 2.4}),
        ("other numbers", {"class_concentration": 0.6}),
    ],
    ids=["scale", "log_range", "independence", "concentration", "class_concentration"],
)
def test_one_wrong_number_is_seen(name, change):
    data, values, _ = drawn(name)
    assert (
        abs(
            by_numpy(Program(staged_learning, **data | change).log_joint)(values)
            - formula(values, data)
        )
        > 1e-3
    )


def test_all_that_clusters_are_called_is_arbitrary():
    _, values, program = drawn("diagonal")
    renamed = {name: value[jnp.array([2, 0, 1])] for name, value in values.items()}
    log_joint = by_numpy(program.log_joint)
    np.testing.assert_allclose(log_joint(renamed), log_joint(values))


def test_rows_of_all_classes_sum_to_the_density_of_x():
    _, values, program = drawn("full")
    each = [
        by_numpy(program.with_arguments(y=np.full(7, label)).log_likelihood)(values)
        for label in range(-1, 3)
    ]
    joint = np.logaddexp.reduce([one["x"] + one["y"] for one in each[1:]])
    np.testing.assert_allclose(joint, each[0]["x"] + each[0]["y"])
    assert not np.any(each[0]["y"])


def test_sites_plates_and_dims():
    assert drawn("full")[2].dims == {
        "beta": ("cluster",),
        "mu": ("cluster", "feature"),
        "sigma": ("cluster", "feature"),
        "corr": ("cluster", "feature", "feature_2"),
        "gamma": ("cluster", "class"),
        "x": ("row", "feature"),
        "y": ("row",),
    }
    assert drawn("full")[2].observed == ("x", "y")


def test_card_has_words_for_exactly_the_sites_and_knows_real_data():
    assert set(CARD.sites) == set(Program(staged_learning, **simulated(simulate, 0, 10)).sites)
    assert set(CARD.data) <= set(names())


def test_simulated_data_have_the_moments_of_the_model():
    """Rows of many data sets: mean 0, variance 3^2 + E[sigma^2]; classes even; and two rows are
    of one class as often as they should.
    """
    draw = by_numpy(jax.vmap(lambda key: simulate(key, 2, 1, order=3)))
    found = draw(random.split(random.key(0), 20_000))
    x, y = np.asarray(found["x"])[..., 0], np.asarray(found["y"])
    expected = 9 + np.exp(-1 + 2 * 0.6**2)
    assert abs(x.mean()) < 0.05
    assert abs(x.var() / expected - 1) < 0.03
    same_cluster = 2 / (3 + 1)  # E[sum beta^2] = (a + 1) / (3 a + 1), a = 1
    assert (
        abs((y[:, 0] == y[:, 1]).mean() - (same_cluster * 2 / 3 + (1 - same_cluster) / 2)) < 0.012
    )


def test_a_family_gives_the_model_of_each_order():
    data, values, _ = drawn("diagonal")
    args = {name: data[name] for name in ("x", "y")}
    np.testing.assert_allclose(Program(family(3), **args).log_joint(values), formula(values, data))
    assert Program(family(5), **args).sites["mu"].shape == (5, 2)


def test_the_orders_are_a_distribution():
    m = np.arange(1, 2000)
    rate, share = 2.0, 0.3
    poisson = stats.poisson.pmf(m, rate) / (1 - np.exp(-rate))
    tail = (m + 1.0) ** -2 / (np.pi**2 / 6 - 1)
    found = np.exp(order_prior(rate, share).log_prob(m))
    np.testing.assert_allclose(found, (1 - share) * poisson + share * tail, rtol=1e-10)
    assert abs(np.exp(order_prior().log_prob(np.arange(1, 200_000))).sum() - 1) < 1e-5


@pytest.mark.parametrize("bug", [False, True], ids=["right", "planted"])
@pytest.mark.parametrize("share", [0.0, 1.0], ids=["Poisson", "zeta"])
def test_the_order_is_at_least_one(share, bug, monkeypatch):
    """The planted bugs are the printed terms, which count from 0."""
    if bug:
        rate = 2.0
        printed = lambda self, m: m * jnp.log(rate) - rate - gammaln(m + 1.0)
        monkeypatch.setattr(PositivePoisson, "log_prob", printed)
        monkeypatch.setattr(
            Zeta, "log_prob", lambda self, m: jnp.log(6 / jnp.pi**2) - 2 * jnp.log(m + 1.0)
        )
    total = jnp.exp(
        order_prior(2.0, min(max(share, 1e-9), 1 - 1e-9)).log_prob(jnp.arange(1, 200_000))
    ).sum()
    assert (abs(total - 1) < 1e-4) != bug


def test_it_runs_with_other_names():
    data, values, program = drawn("diagonal")
    renamed = Program(scope(staged_learning, prefix="a", hide_types=["plate"]), **data)
    np.testing.assert_allclose(
        renamed.log_joint({f"a/{name}": value for name, value in values.items()}),
        program.log_joint(values),
    )


def test_an_edited_cluster_is_followed():
    _, values, program = drawn("diagonal")
    heavy = lambda at: dist.StudentT(4.0, at.where(0.0, 3.0), at.width(-0.5, 0.6)).to_event(1)
    edited = program.with_arguments(cluster=heavy)
    x, v = (
        np.asarray(program.arguments["x"]),
        {name: np.asarray(value) for name, value in values.items()},
    )
    each = np.log(v["beta"]) + stats.t.logpdf(x[:, None], 4.0, v["mu"], v["sigma"]).sum(-1)
    np.testing.assert_allclose(
        edited.log_likelihood(values)["x"], np.logaddexp.reduce(each, axis=1)
    )


@pytest.mark.parametrize(
    ("x", "y", "told", "message"),
    [
        (None, None, {}, "found x of shape None"),
        (np.ones((3, 0)), None, {}, r"found x of shape \(3, 0\)"),
        (
            np.ones((3, 2)),
            np.zeros(2, int),
            {},
            r"found y of shape \(2,\) beside x of shape \(3, 2\)",
        ),
        (
            np.ones((3, 2)),
            np.array([0, 1, 2]),
            {},
            r"staged_learning y: found classes \[0 1 2\], wanted 0 .. 1",
        ),
        (np.ones((3, 2)), None, {"order": 0}, "found order=0"),
    ],
    ids=["nothing", "no feature", "few classes", "another class", "no cluster"],
)
def test_wrong_data_are_refused(x, y, told, message):
    with pytest.raises(ValueError, match=message):
        Program(staged_learning, x, y, **told).sites  # noqa: B018
