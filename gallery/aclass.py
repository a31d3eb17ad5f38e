"""AClass as a scikit-learn classifier, for tables with missing entries and missing labels.

    classifier = AClassClassifier().fit(X, y)         # NaN anywhere in X; y = -1 where unlabelled
    classifier.predict_proba(X_new)
    classifier.partial_fit(X_more, y_more)            # more rows

Columns are numbers, 0 and 1, texts or categories. Every class is a Chinese restaurant process
mixture (`zoo.aclass`). A `ParticleFilter` reads one row after the other:

    p(class | row, earlier rows)
        ~ p(class | earlier labels) sum_particles w sum_groups p(group) p(row | group)

The whole row has a density. So the classifier also imputes missing entries (`impute`), draws new
rows (`sample`), and estimates the evidence of the model (`log_evidence_`). Cost of a row:
O(particles x classes x groups x columns), whatever the number of earlier rows. Memory: 8 bytes x
particles for the partition of each row, which `keep_assignments=False` drops.

Mansinghka, Roy, Rifkin and Tenenbaum (2007), "AClass: an online algorithm for generative
classification".
"""

import warnings
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from numpyro import distributions as dist
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_consistent_length, check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from gallery._columns import Columns, as_table
from gallery._labels import coded, codes_among, declared
from inference import Driver, ParticleFilter, Program
from zoo.aclass import aclass

__all__ = ["AClassClassifier"]


