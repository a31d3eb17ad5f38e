"""Standardised features of rows or columns, and features of which entries are observed.

features, x = Features.learn([given, missingness], size, "row_features")
features.coded(given)
"""

from typing import Any, NamedTuple

import numpy as np
from scipy.sparse import coo_matrix
from scipy.sparse.linalg import svds

from gallery._entries import Entries
from gallery._standardise import Standardiser

__all__ = ["Features", "missingness"]


class Features(NamedTuple):
    """A standardiser of features, and the argument's name; constant columns are left out."""

    standardiser: Standardiser
    name: str

    @classmethod
    def learn(
        cls, parts: list[Any], size: int, name: str
    ) -> "tuple[Features, np.ndarray] | tuple[None, None]":
        """Learn from features that are joined along columns.

        Args:
            parts: arrays [item, feature], or None.
            size: number of items.
            name: the argument's name, for error messages.

        Returns:
            The standardiser, and the standardised features; (None, None) where all parts are None.
        """
        given = [_checked(part, size, name) for part in parts if part is not None]
        if not given:
            return None, None
        joined = np.concatenate(given, axis=1)
        found = cls(Standardiser.learn(joined), name)
        return found, found.coded(joined)

    def coded(self, features: Any) -> np.ndarray:
        """Standardise features [item, feature] and leave out constant ones."""
        features = _checked(features, None, self.name)
        if features.shape[1] != len(self.standardiser.mean):
            wanted = len(self.standardiser.mean)
            raise ValueError(f"{self.name}: found {features.shape[1]} features, wanted {wanted}.")
        z = self.standardiser.standardise(features)
        return z[:, self.standardiser.varies]


def missingness(entries: Entries, width: int) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Return leading singular vectors of the matrix that is 1 where an entry is observed.

    Args:
        entries: the observed entries.
        width: number of singular vectors.

    Returns:
        Vectors [row, width] and [column, width]; None where width is 0.
    """
    if width == 0:
        return None, None
    if not 0 < width < min(entries.shape):
        raise ValueError(
            f"missingness: found {width}, wanted 0 to {min(entries.shape) - 1}, less than rows and "
            "columns."
        )
    known = coo_matrix(
        (np.ones(len(entries.row)), (entries.row, entries.column)), shape=entries.shape
    )
    left, _, right = svds(known.tocsr(), k=width, random_state=0)
    return left, right.T


def _checked(features: Any, size: int | None, name: str) -> np.ndarray:
    features = np.asarray(features, float)
    if (
        features.ndim != 2
        or (size is not None and len(features) != size)
        or not np.isfinite(features).all()
    ):
        raise ValueError(
            f"{name}: found shape {features.shape}, wanted ({'items' if size is None else size}, "
            "features), all finite."
        )
    return features
