"""iQGME for several tasks at once as a scikit-learn classifier: tables with missing entries, by
local experts that tasks share.

    classifier = MultiTaskIQGMEClassifier().fit(X, y, task)     # the task of each row; NaN anywhere in X, y = -1 where unlabelled
    classifier.predict_proba(X_new, task_new)
    classifier.similarity()                                     # of tasks, by the experts that they use

The model is `zoo.iqgme_tasks`; `CoordinateAscent` fits it by variational Bayes. Columns are
standardised first, over all tasks. Cost of a sweep over n rows, J tasks of H groups each, S experts
and D = columns + 1: n H D^2 + J H S D^2, with m holes a row n H (D^2 + m^3 / 2) more; of a
prediction: n S D^3.

Wang (2010), "Bayesian approaches to learning from incomplete data", chapter 4.
"""

from math import isfinite
from typing import Any

import jax
import numpy as np
from sklearn.metrics import accuracy_score
from sklearn.utils import check_consistent_length, column_or_1d
from sklearn.utils.validation import check_is_fitted, validate_data

from gallery._local_experts import LocalExperts, check_whole, positive
from zoo.iqgme import FEW_EXPERTS, VAGUE
from zoo.iqgme_tasks import iqgme_tasks

__all__ = ["MultiTaskIQGMEClassifier"]


class MultiTaskIQGMEClassifier(LocalExperts):
    """Classifies the rows of several tasks by local linear experts; tasks share those that hold for
    more than one of them.

    All tasks have the same columns and classes, though a task may lack some classes, or all labels.
    Labels, missing entries and columns that say nothing are as in `IQGMEClassifier`. Without `task`
    all rows are of one, in `fit`; the other methods ask for it where several were fitted.
    scikit-learn's tools hand it on with `sklearn.set_config(enable_metadata_routing=True)`:

        model = MultiTaskIQGMEClassifier().set_fit_request(task=True).set_score_request(task=True)
        cross_val_score(model, X, y, params={"task": task})

    :param truncation: the most groups of a task.
    :param num_shared: the most experts of all tasks together.
    :param init: where a fit starts: "kmeans", groups of rows that are near each other, whatever
    their task; "task", an expert for each
        task, for tasks whose rows are alike and whose labels are not, or so few that groups among
        them would be chance.
    :param sparse: weights that nothing asks for go to zero, and experts have none in common: for
    tasks that may call the same rows by
        opposite classes. `precision` is that of a weight: a Gamma distribution, or a number.
    :param alpha: concentration within a task: a distribution, or a number; large for many groups.
    `beta` is that of the experts.
    :param shrinkage: how far the prior covariance of an expert's Gaussian is from that of all rows
    (0) to a diagonal one (1).
    :param gate_rows: rows that the prior of an expert's Gaussian is worth, as in `IQGMEClassifier`.
    :param restarts: starts, of which the best after a few sweeps goes on.
    :param max_iter: the most sweeps; `tolerance`: ends when a sweep gains less than this share of
    the bound.
    :param num_samples: draws in `posterior_`.
    :param max_time: seconds after which a fit ends, with what it has; trying `restarts`, of which
    the first is always tried, has as many
        for itself. Reading the model and compiling are not cut short.
    :param progress_bar: shows a bar, with the bound.
    :param random_state: integer, `RandomState` or None.

    Attributes: those of `IQGMEClassifier`; `tasks_`, and `shares_`, how probable each expert is in
    each task.
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
        max_time: float | None = None,
        progress_bar: bool = False,
        random_state: Any = None,
    ):
        self.init, self.precision, self.gate_rows = init, precision, gate_rows
        self.truncation, self.num_shared, self.sparse, self.alpha, self.beta = (
            truncation,
            num_shared,
            sparse,
            alpha,
            beta,
        )
        self.shrinkage, self.restarts, self.max_iter, self.tolerance = (
            shrinkage,
            restarts,
            max_iter,
            tolerance,
        )
        self.num_samples, self.max_time, self.progress_bar, self.random_state = (
            num_samples,
            max_time,
            progress_bar,
            random_state,
        )

    def fit(self, X: Any, y: Any, task: Any = None) -> "MultiTaskIQGMEClassifier":
        """Learn from all rows.

        :param X: [row, column], NaN where missing.
        :param y: the class of each row, -1 where it is unknown.
        :param task: the task of each row, numbers or texts.
        """
        X = validate_data(self, X, dtype=np.float64, ensure_all_finite="allow-nan")
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
        """exp(-(KL(i | j) + KL(j | i)) / 2) of the shares of experts in each two tasks, [task,
        task].
        """
        check_is_fitted(self)
        log_shares = np.log(self.shares_ + 1e-12)
        divergence = (
            (self.shares_[:, None] - self.shares_[None]) * (log_shares[:, None] - log_shares[None])
        ).sum(-1) / 2
        return np.exp(-divergence)

    def predict_log_proba(self, X: Any, task: Any = None) -> np.ndarray:
        """Log probability of each class, [row, class]."""
        return self._log_proba(X, self._codes(X, task))

    def predict_proba(self, X: Any, task: Any = None) -> np.ndarray:
        """Probability of each class, [row, class]."""
        return np.exp(self.predict_log_proba(X, task))

    def predict(self, X: Any, task: Any = None) -> np.ndarray:
        """The most probable class of each row."""
        best = self.predict_log_proba(X, task).argmax(1)
        return self.classes_[best]

    def score(self, X: Any, y: Any, sample_weight: Any = None, task: Any = None) -> float:
        """Share of the rows whose class is predicted."""
        return float(accuracy_score(y, self.predict(X, task), sample_weight=sample_weight))

    def impute(self, X: Any, task: Any = None, *, return_std: bool = False) -> Any:
        """A copy of X, each missing entry filled with its mean given those that its row has; and
        its standard deviation, 0 where seen.
        """
        return self._imputed(X, self._codes(X, task), return_std)

    def _codes(self, X: Any, task: Any) -> dict[str, np.ndarray]:
        check_is_fitted(self)
        X = validate_data(self, X, dtype=np.float64, ensure_all_finite="allow-nan", reset=False)
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
