"""Which rows are held out, when, and how entries of a matrix are scored; `test_cli_columns.py` has the
scores of classes.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import xarray as xr
from numpyro.infer.util import log_density
from scipy.stats import norm
from sklearn.model_selection import KFold

from gallery._dataset import Dataset
from gallery.commands import held_out, reports
from gallery.commands.inputs import read_inputs
from gallery.commands.request import Request
from inference import Program
from tests.gallery.command import write
from zoo.bsvd import bsvd


def table_of(y, **arrays):
    return Dataset("mine", "", {"x": np.arange(2.0 * len(y)).reshape(-1, 2), "y": y} | arrays)


def test_each_class_has_its_share_and_keeps_a_row():
    y = np.repeat([0, 1, 2, -1], [50, 30, 1, 19])
    parts = held_out.split(table_of(y), 0.2)
    assert np.bincount(y[parts.rows]).tolist() == [10, 6]
    assert 2 in parts.train["y"]
    np.testing.assert_array_equal(parts.test["y"], y[parts.rows])
    rest = np.delete(np.arange(100), parts.rows)
    np.testing.assert_array_equal(parts.train["x"][:, 0], 2 * rest)
    np.testing.assert_array_equal(held_out.split(table_of(y), 0.2).rows, parts.rows)


def test_each_class_of_each_task_keeps_a_row():
    y, task = np.tile([0, 1], 30), np.repeat([0, 1, 2], 20)
    parts = held_out.split(table_of(y, task=task), 0.9)
    assert len(parts.rows) == 54
    assert set(zip(parts.train["y"], parts.train["task"], strict=True)) == {
        (a, b) for a in (0, 1) for b in (0, 1, 2)
    }


def test_each_row_and_column_of_a_matrix_keeps_an_entry():
    rows, cols = np.divmod(np.arange(60), 6)
    data = Dataset("mine", "", {"rows": rows, "cols": cols, "values": rows + 0.1 * cols})
    parts = held_out.split(data, 0.8)
    assert set(parts.train["rows"]) == set(range(10))
    assert set(parts.train["cols"]) == set(range(6))
    assert len(parts.rows) + len(parts.train["values"]) == 60


def test_each_level_keeps_an_entry():
    """One of two entries of a level stays, wherever it is."""
    rows, cols = np.divmod(np.arange(60), 6)
    for place in range(58):
        stars = np.where(np.isin(np.arange(60), [place, place + 2]), 5, 3)
        data = Dataset("mine", "", {"rows": rows, "cols": cols, "values": stars})
        assert set(held_out.split(data, 0.7).train["values"]) == {3, 5}


@pytest.mark.parametrize(
    "data",
    [
        table_of(np.zeros(50, int)),
        table_of(np.linspace(0, 1, 50)),
        table_of(np.tile([0, 1], 10)),
        Dataset("mine", "", {"x": np.zeros((50, 2))}),
    ],
    ids=["one class", "a quantity", "few rows", "no labels"],
)
def test_nothing_is_held_out_where_nothing_could_be_scored(data):
    assert held_out.split(data, 0.2) is None


@pytest.mark.parametrize(
    ("asked", "kernel", "seconds", "share", "words"),
    [
        (None, "ParticleFilter", 5.0, 0.2, ""),
        (None, "ParticleFilter", 75.0, 0.0, "the fit took 75 s"),
        (0.3, "ParticleFilter", 75.0, 0.3, ""),
        (0.0, "ParticleFilter", 5.0, 0.0, ""),
        (None, "LatentHistory", 5.0, 0.0, "LatentHistory is not run twice unasked"),
        (0.2, "LatentHistory", 75.0, 0.2, ""),
    ],
)
def test_a_second_fit_is_made_where_it_is_cheap_or_asked_for(asked, kernel, seconds, share, words):
    inputs = SimpleNamespace(data=table_of(np.tile([0, 1], 50)), kernel=kernel)
    found, reason = held_out.share_to_hold_out(asked, inputs, seconds)
    assert found == share
    assert words in reason
    assert ("--test 0.2" in reason) == bool(words)


def test_the_baseline_of_very_many_classes_is_naive_bayes(tmp_path, monkeypatch, numpyro_promotion):
    """By its formula: normal columns with the classes' means and smoothed variances."""
    rng = np.random.default_rng(0)
    y, x = np.arange(60) % 3, rng.normal(size=(60, 2)) + np.arange(60)[:, None] % 3
    rows = [[*map(str, row), "abc"[k]] for row, k in zip(x.tolist(), y, strict=True)]
    write(tmp_path / "many.csv", [["u", "v", "kind"], *rows])
    request = Request("aclass", str(tmp_path / "many.csv"), None, None, (), 0, False, "x.nc", None)
    parts = held_out.split(read_inputs(request).data, 0.2)
    inputs = read_inputs(request, parts.train)
    monkeypatch.setattr(held_out, "MOST_PRODUCTS", 100)
    monkeypatch.setattr(held_out, "predictions", lambda *_: (np.full((12, 3), 1 / 3), True))
    found = held_out.scored(xr.DataTree(), inputs, parts)
    assert found.attrs["baseline"] == "naive Bayes"
    scale = lambda values: (values - parts.train["x"].mean(0)) / parts.train["x"].std(0)
    train, of_train, test = scale(parts.train["x"]), parts.train["y"], scale(parts.test["x"])
    joint = [
        np.log(np.mean(of_train == k))
        + norm.logpdf(
            test, train[of_train == k].mean(0), np.sqrt(train[of_train == k].var(0) + 0.1)
        ).sum(1)
        for k in range(3)
    ]
    wanted = np.exp(joint) / np.exp(joint).sum(0)
    np.testing.assert_allclose(
        np.exp(found["baseline_log_score"]), wanted[parts.test["y"], np.arange(12)], rtol=1e-6
    )
    np.testing.assert_allclose(found["log_score"], np.log(1 / 3))


