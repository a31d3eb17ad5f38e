"""Archipelago, who it is compared with: classifiers by their names.

A method is a callable `(x, y, x_test, seed) -> probabilities [test row, class]`; `y` is −1 where a
row has no label. Rows are those of `archipelago_protocols.draw`.

| method | rows without label | settings |
|---|---|---|
| label spreading | used | radial kernel; its standard deviation is half of the median distance to
the seventh neighbour |
| GP classifier | ignored | scikit-learn's, one against all, Laplace; amplitude and one length scale
of largest evidence |
| self-training GP classifier | used | the same, which takes its ten surest rows as labelled, time
after time |
| softmax GP, probit GP | ignored | `archipelago_gaussian`, by NUTS |
| null-category noise model | used | `archipelago_gaussian`, by NUTS |

As in the paper the last three have one length scale on pinwheels and one a feature on real data.
`SPREADING` are kernels of label spreading for a reference that is compared with nobody: the one of
them with the smallest error on the test rows. Cost for n rows, L labels and R rounds: O(n²) a pass,
O(L³) an evaluation of the evidence, R O(n³) of them, and as stated there.
"""

import warnings
from collections.abc import Callable
from functools import partial

import numpy as np
from scipy.spatial.distance import cdist
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessClassifier
from sklearn.gaussian_process.kernels import RBF, ConstantKernel
from sklearn.semi_supervised import LabelSpreading, SelfTrainingClassifier

from tests.bench import archipelago_gaussian as gaussian

__all__ = ["PEERS", "SPREADING", "Method", "label_spreading"]

type Method = Callable[[np.ndarray, np.ndarray, np.ndarray, int], np.ndarray]

NEIGHBOUR = 7  # whose distance is the scale of label spreading
LENGTHS = (0.1, 10.0)  # range of the GP classifier's length scale
SUREST = 10  # rows that self-training adds in a round


def label_spreading(
    x: np.ndarray,
    y: np.ndarray,
    x_test: np.ndarray,
    seed: int = 0,
    width: float = 0.5,
    neighbours: int | None = None,
) -> np.ndarray:
    """With a radial kernel of `width` distances to the seventh neighbour, or a graph of nearest
    neighbours.
    """
    scale = width * np.median(np.sort(cdist(x, x), axis=1)[:, NEIGHBOUR])
    kernel = (
        {"gamma": 0.5 / scale**2}
        if neighbours is None
        else {"kernel": "knn", "n_neighbors": neighbours}
    )
    with warnings.catch_warnings():
        # a row that no label reaches is 0 / 0
        warnings.filterwarnings("ignore", "invalid value", RuntimeWarning)
        warnings.simplefilter("ignore", ConvergenceWarning)
        found = LabelSpreading(max_iter=1000, **kernel).fit(x, y).predict_proba(x_test)
    return np.where(np.isnan(found), 1 / found.shape[1], found)


def gp_classifier() -> GaussianProcessClassifier:
    """The evidence is often largest at an end of the range: one label a class says little."""
    return GaussianProcessClassifier(ConstantKernel(1.0) * RBF(1.0, LENGTHS), random_state=0)


def supervised(x: np.ndarray, y: np.ndarray, x_test: np.ndarray, seed: int = 0) -> np.ndarray:
    """The GP classifier of the labelled rows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return gp_classifier().fit(x[y >= 0], y[y >= 0]).predict_proba(x_test)


def self_training(x: np.ndarray, y: np.ndarray, x_test: np.ndarray, seed: int = 0) -> np.ndarray:
    """The GP classifier of all rows, in the end."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        learner = SelfTrainingClassifier(
            gp_classifier(), criterion="k_best", k_best=SUREST, max_iter=None
        )
        return learner.fit(x, y).predict_proba(x_test)


def bayesian(
    model: Callable, x: np.ndarray, y: np.ndarray, x_test: np.ndarray, seed: int = 0
) -> np.ndarray:
    """One of the paper's competitors."""
    return gaussian.predict(model, x, y, x_test, ard=x.shape[1] > 2, seed=seed)


PEERS: dict[str, Method] = {
    "label spreading": label_spreading,
    "GP classifier": supervised,
    "self-training GP": self_training,
    "softmax GP": partial(bayesian, gaussian.softmax_gp),
    "probit GP": partial(bayesian, gaussian.probit_gp),
    "null category": partial(bayesian, gaussian.null_category),
}
SPREADING: dict[str, Method] = {
    **{
        f"{width:g} radii": partial(label_spreading, width=width) for width in (0.25, 0.5, 1.0, 2.0)
    },
    **{
        f"{count} neighbours": partial(label_spreading, neighbours=count) for count in (3, 5, 7, 10)
    },
}
