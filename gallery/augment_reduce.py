"""Linear classification with very many classes as a scikit-learn estimator.

    classifier = AugmentReduceClassifier().fit(X, y)      # multinomial logistic regression
    classifier.top_k(X_new, 5)                            # five most probable classes of each row
    classifier.predict_proba(X_new, classes=[3, 8])       # if the class is one of these two
    AugmentReduceClassifier(noise="normal").fit(X, y)     # multinomial probit

X is dense or sparse. The model is `zoo.augment_reduce`, and `AugmentReduce` fits it. Cost of a
step: batch_size x num_negatives x columns, whatever the number of classes. Cost of a prediction:
rows x classes x columns, and 200 x rows x classes for noise other than Gumbel, where `classes` are
those that are asked for.

The prior's scale is chosen by the log score of rows that are held out (`prior_scale_`), by short
fits. Where few classes are frequent, half of the other classes of a step are drawn in proportion to
their frequency.

Ruiz, Titsias, Dieng and Blei (2018), "Augment and reduce: stochastic inference for large
categorical distributions".
"""

from collections.abc import Callable
from functools import cache, partial
from numbers import Integral, Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from scipy import sparse
from sklearn.base import ClassifierMixin
from sklearn.utils import check_consistent_length, check_random_state, column_or_1d
from sklearn.utils.validation import check_is_fitted

from gallery._columns import read_numbers
from gallery._estimator import ZooEstimator
from gallery._finite import check_finite
from gallery._labels import class_weights, coded, codes_among, declared, reweighted
from inference import AugmentReduce, Driver, Program
from inference.kernels.augment_reduce.weights import Adagrad
from zoo.augment_reduce import SparseRows, augment_reduce

__all__ = ["AugmentReduceClassifier"]

# sparse tables with fewer entries are made dense, for updates of whole rows of weights are faster
MOST_DENSE = 10**8
CHUNK = 4 * 10**6  # rows x classes that are predicted at once
ROWS_AT_ONCE, FEW_ROWS = 256, 64  # rows of a chunk, and of one for few rows
FARTHEST = 10.0  # largest absolute value after scaling
SMALLEST_SCALE = 1e-35  # smaller ones are close to underflow in float32
USUAL_NORM = 8.0  # of a row, for which `step_size` is meant: that of 64 standardised columns
QUIET_SHARE = 0.05  # of the classes, for a sum over drawn ones that varies little
LEAST_GAIN = 1 / 8  # of step sizes; smaller steps are too small for the usual number of steps
# The search for the prior's scale.
LEAST_ROWS = 20  # with fewer rows there is no search
MOST_HELD_OUT = 2000  # rows
MOST_SCALES = 6  # that are tried
SEARCH_SHARE = 5  # of the steps of a fit, the part that a scale is tried for
MARGIN = 0.005  # nats a row, by which a wider prior must be better
MOST_UP = 0.25  # of half a decade
NUM_NODES = 200  # a prediction costs so many times as much for noise other than Gumbel


