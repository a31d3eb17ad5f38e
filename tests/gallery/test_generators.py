"""The generators keep their word: seeds, sizes, and the truth that they hand out."""

import numpy as np
import pytest

from gallery.generators import (
    GENERATORS,
    crp_mixture,
    gaussian_mixture,
    large_categorical,
    low_rank_matrix,
    pinwheel,
    three_gaussians,
)


def all_bytes(data):
    return {name: array.tobytes() for name, array in data.arrays.items()}


@pytest.mark.parametrize("name", sorted(GENERATORS))
def test_same_seed_same_bytes_and_another_seed_others(name):
    generate = GENERATORS[name]
    assert all_bytes(generate(seed=3)) == all_bytes(generate(seed=3))
    assert all_bytes(generate(seed=3)) != all_bytes(generate(seed=4))
    data = generate(seed=3)
    assert data.name == name
    assert data.licence


def test_pinwheel_without_noise_is_one_point_an_arm():
    data = pinwheel(
        num_classes=5, num_per_class=3, radial_std=1e-12, tangential_std=1e-12, rate=0.4, seed=1
    )
    angle = 2 * np.pi * np.repeat(np.arange(5), 3) / 5 + 0.4 * np.e
    np.testing.assert_allclose(data.x, np.column_stack([np.cos(angle), np.sin(angle)]), atol=1e-10)
    assert list(np.bincount(data.y)) == [3] * 5
    assert len(data.class_names) == 5


def test_pinwheel_noise_has_the_stated_size():
    data = pinwheel(num_classes=4, num_per_class=20_000, radial_std=0.3, tangential_std=0.1, seed=2)
    # turning keeps it: E = 1 + .3² + .1², variance 4 .3² + 2 .3⁴ + 2 .1⁴
    squared_radius = (data.x**2).sum(axis=1)
    error = np.sqrt((4 * 0.3**2 + 2 * 0.3**4 + 2 * 0.1**4) / len(data.y))
    assert abs(squared_radius.mean() - 1.1) < 4 * error


def test_crp_mixture_has_the_expected_number_of_groups():
    n, alpha, repeats = 40, 2.0, 300
    p = alpha / (alpha + np.arange(n))  # of a new table, independent from customer to customer
    counts = [
        len(crp_mixture(1, n, 1, alpha=alpha, seed=seed).probabilities) for seed in range(repeats)
    ]
    assert abs(np.mean(counts) - p.sum()) < 4 * np.sqrt((p * (1 - p)).sum() / repeats)


def test_crp_seats_by_size():
    together = [
        np.ptp(crp_mixture(1, 3, 1, alpha=1.0, seed=seed).group) == 0 for seed in range(900)
    ]
    # all three at one table: 1/2 times 2/3
    assert abs(np.mean(together) - 1 / 3) < 4 * np.sqrt(2 / 9 / 900)


def test_crp_mixture_truth_explains_its_rows():
    data = crp_mixture(
        num_classes=3, num_per_class=400, num_features=30, alpha=0.5, missing=0.25, seed=5
    )
    assert data.x.shape == (1200, 30)
    assert set(np.unique(data.x[~np.isnan(data.x)])) == {0.0, 1.0}
    assert abs(np.isnan(data.x).mean() - 0.25) < 4 * np.sqrt(0.25 * 0.75 / data.x.size)
    assert list(np.bincount(data.y)) == [400] * 3
    groups_of = [set(data.group[data.y == k]) for k in range(3)]
    # a group belongs to one class
    assert not groups_of[0] & groups_of[1] | groups_of[1] & groups_of[2]
    assert set().union(*groups_of) == set(range(len(data.probabilities)))
    p = data.probabilities[data.group]
    residual = np.nansum(data.x - p)
    assert abs(residual) < 4 * np.sqrt((p * (1 - p)).sum())


