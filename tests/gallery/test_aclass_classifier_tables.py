"""Columns of every type to numbers and back, labels to codes: what is read as what, and what is
refused by name.
"""

from functools import partial

import numpy as np
import pandas as pd
import pytest
from scipy import sparse
from sklearn.exceptions import DataConversionWarning

from gallery import AClassClassifier
from gallery._columns import BINARY, CATEGORY, NUMBER, STANDARDISED, Columns, Mixed
from gallery._labels import coded, codes_among
from zoo.aclass import beta_bernoulli, dirichlet_categorical

FRAME = pd.DataFrame(
    {
        "weight": [2.0, np.nan, 4.0, 6.0],
        "legs": [4, 6, 4, 8],
        "count": pd.array([1, 5, None, 3], dtype="Int64"),
        "wings": [True, False, True, True],
        "flies": pd.array([True, None, False, True], dtype="boolean"),
        "marked": [0, 1, 1, 0],
        "tail": [None, True, False, True],
        "colour": ["red", None, "blue", "red"],
        "old": pd.Series(["x", "y", None, "x"], dtype=object),
        "size": pd.Categorical(["S", "L", None, "S"], categories=["S", "M", "L"], ordered=True),
        "grade": pd.Categorical([3, 1, 3, None], categories=[3, 2, 1]),
        "empty": [np.nan] * 4,
    }
)
KINDS = [
    NUMBER,
    NUMBER,
    NUMBER,
    BINARY,
    BINARY,
    BINARY,
    BINARY,
    CATEGORY,
    CATEGORY,
    CATEGORY,
    CATEGORY,
    NUMBER,
]
CODES = {
    "wings": [1, 0, 1, 1],
    "flies": [1, np.nan, 0, 1],
    "marked": [0, 1, 1, 0],
    "tail": [np.nan, 1, 0, 1],
    "colour": [1, np.nan, 0, 1],
    "old": [0, 1, np.nan, 0],
    "size": [0, 2, np.nan, 0],
    "grade": [0, 2, 0, np.nan],
    "empty": [np.nan] * 4,
}


def test_columns_are_read_by_what_they_hold():
    columns = Columns.learn(FRAME)
    assert [column.kind for column in columns.columns] == KINDS
    x = columns.encode(FRAME)
    for name, codes in CODES.items():
        np.testing.assert_array_equal(x[:, FRAME.columns.get_loc(name)], codes, err_msg=name)
    for name in ("weight", "legs", "count"):
        given = FRAME[name].to_numpy(float, na_value=np.nan)
        np.testing.assert_allclose(
            x[:, FRAME.columns.get_loc(name)], (given - np.nanmean(given)) / np.nanstd(given)
        )


def test_decoding_gives_the_table_back():
    columns = Columns.learn(FRAME)
    whole = FRAME.assign(
        weight=[2.0, 3.0, 4.0, 6.0],
        count=pd.array([1, 5, 2, 3], dtype="Int64"),
        flies=pd.array([True] * 4, dtype="boolean"),
    )
    whole = whole.assign(
        tail=pd.Series([True, True, False, True], dtype=object),
        colour=FRAME["colour"].fillna("red"),
        old=FRAME["old"].fillna("y"),
    )
    whole = whole.assign(size=FRAME["size"].fillna("M"), grade=FRAME["grade"].fillna(1), empty=0.0)
    back = columns.decode(columns.encode(whole))
    pd.testing.assert_frame_equal(back, whole.astype({"legs": float, "count": float}))


def test_filling_touches_what_is_missing_and_nothing_else():
    columns = Columns.learn(FRAME)
    other = columns.encode(
        FRAME.iloc[[3, 3, 0, 2]].set_axis(range(4)).assign(weight=7.5, count=2.5, empty=1.5)
    )
    table = FRAME.set_axis(list("abcd"))
    filled = columns.fill(table, np.where(np.isnan(other), 0, other))
    wanted = {
        "weight": (1, 7.5),
        "count": (2, 2.5),
        "flies": (1, True),
        "tail": (0, True),
        "colour": (1, "red"),
        "old": (2, "x"),
        "size": (2, "S"),
    }
    for name, (row, value) in wanted.items():
        assert filled[name].iloc[row] == value
        assert (
            filled[name]
            .drop("abcd"[row])
            .equals(table[name].astype(filled[name].dtype).drop("abcd"[row]))
        )
    assert list(filled.index) == list("abcd")
    same = ["weight", "legs", "wings", "flies", "marked", "tail", "colour", "old", "size", "grade"]
    assert (filled.dtypes[same] == table.dtypes[same]).all()
    assert not filled.isna().any(axis=None)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, object])
def test_arrays_come_back_as_they_were(dtype):
    table = np.array([[0.5, 1.0], [1.5, 0.0], [np.nan, np.nan]]).astype(dtype)
    columns = Columns.learn(table)
    assert [column.kind for column in columns.columns] == [NUMBER, BINARY]
    filled = columns.fill(table, np.array([[9, 0], [9, 0], [3.0, 1.0]]))
    assert filled.dtype == dtype
    np.testing.assert_allclose(filled.astype(float), [[0.5, 1.0], [1.5, 0.0], [2.5, 1.0]])
    assert columns.decode(columns.encode(table[:2])).dtype == dtype


