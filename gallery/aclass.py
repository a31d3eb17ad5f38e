"""AClass as a scikit-learn classifier, for tables with missing entries and missing labels.

    classifier = AClassClassifier().fit(X, y)         # NaN anywhere in X; y = -1 where unlabelled
    classifier.predict_proba(X_new)
    classifier.partial_fit(X_more, y_more)            # more rows
    classifier.save("m.nc")                           # AClassClassifier.load("m.nc") learns on

Columns are numbers, 0 and 1, texts or categories. Every class is a Chinese restaurant process
mixture (`zoo.aclass`). A `ParticleFilter` reads one row after the other:

    p(class | row, earlier rows)
        ~ p(class | earlier labels) sum_particles w sum_groups p(group) p(row | group)

What the filter has read first it cannot undo, so its answer depends on the order of the rows.
`fit` runs a filter for each of `num_orders` random orders: predictions are averages over the
filters, and the spread of their evidence is the error of `log_evidence_`.

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
from jaxtyping import Float, Int
from numpyro import distributions as dist
from scipy.stats import norm
from scipy.stats import t as student_t
from sklearn.base import ClassifierMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_consistent_length, check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from gallery._columns import Columns, as_table
from gallery._estimator import Imputer, ZooEstimator
from gallery._finite import check_finite
from gallery._labels import class_weights, coded, codes_among, declared, reweighted
from inference import Driver, ParticleFilter, Program
from inference.maths.averages import log_mean, log_mean_error
from inference.program.sites import check_whole
from zoo.aclass import aclass

__all__ = ["AClassClassifier"]

# concentrations whose densities are accurate in single precision
LEAST, MOST = 1e-30, 1e9


class AClassClassifier(Imputer, ClassifierMixin, ZooEstimator):
    """Online classification by a Chinese restaurant process mixture in each class.

    Labels: -1 marks a row of unknown class, in an array of numbers or of objects. Such a row is
    assigned to the known classes by their probabilities. The one exception is scikit-learn's coding
    of two classes: if `y` holds -1 and 1 and nothing else, both are classes.

    A call that `max_time` ends early keeps the rows that it has read, and warns. The next
    `partial_fit` must begin with the rows that are left; it refuses others, so that no row is lost.
    After a `fit` that ended early, `partial_fit` goes on only if `num_orders` is 1. Otherwise each
    filter reads the rows in an order of its own, so the filters have not read the same rows.

    Ctrl-C in a first call leaves the classifier unfitted. In a later `partial_fit` it keeps the
    rows that were read, and `KeyboardInterrupt` is raised. After any other error the classifier is
    as before the call.

    Fitted attributes are `classes_`, `n_features_in_`, `feature_names_in_` (for a data frame),
    `n_rows_seen_`, `log_evidence_`, `log_evidence_se_` and `posterior_`, in which a chain is a
    filter.

    Args:
        num_particles: number of partitions that each filter keeps.
        num_orders: number of filters. In `fit` each reads the rows in a random order of its own,
            those of known class first. In `partial_fit` all read the rows in the order of the
            table, and differ by their random numbers. With one filter, `fit` does so as well.
        alpha: concentration of the groups in each class, large for many groups. A NumPyro
            distribution is learned over `grid`.
        gamma: concentration of the Dirichlet prior of the classes.
        component: "auto" or a component such as those of `zoo.aclass`. "auto" goes by the columns
            of the first call: 0 and 1 are Bernoulli, texts and pandas categories are categorical,
            other numbers are standardised and normal, see `gallery._columns`. Their variance within
            a group has a prior about 1/4 (`normal_inverse_chi2` with kappa=1/3, nu=4, scale=1/2).
            The command `zoo fit` has the model's default, a prior about 1 (kappa=0.1, nu=2,
            scale=1). With a component of your own, numbers are not standardised.
        max_groups: bound on the groups in each class; 1 is naive Bayes.
        resampling: "optimal", "systematic" or "multinomial".
        rejuvenate: number of earlier rows whose group is redrawn after each row. More are more
            exact and slower.
        grid: values over which latent scalars are learned, such as {"alpha": [0.1, 1, 10]} for
            `alpha=dist.Gamma(1.0, 1.0)`.
        keep_assignments: whether the groups of rows are kept, as `z` in `posterior_`. Without them
            memory is constant.
        num_samples: draws of each filter in `posterior_`.
        class_weight: {class: factor}, "balanced" or None. A prediction multiplies the probability
            of each class by its factor, 1 by default, and normalises: for new rows in which classes
            are more or less frequent than in the fit. "balanced" divides by the share of each class
            among the labelled rows. The fit does not depend on `class_weight`.
        max_time: seconds after which a call ends.
        progress_bar: whether to show a progress bar with the effective sample size; None: on a
            terminal, after two seconds.
        random_state: integer, `RandomState` or None.
    """

    classes_: np.ndarray
    n_features_in_: int
    _no_weights = "it counts whole rows; repeat a row in place of a weight of 2"
    _kept = ("_columns", "_settings", "_log_units", "n_rows_seen_")

    def __init__(
        self,
        num_particles: int = 10,
        *,
        num_orders: int = 8,
        alpha: float | dist.Distribution = 1.0,
        gamma: float = 1.0,
        component: str | Callable = "auto",
        max_groups: int | None = None,
        resampling: str = "optimal",
        rejuvenate: int = 0,
        grid: Mapping[str, Any] | None = None,
        keep_assignments: bool = True,
        num_samples: int = 1000,
        class_weight: Any = None,
        max_time: float | None = None,
        progress_bar: bool | None = None,
        random_state: Any = None,
    ):
        self.num_particles = num_particles
        self.num_orders = num_orders
        self.alpha = alpha
        self.gamma = gamma
        self.component = component
        self.max_groups = max_groups
        self.resampling = resampling
        self.rejuvenate = rejuvenate
        self.grid = grid
        self.keep_assignments, self.num_samples = keep_assignments, num_samples
        self.class_weight = class_weight
        self.max_time, self.progress_bar, self.random_state = max_time, progress_bar, random_state

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = tags.input_tags.categorical = True
        return tags  # `input_tags.string` would promise that any object is accepted

    # Fitting.

    def fit(self, X: Any, y: Any, **others: Any) -> "AClassClassifier":
        """Fit all rows, in `num_orders` orders; earlier ones are forgotten.

        Parameters
        ----------
        X : array, list of rows or frame
            An array, a list of rows or a data frame; NaN (or None among texts) where missing.
        y : array
            The class of each row, -1 where it is unknown.
        **others
            Refused; `sample_weight` with the reason why the model has no place for it.

        Returns
        -------
        self
        """
        self._refuse_others(others)
        check_whole(1, num_orders=self.num_orders)
        return self._begin(X, y, None, shuffle=self.num_orders > 1)

    def partial_fit(self, X: Any, y: Any, classes: Any = None) -> "AClassClassifier":
        """Fit more rows.

        Rows are read in the order of the table. Several calls give exactly the result of one call
        with all rows, also where the classifier is saved and loaded between them. Only
        `component="auto"` depends on the rows of the first call.

        Parameters
        ----------
        X : array, list of rows or frame
            As in `fit`.
        y : array
            The class of each row, -1 where it is unknown.
        classes : array, default=None
            At the first call, all classes of all calls; None: those of its labels. If it
            holds -1, this is a class.

        Returns
        -------
        self
        """
        self._refuse_balanced()
        if not self.__sklearn_is_fitted__():
            return self._begin(X, y, classes, shuffle=False)
        if classes is not None and not np.array_equal(declared(classes), self.classes_):
            raise ValueError(
                f"classes: found {declared(classes)}, but the first call began with "
                f"{self.classes_}; give the same, or none."
            )
        if y is None:
            raise ValueError("y: found None, wanted the class of each row; -1 where it is unknown.")
        x, labels = self._read(X, y)
        if not hasattr(self, "_driver"):
            self._take_up()
        self._driver.max_time = self.max_time
        waiting = self._waiting(x, labels)
        try:
            if waiting:
                self._driver.extend(min(waiting, len(x)))
            if waiting < len(x) and self._kernel.finished(self._states[0]):
                self._driver.update(
                    jnp.asarray(x[waiting:], float), labels[waiting:], **self._settings
                )
        except KeyboardInterrupt:
            self._taken(x)
            raise
        return self._taken(x)

    def _waiting(self, x: Float[np.ndarray, "row feature"], labels: Int[np.ndarray, " row"]) -> int:
        """The number of remaining rows of a call that ended early; `x` must begin with them."""
        program = self._driver.program
        assert program is not None
        state = self._states[0]
        rest = np.column_stack([program.arguments["x"], program.arguments["y"]])[int(state.row) :]
        if not len(rest):
            return 0
        left = np.asarray(state.order)[int(state.row) :]
        # after a loaded classifier has learned more, rows are left in the order of the table
        if state.seen == state.row and (np.diff(left) != 1).any():
            raise ValueError(
                f"partial_fit: fit was ended by max_time after {state.row} of "
                f"{len(rest) + state.row} rows, and each of its {self.num_orders} filters has read "
                "others; call fit again, with more time."
            )
        found = np.column_stack([jnp.asarray(x, float), labels])[: len(rest)]
        same = np.isclose(found, rest[: len(x)], rtol=0, atol=0, equal_nan=True).all(1)
        if not same.all():
            raise ValueError(
                f"X: a call that Ctrl-C or max_time ended has left {len(rest)} rows, which must "
                f"come first, and row {same.argmin()} is another one or has another label; give "
                "them as the warning of that call said, or start again by fit."
            )
        # later rows are checked before these are read
        self._reading.more(self._program(x, labels))
        return len(rest)

    def _begin(self, X: Any, y: Any, classes: Any, *, shuffle: bool) -> "AClassClassifier":
        chosen = self._chosen_component()
        columns = Columns.learn(X, plain=chosen is not None)
        x = columns.encode(X)
        check_consistent_length(x, y)
        classes, labels = coded(y, classes)
        weights = class_weights(self.class_weight, classes, labels)
        settings = self._model_settings(chosen or columns.component(), len(classes))
        kernel = self._filter(shuffle)
        driver = self._new_driver(kernel)
        driver.run(self._seed(), jnp.asarray(x, float), labels, **settings)
        check_finite(self, log_evidence_=[state.total_log_evidence() for state in driver.states])
        validate_data(self, X, skip_check_array=True)
        self.classes_, self.class_weight_ = classes, weights
        self._columns, self._settings = columns, settings
        self._kernel, self._driver, self._reading = kernel, driver, driver.reading
        self._log_units, self.n_rows_seen_ = np.zeros(len(driver.states)), 0
        return self._taken(x)

    def _new_driver(self, kernel: ParticleFilter) -> Driver:
        # draws are made when `posterior_` is first used, so one is enough before
        return Driver(
            kernel,
            num_samples=1,
            num_chains=self.num_orders,
            progress_bar=self.progress_bar,
            max_time=self.max_time,
        )

    def _take_up(self) -> None:
        """Go on with the run of a file."""
        driver, rows = self._new_driver(self._kernel), vars(self).pop("_rows")
        driver.restore(self.posterior_, vars(self).pop("_loaded"), *rows, **self._settings)
        self._driver, self._reading = driver, driver.reading

    def _filter(self, shuffle: bool = False) -> ParticleFilter:
        return ParticleFilter(
            aclass,
            num_particles=self.num_particles,
            resampling=self.resampling,
            grid=self.grid,
            rejuvenate=self.rejuvenate,
            keep_assignments=self.keep_assignments,
            shuffle=shuffle,
        )

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
        states = self._states
        taken, self._tree = int(states[0].seen) - self.n_rows_seen_, None
        is_shuffled = len(states[0].order) > 0 and not self.n_rows_seen_
        self._log_units = self._log_units + [
            self._columns.log_units(x[state.order[:taken] if is_shuffled else slice(taken)])
            for state in states
        ]
        self.n_rows_seen_ += taken
        if taken < len(x):
            goes_on = (
                "call fit again with more time"
                if is_shuffled
                else f"partial_fit(X[{taken}:], y[{taken}:]) continues with the rest"
            )
            warnings.warn(
                f"ended by Ctrl-C or max_time after {taken} of {len(x)} rows; {goes_on}.",
                ConvergenceWarning,
                stacklevel=4,
            )
        return self

    def _chosen_component(self) -> Callable | None:
        """The component that the user has chosen; None for "auto"."""
        for name in ("alpha", "gamma"):
            value = getattr(self, name)
            if not (isinstance(value, Real) and LEAST <= value <= MOST) and not (
                name == "alpha" and isinstance(value, dist.Distribution)
            ):
                raise ValueError(
                    f"{name}: found {value!r}, wanted a positive number, {LEAST:g} to {MOST:g}."
                )
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
    def _states(self) -> list[Any]:
        """The filters, one for each order."""
        if hasattr(self, "_driver"):
            return self._driver.states
        return [step.state for step in self._loaded]

    def _program(
        self, x: Float[np.ndarray, "row feature"], labels: Int[np.ndarray, " row"]
    ) -> Program:
        return Program(aclass, jnp.asarray(x, float), labels, **self._settings)

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "classes_")

    def _contents(self) -> dict[str, Any]:
        if not hasattr(self, "_driver"):
            return super()._contents() | {"_loaded": self._loaded, "_rows": self._rows}
        given = self._driver.whole_program.arguments
        return super()._contents() | {
            "_loaded": [_of_all_rows(step, len(given["y"])) for step in self._driver.steps],
            "_rows": (given["x"], given["y"]),
        }

    def _restore(self, tree: xr.DataTree) -> None:
        self._tree, self._kernel = tree, self._filter()
        # 0 is a number, the first category, and no
        few = np.zeros((2, self.n_features_in_)), np.full(2, -1, np.int32)
        self._reading, _ = self._kernel.read(self._program(*few))

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
        program = self._program(*self._read(X))
        each = [
            np.asarray(self._kernel.log_classes(state, self._reading, program), float)
            for state in self._kernel.alike(self._states)
        ]
        each = [joint - np.logaddexp.reduce(joint, axis=1, keepdims=True) for joint in each]
        log_proba = np.logaddexp.reduce(each) - np.log(len(each))
        return reweighted(log_proba, self.class_weight_)

    def impute(self, X: Any, y: Any = None) -> Any:
        """Return a copy of X with missing entries replaced by predictions from their row.

        Numbers are replaced by their expected value, categories and 0 and 1 by the most probable
        value.

        Parameters
        ----------
        X : array, list of rows or frame
            As in `fit`.
        y : array, default=None
            The class of each row, -1 where it is unknown; None: all are unknown.
        """
        check_is_fitted(self)
        program = self._program(*self._read(X, y))
        each = [
            self._kernel.mean_rows(state, self._reading, program)
            for state in self._kernel.alike(self._states)
        ]
        means = jax.tree.map(lambda *of_filters: np.mean(of_filters, axis=0), *each)
        best: dict[str, Callable] = {
            "CategoricalProbs": lambda mean: mean.argmax(-1),
            "BernoulliProbs": lambda mean: mean > 0.5,
        }
        families = {block.site: block.family for block in self._reading.partition.blocks}
        guessed = {
            site: best.get(families[site].likelihood, np.asarray)(np.asarray(mean))
            for site, mean in means.items()
        }
        return self._columns.fill(X, self._by_column(guessed))

    def sample(self, n: int = 1, y: Any = None) -> tuple[Any, np.ndarray]:
        """Draw rows and their classes from the predictive density of the next row.

        Rows are independent. An integer `random_state` gives the same rows at each call.

        Parameters
        ----------
        n : int, default=1
            Number of rows.
        y : class or array, default=None
            A class, or a class for each row; None: drawn as well.

        Returns
        -------
        rows, classes
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
        states, program = self._kernel.alike(self._states), self._program(empty, labels)
        each = [
            self._kernel.draw_rows(jax.random.fold_in(key, i), state, self._reading, program)
            for i, state in enumerate(states)
        ]
        # a filter that is chosen at random draws each row
        chosen = np.random.default_rng(self._seed()).integers(len(each), size=n), np.arange(n)
        classes, rows = jax.tree.map(lambda *of_filters: np.stack(of_filters)[chosen], *each)
        return self._columns.decode(self._by_column(rows)), self.classes_[classes]

    @property
    def log_evidence_(self) -> float:
        """Log evidence: the log density of all rows and labels so far, on the scale of the table.

        It is the log of the mean over the filters. This mean, before the logarithm, is unbiased.
        """
        check_is_fitted(self)
        return log_mean(self._log_evidences())

    @property
    def log_evidence_se_(self) -> float:
        """Standard error of `log_evidence_`, by the spread of the filters; infinite for one."""
        check_is_fitted(self)
        each = self._log_evidences()
        # two errors hold 95 %, as with Student's t: a spread of few numbers is itself uncertain
        few = student_t.ppf(norm.cdf(2), len(each) - 1) / 2 if len(each) > 1 else 1
        return float(few * log_mean_error(each))

    def _log_evidences(self) -> np.ndarray:
        return np.array([state.total_log_evidence() for state in self._states]) - self._log_units

    @property
    def posterior_(self) -> xr.DataTree:
        """Partitions, weighted particles, effective sample sizes and evidence; made at first use.

        `attrs["log_evidence"]` is `log_evidence_`. After a call that ended early the draws are in
        `unfinished`, not in `posterior`, and the tree has no evidence. With component="auto"
        everything else is on the standardised scale.
        """
        check_is_fitted(self)
        if self._tree is None:
            self._driver.num_samples = self.num_samples
            self._tree = self._driver.tree()
            if "posterior" in self._tree.children:
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


def _of_all_rows(step: Any, num_rows: int) -> Any:
    """A filter as if all rows, those of earlier calls too, were of one call."""
    before = np.int32(num_rows - step.state.num_rows)
    state = step.state
    return step._replace(
        state=state._replace(row=before + state.row, num_rows=before + state.num_rows)
    )
