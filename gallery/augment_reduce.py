"""Linear classification with very many classes as a scikit-learn estimator.

    classifier = AugmentReduceClassifier().fit(X, y)      # multinomial logistic regression
    classifier.top_k(X_new, 5)                            # five most probable classes of each row
    AugmentReduceClassifier(noise="normal").fit(X, y)     # multinomial probit

X is dense or sparse. The model is `zoo.augment_reduce`, and `AugmentReduce` fits it. Cost of a
step: batch_size x num_negatives x columns, whatever the number of classes. Cost of a prediction:
rows x classes x columns, and 200 x rows x classes for noise other than Gumbel.

Ruiz, Titsias, Dieng and Blei (2018), "Augment and reduce: stochastic inference for large
categorical distributions".
"""

from functools import partial
from numbers import Integral, Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from scipy import sparse
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_consistent_length, check_random_state, column_or_1d
from sklearn.utils.validation import check_is_fitted, validate_data

from gallery._labels import coded, codes_among, declared
from inference import AugmentReduce, Driver, Program
from inference.kernels.augment_reduce.weights import Adagrad
from zoo.augment_reduce import SparseRows, augment_reduce

__all__ = ["AugmentReduceClassifier"]

# sparse tables with fewer entries are made dense, for updates of whole rows of weights are faster
MOST_DENSE = 10**8
CHUNK = 4 * 10**6  # rows x classes that are predicted at once
FARTHEST = 10.0  # largest absolute value after scaling
SMALLEST_SCALE = 1e-35  # smaller ones are close to underflow in float32


