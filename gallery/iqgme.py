"""iQGME as a scikit-learn classifier: tables of numbers with missing entries, by an infinite mixture of local linear experts.

    classifier = IQGMEClassifier().fit(X, y)     # NaN anywhere in X; y = -1 where unlabelled
    classifier.predict_proba(X_new)              # missing entries integrated out
    classifier.impute(X_new, return_std=True)

The model is `zoo.iqgme`; `CoordinateAscent` fits it by variational Bayes. Columns are standardised first. Cost of a sweep over n rows, K
experts and D = columns + 1: n K D^2, with m holes a row as much again and n K m^3 / 2; of a prediction: n K D^3.

Wang (2010), "Bayesian approaches to learning from incomplete data", chapter 3.
"""

import warnings
from functools import partial
from typing import Any

import jax
import numpy as np
import xarray as xr
from numpyro import distributions as dist
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_consistent_length, check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from gallery._labels import coded
from inference import CoordinateAscent, Driver, Program
from zoo.iqgme import FEW_EXPERTS, iqgme, normal_wishart, soft_probit

__all__ = ["IQGMEClassifier"]


class IQGMEClassifier(ClassifierMixin, BaseEstimator):
    """Classifies by local linear experts, as many as the data ask for, each in charge where its Gaussian is.

    Labels: -1 is a row of unknown class; where `y` holds -1 and 1 and nothing else, both are classes. With more than two classes the
    first is the reference, and an expert answers for each of the others in turn. A column that is missing altogether or constant says
    nothing and is left out; a row that is missing altogether is told by the shares of the classes. One class alone is certain.

    :param truncation: the most experts.
    :param inference: "vb".
    :param sparse: weights that nothing asks for go to zero.
    :param alpha: concentration: a distribution, or a number; large for many experts.
    :param shrinkage: how far the prior covariance of an expert's Gaussian is from that of all rows (0) to a diagonal one (1).
    :param restarts: starts, of which the best after a few sweeps goes on.
    :param max_iter: the most sweeps; `tolerance`: ends when a sweep gains less than this share of the bound.
    :param num_samples: draws in `posterior_`.
    :param max_time: seconds after which a fit ends, with what it has.
    :param progress_bar: shows a bar, with the bound.
    :param random_state: integer, `RandomState` or None.

    Attributes: `classes_`, `n_features_in_`, `feature_names_in_` (of a data frame), `n_iter_`, `elbo_` (of the standardised columns),
    `n_experts_` (with a row or more), `posterior_`.
    """

    def __init__(
        self,
        truncation: int = 20,
        *,
        inference: str = "vb",
        sparse: bool = False,
        alpha: Any = FEW_EXPERTS,
        shrinkage: float = 0.5,
        restarts: int = 1,
        max_iter: int = 500,
        tolerance: float = 1e-6,
        num_samples: int = 200,
        max_time: float | None = None,
        progress_bar: bool = False,
        random_state: Any = None,
    ):
        self.truncation, self.inference, self.sparse, self.alpha, self.shrinkage = truncation, inference, sparse, alpha, shrinkage
        self.restarts, self.max_iter, self.tolerance, self.num_samples = restarts, max_iter, tolerance, num_samples
        self.max_time, self.progress_bar, self.random_state = max_time, progress_bar, random_state

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags

    def fit(self, X: Any, y: Any) -> "IQGMEClassifier":
        """Learn from all rows.

        :param X: [row, column], NaN where missing.
        :param y: the class of each row, -1 where it is unknown.
        """
        if self.inference != "vb":
            raise ValueError(f"inference: found {self.inference!r}, wanted 'vb'.")
        if not 0 <= self.shrinkage <= 1:
            raise ValueError(f"shrinkage: found {self.shrinkage!r}, wanted a number from 0 to 1.")
        X = validate_data(self, X, dtype=np.float64, ensure_all_finite="allow-nan")
        classes, labels = coded(y)
        check_consistent_length(X, labels)
        self._learn_units(X)
        x = self._standard(X)
        kernel = CoordinateAscent(iqgme, restarts=self.restarts, tolerance=self.tolerance)
        # Draws are made when `posterior_` is asked for, so one is enough here.
        driver = Driver(kernel, num_warmup=self.max_iter, num_samples=1, max_time=self.max_time, progress_bar=self.progress_bar)
        gate = partial(normal_wishart, covariance=self._spread(x))
        self._settings = {
            "num_classes": max(len(classes), 2),
            "num_experts": self.truncation,
            "alpha": self.alpha if isinstance(self.alpha, dist.Distribution) else float(self.alpha),
            "gate": gate,
            "expert": partial(soft_probit, sparse=self.sparse),
        }
        with jax.enable_x64(True):
            tree = driver.run(int(check_random_state(self.random_state).randint(2**31 - 1)), x, labels, **self._settings)
            state = driver.states[0]
            is_done = bool(kernel.finished(state))
            self._state = jax.device_get(state)  # by numpy, which keeps float64 when it is pickled
        self.classes_, self._kernel, self._driver, self._tree = classes, kernel, driver, None
        stats = tree["sample_stats"].dataset.isel(chain=0)
        self.n_iter_, self.elbo_ = stats.sizes["step"], float(stats["elbo"][-1])
        self.n_experts_ = int(stats["num_groups"][-1])
        if not is_done:
            warnings.warn(
                f"ended after {self.n_iter_} sweeps, before the bound stood still; give more max_iter or max_time.",
                ConvergenceWarning,
                stacklevel=2,
            )
        return self

    def _learn_units(self, X: np.ndarray) -> None:
        """A column that says nothing is left out, but for the last one that there is."""
        seen = ~np.isnan(X)
        count = np.maximum(seen.sum(0), 1)
        mean = np.where(seen, X, 0).sum(0) / count
        deviation = np.sqrt(np.where(seen, (X - mean) ** 2, 0).sum(0) / count)
        self._kept = np.flatnonzero(deviation > 1e-10 * (1 + abs(mean)))
        if not len(self._kept):
            self._kept = np.zeros(1, int)
        self._mean, self._deviation = mean[self._kept], np.where(deviation[self._kept] > 0, deviation[self._kept], 1)

    def _standard(self, X: np.ndarray) -> np.ndarray:
        return (X[:, self._kept] - self._mean) / self._deviation

    def _spread(self, x: np.ndarray) -> np.ndarray:
        """Covariance of pairs of columns over the rows that have both, drawn towards a diagonal one; no eigenvalue is negative."""
        seen = ~np.isnan(x)
        filled = np.where(seen, x, 0)
        matrix = filled.T @ filled / np.maximum(seen.T.astype(float) @ seen, 1)
        values, vectors = np.linalg.eigh((1 - self.shrinkage) * matrix + self.shrinkage * np.eye(len(matrix)))
        return vectors * np.maximum(values, max(self.shrinkage, 0.01)) @ vectors.T

    def _predicted(self, X: Any, code: int) -> Any:
        """What the kernel says of rows that are all labelled alike."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=np.float64, ensure_all_finite="allow-nan", reset=False)
        with jax.enable_x64(True):
            labels = np.full(len(X), code, np.int32)
            found = self._kernel.predict(self._state, Program(iqgme, self._standard(X), labels, **self._settings))
            return jax.device_get(found)

    def predict_log_proba(self, X: Any) -> np.ndarray:
        """Log probability of each class, [row, class]."""
        check_is_fitted(self)
        if len(self.classes_) == 1:
            return np.zeros((len(self._predicted(X, 0).log_label), 1))
        joint = np.stack([self._predicted(X, code).log_label for code in range(len(self.classes_))], 1)
        return joint - np.logaddexp.reduce(joint, axis=1, keepdims=True)

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probability of each class, [row, class]."""
        return np.exp(self.predict_log_proba(X))

    def predict(self, X: Any) -> np.ndarray:
        """The most probable class of each row."""
        best = self.predict_log_proba(X).argmax(1)
        return self.classes_[best]

    def impute(self, X: Any, *, return_std: bool = False) -> Any:
        """A copy of X, each missing entry filled with its mean given those that its row has; and its standard deviation, 0 where seen.

        A column that says nothing is filled with its mean, or stays NaN where it has none.
        """
        found = self._predicted(X, -1)
        X = validate_data(self, X, dtype=np.float64, ensure_all_finite="allow-nan", reset=False)
        mean, deviation = X.copy(), np.zeros(X.shape)
        mean[:, self._kept] = np.where(np.isnan(X[:, self._kept]), found.mean * self._deviation + self._mean, X[:, self._kept])
        deviation[:, self._kept] = found.deviation * self._deviation
        return (mean, deviation) if return_std else mean

    @property
    def posterior_(self) -> xr.DataTree:
        """Draws from the fitted posterior, its parameters and the bound of each sweep, of the standardised columns; made when asked for."""
        check_is_fitted(self)
        if self._tree is None:
            self._driver.num_samples = self.num_samples
            with jax.enable_x64(True):
                self._tree = self._driver.tree()
        return self._tree
