"""The data sets of the gallery, by name.

    from gallery.datasets import describe, load, names

    data = load("wine")                               # data["x"], data["y"], data.feature_names,
                                                      data.licence, ...
    data = load("pinwheel", seed=1, num_classes=4)    # generators take options

Three kinds: tables that come with scikit-learn, generators, and sets that are downloaded from their
public source, checked and kept in the user's cache folder. `ZOO_DATA` names a folder that is
searched first; it is laid out as the cache is, a folder a set. Your own tables come in by
`gallery.tables.read_csv`.
"""

import difflib
import inspect
from typing import Any, NamedTuple

import numpy as np

from gallery._dataset import Dataset
from gallery._fetch import CorruptDataError, DataNotFoundError, fetch
from gallery._sources import SOURCES
from gallery.generators import GENERATORS
from gallery.generators import LICENCE as GENERATED

__all__ = [
    "CorruptDataError",
    "DataNotFoundError",
    "Dataset",
    "Summary",
    "describe",
    "load",
    "names",
]


class Summary(NamedTuple):
    """What is known of a data set before it is loaded."""

    name: str
    title: str
    where: str  # it comes from
    licence: str
    citation: str
    options: tuple[str, ...]  # keyword arguments of `load`


class _Bundled(NamedTuple):
    loader: str  # of sklearn.datasets
    title: str
    description: str
    citation: str
    url: str
    licence: str = "CC BY 4.0 (UCI Machine Learning Repository)"


BUNDLED = {
    "wine": _Bundled(
        "load_wine",
        "Wine, chemical analysis of three cultivars",
        "178 wines, 13 features, 3 classes.",
        "Aeberhard and Forina (1991), Wine, UCI Machine Learning Repository, doi 10.24432/C5PC7J",
        "https://archive.ics.uci.edu/dataset/109/wine",
    ),
    "wdbc": _Bundled(
        "load_breast_cancer",
        "Wisconsin diagnostic breast cancer",
        "569 tumours, 30 features of their cell nuclei; 0 malignant, 1 benign.",
        "Wolberg, Mangasarian, Street and Street (1995), Breast Cancer Wisconsin (Diagnostic), "
        "UCI, doi 10.24432/C5DW2B",
        "https://archive.ics.uci.edu/dataset/17/breast+cancer+wisconsin+diagnostic",
    ),
    "digits": _Bundled(
        "load_digits",
        "Handwritten digits of 8 x 8 pixels",
        "1797 images, 64 features 0 .. 16, 10 classes.",
        "Alpaydin and Kaynak (1998), Optical Recognition of Handwritten Digits, UCI, doi "
        "10.24432/C50P49",
        "https://archive.ics.uci.edu/dataset/80/optical+recognition+of+handwritten+digits",
    ),
    "diabetes": _Bundled(
        "load_diabetes",
        "Diabetes, progression of the disease within a year",
        "442 patients, 10 features; the target is a quantity, 25 .. 346.",
        "Efron, Hastie, Johnstone and Tibshirani (2004), Least angle regression, Annals of "
        "Statistics 32",
        "https://www4.stat.ncsu.edu/~boos/var.select/diabetes.html",
        "not stated; distributed with scikit-learn",
    ),
}


def names() -> tuple[str, ...]:
    """All data sets: the bundled ones, the generators, those that are downloaded.

    `describe` says more of each.
    """
    return (*BUNDLED, *sorted(GENERATORS), *SOURCES)


def describe(name: str) -> Summary:
    """Title, origin, licence and options of a data set; nothing is loaded."""
    _known(name)
    if name in BUNDLED:
        bundled = BUNDLED[name]
        return Summary(
            name, bundled.title, "bundled with scikit-learn", bundled.licence, bundled.citation, ()
        )
    if name in GENERATORS:
        first_line = (GENERATORS[name].__doc__ or "").splitlines()[0]
        return Summary(name, first_line, "generated", GENERATED, "", _options(name))
    source = SOURCES[name]
    return Summary(
        name, source.title, f"downloaded from {source.url}", source.licence, source.citation, ()
    )


def load(name: str, **options: Any) -> Dataset:
    """A data set by name. Only generators take options: their sizes and `seed`.

    A set that is neither in ZOO_DATA nor in the cache is downloaded. Without network that is a
    `DataNotFoundError`, which says where to get the file and where to put it; a file that is not
    what it should be is a `CorruptDataError`.
    """
    _known(name)
    unknown = sorted(set(options) - set(_options(name)))
    if unknown:
        valid = ", ".join(_options(name)) or "none"
        raise ValueError(
            f"data set {name!r} has no option {', '.join(map(repr, unknown))}; its options: {valid}"
        )
    if name in GENERATORS:
        return GENERATORS[name](**options)
    if name in BUNDLED:
        return _load_bundled(name)
    source = SOURCES[name]
    return Dataset(
        name=name,
        title=source.title,
        description=source.description,
        licence=source.licence,
        citation=source.citation,
        url=source.url,
        **source.view(fetch(source)),
    )


def _known(name: str) -> None:
    if name not in names():
        close = difflib.get_close_matches(name, names())
        hint = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
        raise ValueError(f"no data set {name!r}; {hint}there are {', '.join(names())}")


def _options(name: str) -> tuple[str, ...]:
    return tuple(inspect.signature(GENERATORS[name]).parameters) if name in GENERATORS else ()


def _load_bundled(name: str) -> Dataset:
    from sklearn import datasets

    bundled = BUNDLED[name]
    bunch = getattr(datasets, bundled.loader)()
    class_names = tuple(map(str, bunch.get("target_names", ())))
    return Dataset(
        name=name,
        title=bundled.title,
        arrays={
            "x": np.asarray(bunch.data, dtype=float),
            "y": np.asarray(bunch.target, dtype=np.int64 if class_names else float),
        },
        feature_names=tuple(map(str, bunch.feature_names)),
        class_names=class_names,
        description=bundled.description,
        licence=bundled.licence,
        citation=bundled.citation,
        url=bundled.url,
    )
