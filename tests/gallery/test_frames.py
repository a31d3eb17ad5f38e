"""Frames of polars and pyarrow: names, categories and keys are kept, and predictions are those of
pandas.
"""

import numpy as np
import pandas as pd
import pytest

import gallery
from gallery import AClassClassifier, AugmentReduceClassifier
from gallery._columns import Columns
from gallery._entries import Keys, read_entries, read_keyed, read_keys
from tests.gallery.test_entries import RATINGS

WHY = "the extra `frames` is not installed: uv sync --extra frames"
pl = pytest.importorskip("polars", reason=WHY)
pa = pytest.importorskip("pyarrow", reason=WHY)

MISSING_POLARS = pl.DataFrame(
    {
        "weight": [2.0, None, 4.0, 6.0],
        "count": [1, 5, None, 3],
        "wings": [True, None, True, False],
        "marked": [0, 1, 1, None],
        "colour": ["red", None, "blue", "red"],
        "size": pl.Series(["S", "L", None, "S"], dtype=pl.Enum(["S", "M", "L"])),
        "grade": pl.Series(["x", None, "y", "x"], dtype=pl.Categorical),
    }
)
OTHER_CODES = {
    "wings": [1, np.nan, 1, 0],
    "marked": [0, 1, 1, np.nan],
    "colour": [1, np.nan, 0, 1],
    "size": [0, 2, np.nan, 0],
    "grade": [0, np.nan, 1, 0],
}


@pytest.mark.parametrize("native", [lambda frame: frame, lambda frame: frame.to_arrow()])
def test_frames_of_polars_and_pyarrow_are_read_and_given_back(native):
    table = native(MISSING_POLARS)
    columns = Columns.learn(table)
    x = columns.encode(table)
    for name, codes in OTHER_CODES.items():
        np.testing.assert_array_equal(x[:, columns.names.index(name)], codes)
    np.testing.assert_allclose(np.nanmean(x[:, :2], 0), 0, atol=1e-12)
    full = np.where(np.isnan(x), 0.0, x)
    for filled in (columns.fill(table, full), columns.decode(full)):
        assert type(filled) is type(table)
        again = filled if isinstance(filled, pl.DataFrame) else pl.from_arrow(filled)
        assert not sum(again.null_count().row(0))
        for old, new in zip(MISSING_POLARS, again, strict=True):
            is_seen, is_category = old.is_not_null(), old.dtype in (pl.Enum, pl.Categorical)
            if new.dtype == pl.Float64:
                np.testing.assert_allclose(new.filter(is_seen), old.filter(is_seen))
            else:
                assert new.filter(is_seen).to_list() == old.filter(is_seen).to_list()
                assert new.dtype in ((pl.Enum, pl.Categorical) if is_category else (old.dtype,))
        assert again["colour"][1] == "blue"
        assert again["size"][2] == "S"
    names = {"polars": pl.DataFrame, "pyarrow": pa.Table}
    assert isinstance(table, names[columns.backend])


NUMERIC = sorted(set(gallery.__all__) - {"AClassClassifier", "BSVDCompleter"})


@pytest.mark.parametrize("name", NUMERIC)
def test_columns_without_numbers_are_named(name):
    table = pl.DataFrame({"a": [1.0, 2.0], "colour": ["red", "blue"]})
    for X in (table, table.to_arrow(), pd.DataFrame(table.to_dict(as_series=False))):
        with pytest.raises(ValueError, match=r"these columns hold others: 'colour' \(String\)"):
            getattr(gallery, name)().fit(X, [0, 1])
    days = pd.DataFrame({"day": pd.to_datetime(["2020-01-01", "2020-01-02"])})
    with pytest.raises(ValueError, match=r"'day' \(Datetime.*dates into days: .*\['day'\]"):
        getattr(gallery, name)().fit(days, [0, 1])


@pytest.mark.usefixtures("numpyro_promotion")
def test_a_frame_of_polars_is_fitted_as_one_of_pandas():
    table = pl.DataFrame({"a": [1.0, 2.0, 3.0, 4.0], "b": [1, 0, 1, 0]})
    y = pl.Series(["u", "v", "u", "v"])
    fits = [
        AugmentReduceClassifier(max_iter=3, random_state=0).fit(X, labels)
        for X, labels in (
            (table, y),
            (table.to_arrow(), y.to_arrow()),
            (pd.DataFrame(table.to_dict(as_series=False)), y.to_list()),
        )
    ]
    for fitted in fits:
        assert fitted.feature_names_in_.tolist() == ["a", "b"]
        assert fitted.classes_.tolist() == ["u", "v"]
        np.testing.assert_array_equal(fitted.predict_proba(table), fits[-1].predict_proba(table))
    with pytest.raises(ValueError, match="feature names should match"):
        fits[0].predict(table[["b", "a"]])


@pytest.mark.parametrize("frame", [pd.DataFrame, pl.DataFrame, pa.table])
def test_a_frame_is_read_by_its_keys(frame):
    by_key = read_keyed(frame(RATINGS))
    keys = Keys.learn(by_key)
    entries = read_entries(keys.placed(by_key), keys.shape)
    np.testing.assert_array_equal(entries.row, [0, 0, 1])  # the last one has no value
    np.testing.assert_array_equal(entries.column, [0, 1, 0])
    np.testing.assert_array_equal(entries.value, [1, 3, 2])
    assert entries.shape == (3, 3)  # a row and a column of other keys
    places = keys.places(*read_keys(frame({"a": ["bob", "eve"], "b": [9, 8], "c": [0, 0]})))
    np.testing.assert_array_equal(places, [[1, 2], [1, 2]])


def test_a_category_without_a_key_is_named():
    categories = pa.array(["ann", None]).dictionary_encode()
    for table in (
        pa.table({"who": categories, "what": [1, 2], "stars": [1.0, 2]}),
        pd.DataFrame({"who": pd.Categorical(["ann", None]), "what": [1, 2], "stars": [1.0, 2]}),
    ):
        with pytest.raises(ValueError, match=r"X: column 'who' has no key in row 1"):
            read_keyed(table)


@pytest.mark.usefixtures("numpyro_promotion")
def test_a_completed_table_is_a_frame_of_the_same_kind():
    table = pl.DataFrame({"a": [1.0, None, 3.0, 4.0], "kind": ["u", "v", None, "v"]})
    imputer = AClassClassifier(5, num_samples=5, random_state=0).fit(table, [0, 1, 0, 1])
    filled = imputer.transform(table)
    assert isinstance(filled, pl.DataFrame)
    rows = pd.DataFrame(table.to_dict(as_series=False))
    assert filled.equals(pl.DataFrame(imputer.transform(rows).to_dict(orient="list")))
