"""Classifiers as imputers: the completed table, in pipelines of scikit-learn."""

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.compose import ColumnTransformer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from sklearn.utils.estimator_checks import (
    check_set_output_transform,
    check_set_output_transform_pandas,
    check_transformer_get_feature_names_out,
    check_transformer_get_feature_names_out_pandas,
)

from gallery import AClassClassifier, IQGMEClassifier

pytestmark = [
    pytest.mark.usefixtures("numpyro_promotion"),
    pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning"),
]

RNG = np.random.default_rng(0)
Y = np.arange(40) % 2
X = pd.DataFrame({"a": RNG.normal(size=40) + 3 * Y})
X["b"] = 2 * X["a"] + 0.1 * RNG.normal(size=40)
X["kind"] = np.array(["low", "high"])[Y]
HOLED = X.mask(pd.DataFrame(RNG.random(X.shape) < 0.15, columns=X.columns))
SMALL = {
    "AClassClassifier": AClassClassifier(5, num_samples=5, random_state=0),
    "IQGMEClassifier": IQGMEClassifier(3, max_iter=10, random_state=0),
}


def test_the_completed_table_keeps_its_type_and_its_entries():
    imputer = clone(SMALL["AClassClassifier"])
    completed = imputer.fit_transform(HOLED, Y)
    pd.testing.assert_frame_equal(completed, imputer.impute(HOLED))
    assert not completed.isna().any(axis=None)
    is_seen = HOLED.notna()
    pd.testing.assert_frame_equal(completed.where(is_seen), HOLED)
    assert imputer.get_feature_names_out().tolist() == ["a", "b", "kind"]


def test_a_pipeline_imputes_and_classifies():
    numbers = make_pipeline(SMALL["AClassClassifier"], StandardScaler())
    model = make_pipeline(
        ColumnTransformer([("n", numbers, ["a", "b"]), ("k", OneHotEncoder(), ["kind"])]),
        LogisticRegression(),
    ).fit(HOLED.assign(kind=X["kind"]), Y)
    assert model.score(HOLED.assign(kind=X["kind"]), Y) > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_entries_are_expected_values_given_the_others_of_their_row(name):
    """Beside another column that says nearly all, better than a mean can be."""
    numbers, hidden = X[["a", "b"]].to_numpy(), np.arange(40) % 5 == 0
    holed = np.where(np.stack([hidden, np.zeros(40, bool)], 1), np.nan, numbers)
    model = clone(SMALL[name]).set_params(**({"max_iter": 200} if name[0] == "I" else {}))
    found = make_pipeline(model, LogisticRegression()).fit(holed, Y)
    error = found[0].transform(holed)[hidden, 0] - numbers[hidden, 0]
    assert np.mean(error**2) < 0.5 * np.var(numbers[hidden, 0])
    assert found.score(holed, Y) > 0.85


@pytest.mark.slow
# arrays after frames are a case of theirs
@pytest.mark.filterwarnings("ignore:X (has|does not have valid) feature names")
@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize(
    "check",
    [
        check_set_output_transform,
        check_set_output_transform_pandas,
        check_transformer_get_feature_names_out,
        check_transformer_get_feature_names_out_pandas,
    ],
)
def test_outputs_are_named_as_scikit_learn_checks(name, check):
    if name == "AClassClassifier" and check is check_set_output_transform_pandas:
        # it expects an array from a frame, unless frames are asked for
        with pytest.raises(AssertionError, match="in the fit.transform/array/df case"):
            check(name, clone(SMALL[name]))
    else:
        check(name, clone(SMALL[name]))
