"""iQGME among common factors against its formula in numpy and scipy, and its simulator against
moments that are known.
"""

from functools import cache, partial

import jax
import numpy as np
import numpyro.distributions as dist
import pytest
from jax import random
from scipy import stats

from gallery.datasets import names
from inference import Program
from tests.by_numpy import by_numpy, log_joint, simulated, sites_of
from tests.zoo.test_iqgme import TOLD, expert_prior, gate_formula, label_formula
from zoo.iqgme_factors import CARD, iqgme_factors, linear_features, normal_factors, simulate

pytestmark = pytest.mark.usefixtures("x64", "numpyro_promotion")

FEATURES = partial(
    linear_features,
    precision=dist.Gamma(2.0, 3.0),
    noise=dist.Gamma(4.0, 1.5),
    centre=0.7,
    a0=1.5,
    b0=0.6,
)
GATE = partial(normal_factors, u0=0.4, covariance=2.0 * np.eye(3))
CASES = {
    "binary": {"expert": TOLD, "features": FEATURES},
    "three classes": {"expert": TOLD, "features": FEATURES, "num_classes": 3, "gate": GATE},
    "all factors": {
        "expert": None,
        "features": partial(linear_features, select=False, precision=2.0, noise=3.0),
    },
}


def formula(v, data):
    """With loops: values of the latent sites `v`, the model's arguments `data`."""
    v, x = {name: np.asarray(value) for name, value in v.items()}, np.asarray(data["x"])
    alpha = data["alpha"]
    total = stats.beta.logpdf(v["V"], 1.0, alpha).sum()
    weight = [v_h * np.prod(1 - v["V"][:h]) for h, v_h in enumerate([*v["V"], 1.0])]
    total += np.log(weight)[v["z"]].sum() + gate_formula(
        v, v["s"], getattr(data.get("gate"), "keywords", {})
    )
    if data["expert"] is not None:
        words = data["expert"].keywords
        total += expert_prior(v, words) + label_formula(
            v, v["s"], np.asarray(data["y"]), words, data["expert"].func
        )
    return total + feature_formula(v, x, data["features"].keywords)


def feature_formula(v, x, words):
    num_factors, total, known = (
        len(v["A"]),
        0.0,
        {"beta": words["precision"], "psi": words["noise"]},
    )
    for name, (shape, rate) in {"beta": (2.0, 3.0), "psi": (4.0, 1.5)}.items():
        if name in v:
            total += stats.gamma.logpdf(v[name], shape, scale=1 / rate).sum()
            known[name] = v[name]
    beta, psi = (
        np.broadcast_to(known["beta"], num_factors),
        np.broadcast_to(known["psi"], x.shape[1]),
    )
    total += sum(
        stats.norm.logpdf(v["A"][k], 0.0, beta[k] ** -0.5).sum() for k in range(num_factors)
    )
    total += stats.norm.logpdf(v["c"], 0.0, words.get("centre", 1.0)).sum()
    shown = np.ones((len(v["mu"]), num_factors))
    if "b" in v:
        shown = v["b"]
        total += stats.beta.logpdf(
            v["pi"], 1.5 / num_factors, 0.6 * (num_factors - 1) / num_factors
        ).sum()
        total += stats.bernoulli.logpmf(v["b"], v["pi"]).sum()
    for i, p in np.argwhere(~np.isnan(x)):
        mean = v["c"][p] + sum(
            v["s"][i, k] * shown[v["z"][i], k] * v["A"][k, p] for k in range(num_factors)
        )
        total += stats.norm.logpdf(x[i, p], mean, psi[p] ** -0.5)
    return total


@cache
def drawn(name):
    """Data with holes, two rows without a label, the last row wholly missing; and values of the
    latent sites that go with them.
    """
    told = {"num_experts": 4, "num_factors": 3, "alpha": 1.0, **CASES[name]}
    values = sites_of(partial(iqgme_factors, shape=(9, 5), **told), 3)
    x = np.array(values["x"])
    holes = np.random.default_rng(0).random(x.shape) < 0.3
    holes[-1] = True
    data = told | {"x": np.where(holes, np.nan, x)}
    if told["expert"] is not None:
        data["y"] = np.where(np.isin(np.arange(9), (1, 5)), -1, np.asarray(values["y"]))
    program = Program(iqgme_factors, **data)
    return data, {site: values[site] for site in program.latent}, program


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", CASES)
def test_log_joint_equals_its_formula(name):
    data, values, program = drawn(name)
    np.testing.assert_allclose(
        by_numpy(program.log_joint)(values), formula(values, data), rtol=1e-10
    )
    assert ("b" in values) == (name != "all factors")


