"""Standardising: columns with mean 0 and standard deviation 1, NaN left out.

    standardiser = Standardiser.learn(x)
    z = standardiser.standardise(other)     # other rows, on the same scale
    standardiser.restore(z)                 # and back

A constant column keeps its scale. A column varies where its numbers differ and their standard
deviation is above rounding error, `ROUNDING` times the largest number. Numbers of any size have a
standard deviation here, also where their squares overflow or underflow.
"""

from typing import Any, NamedTuple

import numpy as np

__all__ = ["ROUNDING", "Standardiser"]

ROUNDING = 1e-13


class Standardiser(NamedTuple):
    """Means and standard deviations of columns, [column]; scalars for a single column."""

    mean: Any
    scale: Any  # 1 for a constant column
    varies: Any = True

    @classmethod
    def learn(cls, x: np.ndarray) -> "Standardiser":
        """Learn mean and standard deviation of columns.

        Args:
            x: [row, column], or [row] for one column; NaN where missing.

        Returns:
            The standardiser; the mean of a column without a number is 0.
        """
        seen = ~np.isnan(x)
        count = np.maximum(seen.sum(0), 1)
        largest = np.abs(np.where(seen, x, 0)).max(0)
        # numbers are divided by a power of two, which rounds nothing
        power = np.ldexp(1.0, np.frexp(largest)[1] - 1)
        parts = np.where(seen, x, 0) / power
        mean = parts.sum(0) / count
        scale = power * np.sqrt((np.where(seen, parts - mean, 0) ** 2).sum(0) / count)
        differs = np.where(seen, x, -np.inf).max(0) > np.where(seen, x, np.inf).min(0)
        varies = differs & (scale > ROUNDING * largest)
        return cls(mean * power, np.where(varies, scale, 1.0), varies)

    @property
    def kept(self) -> np.ndarray:
        """Indices of the columns that vary; the first column where none does."""
        places = np.flatnonzero(self.varies)
        return places if len(places) else np.zeros(1, int)

    def standardise(self, x: np.ndarray) -> np.ndarray:
        """Return standard deviations from the mean."""
        return (x - self.mean) / self.scale

    def restore(self, z: np.ndarray) -> np.ndarray:
        """Return standardised numbers on the scale of the data; the inverse of `standardise`."""
        return z * self.scale + self.mean

    def standardise_kept(self, x: np.ndarray, limit: float = np.inf) -> np.ndarray:
        """Standardise the `kept` columns.

        Args:
            x: [row, column], NaN where missing.
            limit: largest absolute value of the result; what is farther is cut.

        Returns:
            Standardised numbers [row, kept column].
        """
        with np.errstate(over="ignore"):
            return np.clip(self.standardise(x)[:, self.kept], -limit, limit)

    def restore_kept(self, z: np.ndarray) -> np.ndarray:
        """Return all columns on the scale of the data, constant ones filled with their mean."""
        whole = np.zeros((len(z), len(self.mean)))
        whole[:, self.kept] = z
        return self.restore(whole)
