"""A mixture classifier with an unknown number of clusters, as a scikit-learn estimator.

    classifier = StagedMixtureClassifier().fit(X, y)     # y = -1 where unlabelled
    classifier.predict_proba(X_new)                      # averaged over draws and orders
    classifier.order_posterior_, classifier.log_evidence_
    classifier.partial_fit(X_more, y_more)               # one more stage

The model is `zoo.staged_learning`. `Staged` runs nested sampling on each order, whose evidence
gives the posterior of the orders. Columns are standardised first. With d = m (2 columns + classes)
parameters for order m, a fit costs 2 num_live (information + 5) num_sweeps d likelihoods of
rows x m x (columns + classes) each. The information is some nats for each of the d parameters, or
one or two in all where a search has found the posterior modes. So the estimator suits tables of a
few columns. Cost of a prediction: rows x draws x m x columns for each order.

Center (2009), "Learning complex classification models from large data sets".
"""

import warnings
from functools import partial
from numbers import Integral, Real
from typing import Any

import jax
import numpy as np
import xarray as xr
from numpyro.distributions import Distribution
from sklearn.base import ClassifierMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_consistent_length, check_random_state
from sklearn.utils.validation import check_is_fitted

from gallery._columns import read_numbers
from gallery._estimator import ZooEstimator
from gallery._finite import check_finite
from gallery._labels import class_weights, coded, codes_among, declared
from gallery._standardise import ROUNDING, Standardiser
from inference import Orders, Program, Staged
from inference.maths.host import in_chunks
from zoo.staged_learning import family, order_prior

__all__ = ["StagedMixtureClassifier"]

CHUNK = 256  # rows of a prediction
FARTHEST = 1e100  # standard deviations, whose square does not overflow


