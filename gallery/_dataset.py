"""What `load`, `read_csv` and the generators return.

    data = load("wine")
    data["x"], data["y"]          or  data.x, data.y
    model(**data.select("x", "y"))

`x` and `y` are the argument names of the zoo's models: `x` is [row, feature] float64 with NaN where
a value is missing, `y` holds 0 .. K-1 and -1 where a row has no label. A set that is not such a
table has arrays that name themselves.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

__all__ = ["Dataset"]


@dataclass(frozen=True, eq=False)  # arrays have no single truth to compare by
class Dataset:
    """Arrays, and all that must be known before they are used: names, licence, whom to cite."""

    name: str
    title: str
    arrays: Mapping[str, np.ndarray]
    feature_names: tuple[str, ...] = ()
    class_names: tuple[str, ...] = ()
    target_name: str = ""  # the column of a table that `y` holds
    # column -> what its codes 0, 1, ... stand for
    categories: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # column of texts -> its texts, where columns of 0 and 1 have taken its place
    dummies: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # columns that hold days since 1970, because their cells were dates
    dates: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()  # of the rows, where a column names them
    notes: tuple[str, ...] = ()  # how a file was read where that could be otherwise
    description: str = ""
    licence: str = ""
    citation: str = ""
    url: str = ""

    def __getitem__(self, name: str) -> np.ndarray:
        """The array `name`; an unknown name is an error that lists those there are."""
        if name not in self.arrays:
            raise KeyError(
                f"data set {self.name!r} has no array {name!r}; it has {', '.join(self.arrays)}"
            )
        return self.arrays[name]

    def __getattr__(self, name: str) -> np.ndarray:
        """`data.x` is `data["x"]`."""
        # asked by copy and pickle, before there are arrays
        if name.startswith("_") or "arrays" not in self.__dict__:
            raise AttributeError(name)
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(error.args[0]) from None

    def __repr__(self) -> str:
        shapes = ", ".join(
            f"{name} {list(array.shape)} {array.dtype}" for name, array in self.arrays.items()
        )
        return f"Dataset({self.name!r}: {shapes})"

    def select(self, *names: str) -> dict[str, np.ndarray]:
        """Some of the arrays, as keyword arguments of a model."""
        return {name: self[name] for name in names}
