"""A fit whose result is not finite raises, and names the settings that were given."""

import numpy as np
import pytest

from gallery import AClassClassifier, IQGMEClassifier
from gallery._finite import check_finite
from inference.kernels.particle_filter.kernel import FilterState

pytestmark = pytest.mark.usefixtures("numpyro_promotion")

ROWS = np.random.default_rng(0).normal(size=(12, 2)), np.arange(12) % 2


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_is_named_with_the_settings(value):
    with pytest.raises(ValueError, match=r"bound came out NaN.*one of alpha=0\.5, gamma=2"):
        check_finite(AClassClassifier(alpha=0.5, gamma=2), bound=np.array([1.0, value]), mean=0.0)
    with pytest.raises(ValueError, match="infinite; a column of X"):
        check_finite(AClassClassifier(), bound=value)
    check_finite(AClassClassifier(), bound=1.0, mean=np.zeros(3))


@pytest.mark.parametrize("name", ["alpha", "gamma"])
@pytest.mark.parametrize("value", [1e300, 1e-300])
def test_concentrations_out_of_range_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name}: found .*wanted a positive number, 1e-30 to"):
        AClassClassifier(**{name: value}).fit(*ROWS)


def test_a_fit_that_is_not_finite_leaves_no_classifier(monkeypatch):
    monkeypatch.setattr(FilterState, "total_log_evidence", lambda state: np.nan)
    classifier = AClassClassifier(random_state=0)
    with pytest.raises(ValueError, match="log_evidence_ came out NaN"):
        classifier.fit(*ROWS)
    assert not hasattr(classifier, "classes_")


def test_thousands_of_columns_ask_for_factors():
    wide = np.random.default_rng(0).normal(size=(12, 3000))
    with pytest.raises(ValueError, match="X: found 3000 columns.*n_factors=20"):
        IQGMEClassifier().fit(wide, np.arange(12) % 2)
