"""Scores against scikit-learn, and against numbers worked out by hand."""

import numpy as np
import pytest
import xarray as xr
from scipy.stats import norm
from sklearn import calibration, metrics

from diagnostics import scores

Y = np.array([0, 1, 1])
P = np.array([[0.8, 0.2], [0.4, 0.6], [0.9, 0.1]])


@pytest.fixture
def rng():
    return np.random.default_rng(4)


@pytest.fixture(params=[2, 4], ids=["two classes", "four classes"])
def prediction(request, rng):
    p = rng.dirichlet(np.ones(request.param), size=300)
    y = (p.cumsum(1) < rng.uniform(size=(300, 1))).sum(1)
    return y, p


def test_by_hand():
    assert scores.log_score(Y, P) == pytest.approx((np.log(0.8) + np.log(0.6) + np.log(0.1)) / 3)
    assert scores.perplexity(Y, P) == pytest.approx((0.8 * 0.6 * 0.1) ** (-1 / 3))
    assert scores.brier(Y, P) == pytest.approx(2 * (0.04 + 0.16 + 0.81) / 3)
    assert scores.accuracy(Y, P) == pytest.approx(2 / 3)
    assert scores.auc(Y, P) == pytest.approx(0.5)  # 0.6 is above 0.2, 0.1 is below
    assert scores.log_score(Y, P[:, 1]) == scores.log_score(Y, P)


def test_uniform_prediction_has_the_perplexity_of_its_classes():
    assert scores.perplexity(np.array([0, 3, 2]), np.full((3, 5), 0.2)) == pytest.approx(5)


def test_scores_are_scikit_learn_s(prediction):
    y, p = prediction
    assert scores.log_score(y, p) == pytest.approx(-metrics.log_loss(y, p))
    assert scores.accuracy(y, p) == metrics.accuracy_score(y, p.argmax(1))
    assert scores.brier(y, p) == pytest.approx(metrics.brier_score_loss(y, p, scale_by_half=False))
    area = (
        metrics.roc_auc_score(y, p[:, 1])
        if p.shape[1] == 2
        else metrics.roc_auc_score(y, p, multi_class="ovr", average="macro")
    )
    assert scores.auc(y, p) == pytest.approx(area)


def test_draws_are_averaged_before_they_are_scored(rng):
    p = rng.dirichlet(np.ones(3), size=(2, 5, 40))
    y = rng.integers(0, 3, 40)
    draws = xr.DataArray(p, dims=("chain", "draw", "row", "class"))
    assert scores.log_score(y, draws) == pytest.approx(-metrics.log_loss(y, p.mean((0, 1))))
    mean_of_scores = np.mean([scores.log_score(y, one) for one in p.reshape(-1, 40, 3)])
    # Jensen: the other order is another, worse number
    assert scores.log_score(y, draws) > mean_of_scores + 0.1


def test_rows_without_a_class_are_left_out(prediction):
    y, p = prediction
    some = np.where(np.arange(300) < 50, -1, y)
    for score in (
        scores.log_score,
        scores.brier,
        scores.accuracy,
        scores.auc,
        scores.expected_calibration_error,
    ):
        assert score(some, p) == score(y[50:], p[50:])


def test_impossible_class_scores_minus_infinity():
    assert scores.log_score(np.array([0]), np.array([[0.0, 1.0]])) == -np.inf


@pytest.mark.parametrize("strategy", ["uniform", "quantile"])
def test_curve_is_scikit_learn_s(prediction, strategy):
    y, p = prediction
    curve = scores.calibration_curve(y, p, of=1, bins=7, strategy=strategy)
    observed, predicted = calibration.calibration_curve(
        y == 1, p[:, 1], n_bins=7, strategy=strategy
    )
    np.testing.assert_allclose(curve["observed"], observed)
    np.testing.assert_allclose(curve["predicted"], predicted)
    assert curve["count"].sum() == 300


def test_intervals_are_wilson_s():
    y = np.array([1] * 3 + [0] * 7)
    curve = scores.calibration_curve(y, np.full(10, 0.25), of=1, level=0.95)
    z, n, f = norm.ppf(0.975), 10, 0.3
    centre, half = (
        (f + z**2 / (2 * n)) / (1 + z**2 / n),
        z * np.sqrt(f * (1 - f) / n + z**2 / (4 * n**2)) / (1 + z**2 / n),
    )
    assert (curve["lower"].item(), curve["upper"].item()) == pytest.approx(
        (centre - half, centre + half)
    )


def test_intervals_cover_calibrated_predictions_and_not_sharpened_ones(rng):
    p = rng.uniform(size=20000)
    y = (rng.uniform(size=20000) < p).astype(int)
    curve = scores.calibration_curve(y, p, of=1, level=0.999)
    assert ((curve["lower"] <= curve["predicted"]) & (curve["predicted"] <= curve["upper"])).all()
    sharp = p**2 / (p**2 + (1 - p) ** 2)
    curve = scores.calibration_curve(y, sharp, of=1, level=0.999)
    assert (
        (curve["lower"] > curve["predicted"]) | (curve["predicted"] > curve["upper"])
    ).sum() >= 8


def test_calibration_error_by_hand():
    p = np.array([0.1, 0.1, 0.9, 0.9, 0.9, 0.9])
    y = np.array([0, 1, 1, 1, 1, 0])
    assert scores.expected_calibration_error(y, p, of=1) == pytest.approx((2 * 0.4 + 4 * 0.15) / 6)
    # the top class has 0.9 in every row
    assert scores.expected_calibration_error(y, p) == pytest.approx(abs(4 / 6 - 0.9))


def test_top_class_event(prediction):
    y, p = prediction
    curve = scores.calibration_curve(y, p, bins=1)
    assert curve["observed"].item() == scores.accuracy(y, p)
    assert curve["predicted"].item() == pytest.approx(p.max(1).mean())


@pytest.mark.parametrize(
    ("y", "p", "message"),
    [
        ([0, 1], np.log(P[:2]), "take exp of log probabilities"),
        ([0, 2], P[:2], "classes 0 to 1"),
        ([0, 1], P, r"found \(3, 2\) for \(2,\)"),
        ([-1, -1], P[:2], "no row has a class"),
        (["a", "b"], P[:2], "LabelEncoder"),
    ],
)
def test_input_is_checked(y, p, message):
    with pytest.raises(ValueError, match=message):
        scores.log_score(np.array(y), p)


def test_auc_of_one_class_is_refused():
    with pytest.raises(ValueError, match="two classes at least"):
        scores.auc(np.array([1, 1, 1]), P)