class AClassClassifier(ClassifierMixin, BaseEstimator):
    """Online classification by a Chinese restaurant process mixture in each class.

    Labels: -1 is a row of unknown class, in an array of numbers or of objects. Such a row is
    assigned to the known classes by their probabilities. The one exception is scikit-learn's coding
    of two classes by -1 and 1: where `y` holds only these two, both are classes.

    A call that Ctrl-C or `max_time` ends keeps the rows so far, with a warning. The remaining rows
    must come next: `partial_fit` refuses others, so that no row is lost. A call that raises an
    error leaves the classifier as it was.

    Fitted attributes are `classes_`, `n_features_in_`, `feature_names_in_` (for a data frame),
    `n_rows_seen_`, `log_evidence_`, and `posterior_`.

    Args:
        num_particles: number of partitions.
        alpha: concentration of the groups in each class, large for many groups. A NumPyro
            distribution is learned over `grid`.
        gamma: concentration of the Dirichlet prior of the classes.
        component: "auto": by the columns of the first call, 0 and 1 are Bernoulli, other numbers
            normal, texts and pandas categories categorical, see `gallery._columns`. Or a component
            such as those of `zoo.aclass`, for numbers that are not standardised.
        max_groups: bound on the groups in each class; 1 is naive Bayes.
        resampling: "optimal", "systematic" or "multinomial".
        rejuvenate: number of earlier rows whose group is redrawn after each row. More are more
            exact and slower.
        grid: values over which latent scalars are learned, such as {"alpha": [0.1, 1, 10]} for
            `alpha=dist.Gamma(1.0, 1.0)`.
        keep_assignments: whether the groups of rows are kept, as `z` in `posterior_`. Without them
            memory is constant.
        num_samples: draws in `posterior_`.
        max_time: seconds after which a call ends.
        progress_bar: whether to show a progress bar with the effective sample size.
        random_state: integer, `RandomState` or None.
    """

    classes_: np.ndarray
    n_features_in_: int

    def __init__(
        self,
        num_particles: int = 40,
        *,
        alpha: float | dist.Distribution = 1.0,
        gamma: float = 1.0,
        component: str | Callable = "auto",
        max_groups: int | None = None,
        resampling: str = "optimal",
        rejuvenate: int = 0,
        grid: Mapping[str, Any] | None = None,
        keep_assignments: bool = True,
        num_samples: int = 1000,
        max_time: float | None = None,
        progress_bar: bool = False,
        random_state: Any = None,
    ):
        self.num_particles = num_particles
        self.alpha = alpha
        self.gamma = gamma
        self.component = component
        self.max_groups = max_groups
        self.resampling = resampling
        self.rejuvenate = rejuvenate
        self.grid = grid
        self.keep_assignments, self.num_samples = keep_assignments, num_samples
        self.max_time, self.progress_bar, self.random_state = max_time, progress_bar, random_state

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = tags.input_tags.categorical = True
        return tags  # `input_tags.string` would promise that any object is accepted

    # Fitting.

    def fit(self, X: Any, y: Any) -> "AClassClassifier":
        """Fit all rows in their order; earlier ones are forgotten.

        Args:
            X: an array, a list of rows or a data frame; NaN (or None among texts) where missing.
            y: the class of each row, -1 where it is unknown.
        """
        return self._begin(X, y, None)

    def partial_fit(self, X: Any, y: Any, classes: Any = None) -> "AClassClassifier":
        """Fit more rows.

        Several calls give exactly the result of one call with all rows. Only `component="auto"`
        depends on the rows of the first call.

        Args:
            X: as in `fit`.
            y: the class of each row, -1 where it is unknown.
            classes: at the first call, all classes of all calls; None: those of its labels. If it
                holds -1, this is a class.
        """
        if not self.__sklearn_is_fitted__():
            return self._begin(X, y, classes)
        if not self.n_rows_seen_:  # the first call ended before its first row
            return self._begin(X, y, self.classes_ if classes is None else classes)
        if classes is not None and not np.array_equal(declared(classes), self.classes_):
            raise ValueError(
                f"classes: found {declared(classes)}, but the first call began with "
                f"{self.classes_}; give the same, or none."
            )
        if y is None:
            raise ValueError("y: found None, wanted the class of each row; -1 where it is unknown.")
        x, labels = self._read(X, y)
        self._driver.max_time = self.max_time
        waiting = self._waiting(x, labels)
        try:
            if waiting:
                self._driver.extend(min(waiting, len(x)))
            if waiting < len(x) and self._kernel.finished(self._state):
                self._driver.update(
                    jnp.asarray(x[waiting:], float), labels[waiting:], **self._settings
                )
        except KeyboardInterrupt:
            self._taken(x)
            raise
        return self._taken(x)

    def _waiting(self, x: np.ndarray, labels: np.ndarray) -> int:
        """The number of remaining rows of a call that ended early; `x` must begin with them."""
        program = self._driver.program
        assert program is not None
        rest = np.column_stack([program.arguments["x"], program.arguments["y"]])[
            int(self._state.row) :
        ]
        if not len(rest):
            return 0
        found = np.column_stack([jnp.asarray(x, float), labels])[: len(rest)]
        same = np.isclose(found, rest[: len(x)], rtol=0, atol=0, equal_nan=True).all(1)
        if not same.all():
            raise ValueError(
                f"X: a call that Ctrl-C or max_time ended has left {len(rest)} rows, which must "
                f"come first, and row {same.argmin()} is another one or has another label; give "
                "them as the warning of that call said, or start again by fit."
            )
        # later rows are checked before these are read
        self._driver.reading.more(self._program(x, labels))
        return len(rest)

    def _begin(self, X: Any, y: Any, classes: Any) -> "AClassClassifier":
        chosen = self._chosen_component()
        columns = Columns.learn(X, plain=chosen is not None)
        x = columns.encode(X)
        check_consistent_length(x, y)
        classes, labels = coded(y, classes)
        settings = self._model_settings(chosen or columns.component(), len(classes))
        kernel = ParticleFilter(
            aclass,
            num_particles=self.num_particles,
            resampling=self.resampling,
            grid=self.grid,
            rejuvenate=self.rejuvenate,
            keep_assignments=self.keep_assignments,
        )
        # draws are made when `posterior_` is first used, so one is enough here
        driver = Driver(
            kernel, num_samples=1, progress_bar=self.progress_bar, max_time=self.max_time
        )
        driver.run(self._seed(), jnp.asarray(x, float), labels, **settings)
        validate_data(self, X, skip_check_array=True)
        self.classes_, self._columns, self._settings = classes, columns, settings
        self._kernel, self._driver, self._log_units, self.n_rows_seen_ = kernel, driver, 0.0, 0
        return self._taken(x)

    def _read(self, X: Any, y: Any = None) -> tuple[np.ndarray, np.ndarray]:
        """Rows and labels as the model takes them, after a comparison with the first call."""
        table = as_table(X)
        validate_data(self, X, skip_check_array=True, reset=False)
        x = self._columns.encode(table)
        labels = np.full(len(x), -1, np.int32) if y is None else codes_among(y, self.classes_)
        check_consistent_length(x, labels)
        return x, labels

    def _taken(self, x: np.ndarray) -> "AClassClassifier":
        """Count the rows of `x` that were read, and warn where some were not."""
        taken, self._tree = int(self._state.seen) - self.n_rows_seen_, None
        self._log_units += self._columns.log_units(x[:taken])
        self.n_rows_seen_ += taken
        if taken < len(x):
            warnings.warn(
                f"ended by Ctrl-C or max_time after {taken} of {len(x)} rows; "
                f"partial_fit(X[{taken}:], y[{taken}:]) continues with the rest.",
                ConvergenceWarning,
                stacklevel=4,
            )
        return self

    def _chosen_component(self) -> Callable | None:
        """The component that the user has chosen; None for "auto"."""
        for name in ("alpha", "gamma"):
            value = getattr(self, name)
            if not (isinstance(value, Real) and 0 < value < np.inf) and not (
                name == "alpha" and isinstance(value, dist.Distribution)
            ):
                raise ValueError(f"{name}: found {value!r}, wanted a positive number.")
        if callable(self.component):
            return self.component
        if self.component == "auto":
            return None
        raise ValueError(
            f"component: found {self.component!r}, wanted 'auto' or a component such as "
            "zoo.aclass.beta_bernoulli."
        )

    def _model_settings(self, component: Callable, num_classes: int) -> dict[str, Any]:
        """The model's arguments other than rows and labels, the same for every call."""
        alpha = self.alpha if isinstance(self.alpha, dist.Distribution) else float(self.alpha)
        settings = {
            "num_classes": num_classes,
            "alpha": alpha,
            "gamma": float(self.gamma),
            "max_groups": self.max_groups,
        }
        # `all_labelled` is given, so that the model need not inspect each batch
        return settings | {"component": component, "all_labelled": False}

    def _seed(self) -> int:
        return int(check_random_state(self.random_state).randint(2**31 - 1))

    @property
    def _state(self) -> Any:
        return self._driver.states[0]

    def _program(self, x: np.ndarray, labels: np.ndarray) -> Program:
        return Program(aclass, jnp.asarray(x, float), labels, **self._settings)

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "classes_")

    # Predictions.

    def predict(self, X: Any) -> np.ndarray:
        """Return the most probable class of each row."""
        best = self.predict_log_proba(X).argmax(1)
        return self.classes_[best]

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return the probability of each class, [row, class]."""
        return np.exp(self.predict_log_proba(X))

    def predict_log_proba(self, X: Any) -> np.ndarray:
        """Return the log probability of each class, [row, class]."""
        check_is_fitted(self)
        joint = np.asarray(
            self._kernel.log_classes(
                self._state, self._driver.reading, self._program(*self._read(X))
            ),
            float,
        )
        return joint - np.logaddexp.reduce(joint, axis=1, keepdims=True)

    def impute(self, X: Any, y: Any = None) -> Any:
        """Return a copy of X with missing entries replaced by predictions from their row.

        Numbers are replaced by their expected value, categories and 0 and 1 by the most probable
        value.

        Args:
            X: as in `fit`.
            y: the class of each row, -1 where it is unknown; None: all are unknown.
        """
        check_is_fitted(self)
        means = self._kernel.mean_rows(
            self._state, self._driver.reading, self._program(*self._read(X, y))
        )
        best: dict[str, Callable] = {
            "CategoricalProbs": lambda mean: mean.argmax(-1),
            "BernoulliProbs": lambda mean: mean > 0.5,
        }
        families = {block.site: block.family for block in self._driver.reading.partition.blocks}
        guessed = {
            site: best.get(families[site].likelihood, np.asarray)(np.asarray(mean))
            for site, mean in means.items()
        }
        return self._columns.fill(X, self._by_column(guessed))

    def sample(self, n: int = 1, y: Any = None) -> tuple[Any, np.ndarray]:
        """Draw rows and their classes from the predictive density of the next row.

        Rows are independent. An integer `random_state` gives the same rows at each call.

        Args:
            n: number of rows.
            y: a class, or a class for each row; None: drawn as well.

        Returns:
            A table of the type of X, and the classes.
        """
        check_is_fitted(self)
        if not isinstance(n, Integral) or n < 1 or (np.ndim(y) and len(y) != n):
            raise ValueError(
                f"n: found {n} rows and {np.size(y)} classes; wanted at least one row, and one "
                "class or a class for each row."
            )
        labels = (
            np.full(n, -1, np.int32)
            if y is None
            else codes_among(y if np.ndim(y) else np.full(n, y, object), self.classes_)
        )
        empty = np.full((n, self.n_features_in_), np.nan)
        key = jax.random.fold_in(jax.random.key(self._seed()), 1)
        classes, rows = self._kernel.draw_rows(
            key, self._state, self._driver.reading, self._program(empty, labels)
        )
        return self._columns.decode(self._by_column(rows)), self.classes_[np.asarray(classes)]

    @property
    def log_evidence_(self) -> float:
        """Log evidence: the log density of all rows and labels so far, on the scale of the table.

        The estimate of the evidence itself, before the logarithm, is unbiased.
        """
        check_is_fitted(self)
        return float(self._state.total_log_evidence()) - self._log_units

    @property
    def posterior_(self) -> xr.DataTree:
        """Partitions, weighted particles, effective sample sizes and evidence; made at first use.

        `attrs["log_evidence"]` is `log_evidence_`. With component="auto" everything else is on the
        standardised scale.
        """
        check_is_fitted(self)
        if self._tree is None:
            self._driver.num_samples = self.num_samples
            self._tree = self._driver.tree()
            self._tree.attrs["log_evidence"] = self.log_evidence_
        return self._tree

    def _by_column(self, sites: Mapping[str, Any]) -> np.ndarray:
        """The table [row, column] from values of sites.

        A row of column numbers, passed through the model, shows which site has which column.
        """
        numbers = np.arange(self.n_features_in_, dtype=float)[None]
        places = self._program(numbers, np.zeros(1, np.int32)).observed_values
        first = next(iter(sites.values()))
        x = np.full((len(first), self.n_features_in_), np.nan)
        for site, values in sites.items():
            columns = np.ravel(places[site])
            if not np.isin(columns, numbers).all():
                raise ValueError(
                    f"component: its site {site!r} does not observe columns of X, so no table can "
                    "be made from it."
                )
            x[:, columns.astype(int)] = np.reshape(values, (len(x), -1))
        return x
