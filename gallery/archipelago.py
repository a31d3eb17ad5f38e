"""Archipelago as a scikit-learn classifier: few labels, and unlabelled rows that show where the
classes are.

    classifier = ArchipelagoClassifier().fit(X, y)    # y = -1 where unlabelled
    classifier.predict_proba(X_new)
    classifier.sample(10, label="a")                  # new rows of a class
    classifier.posterior_                             # ArviZ: hyper-parameters, functions, rejected
                                                      points

The model is `zoo.archipelago`: the density of each class comes from a Gaussian process.
`LatentHistory` draws the points that were rejected on the way to the data, the functions and their
scales; NUTS the base density. Columns are standardised first, so that the posterior is in units of
their standard deviations. Cost of a draw: O(classes x (rows + rejected points)^3), so some hundred
rows of few columns; memory O(classes x (rows + rejected points)^2).

Adams and Ghahramani (2009), "Archipelago: nonparametric Bayesian semi-supervised learning".
"""

from collections.abc import Callable
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import random
from numpyro import handlers
from numpyro.infer import NUTS, Gibbs, init_to_median
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_consistent_length, check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from gallery._labels import coded, codes_among
from gallery._standardise import Standardiser
from inference import Driver, LatentHistory
from inference.program.compiling import compiled
from zoo.archipelago import archipelago, fantasies, gaussian, predict, process, squared_exponential

__all__ = ["ArchipelagoClassifier", "sampler", "start"]

HISTORY = ("num_rejected", "rejected", "rejected_noise")
FIELD = ("noise", "amplitude", "lengthscale")
MOST_DRAWS = 400  # that a prediction looks at
AT_ONCE = 256  # rows of a prediction


def sampler(max_capacity: int = 4096, model: Callable = archipelago) -> Gibbs:
    """`LatentHistory` for rejected points and functions, NUTS for the base density."""
    nuts = NUTS(model, max_tree_depth=4, init_strategy=init_to_median)
    return Gibbs(
        [(LatentHistory(model, max_capacity=max_capacity), (*HISTORY, *FIELD)), (nuts, None)]
    )


