"""Augment and reduce against its formula by SciPy: the augmented joint, its integral over eps,
its subsamples, its draws.
"""

from itertools import combinations, product

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jax import random
from scipy import integrate, sparse, stats

from gallery.datasets import names
from inference import Program
from tests.by_numpy import log_joint, simulated
from zoo import augment_reduce as module
from zoo.augment_reduce import CARD, NOISES, SparseRows, augment_reduce, simulate

pytestmark = pytest.mark.usefixtures("x64")

SCIPY = {
    "gumbel": stats.gumbel_r(),
    "normal": stats.norm(),
    "logistic": stats.logistic(),
    "laplace": stats.laplace(),
    "student_t": stats.t(5),
}
each_noise = pytest.mark.parametrize("noise", NOISES)


def data(noise="gumbel", **options):
    """Four rows, four classes, among them the last, which stands in for others."""
    x = np.random.default_rng(0).normal(size=(4, 2))
    return {
        "x": x,
        "y": np.array([0, 3, 1, 3]),
        "num_classes": 4,
        "noise": noise,
        "prior_scale": 0.7,
        **options,
    }


def values():
    rng = np.random.default_rng(1)
    return {
        name: jnp.asarray(rng.normal(size=shape))
        for name, shape in {"weights": (4, 2), "biases": 4, "eps": 4}.items()
    }


def below(noise, v, told, n, k):
    """The term of row n and class k."""
    psi = told["x"] @ v["weights"].T + v["biases"]
    return SCIPY[noise].logcdf(v["eps"][n] + psi[n, told["y"][n]] - psi[n, k])


def formula(noise, v, told):
    v = {name: np.asarray(value) for name, value in v.items()}
    prior = stats.norm.logpdf(np.append(v["weights"], v["biases"]), 0, 0.7).sum()
    pairs = ((n, k) for n in range(4) for k in range(4) if k != told["y"][n])
    return (
        prior
        + SCIPY[noise].logpdf(v["eps"]).sum()
        + sum(below(noise, v, told, n, k) for n, k in pairs)
    )


@each_noise
def test_augmented_joint_is_its_formula(noise):
    told = data(noise)
    assert float(log_joint(augment_reduce, told, values())) == pytest.approx(
        formula(noise, values(), told), rel=1e-10
    )


@pytest.mark.slow_after(2)
@each_noise
def test_integral_over_eps_is_the_probability_of_the_class(noise):
    told, v = data(noise), values()
    program = Program(augment_reduce, **told)
    at = jax.jit(
        lambda eps: (lambda terms: terms["eps"] + terms["is_below"].sum(0))(
            program.log_probs({**v, "eps": eps})
        )
    )
    exact = jax.jit(Program(augment_reduce, **told, augmented=False).log_likelihood)(
        {name: v[name] for name in ("weights", "biases")}
    )["y"]
    for n in range(4):
        found = integrate.quad(
            lambda e, n=n: np.exp(float(at(np.full(4, e))[n])),
            -30,
            40,
            points=[-2, 0, 2],
            limit=200,
        )[0]
        assert np.log(found) == pytest.approx(
            float(exact[n]), abs=1e-3 if noise == "laplace" else 1e-6
        )


def test_another_weight_of_eps_is_seen(monkeypatch):
    monkeypatch.setitem(NOISES, "normal", dist.Normal(0.0, 1.05))
    with pytest.raises(AssertionError):
        test_augmented_joint_is_its_formula("normal")


def mean_over_subsamples(told, own_negatives):
    """The mean log joint over every choice of a subsample.

    A subsample has two of the four rows, and two of the three other classes.
    """
    v, density = (
        values(),
        jax.jit(Program(augment_reduce, **told, batch_size=2, num_negatives=2).log_joint),
    )
    pairs = list(combinations(range(3), 2))
    negatives = (
        [np.array(p).T for p in product(pairs, pairs)]
        if own_negatives
        else [np.array(p) for p in pairs]
    )
    total = []
    for rows, other in product(combinations(range(4), 2), negatives):
        at = np.array(rows)
        given = {**v, "eps": np.asarray(v["eps"])[at], "row": at, "other": other}
        total.append(float(density(given)))
    return np.mean(total)


@pytest.mark.parametrize("own_negatives", [False, True], ids=["shared by the batch", "of each row"])
def test_subsampled_joint_is_right_on_average(own_negatives):
    told = data("logistic")
    assert mean_over_subsamples(told, own_negatives) == pytest.approx(
        formula("logistic", values(), told), rel=1e-10
    )


def test_a_class_that_nothing_stands_in_for_is_seen(monkeypatch):
    skip = lambda x, weights, biases, chosen, other, last: module._utility(
        x, weights, biases, other[:, None]
    )
    monkeypatch.setattr(module, "_of_others", skip)
    with pytest.raises(AssertionError):
        test_subsampled_joint_is_right_on_average(False)