def stars(folder, *options):
    """The request of a fit to a matrix of whole numbers, in no order."""
    rng = np.random.default_rng(0)
    places = rng.permutation([(i, j) for i in range(9) for j in range(7) if rng.random() < 0.8])
    rows = [[f"u{i}", f"f{j}", round(0.5 * i - j + rng.normal())] for i, j in places]
    write(folder / "stars.csv", [["user", "film", "stars"], *rows])
    path = str(folder / "stars.csv")
    return Request("bsvd", path, None, None, options, 0, False, "x.nc", None)


@pytest.mark.parametrize("options", [(), ("link=ordered_probit",)], ids=["real", "levels"])
def test_held_out_entries_are_masked(options, tmp_path, numpyro_promotion):
    """The model is that of the other entries; the shapes are those of the first fit."""
    inputs = read_inputs(stars(tmp_path, *options))
    parts = held_out.split(inputs.data, 0.2)
    found = held_out.without_held_out(inputs, parts)
    for name in ("row", "column", "value", "counts"):
        assert found.arguments[name].shape == inputs.arguments[name].shape
    assert found.arguments["counts"].sum() == len(parts.train["values"])
    alone = read_inputs(inputs.request, parts.train)
    assert found.link == alone.link
    program = Program(bsvd, **alone.arguments)
    rng = np.random.default_rng(1)
    values = {name: rng.uniform(0.1, 1, program.sites[name].shape) for name in program.latent}
    values = {name: value.astype(np.float32) for name, value in values.items()}
    values["z"] = np.ones(values["z"].shape, int)
    of = lambda fit: log_density(bsvd, (), fit.arguments, values)[0]
    wanted = of(alone)
    np.testing.assert_allclose(of(found), wanted, rtol=1e-5)
    every = found._replace(arguments=found.arguments | {"counts": True})
    assert abs(of(every) - wanted) > 1