def features_with(**change):
    return {"features": partial(linear_features, **{**FEATURES.keywords, **change})}


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    "change",
    [
        features_with(precision=dist.Gamma(2.0, 3.1)),
        features_with(noise=dist.Gamma(4.1, 1.5)),
        features_with(centre=0.8),
        features_with(a0=1.6),
        features_with(b0=0.7),
        {"gate": partial(normal_factors, u0=0.2)},
    ],
    ids=["precision", "noise", "centre", "a0", "b0", "u0"],
)
def test_one_wrong_number_is_seen(change):
    data, values, _ = drawn("binary")
    assert abs(log_joint(iqgme_factors, data | change, values) - formula(values, data)) > 1e-3


def test_a_factor_that_an_expert_does_not_show_is_not_in_its_rows():
    _, values, program = drawn("binary")
    none, log_probs = values | {"b": 0 * values["b"]}, by_numpy(program.log_probs)
    terms, moved = (log_probs(at)["x"] for at in (none, none | {"A": values["A"] + 1.0}))
    np.testing.assert_array_equal(terms, moved)


def test_sites_plates_and_dims():
    assert Program(iqgme_factors, **many() | {"alpha": 1.0}).dims == {
        "V": ("stick",),
        "z": ("row",),
        "Lambda": ("expert", "factor", "factor_2"),
        "mu": ("expert", "factor"),
        "s": ("row", "factor"),
        "pi": ("expert", "factor"),
        "b": ("expert", "factor"),
        "beta": ("factor",),
        "A": ("factor", "feature"),
        "c": ("feature",),
        "psi": ("feature",),
        "x": ("row", "feature"),
        "lambda": ("class", "weight"),
        "zeta": ("class", "weight"),
        "w": ("class", "expert", "weight"),
        "t": ("class", "row"),
        "y": ("row",),
    }
    assert drawn("binary")[2].observed == ("x", "y")


@cache
def many():
    return simulated(simulate, 1, 500, 4, missing=0.25, unlabelled=0.1, num_classes=3)


def test_card_has_words_for_exactly_the_sites_and_knows_real_data():
    assert set(CARD.sites) == set(Program(iqgme_factors, **many()).sites)
    assert set(CARD.data) <= set(names())


@pytest.mark.slow
def test_simulated_data_have_the_moments_of_the_model():
    """A row has E x_p^2 = 1 / 4 + 1 + E A^2 E s^2 K / 2, where half of the factors are shown."""
    features = partial(linear_features, precision=2.0, noise=4.0, b0=0.5)
    told = {
        "num_experts": 2,
        "expert": None,
        "gate": partial(normal_factors, u0=1.0, nu0=20.0),
        "features": features,
    }
    draw = jax.jit(jax.vmap(lambda key: simulate(key, 1, 2, **told)["x"][0]))
    x = np.asarray(draw(random.split(random.key(0), 20_000)))
    np.testing.assert_allclose((x**2).mean(0), 0.25 + 1 + 0.5 * 2 * 3 * 0.5, atol=0.15)
    np.testing.assert_allclose(x.mean(0), 0, atol=0.05)


def test_simulated_rows_miss_what_was_asked():
    data = many()
    assert abs(np.isnan(data["x"]).mean() - 0.25) < 0.03
    assert abs((data["y"] == -1).mean() - 0.1) < 0.04
    names_of_arguments = []
    jax.eval_shape(
        lambda key: names_of_arguments.extend(simulate(key, 5, 2, expert=None)), random.key(1)
    )
    assert "x" in names_of_arguments
    assert "y" not in names_of_arguments


@pytest.mark.parametrize(
    ("x", "y", "options", "message"),
    [
        (None, None, {}, "found x of shape None"),
        (np.array([[1.0, np.inf]]), np.array([0]), {}, "x: row 0, column 1 is inf"),
        (
            np.ones((3, 2)),
            np.zeros(2, int),
            {},
            r"found y of shape \(2,\) beside x of shape \(3, 2\)",
        ),
        (
            np.ones((3, 2)),
            np.zeros(3, int),
            {"num_factors": 1},
            "iqgme_factors: found num_factors=1, wanted 2 or more",
        ),
    ],
    ids=["nothing", "infinite", "few labels", "one factor"],
)
def test_wrong_data_are_refused(x, y, options, message):
    with pytest.raises(ValueError, match=message):
        Program(iqgme_factors, x, y, **options).sites  # noqa: B018
