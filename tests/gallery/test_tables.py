"""CSV files: what is read, and the words of every refusal."""

import gzip
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from gallery.datasets import load
from gallery.tables import TableError, read_csv, read_features, read_matrix, with_dummies, write_csv

PATIENTS = """age,city,smokes,blood pressure,outcome
31,Rome,True,120.5,well
NA,Oslo,False,,ill
57,,NA,99,
44,Rome,False,101,ill
"""


@pytest.fixture
def write(tmp_path):
    def written(text, name="table.csv"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return written


def test_numbers_booleans_categories_and_missing_cells(write):
    data = read_csv(write(PATIENTS))
    nan = np.nan
    np.testing.assert_array_equal(
        data.x, [[31, 1, 1, 120.5], [nan, 0, 0, nan], [57, nan, nan, 99], [44, 1, 0, 101]]
    )
    assert data.x.dtype == np.float64
    assert list(data.y) == [1, 0, -1, 0]
    assert data.class_names == ("ill", "well")
    assert data.feature_names == ("age", "city", "smokes", "blood pressure")
    assert data.categories == {"city": ("Oslo", "Rome")}
    assert data.target_name == "outcome"


def test_target_is_named(write):
    data = read_csv(write(PATIENTS), target="city")
    assert data.class_names == ("Oslo", "Rome")
    assert list(data.y) == [1, 0, -1, 1]
    assert "outcome" in data.feature_names


@pytest.mark.parametrize(
    ("cells", "classes", "codes"),
    [
        (["10", "9", "10"], ("9", "10"), [1, 0, 1]),
        (["True", "False", "True"], ("False", "True"), [1, 0, 1]),
        (["1.0", "2.0", "NA"], ("1.0", "2.0"), [0, 1, -1]),
        (["b", "b", ""], ("b",), [0, 0, -1]),
    ],
)
def test_classes_of_any_kind(write, cells, classes, codes):
    data = read_csv(write("x,y\n" + "\n".join(f"{i},{cell}" for i, cell in enumerate(cells))))
    assert data.class_names == classes
    assert list(data.y) == codes
    assert data.y.dtype == np.int64


def test_a_quantity_stays_a_number(write):
    values = np.linspace(0.05, 2.0, 40).round(3)
    data = read_csv(write("x,y\n" + "\n".join(f"{i},{value}" for i, value in enumerate(values))))
    assert data.class_names == ()
    np.testing.assert_array_equal(data.y, values)


def test_whole_numbers_are_a_quantity_where_there_are_no_classes(write):
    data = read_csv(write("a,y\n1,50\n2,-1\n3,\n"), classes=False)
    np.testing.assert_array_equal(data.y, [50.0, -1.0, np.nan])
    assert data.class_names == ()
    with pytest.raises(TableError, match=r"line 3, column 'y': '\?' is not a finite number"):
        read_csv(write("a,y\n1,50\n2,?\n"), classes=False)


def test_a_target_of_texts_is_no_quantity(write):
    path = write("a,b,y\n1,2,icu\n2,3,home\n")
    for read in (partial(read_csv, classes=False), read_matrix):
        with pytest.raises(TableError, match="this model predicts numbers, .* by --target"):
            read(path)


def test_texts_beside_numbers_may_be_categories(write):
    assert read_csv(write("a,y\n1,u\nnone,u\n2,v\nnone,v\n")).categories["a"] == ("1", "2", "none")


def test_byte_order_mark_blank_lines_quotes_and_gzip(write):
    text = '\ufeffname,y\n"Smith, J.",a\n\n"Doe ""D""",b\n'
    for path in (write(text), write(gzip.compress(text.encode()), "table.csv.gz")):
        data = read_csv(path)
        assert data.name == "table"
        assert data.categories["name"] == ('Doe "D"', "Smith, J.")
        assert list(data.y) == [0, 1]


@pytest.mark.parametrize(
    ("text", "notes"),
    [
        ("a;b;y\n1,5;2;u\n2,5;;v\n", ("cells delimited by ';'", "decimal commas")),
        ('"a"\t"b"\ty\n1.5\t2\tu\n2.5\tNA\tv\n', ("cells delimited by '\\t'",)),
        ("a|b|y\n1.5|2|u\n2.5||v\n", ("cells delimited by '|'",)),
        ("a,b,y\n1.5,2,u\n2.5,,v\n".encode("utf-16"), ("read as UTF-16",)),
    ],
    ids=["semicolons", "tabs", "bars", "UTF-16"],
)
def test_other_delimiters_and_encodings(write, text, notes):
    data = read_csv(write(text))
    np.testing.assert_array_equal(data.x, [[1.5, 2.0], [2.5, np.nan]])
    assert (data.feature_names, data.class_names, data.notes) == (("a", "b"), ("u", "v"), notes)


def test_a_text_that_is_not_utf_8_is_that_of_windows(write):
    data = read_csv(write("ort,y\nKöln,1\nWien,2\n".encode("cp1252")))
    assert data.categories["ort"] == ("Köln", "Wien")
    assert data.notes == ("not UTF-8: read as Windows-1252",)


def test_points_in_a_table_of_semicolons_stay_points(write):
    data = read_csv(write("a;b;y\n1.5;1,2;u\n2.5;1,2;v\n"))
    assert (data.categories, data.notes) == ({"b": ("1,2",)}, ("cells delimited by ';'",))


def test_dates_are_days(write):
    text = "seen,born,when,y\n1970-01-03,02.01.1970,1970-01-02T12:00,u\n1970-03-01,,,v\n"
    data = read_csv(write(text))
    np.testing.assert_array_equal(data.x, [[2, 1, 1.5], [59, np.nan, np.nan]])
    assert data.dates == ("seen", "born", "when")
    new = read_features(write("when,seen\n1970-01-01,1970-01-02\n"), ["seen", "when"])
    np.testing.assert_array_equal(new, [[1, 0]])
    with pytest.raises(TableError, match="line 2, column 'seen': '1970-01-01' is not a finite"):
        read_features(write("seen\n1970-01-01\n5\n"), ["seen"])
    mixed = read_csv(write("a,y\n1970-01-01,u\n13th,v\n"))
    assert mixed.categories["a"] == ("13th", "1970-01-01")


@pytest.mark.parametrize("cells", [("31/01/1970", "02/03/1970"), ("01/31/1970", "03/02/1970")])
@pytest.mark.parametrize("mark", "/-")
def test_a_day_above_12_tells_the_order_of_day_and_month(write, cells, mark):
    first, second = (cell.replace("/", mark) for cell in cells)
    data = read_csv(write(f"a,y\n{first},u\n{second} 12:00,v\n,u\n{second},v\n"))
    np.testing.assert_array_equal(data.x[:, 0], [30, 60.5, np.nan, 60])
    assert data.dates == ("a",)


def test_dates_whose_day_and_month_may_change_places_are_refused(write):
    path = write("a,y\n05/05/2024,u\n03/04/2024,v\n")
    with pytest.raises(TableError, match="line 3, column 'a': the day or .* of '03/04/2024' may"):
        read_csv(path)
    assert read_csv(write("a,y\n05/05/1970,u\n5.1.1970,v\n")).x[:, 0].tolist() == [124, 4]
    mixed = read_csv(write("a,y\n31/01/1970,u\n01/31/1970,v\n"))
    assert mixed.categories["a"] == ("01/31/1970", "31/01/1970")


def test_columns_are_left_out_or_chosen(write):
    path = write("id,a,b,c,y\n7,1,2,3,u\n8,4,5,6,v\n")
    assert read_csv(path, drop=["id", "b"]).feature_names == ("a", "c")
    assert read_csv(path, columns=["c", "a"], drop=["a"]).feature_names == ("c",)
    assert read_csv(path, drop=["y"]).target_name == "c"
    for option, use in (("drop", "dropped"), ("columns", "a feature")):
        with pytest.raises(TableError, match=f"no column 'd' to be {use}; the columns are id, a"):
            read_csv(path, **{option: ["d"]})


def test_new_rows_are_aligned_by_name(write):
    train = read_csv(write(PATIENTS))
    path = write(
        "blood pressure,note,smokes,city,age\n100,x,True,Oslo,20\n,y,,Rome,NA\n", "new.csv"
    )
    x = read_features(path, train.feature_names, train.categories)
    np.testing.assert_array_equal(x, [[20, 0, 1, 100], [np.nan, 1, np.nan, np.nan]])


def test_a_test_file_is_coded_as_the_training_file(write):
    train = read_csv(write(PATIENTS))
    test = read_csv(
        write("city,outcome,age,smokes,blood pressure\nRome,well,1,True,2\n", "test.csv"),
        like=train,
    )
    np.testing.assert_array_equal(test.x, [[1, 1, 1, 2]])
    assert list(test.y) == [1]
    with pytest.raises(
        TableError,
        match=r"test.csv, line 2, column 'outcome': unknown class 'dead'; the classes are ill, "
        r"well",
    ):
        read_csv(
            write("city,outcome,age,smokes,blood pressure\nRome,dead,1,True,2\n", "test.csv"),
            target="outcome",
            like=train,
        )


def test_missing_columns_and_unseen_categories_are_named(write):
    train = read_csv(write(PATIENTS))
    with pytest.raises(
        TableError, match=r"new.csv: no column 'smokes', 'blood pressure'.*found age, city"
    ):
        read_features(write("age,city\n1,Rome\n", "new.csv"), train.feature_names, train.categories)
    with pytest.raises(
        TableError,
        match=r"new.csv, line 3, column 'city': category 'Paris' was not seen.*Oslo, Rome; leave "
        r"it empty",
    ):
        read_features(
            write("age,city\n1,Rome\n1,Paris\n", "new.csv"), ("age", "city"), train.categories
        )
    with pytest.raises(TableError, match=r"line 2, column 'age': 'old' is not a finite number"):
        read_features(write("age,city\nold,Rome\n", "new.csv"), ("age", "city"), train.categories)


def test_an_error_names_ten_categories_and_knows_ids(write):
    ids = [f"P{i}" for i in range(30)]
    with pytest.raises(TableError, match=r"known are P0, .*, P9, ... 20 more; .* with --id a"):
        read_features(write("a\nQ1\nQ2\nP3\n"), ["a"], {"a": ids})
    with pytest.raises(TableError, match=r"P9, ... 20 more; leave it empty"):
        read_features(write("a\nQ1\nP2\nP3\n"), ["a"], {"a": ids})
    found = read_features(write("a\nQ1\nP2\nNA\n"), ["a"], {"a": ids}, takes_others=True)
    np.testing.assert_array_equal(found[:, 0], [30, 2, np.nan])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty; wanted a header and rows"),
        ("a,b\n", "a header and no rows"),
        ("1,2\n3,4\n", "line 1: no header, only numbers"),
        ("a,,b\n1,2,3\n", "column 2 has no name"),
        ("a,b,a\n1,2,3\n", "more than one column is called 'a'"),
        ("a,b\n1,2\n1,2,3\n", "line 3: 3 cells where the header has 2"),
        ("y\n1\n", "no feature columns beside the class column 'y'"),
        ("a;y\n1\n", "line 2: 1 cells where the header has 2"),
        ("a,y\n1,\n2,NA\n", "class column 'y' is empty in every row"),
        ("a,y\ninf,1\n2,2\n", "line 2, column 'a': 'inf' is not a finite number"),
        (
            "a,y\n" + "1,b\n" * 20 + "1O,b\n",
            "line 22, column 'a': '1O' is not a number, but 20 other cells",
        ),
        (
            "a,y\n1,b\n2,b\n?,b\n",
            "line 4, column 'a': '\\?' is not a number, but 2 other cells .*leave it empty if it "
            "is missing",
        ),
        ("a,y\nTrue,b\nFalse,b\nMissing,b\n", "line 4, column 'a': 'Missing' is not a number"),
        (
            "a,y\n1,1.5\n2,?\n",
            "line 3, column 'y': '\\?' may be a class or mean that there is no label",
        ),
        (
            "a,y\n1,-1\n2,0\n",
            "line 2, column 'y': -1 may be a class or mean that there is no label; leave the cell "
            "empty",
        ),
        (b"a,y\n\x81,1\n", "neither UTF-8 nor Windows-1252"),
        ('a,y\n"1"2,b\n', "not a CSV file"),
    ],
)
def test_what_cannot_be_read_is_said(write, text, message):
    with pytest.raises(TableError, match=message) as error:
        read_csv(write(text))
    assert "table.csv" in str(error.value)


