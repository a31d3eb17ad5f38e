"""The driver of the table, on methods that are quick and scores that are made up."""

import numpy as np
import pytest

from tests.bench import archipelago_results
from tests.bench.archipelago_protocols import Cell, draw, score
from tests.bench.archipelago_results import Fit, collect, differences, main, run, tables, verdicts


@pytest.fixture
def counted(monkeypatch):
    """Two methods that are quick, and how often they were called."""
    calls = []

    def constant(name, first):
        def method(x, y, x_test, seed):
            calls.append((name, seed))
            probabilities = np.full((len(x_test), y.max() + 1), (1 - first) / y.max())
            probabilities[:, 0] = first
            return probabilities

        return method

    monkeypatch.setattr(
        archipelago_results,
        "METHODS",
        {"archipelago": constant("archipelago", 0.5), "GP classifier": constant("GP", 0.9)},
    )
    return calls


def test_a_run_that_was_cut_goes_on(tmp_path, counted):
    names, cells = ["archipelago", "GP classifier"], [Cell("3 arms", 1), Cell("wine", 2)]
    assert run(tmp_path, names, cells, seconds=0) == 12
    assert not counted
    assert run(tmp_path, names, cells, most_draws=1) == 0
    assert counted == [("archipelago", 0), ("GP", 0)] * 2
    (tmp_path / "wine, 2" / "GP classifier, 0.json").unlink()
    counted.clear()
    assert run(tmp_path, names, cells) == 0
    assert len(counted) == 9
    results = collect(tmp_path)
    assert set(results) == {(cell, name) for cell in cells for name in names}
    for (cell, name), found in results.items():
        assert sorted(found) == [0, 1, 2]
        first = 0.5 if name == "archipelago" else 0.9
        wanted = score(
            np.tile([first, *[(1 - first) / 2] * 2], (len(draw(cell, 0).y_test), 1)),
            draw(cell, 2).y_test,
        )
        assert found[2][:2] == pytest.approx(wanted)
        assert found[2].cpu_seconds > 0


def test_differences_are_of_the_same_draws(tmp_path, counted):
    run(tmp_path, ["archipelago"], [Cell("3 arms", 1)], most_draws=2)
    run(tmp_path, ["GP classifier"], [Cell("3 arms", 1)])
    (tmp_path / "3 arms, 1" / "GP classifier, 0.json").unlink()
    results = collect(tmp_path)
    assert [sorted(found) for found in results.values()] == [[0, 1], [1, 2]]
    one, two = (
        results[Cell("3 arms", 1), name][1].log_score for name in ("archipelago", "GP classifier")
    )
    wanted = pytest.approx([two - one])
    assert (
        differences(results, Cell("3 arms", 1), "GP classifier", "archipelago", "log_score")
        == wanted
    )


def test_the_command_line(tmp_path, counted, capsys):
    main(["-o", str(tmp_path), "-d", "wine", "-n", "2", "GP classifier", "archipelago"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| error | labels | draws | archipelago | GP classifier |"
    assert lines[2].startswith("| wine | 1 | 2 | 0.663 | 0.663 (+0.000 ± 0.000) |")
    counted.clear()
    main(["-o", str(tmp_path), "--table"])
    assert not counted
    assert capsys.readouterr().out.splitlines() == lines
    with pytest.raises(SystemExit, match="unknown: softmaxgp"):
        main(["-o", str(tmp_path), "softmaxgp"])
    with pytest.raises(SystemExit, match="unknown: 6 arms"):
        main(["-o", str(tmp_path), "-d", "6 arms"])


def test_the_reference_chosen_by_the_test_rows_takes_the_smallest_error():
    rows = draw(Cell("4 arms h", 2), 0)
    every = [
        score(method(*rows[:3], 0), rows.y_test)
        for method in archipelago_results.SPREADING.values()
    ]
    best = archipelago_results.judged("label spreading, by test", rows, 0)
    assert best in every
    assert best.error == min(each.error for each in every)
    assert len({each.error for each in every}) > 1


def scores(*errors):
    return {seed: Fit(error, -3 * error, 10 * error) for seed, error in enumerate(errors)}


def test_tables_of_paired_differences():
    results = {
        (Cell("wine", 1), "archipelago"): scores(0.1, 0.2, 0.3),
        (Cell("wine", 1), "GP classifier"): scores(0.2, 0.2, 0.6),
    }
    lines = list(tables(results))
    se = np.std([0.1, 0, 0.3], ddof=1) / np.sqrt(3)
    assert lines[2] == f"| wine | 1 | 3 | 0.200 | 0.333 (+0.133 ± {se:.3f}) |"
    results[Cell("wine", 1), "probit GP"] = scores(0.4, 0.4)
    assert list(tables(results))[2].endswith(" | 0.400 (+0.250 ± 0.050) [2] |")
    assert lines[6] == f"| wine | 1 | 3 | -0.600 | -1.000 (-0.400 ± {3 * se:.3f}) |"
    assert lines[10] == "| wine | 1 | 3 | 2.0 | 3.3 |"
    results[Cell("wine", 1), "probit GP"] = scores(0.4)
    # one draw has no standard error
    assert list(tables(results))[2].endswith(" | 0.400 (+0.300) [1] |")


def test_verdicts():
    near, far = scores(0.1, 0.12, 0.02), scores(0.05, 0.06, 0.04)
    results = {
        # by .03 behind the best: within a standard error of .03
        (Cell("wine", 1), "archipelago"): scores(0.1, 0.1, 0.1),
        (Cell("wine", 1), "GP classifier"): scores(0.2, 0.1, 0.3),
        (Cell("wine", 1), "label spreading"): near,
        (Cell("wine", 2), "archipelago"): scores(0.14, 0.14, 0.14),
        (Cell("wine", 2), "GP classifier"): scores(0.1, 0.1, 0.1),
        (Cell("wine", 2), "label spreading"): far,
        (Cell("wine", 2), "label spreading, by test"): scores(0, 0, 0),
    }
    assert list(verdicts(results)) == [
        "- lower error and better log score than the GP classifier: 1 of 2 cells; not wine/2",
        "- better log score than label spreading: 0 of 2 cells; not wine/1, wine/2",
        "- best error, or within a standard error of the best: 1 of 2 cells; not wine/2",
        "- best log score, or within a standard error of the best: 1 of 2 cells; not wine/2",
        "- lower error on wine than in the paper: 1 of 2 cells; not wine/2",
    ]
