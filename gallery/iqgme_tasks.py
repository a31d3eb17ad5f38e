"""iQGME for several tasks as a scikit-learn classifier, with local experts that tasks share.

    classifier = MultiTaskIQGMEClassifier().fit(X, y, task)     # NaN anywhere in X; y = -1
                                                                # where unlabelled
    classifier.predict_proba(X_new, task_new)
    classifier.similarity()                                     # of tasks, by their experts

The model is `zoo.iqgme_tasks`. `CoordinateAscent` fits it by variational Bayes. Columns are
standardised first, over all tasks. Cost of a sweep over n rows, J tasks of H groups each, S experts
and D = columns + 1: n H D^2 + J H S D^2; with m missing entries a row n H (D^2 + m^3 / 2) more.
Cost of a prediction: n S D^3.

Wang (2010), "Bayesian approaches to learning from incomplete data", chapter 4.
"""

from math import isfinite
from typing import Any

import jax
import numpy as np
from sklearn.metrics import accuracy_score
from sklearn.utils import check_consistent_length, column_or_1d
from sklearn.utils.validation import check_is_fitted

from gallery._columns import read_numbers
from gallery._local_experts import LocalExperts, check_whole, positive
from zoo.iqgme import FEW_EXPERTS, VAGUE
from zoo.iqgme_tasks import iqgme_tasks

__all__ = ["MultiTaskIQGMEClassifier"]