def test_unknown_target_lists_the_columns(write):
    with pytest.raises(
        TableError,
        match="no column 'label' to be the target; the columns are age, city, smokes, blood "
        "pressure, outcome",
    ):
        read_csv(write(PATIENTS), target="label")


def told(data):
    """What a data set says, whatever the order of its codes."""
    # the last is that of -1
    names = np.array([*(data.class_names or map(str, range(data.y.max() + 1))), ""])
    return data.feature_names, names[data.y].tolist()


@pytest.mark.parametrize("name", ["wine", "wdbc", "pinwheel", "crp_mixture", "large_categorical"])
def test_what_is_written_is_read(name, tmp_path):
    data = load(name, **({"num_rows": 200} if name == "large_categorical" else {}))
    write_csv(data, tmp_path / "copy.csv")
    copy = read_csv(tmp_path / "copy.csv")
    assert told(copy) == told(data)
    np.testing.assert_array_equal(copy.x, data.x)


def test_holes_categories_tasks_and_rows_without_a_class_are_written(write, tmp_path):
    data = read_csv(
        write(
            PATIENTS.replace("age", "age,task", 1)
            .replace("31,", "31,a,")
            .replace("NA,Oslo", "NA,b,Oslo")
            .replace("57,", "57,a,")
            .replace("44,", "44,b,")
        ),
        task="task",
    )
    write_csv(data, tmp_path / "copy.csv")
    copy = read_csv(tmp_path / "copy.csv", task="task")
    assert told(copy) == told(data)
    assert copy.categories == data.categories
    for name in ("x", "task", "y"):
        np.testing.assert_array_equal(copy[name], data[name])


