"""The peers against closed forms, the protocols against what they promise."""

import os

import numpy as np
import pandas as pd
import pytest
from scipy.special import betaln

from tests.bench import aclass_peers
from tests.bench.aclass_density import Fit, Mixture, density_table, divergence, one_component
from tests.bench.aclass_peers import PEERS, error_table, imputed, leave_one_out
from tests.bench.aclass_protocols import BARS, TABLES, Cell, components, frame, repetition

NAN = np.nan
RNG = np.random.default_rng(0)
needs_copies = pytest.mark.skipif(
    not os.environ.get("ZOO_DATA"), reason="set ZOO_DATA to a folder with copies of the data sets"
)
MIXED = pd.DataFrame(
    {
        "coin": [0, 1, 1, NAN, 0, 1, 0, 1.0],
        "kind": pd.Categorical(
            ["a", "b", None, "c", "b", "a", "c", "a"], categories=["a", "b", "c", "d"]
        ),
        "size": [2.5, 3, NAN, 9, 8, 2, 7, 3.5],
    }
)


def binary_rows(num_rows, num_features, missing=0.0):
    x = RNG.integers(2, size=(num_rows, num_features)).astype(float)
    return np.where(RNG.random(x.shape) < missing, NAN, x)


def test_naive_bayes_is_a_ratio_of_marginal_likelihoods():
    x, y, new = binary_rows(30, 5, 0.3), RNG.integers(3, size=30), binary_rows(40, 5, 0.3)

    def log_marginal(rows):
        return betaln(0.5 + (rows == 1).sum(0), 0.5 + (rows == 0).sum(0)).sum()

    joint = np.array(
        [
            [
                np.log((y == k).sum() + 1)
                + log_marginal(np.vstack([x[y == k], row]))
                - log_marginal(x[y == k])
                for k in range(3)
            ]
            for row in new
        ]
    )
    np.testing.assert_array_equal(PEERS["naive Bayes"](x, y, new), joint.argmax(1))
    found = aclass_peers._discrete(x, np.eye(3)[y], new, np.full(5, 2))
    np.testing.assert_allclose(np.log(np.bincount(y) + 1) + found, joint, rtol=1e-12)


def test_naive_bayes_of_categories_and_numbers():
    member = np.eye(2)[[0, 0, 1, 1, 0, 1, 1, 0]]
    codes, levels = aclass_peers._codes(MIXED)
    assert list(levels) == [2, 4, 0]
    found = aclass_peers._discrete(
        codes[:, 1:2], member, np.array([[0.0], [3.0], [NAN]]), levels[1:2]
    )
    # class 0: a b b a; class 1: c a c
    np.testing.assert_allclose(np.exp(found), [[2.5 / 6, 1.5 / 5], [0.5 / 6, 0.5 / 5], [1, 1]])
    found = aclass_peers._normal(codes[:, 2:], member, np.array([[3.0], [NAN]]))
    values = [np.array([2.5, 3, 8, 3.5]), np.array([9, 2, 7])]
    variances = [
        (np.nanvar(MIXED["size"], ddof=0) + ((v - v.mean()) ** 2).sum()) / (1 + len(v))
        for v in values
    ]
    wanted = [
        -0.5 * (3 - v.mean()) ** 2 / s - 0.5 * np.log(2 * np.pi * s)
        for v, s in zip(values, variances, strict=True)
    ]
    np.testing.assert_allclose(found, [wanted, [0, 0]])


@pytest.mark.parametrize("penalty", [1e-3, 1, 100])
def test_leave_one_out_leaves_one_out(penalty):
    x, target = binary_rows(12, 4), RNG.choice([-1.0, 1.0], size=(12, 2))
    kernel = (1 + x @ x.T) ** 2

    def missed_by(i):
        rest = np.arange(12) != i
        return target[i] - kernel[i, rest] @ np.linalg.solve(
            kernel[rest][:, rest] + penalty * np.eye(11), target[rest]
        )

    eigenvalues, q = np.linalg.eigh(kernel)
    wanted = [missed_by(i) for i in range(12)]
    np.testing.assert_allclose(leave_one_out(eigenvalues, q, target, penalty), wanted, rtol=1e-6)
    # what each row is missed by, itself included
    fitted = q @ ((penalty / (eigenvalues + penalty))[:, None] * (q.T @ target))
    assert not np.allclose(fitted, wanted, rtol=1e-2)


