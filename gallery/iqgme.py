"""iQGME as a scikit-learn classifier: tables of numbers with missing entries, by an infinite
mixture of local linear experts.

    classifier = IQGMEClassifier().fit(X, y)     # NaN anywhere in X; y = -1 where unlabelled
    classifier.predict_proba(X_new)              # missing entries integrated out
    classifier.impute(X_new, return_std=True)
    IQGMEClassifier(n_factors=20)                # many columns: experts among the factors behind
                                                 them
    IQGMEClassifier(inference="gibbs")           # draws from the posterior itself; slower

The model is `zoo.iqgme`, or with factors `zoo.iqgme_factors`; `CoordinateAscent` fits it by
variational Bayes, `ConditionalGibbs` draws from its posterior. Columns are standardised first. Cost
of a sweep over n rows, K experts and D = columns + 1: n K D^2, with m holes a row as much again and
n K m^3 / 2; of a prediction: n K D^3, by draws that of a sweep for each. With F factors that of a
step is 2 n (D F^2 + K F^3) + D F^3, of a prediction n (D F^2 + K F^3), whatever is missing.

Wang (2010), "Bayesian approaches to learning from incomplete data", chapter 3.
"""

from numbers import Integral
from typing import Any

import numpy as np
from sklearn.utils.validation import validate_data

from gallery._local_experts import LocalExperts, check_whole, positive
from zoo.iqgme import FEW_EXPERTS, VAGUE, iqgme
from zoo.iqgme_factors import iqgme_factors, normal_factors

__all__ = ["IQGMEClassifier"]


class IQGMEClassifier(LocalExperts):
    """Classifies by local linear experts, as many as the data ask for, each in charge where its
    Gaussian is.

    Labels: -1 is a row of unknown class; where `y` holds -1 and 1 and nothing else, both are
    classes. With more than two classes the first is the reference, and an expert answers for each
    of the others in turn. A column that is missing altogether or constant says nothing and is left
    out; a row that is missing altogether is told by the shares of the classes. One class alone is
    certain. With more than two classes and missing entries probabilities are integrals over what is
    missing, which the scores of the classes have in common.

    :param truncation: the most experts.
    :param n_factors: the most factors, of which each expert shows some; None: experts see the
    columns themselves. Some ten or twenty where
        there are hundreds of columns, or more columns than rows.
    :param inference: "vb", or "gibbs", sampling; without `n_factors` and `batch_size`.
    :param sparse: weights that nothing asks for go to zero. `precision` is that of a weight about
    what experts have in common, or about
        zero: a Gamma distribution, or a number.
    :param alpha: concentration: a distribution, or a number; large for many experts.
    :param shrinkage: how far the prior covariance of an expert's Gaussian is from that of all rows
    (0) to a diagonal one (1);
        without factors.
    :param gate_rows: rows that the prior of an expert's Gaussian, that of all rows, is worth: with
    a thousand, experts differ by what they
        say and hardly by where they are in charge, as they should with hundreds of columns and few
        rows. None: of the mean a tenth of a row; of the covariance a part of that of all rows,
        worth a row for each column. Without factors.
    :param restarts: starts, of which the best after a few sweeps goes on; with "gibbs" chains, all
    of which are kept.
    :param max_iter: the most sweeps; with "gibbs" those before the first draw. `tolerance`: ends
    when a sweep gains less than this share of
        the bound.
    :param batch_size: about as many rows a sweep, drawn anew each time, for more rows than a sweep
    should visit: then `max_iter` sweeps are
        made, and `elbo_` is an estimate. None: all rows.
    :param num_samples: draws in `posterior_`; with "gibbs" of each chain, a sweep each, and
    predictions are means over them.
    :param max_time: seconds after which a fit ends, with what it has; with "vb" trying `restarts`,
    of which the first is always tried, has
        as many for itself. Reading the model and compiling are not cut short.
    :param progress_bar: shows a bar, with the bound.
    :param random_state: integer, `RandomState` or None.

    Attributes: `classes_`, `n_features_in_`, `feature_names_in_` (of a data frame), `n_iter_`,
    `elbo_` (of the standardised columns; "vb" only), `n_experts_` (with a row or more; of draws the
    most frequent number), `posterior_`.
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
        max_time: float | None = None,
        progress_bar: bool = False,
        random_state: Any = None,
    ):
        self.n_factors, self.precision, self.gate_rows = n_factors, precision, gate_rows
        self.truncation, self.inference, self.sparse, self.alpha, self.shrinkage = (
            truncation,
            inference,
            sparse,
            alpha,
            shrinkage,
        )
        self.restarts, self.max_iter, self.tolerance, self.num_samples = (
            restarts,
            max_iter,
            tolerance,
            num_samples,
        )
        self.batch_size, self.max_time, self.progress_bar, self.random_state = (
            batch_size,
            max_time,
            progress_bar,
            random_state,
        )

    def fit(self, X: Any, y: Any) -> "IQGMEClassifier":
        """Learn from all rows.

        :param X: [row, column], NaN where missing.
        :param y: the class of each row, -1 where it is unknown.
        """
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
        X = validate_data(self, X, dtype=np.float64, ensure_all_finite="allow-nan")
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
        """Log probability of each class, [row, class]."""
        return self._log_proba(X, {})

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probability of each class, [row, class]."""
        return np.exp(self.predict_log_proba(X))

    def predict(self, X: Any) -> np.ndarray:
        """The most probable class of each row."""
        best = self.predict_log_proba(X).argmax(1)
        return self.classes_[best]

    def impute(self, X: Any, *, return_std: bool = False) -> Any:
        """A copy of X, each missing entry filled with its mean given those that its row has; and
        its standard deviation, 0 where seen.

        A column that says nothing is filled with its mean, or stays NaN where it has none.
        """
        return self._imputed(X, {}, return_std)