class StagedMixtureClassifier(ClassifierMixin, ZooEstimator):
    """Classification by a mixture of clusters, whose number is learned.

    Labels: -1 marks a row of unknown class, which is still used for the clusters. The one exception
    is scikit-learn's coding of two classes: if `y` holds -1 and 1 and nothing else, both are
    classes. Constant columns are left out. A prediction averages the class probabilities of
    posterior draws with equal weights (the paper's mixture of experts); it does not weight them by
    their density at the new row.

    Fitted attributes are `classes_`, `n_features_in_`, `feature_names_in_` (for a data frame),
    `n_iter_` (steps of all orders), `orders_`, `order_posterior_` (their probabilities),
    `log_evidence_` and `log_evidence_se_` of all orders together on the standardised scale, and
    `posterior_` (the tree of `inference.Orders`, with a group for each order).

    Args:
        order: number of clusters; None: learned, from 1 to `max_order`.
        max_order: largest number of clusters. Numbers are tried from 1 upwards, until two in a row
            have a negligible posterior probability.
        prior: prior of the order, a NumPyro distribution over 1, 2, ...; None: that of the zoo.
        cluster: density of a cluster: `zoo.staged_learning.diagonal` (None), `full`, or a function
            like those.
        class_concentration: concentration of the Dirichlet prior of a cluster's class
            probabilities. None: 1 / classes, so that the prior counts as one row. Of three classes,
            a cluster with 30 rows of one class then gives this class a probability of .98; with 1
            it is .94.
        num_stages: number of stages that `fit` divides the rows into; one is best for few rows. A
            stage with too few rows for its summary is repeated with more rows.
        num_live: live points of the nested sampling. With few of them it may miss modes, which no
            check detects: fit again with another `random_state` and compare.
        num_sweeps: least length of the random walk to a new point, in sweeps over the parameters.
            Walks become longer as needed. `diagnostics.report` of an order's run detects walks that
            are still too short, for which the error of the evidence is underestimated.
        num_samples: draws of each order.
        class_weight: {class: factor}, "balanced" or None. A prediction multiplies the probability
            of each class by its factor, 1 by default, and normalises: for new rows in which classes
            are more or less frequent than in the fit. "balanced" divides by the share of each class
            among the labelled rows. The fit does not depend on `class_weight`.
        max_time: seconds after which a call ends, with the orders that have finished; an error if
            none has.
        progress_bar: whether to show a progress bar for each order; None: on a terminal, after two
            seconds.
        random_state: integer, `RandomState` or None.
    """

    _no_weights = (
        "the evidence of an order is that of whole rows; repeat a row in place of a weight of 2"
    )
    _kept = (
        *("_standardiser", "_options", "n_iter_"),
        *("orders_", "order_posterior_", "log_evidence_", "log_evidence_se_"),
    )

    def __init__(
        self,
        order: int | None = None,
        *,
        max_order: int = 4,
        prior: Distribution | None = None,
        cluster: Any = None,
        class_concentration: float | None = None,
        num_stages: int = 1,
        num_live: int = 100,
        num_sweeps: float = 2.0,
        num_samples: int = 200,
        class_weight: Any = None,
        max_time: float | None = None,
        progress_bar: bool | None = None,
        random_state: Any = None,
    ):
        self.order = order
        self.max_order = max_order
        self.prior = prior
        self.cluster = cluster
        self.class_concentration = class_concentration
        self.num_stages = num_stages
        self.num_live, self.num_sweeps, self.num_samples = num_live, num_sweeps, num_samples
        self.class_weight = class_weight
        self.max_time, self.progress_bar, self.random_state = max_time, progress_bar, random_state

    # Fitting.

    def fit(self, X: Any, y: Any, **others: Any) -> "StagedMixtureClassifier":
        """Fit all rows; earlier ones are forgotten.

        Parameters
        ----------
        X : array or frame
            [row, column].
        y : array
            The class of each row, -1 where it is unknown.
        **others
            Refused; `sample_weight` with the reason why the model has no place for it.

        Returns
        -------
        self
        """
        self._refuse_others(others)
        return self._begin(X, y, None, self.num_stages)

    def partial_fit(self, X: Any, y: Any, classes: Any = None) -> "StagedMixtureClassifier":
        """Update the orders of the first call by more rows, one stage of a single pass.

        Columns are standardised as at the first call. Each call should have a random sample of
        rows. Earlier rows are known by their posterior alone, which is summarised by a mixture of
        Normals. If the posterior of the new rows lies where this mixture has hardly any density,
        the earlier rows are forgotten, with a warning. Where the highest order becomes the most
        probable, a warning suggests `fit` with all rows. `order`, `prior`, `cluster`,
        `class_concentration`, `num_live`, `num_sweeps` and `num_samples` must not change between
        calls.

        Parameters
        ----------
        X : array or frame
            [row, column].
        y : array
            The class of each row, -1 where it is unknown.
        classes : array, default=None
            At the first call, all classes of all calls; None: those of its labels.

        Returns
        -------
        self
        """
        self._refuse_balanced()
        if self.__sklearn_is_fitted__():
            self._refuse_loaded("_runs")
        if not hasattr(self, "_runs") or not self._runs.drivers:
            return self._begin(X, y, classes, None)
        self._check_settings()
        self._check_same_settings()
        if classes is not None and not np.array_equal(declared(classes), self.classes_):
            raise ValueError(
                f"classes: found {declared(classes)}, but the first call began with "
                f"{self.classes_}; give the same, or none."
            )
        X = read_numbers(self, X, dtype=np.float64, reset=False)
        if y is None:
            raise ValueError("y: found None, wanted the class of each row; -1 where it is unknown.")
        labels = codes_among(y, self.classes_)
        check_consistent_length(X, labels)
        self._check_left_out(X)
        with jax.enable_x64(True):
            self._runs.settings["max_time"] = self.max_time
            self._runs.most = self._runs.most if self.order is not None else self.max_order
            self._runs.update(self._standard(X), labels)
            return self._taken(self._runs.tree())

    def _begin(
        self, X: Any, y: Any, classes: Any, num_stages: int | None
    ) -> "StagedMixtureClassifier":
        """Start a fit; without a number of stages, by the first call of `partial_fit`."""
        self._check_settings()
        # a fit that fails must not leave an earlier one
        for name in ("posterior_", "_runs"):
            vars(self).pop(name, None)
        X = read_numbers(self, X, dtype=np.float64)
        if y is None:
            raise ValueError(
                "StagedMixtureClassifier requires y to be passed, but the target y is None; wanted "
                "the class of each row."
            )
        classes, labels = coded(y, classes)
        check_consistent_length(X, labels)
        if num_stages is not None and len(labels) < num_stages:
            raise ValueError(
                f"num_stages: found {num_stages} for {len(labels)} rows; wanted a row or more for "
                "each stage."
            )
        if num_stages is None and not np.ptp(X, 0).any():
            raise ValueError(
                f"X: found {len(X)} rows (1 sample, or copies of it), from which no column can be "
                "standardised; wanted different rows at the first call of partial_fit, whose means "
                "and scales serve all calls."
            )
        self._standardiser = Standardiser.learn(X)
        fixed = ("order", "prior", "cluster", "class_concentration")
        fixed += ("num_live", "num_sweeps", "num_samples")
        self._first_settings = {name: getattr(self, name) for name in fixed}
        num_classes, concentration = max(len(classes), 2), self.class_concentration
        self._options = {
            "num_classes": num_classes,
            "class_concentration": 1 / num_classes if concentration is None else concentration,
        } | ({} if self.cluster is None else {"cluster": self.cluster})
        self._models: dict[int, Any] = {}
        least, most = (1, self.max_order) if self.order is None else (self.order, self.order)
        self._runs = Orders(
            partial(family, **self._options),
            order_prior() if self.prior is None else self.prior,
            kernel=partial(
                Staged,
                num_stages=num_stages or 1,
                num_live=self.num_live,
                num_sweeps=self.num_sweeps,
            ),
            least=least,
            most=most,
            settings={
                "num_samples": self.num_samples,
                "max_time": self.max_time,
                "progress_bar": self.progress_bar,
            },
        )
        self.classes_ = classes
        self.class_weight_ = class_weights(self.class_weight, classes, labels)
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        try:
            with jax.enable_x64(True):
                return self._taken(self._runs.run(seed, self._standard(X), labels))
        except KeyboardInterrupt:
            del self._runs  # else `partial_fit` would go on with these rows
            raise

    def _taken(self, tree: xr.DataTree) -> "StagedMixtureClassifier":
        self.posterior_, orders = tree, tree["orders"].dataset
        self.orders_, self.order_posterior_ = orders["order"].values, orders["probability"].values
        self.log_evidence_ = tree.attrs["log_evidence"]
        check_finite(self, log_evidence_=self.log_evidence_)
        self.log_evidence_se_ = tree.attrs["log_evidence_se"]
        self.n_iter_ = sum(int(tree[f"order_{order}"].attrs["steps"]) for order in self.orders_)
        if tree.attrs["ended"] not in ("finished", "most"):
            tried = f"orders {self.orders_.min()} to {self.orders_.max()}"
            warnings.warn(
                f"ended by {tree.attrs['ended']} with {tried} alone; give more max_time.",
                ConvergenceWarning,
                stacklevel=3,
            )
        if np.isinf(self.log_evidence_se_):
            warnings.warn(
                "the posterior of these rows lies outside of the summary of earlier rows, which is "
                "forgotten: predictions are those of the last rows, and log_evidence_ is not "
                "reliable. Call fit with all rows, or shuffle the rows before dividing them into "
                "calls.",
                ConvergenceWarning,
                stacklevel=3,
            )
        elif (
            self.order is None
            and self.orders_[-1] > 1
            and self.order_posterior_.argmax() == len(self.orders_) - 1
        ):
            share = f"{self.order_posterior_[-1]:.2g}"
            warnings.warn(
                f"max_order: {self.orders_[-1]} clusters are the most probable ({share}), and more "
                "were not tried; give more max_order, and all rows to fit.",
                ConvergenceWarning,
                stacklevel=3,
            )
        return self

    def _check_settings(self) -> None:
        for name, least in (
            ("max_order", 1),
            ("num_stages", 1),
            ("num_live", 20),
            ("num_samples", 1),
            ("order", 1),
        ):
            value = getattr(self, name)
            if (name != "order" or value is not None) and (
                not isinstance(value, Integral) or isinstance(value, bool) or value < least
            ):
                raise ValueError(
                    f"{name}: found {value!r}, wanted an integer, at least "
                    f"{least}{', or None' * (name == 'order')}."
                )
        for name in ("num_sweeps", "class_concentration"):
            value = getattr(self, name)
            is_chosen = value is None and name == "class_concentration"
            if not is_chosen and (not isinstance(value, Real) or not 0 < value < np.inf):
                raise ValueError(f"{name}: found {value!r}, wanted a positive number.")
        if self.cluster is not None and not callable(self.cluster):
            raise TypeError(
                f"cluster: found {self.cluster!r}, wanted a function like those of "
                "zoo.staged_learning, or None."
            )

    def _check_same_settings(self) -> None:
        for name, first in self._first_settings.items():
            if (now := getattr(self, name)) is not first and not (
                isinstance(now, Real) and now == first
            ):
                raise ValueError(
                    f"{name}: found {now!r}, but the first call began with {first!r}; set it back, "
                    "or call fit with all rows."
                )

    # Columns.

    def _check_left_out(self, X: np.ndarray) -> None:
        """Warn of columns that were constant at the first call and vary now."""
        left_out = np.setdiff1d(np.arange(X.shape[1]), self._standardiser.kept)
        if len(
            changed := [
                int(column)
                for column in left_out
                if not np.allclose(X[:, column], self._standardiser.mean[column], ROUNDING, 0.0)
            ]
        ):
            warnings.warn(
                f"columns {changed} were constant at the first call and were left out; they vary "
                "now, which is ignored. Call fit, or start with rows in which all columns vary.",
                UserWarning,
                stacklevel=3,
            )

    def _standard(self, X: np.ndarray) -> np.ndarray:
        """The standardised columns that vary; the first where none does."""
        return self._standardiser.standardise_kept(X, FARTHEST)

    # Predictions.

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "posterior_")

    def _restore(self, tree: xr.DataTree) -> None:
        self.posterior_, self._models = tree, {}

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return the probability of each class, [row, class]."""
        check_is_fitted(self)
        X = read_numbers(self, X, dtype=np.float64, reset=False)
        if len(self.classes_) == 1:
            return np.ones((len(X), 1))
        counts = {
            order: share
            for order, share in zip(self.orders_, self.order_posterior_, strict=True)
            if share > 1e-4  # others are negligible
        }
        found = np.zeros((len(X), len(self.classes_)))
        with jax.enable_x64(True):
            x = self._standard(X)
            for order, share in counts.items():
                found += share * self._of_order(int(order), x)
        joint = found * self.class_weight_
        return joint / joint.sum(1, keepdims=True)

    def _of_order(self, order: int, x: np.ndarray) -> np.ndarray:
        """Class probabilities averaged over the draws of one order."""
        drawn = self.posterior_[f"order_{order}"]["posterior"].dataset.isel(chain=0)
        draws = {str(name): values.values for name, values in drawn.items()}
        model = self._models.setdefault(order, family(order, **self._options))
        return in_chunks(lambda x: _averaged(model, x, draws), x, CHUNK)

    def predict_log_proba(self, X: Any) -> np.ndarray:
        """Return the log probability of each class, [row, class]."""
        with np.errstate(divide="ignore"):
            return np.log(self.predict_proba(X))

    def predict(self, X: Any) -> np.ndarray:
        """Return the most probable class of each row."""
        best = self.predict_proba(X).argmax(1)
        return self.classes_[best]


@partial(jax.jit, static_argnames="model")
def _averaged(model: Any, x: jax.Array, draws: dict[str, jax.Array]) -> jax.Array:
    """The model's p(class | row), averaged over draws, [row, class]."""
    of = lambda values: Program(model, x).trace(values, jax.random.key(0))["y"]["fn"].probs
    return jax.lax.map(of, draws).mean(0)
