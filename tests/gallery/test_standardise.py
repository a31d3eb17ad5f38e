"""Means and standard deviations of columns are those that NumPy computes, whatever is missing
and however large the numbers are.
"""

import numpy as np
import pytest

from gallery._standardise import Standardiser

NAN = np.nan


def table(missing=0.3):
    rng = np.random.default_rng(0)
    x = rng.normal([0.0, 5.0, -3e4], [1.0, 0.1, 40.0], (50, 3))
    return np.where(rng.random(x.shape) < missing, NAN, x)


@pytest.mark.parametrize("missing", [0.0, 0.3])
def test_mean_and_deviation_are_those_of_what_is_there(missing):
    x = table(missing)
    standardiser = Standardiser.learn(x)
    np.testing.assert_allclose(standardiser.mean, np.nanmean(x, 0), rtol=1e-12)
    np.testing.assert_allclose(standardiser.scale, np.nanstd(x, 0), rtol=1e-9)
    np.testing.assert_array_equal(standardiser.varies, True)
    np.testing.assert_allclose(standardiser.restore(standardiser.standardise(x)), x, rtol=1e-12)


def test_other_rows_are_on_the_same_scale():
    standardiser = Standardiser.learn(np.array([[1.0], [3.0]]))
    np.testing.assert_array_equal(
        standardiser.standardise(np.array([[5.0], [NAN]])), [[3.0], [NAN]]
    )


def test_a_column_alone_has_the_scale_that_it_has_beside_others():
    x = table()
    alone, beside = Standardiser.learn(x[~np.isnan(x[:, 1]), 1]), Standardiser.learn(x)
    np.testing.assert_allclose(beside.mean[1], alone.mean, rtol=1e-12)
    np.testing.assert_allclose(beside.scale[1], alone.scale, rtol=1e-9)


@pytest.mark.parametrize("unit", [1e-320, 1e-200, 1e200, 1e307])
def test_numbers_may_be_of_any_size(unit):
    x = np.array([1.0, 3.0, 2.0, 6.0]) * unit
    coded = Standardiser.learn(x).standardise(x)
    np.testing.assert_allclose([coded.mean(), coded.std()], [0, 1], atol=1e-3)


@pytest.mark.parametrize(
    "values", [np.full(50, 0.1), [0.3] * 9 + [0.1 + 0.2], np.zeros(5), [NAN] * 4, [7.0, NAN]]
)
def test_a_column_that_does_not_vary_keeps_its_unit(values):
    """The mean of fifty 0.1 is not 0.1."""
    standardiser = Standardiser.learn(np.asarray(values))
    assert standardiser.scale == 1
    assert not standardiser.varies
    np.testing.assert_allclose(standardiser.mean, np.nan_to_num(values).max(), rtol=1e-12)


@pytest.mark.parametrize(("centre", "spread"), [(0.0, 1e-13), (1.7e9, 0.05), (-1e-6, 1e-17)])
def test_columns_far_from_zero_vary(centre, spread):
    column = centre + spread * np.random.default_rng(0).normal(size=50)
    assert Standardiser.learn(
        np.column_stack([np.full(50, 0.1), column, np.zeros(50)])
    ).kept.tolist() == [1]


def test_kept_columns_are_restored_beside_constant_ones():
    x = np.array([[7.0, 1.0], [7.0, 3.0]])
    standardiser = Standardiser.learn(x)
    z = standardiser.standardise_kept(x, limit=0.5)
    np.testing.assert_array_equal(z, [[-0.5], [0.5]])
    np.testing.assert_array_equal(standardiser.restore_kept(2 * z), x)


def test_where_no_column_varies_the_first_is_kept():
    assert Standardiser.learn(np.ones((4, 3))).kept.tolist() == [0]
