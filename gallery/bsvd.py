"""BSVD as an estimator: matrix completion with predictive standard deviations.

    completer = BSVDCompleter().fit(ratings)    # a frame with columns user, item, rating
    completer.fit(X)                            # or a matrix, NaN where missing
    completer.fit((rows, columns, values))      # or the observed entries, or a scipy sparse matrix
    mean, std = completer.predict(rows, columns, return_std=True)
    rows, columns = completer.suggest(5)        # the most informative entries to observe next
    completer.posterior_                        # ArviZ: rank, noise, singular values

The model is `zoo.bsvd`, with row and column effects. `ConditionalGibbs` draws from its posterior.
Real entries are standardised first, so amplitudes and precisions in `posterior_` are on the
standardised scale. Cost of a sweep: entries x components^2 + (rows + columns) x components^3.
Memory: a few times the entries, and (rows + columns) x components numbers for each draw.

Wang (2010), "Bayesian approaches to learning from incomplete data", chapter 5.
"""

import copy
import warnings
from collections.abc import Callable
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import xarray as xr
from jax import random
from jaxtyping import Float, Int
from numpyro.infer.mcmc import MCMCKernel
from sklearn.base import RegressorMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import r2_score
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted

from gallery._entries import Entries, Keyed, Keys, read_entries, read_keyed, read_keys, read_places
from gallery._estimator import ZooEstimator
from gallery._features import Features, missingness
from gallery._finite import check_finite
from gallery._links import LINKS, Gaussian, Link, truncation
from gallery._suggest import most_informative
from inference import ConditionalGibbs, Driver, Program
from inference.kernels.conditional_gibbs.crossed_sides import rounded_up
from inference.kernels.conditional_gibbs.kernel import draw_items
from inference.program.compiling import compiled
from inference.program.sites import unwrap
from zoo.bsvd import bsvd

__all__ = ["BSVDCompleter"]

# identified up to order, sign and scale
FACTORS = ("z", "s", "u", "v", "u_mean", "u_precision", "v_mean", "v_precision")
ARRANGED = ("singular_value", "prediction")  # variables of the tree that are no sites
OTHERS = "(others)"  # the row, or the column, of keys that are not known
NUM_PROBES = 20  # entries whose predictions are kept as draws
MOST_CANDIDATES = 20_000
LEARNS_FACTORS = 10_000  # entries from which on the priors of the factors are learned
MANY = 50_000  # entries from which on births and deaths are tried in every second sweep
FEWEST, CHUNK = 128, 8192  # entries that are predicted together
ENTRIES = ("row", "column", "value", "trials")  # arguments with a number for each entry