def test_what_is_no_table_is_not_written(tmp_path):
    with pytest.raises(
        TableError, match="data set 'low_rank_matrix': arrays rows, cols, values.* wanted a table"
    ):
        write_csv(load("low_rank_matrix"), tmp_path / "copy.csv")
    assert not list(tmp_path.iterdir())


def test_two_columns_of_one_name_are_not_written(write, tmp_path):
    data = read_csv(write("a,task,class\n1,u,x\n2,v,y\n"), task="task")
    with pytest.raises(TableError, match="two columns are called 'task'"):
        write_csv(replace(data, feature_names=("task",)), tmp_path / "copy.csv")
    assert not (tmp_path / "copy.csv").exists()


def test_dummies_keep_holes_and_are_refused_where_a_name_stands_already(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("a,b,y\nu,1,p\n,2,q\nv,,p\nw,4,q\n")
    data = with_dummies(read_csv(path))
    assert data.feature_names == ("a=u", "a=v", "a=w", "b")
    nan = np.nan
    wanted = [[1, 0, 0, 1], [nan, nan, nan, 2], [0, 1, 0, nan], [0, 0, 1, 4]]
    np.testing.assert_array_equal(data.x, wanted)
    found = read_features(path, data.feature_names, data.categories, data.dummies)
    np.testing.assert_array_equal(found, wanted)
    path.write_text("a,a=u,y\nu,1,p\nv,2,q\nw,4,q\n")
    with pytest.raises(TableError, match="two columns would be called 'a=u'"):
        with_dummies(read_csv(path))


MIXED = """age,ward,admitted,smokes,outcome
31,north,2024-03-01,True,well
,south,2024-03-02,False,ill
57.5,,2024-03-03,,well
"""


def test_a_parquet_file_is_read_as_the_csv_file_of_its_cells(tmp_path):
    pytest.importorskip("pyarrow", reason="the extra `frames` brings it")
    import pandas as pd

    (tmp_path / "t.csv").write_text(MIXED)
    frame = pd.read_csv(tmp_path / "t.csv", parse_dates=["admitted"])
    frame.set_index(np.array([4, 2, 9])).to_parquet(tmp_path / "t.parquet")
    found, wanted = (read_csv(tmp_path / f"t.{ending}") for ending in ("parquet", "csv"))
    np.testing.assert_array_equal(found.x, wanted.x)
    np.testing.assert_array_equal(found.y, wanted.y)
    assert found.categories == wanted.categories == {"ward": ("north", "south")}
    assert (found.name, found.dates, found.class_names) == (
        wanted.name,
        wanted.dates,
        wanted.class_names,
    )
    assert found.notes == ("the index of a data frame left out",)
    (tmp_path / "bad.parquet").write_text("no table")
    with pytest.raises(TableError, match=r"bad.parquet: not a Parquet file"):
        read_csv(tmp_path / "bad.parquet")


def test_a_parquet_file_without_its_library_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "t.parquet").write_text("")
    with pytest.raises(TableError, match="read by the package pyarrow, which is not installed"):
        read_csv(tmp_path / "t.parquet")
