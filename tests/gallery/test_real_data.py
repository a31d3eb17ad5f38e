"""The real copies, read where ZOO_DATA names them: sizes, classes and shares of missing cells as
their sources state.
"""

import os
from pathlib import Path

import numpy as np
import pytest

from gallery import _fetch
from gallery._sources import SOURCES
from gallery.datasets import load


def files_in(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


needs_copies = pytest.mark.skipif(
    not os.environ.get("ZOO_DATA"), reason="set ZOO_DATA to a folder with copies of the data sets"
)

SIZES = {  # rows, features, rows of each class, share of missing cells
    "20news_w100": (16242, 100, [4605, 3519, 2657, 5461], 0),
    "horse_colic": (300, 21, [109, 191], 0.255),
    "ionosphere": (351, 34, [225, 126], 0),
    "landmine": (14820, 9, [13916, 904], 0),
    "letters16x8": (52152, 128, None, 0),
    "mnist_pca50": (70000, 50, None, 0),
    "oilflow12": (1000, 12, [343, 316, 341], 0),
    "pima_missing": (768, 8, [500, 268], 0.106),
    "house_votes": (435, 16, [267, 168], 392 / (435 * 16)),
    "breast_cancer": (699, 9, [458, 241], 16 / (699 * 9)),
    "soybean": (683, 35, None, 2337 / (683 * 35)),
    "zoo_animals": (101, 16, [4, 20, 13, 8, 41, 10, 5], 0),
    "pima": (768, 8, [500, 268], 652 / (768 * 8)),
}


@needs_copies
@pytest.mark.parametrize("name", SIZES)
def test_real_tables(name):
    data = load(name)
    rows, features, counts, missing = SIZES[name]
    assert data.x.shape == (rows, features)
    assert data.x.dtype == np.float64
    assert np.isnan(data.x).mean() == pytest.approx(missing, abs=5e-4)
    assert data.y.shape == (rows,)
    assert data.y.dtype == np.int64
    assert len(data.feature_names) == features
    assert set(data.y) == set(range(len(data.class_names)))
    assert counts is None or list(np.bincount(data.y)) == counts


@needs_copies
def test_real_tables_in_detail():
    assert load("20news_w100").x.mean() == pytest.approx(0.0403, abs=5e-5)
    letters = load("letters16x8")
    count = dict(zip(letters.class_names, np.bincount(letters.y), strict=True))
    assert (count["a"], count["c"], count["n"], count["z"]) == (4034, 2114, 5024, 1094)
    landmine = load("landmine")
    assert list(np.bincount(landmine.task)[[0, 3, 28]]) == [690, 508, 449]
    assert landmine.y[landmine.task == 28].sum() == 42
    assert list(np.isnan(load("pima_missing").x).sum(axis=0)) == [0, 5, 35, 227, 374, 11, 0, 0]
    np.testing.assert_array_equal(load("pima").x, load("pima_missing").x)
    assert not load("ionosphere").x[:, 1].any()
    votes, soy, animals = load("house_votes"), load("soybean"), load("zoo_animals")
    assert votes.categories["V1"] == ("n", "y")
    assert len(soy.class_names) == 19
    assert soy.categories["date"] == tuple("0123456")
    assert set(soy.categories) == set(soy.feature_names)
    assert animals.categories == {}
    assert set(animals.x[:, animals.feature_names.index("legs")]) == {0, 2, 4, 5, 6, 8}


@needs_copies
def test_real_images():
    mnist = load("mnist")
    assert mnist.x_train.shape == (60000, 28, 28)
    assert mnist.x_train.mean() / 255 == pytest.approx(0.13066, abs=5e-6)
    counts = np.bincount(np.concatenate([mnist.y_train, mnist.y_test]))
    assert list(counts) == [6903, 7877, 6990, 7141, 6824, 6313, 6876, 7293, 6825, 6958]
    signs = load("mnist_pca50")
    assert list(np.bincount(signs.digit)) == list(counts)
    assert signs.is_train.sum() == 60000
    omniglot = load("omniglot")
    assert omniglot.x.shape == (32460, 28, 28)
    assert set(np.bincount(omniglot.y)) == {20}
    assert len(omniglot.class_names) == 1623
    assert np.count_nonzero(omniglot.drawer <= 16) == 25968


@needs_copies
@pytest.mark.slow
def test_component_signs_recomputed_from_the_images(tmp_path, monkeypatch):
    mnist = SOURCES["mnist"]
    (tmp_path / "mnist").mkdir()
    os.symlink(Path(os.environ["ZOO_DATA"], mnist.path).resolve(), tmp_path / mnist.path)
    copy_of_signs = load("mnist_pca50").x
    monkeypatch.setenv("ZOO_DATA", str(tmp_path))
    monkeypatch.setattr(_fetch, "cache_folder", lambda: tmp_path / "cache")
    assert np.count_nonzero(load("mnist_pca50").x != copy_of_signs) <= 1
    assert files_in(tmp_path / "cache") == ["mnist_pca50/mnist_pca50_sign.npz"]


@needs_copies
def test_real_sparse_rows_and_ratings():
    bibtex = load("bibtex")
    assert len(bibtex.x_train_indptr) == 4881
    assert len(bibtex.x_test_indptr) == 2516
    first = bibtex.labels_train_indices[bibtex.labels_train_indptr[:-1]]
    assert len(set(first)) == 146
    first_test = bibtex.labels_test_indices[bibtex.labels_test_indptr[:-1]]
    assert np.isin(first_test, first).sum() == 2512
    films = load("movielens_1m")
    assert list(np.bincount(films["values"].astype(int))[1:]) == [
        56174,
        107557,
        261197,
        348971,
        226310,
    ]
    assert (films.rows.max(), films.cols.max()) == (6039, 3951)
    assert films.movie_is_listed.sum() == 3883


@needs_copies
def test_real_baseball():
    data = load("mlb_batter_pitcher")
    total = {
        year: (data.at_bats[data.year == year].sum(), data.hits[data.year == year].sum())
        for year in (2007, 2008)
    }
    assert total == {2007: (167783, 44977), 2008: (166714, 43972)}
    last = data.year == 2008
    for first, num_batters, num_pitchers in ((2008, 983, 651), (2007, 686, 479), (2003, 759, 528)):
        before = (data.year >= first) & (data.year <= max(first, 2007))
        seen = (
            last
            & np.isin(data.batter, data.batter[before])
            & np.isin(data.pitcher, data.pitcher[before])
        )
        assert (len(set(data.batter[seen])), len(set(data.pitcher[seen]))) == (
            num_batters,
            num_pitchers,
        )
    assert data.plays_2008[data.year < 2008].sum() == 0