def test_texts_in_arrays_and_lists_are_categories():
    for table in (
        np.array([["b", "u"], ["a", "u"]]),
        [["b", "u"], ["a", "u"]],
        np.array([["b", "u"], ["a", "u"]], object),
    ):
        columns = Columns.learn(table)
        assert [column.values for column in columns.columns] == [("a", "b"), ("u",)]
        np.testing.assert_array_equal(columns.decode(columns.encode(table)), table)
    beside = Columns.learn([["b", 1.5], ["a", 2]])
    assert [column.kind for column in beside.columns] == [CATEGORY, NUMBER]


def test_whole_numbers_stay_whole_where_they_are_0_and_1():
    flags = np.array([[0, 1], [1, 1]])
    assert Columns.learn(flags).decode(flags.astype(float)).dtype == flags.dtype
    assert Columns.learn(flags == 1).decode(flags.astype(float)).dtype == bool
    assert Columns.learn(np.array([[0, 6], [1, 6]])).decode(flags.astype(float)).dtype == float


def test_units_of_what_is_there():
    table = np.array([[1.0, 7.0, 0.0], [3.0, 7.0, 1.0], [np.nan, np.nan, np.nan]])
    columns = Columns.learn(table)
    np.testing.assert_allclose(
        [column.standardiser.scale for column in columns.columns], [1.0, 1.0, 1.0]
    )
    assert Columns.learn(np.full((7, 1), 0.1)).columns[0].standardiser.scale == 1.0
    columns = Columns.learn(10 * table[:, :2])
    np.testing.assert_allclose(
        columns.log_units(columns.encode(10 * table[:, :2])), 2 * np.log(10.0)
    )


def test_the_component_follows_the_columns():
    assert Columns.learn([[0, 1], [1, 1]]).component() is beta_bernoulli
    assert Columns.learn([[0.5], [1.0]]).component() is STANDARDISED
    texts = Columns.learn([["a"], ["b"], ["c"]]).component()
    assert isinstance(texts, partial)
    assert (texts.func, texts.keywords) == (dirichlet_categorical, {"num_values": 3})
    whole = Columns.learn(FRAME).component()
    assert isinstance(whole, Mixed)
    found = {name: columns for name, (columns, _) in whole.parts.items()}
    assert found == {
        "number": [0, 1, 2, 11],
        "binary": [3, 4, 5, 6],
        "category2": [7, 8],
        "category3": [9, 10],
    }


LATER = {
    "a text among numbers": (
        {"weight": "heavy"},
        "column 'weight': found the text 'heavy' and the number",
    ),
    "texts for numbers": (
        {"weight": ["a", "b", "c", "d"]},
        "column 'weight': found 'a', wanted a number as in the first call",
    ),
    "infinite": (
        {"legs": [4.0, np.inf, 4.0, 4.0]},
        "column 'legs': found inf in row 1; wanted finite numbers",
    ),
    "more than 0 and 1": (
        {"marked": [0, 1, 2, 1]},
        "column 'marked': found 2 in row 2; only 0 and 1 were there in the first call",
    ),
    "an unseen category": (
        {"colour": ["red", "pink", None, "red"]},
        "column 'colour': found 'pink' in row 1, .* known are 'blue', 'red'",
    ),
    "numbers for texts": ({"colour": [1.0, 2.0, 1.0, 1.0]}, "column 'colour': found 1.0 in row 0"),
}


@pytest.mark.parametrize("name", LATER)
def test_later_rows_that_do_not_fit_are_refused_by_column(name):
    change, match = LATER[name]
    later = FRAME.astype(object).assign(
        **{
            key: [value, *FRAME[key][1:]] if isinstance(value, str) else value
            for key, value in change.items()
        }
    )
    with pytest.raises(ValueError, match=match):
        Columns.learn(FRAME).encode(later)


def test_a_declared_category_may_come_later_and_a_missing_column_stays_missing():
    columns = Columns.learn(FRAME)
    later = FRAME.assign(size=["M", "M", "S", None], colour=np.nan)
    np.testing.assert_array_equal(columns.encode(later)[:, 9], [1, 1, 0, np.nan])
    assert np.isnan(columns.encode(later)[:, 7]).all()


