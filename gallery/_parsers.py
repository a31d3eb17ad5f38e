"""Downloaded bytes to the arrays that the cache holds.

Each parser is a pure function of the raw files, by their names, and each is tested on a small
fixture of the raw format. What it returns must equal, dtype and all, the content whose checksum
stands in `_sources`; the arrays that a user sees are made from it by `_views`. SciPy and h5py are
imported where they are used, to keep `zoo --help` quick.
"""

import csv
import gzip
import io
import re
import zipfile
from collections.abc import Mapping, Sequence

import numpy as np

__all__ = [
    "breast_cancer",
    "horse_colic",
    "house_votes",
    "idx_images",
    "ionosphere",
    "jld2_oil",
    "landmine_mat",
    "letters",
    "movielens",
    "multilabel_arff",
    "newsgroups_mat",
    "pima_missing",
    "pima_table",
    "soybean",
    "zoo_animals",
]

Raw = Mapping[str, bytes]
Arrays = dict[str, np.ndarray]

PIMA = ("pregnant", "glucose", "pressure", "triceps", "insulin", "mass", "pedigree", "age")
PIMA_ZERO_MEANS_MISSING = (1, 2, 3, 4, 5)
BREAST = (
    "Id Cl.thickness Cell.size Cell.shape Marg.adhesion Epith.c.size Bare.nuclei Bl.cromatin "
    "Normal.nucleoli Mitoses Class"
)
SOYBEAN = (
    "Class date plant.stand precip temp hail crop.hist area.dam sever seed.tmt germ plant.growth "
    "leaves leaf.halo leaf.marg "
    "leaf.size leaf.shread leaf.malf leaf.mild stem lodging stem.cankers canker.lesion "
    "fruiting.bodies ext.decay mycelium "
    "int.discolor sclerotia fruit.pods fruit.spots seed mold.growth seed.discolor seed.size "
    "shriveling roots"
)
ZOO = (
    "hair feathers eggs milk airborne aquatic predator toothed backbone breathes venomous fins "
    "legs tail domestic catsize type"
)
ZOO_TYPES = ("mammal", "bird", "reptile", "fish", "amphibian", "insect", "mollusc.et.al")
NUM_BIBTEX_LABELS = 159


def idx_images(raw: Raw) -> Arrays:
    """The four gzipped idx files of MNIST."""
    names = {
        "x_train": "train-images",
        "y_train": "train-labels",
        "x_test": "t10k-images",
        "y_test": "t10k-labels",
    }
    files = {
        name: next(data for file, data in raw.items() if file.startswith(start))
        for name, start in names.items()
    }
    return {name: _idx(gzip.decompress(data)) for name, data in files.items()}


def _idx(data: bytes) -> np.ndarray:
    """One idx file of bytes: zero, zero, 8 for uint8, the number of axes, each length as a
    big-endian int, the values.
    """
    if data[:3] != b"\0\0\x08":
        raise ValueError(f"not an idx file of bytes: it starts with {data[:4]!r}")
    num_axes = data[3]
    shape = np.frombuffer(data, ">u4", num_axes, offset=4).astype(int)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * num_axes).reshape(shape).copy()


def newsgroups_mat(raw: Raw) -> Arrays:
    """20news_w100.mat: `documents` [word, document] sparse, `newsgroups` 1..4, the words and the
    groups' names.
    """
    content = _mat(raw)
    present = content["documents"].T.toarray() > 0
    return {
        "X_packed": np.packbits(present, axis=1),
        "n_features": np.array(present.shape[1], dtype=np.int64),
        "y": (np.ravel(content["newsgroups"]) - 1).astype(np.uint8),
        "words": _texts(content["wordlist"]),
        "groups": _texts(content["groupnames"]),
    }


def landmine_mat(raw: Raw) -> Arrays:
    """LandmineData.mat: cells `feature` [n, 9] and `label` [n, 1], one a field."""
    content = _mat(raw)
    features = [np.asarray(cell, dtype=float) for cell in content["feature"].ravel()]
    labels = [np.ravel(cell) for cell in content["label"].ravel()]
    return {
        "X": np.concatenate(features),
        "y": np.concatenate(labels).astype(np.int8),
        "task": np.repeat(np.arange(1, len(labels) + 1), [len(label) for label in labels]).astype(
            np.int16
        ),
    }


def _mat(raw: Raw) -> dict:
    from scipy.io import loadmat

    (data,) = raw.values()
    return loadmat(io.BytesIO(data), spmatrix=False)


