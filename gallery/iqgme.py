"""iQGME as a scikit-learn classifier: an infinite mixture of local experts for missing features.

    classifier = IQGMEClassifier().fit(X, y)     # NaN anywhere in X; y = -1 where unlabelled
    classifier.predict_proba(X_new)              # missing entries are integrated out
    classifier.impute(X_new, return_std=True)
    IQGMEClassifier(n_factors=20)                # many columns: experts on common factors
    IQGMEClassifier(inference="gibbs")           # exact, slower

The model is `zoo.iqgme`, or with factors `zoo.iqgme_factors`. `CoordinateAscent` fits it by
variational Bayes, and `ConditionalGibbs` draws from its posterior. Columns are standardised first.
Cost of a sweep over n rows, K experts and D = columns + 1: n K D^2; with m missing entries in each
row, twice that plus n K m^3 / 2. Cost of a prediction: n K D^3, or a sweep for each draw. With F
factors, a step costs 2 n (D F^2 + K F^3) + D F^3 and a prediction n (D F^2 + K F^3).

Wang (2010), "Bayesian approaches to learning from incomplete data", chapter 3.
"""

from numbers import Integral
from typing import Any

import numpy as np

from gallery._columns import read_numbers
from gallery._estimator import Imputer
from gallery._local_experts import LocalExperts, check_whole, positive
from zoo.iqgme import FEW_EXPERTS, VAGUE, iqgme
from zoo.iqgme_factors import iqgme_factors, normal_factors

__all__ = ["IQGMEClassifier"]

MOST_COLUMNS = 1000  # of experts that see the columns themselves


