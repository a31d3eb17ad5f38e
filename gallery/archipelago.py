"""Archipelago as a scikit-learn classifier, for few labels and many unlabelled rows.

    classifier = ArchipelagoClassifier().fit(X, y)    # y = -1 where unlabelled
    classifier.predict_proba(X_new)
    classifier.sample(10, label="a")                  # new rows of a class
    classifier.posterior_                             # ArviZ: functions, rejected points, ...

The model is `zoo.archipelago`: the density of each class comes from a Gaussian process.
`LatentHistory` draws the rejected points, the functions and their hyper-parameters; NUTS draws the
base density. Columns are standardised first, so the posterior is on the standardised scale. Cost of
a draw: O(classes x (rows + rejected points)^3), which suits some hundred rows of a few columns.
Memory: O(classes x (rows + rejected points)^2).

Adams and Ghahramani (2009), "Archipelago: nonparametric Bayesian semi-supervised learning".
"""

from collections.abc import Callable
from copy import deepcopy
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jax import random
from numpyro import handlers
from numpyro.distributions.distribution import validation_enabled
from numpyro.infer import NUTS, Gibbs, init_to_median
from sklearn.base import ClassifierMixin
from sklearn.utils import check_consistent_length, check_random_state
from sklearn.utils.validation import check_is_fitted

from gallery._columns import read_numbers
from gallery._estimator import ZooEstimator
from gallery._finite import check_finite
from gallery._labels import class_weights, coded, codes_among
from gallery._standardise import Standardiser
from inference import Driver, LatentHistory
from inference.program.compiling import compiled
from inference.program.interpreting import interpreted, split
from zoo.archipelago import archipelago, fantasies, gaussian, predict, process, squared_exponential

__all__ = ["ArchipelagoClassifier", "sampler", "start"]

HISTORY = (
    "num_rejected",
    "rejected",
    "rejected_noise",
    "noise",
    "amplitude",
    "lengthscale",
)
MOST_DRAWS = 400  # of a prediction
CHUNK = 256  # rows of a prediction


def sampler(max_capacity: int = 4096, model: Callable = archipelago) -> Gibbs:
    """Make a Gibbs sampler: `LatentHistory` for points and functions, NUTS for the base density.

    Args:
        max_capacity: largest number of rejected points.
        model: `zoo.archipelago.archipelago`, or an edit of it.
    """
    nuts = NUTS(model, max_tree_depth=4, init_strategy=init_to_median)
    return Gibbs([(LatentHistory(model, max_capacity=max_capacity), HISTORY), (nuts, None)])


