"""Labels that every estimator reads the same way."""

import numpy as np
import pandas as pd
import pytest
from sklearn.utils.class_weight import compute_class_weight

import gallery
from gallery._labels import class_weights, coded, codes_among, declared, reweighted


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


CLASSES, CODES = np.array(["a", "b", "c"]), np.array([0, 0, 1, -1, 2, 0])


def test_balanced_weights_are_those_of_scikit_learn():
    labelled = CODES[CODES >= 0]
    wanted = compute_class_weight("balanced", classes=np.arange(3), y=labelled)
    np.testing.assert_allclose(class_weights("balanced", CLASSES, CODES), wanted)
    np.testing.assert_array_equal(class_weights({"b": 3}, CLASSES, CODES), [1, 3, 1])
    np.testing.assert_array_equal(class_weights(None, CLASSES, CODES), [1, 1, 1])


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        ("even", r"class_weight: found 'even', wanted {class: factor}, 'balanced' or None"),
        ({"d": 1}, r"class_weight: found the class 'd', wanted some of \['a', 'b', 'c'\]"),
        ({"a": 0}, r"class_weight: found 0 of 'a', wanted a number above 0"),
    ],
)
def test_wrong_class_weights_are_named(weight, message):
    with pytest.raises(ValueError, match=message):
        class_weights(weight, CLASSES, CODES)


def test_reweighted_classes_follow_bayes_rule():
    """A density of each class, and its share among the rows of the fit and among others."""
    density, share, other = np.array([[0.2, 3.0]]), np.array([0.9, 0.1]), np.array([0.5, 0.5])
    posterior = lambda share: density * share / (density @ share)[:, None]
    found = reweighted(np.log(posterior(share)), other / share)
    np.testing.assert_allclose(np.exp(found), posterior(other))


X, Y = np.arange(24.0).reshape(12, 2) % 7, np.array(["a", "b", "b"] * 4)


@pytest.mark.usefixtures("numpyro_promotion")
def test_predictions_take_the_weights_of_the_classes():
    fits = {
        str(weight): gallery.AugmentReduceClassifier(
            max_iter=5, random_state=0, class_weight=weight
        ).fit(X, Y)
        for weight in (None, {"b": 9.0}, "balanced")
    }
    p = fits["None"].predict_proba(X)
    for name, factors in (("{'b': 9.0}", [1, 9]), ("balanced", [1.5, 0.75])):
        wanted = p * factors / (p @ factors)[:, None]
        np.testing.assert_allclose(fits[name].predict_proba(X), wanted, rtol=1e-5)
    assert fits["{'b': 9.0}"].top_k(X, 1)[0].tolist() == [["b"]] * 12
    with pytest.raises(ValueError, match="class_weight: found 'balanced', which needs the labels"):
        fits["balanced"].partial_fit(X, Y)


@pytest.mark.parametrize("name", gallery.__all__)
def test_weights_of_rows_are_refused_with_a_reason(name):
    estimator = getattr(gallery, name)()
    with pytest.raises(TypeError, match=f"sample_weight: {name} takes none, since "):
        estimator.fit(X, Y, sample_weight=np.ones(12))
    with pytest.raises(TypeError, match=r"fit\(\) got an unexpected keyword argument 'weight'"):
        estimator.fit(X, Y, weight=1)
