"""What the entries of a matrix are, and how the model takes them: real numbers, integer levels, or successes of trials.

link = LINKS["ordered"].learn(entries)       # from the entries of the first call
entries = link.coded(entries)                # as the model takes them; refused where they are none of the link's
start = link.start(entries)                  # of a probit: values of sites that explain the entries by their level alone
mean, square = link.moments(distribution)    # of entries given the parameters of a draw, in the unit of the data
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from scipy.special import ndtri

from gallery._entries import Entries
from zoo.bsvd import binomial_probit, gaussian, ordered_probit

__all__ = ["LINKS", "Binomial", "Gaussian", "Link", "Ordered"]


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
        return cls(float(entries.value.mean()), float(entries.value.std()) or 1.0)

    def coded(self, entries: Entries) -> Entries:
        """In standard deviations."""
        return entries._replace(value=(entries.value - self.shift) / self.scale)

    def decoded(self, values: np.ndarray) -> np.ndarray:
        """In the data's unit."""
        return values * self.scale + self.shift

    def moments(self, fn: Any) -> tuple[Any, Any]:
        """Mean and mean square of an entry, noise included."""
        mean = self.decoded(fn.loc)
        return mean, mean**2 + (fn.scale * self.scale) ** 2


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
            raise ValueError(f"values: found the level {entries.value[np.argmax(unknown)]:g}, wanted one of those learned, {self.levels}.")
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
        """Mean and mean square of a level."""
        share = jnp.exp(jnp.stack([fn.log_prob(jnp.full(fn.batch_shape, code)) for code in range(len(self.levels))], axis=-1))
        levels = jnp.array(self.levels, share.dtype)
        return share @ levels, share @ levels**2


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
            raise ValueError(f"X: found {entries.value[i]:g} successes of {trials[i]:g} trials at {place}.")
        return entries._replace(value=entries.value.astype(int), trials=trials.astype(int))

    def start(self, entries: Entries) -> dict[str, Any]:
        """The probability of success of all; half a success and half a failure keep it off the ends."""
        return {"intercept": ndtri((entries.value.sum() + 0.5) / (np.asarray(entries.trials).sum() + 1))}

    def decoded(self, values: np.ndarray) -> np.ndarray:
        """As they are."""
        return values

    def moments(self, fn: Any) -> tuple[Any, Any]:
        """Mean and mean square of the probability of success, over draws alone: trials are not counted."""
        success = jnp.exp(fn.log_prob(jnp.ones_like(fn.trials)))
        return success, success**2


type Link = Gaussian | Ordered | Binomial

LINKS = {"gaussian": Gaussian, "ordered": Ordered, "binomial": Binomial}


def _refuse_parts(values: np.ndarray, name: str, entries: Entries) -> None:
    if (parts := values != np.floor(values)).any():
        i = int(np.argmax(parts))
        raise ValueError(
            f"{name}: found {values[i]:g} at row {entries.row[i]}, column {entries.column[i]}, wanted integers under this link."
        )
