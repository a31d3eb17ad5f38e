"""What the entries of a matrix are, and how the model takes them: real numbers, integer levels, or
successes of trials.

link = LINKS["ordered"].learn(entries)       # from the entries of the first call
entries = link.coded(entries)                # as the model takes them; refused where they are none
                                             of the link's
start = link.start(entries)                  # of a probit: values of sites that explain the entries
                                             by their level alone
mean, variance = link.moments(distribution)  # of entries given the parameters of a draw
mean, deviation = link.told(mean, deviation) # in the unit of the data
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from scipy.special import ndtri

from gallery._entries import Entries
from gallery._units import Units
from zoo.bsvd import binomial_probit, gaussian, ordered_probit

__all__ = ["LINKS", "Binomial", "Gaussian", "Link", "Ordered", "num_told"]

# at the start; with more components than that, a chain would begin where entries are learned by
# heart
ENTRIES_A_FACTOR = 8


@dataclass(frozen=True)
class Gaussian:
    """Real entries, standardised."""

    shift: float
    scale: float
    model: Callable = gaussian
    wanted = "(rows, columns, values)"

    @classmethod
    def learn(cls, entries: Entries) -> "Gaussian":
        """Mean and deviation; entries that do not vary keep their unit."""
        units = Units.learn(entries.value)
        return cls(float(units.mean), float(units.scale))

    def coded(self, entries: Entries) -> Entries:
        """In standard deviations."""
        return entries._replace(value=(entries.value - self.shift) / self.scale)

    def decoded(self, values: np.ndarray) -> np.ndarray:
        """In the data's unit, in double precision, for the shift may be far more than the
        deviation.
        """
        return np.asarray(values, float) * self.scale + self.shift

    def moments(self, fn: Any) -> tuple[Any, Any]:
        """Mean and variance of an entry, noise included, in standard deviations and their
        squares.
        """
        return fn.loc, jnp.broadcast_to(fn.scale**2, fn.loc.shape)

    def told(self, mean: np.ndarray, deviation: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """In the data's unit."""
        return self.decoded(mean), deviation * self.scale


@dataclass(frozen=True)
class Ordered:
    """Integers of which only the order counts."""

    levels: tuple[int, ...]
    wanted = "(rows, columns, values)"

    @classmethod
    def learn(cls, entries: Entries) -> "Ordered":
        """The levels that occur."""
        _refuse_parts(entries.value, "values", entries)
        levels = tuple(np.unique(entries.value).astype(int).tolist())
        if len(levels) < 2:
            raise ValueError(f"values: found the one level {levels[0]}, wanted two at least.")
        return cls(levels)

    @property
    def model(self) -> Callable:
        """The model's link."""
        return partial(ordered_probit, num_levels=len(self.levels))

    def coded(self, entries: Entries) -> Entries:
        """0 for the lowest level."""
        _refuse_parts(entries.value, "values", entries)
        if (unknown := ~np.isin(entries.value, self.levels)).any():
            raise ValueError(
                f"values: found the level {entries.value[np.argmax(unknown)]:g}, wanted one of "
                f"those learned, {self.levels}."
            )
        return entries._replace(value=np.searchsorted(self.levels, entries.value))

    def start(self, entries: Entries) -> dict[str, Any]:
        """Cutpoints at the quantiles; the gaps as NUTS takes them, unconstrained."""
        share = np.bincount(entries.value.astype(int)) / len(entries.value)
        cutpoints = ndtri(np.cumsum(share)[:-1])
        gaps = {"gaps": np.log(np.diff(cutpoints))} if len(cutpoints) > 1 else {}
        return {"intercept": -cutpoints[0]} | gaps

    def decoded(self, values: np.ndarray) -> np.ndarray:
        """The levels."""
        return np.array(self.levels)[values]

    def moments(self, fn: Any) -> tuple[Any, Any]:
        """Mean and variance of a level."""
        share = jnp.exp(
            jnp.stack(
                [fn.log_prob(jnp.full(fn.batch_shape, code)) for code in range(len(self.levels))],
                axis=-1,
            )
        )
        levels = jnp.array(self.levels, share.dtype)
        mean = share @ levels
        return mean, jnp.sum(share * jnp.subtract.outer(mean, levels) ** 2, axis=-1)

    def told(self, mean: np.ndarray, deviation: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As they are."""
        return mean, deviation


@dataclass(frozen=True)
class Binomial:
    """Successes among trials."""

    model: Callable = binomial_probit
    wanted = "(rows, columns, successes, trials)"

    @classmethod
    def learn(cls, entries: Entries) -> "Binomial":
        """Nothing."""
        return cls()

    def coded(self, entries: Entries) -> Entries:
        """Integers, no more successes than trials."""
        trials = np.asarray(entries.trials)
        _refuse_parts(entries.value, "values", entries)
        _refuse_parts(trials, "trials", entries)
        if (bad := (entries.value < 0) | (entries.value > trials)).any():
            i = int(np.argmax(bad))
            place = f"row {entries.row[i]}, column {entries.column[i]}"
            raise ValueError(
                f"X: found {entries.value[i]:g} successes of {trials[i]:g} trials at {place}."
            )
        return entries._replace(value=entries.value.astype(int), trials=trials.astype(int))

    def start(self, entries: Entries) -> dict[str, Any]:
        """The probability of success of all; half a success and half a failure keep it off the
        ends.
        """
        return {
            "intercept": ndtri((entries.value.sum() + 0.5) / (np.asarray(entries.trials).sum() + 1))
        }

    def decoded(self, values: np.ndarray) -> np.ndarray:
        """As they are."""
        return values

    def moments(self, fn: Any) -> tuple[Any, Any]:
        """The probability of success, which a draw knows: trials are not counted."""
        success = jnp.exp(fn.log_prob(jnp.ones_like(fn.trials)))
        return success, jnp.zeros_like(success)

    def told(self, mean: np.ndarray, deviation: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As they are."""
        return mean, deviation


type Link = Gaussian | Ordered | Binomial

MOST = np.iinfo(np.int32).max
LINKS = {"gaussian": Gaussian, "ordered": Ordered, "binomial": Binomial}


def num_told(entries: Entries, num_components: int) -> int:
    """As many components as entries can tell of, to start from; at most half of those that there
    may be.
    """
    return min(
        max(1, len(entries.value) // (ENTRIES_A_FACTOR * sum(entries.shape))), num_components // 2
    )


def _refuse_parts(values: np.ndarray, name: str, entries: Entries) -> None:
    if (parts := ~(np.abs(values) <= MOST) | (values != np.floor(values))).any():
        i = int(np.argmax(parts))
        raise ValueError(
            f"{name}: found {values[i]:g} at row {entries.row[i]}, column {entries.column[i]}, "
            "wanted integers under this link."
        )
