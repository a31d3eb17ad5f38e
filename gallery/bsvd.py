"""BSVD as an estimator: matrix completion with predictive standard deviations.

    completer = BSVDCompleter().fit(X)          # NaN where missing
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
import xarray as xr
from jax import random
from numpyro import distributions as dist
from numpyro.infer import NUTS
from numpyro.infer.gibbs import Gibbs
from numpyro.infer.mcmc import MCMCKernel
from sklearn.base import BaseEstimator
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted

from gallery._entries import Entries, read_entries, read_places
from gallery._features import Features, missingness
from gallery._links import LINKS, Gaussian, Link, num_initial_components
from gallery._suggest import most_informative
from inference import ConditionalGibbs, Driver, Program
from inference.kernels.conditional_gibbs.kernel import draw_items
from inference.program.compiling import compiled
from inference.program.sites import unwrap
from inference.reading.crossed import chunks
from zoo.bsvd import bsvd

__all__ = ["BSVDCompleter"]

# identified up to order, sign and scale
FACTORS = ("z", "s", "u", "v", "u_mean", "u_precision", "v_mean", "v_precision")
NUM_PROBES = 20  # entries whose predictions are kept as draws
MOST_CANDIDATES = 20_000
CHUNK = 8192  # entries


class BSVDCompleter(BaseEstimator):
    """Matrix completion by a singular value decomposition that learns its rank.

    Fitted attributes are `shape_`, `rank_` (the posterior mode; with a million entries a chain
    hardly moves between ranks), and `posterior_` (with the log likelihood of each row).

    Args:
        shape: (rows, columns) of the matrix; None: read off the entries.
        link: "gaussian" for real entries, "ordered" for integer levels such as ratings, "binomial"
            for successes among trials.
        num_components: truncation of the number of components; a warning where most are in use.
        a: with `b`, the expected number of components, a / b.
        b: see `a`.
        row_features: [row, feature]; they are standardised.
        column_features: [column, feature]; they are standardised.
        missingness: number of left and right singular vectors of the matrix of observed entries
            that are used as features.
        learn_factors: whether means and precisions of the factors are learned.
        num_warmup: sweeps before the first draw.
        num_samples: draws of each chain.
        thinning: sweeps for each draw.
        num_chains: number of chains.
        dtype: "float32", "float64", or None: float64 below 500,000 entries. Entries without noise
            need float64.
        max_time: seconds after which a fit ends, with the draws so far.
        progress_bar: whether to show a progress bar.
        random_state: integer, `RandomState` or None.
    """

    def __init__(
        self,
        shape: tuple[int, int] | None = None,
        *,
        link: str = "gaussian",
        num_components: int = 50,
        a: float = 1.0,
        b: float = 1.0,
        row_features: Any = None,
        column_features: Any = None,
        missingness: int = 0,
        learn_factors: bool = False,
        num_warmup: int = 200,
        num_samples: int = 300,
        thinning: int = 1,
        num_chains: int = 1,
        dtype: str | None = None,
        max_time: float | None = None,
        progress_bar: bool = False,
        random_state: Any = None,
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

    def fit(self, X: Any, y: Any = None) -> "BSVDCompleter":
        """Fit the observed entries.

        Args:
            X: a matrix with NaN where missing, a scipy sparse matrix whose stored entries are the
                observed ones, or (rows, columns, values); with the binomial link (rows, columns,
                successes, trials).
            y: not used.
        """
        entries = read_entries(X, self.shape)
        self._link = self._learned_link(entries)
        entries = self._link.coded(entries)
        with jax.enable_x64(self._is_double(entries)):
            arguments = self._model_arguments(entries)
            driver = Driver(
                self._kernel(arguments),
                num_warmup=self.num_warmup,
                num_samples=self.num_samples * self.thinning,
                thinning=self.thinning,
                num_chains=self.num_chains,
                progress_bar=self.progress_bar,
                max_time=self.max_time,
            )
            start = self._start(arguments, entries)
            many = jax.tree.map(
                lambda each: jnp.broadcast_to(each, (self.num_chains, *each.shape)), start
            )
            tree = driver.run(
                self._seed(), init_params=many if self.num_chains > 1 else start, **arguments
            )
        if not tree["posterior"].sizes["draw"]:
            raise ValueError(
                f"fit: ended by {tree.attrs['ended']} before the first draw; give more time, or a "
                "smaller num_warmup."
            )
        self.shape_, self._arguments_, self._entries = entries.shape, arguments, entries
        self._draws = {
            str(name): np.concatenate(draws.values)
            for name, draws in tree["posterior"].to_dataset().items()
        }
        self.posterior_ = self._arranged(tree)
        self.rank_ = int(np.bincount(self._draws["rank"].astype(int)).argmax())
        if (most := np.quantile(self._draws["rank"], 0.95)) > 0.9 * self.num_components:
            found = f"found {most:.0f} of {self.num_components} in use, and there may be more"
            warnings.warn(
                f"num_components: {found}; give more num_components.",
                ConvergenceWarning,
                stacklevel=2,
            )
        return self

    def _start(self, arguments: dict[str, Any], entries: Entries) -> dict[str, Any]:
        """Initial values.

        Real entries start with as many components as they allow. Probit links start without
        components and effects, at the intercept that fits best without them, for a chain hardly
        ever leaves an overfitted start.
        """
        is_on = lambda number: {"z": (jnp.arange(self.num_components) < number).astype(int)}
        if isinstance(self._link, Gaussian):
            return is_on(num_initial_components(entries, self.num_components))
        sites = Program(bsvd, **arguments).sites
        effects = {name: jnp.zeros(sites[name].shape) for name in ("row_weights", "column_weights")}
        return (
            is_on(0)
            | effects
            | {name: jnp.asarray(value) for name, value in self._link.start(entries).items()}
        )

    @staticmethod
    def _kernel(arguments: dict[str, Any]) -> MCMCKernel:
        """`ConditionalGibbs`, with NUTS for gaps, whose complete conditional has no known form."""
        gibbs = ConditionalGibbs(bsvd, route="crossed", num_births=1)  # mixes in few sweeps
        sites = Program(bsvd, **arguments).latent
        if "gaps" not in sites:
            return gibbs
        return Gibbs([(gibbs, [name for name in sites if name != "gaps"]), (NUTS(bsvd), ["gaps"])])

    def fold_in(self, X: Any, row_features: Any = None) -> "BSVDCompleter":
        """Return a completer of new rows with a few observed entries each.

        The factors of the new rows are drawn given the fitted posterior, which stays as it is.

        Args:
            X: entries as in `fit`, of new rows 0, 1, ... and the same columns.
            row_features: features of the new rows, on the scale of those of the fit.
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
        entries = self._refused_unless_of_link(read_entries(X))
        if entries.shape[1] > self.shape_[1]:
            raise ValueError(f"X: found {entries.shape[1]} columns, wanted {self.shape_[1]}.")
        new = copy.copy(self)
        new.shape_ = entries.shape[0], self.shape_[1]
        new._entries = self._link.coded(entries._replace(shape=new.shape_))
        features = None if self._row_unit is None else self._row_unit.coded(row_features)
        with jax.enable_x64(self._draws["s"].dtype == np.float64):
            given = _places(
                new._entries.row, new._entries.column, new._entries.value, new._entries.trials
            )
            new._arguments_ = (
                self._arguments_ | given | {"shape": new.shape_, "row_features": features}
            )
            drawn = draw_items(
                random.key(self._seed()), Program(bsvd, **new._arguments_), self._draws, "row"
            )
        new._draws = self._draws | {name: np.asarray(values) for name, values in drawn.items()}
        return new

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

    def _model_arguments(self, entries: Entries) -> dict[str, Any]:
        of_rows, of_columns = missingness(entries, self.missingness)
        self._row_unit, rows = Features.learn(
            [self.row_features, of_rows], entries.shape[0], "row_features"
        )
        _, columns = Features.learn(
            [self.column_features, of_columns], entries.shape[1], "column_features"
        )
        return {
            **_places(entries.row, entries.column, entries.value, entries.trials),
            "shape": entries.shape,
            "link": self._link.model,
            "num_components": self.num_components,
            "a": self.a,
            "b": self.b,
            "row_features": rows,
            "column_features": columns,
            "learn_factors": self.learn_factors,
            # a probit link fixes the scale by its noise
            **(
                {}
                if self.link == "gaussian"
                else dict.fromkeys(("alpha_s", "precision"), dist.Gamma(1.0, 0.1))
            ),
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
        constant = (
            tree["constant_data"].to_dataset() if "constant_data" in tree.children else xr.Dataset()
        )
        tree["constant_data"] = xr.DataTree(
            constant.assign(probe_row=("probe", places[0]), probe_column=("probe", places[1]))
        )
        of_rows = self._row_log_likelihood().reshape(*singular.shape[:2], -1)
        tree["log_likelihood"] = xr.DataTree(xr.Dataset({"y": (("chain", "draw", "row"), of_rows)}))
        tree["not_identified"] = xr.DataTree(posterior[raw])
        tree["posterior"] = xr.DataTree(posterior.drop_vars(raw))
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
        names = [name for name in ("row", "column", "value", "trials") if name in arguments]

        def at(draws, index, counts):
            some = {name: arguments[name][index] for name in names} | {"counts": counts}
            program = Program(bsvd, **arguments | some)
            return jax.lax.map(
                lambda draw: jax.ops.segment_sum(
                    program.log_probs(draw)["y"], some["row"], self.shape_[0]
                ),
                draws,
            )

        with jax.enable_x64(self._draws["s"].dtype == np.float64):
            draws = {
                name: jnp.asarray(values) for name, values in self._draws.items() if name != "rank"
            }
            index = np.asarray(chunks(size, CHUNK))
            # the last chunk is padded
            counts = np.arange(index.size).reshape(index.shape) < size
            total = np.zeros((len(draws["s"]), self.shape_[0]))
            ask = compiled(at, draws, index[0], counts[0])
            for chunk in zip(index, counts, strict=True):
                total += np.asarray(ask(draws, *chunk))
            return total

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "posterior_")

    # Predictions.

    def predict(self, rows: Any, columns: Any, return_std: bool = False) -> Any:
        """Return the expected entries; with the binomial link the probabilities of success.

        Args:
            rows: row of each entry.
            columns: column of each entry.
            return_std: whether to return the predictive standard deviation as well, noise
                included; with the binomial link that of the probability.
        """
        check_is_fitted(self)
        rows, columns, _ = read_places(rows, columns, self.shape_)
        means, variances = self._over_draws(self._link.moments, rows, columns)
        deviation = np.sqrt(variances.mean(0, dtype=float) + means.var(0, dtype=float))
        mean, deviation = self._link.restore_moments(means.mean(0, dtype=float), deviation)
        return (mean, deviation) if return_std else mean

    def sample(self, rows: Any, columns: Any, n: int = 100) -> np.ndarray:
        """Draw entries from the posterior predictive distribution; one trial with "binomial".

        Args:
            rows: row of each entry.
            columns: column of each entry.
            n: number of draws.

        Returns:
            Draws [draw, entry].
        """
        check_is_fitted(self)
        rows, columns, _ = read_places(rows, columns, self.shape_)
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

        Args:
            n: number of entries.
            candidates: (rows, columns) to choose from; None: at most 20,000 random entries that are
                not observed.
            is_correlated: whether each entry is chosen given the ones before; False: the entries
                of largest standard deviation.
        """
        check_is_fitted(self)
        cells = (
            self._unobserved()
            if candidates is None
            else np.unique(self._cells(*read_places(*candidates, self.shape_)[:2]))
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
        return rows[chosen], columns[chosen]

    def _cells(self, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
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
        rows: np.ndarray,
        columns: np.ndarray,
        which: Any = slice(None),
        rng_key: Any = None,
    ) -> Any:
        """`function(distribution)` or `function(distribution, key)` of entries at each draw,
        [draw, entry].
        """
        arguments, number = self._arguments_, len(rows)
        if not number:  # one entry is computed and dropped
            rows, columns = np.zeros((2, 1), np.int32)
        size = min(len(rows), CHUNK)

        def at(draws, keys, row, column):
            def one(draw):
                values, key = draw
                trials = None if arguments.get("trials") is None else jnp.ones_like(row)
                program = Program(
                    bsvd,
                    **arguments
                    | _places(row, column, np.zeros(row.shape, self._entries.value.dtype), trials),
                )
                fn = unwrap(program.trace(values)[program.observed[0]]["fn"])
                return function(fn) if rng_key is None else function(fn, key)

            return jax.lax.map(one, (draws, keys))

        with jax.enable_x64(self._draws["s"].dtype == np.float64):
            draws = {
                name: jnp.asarray(values[which])
                for name, values in self._draws.items()
                if name != "rank"
            }
            keys = random.split(random.key(0) if rng_key is None else rng_key, len(draws["s"]))
            places = [
                (rows[index], columns[index]) for index in np.asarray(chunks(len(rows), size))
            ]
            ask = compiled(at, draws, keys, *places[0])
            parts = [ask(draws, keys, *place) for place in places]
            join = lambda *leaves: np.concatenate([np.asarray(leaf) for leaf in leaves], axis=1)[
                :, :number
            ]
            return jax.tree.map(join, *parts)


def _places(row, column, value, trials) -> dict[str, Any]:
    given = {"row": row, "column": column, "value": value, "trials": trials}
    return {name: jnp.asarray(values) for name, values in given.items() if values is not None}


def _singular_values(u: np.ndarray, v: np.ndarray, s: np.ndarray, z: np.ndarray) -> np.ndarray:
    """Singular values of u diag(s z) v', largest first, without forming the matrix."""
    on = z > 0
    left, right = (np.linalg.qr(factor[:, on], mode="r") for factor in (u, v))
    found = np.linalg.svd((left * s[on]) @ right.T, compute_uv=False) if on.any() else np.zeros(0)
    return np.pad(found, (0, len(z) - len(found)))
