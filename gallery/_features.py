"""Features of rows or columns, standardised; and which entries are known, as features.

features = Features.learn([given, missingness], size, "row_features")     # None where there are none
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
        """From those that are given, side by side: what was learned, and the features."""
        given = [_checked(part, size, name) for part in parts if part is not None]
        if not given:
            return None, None
        joined = np.concatenate(given, axis=1)
        found = cls(Standardiser.learn(joined), name)
        return found, found.coded(joined)

    def coded(self, features: Any) -> np.ndarray:
        """[item, feature] in standard deviations."""
        features = _checked(features, None, self.name)
        if features.shape[1] != len(self.standardiser.mean):
            raise ValueError(
                f"{self.name}: found {features.shape[1]} features, wanted {len(self.standardiser.mean)}."
            )
        return self.standardiser.standardise(features)[:, self.standardiser.varies]


def missingness(entries: Entries, width: int) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Leading singular vectors, of rows and of columns, of the matrix that is 1 where an entry
    is known.
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