def start(
    num_chains: int, x: Any, y: Any, num_classes: int, capacity: int, **options: Any
) -> dict[str, Any]:
    """Return initial values with high functions at labelled rows and low ones at rejected points.

    There are as many rejected points as rows. Chains that start from functions of 0 without
    rejected points find the classes late, or not at all.

    Args:
        num_chains: number of chains.
        x: [row, feature].
        y: [row], -1 where unlabelled.
        num_classes: number of classes.
        capacity: number of slots for rejected points.
        **options: those of `zoo.archipelago.process`.
    """
    num_rows, num_features = x.shape
    count = min(num_rows, capacity // 2)

    def one(rng_key: jax.Array) -> dict[str, Any]:
        # the driver's run checks the parameters
        with (
            validation_enabled(False),
            handlers.substitute(substitute_fn=init_to_median),
            handlers.seed(rng_seed=rng_key),
        ):
            density, functions = process(num_features, num_classes, **options)
        rejected = jnp.asarray(density.sample(rng_key, (capacity,)))
        high = functions.amplitude * jnp.where(
            jnp.asarray(y)[:, None] == jnp.arange(num_classes), 1.0, -1.0
        )
        low = jnp.broadcast_to(-functions.amplitude, (count, num_classes))
        is_target = jnp.append(jnp.asarray(y) >= 0, jnp.ones(count, bool))
        noise = functions.noise_near(
            jnp.concatenate([x, rejected[:count]]), jnp.concatenate([high, low]), is_target
        )
        values = {
            "amplitude": functions.amplitude,
            "lengthscale": functions.lengthscale,
            "noise": noise[:num_rows],
        }
        rejected_noise = jnp.zeros((capacity, num_classes)).at[:count].set(noise[num_rows:])
        return {
            **values,
            "num_rejected": jnp.asarray(count),
            "rejected": rejected,
            "rejected_noise": rejected_noise,
        }

    with jax.enable_x64(True):
        keys = split(random.key(0), num_chains)
        begun = interpreted(one, keys[0])
        chains = [begun(rng_key) for rng_key in keys]
    return chains[0] if num_chains == 1 else jax.tree.map(lambda *each: np.stack(each), *chains)


class ArchipelagoClassifier(ClassifierMixin, ZooEstimator):
    """Semi-supervised classification by class densities from Gaussian processes.

    Labels: -1 marks a row of unknown class, in an array of numbers or of objects. The one exception
    is scikit-learn's coding of two classes: if `y` holds -1 and 1 and nothing else, both are
    classes. With one class, its density is learned. Constant columns are left out. Rows may occur
    several times.

    Fitted attributes are `classes_`, `n_features_in_`, `feature_names_in_` (for a data frame),
    `n_iter_` (draws, warm-up included), and `posterior_`.

    Args:
        base: base density: one of `zoo.archipelago`, or a function like those.
        covariance: covariance function: one of `zoo.archipelago`, a kernel of tinygp, or a function
            like those.
        is_ard: whether each column has a length scale of its own.
        amplitude: prior of the functions' standard deviations, large where classes do not overlap;
            None: the model's default.
        lengthscale: prior of the length scales, in standard deviations of the columns; None: the
            model's default.
        persistence: the model generates rows by rejection sampling from the base density. It goes
            on after a rejection with this probability, else it begins anew with new functions.
            None: the model's default, 0.9, with about nine rejected points for each row or fewer.
            Near 1, the paper's value, classes may fill a small part of the base density, with very
            many rejected points.
        capacity: initial number of slots for rejected points, which grows; None: twice the number
            of rows.
        max_capacity: largest number of slots; a fit that needs more raises an error.
        knows_density: whether a prediction weights posterior draws by their density at the new row.
        num_warmup: draws before the ones that are kept.
        num_samples: draws of each chain.
        num_chains: number of chains. A chain rarely changes the class of a cluster of unlabelled
            rows, and other chains may give it another class. So many short chains are better than
            a few long ones.
        class_weight: {class: factor}, "balanced" or None. A prediction multiplies the probability
            of each class by its factor, 1 by default, and normalises: for new rows in which classes
            are more or less frequent than in the fit. "balanced" divides by the share of each class
            among the labelled rows. The fit does not depend on `class_weight`.
        max_time: seconds after which a fit ends, with the draws so far; compilation, ten seconds or
            more, is not interrupted.
        progress_bar: whether to show a progress bar with the number of rejected points; None: on a
            terminal, after two seconds.
        random_state: integer, `RandomState` or None.
    """

    _no_weights = (
        "a process has accepted each row or has not; repeat a row in place of a weight of 2"
    )
    _kept = ("_standardiser", "_x", "_fitted_options", "n_iter_")

    def __init__(
        self,
        *,
        base: Callable = gaussian,
        covariance: Callable = squared_exponential,
        is_ard: bool = False,
        amplitude: Any = None,
        lengthscale: Any = None,
        persistence: float | None = None,
        capacity: int | None = None,
        max_capacity: int = 4096,
        knows_density: bool = True,
        num_warmup: int = 80,
        num_samples: int = 40,
        num_chains: int = 8,
        class_weight: Any = None,
        max_time: float | None = None,
        progress_bar: bool | None = None,
        random_state: Any = None,
    ):
        self.base = base
        self.covariance = covariance
        self.is_ard = is_ard
        self.amplitude = amplitude
        self.lengthscale = lengthscale
        self.persistence = persistence
        self.capacity = capacity
        self.max_capacity = max_capacity
        self.knows_density = knows_density
        self.num_warmup, self.num_samples, self.num_chains = num_warmup, num_samples, num_chains
        self.class_weight = class_weight
        self.max_time, self.progress_bar, self.random_state = max_time, progress_bar, random_state

    def fit(self, X: Any, y: Any, **others: Any) -> "ArchipelagoClassifier":
        """Fit all rows.

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
        X = read_numbers(self, X, dtype=np.float64)
        classes, labels = coded(y)
        check_consistent_length(X, labels)
        weights = class_weights(self.class_weight, classes, labels)
        self._standardiser = Standardiser.learn(X)
        if not self._standardiser.varies.any():
            raise ValueError(
                f"X: found {len(X)} row(s) of constant columns, wanted at least one column "
                "(feature) that varies."
            )
        kernel, capacity = sampler(self.max_capacity), self._first_capacity(len(X))
        driver = Driver(
            kernel,
            num_warmup=self.num_warmup,
            num_samples=self.num_samples,
            num_chains=self.num_chains,
            # other data of the same shape, as in a cross-validation, use the same program
            jit_model_args=True,
            progress_bar=self.progress_bar,
            max_time=self.max_time,
        )
        with jax.enable_x64(True):
            x, options = jnp.asarray(self._standardiser.standardise_kept(X)), self._options()
            first = start(self.num_chains, x, labels, len(classes), capacity, **options)
            options |= {} if self.persistence is None else {"persistence": self.persistence}
            options |= {"num_classes": len(classes), "capacity": capacity}
            vars(self).pop("posterior_", None)  # a fit that fails must not leave an earlier one
            tree = driver.run(self._seed(), x, jnp.asarray(labels), init_params=first, **options)
        if not tree.posterior.sizes["draw"]:
            raise ValueError(
                f"max_time: {self.max_time} seconds have passed before the first draw; give more "
                "time, or a smaller num_warmup."
            )
        draws = tree["posterior"].to_dataset().data_vars.items()
        check_finite(self, **{str(name): values for name, values in draws})
        self.classes_, self.class_weight_, self.posterior_ = classes, weights, tree
        self._x, self._fitted_options = np.asarray(x), self._options()
        self._predictions: dict[Any, Callable] = {}  # compiled, by what shapes they depend on
        self.n_iter_ = int(tree.attrs["steps"])
        return self

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "posterior_")

    def _restore(self, tree: xr.DataTree) -> None:
        self.posterior_, self._predictions = tree, {}

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return the probability of each class, [row, class]."""
        check_is_fitted(self)
        X = read_numbers(self, X, dtype=np.float64, reset=False)
        x = self._standardiser.standardise_kept(X)
        parts = np.array_split(x, range(CHUNK, len(x), CHUNK))
        # padded to a multiple of 32, so that few shapes are compiled
        parts[-1] = np.pad(
            parts[-1], ((0, min(CHUNK, -(-len(x) // 32) * 32) - len(parts[-1])), (0, 0))
        )
        with jax.enable_x64(True):
            draws = self._draws(MOST_DRAWS)
            ask = self._prediction(draws, parts[0])
            found = np.concatenate([np.asarray(ask(draws, self._x, part)) for part in parts])[
                : len(x)
            ]
        if len(nowhere := np.flatnonzero(np.isnan(found).any(1))):
            raise ValueError(
                f"X: row {nowhere[0]} lies where the base density is 0; knows_density=False "
                "predicts there as well."
            )
        joint = found * self.class_weight_
        return joint / joint.sum(1, keepdims=True)

    def _prediction(self, draws: dict[str, np.ndarray], rows: np.ndarray) -> Callable:
        """The compiled prediction for rows of this shape; it is traced once after a fit."""
        key = self.knows_density, rows.shape
        if key not in self._predictions:
            options = self._fitted_options | {"knows_density": self.knows_density}
            ask = lambda draws, known, rows: predict(random.key(0), draws, known, rows, **options)
            self._predictions[key] = compiled(ask, draws, self._x, rows)
        return self._predictions[key]

    def __getstate__(self) -> dict[str, Any]:
        """The attributes without compiled code."""
        kept = dict(super().__getstate__())
        return kept | ({"_predictions": {}} if "_predictions" in kept else {})

    def predict(self, X: Any) -> np.ndarray:
        """Return the most probable class of each row."""
        best = self.predict_proba(X).argmax(1)
        return self.classes_[best]

    def sample(self, n: int = 1, label: Any = None) -> tuple[np.ndarray, np.ndarray]:
        """Draw new rows and their classes from the predictive density of the next row.

        Parameters
        ----------
        n : int, default=1
            Number of rows.
        label : class, default=None
            Class of the new rows; None: any class.

        Returns
        -------
        rows, classes
            Rows [row, column], and their classes [row].
        """
        check_is_fitted(self)
        if not isinstance(n, Integral) or n < 1:
            raise ValueError(f"n: found {n!r}, wanted the number of rows, at least 1.")
        code = None if label is None else int(codes_among([label], self.classes_)[0])
        if code == -1:
            raise ValueError(
                "label: found -1, which means unlabelled; None gives rows of any class."
            )
        rng = check_random_state(self.random_state)
        with jax.enable_x64(True):
            draws, rng_key = self._draws(MOST_DRAWS), random.key(rng.randint(2**31 - 1))
            x, codes = fantasies(
                rng_key, draws, jnp.asarray(self._x), int(n), code, **self._fitted_options
            )
        return self._standardiser.restore_kept(x), self.classes_[codes]

    def _first_capacity(self, num_rows: int) -> int:
        if self.capacity is None:
            return min(max(16, 2 * num_rows), self.max_capacity)
        if not isinstance(self.capacity, Integral) or not 1 <= self.capacity <= self.max_capacity:
            raise ValueError(
                f"capacity: found {self.capacity!r}, wanted a whole number from 1 to max_capacity, "
                f"{self.max_capacity}."
            )
        return self.capacity

    def _options(self) -> dict[str, Any]:
        """Arguments of the model that the user has set; copies, for distributions keep results."""
        options = {
            name: deepcopy(getattr(self, name))
            for name in ("base", "covariance", "is_ard", "amplitude", "lengthscale")
        }
        return {name: value for name, value in options.items() if value is not None}

    def _draws(self, most: int) -> dict[str, np.ndarray]:
        """At most `most` draws of all chains, by thinning."""
        draws = (
            self.posterior_.posterior.to_dataset()
            .stack(all=("chain", "draw"), create_index=False)
            .transpose("all", ...)
        )
        taken = np.linspace(0, draws.sizes["all"] - 1, min(most, draws.sizes["all"])).astype(int)
        draws = draws.isel(all=taken)
        # used slots in multiples of 16, so that few shapes are compiled
        used = -(-max(1, int(draws["num_rejected"].max())) // 16) * 16
        return {str(name): values.values for name, values in draws.isel(slot=slice(used)).items()}

    def _seed(self) -> int:
        return int(check_random_state(self.random_state).randint(2**31 - 1))