def test_least_squares_bends_and_logistic_regression_does_not():
    x = np.array([[0, 0], [0, 1], [1, 0], [1, 1.0]] * 5)
    y = (x[:, 0] != x[:, 1]).astype(int)
    np.testing.assert_array_equal(PEERS["RLS2"](x, y, x[:4]), y[:4])
    assert (PEERS["logistic regression"](x, y, x[:4]) != y[:4]).any()


def test_logistic_regression_ends_where_the_penalised_gradient_is_zero(monkeypatch):
    kept = []

    class Kept(aclass_peers.LogisticRegression):
        def __init__(self, C=1.0, max_iter=100):
            super().__init__(C=C, max_iter=max_iter, tol=1e-8)
            kept.append(self)

    monkeypatch.setattr(aclass_peers, "LogisticRegression", Kept)
    x, y = binary_rows(60, 3), RNG.integers(3, size=60)
    PEERS["logistic regression"](x, y, x)
    residual = np.eye(3)[y] - kept[0].predict_proba(x)
    np.testing.assert_allclose(residual.T @ x, 0.01 * kept[0].coef_, atol=1e-4)
    np.testing.assert_allclose(residual.sum(0), 0, atol=1e-4)
    assert np.abs(0.01 * kept[0].coef_).max() > 1e-3  # so that another penalty would be seen


def test_online_mean_imputation():
    train, test = imputed(
        np.array([[NAN, 1], [1, NAN], [NAN, 0], [0, NAN]]), np.array([[NAN, NAN], [1, 0]])
    )
    np.testing.assert_allclose(train, [[0.5, 1], [1, 0.75], [0.75, 0], [0, 0.5]])
    np.testing.assert_allclose(test, [[0.5, 0.5], [1, 0]])


def test_tables_as_numbers():
    train, test = aclass_peers.as_numbers(MIXED, pd.DataFrame(MIXED.iloc[[3, 2]]))
    np.testing.assert_allclose(train[0], [0, 1, 0, 0, 0, 0.5 / 7])
    np.testing.assert_allclose(test, [[NAN, 0, 0, 1, 0, 1], [1, NAN, NAN, NAN, NAN, NAN]])
    assert components(MIXED) == {"coin": "bernoulli", "kind": "categorical", "size": "normal"}


@pytest.mark.parametrize("name", PEERS)
def test_peers_take_missing_cells_of_every_kind(name):
    y = np.array([3, 7, 3, 7, 3, 7, 3, 7])
    assert set(PEERS[name](MIXED, y, MIXED)) <= {3, 7}
    x = binary_rows(40, 6, 0.3)
    assert (PEERS[name](x, RNG.integers(2, size=40), x[:5])).shape == (5,)


def test_mixture_density_sums_to_one_and_divergence_is_exact():
    truth, other = (Mixture.draw(RNG, size, 6) for size in (3, 2))
    every = np.array(np.meshgrid(*[[0.0, 1.0]] * 6)).reshape(6, -1).T
    p = np.exp(truth.log_density(every))
    assert p.sum() == pytest.approx(1)
    exact = p @ (truth.log_density(every) - other.log_density(every))
    estimates = [divergence(truth, other.log_density, truth.sample(RNG, 500)) for _ in range(40)]
    assert abs(np.mean(estimates) - exact) < 3 * np.std(estimates, ddof=1) / np.sqrt(40)
    assert divergence(truth, truth.log_density, every) == 0


def test_mixture_samples_have_its_moments():
    truth = Mixture.draw(RNG, 4, 5)
    x = truth.sample(RNG, 40_000)
    second = truth.coins.T @ truth.coins / 4
    np.fill_diagonal(second, truth.coins.mean(0))
    np.testing.assert_allclose(x.T @ x / len(x), second, atol=4 * 0.5 / 200)