def test_gaussian_mixture_rows_lie_around_their_means():
    data = gaussian_mixture(num_groups=4, num_rows=20_000, num_features=3, separation=10.0, seed=6)
    residual = data.x - data.means[data.group]
    assert abs(residual.mean()) < 4 / np.sqrt(residual.size)
    assert abs(residual.std() - 1) < 4 / np.sqrt(2 * residual.size)
    shares = np.bincount(data.group, minlength=4) / len(data.group)
    assert np.abs(shares - data.weights).max() < 4 * 0.5 / np.sqrt(len(data.group))


def test_three_gaussians_are_those_of_the_thesis():
    data = three_gaussians(num_rows=60_000, seed=7)
    covariance = {
        0: [[0.52, -0.36], [-0.36, 0.73]],
        1: [[0.47, 0.19], [0.19, 0.7]],
        2: [[0.52, -0.36], [-0.36, 0.73]],
    }
    slope, intercept = np.array([0.75, -0.58, 0.75]), np.array([2.25, 0.58, -3.75])
    for k, centre in enumerate([(-3, 0), (1, 0), (5, 0)]):
        rows = data.x[data.group == k]
        assert abs(len(rows) / 60_000 - 1 / 3) < 0.01
        np.testing.assert_allclose(rows.mean(axis=0), centre, atol=0.03)
        np.testing.assert_allclose(np.cov(rows.T), covariance[k], atol=0.03)
        above = rows[:, 1] > slope[k] * rows[:, 0] + intercept[k]
        assert np.array_equal(data.y[data.group == k], above)
        assert abs(above.mean() - 0.5) < 0.02  # each line passes through its centre


def test_low_rank_matrix_without_noise():
    data = low_rank_matrix(num_rows=30, num_cols=20, rank=4, num_entries=200, seed=8)
    assert np.linalg.matrix_rank(data.matrix) == 4
    assert len(set(zip(data.rows, data.cols, strict=True))) == 200
    assert np.array_equal(data.values, data.matrix[data.rows, data.cols])
    assert data.noise_std == 0


@pytest.mark.parametrize("decibels", [10.0, 20.0])
def test_low_rank_matrix_noise_in_decibels(decibels):
    data = low_rank_matrix(
        num_rows=200, num_cols=200, rank=5, num_entries=40_000, snr_db=decibels, seed=9
    )
    noise = data.values - data.matrix[data.rows, data.cols]
    assert abs(10 * np.log10(np.mean(data.matrix**2) / np.mean(noise**2)) - decibels) < 0.1


def test_large_categorical_is_the_papers_experiment():
    data = large_categorical(seed=10)
    p = data.probabilities
    assert p.sum() == pytest.approx(1)
    # E[u]² / E[u²] of a uniform u
    assert np.mean(np.sqrt(p)) ** 2 / np.mean(p) == pytest.approx(0.75, abs=0.01)
    seen = np.count_nonzero(data.counts)
    expected = np.sum(1 - (1 - p) ** 300_000)
    assert abs(seen - expected) < 4 * np.sqrt(expected * (1 - expected / 10_000))
    assert abs(seen - 9035) < 150  # the paper's draw
    assert np.array_equal(np.bincount(data.y, minlength=10_000), data.counts)
    assert abs((data.counts - 300_000 * p).sum()) < 1e-6


@pytest.mark.parametrize(
    ("generate", "options", "message"),
    [
        (pinwheel, {"num_classes": 0}, "num_classes=0: wanted a whole number"),
        (pinwheel, {"radial_std": -1.0}, "radial_std"),
        (pinwheel, {"num_per_class": 2.5}, "num_per_class=2.5"),
        (crp_mixture, {"missing": 1.0}, "missing=1.0"),
        (crp_mixture, {"alpha": float("nan")}, "alpha=nan"),
        (low_rank_matrix, {"rank": 51}, "at most min"),
        (low_rank_matrix, {"num_entries": 2501}, "the matrix has only 2500"),
    ],
)
def test_sizes_that_cannot_be_are_refused(generate, options, message):
    with pytest.raises(ValueError, match=message):
        generate(**options)