def _texts(cells: np.ndarray) -> np.ndarray:
    """A MATLAB cell array of texts as an array of texts."""
    return np.array([str(np.ravel(cell)[0]) for cell in np.ravel(cells)])


def jld2_oil(raw: Raw) -> Arrays:
    """oil.jld2, which is HDF5: `T` [row, feature] in Julia's column order (HDF5 sees it
    transposed) and `labels` 1..3.
    """
    import h5py

    (data,) = raw.values()
    with h5py.File(io.BytesIO(data), "r") as file:
        return {
            "X": np.asarray(file["T"][()], dtype=float).T,
            "y": np.ravel(file["labels"][()]).astype(np.int8),
        }


def multilabel_arff(raw: Raw, num_labels: int = NUM_BIBTEX_LABELS) -> Arrays:
    """bibtex-train.arff and bibtex-test.arff: sparse 0/1 rows, the last attributes being the
    labels.
    """
    arrays: Arrays = {}
    for split in ("train", "test"):
        text = next(data for name, data in raw.items() if split in name).decode()
        num_attributes, rows = _sparse_arff(text)
        num_features = num_attributes - num_labels
        features = [[i for i in row if i < num_features] for row in rows]
        labels = [[i - num_features for i in row if i >= num_features] for row in rows]
        for kind, values in (("x", features), ("labels", labels)):
            arrays[f"{kind}_{split}_indptr"] = np.cumsum([0, *map(len, values)]).astype(np.int32)
            arrays[f"{kind}_{split}_indices"] = np.array(
                [i for row in values for i in row], dtype=np.int16
            )
        arrays["n_features"], arrays["n_labels"] = (
            np.array(num_features, dtype=np.int64),
            np.array(num_labels, dtype=np.int64),
        )
    return arrays


def _sparse_arff(text: str) -> tuple[int, list[list[int]]]:
    """The number of attributes, and for each row the indices of its ones."""
    head, _, body = re.split(r"(?im)^(@data)\s*$", text, maxsplit=1)
    num_attributes = len(re.findall(r"(?im)^@attribute\s", head))
    rows = []
    for line in filter(None, map(str.strip, body.splitlines())):
        if line.startswith("%"):
            continue
        pairs = [pair.split() for pair in line.strip("{}").split(",") if pair.strip()]
        if not line.startswith("{") or any(value != "1" for _, value in pairs):
            raise ValueError(f"not a sparse row of ones: {line[:60]!r}")
        rows.append(sorted(int(index) for index, _ in pairs))
    return num_attributes, rows


def letters(raw: Raw) -> Arrays:
    """letter.data.gz: id, letter, next id (-1 ends a word), word id, position, fold, 128 pixels;
    tabs between.
    """
    (data,) = raw.values()
    rows = [
        line.split() for line in gzip.decompress(data).decode("ascii").splitlines() if line.strip()
    ]
    ends = np.array([row[2] == "-1" for row in rows])
    pixels = np.array([row[6:134] for row in rows]).astype(np.uint8)
    return {
        "X_bits": np.packbits(pixels, axis=1),
        "y": np.array([ord(row[1]) - ord("a") for row in rows], dtype=np.int8),
        "word": np.concatenate([[0], np.cumsum(ends)[:-1]]).astype(np.int32),
        "fold": np.array([row[5] for row in rows]).astype(np.int8),
    }


def movielens(raw: Raw) -> Arrays:
    """ml-1m.zip: ratings.dat, users.dat, movies.dat, `::` between fields; ids count from 1 and
    are made to count from 0.
    """
    (data,) = raw.values()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        ratings, users, movies = (
            [
                line.split("::")
                for line in archive.read(f"ml-1m/{name}.dat").decode("latin-1").splitlines()
                if line
            ]
            for name in ("ratings", "users", "movies")
        )
    triples = np.array([row[:3] for row in ratings]).astype(np.int64)
    triples = triples[np.lexsort((triples[:, 1], triples[:, 0]))]
    genres = sorted({genre for row in movies for genre in row[2].split("|")})
    num_movies = max(int(row[0]) for row in movies)
    genre, listed = np.zeros((num_movies, len(genres)), np.uint8), np.zeros(num_movies, np.uint8)
    for movie, _, names in movies:
        listed[int(movie) - 1] = 1
        genre[int(movie) - 1, [genres.index(name) for name in names.split("|")]] = 1
    users = sorted(users, key=lambda row: int(row[0]))
    return {
        "user": (triples[:, 0] - 1).astype(np.uint16),
        "movie": (triples[:, 1] - 1).astype(np.uint16),
        "rating": triples[:, 2].astype(np.uint8),
        "user_gender_male": np.array([row[1] == "M" for row in users], dtype=np.uint8),
        "user_age_code": np.array([int(row[2]) for row in users], dtype=np.uint8),
        "user_occupation": np.array([int(row[3]) for row in users], dtype=np.uint8),
        "movie_genre": genre,
        "movie_listed": listed,
        "genre_names": np.array(genres),
    }