class IQGMEClassifier(Imputer, LocalExperts):
    """Classification by a mixture of local linear experts, whose number is learned.

    Each expert has a Gaussian over the columns, which selects its rows. Labels: -1 marks a row of
    unknown class. The one exception is scikit-learn's coding of two classes: if `y` holds -1 and 1
    and nothing else, both are classes. With more than two classes, the first is the reference, and
    an expert has a classifier for each of the others. Columns that are constant or have no entries
    are left out. A row without entries gets the class frequencies.

    Fitted attributes are `classes_`, `n_features_in_`, `feature_names_in_` (for a data frame),
    `n_iter_`, `elbo_` (on the standardised scale, "vb" only), `n_experts_` (experts with a row or
    more; with "gibbs" the most frequent number), and `posterior_`.

    Args:
        truncation: largest number of experts. Experts are merged as long as that raises the ELBO;
            a fit that uses all of them warns.
        n_factors: largest number of factors, of which each expert uses some; None: experts see the
            columns. Ten or twenty suit hundreds of columns, or more columns than rows.
        inference: "vb" (variational Bayes) or "gibbs" (sampling). The latter allows neither
            `n_factors` nor `batch_size`.
        sparse: whether the weights have the prior mean 0, which makes them sparse.
        precision: prior precision of a weight, about its mean over the experts, or about 0 with
            `sparse`; a Gamma distribution or a number.
        alpha: concentration, a distribution or a number; large for many experts.
        shrinkage: shrinks the prior covariance of an expert's Gaussian from that of all rows (0) to
            a diagonal one (1); not with factors.
        gate_rows: number of rows that the prior of an expert's Gaussian counts as. None, the
            default: a tenth of a row for the mean, and columns + 1 rows for the covariance. With a
            thousand, experts differ by their classifiers and hardly by their Gaussians, which suits
            hundreds of columns and few rows. Not with factors.
        restarts: number of starts, of which the best after a few sweeps continues; with "gibbs" the
            number of chains.
        max_iter: largest number of sweeps, those that try merges of experts included; with "gibbs"
            the sweeps before the first draw.
        tolerance: a fit ends when a sweep gains less than this share of the ELBO.
        batch_size: number of rows of a sweep, drawn at random. `max_iter` sweeps are made then, and
            `elbo_` is an estimate. None: all rows.
        num_samples: draws in `posterior_`; with "gibbs" the draws of each chain, over which
            predictions are averaged.
        class_weight: {class: factor}, "balanced" or None. A prediction multiplies the probability
            of each class by its factor, 1 by default, and normalises: for new rows in which classes
            are more or less frequent than in the fit. "balanced" divides by the share of each class
            among the labelled rows. The fit does not depend on `class_weight`.
        max_time: seconds after which a fit ends, with the result so far. With "vb", the trials of
            several `restarts` have as many seconds of their own. Compilation is not interrupted.
        progress_bar: whether to show a progress bar with the ELBO; None: on a terminal, after two
            seconds.
        random_state: integer, `RandomState` or None.
    """

    def __init__(
        self,
        truncation: int = 20,
        *,
        n_factors: int | None = None,
        inference: str = "vb",
        sparse: bool = False,
        precision: Any = VAGUE,
        alpha: Any = FEW_EXPERTS,
        shrinkage: float = 0.5,
        gate_rows: float | None = None,
        restarts: int = 1,
        max_iter: int = 500,
        tolerance: float = 1e-6,
        batch_size: int | None = None,
        num_samples: int = 200,
        class_weight: Any = None,
        max_time: float | None = None,
        progress_bar: bool | None = None,
        random_state: Any = None,
    ):
        self.n_factors, self.precision, self.gate_rows = n_factors, precision, gate_rows
        self.truncation = truncation
        self.inference = inference
        self.sparse = sparse
        self.alpha = alpha
        self.shrinkage = shrinkage
        self.restarts = restarts
        self.max_iter = max_iter
        self.tolerance = tolerance
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.class_weight = class_weight
        self.max_time = max_time
        self.progress_bar = progress_bar
        self.random_state = random_state

    def fit(self, X: Any, y: Any, **others: Any) -> "IQGMEClassifier":
        """Fit all rows.

        Parameters
        ----------
        X : array or frame
            [row, column], NaN where missing.
        y : array
            The class of each row, -1 where it is unknown.
        **others
            Refused; `sample_weight` with the reason why the model has no place for it.

        Returns
        -------
        self
        """
        self._refuse_others(others)
        if self.inference not in ("vb", "gibbs"):
            raise ValueError(f"inference: found {self.inference!r}, wanted 'vb' or 'gibbs'.")
        for name in ("n_factors", "batch_size"):
            if self.inference == "gibbs" and getattr(self, name) is not None:
                raise ValueError(
                    f"{name}: found {getattr(self, name)!r} beside inference='gibbs', wanted None; "
                    "inference='vb' takes it."
                )
        if self.n_factors is not None and (
            not isinstance(self.n_factors, Integral) or self.n_factors < 2
        ):
            raise ValueError(
                f"n_factors: found {self.n_factors!r}, wanted an integer, 2 or more, or None."
            )
        X = read_numbers(self, X, dtype=np.float64, ensure_all_finite="allow-nan")
        if self.n_factors is None and X.shape[1] > MOST_COLUMNS:
            raise ValueError(
                f"X: found {X.shape[1]} columns, wanted at most {MOST_COLUMNS}: each expert has a "
                "covariance of all columns. With n_factors=20 experts see common factors instead."
            )
        check_whole(2, truncation=self.truncation)
        alpha = positive("alpha", self.alpha)
        model = iqgme if self.n_factors is None else iqgme_factors
        among = (
            {}
            if self.n_factors is None
            else {"num_factors": int(self.n_factors), "gate": normal_factors}
        )
        self._fit(
            model,
            X,
            y,
            {},
            self.batch_size,
            self.inference,
            num_experts=self.truncation,
            alpha=alpha,
            **among,
        )
        return self

    def predict_log_proba(self, X: Any) -> np.ndarray:
        """Return the log probability of each class, [row, class]."""
        return self._log_proba(X, {})

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return the probability of each class, [row, class]."""
        return np.exp(self.predict_log_proba(X))

    def predict(self, X: Any) -> np.ndarray:
        """Return the most probable class of each row."""
        best = self.predict_log_proba(X).argmax(1)
        return self.classes_[best]

    def impute(self, X: Any, *, return_std: bool = False) -> Any:
        """Return a copy of X with missing entries replaced by their conditional means.

        A constant column is filled with its value. A column without entries stays NaN.

        Parameters
        ----------
        X : array or frame
            [row, column], NaN where missing.
        return_std : bool, default=False
            Whether to return the standard deviations as well, 0 for observed entries.
        """
        return self._imputed(X, {}, return_std)
