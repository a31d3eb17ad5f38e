"""The common part of estimators by mixtures of local experts.

Columns are standardised. A fit is by variational Bayes or by Gibbs sampling. Predictions integrate
missing entries out. A subclass has the declared parameters, and its `fit` names the model of the
zoo and the model's other arguments.
"""

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from numbers import Integral, Real
from typing import Any

import jax
import numpy as np
import xarray as xr
from jaxtyping import Float, Int
from numpyro import distributions as dist
from sklearn.base import ClassifierMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_consistent_length, check_random_state
from sklearn.utils.validation import check_is_fitted

from gallery._columns import read_numbers
from gallery._estimator import ZooEstimator
from gallery._finite import check_finite
from gallery._labels import class_weights, coded, reweighted
from gallery._saving import best_state
from gallery._standardise import Standardiser
from inference import ConditionalGibbs, CoordinateAscent, Driver, Program
from inference.kernels.conditional_gibbs.kernel import AssignmentDraws
from inference.program.interpreting import interpreted
from inference.reading.stick_mixture.read import read_assignment
from inference.reading.stick_mixture.structure import Assignment, MixtureRows
from zoo.iqgme import normal_wishart, soft_probit

__all__ = ["LocalExperts", "check_whole", "positive"]

FARTHEST = 1e50  # standard deviations, whose square does not overflow
FEW = 12  # rows, made up, by which the structure of the model of a saved estimator is read again


def positive(name: str, value: Any) -> Any:
    """Return a distribution as it is, and a positive number as a float."""
    if isinstance(value, dist.Distribution):
        return value
    if not isinstance(value, Real) or not 0 < value < np.inf:
        raise ValueError(f"{name}: found {value!r}, wanted a number above 0, or a distribution.")
    return float(value)


def check_whole(least: int = 1, **numbers: Any) -> None:
    """Refuse numbers that are not integers from `least` on."""
    for name, value in numbers.items():
        if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name}: found {value!r}, wanted an integer, at least {least}.")


