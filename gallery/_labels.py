"""Class labels, from the convention of scikit-learn to codes, and back by `classes[code]`.

-1 is the label of a row whose class is unknown.

    classes, codes = coded(y)           # codes 0 .. K - 1, or -1
    codes = codes_among(y_more, classes)
    weight = class_weights(class_weight, classes, codes)      # [class]
    log_proba = reweighted(log_proba, weight)

-1 is a number, among numbers or in an array of dtype object. The labels -1 and 1 and no other are
scikit-learn's coding of two classes: as one class and unlabelled rows they would say nothing, for
every row would be of that class. Cost: a Python step a row.
"""

from collections.abc import Mapping
from numbers import Real
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float, Int, Shaped
from sklearn.utils import assert_all_finite, column_or_1d
from sklearn.utils.multiclass import check_classification_targets

__all__ = ["class_weights", "coded", "codes_among", "declared", "reweighted"]

UNLABELLED = -1
SHOWN = 20  # classes in a message


def coded(y: Any, classes: Any = None) -> tuple[np.ndarray, np.ndarray]:
    """The classes, sorted, and the code of each row.

    Where `classes` are given and hold -1, it is a class.
    """
    y = _labels(y)
    if classes is None:
        is_two_classes = y.dtype.kind in "if" and np.array_equal(np.unique(y), [-1, 1])
        classes = y if is_two_classes else y[[label != UNLABELLED for label in y.tolist()]]
        if not len(classes):
            way = (
                "Label some, or name all classes where there is a `partial_fit`, which takes them."
            )
            raise ValueError(f"y: every row is unlabelled (-1), so no class is known. {way}")
    classes = declared(classes)
    return classes, codes_among(y, classes)


def codes_among(y: Any, classes: np.ndarray) -> np.ndarray:
    """Codes of the labels of further rows; a label that is none of `classes` is an error."""
    codes = {UNLABELLED: -1} | {label: code for code, label in enumerate(classes.tolist())}
    labels = _labels(y).tolist()
    if unknown := [row for row, label in enumerate(labels) if label not in codes]:
        raise ValueError(
            f"y: row {unknown[0]} has the class {labels[unknown[0]]!r}; the classes of the first "
            f"call are {_few(classes)}. What learns by "
            "`partial_fit` is told then of classes that come later."
        )
    return np.array([codes[label] for label in labels], np.int32)


def class_weights(
    class_weight: Any, classes: Shaped[np.ndarray, " class"], codes: Int[np.ndarray, " row"]
) -> Float[np.ndarray, " class"]:
    """The factor of each class in predictions, [class].

    Args:
        class_weight: {class: factor}, where others have 1; "balanced", for factors that make all
            classes equally frequent; or None, for 1.
        classes: all classes, sorted.
        codes: the code of each row, -1 where unlabelled.
    """
    found = np.ones(len(classes))
    if isinstance(class_weight, str) and class_weight == "balanced":
        count = np.bincount(codes[codes >= 0], minlength=len(classes))
        return np.where(count > 0, count.sum() / (len(classes) * np.maximum(count, 1)), found)
    if not isinstance(class_weight, Mapping | None):
        raise ValueError(
            f"class_weight: found {class_weight!r}, wanted {{class: factor}}, 'balanced' or None."
        )
    places = {label: place for place, label in enumerate(classes.tolist())}
    for label, factor in (class_weight or {}).items():
        if label not in places:
            raise ValueError(
                f"class_weight: found the class {label!r}, wanted some of {_few(classes)}."
            )
        if not isinstance(factor, Real) or not 0 < factor < np.inf:
            raise ValueError(
                f"class_weight: found {factor!r} of {label!r}, wanted a number above 0."
            )
        found[places[label]] = factor
    return found


def reweighted(
    log_proba: Float[np.ndarray, "row class"], weight: Float[np.ndarray, " class"]
) -> Float[np.ndarray, "row class"]:
    """Log probabilities [row, class] of rows among which classes are `weight` times as frequent."""
    if (weight == 1).all():
        return log_proba
    joint = log_proba + np.log(weight).astype(log_proba.dtype)
    return joint - np.logaddexp.reduce(joint, axis=1, keepdims=True)


def _few(classes: np.ndarray) -> str:
    """For a message: all, or some of very many."""
    return (
        f"{classes.tolist()}"
        if len(classes) <= SHOWN
        else f"{classes[:SHOWN].tolist()} and {len(classes) - SHOWN} more"
    )


def declared(classes: Any) -> np.ndarray:
    """Sorted, each once."""
    classes = _labels(classes)
    if classes.dtype == object and UNLABELLED in classes.tolist():
        raise ValueError(
            "classes: found -1 among texts. It says that the class of a row is unknown, and is no "
            "class: leave it out."
        )
    classes = np.unique(classes)
    # each class once would look like a regression
    check_classification_targets(np.repeat(classes, 3))
    return classes


def _labels(y: Any) -> np.ndarray:
    """One-dimensional and complete; of numbers, of texts, or of texts and -1."""
    y = column_or_1d(y, warn=True)
    if y.dtype.kind == "f":
        assert_all_finite(y, input_name="y")
    if y.dtype.kind not in "biuf" and str(UNLABELLED) in y.tolist():
        raise ValueError(
            "y: found the text '-1' among texts. An unlabelled row is the number -1: give an array "
            "of dtype object."
        )
    if y.dtype != object:
        return y
    if pd.isna(y).any():
        row = int(np.argmax(pd.isna(y)))
        raise ValueError(
            f"y: row {row} has the label {y[row]!r}; the label of a row of unknown class is -1: "
            "y.astype(object).fillna(-1) of a "
            "pandas column."
        )
    if all(isinstance(label, Real | np.bool_) for label in y):
        return np.array(y.tolist())
    for row, label in enumerate(y):
        if not isinstance(label, str) and label != UNLABELLED:
            raise ValueError(
                f"y: row {row} has the label {label!r} among texts. Labels are texts or numbers; "
                "-1 where unlabelled."
            )
    return y
