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
from numpyro import distributions as dist
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_consistent_length, check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from gallery._labels import coded
from gallery._standardise import Standardiser
from inference import ConditionalGibbs, CoordinateAscent, Driver, Program
from inference.kernels.conditional_gibbs.kernel import AssignmentDraws
from zoo.iqgme import normal_wishart, soft_probit

__all__ = ["LocalExperts", "check_whole", "positive"]

FARTHEST = 1e50  # standard deviations, whose square does not overflow


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


class LocalExperts(ClassifierMixin, BaseEstimator):
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
    max_time: float | None
    progress_bar: bool
    random_state: Any
    _driver: Any

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
        self._standardiser = Standardiser.learn(X)
        self._is_empty = np.isnan(X).all(0)
        self._is_empty[self._standardiser.kept] = False
        x = self._standardiser.standardise_kept(X, FARTHEST)
        if "gate" not in settings:
            settings["gate"] = self._gate(x)
        expert = partial(soft_probit, sparse=self.sparse, precision=precision)
        self._settings = {"num_classes": max(len(classes), 2), "expert": expert, **settings}
        self.classes_, data = classes, ((x, labels), {**by_row, **self._settings})
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        if inference == "gibbs":
            self._draw(model, seed, data)
        else:
            self._ascend(model, seed, data, batch_size)

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
            is_done = bool(kernel.finished(state))
            self._state = jax.device_get(state)  # NumPy keeps float64 when it is pickled
        self._predict = partial(kernel.predict, self._state, driver.reading)
        self._driver, self._tree = driver, None
        stats = tree["sample_stats"].dataset.isel(chain=0)
        self.n_iter_, self.elbo_ = stats.sizes["step"], float(stats["elbo"][-1])
        self.n_experts_ = int(stats["num_groups"][-1])
        if not is_done and batch_size is None:  # a fit by batches always takes max_iter steps
            warnings.warn(
                f"ended after {self.n_iter_} sweeps, before the ELBO converged; give more "
                "max_iter or max_time.",
                ConvergenceWarning,
                stacklevel=4,
            )

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
                ended = (
                    f"max_time: {self.max_time} s were over"
                    if self.max_time is not None
                    else "a signal ended the fit"
                )
                raise ValueError(
                    f"{ended} before the first draw; wanted more time, or a smaller max_iter."
                )
            warnings.warn(
                f"ended after {posterior.sizes['draw']} of {self.num_samples} draws.",
                ConvergenceWarning,
                stacklevel=4,
            )
        flat = posterior.stack(both=("chain", "draw")).transpose("both", ...)
        self._state = {
            str(name): values.values
            for name, values in flat.data_vars.items()
            if name not in found.of_rows
        }
        self._predict = partial(AssignmentDraws(model, found).predict, self._state)
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
        X = validate_data(self, X, dtype=np.float64, ensure_all_finite="allow-nan", reset=False)
        x, times = self._standardiser.standardise_kept(X, FARTHEST), len(codes)
        more = {name: np.tile(value, times) for name, value in by_row.items()}
        with jax.enable_x64(True):
            labels = np.repeat(codes, len(X)).astype(np.int32)
            return jax.device_get(
                self._predict(
                    Program(self._model, np.tile(x, (times, 1)), labels, **more, **self._settings)
                )
            )

    def _log_proba(self, X: Any, by_row: Mapping[str, np.ndarray]) -> np.ndarray:
        check_is_fitted(self)
        if len(self.classes_) == 1:
            return np.zeros((len(self._predicted(X, np.zeros(1), by_row).log_label), 1))
        joint = (
            self._predicted(X, np.arange(len(self.classes_)), by_row)
            .log_label.reshape(len(self.classes_), -1)
            .T
        )
        return joint - np.logaddexp.reduce(joint, axis=1, keepdims=True)

    def _imputed(self, X: Any, by_row: Mapping[str, np.ndarray], return_std: bool) -> Any:
        found = self._predicted(X, np.array([-1]), by_row)
        X = validate_data(self, X, dtype=np.float64, ensure_all_finite="allow-nan", reset=False)
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