def start(
    num_chains: int, x: Any, y: Any, num_classes: int, capacity: int, **options: Any
) -> dict[str, Any]:
    """Islands around the labels in a sea of rejected points, as many as rows: high functions, and
    low ones. From functions of 0 and nothing rejected, chains find the classes late, and some of
    them not at all.

    :param options: of the base density and the functions, see `zoo.archipelago.process`.
    """
    num_rows, num_features = x.shape
    count = min(num_rows, capacity // 2)

    def one(rng_key: jax.Array) -> dict[str, Any]:
        with handlers.substitute(substitute_fn=init_to_median), handlers.seed(rng_seed=rng_key):
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
        x, keys = jnp.asarray(x), random.split(random.key(0), num_chains)
        ask = compiled(one, keys[0])
        chains = [jax.tree.map(np.asarray, ask(rng_key)) for rng_key in keys]
    return chains[0] if num_chains == 1 else jax.tree.map(lambda *each: np.stack(each), *chains)


class ArchipelagoClassifier(ClassifierMixin, BaseEstimator):
    """Classifies by class densities that it learns from labelled and unlabelled rows together.

    Labels: -1 is a row of unknown class, in an array of numbers or of objects. The one exception is
    scikit-learn's coding of two classes by -1 and 1: where `y` holds these two and nothing else,
    both are classes. A class that no row is labelled with is not known. Of one class alone the
    density is learned. Columns that are constant say nothing and are left out; rows may occur
    several times.

    :param base: density that the classes are carved out of: one of `zoo.archipelago`, or a function
    like those.
    :param covariance: of the functions: one of `zoo.archipelago`, a kernel of tinygp, or a function
    like those.
    :param is_ard: gives each column a length scale of its own.
    :param amplitude: prior of how far the functions go from 0: large where classes do not overlap
    and the space between them is empty.
        None: the model's own, as for `lengthscale`, the prior of how far they go straight on, in
        standard deviations of the columns.
    :param persistence: chance that the process which the rows come from goes on after a rejection;
    None: the model's own. Near 1, the
        paper's, classes may be small islands in a wide sea, for very many rejected points.
    :param capacity: room for rejected points at the start, which grows; None: twice as many as
    there are rows.
    :param max_capacity: the most; a fit that wants more ends with an error that says how many there
    are.
    :param knows_density: whether where a new row lies tells how well each draw of the posterior
    describes it, base density and all.
    :param num_warmup: draws before those that are kept, `num_samples` in each of `num_chains`
    chains.
        Chains may find other classes for an island without a label, and stay with them: many short
        ones say more than few long ones.
    :param max_time: seconds after which a fit ends, with the draws that it has; compiling, some ten
    seconds and more, is not cut short.
    :param progress_bar: shows a bar, with the number of rejected points.
    :param random_state: integer, `RandomState` or None.

    Attributes: `classes_`, `n_features_in_`, `feature_names_in_` (of a data frame), `n_iter_`
    (draws, warm-up included), `posterior_`.
    """

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
        max_time: float | None = None,
        progress_bar: bool = False,
        random_state: Any = None,
    ):
        self.base, self.covariance, self.is_ard, self.amplitude, self.lengthscale = (
            base,
            covariance,
            is_ard,
            amplitude,
            lengthscale,
        )
        self.persistence, self.capacity, self.max_capacity, self.knows_density = (
            persistence,
            capacity,
            max_capacity,
            knows_density,
        )
        self.num_warmup, self.num_samples, self.num_chains = num_warmup, num_samples, num_chains
        self.max_time, self.progress_bar, self.random_state = max_time, progress_bar, random_state

    def fit(self, X: Any, y: Any) -> "ArchipelagoClassifier":
        """Learn from all rows.

        :param y: the class of each row, -1 where it is unknown.
        """
        X = validate_data(self, X, dtype=np.float64)
        classes, labels = coded(y)
        check_consistent_length(X, labels)
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
            # other data of the same shape, as in a cross-validation, need not compile again
            jit_model_args=True,
            progress_bar=self.progress_bar,
            max_time=self.max_time,
        )
        with jax.enable_x64(True):
            x, options = jnp.asarray(self._standardiser.standardise_kept(X)), self._options()
            first = start(self.num_chains, x, labels, len(classes), capacity, **options)
            options |= {} if self.persistence is None else {"persistence": self.persistence}
            told = {"num_classes": len(classes), "capacity": capacity, **options}
            tree = driver.run(self._seed(), x, jnp.asarray(labels), init_params=first, **told)
        if not tree.posterior.sizes["draw"]:
            why = (
                "it was interrupted"
                if self.max_time is None
                else f"max_time: {self.max_time} seconds were over, or it was interrupted"
            )
            raise ValueError(
                f"{why} before the first draw; give more time, or a smaller num_warmup."
            )
        self.classes_, self.posterior_, self._x, self._told = (
            classes,
            tree,
            np.asarray(x),
            self._options(),
        )
        self.n_iter_ = int(tree.attrs["steps"])
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probability of each class, [row, class]."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=np.float64, reset=False)
        x = self._standardiser.standardise_kept(X)
        parts = np.array_split(x, range(AT_ONCE, len(x), AT_ONCE))
        # few shapes are compiled
        parts[-1] = np.pad(
            parts[-1], ((0, min(AT_ONCE, -(-len(x) // 32) * 32) - len(parts[-1])), (0, 0))
        )
        with jax.enable_x64(True):
            options = self._told | {"knows_density": self.knows_density}
            draws = self._draws(MOST_DRAWS)
            ask = compiled(
                lambda draws, known, rows: predict(random.key(0), draws, known, rows, **options),
                draws,
                self._x,
                parts[0],
            )
            found = np.concatenate([np.asarray(ask(draws, self._x, part)) for part in parts])[
                : len(x)
            ]
        if len(nowhere := np.flatnonzero(np.isnan(found).any(1))):
            raise ValueError(
                f"X: row {nowhere[0]} lies where the base density has no mass; knows_density=False "
                "answers there as well."
            )
        return found

    def predict(self, X: Any) -> np.ndarray:
        """The most probable class of each row."""
        best = self.predict_proba(X).argmax(1)
        return self.classes_[best]

    def sample(self, n: int = 1, label: Any = None) -> tuple[np.ndarray, np.ndarray]:
        """New rows and their classes, each as if it came next: from the density whose classes
        `predict_proba` tells.

        :param label: the class of the new rows; None: of any class.
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
            x, codes = fantasies(rng_key, draws, jnp.asarray(self._x), int(n), code, **self._told)
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
        """Of the model."""
        options = {
            name: getattr(self, name)
            for name in ("base", "covariance", "is_ard", "amplitude", "lengthscale")
        }
        return {name: value for name, value in options.items() if value is not None}

    def _draws(self, most: int) -> dict[str, np.ndarray]:
        """Of all chains, evenly thinned."""
        draws = (
            self.posterior_.posterior.to_dataset()
            .stack(all=("chain", "draw"), create_index=False)
            .transpose("all", ...)
        )
        taken = np.linspace(0, draws.sizes["all"] - 1, min(most, draws.sizes["all"])).astype(int)
        draws = draws.isel(all=taken)
        # slots; few shapes are compiled
        used = -(-max(1, int(draws["num_rejected"].max())) // 16) * 16
        return {str(name): values.values for name, values in draws.isel(slot=slice(used)).items()}

    def _seed(self) -> int:
        return int(check_random_state(self.random_state).randint(2**31 - 1))