class BSVDCompleter(RegressorMixin, ZooEstimator):
    """Matrix completion by a singular value decomposition that learns its rank.

    Entries may be given by the keys of their row and column, such as the names of users and items.
    Methods then take and return keys. A key that was not in the fit is predicted as a row (or
    column) without entries. `posterior_` names rows and columns by the texts of their keys. Its
    last row and its last column, both named "(others)", are for keys that were not in the fit.

    With `fit(X, y)`, `predict(X)` and `score(X, y)`, where X has the two columns of keys, it is a
    regressor of scikit-learn; a frame with the values as its third column may also be split by
    `GridSearchCV`, without y.

    Fitted attributes are `shape_`, `row_keys_` and `column_keys_` (None without keys), `rank_` (the
    posterior mode; with a million entries a chain hardly moves between ranks), and `posterior_`,
    whose group `log_likelihood` has a number for each row of the matrix, the sum over its entries.

    Args:
        shape: (rows, columns) of the matrix; None: read off the entries.
        link: "gaussian" for real entries, "ordered" (or "ordered_probit", its name for the command)
            for integer levels such as ratings, "binomial" for successes among trials.
        num_components: truncation of the number of components; a warning where most are in use.
            None: the next power of two above entries / (rows + columns), from 8 to 50, for a
            component has a number to learn for each row and each column.
        a: with `b`, the expected number of components, a / b.
        b: see `a`.
        row_features: [row, feature]; they are standardised. With keys, a pandas frame whose index
            holds the keys; other keys have the mean features.
        column_features: [column, feature], likewise.
        missingness: number of left and right singular vectors of the matrix of observed entries
            that are used as features.
        learn_factors: whether means and precisions of the factors are learned. None: for 10,000
            real entries or more, where it predicts better. With fewer, predictions are alike, and
            it only costs compilation.
        num_warmup: sweeps before the first draw.
        num_samples: draws of each chain.
        thinning: sweeps for each draw.
        num_chains: number of chains.
        dtype: "float32", "float64", or None: float64 below 500,000 entries. Entries without noise
            need float64.
        max_time: seconds after which a fit ends, with the draws so far.
        progress_bar: whether to show a progress bar; None: on a terminal, after two seconds.
        random_state: integer, `RandomState` or None.
        warm_start: whether a second `fit`, to entries of the same shape, goes on from the last
            draws of the first. Real entries keep its standardisation. The number of entries is
            padded to a power of two, so that a few more of them need no new compilation.
    """

    _keys: Keys | None = None
    # sizes: the entries; with `fold_in`, the draws of the new rows
    _no_weights = "all entries have the same noise"
    _kept = (
        "_link",
        "_truncation",
        "_learns_factors",
        "_entries",
        "_keys",
        "_row_unit",
        "_folded",
        "rank_",
    )

    def __init__(
        self,
        shape: tuple[int, int] | None = None,
        *,
        link: str = "gaussian",
        num_components: int | None = None,
        a: float = 1.0,
        b: float = 1.0,
        row_features: Any = None,
        column_features: Any = None,
        missingness: int = 0,
        learn_factors: bool | None = None,
        num_warmup: int = 200,
        num_samples: int = 300,
        thinning: int = 1,
        num_chains: int = 1,
        dtype: str | None = None,
        max_time: float | None = None,
        progress_bar: bool | None = None,
        random_state: Any = None,
        warm_start: bool = False,
    ):
        self.shape = shape
        self.link = link
        self.num_components = num_components
        self.a = a
        self.b = b
        self.row_features = row_features
        self.column_features = column_features
        self.missingness = missingness
        self.learn_factors = learn_factors
        self.num_warmup = num_warmup
        self.num_samples = num_samples
        self.thinning = thinning
        self.num_chains = num_chains
        self.dtype = dtype
        self.max_time = max_time
        self.progress_bar = progress_bar
        self.random_state = random_state
        self.warm_start = warm_start

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.target_tags.required = False
        return tags

    def fit(self, X: Any, y: Any = None, **others: Any) -> "BSVDCompleter":
        """Fit the observed entries.

        Parameters
        ----------
        X : frame, array, sparse matrix or tuple
            A frame of three columns: the keys of row and column, and the value of each entry; NaN
            where it is not known. Or, with y, two columns of keys. Or a matrix with NaN where
            missing, a scipy sparse matrix whose stored entries are the observed ones, or (rows,
            columns, values). With the binomial link, successes and trials take the place of values.
        y : array, default=None
            The value of each entry; with the binomial link successes and trials, [entry, 2].
        **others
            Refused; `sample_weight` with the reason why the model has no place for it.

        Returns
        -------
        self
        """
        self._refuse_others(others)
        is_fitted = hasattr(self, "posterior_") and isinstance(self._link, LINKS.get(self.link, ()))
        goes_on = self.warm_start and is_fitted
        keys, entries = self._read(X, y, goes_on)
        self._link = self._link if goes_on else self._learned_link(entries)
        if self.num_components is not None:
            self._truncation = self.num_components
        elif not goes_on:
            self._truncation = truncation(entries)
        if self.learn_factors is not None:
            self._learns_factors = self.learn_factors
        elif not goes_on:
            is_gaussian = isinstance(self._link, Gaussian)
            self._learns_factors = is_gaussian and len(entries.value) >= LEARNS_FACTORS
        entries = self._link.coded(self._refused_unless_of_link(entries))
        with jax.enable_x64(self._is_double(entries)):
            arguments = self._model_arguments(entries, keys)
            padded = _padded(arguments, self.warm_start)
            driver = Driver(
                self._kernel(padded),
                num_warmup=self.num_warmup,
                num_samples=self.num_samples * self.thinning,
                thinning=self.thinning,
                num_chains=self.num_chains,
                progress_bar=self.progress_bar,
                max_time=self.max_time,
            )
            start = self._last() if goes_on else self._start(arguments, entries)
            vars(self).pop("posterior_", None)  # a fit that fails must not leave an earlier one
            tree = driver.run(
                self._seed(),
                init_params=start
                if self.num_chains > 1
                else {name: values[0] for name, values in start.items()},
                **padded,
            )
        if not tree["posterior"].sizes["draw"]:
            raise ValueError(
                f"fit: ended by {tree.attrs['ended']} before the first draw; give more time, or a "
                "smaller num_warmup."
            )
        self._keys, self._arguments_, self._entries = keys, arguments, entries
        self._draws, self._folded = _over_chains(tree["posterior"].to_dataset()), {}
        check_finite(self, **self._draws)
        self.posterior_ = self._arranged(tree)
        self.rank_ = int(np.bincount(self._draws["rank"].astype(int)).argmax())
        if (most := np.quantile(self._draws["rank"], 0.95)) > 0.9 * self._truncation:
            found = f"found {most:.0f} of {self._truncation} in use, and there may be more"
            warnings.warn(
                f"num_components: {found}; give more num_components.",
                ConvergenceWarning,
                stacklevel=2,
            )
        return self

    def _read(self, X: Any, y: Any, goes_on: bool) -> tuple[Keys | None, Entries]:
        """Keys and entries; a fit that goes on keeps the keys of the first, and refuses others."""
        by_key = read_keyed(X, y, self._num_values)
        if goes_on:
            self._check_same_kind(by_key)
        if by_key is None:
            return None, read_entries(X, self.shape)
        if self.shape is not None:
            raise ValueError(
                f"shape: found {self.shape} beside keys, wanted None: the keys are the shape."
            )
        keys = self._keys if goes_on and self._keys is not None else Keys.learn(by_key)
        if not keys.are_known(by_key):
            raise ValueError(
                "X: some keys were not there in the first fit, from which warm_start=True goes on; "
                "wanted the same rows and columns."
            )
        return keys, read_entries(keys.placed(by_key), keys.shape, keys)

    @property
    def _num_values(self) -> int:
        return 2 if self.link == "binomial" else 1

    def _check_same_kind(self, by_key: Keyed | None) -> None:
        """Refuse numbers of rows after keys, and keys after numbers."""
        if (by_key is None) is not (self._keys is None):
            found, wanted = ("no keys", "keys") if by_key is None else ("keys", "none")
            raise ValueError(f"X: found {found}, wanted {wanted}, as in the fit.")

    @property
    def row_keys_(self) -> np.ndarray | None:
        """The keys of the rows; None where they are numbered."""
        return None if self._keys is None else self._keys.row

    @property
    def column_keys_(self) -> np.ndarray | None:
        """The keys of the columns; None where they are numbered."""
        return None if self._keys is None else self._keys.column

    @property
    def shape_(self) -> tuple[int, int]:
        """Numbers of rows and columns."""
        if self._keys is None:
            return self._entries.shape
        return len(self._keys.row), len(self._keys.column)

    def _start(self, arguments: dict[str, Any], entries: Entries) -> dict[str, Any]:
        """Initial values of each chain."""
        start = self._link.start(entries, Program(bsvd, **arguments))
        return {
            name: np.broadcast_to(value, (self.num_chains, *np.shape(value)))
            for name, value in start.items()
        }

    def _last(self) -> dict[str, np.ndarray]:
        """The last draw of each chain of the earlier fit, as initial values."""
        draws = {name: values for name, values in self._draws.items() if name != "rank"}
        number = self.posterior_["posterior"].sizes["draw"]
        ends = np.resize(np.arange(number - 1, len(draws["s"]), number), self.num_chains)
        last = {name: values[ends] for name, values in draws.items()}
        if "gaps" in last:  # NUTS starts in unconstrained space
            last["gaps"] = np.log(last["gaps"])
        return last

    def _kernel(self, arguments: dict[str, Any]) -> MCMCKernel:
        # more than by default, to mix in few sweeps
        num_births = 1.0 if len(arguments["row"]) < MANY else 0.5
        gibbs = ConditionalGibbs(bsvd, route="crossed", num_births=num_births)
        return self._link.kernel(gibbs, Program(bsvd, **arguments))

    def fold_in(self, X: Any, row_features: Any = None) -> "BSVDCompleter":
        """Return a completer of new rows with a few observed entries each.

        The factors of the new rows are drawn given the fitted posterior, which stays as it is.

        Parameters
        ----------
        X : frame, array, sparse matrix or tuple
            Entries as in `fit`, of new rows 0, 1, ... or keys, and the same columns.
        row_features : array or frame, default=None
            Features of the new rows, on the scale of those of the fit.

        Returns
        -------
        BSVDCompleter
            A fitted completer of the new rows alone.
        """
        check_is_fitted(self)
        if self.missingness:
            raise ValueError(
                "fold_in: features of missingness are not available for new rows; fit with "
                "missingness=0, or fit again."
            )
        if (row_features is None) != (self.row_features is None):
            found, wanted = ("None", "features") if row_features is None else ("features", "None")
            raise ValueError(f"row_features: found {found}, wanted {wanted}, as in the fit.")
        new, width = copy.copy(self), self._entries.shape[1]
        new._keys, entries = self._read_new_rows(X)
        if entries.shape[1] > width:
            raise ValueError(f"X: found {entries.shape[1]} columns, wanted {width}.")
        shape = entries.shape[0], width
        new._entries = self._link.coded(self._refused_unless_of_link(entries)._replace(shape=shape))
        features = row_features
        if new._keys is not None:
            features = _by_key(row_features, new._keys.row, "row_features")
        features = None if self._row_unit is None else self._row_unit.coded(features)
        with jax.enable_x64(self._draws["s"].dtype == np.float64):
            given = _places(
                new._entries.row, new._entries.column, new._entries.value, new._entries.trials
            )
            new._arguments_ = self._arguments_ | given | {"shape": shape, "row_features": features}
            drawn = draw_items(
                random.key(self._seed()), Program(bsvd, **new._arguments_), self._draws, "row"
            )
        new._folded = {name: np.asarray(values) for name, values in drawn.items()}
        new._draws = self._draws | new._folded
        return new

    def _read_new_rows(self, X: Any) -> tuple[Keys | None, Entries]:
        """Keys of new rows with those of the known columns, and the entries."""
        by_key = read_keyed(X, None, self._num_values)
        self._check_same_kind(by_key)
        if by_key is None or self._keys is None:
            return None, read_entries(X)
        keys = Keys(Keys.learn(by_key).row, self._keys.column)
        if not keys.are_known(by_key):
            raise ValueError("X: some columns were not there in the fit; leave them out.")
        return keys, read_entries(keys.placed(by_key), keys.shape, keys)

    # Arguments of the model.

    def _learned_link(self, entries: Entries) -> Link:
        if self.link not in LINKS:
            raise ValueError(f"link: found {self.link!r}, wanted one of {sorted(LINKS)}.")
        return LINKS[self.link].learn(self._refused_unless_of_link(entries))

    def _refused_unless_of_link(self, entries: Entries) -> Entries:
        if (entries.trials is not None) != (self.link == "binomial"):
            raise ValueError(f"X: the {self.link} link wants {LINKS[self.link].wanted}.")
        return entries

    def _is_double(self, entries: Entries) -> bool:
        if self.dtype not in (None, "float32", "float64"):
            raise ValueError(f"dtype: found {self.dtype!r}, wanted 'float32', 'float64' or None.")
        return len(entries.value) < 500_000 if self.dtype is None else self.dtype == "float64"

    def _model_arguments(self, entries: Entries, keys: Keys | None) -> dict[str, Any]:
        of_rows, of_columns = missingness(entries, self.missingness)
        given = {name: getattr(self, name) for name in ("row_features", "column_features")}
        if keys is not None:
            pairs = zip(given.items(), keys, strict=True)
            given = {name: _by_key(features, own, name) for (name, features), own in pairs}
        self._row_unit, rows = Features.learn(
            [given["row_features"], of_rows], entries.shape[0], "row_features"
        )
        _, columns = Features.learn(
            [given["column_features"], of_columns], entries.shape[1], "column_features"
        )
        return {
            **_places(entries.row, entries.column, entries.value, entries.trials),
            "shape": entries.shape,
            "num_components": self._truncation,
            "a": self.a,
            "b": self.b,
            "row_features": rows,
            "column_features": columns,
            "learn_factors": self._learns_factors,
            **self._link.settings,
        }

    def _seed(self) -> int:
        return int(check_random_state(self.random_state).randint(2**31 - 1))

    def _arranged(self, tree: xr.DataTree) -> xr.DataTree:
        """The tree with identified quantities in `posterior`, and factors in `not_identified`."""
        posterior = tree["posterior"].to_dataset()
        raw = [name for name in FACTORS if name in posterior]
        singular = np.array(
            [
                [_singular_values(*each) for each in zip(*one, strict=True)]
                for one in zip(*(posterior[name].values for name in "uvsz"), strict=True)
            ]
        )
        posterior["singular_value"] = (("chain", "draw", "order"), singular)
        rng = np.random.default_rng(0)
        places = [rng.integers(size, size=NUM_PROBES) for size in self.shape_]
        mean, _ = self._link.restore_moments(
            self._over_draws(lambda fn: self._link.moments(fn)[0], *places), np.zeros(())
        )
        posterior["prediction"] = (
            ("chain", "draw", "probe"),
            mean.reshape(*singular.shape[:2], -1),
        )
        # without the padding of the entries
        size = len(self._entries.value)
        observed = tree["observed_data"].to_dataset().isel(entry=slice(size))
        constant = tree["constant_data"].to_dataset().drop_dims("counts_dim_0")
        dims = {f"{name}_dim_0": slice(size) for name in ENTRIES if name in constant}
        tree["observed_data"], constant = xr.DataTree(observed), constant.isel(dims)
        tree["constant_data"] = xr.DataTree(
            constant.assign(probe_row=("probe", places[0]), probe_column=("probe", places[1]))
        )
        of_rows = self._row_log_likelihood().reshape(*singular.shape[:2], -1)
        tree["log_likelihood"] = xr.DataTree(xr.Dataset({"y": (("chain", "draw", "row"), of_rows)}))
        tree["not_identified"] = xr.DataTree(posterior[raw])
        tree["posterior"] = xr.DataTree(posterior.drop_vars(raw))
        if self._keys is not None:
            texts = {
                dim: np.array([*map(str, own.tolist()), OTHERS])
                for dim, own in zip(("row", "column"), self._keys, strict=True)
            }
            for name in ("posterior", "not_identified", "log_likelihood"):
                found = tree[name].to_dataset()
                named = {dim: own for dim, own in texts.items() if dim in found.dims}
                tree[name] = xr.DataTree(found.assign_coords(named))
        if isinstance(self._link, Gaussian):
            standardiser = self._link.standardiser
            tree.attrs |= {
                "shift": float(standardiser.mean),
                "scale": float(standardiser.scale),
            }
        return tree

    def _row_log_likelihood(self) -> np.ndarray:
        """Log likelihood of the observed entries of each row at each draw, [draw, row]."""
        arguments, size = self._arguments_, len(self._entries.value)
        names = [name for name in ENTRIES if name in arguments]

        def at(draws, some):
            program = Program(bsvd, **arguments | some)
            return jax.lax.map(
                lambda draw: jax.ops.segment_sum(
                    program.log_probs(draw)["y"], some["row"], self._entries.shape[0]
                ),
                draws,
            )

        with jax.enable_x64(self._draws["s"].dtype == np.float64):
            draws = {name: values for name, values in self._draws.items() if name != "rank"}
            index, counts = _chunks(size)
            given = {name: np.asarray(arguments[name]) for name in names}
            parts = [
                {name: x[own] for name, x in given.items()} | {"counts": is_entry}
                for own, is_entry in zip(index, counts, strict=True)
            ]
            ask = compiled(at, draws, parts[0])
            return np.sum([np.asarray(ask(draws, part), float) for part in parts], axis=0)

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "posterior_")

    def _contents(self) -> dict[str, Any]:
        others = {name: value for name, value in self._arguments_.items() if name not in ENTRIES}
        return super()._contents() | {"_arguments_": others}

    def _restore(self, tree: xr.DataTree) -> None:
        self.posterior_ = tree
        identified = tree["posterior"].dataset.drop_vars(ARRANGED)
        factors = tree["not_identified"].dataset
        self._draws = _over_chains(identified) | _over_chains(factors) | self._folded
        with jax.enable_x64(self._draws["s"].dtype == np.float64):
            entries = self._entries
            self._arguments_ |= _places(entries.row, entries.column, entries.value, entries.trials)

    # Predictions.

    def predict(self, rows: Any, columns: Any = None, return_std: bool = False) -> Any:
        """Return the expected entries; with the binomial link the probabilities of success.

        Parameters
        ----------
        rows : array or frame
            Row of each entry, its key or its number; or, without `columns`, a frame or an array
            whose first two columns are row and column of each entry.
        columns : array, default=None
            Column of each entry, its key or its number.
        return_std : bool, default=False
            Whether to return the predictive standard deviation as well, noise included; with the
            binomial link that of the probability.

        Returns
        -------
        mean : array of shape (entries,)
        std : array of shape (entries,)
            Only with `return_std`.
        """
        rows, columns = self._places(rows, columns)
        means, variances = self._over_draws(self._link.moments, rows, columns)
        deviation = np.sqrt(variances.mean(0, dtype=float) + means.var(0, dtype=float))
        mean, deviation = self._link.restore_moments(means.mean(0, dtype=float), deviation)
        return (mean, deviation) if return_std else mean

    def score(self, X: Any, y: Any = None, sample_weight: Any = None) -> float:
        """Return the coefficient of determination (R2) of the expected entries.

        It is that of scikit-learn's regressors: 1 for perfect predictions, 0 for the mean of the
        entries. With the binomial link it is that of the shares of successes, weighted by trials.

        Parameters
        ----------
        X : frame, array, sparse matrix or tuple
            Entries, as in `fit`.
        y : array, default=None
            Values, as in `fit`.
        sample_weight : array of shape (entries,), default=None
            Weight of each entry, in the order of X; not for a matrix.

        Returns
        -------
        float
        """
        check_is_fitted(self)
        by_key = read_keyed(X, y, self._num_values)
        if by_key is None:
            self._check_same_kind(by_key)
            rows, columns, value, trials, _ = read_entries(X, self.shape_)
        else:
            rows, columns, (value, *more) = by_key
            trials = more[0] if more else None
        weight = np.ones(len(value)) if sample_weight is None else np.asarray(sample_weight, float)
        if trials is not None:
            value, weight = value / np.maximum(trials, 1), weight * trials
        return float(r2_score(value, self.predict(rows, columns), sample_weight=weight))

    def _places(self, rows: Any, columns: Any) -> tuple[np.ndarray, np.ndarray]:
        """Places in the matrix, from keys or numbers, or from a table that has both."""
        check_is_fitted(self)
        if columns is None:
            rows, columns = read_keys(rows)
        if self._keys is None:
            return read_places(rows, columns, self._entries.shape)[:2]
        places = self._keys.places(*map(_vector, (rows, columns)))
        return read_places(*places, self._keys.shape)[:2]

    def sample(self, rows: Any, columns: Any = None, n: int = 100) -> np.ndarray:
        """Draw entries from the posterior predictive distribution; one trial with "binomial".

        Parameters
        ----------
        rows : array or frame
            As in `predict`.
        columns : array, default=None
            As in `predict`.
        n : int, default=100
            Number of draws.

        Returns
        -------
        array of shape (n, entries)
        """
        rows, columns = self._places(rows, columns)
        rng = np.random.default_rng(self._seed())
        which = rng.integers(len(self._draws["rank"]), size=n)
        drawn = self._over_draws(
            lambda fn, key: fn.sample(key),
            rows,
            columns,
            which,
            random.key(int(rng.integers(2**31))),
        )
        return self._link.decoded(drawn)

    def suggest(
        self, n: int = 1, *, candidates: Any = None, is_correlated: bool = True
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return rows and columns of the n most informative entries to observe next.

        Parameters
        ----------
        n : int, default=1
            Number of entries.
        candidates : tuple of two arrays, default=None
            Rows and columns to choose from, keys or numbers; None: at most 20,000 random entries
            that are not observed.
        is_correlated : bool, default=True
            Whether each entry is chosen given the ones before; False: the entries of largest
            standard deviation.

        Returns
        -------
        rows : array of shape (n,)
        columns : array of shape (n,)
        """
        check_is_fitted(self)
        cells = (
            self._unobserved()
            if candidates is None
            else np.unique(self._cells(*self._among_known(*candidates)))
        )
        rows, columns = (place.astype(np.int32) for place in np.divmod(cells, self.shape_[1]))
        if not (isinstance(n, Integral) and 1 <= n <= len(rows)):
            raise ValueError(
                f"n: found {n}, wanted an integer, 1 to {len(rows)}, as many as there are "
                "candidates."
            )
        eta = self._over_draws(
            lambda fn: getattr(fn, "loc", getattr(fn, "predictor", None)), rows, columns
        )
        noise = float(np.mean(1 / self._draws["alpha"])) if "alpha" in self._draws else 1.0
        chosen = most_informative(eta, noise, n, is_correlated=is_correlated)
        if self._keys is None:
            return rows[chosen], columns[chosen]
        return self._keys.row[rows[chosen]], self._keys.column[columns[chosen]]

    def _among_known(self, rows: Any, columns: Any) -> tuple[np.ndarray, np.ndarray]:
        """Places of candidates; an unknown key is refused."""
        return read_places(*self._places(rows, columns), self.shape_)[:2]

    def _cells(
        self, rows: Int[np.ndarray, " entry"], columns: Int[np.ndarray, " entry"]
    ) -> Int[np.ndarray, " entry"]:
        """Numbers of the cells of the matrix, row by row."""
        return rows.astype(np.int64) * self.shape_[1] + columns

    def _unobserved(self) -> np.ndarray:
        """Sorted candidates among the unobserved cells.

        Large, sparse matrices are sampled at random in place of listing all cells.
        """
        known = self._cells(self._entries.row, self._entries.column)
        total, rng = self.shape_[0] * self.shape_[1], np.random.default_rng(self._seed())
        few = total <= max(10 * MOST_CANDIDATES, 2 * len(known))
        cells = (
            np.arange(total) if few else np.unique(rng.integers(total, size=4 * MOST_CANDIDATES))
        )
        return np.sort(rng.permutation(np.setdiff1d(cells, known))[:MOST_CANDIDATES])

    def _over_draws(
        self,
        function: Callable,
        rows: Int[np.ndarray, " entry"],
        columns: Int[np.ndarray, " entry"],
        which: Any = slice(None),
        rng_key: Any = None,
    ) -> Any:
        """`function(distribution)` or `function(distribution, key)` of entries at each draw,
        [draw, entry].
        """
        arguments, number = self._arguments_, len(rows)
        if not number:  # one entry is computed and dropped
            rows, columns = np.zeros((2, 1), np.int32)

        def at(draws, keys, row, column):
            def one(draw):
                values, key = draw
                trials = None if arguments.get("trials") is None else jnp.ones_like(row)
                program = Program(
                    bsvd,
                    **arguments
                    | _places(row, column, np.zeros(row.shape, self._entries.value.dtype), trials),
                )
                fn = unwrap(program.trace(values)["y"]["fn"])
                return function(fn) if rng_key is None else function(fn, key)

            return jax.lax.map(one, (draws, keys))

        with jax.enable_x64(self._draws["s"].dtype == np.float64):
            draws = {name: x[which] for name, x in self._draws.items() if name != "rank"}
            keys = None if rng_key is None else random.split(rng_key, len(draws["s"]))
            places = [(rows[index], columns[index]) for index in _chunks(len(rows))[0]]
            ask = compiled(at, draws, keys, *places[0])
            parts = [ask(draws, keys, *place) for place in places]
            join = lambda *leaves: np.concatenate([np.asarray(leaf) for leaf in leaves], axis=1)[
                :, :number
            ]
            return jax.tree.map(join, *parts)


def _chunks(number: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices of entries, [chunk, entry], and which of them are no repetition of the last one.

    Chunks have few sizes, so that other numbers of entries need no other program.
    """
    size = min(max(2 ** int(np.ceil(np.log2(number))), FEWEST), CHUNK)
    index = np.arange(-(-number // size) * size).reshape(-1, size)
    return np.minimum(index, number - 1), index < number


def _padded(arguments: dict[str, Any], is_growing: bool) -> dict[str, Any]:
    """The arguments with masked copies of entries, up to a size that other data share.

    Compiled code then serves other entries of about the same number.
    """
    size = len(arguments["row"])
    index = np.arange(2 ** int(np.ceil(np.log2(size))) if is_growing else rounded_up(size))
    given = {name: np.asarray(arguments[name]) for name in ENTRIES if name in arguments}
    more = {name: np.resize(values, index.shape) for name, values in given.items()}
    return arguments | jax.device_put(more | {"counts": index < size})


def _by_key(features: Any, keys: np.ndarray, name: str) -> np.ndarray | None:
    """Features of keys [key, feature], and their means for other keys, the last row."""
    if features is None:
        return None
    if not hasattr(features, "loc"):
        raise ValueError(
            f"{name}: found {type(features).__name__} beside keys, wanted a pandas frame whose "
            "index holds the keys."
        )
    if (unknown := ~pd.Index(keys).isin(features.index)).any():
        raise ValueError(f"{name}: its index lacks the key {keys[unknown].tolist()[0]!r}.")
    own = features.loc[keys].to_numpy(float)
    return np.concatenate([own, own.mean(0, keepdims=True)])


def _vector(keys: Any) -> np.ndarray:
    """Keys as a vector, each of its own type."""
    found = np.asarray(keys)
    return np.array(keys, object) if isinstance(keys, list) and found.dtype.kind == "U" else found


def _over_chains(posterior: xr.Dataset) -> dict[str, np.ndarray]:
    """Draws [draw, ...] of all chains, without a copy."""
    return {
        str(name): draws.values.reshape(-1, *draws.shape[2:]) for name, draws in posterior.items()
    }


def _places(row, column, value, trials) -> dict[str, Any]:
    given = zip(ENTRIES, (row, column, value, trials), strict=True)
    return {name: jax.device_put(values) for name, values in given if values is not None}


def _singular_values(
    u: Float[np.ndarray, "row component"],
    v: Float[np.ndarray, "column component"],
    s: Float[np.ndarray, " component"],
    z: Int[np.ndarray, " component"],
) -> Float[np.ndarray, " component"]:
    """Singular values of u diag(s z) v', largest first, without forming the matrix."""
    on = z > 0
    left, right = (np.linalg.qr(factor[:, on], mode="r") for factor in (u, v))
    found = np.linalg.svd((left * s[on]) @ right.T, compute_uv=False) if on.any() else np.zeros(0)
    return np.pad(found, (0, len(z) - len(found)))
