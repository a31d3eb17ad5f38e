"""Links of matrix entries to the model: real numbers, ordered levels, or successes among trials.

link = LINKS["ordered"].learn(entries)       # from the entries of the first call
entries = link.coded(entries)                # as the model takes them; others are refused
start = link.start(entries)                  # probit links: initial values of some sites
mean, variance = link.moments(distribution)  # of entries given the parameters of a draw
mean, deviation = link.restore_moments(mean, deviation)  # on the scale of the data
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from scipy.special import ndtri

from gallery._entries import Entries
from gallery._standardise import Standardiser
from zoo.bsvd import binomial_probit, gaussian, ordered_probit

__all__ = ["LINKS", "Binomial", "Gaussian", "Link", "Ordered", "num_initial_components"]

ENTRIES_PER_FACTOR = 8  # a chain that starts with fewer would start overfitted


@dataclass(frozen=True)
class Gaussian:
    """Real entries, standardised for the model."""

    standardiser: Standardiser
    model: Callable = gaussian
    wanted = "(rows, columns, values)"

    @classmethod
    def learn(cls, entries: Entries) -> "Gaussian":
        """Learn mean and standard deviation of the entries."""
        return cls(Standardiser.learn(entries.value))

    def coded(self, entries: Entries) -> Entries:
        """Standardise the entries."""
        return entries._replace(value=self.standardiser.standardise(entries.value))

    def decoded(self, values: np.ndarray) -> np.ndarray:
        """Return values on the scale of the data.

        In float64, for the mean may be far larger than the standard deviation.
        """
        return self.standardiser.restore(np.asarray(values, float))

    def moments(self, fn: Any) -> tuple[Any, Any]:
        """Return mean and variance of an entry, noise included, on the standardised scale."""
        return fn.loc, jnp.broadcast_to(fn.scale**2, fn.loc.shape)

    def restore_moments(
        self, mean: np.ndarray, deviation: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return a mean and a standard deviation on the scale of the data."""
        return self.decoded(mean), deviation * self.standardiser.scale


@dataclass(frozen=True)
class Ordered:
    """Integer levels of which only the order counts."""

    levels: tuple[int, ...]
    wanted = "(rows, columns, values)"

    @classmethod
    def learn(cls, entries: Entries) -> "Ordered":
        """Learn which levels occur."""
        _refuse_fractions(entries.value, "values", entries)
        levels = tuple(np.unique(entries.value).astype(int).tolist())
        if len(levels) < 2:
            raise ValueError(f"values: found the one level {levels[0]}, wanted two at least.")
        return cls(levels)

    @property
    def model(self) -> Callable:
        """The link function of the model."""
        return partial(ordered_probit, num_levels=len(self.levels))

    def coded(self, entries: Entries) -> Entries:
        """Code the levels 0, 1, ... in their order."""
        _refuse_fractions(entries.value, "values", entries)
        if (unknown := ~np.isin(entries.value, self.levels)).any():
            raise ValueError(
                f"values: found the level {entries.value[np.argmax(unknown)]:g}, wanted one of "
                f"those learned, {self.levels}."
            )
        return entries._replace(value=np.searchsorted(self.levels, entries.value))

    def start(self, entries: Entries) -> dict[str, Any]:
        """Return the intercept and unconstrained gaps that put cutpoints at observed quantiles."""
        share = np.bincount(entries.value.astype(int)) / len(entries.value)
        cutpoints = ndtri(np.cumsum(share)[:-1])
        gaps = {"gaps": np.log(np.diff(cutpoints))} if len(cutpoints) > 1 else {}
        return {"intercept": -cutpoints[0]} | gaps

    def decoded(self, values: np.ndarray) -> np.ndarray:
        """Return the levels of codes."""
        return np.array(self.levels)[values]

    def moments(self, fn: Any) -> tuple[Any, Any]:
        """Return mean and variance of a level."""
        share = jnp.exp(
            jnp.stack(
                [fn.log_prob(jnp.full(fn.batch_shape, code)) for code in range(len(self.levels))],
                axis=-1,
            )
        )
        levels = jnp.array(self.levels, share.dtype)
        mean = share @ levels
        return mean, jnp.sum(share * jnp.subtract.outer(mean, levels) ** 2, axis=-1)

    def restore_moments(
        self, mean: np.ndarray, deviation: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return both as they are."""
        return mean, deviation


@dataclass(frozen=True)
class Binomial:
    """Numbers of successes among trials."""

    model: Callable = binomial_probit
    wanted = "(rows, columns, successes, trials)"

    @classmethod
    def learn(cls, entries: Entries) -> "Binomial":
        """Return the link, which has nothing to learn."""
        return cls()

    def coded(self, entries: Entries) -> Entries:
        """Return the entries as integers; refuse more successes than trials."""
        trials = np.asarray(entries.trials)
        _refuse_fractions(entries.value, "values", entries)
        _refuse_fractions(trials, "trials", entries)
        if (bad := (entries.value < 0) | (entries.value > trials)).any():
            i = int(np.argmax(bad))
            place = f"row {entries.row[i]}, column {entries.column[i]}"
            raise ValueError(
                f"X: found {entries.value[i]:g} successes of {trials[i]:g} trials at {place}."
            )
        return entries._replace(value=entries.value.astype(int), trials=trials.astype(int))

    def start(self, entries: Entries) -> dict[str, Any]:
        """Return the intercept of the overall success probability.

        Half a success and half a failure are added, so that the probability is never 0 or 1.
        """
        return {
            "intercept": ndtri((entries.value.sum() + 0.5) / (np.asarray(entries.trials).sum() + 1))
        }

    def decoded(self, values: np.ndarray) -> np.ndarray:
        """Return the values as they are."""
        return values

    def moments(self, fn: Any) -> tuple[Any, Any]:
        """Return the success probability, and 0: a draw of the parameters fixes it."""
        success = jnp.exp(fn.log_prob(jnp.ones_like(fn.trials)))
        return success, jnp.zeros_like(success)

    def restore_moments(
        self, mean: np.ndarray, deviation: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return both as they are."""
        return mean, deviation


type Link = Gaussian | Ordered | Binomial

MOST = np.iinfo(np.int32).max
LINKS = {"gaussian": Gaussian, "ordered": Ordered, "binomial": Binomial}


def num_initial_components(entries: Entries, num_components: int) -> int:
    """Return how many components a chain starts with: what the entries allow, at most half."""
    return min(
        max(1, len(entries.value) // (ENTRIES_PER_FACTOR * sum(entries.shape))), num_components // 2
    )


def _refuse_fractions(values: np.ndarray, name: str, entries: Entries) -> None:
    if (parts := ~(np.abs(values) <= MOST) | (values != np.floor(values))).any():
        i = int(np.argmax(parts))
        raise ValueError(
            f"{name}: found {values[i]:g} at row {entries.row[i]}, column {entries.column[i]}, "
            "wanted integers under this link."
        )