class AugmentReduceClassifier(ClassifierMixin, BaseEstimator):
    """Linear classification by a random utility model, for thousands or millions of classes.

    Columns are standardised first, with numbers of 10 at most. Columns of a sparse table are only
    divided by their largest entry. Rows labelled -1 are left out; where `y` holds only -1 and 1,
    both are classes. A class without rows has a small probability.

    Fitted attributes are `classes_`, `n_features_in_`, `feature_names_in_` (for a data frame),
    `n_iter_`, `elbo_` (the mean of the last estimates for the rows of the last call), and
    `posterior_`.

    Args:
        noise: "gumbel" (softmax), "normal" (probit), "logistic", "laplace", "student_t", or a
            NumPyro distribution.
        num_classes: labels are 0 .. num_classes - 1; None: read off `y`.
        batch_size: rows of a step, at most all.
        num_negatives: other classes of a step, at most all.
        max_iter: steps of `fit`.
        prior_scale: prior standard deviation of the weights; None: maximum likelihood.
        rank: number of learned combinations of the columns that utilities depend on, for very many
            columns; None: utilities depend on the columns.
        posterior: whether weights have a normal variational distribution, over whose `num_samples`
            draws predictions are averaged; False: a point estimate.
        step_size: of Adagrad for the weights.
        num_samples: draws in `posterior_` with `posterior`.
        max_time: seconds after which a call ends, with the result so far.
        progress_bar: whether to show a progress bar with the ELBO.
        random_state: integer, `RandomState` or None.
    """

    def __init__(
        self,
        noise: Any = "gumbel",
        *,
        num_classes: int | None = None,
        batch_size: int = 128,
        num_negatives: int = 100,
        max_iter: int = 5000,
        prior_scale: float | None = 1.0,
        rank: int | None = None,
        posterior: bool = False,
        step_size: float = 0.1,
        num_samples: int = 20,
        max_time: float | None = None,
        progress_bar: bool = False,
        random_state: Any = None,
    ):
        self.noise = noise
        self.num_classes = num_classes
        self.batch_size = batch_size
        self.num_negatives = num_negatives
        self.max_iter = max_iter
        self.prior_scale = prior_scale
        self.rank = rank
        self.posterior = posterior
        self.step_size = step_size
        self.num_samples = num_samples
        self.max_time = max_time
        self.progress_bar = progress_bar
        self.random_state = random_state

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    # Fitting.

    def fit(self, X: Any, y: Any) -> "AugmentReduceClassifier":
        """Fit all rows; earlier ones are forgotten.

        Args:
            X: [row, column], an array, a data frame or a SciPy sparse matrix.
            y: the class of each row, -1 where it is unknown.
        """
        return self._begin(X, y, None, self.max_iter)

    def partial_fit(self, X: Any, y: Any, classes: Any = None) -> "AugmentReduceClassifier":
        """Make one pass over more rows.

        Columns are scaled as at the first call. The prior has the weight that it has if the rows of
        the call are all rows.

        Args:
            X: as in `fit`.
            y: the class of each row, -1 where it is unknown.
            classes: at the first call, all classes of all calls; None: `num_classes`, or those of
                its labels.
        """
        if not hasattr(self, "classes_"):
            return self._begin(X, y, classes, None)
        if classes is not None and not np.array_equal(declared(classes), self.classes_):
            raise ValueError(
                f"classes: found {declared(classes)}, but the first call began with "
                f"{self.classes_}; give the same, or none."
            )
        if y is None:
            raise ValueError("y: found None, wanted the class of each row; -1 where it is unknown.")
        X = validate_data(self, X, accept_sparse="csr", dtype=np.float32, reset=False)
        labels = codes_among(y, self.classes_) if self.num_classes is None else self._numbered(y)
        check_consistent_length(X, labels)
        X, labels = X[labels >= 0], labels[labels >= 0]
        if len(labels):
            self._driver.num_warmup = self.n_iter_ + self._steps_of_a_pass(len(labels))
            self._driver.max_time = self.max_time
            self._driver.update(
                x=self._scaled(X, self._is_packed), y=labels, **self._settings(len(labels))
            )
            self._taken(self._driver.tree())
        return self

    def _begin(
        self, X: Any, y: Any, classes: Any, num_steps: int | None
    ) -> "AugmentReduceClassifier":
        self._check_settings()
        X = validate_data(self, X, accept_sparse="csr", dtype=np.float32)
        if y is None:
            raise ValueError(
                "AugmentReduceClassifier requires y to be passed, but the target y is None; wanted "
                "the class of each row."
            )
        if (
            classes is not None
            and self.num_classes is not None
            and not np.array_equal(declared(classes), np.arange(self.num_classes))
        ):
            raise ValueError(
                f"classes: found {declared(classes)}, but num_classes={self.num_classes} names "
                "them; give one of the two."
            )
        classes, labels = (
            coded(y, classes)
            if self.num_classes is None
            else (np.arange(self.num_classes), self._numbered(y))
        )
        check_consistent_length(X, labels)
        X, labels = X[labels >= 0], labels[labels >= 0]
        if not len(labels):
            raise ValueError("y: every row is unlabelled (-1), so no class can be learned.")
        self._learn_scales(X)
        self.classes_, self._is_packed = classes, self._may_pack(X)
        # at weights and embedding of 0 the gradient vanishes
        start = 0.01 if self.rank is None else 0.1
        kernel = AugmentReduce(
            augment_reduce,
            posterior=self.posterior,
            init_scale=start,
            optimizer=Adagrad(self.step_size),
        )
        # draws are made when `posterior_` is first used, so one is enough here
        steps = num_steps or self._steps_of_a_pass(len(labels))
        self._driver = Driver(
            kernel,
            num_warmup=steps,
            num_samples=1,
            max_time=self.max_time,
            progress_bar=self.progress_bar,
        )
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        return self._taken(
            self._driver.run(
                seed, x=self._scaled(X, self._is_packed), y=labels, **self._settings(len(labels))
            )
        )

    def _numbered(self, y: Any) -> np.ndarray:
        """Labels that are codes; the cost does not depend on the number of classes."""
        labels, most = column_or_1d(y, warn=True), int(self.num_classes or 0) - 1
        wanted = f"wanted integers 0 .. {most}, as num_classes says, or -1 where unknown."
        if labels.dtype.kind not in "iu":
            raise ValueError(
                f"y: found classes of type {labels.dtype}, such as {labels[0]!r}; {wanted}"
            )
        if not -1 <= labels.min() <= labels.max() <= most:
            raise ValueError(f"y: found classes {labels.min()} .. {labels.max()}; {wanted}")
        return labels.astype(np.int32)

    def _taken(self, tree: xr.DataTree) -> "AugmentReduceClassifier":
        elbo = tree["sample_stats"].dataset["elbo"].values[0]
        self.n_iter_, self.elbo_, self._tree = len(elbo), float(elbo[-100:].mean()), None
        names = ("weights", "biases", *(() if self.rank is None else ("embedding",)))
        self._draws = {
            name: np.asarray(tree["posterior"].dataset[name].values[0]) for name in names
        }
        if self.posterior:
            self._draws = {
                name: np.asarray(self.posterior_["posterior"].dataset[name].values[0])
                for name in self._draws
            }
        return self

    def _check_settings(self) -> None:
        for name in ("batch_size", "num_negatives", "max_iter", "num_samples"):
            value = getattr(self, name)
            if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}: found {value!r}, wanted an integer, at least 1.")
        if self.num_classes is not None and (
            not isinstance(self.num_classes, Integral) or self.num_classes < 1
        ):
            raise ValueError(
                f"num_classes: found {self.num_classes!r}, wanted an integer, at least 1, or None."
            )
        if self.rank is not None and (not isinstance(self.rank, Integral) or self.rank < 1):
            raise ValueError(f"rank: found {self.rank!r}, wanted an integer, at least 1, or None.")
        for name in ("prior_scale", "step_size"):
            value = getattr(self, name)
            if not (name == "prior_scale" and value is None) and not (
                isinstance(value, Real) and 0 < value < np.inf
            ):
                raise ValueError(f"{name}: found {value!r}, wanted a positive number.")

    def _steps_of_a_pass(self, num_rows: int) -> int:
        return -(-num_rows // min(self.batch_size, num_rows))

    def _settings(self, num_rows: int) -> dict[str, Any]:
        """The model's arguments other than the data."""
        num_classes = max(len(self.classes_), 2)
        sizes = {
            "batch_size": min(self.batch_size, num_rows),
            "num_negatives": min(self.num_negatives, num_classes - 1),
        }
        return {
            "num_classes": num_classes,
            "noise": self.noise,
            "prior_scale": self.prior_scale,
            "rank": self.rank,
            **sizes,
        }

    # Columns.

    def _learn_scales(self, X: Any) -> None:
        if sparse.issparse(X):
            self._mean = np.zeros(X.shape[1], np.float32)
            scale = farthest = np.asarray(abs(X).max(axis=0).todense(), np.float32).ravel()
        else:
            self._mean = X.mean(0, dtype=np.float64).astype(np.float32)
            scale = X.std(0, dtype=np.float64).astype(np.float32)
            farthest = np.maximum(X.max(0) - self._mean, self._mean - X.min(0))
        varies = (scale > 1e-10 * abs(self._mean)) & (scale > SMALLEST_SCALE)
        # outliers, at hundreds of standard deviations, would make steps too large
        self._scale = np.where(varies, np.maximum(scale, farthest / FARTHEST), 1).astype(np.float32)

    def _may_pack(self, X: Any) -> bool:
        """Whether the table stays sparse: columns are not centred, and the gain is worth it."""
        return (
            sparse.issparse(X)
            and not self._mean.any()
            and (self.rank is not None or np.prod(X.shape) > MOST_DENSE)
        )

    def _scaled(self, X: Any, is_packed: bool) -> Any:
        """Scaled features, sparse or dense as at the first call, which the weights depend on."""
        if is_packed:
            return SparseRows.of(
                sparse.csr_matrix(sparse.csr_matrix(X) @ sparse.diags(1 / self._scale)).astype(
                    np.float32
                )
            )
        return ((X.toarray() if sparse.issparse(X) else X) - self._mean) / self._scale

    # Predictions.

    def predict_log_proba(self, X: Any, classes: Any = None) -> np.ndarray:
        """Return log probabilities, [row, class].

        Args:
            X: as in `fit`.
            classes: classes whose probabilities are returned; None: all.
        """
        check_is_fitted(self)
        chosen = slice(None) if classes is None else self._places(classes)
        return np.concatenate(self._over_rows(X, lambda log_probs: log_probs[:, chosen]))

    def _places(self, classes: Any) -> list[int]:
        """Indices of classes."""
        every = {label: place for place, label in enumerate(self.classes_.tolist())}
        asked = column_or_1d(classes).tolist()
        if unknown := [label for label in asked if label not in every]:
            raise ValueError(
                f"classes: found {unknown[0]!r}, which is none of the {len(every)} classes that "
                "were learned (`classes_`)."
            )
        return [every[label] for label in asked]

    def predict_proba(self, X: Any, classes: Any = None) -> np.ndarray:
        """Return probabilities, [row, class].

        Args:
            X: as in `fit`.
            classes: classes whose probabilities are returned; None: all.
        """
        return np.exp(self.predict_log_proba(X, classes))

    def predict(self, X: Any) -> np.ndarray:
        """Return the most probable class of each row."""
        best = np.concatenate(self._over_rows(X, lambda log_probs: log_probs.argmax(1)))
        return self.classes_[best]

    def top_k(self, X: Any, k: int = 5) -> tuple[np.ndarray, np.ndarray]:
        """Return the most probable classes of each row, best first, and their probabilities.

        Args:
            X: as in `fit`.
            k: number of classes.

        Returns:
            Classes and probabilities, both [row, k].
        """
        check_is_fitted(self)
        if not isinstance(k, Integral) or not 1 <= k <= len(self.classes_):
            raise ValueError(
                f"k: found {k!r}, wanted an integer from 1 to {len(self.classes_)}, the number of "
                "classes."
            )

        def best(log_probs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            found = np.argpartition(-log_probs, k - 1, axis=1)[:, :k]
            order = np.argsort(-np.take_along_axis(log_probs, found, 1), axis=1, kind="stable")
            found = np.take_along_axis(found, order, 1)
            return found, np.exp(np.take_along_axis(log_probs, found, 1))

        codes, probabilities = (
            np.concatenate(parts) for parts in zip(*self._over_rows(X, best), strict=True)
        )
        return self.classes_[codes], probabilities

    def _over_rows(self, X: Any, what: Any) -> list[Any]:
        """`what(log_probs)` of one chunk of rows after the other."""
        check_is_fitted(self)
        X = validate_data(self, X, accept_sparse="csr", dtype=np.float32, reset=False)
        is_packed = self._may_pack(X)
        unpacked = MOST_DENSE // X.shape[1] if sparse.issparse(X) and not is_packed else X.shape[0]
        rows = max(min(CHUNK // max(len(self.classes_), 2), unpacked, X.shape[0]), 1)
        found = []
        for start in range(0, X.shape[0], rows):
            some = X[start : start + rows]
            settings = {
                name: value
                for name, value in self._settings(some.shape[0]).items()
                if name != "batch_size"
            }
            log_probs = np.asarray(
                _log_probs(self._scaled(some, is_packed), self._draws, **settings)
            )
            found.append(
                what(
                    log_probs
                    if len(self.classes_) > 1
                    else np.zeros((len(log_probs), 1), np.float32)
                )
            )
        return found

    @property
    def posterior_(self) -> xr.DataTree:
        """Weights, the ELBO of each step and variational parameters of the noise, for scaled
        columns; made at first use.
        """
        check_is_fitted(self)
        if self._tree is None:
            self._driver.num_samples = self.num_samples if self.posterior else 1
            self._tree = self._driver.tree()
        return self._tree


@partial(jax.jit, static_argnames=("num_classes", "noise", "prior_scale", "rank", "num_negatives"))
def _log_probs(x: Any, draws: dict[str, Any], **settings: Any) -> jax.Array:
    """The model's log probabilities [row, class], averaged over draws of the weights."""
    program = Program(augment_reduce, x, np.zeros(len(x), np.int32), **settings, augmented=False)
    each = jax.lax.map(lambda values: program.trace(values)["y"]["fn"].log_probs, draws)
    return jax.nn.logsumexp(each, axis=0) - jnp.log(len(each))