def test_synthetic_repetitions():
    few, many = (repetition("synthetic", size, 0.25, seed=3) for size in (50, 200))
    assert [array.shape for array in many] == [(200, 100), (200,), (500, 100), (500,)]
    for name in ("x_test", "y_test"):
        np.testing.assert_array_equal(getattr(few, name), getattr(many, name))
    np.testing.assert_array_equal(few.x_train, many.x_train[:50])
    assert np.isnan(many.x_train).mean() == pytest.approx(0.25, abs=0.01)
    assert np.isnan(many.x_test).mean() == pytest.approx(0.25, abs=0.01)
    more = repetition("synthetic", 50, 0.5, seed=3)
    assert not (np.isnan(few.x_train) & ~np.isnan(more.x_train)).any()
    assert not np.array_equal(repetition("synthetic", 50, 0.25, seed=4).y_test, few.y_test)


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match=r"no protocol 'digits'; there are synthetic, .*soybean"):
        repetition("digits", 10)
    with pytest.raises(ValueError, match="size=100.*'pima' is cross-validated"):
        repetition("pima", 100)
    with pytest.raises(ValueError, match="size=None: 'synthetic' wants"):
        repetition("synthetic")


def test_real_repetitions_do_not_share_rows(monkeypatch):
    x = np.arange(700.0)[:, None]
    monkeypatch.setattr(
        "tests.bench.aclass_protocols._arrays", lambda name: (x, np.zeros(700, dtype=int))
    )
    drawn = repetition("20news_w100", 200)
    assert len({*drawn.x_train[:, 0], *drawn.x_test[:, 0]}) == 700
    with pytest.raises(ValueError, match="size=201: '20news_w100' has 700 rows"):
        repetition("20news_w100", 201)


@needs_copies
@pytest.mark.parametrize("name", TABLES)
def test_folds_cover_the_table_once(name):
    x, y = frame(name)
    folds = [repetition(name, seed=seed) for seed in range(10)]
    tests = pd.concat([pd.DataFrame(fold.x_test) for fold in folds])
    pd.testing.assert_frame_equal(
        tests.sort_values(list(x)).reset_index(drop=True),
        x.sort_values(list(x)).reset_index(drop=True),
    )
    assert all(len(fold.y_train) + len(fold.y_test) == len(y) for fold in folds)
    counts = np.array([np.bincount(fold.y_test, minlength=y.max() + 1) for fold in folds])
    np.testing.assert_array_equal(counts.sum(0), np.bincount(y))
    assert np.ptp(counts, axis=0).max() <= 1
    assert all((pd.DataFrame(fold.x_train).dtypes == x.dtypes).all() for fold in folds)


@needs_copies
def test_columns_of_the_tables():
    kinds = {name: components(frame(name)[0]) for name in TABLES}
    assert set(kinds["house_votes"].values()) == {"bernoulli"}
    assert [name for name, kind in kinds["zoo_animals"].items() if kind != "bernoulli"] == ["legs"]
    assert set(kinds["pima"].values()) == {"normal"}
    assert set(kinds["breast_cancer"].values()) == {"categorical"}
    assert sorted(kinds["soybean"].values()).count("categorical") == 19


def test_error_table(capsys):
    def constant(x_train, y_train, x_test):
        return np.zeros(len(x_test), dtype=int)

    cell = Cell("synthetic", 20, 0.5)
    assert cell._replace(size=100) in BARS
    losses = error_table({"zero": constant}, [cell], repetitions=3)
    wanted = [(repetition("synthetic", 20, 0.5, seed=seed).y_test != 0).mean() for seed in range(3)]
    np.testing.assert_allclose(losses[cell, "zero"], wanted)
    mean, error = np.mean(wanted), np.std(wanted, ddof=1) / np.sqrt(3)
    assert (
        capsys.readouterr().out.splitlines()[-1]
        == f"| synthetic | 0.5 | 20 | {mean:.3f} ± {error:.3f} |"
    )


def test_density_table(capsys):
    def uniform(x):
        return Fit(lambda rows: np.full(len(rows), -50 * np.log(2)), 7)

    values = density_table(
        {"one component": one_component, "uniform": uniform},
        components=(1,),
        sizes=(500,),
        repetitions=2,
    )
    assert values[1, 500, "one component"][:, 0].max() < 0.1  # 50 coins, each off by 1 / (2 · 500)
    assert values[1, 500, "uniform"][:, 0].min() > 10
    assert capsys.readouterr().out.splitlines()[-1].endswith("| 7.000 ± 0.000 |")
