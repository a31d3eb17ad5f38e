"""Labels that every estimator reads the same way."""

import numpy as np
import pandas as pd
import pytest

from gallery._labels import coded, codes_among, declared


def test_many_classes_that_are_declared_are_classes():
    """scikit-learn warns where most labels occur once, and here each one does."""
    np.testing.assert_array_equal(declared(np.arange(1000)[::-1]), np.arange(1000))


def test_a_continuous_target_is_none_of_classes():
    with pytest.raises(ValueError, match="Unknown label type"):
        coded(np.linspace(0, 1, 20))


def test_a_message_names_some_of_very_many_classes():
    with pytest.raises(
        ValueError, match=r"row 0 has the class -5; .* 19\] and 99980 more\. What learns"
    ) as caught:
        codes_among([-5], np.arange(100_000))
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "y",
    [["a", "-1"], np.array(["a", "-1"], object), pd.Series(["a", "-1"], dtype="string")],
    ids=["list", "object", "pandas"],
)
def test_an_unlabelled_row_is_a_number(y):
    with pytest.raises(ValueError, match="y: found the text '-1' among texts"):
        coded(y)


@pytest.mark.parametrize(
    "classes", [np.array(["a", -1], dtype=object), np.array([-1, "b", "a"], dtype=object)]
)
def test_unlabelled_is_no_class_among_texts(classes):
    with pytest.raises(ValueError, match="classes: found -1 among texts"):
        declared(classes)