class LocalExperts(ClassifierMixin, ZooEstimator):
    """The common part of the estimators.

    `by_row` are arguments of the model with one entry for each row, other than x and y.
    """

    sparse: bool
    precision: Any
    shrinkage: float
    gate_rows: float | None
    init: str = "kmeans"
    restarts: int
    max_iter: int
    tolerance: float
    num_samples: int
    class_weight: Any
    max_time: float | None
    progress_bar: bool | None
    random_state: Any
    _driver: Any
    _settings: dict[str, Any]
    _state: Any
    _tree: Any
    _signs: Any  # of the soft labels, by label; None where rows are read by a trace of the model
    _predict: Any
    _no_weights = (
        "each row belongs to one expert, which counts whole rows; "
        "repeat a row in place of a weight of 2"
    )
    _kept = (
        *("_model", "_settings", "_standardiser", "_is_empty", "_signs", "_design"),
        *("n_iter_", "elbo_", "n_experts_", "tasks_", "shares_"),
    )

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags

    def _fit(
        self,
        model: Callable,
        X: np.ndarray,
        y: Any,
        by_row: Mapping[str, Any],
        batch_size: int | None = None,
        inference: str = "vb",
        **settings: Any,
    ) -> None:
        self._check_numbers(batch_size)
        self._model = model
        precision = positive("precision", self.precision)
        classes, labels = coded(y)
        check_consistent_length(X, labels)
        weights = class_weights(self.class_weight, classes, labels)
        self._standardiser = Standardiser.learn(X)
        self._is_empty = np.isnan(X).all(0)
        self._is_empty[self._standardiser.kept] = False
        x = self._standardiser.standardise_kept(X, FARTHEST)
        if "gate" not in settings:
            settings["gate"] = self._gate(x)
        expert = partial(soft_probit, sparse=self.sparse, precision=precision)
        self._settings = {"num_classes": max(len(classes), 2), "expert": expert, **settings}
        self.classes_, self.class_weight_ = classes, weights
        data = ((x, labels), {**by_row, **self._settings})
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        vars(self).pop("_state", None)  # a fit that fails must not leave an earlier one
        if inference == "gibbs":
            self._draw(model, seed, data)
        else:
            self._ascend(model, seed, data, batch_size)

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "_state")

    def _contents(self) -> dict[str, Any]:
        # draws are in the tree
        state = {} if isinstance(self._state, dict) else {"_state": best_state([self._state])}
        return super()._contents() | state

    def _restore(self, tree: xr.DataTree) -> None:
        self._tree, settings, width = tree, self._settings, len(self._standardiser.kept)
        kinds = settings["num_classes"], settings.get("num_tasks", 1)
        place = np.arange(max(FEW, *kinds))
        x = np.random.default_rng(0).normal(size=(len(place), width))
        by_row = {"task": (place % kinds[1]).astype(np.int32)} if "num_tasks" in settings else {}
        with jax.enable_x64(True):
            program = Program(self._model, x, place % kinds[0], **by_row, **settings)
            if hasattr(self, "_state"):
                kernel = CoordinateAscent(self._model)
                reading, _ = kernel.read(program)
                self._predict = (
                    partial(reading.predict, self._state)
                    if self._signs is not None
                    else partial(kernel.predict, self._state, reading)
                )
            else:
                self._keep_draws(read_assignment(program))

    def _keep_draws(self, found: Assignment) -> None:
        """Keep the draws of the sites that are not by row, which predict other rows."""
        flat = self._tree["posterior"].dataset.stack(both=("chain", "draw"), create_index=False)
        self._state = {
            str(name): values.values
            for name, values in flat.transpose("both", ...).data_vars.items()
            if name not in found.of_rows
        }
        self._signs = None
        self._predict = partial(AssignmentDraws(self._model, found).predict, self._state)

    def _check_numbers(self, batch_size: Any) -> None:
        """Refuse wrong values of the parameters that all subclasses have."""
        check_whole(num_samples=self.num_samples, max_iter=self.max_iter, restarts=self.restarts)
        if batch_size is not None:
            check_whole(batch_size=batch_size)
        is_number = lambda value, most=np.inf: isinstance(value, Real) and 0 <= value <= most
        if not is_number(self.shrinkage, 1):
            raise ValueError(f"shrinkage: found {self.shrinkage!r}, wanted a number from 0 to 1.")
        if not is_number(self.tolerance):
            raise ValueError(f"tolerance: found {self.tolerance!r}, wanted a number, at least 0.")
        if self.max_time is not None and not is_number(self.max_time):
            raise ValueError(
                f"max_time: found {self.max_time!r}, wanted seconds, at least 0, or None."
            )
        if self.gate_rows is not None and not (
            is_number(self.gate_rows) and 0 < self.gate_rows < np.inf
        ):
            raise ValueError(
                f"gate_rows: found {self.gate_rows!r}, wanted a number above 0, or None."
            )

    def _ascend(self, model: Callable, seed: int, data: Any, batch_size: int | None) -> None:
        """Fit by variational Bayes."""
        kernel = CoordinateAscent(
            model,
            init=self.init,
            restarts=self.restarts,
            tolerance=self.tolerance,
            batch_size=batch_size,
        )
        # draws are made when `posterior_` is first used
        driver = Driver(
            kernel,
            num_warmup=self.max_iter,
            num_samples=0,
            max_time=self.max_time,
            progress_bar=self.progress_bar,
        )
        args, kwargs = data
        with jax.enable_x64(True):
            tree = driver.run(seed, *args, **kwargs)
            state = driver.states[0]
            is_done = bool(interpreted(kernel.finished, state)(state))
            state = jax.device_get(state)  # NumPy keeps float64 when it is pickled
            # only a step needs sums and trials
            is_mixture = hasattr(state, "sums")
            self._state = state._replace(sums=None, trial=None) if is_mixture else state
        self._learn_rows(kernel, driver.reading, data)
        self._driver, self._tree = driver, None
        stats = tree["sample_stats"].dataset.isel(chain=0)
        self.n_iter_, self.elbo_ = stats.sizes["step"], float(stats["elbo"][-1])
        check_finite(self, elbo_=self.elbo_)
        self.n_experts_ = int(stats["num_groups"][-1])
        setting = "num_shared" if "num_tasks" in self._settings else "truncation"
        if self.n_experts_ == getattr(self, setting):
            warnings.warn(
                f"all {self.n_experts_} experts have rows, so more may be needed; raise {setting}.",
                ConvergenceWarning,
                stacklevel=4,
            )
        if not is_done and batch_size is None:  # a fit by batches always takes max_iter steps
            warnings.warn(
                f"ended after {self.n_iter_} sweeps, before the ELBO converged; give more "
                "max_iter or max_time.",
                ConvergenceWarning,
                stacklevel=4,
            )

    def _learn_rows(self, kernel: CoordinateAscent, reading: Any, data: Any) -> None:
        """Find out whether the model takes columns as they are, and which signs a label stands for.

        Rows to predict then need no trace of the model.
        """
        (x, labels), kwargs = data
        rows = reading.rows
        known = {int(code): rows.signs[labels == code][0] for code in np.unique(labels)}
        self._signs, self._design = {-1: np.zeros_like(rows.signs[0]), **known}, rows.design
        self._predict = partial(reading.predict, self._state)
        found = self._rows(x, labels, kwargs)
        pairs = zip(found, rows._replace(holes=found.holes), strict=True)
        if not all(len(a) == len(b) and np.array_equal(a, b, equal_nan=True) for a, b in pairs):
            self._signs, self._predict = None, partial(kernel.predict, self._state, reading)

    def _rows(
        self,
        x: Float[np.ndarray, "row feature"],
        labels: Int[np.ndarray, " row"],
        by_row: Mapping[str, Any],
    ) -> MixtureRows:
        """Rows as the model reads them, where it takes columns as they are."""
        num_rows, nothing = len(x), np.zeros((0, 2), int)
        task = by_row.get("task", np.zeros(num_rows, np.int32))
        signs = np.stack([self._signs[code] for code in labels.tolist()])
        return MixtureRows(x, nothing, (), np.zeros((num_rows, 0)), self._design, signs, task)

    def _draw(self, model: Callable, seed: int, data: Any) -> None:
        """Fit by Gibbs sampling; the sites that are not by row are kept for predictions."""
        kernel = ConditionalGibbs(model, route="mixture")
        settings: dict[str, Any] = {
            "num_warmup": self.max_iter,
            "num_samples": self.num_samples,
            "num_chains": self.restarts,
        }
        driver = Driver(kernel, max_time=self.max_time, progress_bar=self.progress_bar, **settings)
        args, kwargs = data
        with jax.enable_x64(True):
            self._tree = driver.run(seed, *args, **kwargs)
        found, posterior = driver.reading.route.found, self._tree["posterior"].dataset
        if posterior.sizes["draw"] < self.num_samples:
            if not posterior.sizes["draw"]:
                raise ValueError(
                    f"max_time: {self.max_time} s were over before the first draw; wanted more "
                    "time, or a smaller max_iter."
                )
            warnings.warn(
                f"ended after {posterior.sizes['draw']} of {self.num_samples} draws.",
                ConvergenceWarning,
                stacklevel=4,
            )
        self._keep_draws(found)
        vars(self).pop("elbo_", None)  # of an earlier fit
        self.n_iter_ = int(self._tree.attrs["steps"])
        self.n_experts_ = int(
            np.bincount(self._tree["sample_stats"].dataset["num_groups"].values.ravel()).argmax()
        )

    def _gate(self, x: np.ndarray) -> Callable:
        """The prior of the experts' Gaussians.

        The prior covariance is worth one row with the covariance of all rows and, for each column,
        one row with 0.3 of it. Otherwise estimates of missing entries would confirm themselves for
        many columns and few rows. With `gate_rows`, the prior of the whole Gaussian is worth that
        number of rows with the covariance of all rows.
        """
        columns = x.shape[1]
        if self.gate_rows is not None:
            return partial(
                normal_wishart,
                covariance=self._covariance(x),
                u0=float(self.gate_rows),
                nu0=columns + 1.0 + self.gate_rows,
            )
        expected = (1 + 0.3 * columns) / (1 + columns) * self._covariance(x)
        return partial(normal_wishart, covariance=expected, nu0=2.0 * columns + 2)

    def _covariance(self, x: np.ndarray) -> np.ndarray:
        """Pairwise covariance over rows that have both columns, shrunk to a diagonal one.

        Eigenvalues are raised to a positive minimum.
        """
        seen = ~np.isnan(x)
        filled = np.where(seen, x, 0)
        matrix = filled.T @ filled / np.maximum(seen.T.astype(float) @ seen, 1)
        values, vectors = np.linalg.eigh(
            (1 - self.shrinkage) * matrix + self.shrinkage * np.eye(len(matrix))
        )
        return vectors * np.maximum(values, max(self.shrinkage, 0.01)) @ vectors.T

    def _predicted(self, X: Any, codes: np.ndarray, by_row: Mapping[str, np.ndarray]) -> Any:
        """The kernel's prediction for the rows, repeated with each of the codes as labels."""
        check_is_fitted(self)
        X = read_numbers(self, X, dtype=np.float64, ensure_all_finite="allow-nan", reset=False)
        x, times = self._standardiser.standardise_kept(X, FARTHEST), len(codes)
        more = {name: np.tile(value, times) for name, value in by_row.items()}
        with jax.enable_x64(True):
            labels, x = np.repeat(codes, len(X)).astype(np.int32), np.tile(x, (times, 1))
            if self._signs is not None:
                return self._predict(self._rows(x, labels, more))
            program = Program(self._model, x, labels, **more, **self._settings)
            return jax.device_get(self._predict(program))

    def _log_proba(self, X: Any, by_row: Mapping[str, np.ndarray]) -> np.ndarray:
        check_is_fitted(self)
        if len(self.classes_) == 1:
            return np.zeros((len(self._predicted(X, np.zeros(1), by_row).log_label), 1))
        joint = (
            self._predicted(X, np.arange(len(self.classes_)), by_row)
            .log_label.reshape(len(self.classes_), -1)
            .T
        )
        log_proba = joint - np.logaddexp.reduce(joint, axis=1, keepdims=True)
        return reweighted(log_proba, self.class_weight_)

    def _imputed(self, X: Any, by_row: Mapping[str, np.ndarray], return_std: bool) -> Any:
        found = self._predicted(X, np.array([-1]), by_row)
        X = read_numbers(self, X, dtype=np.float64, ensure_all_finite="allow-nan", reset=False)
        restored = self._standardiser.restore_kept(found.mean)
        restored[:, self._is_empty] = np.nan
        mean = np.where(np.isnan(X), restored, X)
        kept, deviation = self._standardiser.kept, np.zeros(X.shape)
        deviation[:, kept] = found.deviation * self._standardiser.scale[kept]
        return (mean, deviation) if return_std else mean

    @property
    def posterior_(self) -> xr.DataTree:
        """Posterior draws, variational parameters and the ELBO of each sweep, on the standardised
        scale; made at first use.
        """
        check_is_fitted(self)
        if self._tree is None:
            self._driver.num_samples = self.num_samples
            with jax.enable_x64(True):
                self._tree = self._driver.tree()
        return self._tree
