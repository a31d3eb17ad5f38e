"""iQGME of several tasks against its formula in numpy and scipy, and its simulator against
shares that are known.
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
from zoo.iqgme import normal_wishart, soft_probit
from zoo.iqgme_tasks import CARD, iqgme_tasks, simulate

pytestmark = pytest.mark.usefixtures("x64", "numpyro_promotion")

CASES = {
    "binary": {"expert": TOLD, "alpha": dist.Gamma(2.0, 1.0), "beta": dist.Gamma(2.0, 3.0)},
    "three classes": {"expert": TOLD, "num_classes": 3, "alpha": 0.7, "beta": 1.3},
    "no labels": {"expert": None, "alpha": dist.Gamma(2.0, 1.0), "beta": 0.4},
}


def log_stick(V, h):
    return (np.log(V[h]) if h < len(V) else 0.0) + np.log1p(-V[:h]).sum()


def formula(v, data):
    """With loops: values of the latent sites `v`, the model's arguments `data`."""
    v, task = {name: np.asarray(value) for name, value in v.items()}, data["task"]
    x, total = np.array(data["x"]), 0.0
    for j, place in enumerate(np.argwhere(np.isnan(x))):
        x[tuple(place)] = v["x_missing"][j]
    known = {}
    for name, rate in (("alpha", 1.0), ("beta", 3.0)):
        known[name] = data[name]
        if name in v:
            known[name] = v[name]
            total += stats.gamma.logpdf(v[name], 2.0, scale=1 / rate)
    total += (
        stats.beta.logpdf(v["U"], 1.0, known["beta"]).sum()
        + stats.beta.logpdf(v["V"], 1.0, known["alpha"]).sum()
    )
    total += sum(log_stick(v["U"], s) for own in v["c"] for s in own)
    total += sum(log_stick(v["V"][j], h) for j, h in zip(task, v["z"], strict=True))
    v["z"] = np.array([v["c"][j][h] for j, h in zip(task, v["z"], strict=True)])
    total += gate_formula(v, x, {})
    if data["expert"] is not None:
        words = data["expert"].keywords
        total += expert_prior(v, words) + label_formula(
            v, x, np.asarray(data["y"]), words, data["expert"].func
        )
    return total


@cache
def drawn(name):
    """Data with holes, two rows without a label; and values of the latent sites that go with
    them.
    """
    told = {
        "num_groups": 3,
        "num_experts": 4,
        "num_tasks": 3,
        "task": np.array([0, 2, 1, 0, 0, 1, 2, 2, 1]),
        **CASES[name],
    }
    values = sites_of(partial(iqgme_tasks, shape=(9, 2), **told), 3)
    x = np.array(values["x"])
    holes = np.random.default_rng(0).random(x.shape) < 0.3
    data = told | {"x": np.where(holes, np.nan, x)}
    if told["expert"] is not None:
        data["y"] = np.where(np.isin(np.arange(9), (1, 5)), -1, np.asarray(values["y"]))
    program = Program(iqgme_tasks, **data)
    values = {site: values[site] for site in program.latent if site != "x_missing"}
    return data, values | {"x_missing": x[holes]}, program


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", CASES)
def test_log_joint_equals_its_formula(name):
    data, values, program = drawn(name)
    np.testing.assert_allclose(
        by_numpy(program.log_joint)(values), formula(values, data), rtol=1e-10
    )
    assert set(program.latent) == set(values)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "change",
    [
        {"alpha": dist.Gamma(2.0, 1.1)},
        {"beta": dist.Gamma(2.1, 3.0)},
        {"gate": partial(normal_wishart, u0=0.2)},
    ],
    ids=["alpha", "beta", "u0"],
)
def test_one_wrong_number_is_seen(change):
    data, values, _ = drawn("binary")
    assert abs(log_joint(iqgme_tasks, data | change, values) - formula(values, data)) > 1e-3


def test_another_task_is_seen():
    data, values, _ = drawn("binary")
    moved = data | {"task": np.roll(data["task"], 1)}
    found = log_joint(iqgme_tasks, moved, values)
    assert abs(found - formula(values, data)) > 1e-3 or np.isinf(found)


def test_sites_plates_and_dims():
    _, _, program = drawn("binary")
    dims = program.dims
    assert (dims["U"], dims["V"], dims["c"], dims["z"]) == (
        ("expert_stick",),
        ("task", "stick"),
        ("task", "group"),
        ("row",),
    )
    assert (dims["mu"], dims["w"]) == (("expert", "feature"), ("class", "expert", "weight"))
    assert program.observed == ("x", "y")


@cache
def many():
    return simulated(
        simulate,
        1,
        500,
        3,
        missing=0.25,
        unlabelled=0.1,
        expert=partial(soft_probit, precision=dist.Gamma(5.0, 5.0)),
    )


def test_card_has_words_for_exactly_the_sites_and_knows_real_data():
    assert set(CARD.sites) == set(Program(iqgme_tasks, **many()).sites)
    assert set(CARD.data) <= set(names())


@pytest.mark.slow
def test_tasks_share_experts_as_often_as_their_concentration_says():
    """With one group a task, two of them are under one expert with probability 1 / (1 + beta)."""
    told = {"num_groups": 2, "num_experts": 40, "alpha": 1e-9, "beta": 3.0, "expert": None}
    draw = jax.jit(
        jax.vmap(
            lambda key: simulate(key, 1, 2, 1, gate=lambda x, z, at: z[:, None] * 1.0, **told)["x"][
                :, 0
            ]
        )
    )
    first, second = np.asarray(draw(random.split(random.key(0), 20_000))).T
    assert abs((first == second).mean() - 0.25) < 0.015


def test_simulated_rows_miss_what_was_asked():
    data = many()
    assert abs(np.isnan(data["x"]).mean() - 0.25) < 0.03
    assert abs((data["y"] == -1).mean() - 0.1) < 0.03
    np.testing.assert_array_equal(np.bincount(data["task"]), 500)


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        (
            None,
            {},
            r"iqgme_tasks task: found shape \(\), wanted the number of the task of each of 3 rows",
        ),
        (np.array([0, 1]), {}, r"found shape \(2,\)"),
        (np.array([0, 1, 0.5]), {}, "found shape"),
        (np.array([0, -1, 0]), {}, "found -1 .. 0, wanted numbers from 0"),
        (
            np.array([0, 1, 4]),
            {"num_tasks": 4},
            "found 0 .. 4, wanted numbers from 0, less than num_tasks=4",
        ),
        (np.array([0, 1, 1]), {"num_groups": 1}, "num_experts=1; wanted 2 or more"),
    ],
    ids=["none", "few", "reals", "negative", "large", "one group"],
)
def test_wrong_data_are_refused(task, options, message):
    with pytest.raises(ValueError, match=message):
        Program(iqgme_tasks, np.ones((3, 2)), np.ones(3, int), task, **options).sites  # noqa: B018