def test_the_baseline_of_entries_is_ridge_regression(tmp_path, monkeypatch, numpyro_promotion):
    """The additive model by its normal equations; log scores by the normal density."""
    rng = np.random.default_rng(0)
    request = stars(tmp_path)
    inputs = read_inputs(request)
    parts = held_out.split(inputs.data, 0.2)
    mean, std = rng.normal(size=(2, len(parts.rows)))
    monkeypatch.setattr(held_out, "predicted_entries", lambda *_: (mean, std**2))
    found = held_out.scored(xr.DataTree(), read_inputs(request, parts.train), parts)
    design = lambda data: np.hstack([np.eye(9)[data["rows"]], np.eye(7)[data["cols"]]])
    x, y = design(parts.train), parts.train["values"]
    centred = x - x.mean(0)
    effects = np.linalg.solve(centred.T @ centred + np.eye(16), centred.T @ (y - y.mean()))
    wanted = y.mean() + (design(parts.test) - x.mean(0)) @ effects
    np.testing.assert_allclose(found["baseline_predicted"], wanted, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(found["log_score"], norm.logpdf(found["y"], mean, std**2))
    of = len(inputs.data["values"])
    title, first, second = held_out.held_out_text({"bsvd": found}).splitlines()
    assert title.split() == (
        f"scores on {len(mean)} of {of} entries, by a fit to the others RMSE log score".split()
    )
    rmse = lambda guess: f"{np.sqrt(np.mean((guess - found['y'].values) ** 2)):.3f}"
    assert first.split() == ["bsvd", rmse(mean), f"{float(found['log_score'].mean()):.3f}"]
    error = np.std(y - cross_validated(x, y))
    by_hand = norm.logpdf(found["y"], found["baseline_predicted"], error)
    np.testing.assert_allclose(found["baseline_log_score"], by_hand, rtol=1e-3)
    assert second.split() == [
        "additive",
        "effects",
        rmse(found["baseline_predicted"].values),
        f"{by_hand.mean():.3f}",
    ]


def cross_validated(x, y):
    """Predictions of ridge regression with an intercept, each by four fifths without its row."""
    found = np.zeros(len(y))
    for _, fold in KFold(5, shuffle=True, random_state=0).split(x):
        rest = np.delete(np.arange(len(y)), fold)
        centre, level = x[rest].mean(0), y[rest].mean()
        away = x[rest] - centre
        effects = np.linalg.solve(away.T @ away + np.eye(x.shape[1]), away.T @ (y[rest] - level))
        found[fold] = level + (x[fold] - centre) @ effects
    return found


def test_the_baseline_rounds_a_normal_to_levels():
    """Shares of draws; all levels together have probability 1, also far out."""
    levels, mean, std = np.array([1, 2, 4, 5]), 2.6, 0.9
    log_share = held_out._log_share_of_normal(levels, levels, np.full(4, mean), std)
    drawn = np.random.default_rng(0).normal(mean, std, 10**6)
    nearest = levels[abs(drawn[:, None] - levels).argmin(1)]
    np.testing.assert_allclose(
        np.exp(log_share), np.mean(nearest[:, None] == levels, axis=0), atol=2e-3
    )
    far = held_out._log_share_of_normal(levels, np.array([1, 5]), np.array([14.0, -8.0]), 0.9)
    assert far[0] == pytest.approx(far[1])
    assert far[0] == pytest.approx(norm.logsf(12.5 / 0.9))


@pytest.mark.parametrize("coded", [{}, {"shift": 3.0, "scale": 2.0}], ids=["raw", "standardised"])
def test_entries_of_two_codings_are_compared_by_rmse(coded, monkeypatch, capsys):
    """A run of real entries, whose log score is a density, and one of levels."""
    y = np.array([1.0, 2, 3, 4, 5])
    same = {"y": ("row", y), "baseline_predicted": ("row", y + 3)}
    attrs = {"baseline": "additive effects", "of": "25 entries"}
    far = xr.Dataset(same | {"predicted": ("row", y + 2), "log_score": ("row", y)}, attrs=attrs)
    near = xr.Dataset(same | {"predicted": ("row", y + 1), "log_score": ("row", -y)}, attrs=attrs)
    trees = {
        "far": xr.DataTree.from_dict({"held_out": far}),
        "near": xr.DataTree.from_dict({"held_out": near}),
    }
    trees["far"].attrs |= coded
    trees["near"].attrs |= {"levels": (1, 2, 3, 4, 5)}
    monkeypatch.setattr(reports, "open_run", lambda path: trees[path.stem])
    assert reports.compare(SimpleNamespace(first="far.nc", others=["near.nc"])) == 0
    title, *lines = capsys.readouterr().out.splitlines()
    assert title.split()[-1] == "RMSE"
    assert [line.split() for line in lines[:2]] == [["far", "2.000"], ["near", "1.000"]]
    assert lines[3].startswith("best by RMSE: near; ")
