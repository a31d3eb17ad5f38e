"""Columns in units of their own: mean 0 and standard deviation 1 over the rows that were learned
from.

    units = Units.learn(x)      # NaN, where missing, is left out
    units.coded(other)          # other rows, in these units
    units.decoded(coded)        # and back

A column that does not vary says nothing and keeps its unit. It varies where not all of its numbers
are equal and their standard deviation is more than rounding makes of a constant: `ROUNDING` times
the largest of them. Numbers of any size have a deviation, although squares of very large and of
very small ones are no numbers.
"""

from typing import Any, NamedTuple

import numpy as np

__all__ = ["Units"]

ROUNDING = 1e-13


class Units(NamedTuple):
    """Means and standard deviations of columns, [column]; or of one, scalars."""

    mean: Any
    scale: Any  # 1 where a column does not vary
    varies: Any = True

    @classmethod
    def learn(cls, x: np.ndarray) -> "Units":
        """Those of [row, column] or [row]; the mean of a column without a number is 0."""
        seen = ~np.isnan(x)
        count, largest = np.maximum(seen.sum(0), 1), np.abs(np.where(seen, x, 0)).max(0)
        # of two, by which numbers are divided without rounding
        power = np.ldexp(1.0, np.frexp(largest)[1] - 1)
        parts = np.where(seen, x, 0) / power
        mean = parts.sum(0) / count
        scale = power * np.sqrt((np.where(seen, parts - mean, 0) ** 2).sum(0) / count)
        differs = np.where(seen, x, -np.inf).max(0) > np.where(seen, x, np.inf).min(0)
        varies = differs & (scale > ROUNDING * largest)
        return cls(mean * power, np.where(varies, scale, 1.0), varies)

    @property
    def kept(self) -> np.ndarray:
        """Places of the columns that vary; of the first, where none does."""
        places = np.flatnonzero(self.varies)
        return places if len(places) else np.zeros(1, int)

    def of(self, columns: np.ndarray) -> "Units":
        """The units of some columns."""
        return Units(self.mean[columns], self.scale[columns], self.varies[columns])

    def coded(self, x: np.ndarray) -> np.ndarray:
        """In standard deviations from the mean."""
        return (x - self.mean) / self.scale

    def decoded(self, coded: np.ndarray) -> np.ndarray:
        """In the units of the rows that were learned from."""
        return coded * self.scale + self.mean