class AugmentReduceClassifier(ClassifierMixin, ZooEstimator):
    """Linear classification by a random utility model, for thousands or millions of classes.

    Columns are standardised first. A column with outliers is divided by more than its standard
    deviation, so that its largest absolute value is 10. Columns of a sparse table are only divided
    by their largest absolute value. Labels: -1 marks a row of unknown class, which is left out. The
    one exception is scikit-learn's coding of two classes: if `y` holds -1 and 1 and nothing else,
    and `num_classes` is None, both are classes. A class without rows has a small probability.

    Fitted attributes are `classes_`, `n_features_in_`, `feature_names_in_` (for a data frame),
    `n_iter_`, `elbo_` (the mean of the last 100 estimates, for the rows of the last call),
    `prior_scale_`, and `posterior_`.

    Args:
        noise: "gumbel" (softmax), "normal" (probit), "logistic", "laplace", "student_t", or a
            NumPyro distribution.
        num_classes: labels are 0 .. num_classes - 1; None: read off `y`.
        batch_size: rows of a step, at most all.
        num_negatives: number of classes that a step draws beside the class of each row, at most all
            others.
        max_iter: steps of `fit`.
        prior_scale: prior standard deviation of the weights; "auto": the one with the best log
            score on rows that are held out, which about doubles the time of a fit; None: maximum
            likelihood.
        rank: number of learned combinations of the columns that utilities depend on, for very many
            columns; None: utilities depend on the columns.
        posterior: whether weights have a normal variational distribution, over whose `num_samples`
            draws predictions are averaged; False: a point estimate.
        step_size: of Adagrad for the weights. Without `rank`, it is made smaller for rows of large
            norm: above a norm of 8 (the root mean square over the scaled rows, such as that of 64
            standardised columns) it is divided by (norm / 8)^1.5, but by 8 at most.
        num_samples: draws in `posterior_` with `posterior`.
        class_weight: {class: factor}, "balanced" or None. A prediction multiplies the probability
            of each class by its factor, 1 by default, and normalises: for new rows in which classes
            are more or less frequent than in the fit. "balanced" divides by the share of each class
            among the labelled rows. The fit does not depend on `class_weight`.
        max_time: seconds after which a call ends, with the result so far.
        progress_bar: whether to show a progress bar with the ELBO; None: on a terminal, after two
            seconds.
        random_state: integer, `RandomState` or None.
    """

    _no_weights = (
        "a step draws rows with equal probabilities; repeat a row in place of a weight of 2"
    )
    _kept = ("_mean", "_scale", "_is_packed", "n_iter_", "elbo_", "prior_scale_")

    def __init__(
        self,
        noise: Any = "gumbel",
        *,
        num_classes: int | None = None,
        batch_size: int = 128,
        num_negatives: int = 100,
        max_iter: int = 5000,
        prior_scale: Any = "auto",
        rank: int | None = None,
        posterior: bool = False,
        step_size: float = 0.1,
        num_samples: int = 20,
        class_weight: Any = None,
        max_time: float | None = None,
        progress_bar: bool | None = None,
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
        self.class_weight = class_weight
        self.max_time = max_time
        self.progress_bar = progress_bar
        self.random_state = random_state

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    # Fitting.

    def fit(self, X: Any, y: Any, **others: Any) -> "AugmentReduceClassifier":
        """Fit all rows; earlier ones are forgotten.

        Parameters
        ----------
        X : array, frame or sparse matrix
            [row, column], an array, a data frame or a SciPy sparse matrix.
        y : array
            The class of each row, -1 where it is unknown.
        **others
            Refused; `sample_weight` with the reason why the model has no place for it.

        Returns
        -------
        self
        """
        self._refuse_others(others)
        return self._begin(X, y, None, self.max_iter)

    def partial_fit(self, X: Any, y: Any, classes: Any = None) -> "AugmentReduceClassifier":
        """Make one pass over more rows.

        Columns are scaled, and the prior's scale is chosen, at the first call. Each call weighs the
        prior as if its rows were all rows. So the prior has more influence on the result of several
        calls than on that of one `fit` to all of their rows.

        Parameters
        ----------
        X : array, frame or sparse matrix
            As in `fit`.
        y : array
            The class of each row, -1 where it is unknown.
        classes : array, default=None
            At the first call, all classes of all calls; None: `num_classes`, or those of
            its labels.

        Returns
        -------
        self
        """
        self._refuse_balanced()
        if not self.__sklearn_is_fitted__():
            return self._begin(X, y, classes, None)
        self._refuse_loaded()
        if classes is not None and not np.array_equal(declared(classes), self.classes_):
            raise ValueError(
                f"classes: found {declared(classes)}, but the first call began with "
                f"{self.classes_}; give the same, or none."
            )
        if y is None:
            raise ValueError("y: found None, wanted the class of each row; -1 where it is unknown.")
        X = read_numbers(self, X, accept_sparse="csr", dtype=np.float32, reset=False)
        labels = codes_among(y, self.classes_) if self.num_classes is None else self._numbered(y)
        check_consistent_length(X, labels)
        X, labels = X[labels >= 0], labels[labels >= 0]
        if len(labels):
            self._driver.num_warmup = self.n_iter_ + self._steps_of_a_pass(len(labels))
            self._driver.max_time = self.max_time
            try:
                self._driver.update(
                    x=self._scaled(X, self._is_packed), y=labels, **self._settings(len(labels))
                )
            finally:  # Ctrl-C keeps the steps that were taken
                self._taken(self._driver.tree())
        return self

    def _begin(
        self, X: Any, y: Any, classes: Any, num_steps: int | None
    ) -> "AugmentReduceClassifier":
        self._check_settings()
        X = read_numbers(self, X, accept_sparse="csr", dtype=np.float32)
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
        weights = class_weights(self.class_weight, classes, labels)
        if not len(labels):
            raise ValueError("y: every row is unlabelled (-1), so no class can be learned.")
        vars(self).pop("_draws", None)  # a fit that fails must not leave an earlier one
        self._learn_scales(X)
        self.classes_, self.class_weight_ = classes, weights
        self._is_packed = self._may_pack(X)
        # at weights and embedding of 0 the gradient vanishes
        start = 0.01 if self.rank is None else 0.1
        x = self._scaled(X, self._is_packed)
        kernel = AugmentReduce(
            augment_reduce,
            posterior=self.posterior,
            init_scale=start,
            optimizer=Adagrad(self.step_size * (1.0 if self.rank else _gain(x))),
            **self._draws_of_classes(labels),
        )
        steps = num_steps or self._steps_of_a_pass(len(labels))
        # draws are made when `posterior_` is first used, so one is enough here
        self._driver = Driver(kernel, num_samples=1, progress_bar=self.progress_bar)
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        time_left = self.max_time
        if self.prior_scale != "auto":
            self.prior_scale_ = self.prior_scale
        elif len(self.classes_) == 1 or len(labels) < LEAST_ROWS:
            self.prior_scale_ = 1.0
        else:
            self.prior_scale_ = self._searched(x, labels, seed)
            time_left = time_left and time_left / 2
        self._driver.num_warmup, self._driver.max_time = steps, time_left
        return self._taken(self._driver.run(seed, x=x, y=labels, **self._settings(len(labels))))

    def _draws_of_classes(self, labels: np.ndarray) -> dict[str, Any]:
        """The kernel's options for drawing classes, and for how long it averages over draws.

        With frequencies f the sum over S of K classes, each worth its frequency, has the variance
        (K sum f^2 - 1) / S or less if they are drawn with equal probabilities, and at most 1 / S if
        half are drawn by frequency.
        """
        num_classes = len(self.classes_)
        share = min(self.num_negatives / num_classes, 1.0)
        frequency = np.bincount(labels) / len(labels)
        is_skewed = (1 - share) * num_classes * np.sum(frequency**2) > 2
        is_quiet = is_skewed or share > QUIET_SHARE
        return {"frequencies": "y" if is_skewed else None, "local_decay": 0.6 if is_quiet else 0.9}

    def _searched(self, x: Any, labels: np.ndarray, seed: int) -> float:
        """The prior scale with the best log score on rows that are held out.

        Their places are taken by copies of other rows, so that shapes, and the weight of the prior,
        are those of the fit. Scales are half a decade apart, with one in between by a parabola.
        Cost: a fit, for about five scales.
        """
        rng, driver = np.random.default_rng(seed), self._driver
        nodes = 1 if self.noise == "gumbel" else NUM_NODES
        most = min(MOST_HELD_OUT, CHUNK // (nodes * len(self.classes_)))
        held_out, place = _divided(rng, len(labels), max(most, 1))
        told = {"x": x[place], "y": labels[place]} | self._settings(len(labels))
        own = np.arange(len(held_out)), labels[held_out]
        driver.num_warmup = -(-self.max_iter // SEARCH_SHARE)
        driver.num_samples = self.num_samples if self.posterior else 1
        driver.max_time = self.max_time and self.max_time / 8  # half of it, for four scales

        @cache
        def scores(place: int) -> np.ndarray:
            told["prior_scale"] = _number(10 ** (place / 2))
            draws = self._drawn(driver.run(seed, **told))
            return self._log_probs_of(x[held_out], draws)[own].astype(np.float64)

        found = 10 ** (_highest(scores, -1, MOST_SCALES) / 2)
        driver.num_samples = 1
        return found

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

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "_draws")

    def _taken(self, tree: xr.DataTree) -> "AugmentReduceClassifier":
        elbo = tree["sample_stats"].dataset["elbo"].values[0]
        self.n_iter_, self.elbo_, self._tree = len(elbo), float(elbo[-100:].mean()), None
        self._keep_draws(tree)
        check_finite(self, elbo_=self.elbo_, **self._draws)
        if self.posterior:
            self._keep_draws(self.posterior_)
        return self

    def _keep_draws(self, tree: xr.DataTree) -> None:
        """Keep the draws of the weights, which predict."""
        self._draws = self._drawn(tree)

    def _drawn(self, tree: xr.DataTree) -> dict[str, np.ndarray]:
        names = ("weights", "biases", *(() if self.rank is None else ("embedding",)))
        drawn = tree["posterior"].dataset
        return {name: np.asarray(drawn[name].values[0]) for name in names}

    def _restore(self, tree: xr.DataTree) -> None:
        self._tree = tree
        self._keep_draws(tree)

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
        for name, others in (("prior_scale", ("auto", None)), ("step_size", ())):
            value = getattr(self, name)
            is_positive = isinstance(value, Real) and 0 < value < np.inf
            if not (is_positive or any(value is one or value == one for one in others)):
                or_others = "".join(f", or {one!r}" for one in others)
                raise ValueError(f"{name}: found {value!r}, wanted a positive number{or_others}.")

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
            "prior_scale": _number(getattr(self, "prior_scale_", None)),
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

        Parameters
        ----------
        X : array, frame or sparse matrix
            As in `fit`.
        classes : array, default=None
            The classes that a row may have, as in `predict_proba`; None: all.
        """
        check_is_fitted(self)
        places = None if classes is None else self._places(classes)
        return np.concatenate(self._over_rows(X, lambda log_probs: log_probs, places))

    def predict_proba(self, X: Any, classes: Any = None) -> np.ndarray:
        """Return probabilities, [row, class].

        With `classes`, a row has one of these, and no other is possible: its class is the one with
        the largest utility among them. So a row sums to 1, and the cost grows with these classes
        alone, not with all. With Gumbel noise and a point estimate of the weights, this is the
        probability of a class given that it is one of `classes`: the columns of `predict_proba(X)`
        for these classes, normalised. With other noise the two differ a little.

        Parameters
        ----------
        X : array, frame or sparse matrix
            As in `fit`.
        classes : array, default=None
            The classes that a row may have, in the order of the columns; None: all.
        """
        return np.exp(self.predict_log_proba(X, classes))

    def _places(self, classes: Any) -> np.ndarray:
        """Indices of classes; the cost grows with their number, and hardly with that of all."""
        asked = np.asarray(column_or_1d(classes).tolist())
        places = np.minimum(np.searchsorted(self.classes_, asked), len(self.classes_) - 1)
        pairs = zip(asked.tolist(), self.classes_[places].tolist(), strict=True)
        if unknown := [label for label, found in pairs if label != found]:
            raise ValueError(
                f"classes: found {unknown[0]!r}, which is none of the {len(self.classes_)} classes "
                "that were learned (`classes_`)."
            )
        if len(np.unique(places)) < max(len(places), 1):
            raise ValueError(
                f"classes: found {asked.tolist()}, wanted at least one class, and each once."
            )
        return places

    def predict(self, X: Any) -> np.ndarray:
        """Return the most probable class of each row."""
        best = np.concatenate(self._over_rows(X, lambda log_probs: log_probs.argmax(1)))
        return self.classes_[best]

    def top_k(self, X: Any, k: int = 5) -> tuple[np.ndarray, np.ndarray]:
        """Return the most probable classes of each row, best first, and their probabilities.

        Parameters
        ----------
        X : array, frame or sparse matrix
            As in `fit`.
        k : int, default=5
            Number of classes.

        Returns
        -------
        classes, probabilities
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

    def _over_rows(self, X: Any, what: Any, places: np.ndarray | None = None) -> list[Any]:
        """`what(log_probs)` of one chunk of rows after the other, among the classes at `places`."""
        check_is_fitted(self)
        X = read_numbers(self, X, accept_sparse="csr", dtype=np.float32, reset=False)
        draws, weight = self._draws, self.class_weight_
        if places is not None:
            draws = draws | {name: draws[name][:, places] for name in ("weights", "biases")}
            weight = weight[places]
        is_packed = self._may_pack(X)
        unpacked = MOST_DENSE // X.shape[1] if sparse.issparse(X) and not is_packed else X.shape[0]
        rows = max(min(CHUNK // max(len(weight), 2), unpacked, X.shape[0]), 1)
        found = []
        for start in range(0, X.shape[0], rows):
            some = self._scaled(X[start : start + rows], is_packed)
            found.append(what(reweighted(self._log_probs_of(some, draws), weight)))
        return found

    def _log_probs_of(self, x: Any, draws: dict[str, np.ndarray]) -> np.ndarray:
        """Log probabilities [row, class] of scaled rows, all at once."""
        num_classes = min(draws["biases"].shape[1], len(self.classes_))
        if num_classes == 1:  # the model has two classes at least
            return np.zeros((len(x), 1), np.float32)
        # two sizes of chunks at most, so that predictions of all sizes share compiled code
        most = 1 << (max(CHUNK // num_classes, 1).bit_length() - 1)
        size = min(most, ROWS_AT_ONCE if len(x) > FEW_ROWS else FEW_ROWS)
        settings = {"num_classes": num_classes, "noise": self.noise, "rank": self.rank}
        on_device, found = jax.tree.map(jnp.asarray, draws), []
        for start in range(0, len(x), size):
            some = jax.tree.map(lambda leaf, start=start: leaf[start : start + size], x)
            pad = ((0, size - len(some)), (0, 0))
            padded = jax.tree.map(partial(np.pad, pad_width=pad), some)
            found.append(np.asarray(_log_probs(padded, on_device, **settings))[: len(some)])
        return np.concatenate(found)

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


def _number(value: float | None) -> np.ndarray | None:
    """An argument of compiled code, not a constant in it."""
    return None if value is None else np.asarray(value, np.float32)


def _gain(x: Any) -> float:
    """The factor of step sizes for scaled rows: norm^-1.5 above the usual norm, to `LEAST_GAIN`.

    A step moves all weights of a class alike, and so its utility by some multiple between the norm
    (where signs are random) and the squared norm (where they agree). It is a power of 1 / sqrt(2):
    other tables of similar sizes have the same factor, and so the same compiled code.
    """
    values = x.values if isinstance(x, SparseRows) else x
    norm = np.sqrt(np.vdot(values, values) / len(values))
    gain = max((max(norm, USUAL_NORM) / USUAL_NORM) ** -1.5, LEAST_GAIN)
    return float(2 ** (round(2 * np.log2(gain)) / 2))


def _divided(rng: np.random.Generator, num_rows: int, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows that are held out, a fifth or `most`; and all rows, with copies of others for those."""
    held_out, place = rng.permutation(num_rows)[: min(most, num_rows // 5)], np.arange(num_rows)
    place[held_out] = rng.choice(np.delete(place, held_out), len(held_out), replace=False)
    return held_out, place


def _highest(scores: Callable[[int], np.ndarray], start: int, most: int) -> float:
    """Where scores are highest, uphill from `start` in steps of 1, by `most` values.

    A step is taken if the mean rises by more than its standard error, and a step up if it rises by
    `MARGIN` more: a wide prior does its harm late in a run, and these runs are short. For the same
    reason the parabola through the best place and its two neighbours moves it up by `MOST_UP` only.

    Args:
        scores: the score of each row at a place.
        start: the first place.
        most: number of places that are tried.
    """
    best, tried = start, {start}
    for direction in (1, -1):
        while len(tried | {best + direction}) <= most:
            tried.add(best + direction)
            gain = scores(best + direction) - scores(best)
            least = gain.std() / np.sqrt(len(gain)) + (MARGIN if direction > 0 else 0.0)
            if not gain.mean() > least:
                break
            best += direction
    if not {best - 1, best + 1} <= tried:
        return best
    low, middle, high = (scores(best + step).mean() for step in (-1, 0, 1))
    is_peak = middle > max(low, high)
    return best + (min(0.5 * (high - low) / (2 * middle - low - high), MOST_UP) if is_peak else 0.0)


@partial(jax.jit, static_argnames=("num_classes", "noise", "rank"))
def _log_probs(x: Any, draws: dict[str, Any], **settings: Any) -> jax.Array:
    """The model's log probabilities [row, class], averaged over draws of the weights."""
    program = Program(augment_reduce, x, np.zeros(len(x), np.int32), **settings, augmented=False)
    each = jax.lax.map(lambda values: program.trace(values)["y"]["fn"].log_probs, draws)
    return jax.nn.logsumexp(each, axis=0) - jnp.log(len(each))