class MultiTaskIQGMEClassifier(LocalExperts):
    """Classification of the rows of several tasks by local linear experts that tasks share.

    All tasks have the same columns and classes, though a task may lack some classes, or all labels.
    Labels, missing entries and constant columns are as in `IQGMEClassifier`. Without `task`, `fit`
    takes all rows for one task. The other methods need `task` after a fit of several tasks.
    scikit-learn's tools pass it on with `sklearn.set_config(enable_metadata_routing=True)`:

        model = MultiTaskIQGMEClassifier().set_fit_request(task=True).set_score_request(task=True)
        cross_val_score(model, X, y, params={"task": task})

    Fitted attributes are those of `IQGMEClassifier`, `tasks_`, and `shares_`, the probability of
    each expert in each task.

    Args:
        truncation: largest number of groups of a task.
        num_shared: largest number of experts of all tasks together.
        init: how a fit starts. "kmeans": with clusters of rows of all tasks. "task": with an expert
            for each task, for tasks with similar rows and different labels, or with very few rows.
        sparse: whether the weights have the prior mean 0, which makes them sparse, for
            tasks that may label the same rows by opposite classes.
        precision: prior precision of a weight, about its mean over the experts, or about 0 with
            `sparse`; a Gamma distribution or a number.
        alpha: concentration of the groups of a task, a distribution or a number; large for many
            groups.
        beta: concentration of the experts, likewise.
        shrinkage: shrinks the prior covariance of an expert's Gaussian from that of all rows (0) to
            a diagonal one (1).
        gate_rows: number of rows that the prior of an expert's Gaussian counts as, as in
            `IQGMEClassifier`.
        restarts: number of starts, of which the best after a few sweeps continues.
        max_iter: largest number of sweeps.
        tolerance: a fit ends when a sweep gains less than this share of the ELBO.
        num_samples: draws in `posterior_`.
        class_weight: {class: factor}, "balanced" or None. A prediction multiplies the probability
            of each class by its factor, 1 by default, and normalises: for new rows in which classes
            are more or less frequent than in the fit. "balanced" divides by the share of each class
            among the labelled rows. The fit does not depend on `class_weight`.
        max_time: seconds after which a fit ends, with the result so far. The trials of several
            `restarts` have as many seconds of their own. Compilation is not interrupted.
        progress_bar: whether to show a progress bar with the ELBO; None: on a terminal, after two
            seconds.
        random_state: integer, `RandomState` or None.
    """

    def __init__(
        self,
        truncation: int = 20,
        num_shared: int = 50,
        *,
        init: str = "kmeans",
        sparse: bool = False,
        precision: Any = VAGUE,
        alpha: Any = FEW_EXPERTS,
        beta: Any = FEW_EXPERTS,
        shrinkage: float = 0.5,
        gate_rows: float | None = None,
        restarts: int = 1,
        max_iter: int = 500,
        tolerance: float = 1e-6,
        num_samples: int = 200,
        class_weight: Any = None,
        max_time: float | None = None,
        progress_bar: bool | None = None,
        random_state: Any = None,
    ):
        self.init, self.precision, self.gate_rows = init, precision, gate_rows
        self.truncation = truncation
        self.num_shared = num_shared
        self.sparse = sparse
        self.alpha = alpha
        self.beta = beta
        self.shrinkage = shrinkage
        self.restarts = restarts
        self.max_iter = max_iter
        self.tolerance = tolerance
        self.num_samples = num_samples
        self.class_weight = class_weight
        self.max_time = max_time
        self.progress_bar = progress_bar
        self.random_state = random_state

    def fit(self, X: Any, y: Any, task: Any = None, **others: Any) -> "MultiTaskIQGMEClassifier":
        """Fit all rows.

        Parameters
        ----------
        X : array or frame
            [row, column], NaN where missing.
        y : array
            The class of each row, -1 where it is unknown.
        task : array, default=None
            The task of each row, numbers or texts; None: one task.
        **others
            Refused; `sample_weight` with the reason why the model has no place for it.

        Returns
        -------
        self
        """
        self._refuse_others(others)
        X = read_numbers(self, X, dtype=np.float64, ensure_all_finite="allow-nan")
        task = _checked(task, len(X))
        self.tasks_, codes = np.unique(task, return_inverse=True)
        check_whole(2, truncation=self.truncation, num_shared=self.num_shared)
        settings: dict[str, Any] = {
            "num_groups": self.truncation,
            "num_experts": self.num_shared,
            "num_tasks": len(self.tasks_),
        }
        concentrations = {name: positive(name, getattr(self, name)) for name in ("alpha", "beta")}
        self._fit(iqgme_tasks, X, y, {"task": codes.astype(np.int32)}, **settings, **concentrations)
        with jax.enable_x64(True):
            self.shares_ = np.exp(jax.device_get(self._driver.kernel.log_weights(self._state)))
        return self

    def similarity(self) -> np.ndarray:
        """Return exp(-(KL(i | j) + KL(j | i)) / 2) of the shares of tasks i and j, [task, task]."""
        check_is_fitted(self)
        log_shares = np.log(self.shares_ + 1e-12)
        divergence = (
            (self.shares_[:, None] - self.shares_[None]) * (log_shares[:, None] - log_shares[None])
        ).sum(-1) / 2
        return np.exp(-divergence)

    def predict_log_proba(self, X: Any, task: Any = None) -> np.ndarray:
        """Return the log probability of each class, [row, class]."""
        return self._log_proba(X, self._codes(X, task))

    def predict_proba(self, X: Any, task: Any = None) -> np.ndarray:
        """Return the probability of each class, [row, class]."""
        return np.exp(self.predict_log_proba(X, task))

    def predict(self, X: Any, task: Any = None) -> np.ndarray:
        """Return the most probable class of each row."""
        best = self.predict_log_proba(X, task).argmax(1)
        return self.classes_[best]

    def score(self, X: Any, y: Any, sample_weight: Any = None, task: Any = None) -> float:
        """Return the accuracy of the predicted classes."""
        return float(accuracy_score(y, self.predict(X, task), sample_weight=sample_weight))

    def impute(self, X: Any, task: Any = None, *, return_std: bool = False) -> Any:
        """Return a copy of X with missing entries replaced by their conditional means.

        Parameters
        ----------
        X : array or frame
            [row, column], NaN where missing.
        task : array, default=None
            The task of each row.
        return_std : bool, default=False
            Whether to return the standard deviations as well, 0 for observed entries.
        """
        return self._imputed(X, self._codes(X, task), return_std)

    def _codes(self, X: Any, task: Any) -> dict[str, np.ndarray]:
        check_is_fitted(self)
        X = read_numbers(self, X, dtype=np.float64, ensure_all_finite="allow-nan", reset=False)
        if task is None and len(self.tasks_) > 1:
            raise ValueError(
                "task: found None, wanted the task of each row; the tasks that were fitted are "
                f"{self.tasks_.tolist()}."
            )
        task = np.repeat(self.tasks_, len(X)) if task is None else _checked(task, len(X))
        unknown = np.flatnonzero(~np.isin(task, self.tasks_))
        if len(unknown):
            raise ValueError(
                f"task: row {unknown[0]} is of task {task.tolist()[unknown[0]]!r}; the tasks that "
                f"were fitted are {self.tasks_.tolist()}."
            )
        return {"task": np.searchsorted(self.tasks_, task).astype(np.int32)}


def _checked(task: Any, num_rows: int) -> np.ndarray:
    task = np.zeros(num_rows, int) if task is None else column_or_1d(task)
    check_consistent_length(np.empty(num_rows), task)
    each = task.tolist()
    if unclear := [
        one for one in each if one is None or (isinstance(one, float) and not isfinite(one))
    ]:
        raise ValueError(
            f"task: found {unclear[0]!r}, wanted the name or the number of the task of each row."
        )
    if len({isinstance(one, str) for one in each}) > 1:
        raise ValueError("task: found texts and numbers, wanted all of one kind.")
    return task
