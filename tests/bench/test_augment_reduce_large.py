"""Files of sparse rows with several labels, and the table that is made of them."""

import sys

import numpy as np
import pytest

from tests.bench import augment_reduce_large
from tests.bench.augment_reduce_large import SIZES, repository_rows

ROWS = ("3,1 0:1 4:0.5", " 2:1", "2 1:2", "1 0:1")


def write(path, rows=ROWS, count=None):
    path.write_text("\n".join([f"{count or len(rows)} 5 4", *rows]) + "\n")
    return path


def test_the_first_label_is_the_class_and_rows_without_one_are_left_out(tmp_path):
    x, y = repository_rows(write(tmp_path / "rows.txt"))
    np.testing.assert_array_equal(y, [1, 2, 1])
    np.testing.assert_array_equal(
        x.toarray(), [[1, 0, 0, 0, 0.5], [0, 2, 0, 0, 0], [1, 0, 0, 0, 0]]
    )


def test_a_file_that_was_cut_is_refused(tmp_path):
    with pytest.raises(ValueError, match="found 4 rows, and its first line says 9"):
        repository_rows(write(tmp_path / "rows.txt", count=9))


@pytest.mark.slow
def test_a_copy_at_hand_is_learned_from(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(SIZES, "eurlex", SIZES["eurlex"]._replace(batch_size=20, num_negatives=1))
    # of a class that is new
    train, test = (
        write(tmp_path / "train.txt", 30 * ROWS),
        write(tmp_path / "test.txt", (*ROWS, "0 3:1")),
    )
    words = [
        "augment_reduce_large",
        "eurlex",
        "--steps",
        "300",
        "--train",
        str(train),
        "--test",
        str(test),
    ]
    monkeypatch.setattr(sys, "argv", words)
    augment_reduce_large.main()
    header, _, line = capsys.readouterr().out.splitlines()
    assert header.split(" | ")[-1] == "accuracy |"
    assert line.split(" | ")[0] == "| 2"
    assert line.split(" | ")[-1] == "1.00 |"