FIRST = {
    "a date": (
        pd.DataFrame({"born": pd.to_datetime(["2001-02-03"])}),
        TypeError,
        r"column 'born': found the type datetime64.*pd.to_datetime\(X\['born'\], utc=True\)",
    ),
    "an object": (
        np.array([[1.0], [{}]], object),
        TypeError,
        "column 0: found {}; an argument must be a string or a number",
    ),
    "texts and numbers": (
        pd.DataFrame({"a": ["x", 3]}, dtype=object),
        ValueError,
        "column 'a': found the text 'x' and the number 3",
    ),
    "no categories": (
        pd.DataFrame({"a": pd.Categorical([None, None])}),
        ValueError,
        "column 'a': a pandas category without categories",
    ),
    "infinite": ([[1.0], [-np.inf]], ValueError, "column 0: found -inf in row 1"),
    "sparse": (sparse.csr_array(np.eye(2)), TypeError, "[Ss]parse"),
    "complex": (pd.DataFrame({"a": [1j]}), TypeError, "column 'a': found the type complex128"),
    "no rows": (FRAME[:0], ValueError, r"0 sample\(s\)"),
    "no columns": (FRAME[[]], ValueError, r"0 feature\(s\)"),
    "one dimension": (np.arange(3.0), ValueError, "Expected 2D array"),
}


@pytest.mark.parametrize("name", FIRST)
def test_tables_that_cannot_be_read(name):
    table, error, match = FIRST[name]
    with pytest.raises(error, match=match):
        Columns.learn(table).encode(table)


def test_the_advice_for_dates_gives_days_since_1970():
    day = pd.to_datetime(["1970-01-02 00:00", None, "1970-01-03 12:00"])
    for dates in (day, day.tz_localize("UTC")):
        table = pd.DataFrame({"born": dates})
        with pytest.raises(TypeError) as error:
            Columns.learn(table)
        expression = str(error.value).partition("into days: ")[2].rstrip(".")
        days = eval(expression, {"X": table, "pd": pd})
        np.testing.assert_array_equal(days, [1.0, np.nan, 2.5])


def test_a_column_of_distinct_texts_is_taken_for_an_id():
    table = pd.DataFrame({"id": [f"P{i}" for i in range(20)], "ward": ["a", "b"] * 10})
    with pytest.warns(UserWarning, match="column 'id': found 20 distinct texts in 20 rows"):
        Columns.learn(table)
    Columns.learn(table[:19])  # too few rows to tell
    others = pd.Categorical(["P0"] * 20, categories=table["id"])
    Columns.learn(table.assign(id=others))
    Columns.learn(table.assign(id=table["id"].where(table["id"] != "P1", "P2")))


def test_a_component_of_ones_own_takes_numbers_alone():
    with pytest.raises(
        ValueError, match="column 'colour': found texts; a component of your own reads numbers"
    ):
        AClassClassifier(component=beta_bernoulli).fit(FRAME[["wings", "colour"]], [0, 1, 0, 1])


@pytest.mark.parametrize(
    ("y", "classes", "codes"),
    [
        ([3, 1, -1, 3], [1, 3], [1, 0, -1, 1]),
        ([1.0, -1.0, 0.0], [0.0, 1.0], [1, -1, 0]),
        (["b", "a", "b"], ["a", "b"], [1, 0, 1]),
        (np.array(["b", -1, "a"], object), ["a", "b"], [1, -1, 0]),
        (np.array([2, -1, 2], object), [2], [0, -1, 0]),
        (pd.Series([True, False]), [False, True], [1, 0]),
        (pd.Series(["u", "v"], dtype="category"), ["u", "v"], [0, 1]),
        ([5, 5], [5], [0, 0]),
        ([-1, 0, -1], [0], [-1, 0, -1]),
        ([1, -1, 1], [-1, 1], [1, 0, 1]),  # scikit-learn's coding of two classes
        ([1, -1, 2], [1, 2], [0, -1, 1]),
    ],
)
def test_labels(y, classes, codes):
    found, coded_y = coded(y)
    assert found.tolist() == classes
    assert coded_y.tolist() == codes
    assert codes_among(y, found).tolist() == codes


def test_declared_classes_decide_what_minus_one_is():
    assert coded([-1, 1], classes=[1, 0])[1].tolist() == [-1, 1]
    assert coded([-1, 2], classes=[2, -1, 0])[1].tolist() == [0, 2]
    assert coded([-1, -1], classes=["b", "a"])[1].tolist() == [-1, -1]


@pytest.mark.parametrize(
    ("y", "match"),
    [
        ([-1, -1], "y: every row is unlabelled"),
        ([0.5, 1.5], "Unknown label type: continuous"),
        ([0, np.nan], "Input y contains NaN"),
        (
            np.array(["a", None], object),
            "y: row 1 has the label None; the label of a row of unknown class is -1",
        ),
        (np.array(["a", -1]), "y: found the text '-1' among texts. .* dtype object"),
        (np.array(["a", 3], object), "y: row 1 has the label 3 among texts"),
        ([[0, 1], [1, 0]], "y should be a 1d array"),
        (None, "y should be a 1d array"),
    ],
)
def test_labels_that_cannot_be_read(y, match):
    with pytest.raises(ValueError, match=match):
        coded(y)


def test_an_unknown_class_is_refused_by_row():
    with pytest.raises(
        ValueError,
        match=r"y: row 1 has the class 'c'; the classes of the first call are \['a', 'b'\]",
    ):
        codes_among(["a", "c"], np.array(["a", "b"]))
    with pytest.warns(DataConversionWarning):
        assert coded(np.array([[0], [1]]))[1].tolist() == [0, 1]
