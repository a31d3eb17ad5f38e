"""A mixture of clusters that classifies, of unknown order, as a scikit-learn estimator.

    classifier = StagedMixtureClassifier().fit(X, y)     # y = -1 where unlabelled
    classifier.predict_proba(X_new)                      # averaged over draws of the posterior, and
                                                         over orders
    classifier.order_posterior_, classifier.log_evidence_
    classifier.partial_fit(X_more, y_more)               # one more stage

The model is `zoo.staged_learning`; `Staged` runs nested sampling on each order, with the evidence
that weighs the orders. Columns are standardised first. Cost of a fit of order m: with d = m (2
columns + classes), num_live (information in nats + 5) num_sweeps d 2 likelihoods of rows x m x
(columns + classes) each, the information some nats for each of the d, or a nat or two where walkers
have found what there is (`Staged`); so tables of a few columns. Of a prediction: rows x draws x m x
columns for each order.

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
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_consistent_length, check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from gallery._labels import coded, codes_among, declared
from gallery._standardise import ROUNDING, Standardiser
from inference import Orders, Program, Staged
from zoo.staged_learning import family, order_prior

__all__ = ["StagedMixtureClassifier"]

AT_ONCE = 4 * 10**6  # rows x draws x clusters of a prediction
FARTHEST = 1e100  # standard deviations, whose square is still a number
# of partial_fit
FOR_ALL_CALLS = ("order", "prior", "cluster", "num_live", "num_sweeps", "num_samples")
NEGLIGIBLE = 1e-4  # probability of an order that a prediction leaves out


class StagedMixtureClassifier(ClassifierMixin, BaseEstimator):
    """Classifies by clusters of rows, each with its share of every class; how many clusters there
    are is learned as well.

    Labels: -1 is a row of unknown class, which still shows where clusters are; where `y` holds -1
    and 1 and nothing else, both are classes. A column that is constant says nothing and is left
    out. One class alone is certain. A prediction averages the probabilities that each draw of the
    posterior gives (the paper's mixture of experts): where a new row lies does not tell which of
    the draws describes it.

    :param order: how many clusters; None: learned, from 1 to `max_order`.
    :param max_order: the most clusters that are tried, fewer where two orders in a row are
    improbable.
    :param prior: of the order, a NumPyro distribution over 1, 2, ...; None: the zoo's, a Poisson
    mixed with a zeta.
    :param cluster: density of a cluster: `zoo.staged_learning.diagonal` (None) or `full`, or a
    function like those.
    :param num_stages: parts into which `fit` deals the rows; with few rows one is best, and where a
    part has too few for a summary of what
        it tells, or has misled what comes after it, it is learned again with more (`Staged`).
    :param num_live: live points of the nested sampling. With few of them it may miss clusters that
    describe the rows better, and no check
        shows that: fit again with another `random_state` and compare.
    :param num_sweeps: how far a new point walks at least, in sweeps over the parameters. Walks grow
    as they need; where they are still too
        short, the evidence is off by more than is claimed, and `diagnostics.report` of an order's
        run says so.
    :param num_samples: draws of each order.
    :param max_time: seconds after which a call ends, with the orders that have finished; an error
    if none has.
    :param progress_bar: shows a bar for each order.
    :param random_state: integer, `RandomState` or None.

    Attributes: `classes_`, `n_features_in_`, `feature_names_in_` (of a data frame), `n_iter_`
    (steps of all orders), `orders_` and `order_posterior_` (their probabilities), `log_evidence_`
    and `log_evidence_se_` of the whole family (of the standardised columns), `posterior_` (the tree
    of `inference.Orders`: a group for each order).
    """

    def __init__(
        self,
        order: int | None = None,
        *,
        max_order: int = 4,
        prior: Distribution | None = None,
        cluster: Any = None,
        num_stages: int = 1,
        num_live: int = 100,
        num_sweeps: float = 2.0,
        num_samples: int = 200,
        max_time: float | None = None,
        progress_bar: bool = False,
        random_state: Any = None,
    ):
        self.order, self.max_order, self.prior, self.cluster, self.num_stages = (
            order,
            max_order,
            prior,
            cluster,
            num_stages,
        )
        self.num_live, self.num_sweeps, self.num_samples = num_live, num_sweeps, num_samples
        self.max_time, self.progress_bar, self.random_state = max_time, progress_bar, random_state

    # Learning.

    def fit(self, X: Any, y: Any) -> "StagedMixtureClassifier":
        """Learn from all rows, anew.

        :param X: [row, column].
        :param y: the class of each row, -1 where it is unknown.
        """
        return self._begin(X, y, None, self.num_stages)

    def partial_fit(self, X: Any, y: Any, classes: Any = None) -> "StagedMixtureClassifier":
        """One stage: more rows, which are seen once, for the orders that the first call has tried.

        Columns are scaled as at the first call. Where the highest order comes to be the most
        probable, a warning says so: call `fit` with all rows to try higher ones.

        Each call should have rows of all kinds, in random order: where rows lead away from all that
        earlier ones had left likely, these are forgotten, and a warning says so. `order`, `prior`,
        `cluster`, `num_live`, `num_sweeps` and `num_samples` are to stay what they were at the
        first call.

        :param classes: at the first call, every class that may come; None: those of its labels.
        """
        if not hasattr(self, "_runs") or not self._runs.drivers:
            return self._begin(X, y, classes, None)
        self._check_settings()
        self._check_same_settings()
        if classes is not None and not np.array_equal(declared(classes), self.classes_):
            raise ValueError(
                f"classes: found {declared(classes)}, but the first call began with "
                f"{self.classes_}; give the same, or none."
            )
        X = validate_data(self, X, dtype=np.float64, reset=False)
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
        """Learn anew.

        Without a number of stages, from the first of some parts, which has to tell the units of
        all.
        """
        self._check_settings()
        # where this fails, nobody is answered by what was learned before
        for name in ("posterior_", "_runs"):
            vars(self).pop(name, None)
        X = validate_data(self, X, dtype=np.float64)
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
                f"X: found {len(X)} rows (1 sample, or copies of it), which tell no unit of any "
                "column; wanted rows that differ at the "
                f"first call of partial_fit, for its units serve all calls."
            )
        self._standardiser = Standardiser.learn(X)
        self._begun_with = {name: getattr(self, name) for name in FOR_ALL_CALLS}
        options = {"num_classes": max(len(classes), 2)} | (
            {} if self.cluster is None else {"cluster": self.cluster}
        )
        least, most = (1, self.max_order) if self.order is None else (self.order, self.order)
        self._runs = Orders(
            partial(family, **options),
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
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        with jax.enable_x64(True):
            return self._taken(self._runs.run(seed, self._standard(X), labels))

    def _taken(self, tree: xr.DataTree) -> "StagedMixtureClassifier":
        self.posterior_, orders = tree, tree["orders"].dataset
        self.orders_, self.order_posterior_ = orders["order"].values, orders["probability"].values
        self.log_evidence_, self.log_evidence_se_ = (
            tree.attrs["log_evidence"],
            tree.attrs["log_evidence_se"],
        )
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
                "these rows lead to where what was learned before says nothing, and that is "
                "forgotten: predictions are of the last rows, "
                "and log_evidence_ may be anything. Call fit with all rows, or mix them before "
                "they are dealt to calls.",
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
                "were not tried; give more max_order, "
                "and all rows to fit.",
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
        if not isinstance(self.num_sweeps, Real) or not 0 < self.num_sweeps < np.inf:
            raise ValueError(f"num_sweeps: found {self.num_sweeps!r}, wanted a positive number.")
        if self.cluster is not None and not callable(self.cluster):
            raise TypeError(
                f"cluster: found {self.cluster!r}, wanted a function like those of "
                "zoo.staged_learning, or None."
            )

    def _check_same_settings(self) -> None:
        for name, first in self._begun_with.items():
            if (now := getattr(self, name)) is not first and not (
                isinstance(now, Real) and now == first
            ):
                raise ValueError(
                    f"{name}: found {now!r}, but the first call began with {first!r}; set it back, "
                    "or call fit with all rows."
                )

    # Columns.

    def _check_left_out(self, X: np.ndarray) -> None:
        """A column that said nothing at the first call may say something later, which nobody
        learns.
        """
        left_out = np.setdiff1d(np.arange(X.shape[1]), self._standardiser.kept)
        if len(
            changed := [
                int(column)
                for column in left_out
                if not np.allclose(X[:, column], self._standardiser.mean[column], ROUNDING, 0.0)
            ]
        ):
            warnings.warn(
                f"columns {changed} had one value at the first call and were left out; they have "
                "others now, which are not looked at. Call "
                f"fit, or begin anew with rows of which all columns say something.",
                UserWarning,
                stacklevel=3,
            )

    def _standard(self, X: np.ndarray) -> np.ndarray:
        """The columns that say something; the first, where none does."""
        return self._standardiser.standardise_kept(X, FARTHEST)

    # Asking.

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "posterior_")

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probability of each class, [row, class]."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=np.float64, reset=False)
        if len(self.classes_) == 1:
            return np.ones((len(X), 1))
        counts = {
            order: share
            for order, share in zip(self.orders_, self.order_posterior_, strict=True)
            if share > NEGLIGIBLE
        }
        found = np.zeros((len(X), len(self.classes_)))
        with jax.enable_x64(True):
            x = self._standard(X)
            for order, share in counts.items():
                found += share * self._of_order(int(order), x)
        return found / found.sum(1, keepdims=True)

    def _of_order(self, order: int, x: np.ndarray) -> np.ndarray:
        """Averaged over the draws of one order."""
        drawn = self.posterior_[f"order_{order}"]["posterior"].dataset.isel(chain=0)
        draws = {str(name): values.values for name, values in drawn.items()}
        rows = max(1, AT_ONCE // (self.num_samples * order))
        model = self._runs.models[order]
        return np.concatenate(
            [np.asarray(_averaged(model, x[i : i + rows], draws)) for i in range(0, len(x), rows)]
        )

    def predict_log_proba(self, X: Any) -> np.ndarray:
        """Log probability of each class, [row, class]."""
        with np.errstate(divide="ignore"):
            return np.log(self.predict_proba(X))

    def predict(self, X: Any) -> np.ndarray:
        """The most probable class of each row."""
        best = self.predict_proba(X).argmax(1)
        return self.classes_[best]


@partial(jax.jit, static_argnames="model")
def _averaged(model: Any, x: jax.Array, draws: dict[str, jax.Array]) -> jax.Array:
    """p(class | row, draw), as the model has it, averaged over draws: [row, class]."""
    of = lambda values: Program(model, x).trace(values, jax.random.key(0))["y"]["fn"].probs
    return jax.lax.map(of, draws).mean(0)
