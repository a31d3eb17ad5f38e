"""Views: the stored arrays of each data set, as the arrays that a user wants.

Bits are unpacked, labels are 0 .. K - 1, and arrays have telling names. Each view takes the stored
arrays and returns the fields of a `Dataset` that depend on them.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from gallery.tables import Table, encode

__all__ = [
    "baseball",
    "bibtex",
    "labelled",
    "landmine",
    "letters",
    "mixed_table",
    "mnist",
    "mnist_signs",
    "movielens",
    "newsgroups",
    "oil",
    "omniglot",
]

Stored = Mapping[str, np.ndarray]

HORSE = (
    "surgery",
    "age",
    "rectal_temperature",
    "pulse",
    "respiratory_rate",
    "temperature_of_extremities",
    "peripheral_pulse",
    "mucous_membranes",
    "capillary_refill_time",
    "pain",
    "peristalsis",
    "abdominal_distension",
    "nasogastric_tube",
    "nasogastric_reflux",
    "nasogastric_reflux_ph",
    "rectal_examination",
    "abdomen",
    "packed_cell_volume",
    "total_protein",
    "abdominocentesis_appearance",
    "abdominocentesis_total_protein",
)


def labelled(
    stored: Stored, class_names: tuple[str, ...], feature_names: tuple[str, ...] = ()
) -> dict[str, Any]:
    """A table of numbers `X` and a label `y`; features without names are v1, v2, ..."""
    x = np.array(stored["X"], dtype=float, order="C")
    names = feature_names or tuple(f"v{i + 1}" for i in range(x.shape[1]))
    return {
        "arrays": {"x": x, "y": stored["y"].astype(np.int64)},
        "feature_names": names,
        "class_names": class_names,
    }


def newsgroups(stored: Stored) -> dict[str, Any]:
    """Words present in a document."""
    x = _unpack(stored["X_packed"], int(stored["n_features"]))
    return {
        "arrays": {"x": x, "y": stored["y"].astype(np.int64)},
        "feature_names": tuple(map(str, stored["words"])),
        "class_names": tuple(map(str, stored["groups"])),
    }


def landmine(stored: Stored) -> dict[str, Any]:
    """Clutter and mines; `task` counts the fields from 0."""
    return {
        "arrays": {
            "x": np.ascontiguousarray(stored["X"]),
            "y": stored["y"].astype(np.int64),
            "task": stored["task"].astype(np.int64) - 1,
        },
        "feature_names": tuple(f"v{i + 1}" for i in range(stored["X"].shape[1])),
        "class_names": ("clutter", "landmine"),
    }


def letters(stored: Stored) -> dict[str, Any]:
    """Binary 16 x 8 images, row by row."""
    return {
        "arrays": {
            "x": _unpack(stored["X_bits"], 128),
            "y": stored["y"].astype(np.int64),
            "word": stored["word"].astype(np.int64),
            "fold": stored["fold"].astype(np.int64),
        },
        "feature_names": tuple(f"pixel_{i}_{j}" for i in range(16) for j in range(8)),
        "class_names": tuple("abcdefghijklmnopqrstuvwxyz"),
    }


def mnist(stored: Stored) -> dict[str, Any]:
    """Images as bytes, with the usual split."""
    arrays = {name: stored[name] for name in ("x_train", "x_test")}
    arrays |= {name: stored[name].astype(np.int64) for name in ("y_train", "y_test")}
    return {"arrays": arrays, "class_names": tuple("0123456789")}


def mnist_signs(stored: Stored) -> dict[str, Any]:
    """Signs of principal components; the label is whether the digit is odd."""
    digit, num_features = stored["digit"].astype(np.int64), int(stored["n_features"])
    return {
        "arrays": {
            "x": _unpack(stored["X_packed"], num_features),
            "y": digit % 2,
            "digit": digit,
            "is_train": np.arange(len(digit)) < int(stored["n_train"]),
        },
        "feature_names": tuple(f"component {i + 1} > 0" for i in range(num_features)),
        "class_names": ("even", "odd"),
    }


def omniglot(stored: Stored) -> dict[str, Any]:
    """Images as bytes, ink 255; drawers 1 .. 20."""
    return {
        "arrays": {
            "x": stored["x"],
            "y": stored["y"].astype(np.int64),
            "drawer": stored["drawer"].astype(np.int64),
        },
        "class_names": tuple(map(str, stored["class_names"])),
    }


def oil(stored: Stored) -> dict[str, Any]:
    """Three flow regimes, coded 1, 2, 3 at the origin."""
    return {
        "arrays": {"x": np.ascontiguousarray(stored["X"]), "y": stored["y"].astype(np.int64) - 1},
        "feature_names": tuple(f"v{i + 1}" for i in range(stored["X"].shape[1])),
        "class_names": ("regime 1", "regime 2", "regime 3"),
    }


def bibtex(stored: Stored) -> dict[str, Any]:
    """Index arrays of sparse 0/1 rows: the ones of row i are indices[indptr[i] : indptr[i + 1]]."""
    arrays = {
        name: array.astype(np.int64) for name, array in stored.items() if not name.startswith("n_")
    }
    arrays |= {"num_features": stored["n_features"], "num_labels": stored["n_labels"]}
    return {"arrays": arrays}


def movielens(stored: Stored) -> dict[str, Any]:
    """Ratings as entries (row, column, value) of the matrix user x movie.

    Beside them is what is known of users and movies.
    """
    return {
        "arrays": {
            "rows": stored["user"].astype(np.int64),
            "cols": stored["movie"].astype(np.int64),
            "values": stored["rating"].astype(float),
            "user_is_male": stored["user_gender_male"].astype(bool),
            "user_age": stored["user_age_code"].astype(np.int64),
            "user_occupation": stored["user_occupation"].astype(np.int64),
            "movie_genres": stored["movie_genre"].astype(float),
            "movie_is_listed": stored["movie_listed"].astype(bool),
            "genre_names": stored["genre_names"],
        }
    }


def baseball(stored: Stored) -> dict[str, Any]:
    """Counts for each year, batter and pitcher."""
    names = {"pa": "plate_appearances", "ab": "at_bats", "h": "hits", "events2008": "plays_2008"}
    return {
        "arrays": {
            names.get(name, name): array if name.endswith("_id") else array.astype(np.int64)
            for name, array in stored.items()
        }
    }


def mixed_table(stored: Stored, target: str = "Class", categorical: bool = False) -> dict[str, Any]:
    """A table of texts, by the rules of `gallery.tables`; a column `Id` is left out."""
    rows = stored["cells"].tolist()
    table = Table(
        "the data set's table", tuple(map(str, stored["header"])), rows, range(2, len(rows) + 2)
    )
    coded = encode(table, target, categorical=categorical, drop=("Id",))
    return {
        "arrays": coded.arrays,
        "feature_names": coded.feature_names,
        "class_names": coded.class_names,
        "target_name": target,
        "categories": coded.categories,
    }


def _unpack(packed: np.ndarray, num_features: int) -> np.ndarray:
    return np.unpackbits(packed, axis=1)[:, :num_features].astype(float)
