"""iQGME against its formula in numpy and scipy, and its simulator against moments of the model."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.handlers import scope
from scipy import stats

from gallery.datasets import names
from inference import Program, StructureError
from tests.by_numpy import by_numpy, log_joint, simulated, sites_of
from zoo.iqgme import CARD, iqgme, normal_wishart, probit, simulate, soft_probit, sticks

pytestmark = pytest.mark.usefixtures("x64", "numpyro_promotion")

TOLD = partial(soft_probit, precision=dist.Gamma(3.0, 2.0), gamma0=0.5)
CASES = {
    "binary": {"expert": TOLD},
    "three classes": {"expert": TOLD, "num_classes": 3},
    "sparse": {"expert": partial(TOLD, sparse=True)},
    "known precision": {"expert": partial(soft_probit, precision=2.0)},
    "integrated": {"expert": partial(probit, precision=dist.Gamma(3.0, 2.0)), "num_classes": 3},
    "no labels": {"expert": None, "alpha": dist.Gamma(2.0, 1.0)},
    "another gate": {
        "expert": None,
        "gate": partial(
            normal_wishart,
            centre=np.array([1.0, 2.0]),
            covariance=np.diag([1.0, 3.0]),
            u0=0.7,
            nu0=6.0,
        ),
    },
}


# The formula, with loops: values of the latent sites `v`, the model's arguments `data`.


def formula(v, data):
    v = {name: np.asarray(value) for name, value in v.items()}
    x, y, gate, expert = (
        np.array(data["x"]),
        data.get("y"),
        data.get("gate", normal_wishart),
        data.get("expert", soft_probit),
    )
    for j, place in enumerate(np.argwhere(np.isnan(x))):
        x[tuple(place)] = v["x_missing"][j]
    alpha, total = data["alpha"], 0.0
    if isinstance(alpha, dist.Distribution):
        total += stats.gamma.logpdf(v["alpha"], 2.0, scale=1.0)
        alpha = v["alpha"]
    total += stats.beta.logpdf(v["V"], 1.0, alpha).sum()
    weight = [v_h * np.prod(1 - v["V"][:h]) for h, v_h in enumerate([*v["V"], 1.0])]
    total += np.log(weight)[v["z"]].sum() + gate_formula(v, x, getattr(gate, "keywords", {}))
    if expert is not None:
        words = getattr(expert, "keywords", {})
        total += expert_prior(v, words) + label_formula(
            v, x, np.asarray(y), words, getattr(expert, "func", expert)
        )
    return total


def gate_formula(v, x, words):
    size = x.shape[1]
    nu0, u0 = words.get("nu0", size + 2), words.get("u0", 0.1)
    centre, covariance = words.get("centre", np.zeros(size)), words.get("covariance", np.eye(size))
    total = 0.0
    for mu, Lambda in zip(v["mu"], v["Lambda"], strict=True):
        total += stats.wishart.logpdf(Lambda, nu0, np.linalg.inv((nu0 - size - 1) * covariance))
        total += stats.multivariate_normal.logpdf(mu, centre, np.linalg.inv(u0 * Lambda))
    return total + sum(
        stats.multivariate_normal.logpdf(x[i], v["mu"][h], np.linalg.inv(v["Lambda"][h]))
        for i, h in enumerate(v["z"])
    )


def expert_prior(v, words):
    total, known = 0.0, words.get("precision")
    for c, experts in enumerate(v["w"]):
        for p in range(experts.shape[1]):
            precision, zeta = known, 0.0
            if isinstance(known, dist.Distribution):
                precision = v["lambda"][c, p]
                total += stats.gamma.logpdf(precision, 3.0, scale=1 / 2.0)
            if not words.get("sparse"):
                zeta = v["zeta"][c, p]
                total += stats.norm.logpdf(
                    zeta, 0.0, (words.get("gamma0", 0.1) * precision) ** -0.5
                )
            total += stats.norm.logpdf(experts[:, p], zeta, precision**-0.5).sum()
    return total


def label_formula(v, x, y, words, kind):
    total = 0.0
    for i, h in enumerate(v["z"]):
        score = [w[h, :-1] @ x[i] + w[h, -1] for w in v["w"]]
        if kind is soft_probit:
            t = v["t"][:, i]
            first = next((c + 1 for c in range(len(t)) if t[c] > 0), 0)
            total += stats.norm.logpdf(t, score, 1.0).sum() + (
                0.0 if y[i] in (first, -1) else -np.inf
            )
        elif y[i] >= 0:
            asked = range(len(score)) if y[i] == 0 else range(y[i])
            total += sum(stats.norm.logcdf(score[c] if c + 1 == y[i] else -score[c]) for c in asked)
    return total


@cache
def drawn(name):
    """Data with holes, two rows without a label, the last row wholly missing; and values of the
    latent sites that go with them.
    """
    told = {"num_experts": 4, "alpha": 1.0, **CASES[name]}
    values = sites_of(partial(iqgme, shape=(9, 2), **told), 3)
    x = np.array(values["x"])
    holes = np.random.default_rng(0).random(x.shape) < 0.3
    holes[-1] = True
    data = told | {"x": np.where(holes, np.nan, x)}
    if told["expert"] is not None:
        data["y"] = np.where(np.isin(np.arange(9), (1, 5)), -1, np.asarray(values["y"]))
    program = Program(iqgme, **data)
    values = {site: values[site] for site in program.latent if site != "x_missing"}
    return data, values | {"x_missing": jnp.asarray(x[holes])}, program


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", CASES, ids=CASES)
def test_log_joint_equals_its_formula(name):
    data, values, program = drawn(name)
    np.testing.assert_allclose(
        by_numpy(program.log_joint)(values), formula(values, data), rtol=1e-10
    )
    assert set(program.latent) == set(values)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("binary", {"expert": partial(TOLD, gamma0=0.6)}),
        ("binary", {"expert": partial(TOLD, precision=dist.Gamma(3.0, 2.1))}),
        ("binary", {"gate": partial(normal_wishart, u0=0.2)}),
        (
            "another gate",
            {
                "gate": partial(
                    normal_wishart,
                    centre=np.array([1.0, 2.0]),
                    covariance=np.diag([1.0, 3.0]),
                    u0=0.7,
                    nu0=6.1,
                )
            },
        ),
        ("no labels", {"alpha": dist.Gamma(2.0, 1.1)}),
    ],
    ids=["gamma0", "precision", "u0", "nu0", "alpha"],
)
def test_one_wrong_number_is_seen(name, change):
    data, values, _ = drawn(name)
    assert abs(log_joint(iqgme, data | change, values) - formula(values, data)) > 1e-3


def test_a_label_that_its_soft_label_denies_is_impossible():
    data, values, program = drawn("three classes")
    density = by_numpy(program.log_joint)
    assert density(values | {"t": -values["t"]}) == -np.inf
    known = np.asarray(data["y"]) >= 0
    np.testing.assert_allclose(
        density(values | {"t": np.where(known, values["t"], 0.3)}),
        formula(values | {"t": np.where(known, values["t"], 0.3)}, data),
    )


def test_sites_plates_and_dims():
    _, _, program = drawn("three classes")
    assert program.dims == {
        "V": ("stick",),
        "z": ("row",),
        "Lambda": ("expert", "feature", "feature_2"),
        "mu": ("expert", "feature"),
        "x_missing": ("hole",),
        "x": ("row", "feature"),
        "lambda": ("class", "weight"),
        "zeta": ("class", "weight"),
        "w": ("class", "expert", "weight"),
        "t": ("class", "row"),
        "y": ("row",),
    }
    assert program.observed == ("x", "y")
    assert not any(
        "x_missing" in Program(iqgme, np.ones((3, 2)), np.ones(3, int), **other).sites
        for other in ({}, {"expert": None})
    )


@cache
def many():
    return simulated(simulate, 1, 2000, 2, missing=0.25, unlabelled=0.1, num_classes=3)


def test_card_has_words_for_exactly_the_sites_and_knows_real_data():
    assert set(CARD.sites) == set(Program(iqgme, **many()).sites)
    assert set(CARD.data) <= set(names())


def test_sticks_are_weights():
    V = jnp.array([0.5, 0.2, 0.9])
    np.testing.assert_allclose(sticks(V), [0.5, 0.1, 0.36, 0.04])


def test_simulated_data_have_the_moments_of_the_model():
    """Rows of many data sets of one expert have the moments of a Student t.

    Its weights are known. The mean is 0, the covariance is (1 + 1 / u0) covariance.
    """
    told = {
        "num_experts": 2,
        "alpha": 1e-6,
        "gate": partial(normal_wishart, covariance=2.0, u0=1.0, nu0=20.0),
    }
    draw = by_numpy(jax.vmap(lambda key: simulate(key, 1, 2, **told)["x"][0]))
    x = np.asarray(draw(random.split(random.key(0), 20_000)))
    np.testing.assert_allclose(np.cov(x.T), 4 * np.eye(2), atol=0.15)
    np.testing.assert_allclose(x.mean(0), 0, atol=0.06)


def test_simulated_rows_miss_what_was_asked():
    data = many()
    assert abs(np.isnan(data["x"]).mean() - 0.25) < 0.02
    assert abs((data["y"] == -1).mean() - 0.1) < 0.03
    assert data["y"].max() == 2
    names_of_arguments = []
    jax.eval_shape(
        lambda key: names_of_arguments.extend(simulate(key, 5, 2, expert=None)), random.key(1)
    )
    assert "x" in names_of_arguments
    assert "y" not in names_of_arguments


def test_no_prior_is_made_up_for_a_missing_entry():
    _, _, program = drawn("binary")
    with pytest.raises(StructureError, match="site 'x_missing': its prior is ImproperUniform"):
        by_numpy(program.draw_prior)(random.key(0))


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (None, None, "found x of shape None"),
        (np.ones((3, 0)), None, r"found x of shape \(3, 0\)"),
        (np.array([[1.0, np.inf]]), np.array([0]), "iqgme x: row 0, column 1 is inf"),
        (np.ones((3, 2)), np.zeros(2, int), r"found y of shape \(2,\) beside x of shape \(3, 2\)"),
        (np.ones((3, 2)), np.array([0, 1, 2]), r"iqgme y: found labels \[0 1 2\], wanted 0 .. 1"),
    ],
    ids=["nothing", "no feature", "infinite", "few labels", "another class"],
)
def test_wrong_data_are_refused(x, y, message):
    with pytest.raises(ValueError, match=message):
        Program(iqgme, x, y).sites  # noqa: B018


def test_it_runs_with_other_names():
    data, values, program = drawn("binary")
    renamed = Program(scope(iqgme, prefix="a", hide_types=["plate"]), **data)
    at = {f"a/{name}": value for name, value in values.items()}
    np.testing.assert_allclose(by_numpy(renamed.log_joint)(at), by_numpy(program.log_joint)(values))