@pytest.mark.parametrize(
    "sizes", [{}, {"batch_size": 2, "num_negatives": 2}], ids=["all", "subsampled"]
)
def test_sparse_rows_are_dense_rows(sizes):
    told = data(**sizes)
    told["x"][0] = told["x"][1, 0] = 0.0
    rows = SparseRows.of(sparse.csr_matrix(told["x"]))
    assert rows.shape == told["x"].shape
    v = values()
    if sizes:
        v |= {
            "eps": np.asarray(v["eps"])[:2],
            "row": jnp.array([1, 3]),
            "other": jnp.array([[0, 1], [2, 1]]),
        }
    found = [log_joint(augment_reduce, {**told, "x": x}, v) for x in (told["x"], rows)]
    assert float(found[0]) == pytest.approx(float(found[1]), rel=1e-12)
    known = {name: v[name] for name in ("weights", "biases")}
    exact = [
        log_joint(augment_reduce, {**told, "x": x, "augmented": False, "batch_size": None}, known)
        for x in (told["x"], rows)
    ]
    assert float(exact[0]) == pytest.approx(float(exact[1]), rel=1e-12)


def test_rows_are_embedded_before_classes_answer():
    told = data("normal")
    told["x"] = np.random.default_rng(3).normal(size=(4, 5)) * (np.arange(20).reshape(4, 5) % 3 > 0)
    embedding = np.random.default_rng(4).normal(size=(5, 2))
    wanted = (
        formula("normal", values(), told | {"x": told["x"] @ embedding})
        + stats.norm.logpdf(embedding, 0, 0.5**0.5).sum()
    )
    for x in (told["x"], SparseRows.of(sparse.csr_matrix(told["x"]))):
        program = Program(augment_reduce, **{**told, "x": x}, rank=2)
        assert float(
            jax.jit(program.log_joint)(values() | {"embedding": embedding})
        ) == pytest.approx(wanted, rel=1e-10)
    assert program.dims["embedding"] == ("feature", "coordinate")


def test_places_that_fill_up_touch_no_other_weight():
    rows = SparseRows.of(sparse.csr_matrix(np.array([[0.0, 2.0, 3.0], [0.0, 4.0, 0.0]])))
    assert rows.columns.tolist() == [[1, 2], [1, 1]]
    assert rows.values.tolist() == [[2.0, 3.0], [4.0, 0.0]]


def test_flat_prior_leaves_the_likelihood():
    told = data(prior_scale=None, augmented=False)
    v = {name: values()[name] for name in ("weights", "biases")}
    program = Program(augment_reduce, **told)
    assert float(jax.jit(program.log_joint)(v)) == pytest.approx(
        float(np.sum(jax.jit(program.log_likelihood)(v)["y"]))
    )


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("noise", ["gumbel", "normal", "student_t"])
def test_simulated_classes_have_their_probabilities(noise):
    v = {"weights": values()["weights"], "biases": values()["biases"]}
    x = np.repeat(np.array([[0.3, -1.0]]), 20_000, axis=0)
    y = np.arange(len(x)) % 4
    program = Program(augment_reduce, x, y, num_classes=4, noise=noise, augmented=False)
    drawn = program.predict(random.key(0), v)["y"]
    wanted = np.exp(jax.jit(program.with_arguments(x=x[:4], y=y[:4]).log_likelihood)(v)["y"])
    assert (
        stats.chisquare(np.bincount(drawn, minlength=4), 20_000 * wanted / wanted.sum()).pvalue
        > 1e-3
    )


def test_simulate_gives_the_arguments_of_the_model():
    told = simulated(
        simulate, 0, num_rows=50, num_classes=6, noise="normal", batch_size=10, num_negatives=2
    )
    program = Program(augment_reduce, **told)
    assert {name: site.shape for name, site in program.sites.items()} == {
        "weights": (6, 3),
        "biases": (6,),
        "eps": (10,),
        "is_below": (2, 10),
    }
    assert program.dims["weights"] == ("class", "feature")
    assert len(np.unique(told["y"])) > 1


def test_card_names_data_sets_and_sites():
    assert set(CARD.data) <= set(names())
    told = simulated(simulate, 0)
    assert set(CARD.sites) == {
        *Program(augment_reduce, **told, rank=2).sites,
        *Program(augment_reduce, **told, augmented=False).sites,
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y": np.array([0, 4, 1, 3])}, r"y: found 0 \.\. 4, wanted classes 0 \.\. 3"),
        ({"y": np.array([0, -1, 1, 3])}, "Leave out rows of unknown class"),
        ({"y": np.zeros(4)}, "wanted integers"),
        ({"y": np.zeros(3, int)}, r"wanted integers \(4,\)"),
        ({"num_classes": 1}, "num_classes: found 1"),
        ({"x": np.full((4, 2), np.nan)}, "x: row 0 has an entry that is not finite"),
        ({"x": np.zeros((4, 0))}, "x: found shape"),
        ({"noise": "cauchy"}, "noise: found 'cauchy'"),
        ({"num_negatives": 4}, "num_negatives: found 4, wanted 1 .. 3"),
        ({"batch_size": 5}, "batch_size: found 5, wanted 1 .. 4"),
        ({"rank": 3}, "rank: found 3, wanted 1 .. 2"),
    ],
    ids=[
        "label too high",
        "label -1",
        "labels of floats",
        "too few labels",
        "one class",
        "NaN",
        "no feature",
        "no noise",
        "S",
        "B",
        "rank",
    ],
)
def test_bad_input_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        _ = Program(augment_reduce, **data() | change).sites