def horse_colic(raw: Raw) -> Arrays:
    """horse-colic.data: 28 fields between blanks, ? missing.

    Kept are the first 22 but the hospital number (the third); the label is field 24, surgical
    lesion (1 yes, 2 no). The others would give the label away.
    """
    rows = [line.split() for line in _text(raw).splitlines() if line.strip()]
    kept = [column for column in range(22) if column != 2]
    return {
        "X": np.array(
            [
                [np.nan if row[column] == "?" else float(row[column]) for column in kept]
                for row in rows
            ]
        ),
        "y": np.array([row[23] == "1" for row in rows], dtype=np.int8),
        "source_columns": np.array(kept, dtype=np.int64),
    }


def ionosphere(raw: Raw) -> Arrays:
    """ionosphere.data: 34 numbers and g or b."""
    rows = _csv(_text(raw))
    return {
        "X": np.array([row[:34] for row in rows]).astype(float),
        "y": np.array([row[34] == "b" for row in rows], dtype=np.int8),
    }


def pima_missing(raw: Raw) -> Arrays:
    """pima-indians-diabetes.csv: 8 numbers and 0 or 1; a zero of five columns cannot be and is
    missing.
    """
    rows = _pima_rows(raw)
    x = np.array([row[:8] for row in rows]).astype(float)
    for column in PIMA_ZERO_MEANS_MISSING:
        x[x[:, column] == 0, column] = np.nan
    return {
        "X": x,
        "y": np.array([row[8] == "1" for row in rows], dtype=np.int8),
        "names": np.array(PIMA),
    }


def pima_table(raw: Raw) -> Arrays:
    """The same file as a table of texts."""
    rows = []
    for row in _pima_rows(raw):
        cells = [str(float(cell)) for cell in row[:8]]
        cells = [
            "" if i in PIMA_ZERO_MEANS_MISSING and float(cell) == 0 else cell
            for i, cell in enumerate(cells)
        ]
        rows.append([*cells, "pos" if row[8] == "1" else "neg"])
    return _table([*PIMA, "diabetes"], rows)


def _pima_rows(raw: Raw) -> list[list[str]]:
    """The rows of numbers; some copies have a header, or comments that start with #."""
    return [row for row in _csv(_text(raw)) if re.fullmatch(r"[0-9.]+", row[0])]


def house_votes(raw: Raw) -> Arrays:
    """house-votes-84.data: the party, then 16 votes y, n or ?."""
    return _table(["Class", *(f"V{i}" for i in range(1, 17))], _csv(_text(raw)))


def breast_cancer(raw: Raw) -> Arrays:
    """breast-cancer-wisconsin.data: id, nine scores, 2 for benign and 4 for malignant."""
    names = {"2": "benign", "4": "malignant"}
    return _table(BREAST.split(), [[*row[:-1], names[row[-1]]] for row in _csv(_text(raw))])


def soybean(raw: Raw) -> Arrays:
    """soybean-large.data and then soybean-large.test: the disease and 35 coded attributes."""
    files = [data.decode("ascii") for name, data in sorted(raw.items())]
    return _table(SOYBEAN.split(), [row for text in files for row in _csv(text)])


def zoo_animals(raw: Raw) -> Arrays:
    """zoo.data: the animal's name (left out), 15 booleans and the number of legs, a type 1..7."""
    header = ZOO.split()
    legs = header.index("legs")
    rows = []
    for row in _csv(_text(raw)):
        cells = [cell if i == legs else str(cell == "1") for i, cell in enumerate(row[1:-1])]
        rows.append([*cells, ZOO_TYPES[int(row[-1]) - 1]])
    return _table(header, rows)


def _text(raw: Raw) -> str:
    (data,) = raw.values()
    return data.decode("ascii")


def _csv(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in row] for row in csv.reader(io.StringIO(text)) if row]


def _table(header: Sequence[str], rows: list[list[str]]) -> Arrays:
    """A table of texts as arrays; a ? is a missing cell."""
    return {
        "header": np.array(header),
        "cells": np.array([["" if cell == "?" else cell for cell in row] for row in rows]),
    }
