"""Pictures of runs, next to trees whose draws are made up: points are rows, labels are names."""

import json
from types import SimpleNamespace

import matplotlib as mpl
import numpy as np
import pytest
import xarray as xr

from gallery import cli
from gallery.commands import model_pictures, pictures
from gallery.commands.findings import class_contrasts, findings
from gallery.commands.model_pictures import plot_classes, plot_entries, plot_history
from gallery.commands.pictures import draw, kinds
from tests.gallery.test_findings import classified, tree_of

mpl.use("Agg")
MEAN, STD = np.array([10.0, 100.0, -5.0]), np.array([2.0, 30.0, 1.0])
SHARE = {"share": (("chain", "draw"), np.full((2, 10), 0.5))}
FEATURES = ["height", "weight", "noise"]


@pytest.fixture(autouse=True)
def no_open_figures():
    import matplotlib.pyplot as plt

    yield
    plt.close("all")


def rows_of(posterior, **attrs):
    """Twenty rows, the first without a label, the second without a weight; weight and noise tell
    the classes apart, weight most.
    """
    rng = np.random.default_rng(0)
    y = np.array([-1, 0, 1] + [0, 1] * 8 + [1])
    x = rng.normal(size=(20, 3)) + np.outer(y, [0.1, 9, -4])
    x[1, 1] = np.nan
    constant = {
        "x": (("row", "feature"), x),
        "x_mean": ("feature", MEAN),
        "x_std": ("feature", STD),
    }
    names = {"feature": FEATURES, "class": ["thin", "fat"]}
    return tree_of(posterior or SHARE, constant, {"y": ("row", y)}, names, **attrs)


def own_units(tree):
    return tree["constant_data"]["x"].values * STD + MEAN


def points(axes):
    """Label -> places of the points with it."""
    drawn = [each for each in axes.collections if len(each.get_offsets())]
    return {each.get_label(): np.asarray(each.get_offsets()) for each in drawn}


def names_of(axis):
    return [label.get_text() for label in axis.get_ticklabels()]


def test_rows_stand_in_the_two_columns_that_tell_most_in_their_units():
    tree = rows_of({})
    figure, note = plot_classes(tree)
    left = figure.axes[0]
    assert (left.get_xlabel(), left.get_ylabel()) == ("weight", "noise")
    assert note == ": 19 of 20 rows have weight and noise"
    x, y = own_units(tree)[:, 1:], tree["observed_data"]["y"].values
    shown = points(left)
    assert set(shown) == {"thin", "fat", "no label"}
    np.testing.assert_allclose(shown["thin"], x[(y == 0) & ~np.isnan(x[:, 0])])
    np.testing.assert_allclose(shown["fat"], x[y == 1])
    np.testing.assert_allclose(shown["no label"], x[y == -1])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == list(shown)


def test_dates_are_labelled_as_dates():
    """Weights of 100 +- 30 standardised units are days about April 1970."""
    axes = plot_classes(rows_of({}, dates='["weight"]'))[0].axes[0]
    label = lambda axis, value: axis.get_major_formatter().format_ticks([value - 31, value])[1]
    assert label(axes.xaxis, 90) == "Apr"
    assert label(axes.yaxis, 90) != "Apr"
    plain = plot_classes(rows_of({}))[0].axes[0]
    assert label(plain.xaxis, 90) != "Apr"


def test_numbers_of_the_columns_are_those_that_findings_prints():
    tree = rows_of({})
    apart, right = class_contrasts(tree), plot_classes(tree)[0].axes[1]
    assert names_of(right.yaxis) == apart.furthest() == ["weight", "noise", "height"]
    assert names_of(right.xaxis) == ["thin", "fat"]
    cells = np.array([text.get_text() for text in right.texts]).reshape(3, 2)
    for code, line in enumerate(findings(tree)[1:]):
        printed = dict(each.split() for each in line.split("  ")[-1].split(", "))
        assert printed == dict(zip(names_of(right.yaxis), cells[:, code], strict=True))


def test_weights_are_shown_where_the_model_has_some():
    weights = np.array([[[[1.0, 0.0, -3.0], [0.0, 0.5, 0.0]]]])
    dims = ("chain", "draw", "class", "feature")
    figure, _ = plot_classes(rows_of({"weights": (dims, weights)}))
    left, right = figure.axes
    assert (left.get_xlabel(), left.get_ylabel()) == ("noise", "height")
    assert names_of(right.yaxis) == ["noise", "height", "weight"]
    assert [text.get_text() for text in right.texts][:2] == ["-3", "+0"]


def test_groups_have_ellipses_about_their_rows():
    tree = rows_of(
        {"z": (("chain", "draw", "row"), np.zeros((2, 10, 20), int))}, partition='["z", "y"]'
    )
    tree["observed_data"] = xr.Dataset({"y": tree["observed_data"]["y"].clip(0)})
    left = plot_classes(tree)[0].axes[0]
    outlines, centers = left.lines[::2], left.lines[1::2]
    shown = points(left)
    np.testing.assert_allclose(
        np.concatenate([each.get_xydata() for each in centers]),
        [shown[name].mean(0) for name in ("thin", "fat")],
    )
    mine = shown["fat"]
    inverse, apart = np.linalg.inv(np.cov(mine.T)), outlines[1].get_xydata() - mine.mean(0)
    np.testing.assert_allclose(np.einsum("ni,ij,nj->n", apart, inverse, apart), 4.0)


def test_clusters_have_the_means_of_the_likeliest_draw():
    form = ("chain", "draw", "cluster", "feature")
    mu = np.arange(12.0).reshape(1, 2, 2, 3)
    tree = rows_of({"mu": (form, mu), "sigma": (form, 0 * mu + 1.5)})
    tree["log_likelihood"] = xr.DataTree(
        xr.Dataset({"y": (("chain", "draw", "row"), [[[0.0, 0.0], [-1.0, 0.0]]])})
    )
    lines = plot_classes(tree)[0].axes[0].lines
    own = (mu[0, 0] * STD + MEAN)[:, 1:]
    assert [each.get_xydata()[0].tolist() for each in lines[1::2]] == own.tolist()
    width = np.ptp(lines[0].get_xydata()[:, 0])
    assert width == pytest.approx(4 * 1.5 * STD[1], rel=1e-2)


def test_tasks_have_panels():
    tree = rows_of({}, task="field")
    task = np.arange(20) % 2
    tree["constant_data"] = (
        tree["constant_data"]
        .to_dataset()
        .assign(task_of_row=("row", task))
        .assign_coords(task=["north", "south"])
    )
    arrays = json.loads(tree.attrs["arrays"]) | {"task": ("constant_data", "task_of_row")}
    tree.attrs["arrays"] = json.dumps(arrays)
    *lefts, _ = plot_classes(tree)[0].axes
    assert [axes.get_title(loc="left") for axes in lefts] == ["field north", "field south"]
    y = tree["observed_data"]["y"].values
    for code, axes in enumerate(lefts):
        mine = own_units(tree)[(y == 1) & (task == code)][:, 1:]
        np.testing.assert_allclose(points(axes)["fat"], mine)
        low, high = axes.get_ylim()
        assert low < np.nanmin(own_units(tree)[:, 2]) < np.nanmax(own_units(tree)[:, 2]) < high


def test_one_column_of_numbers_is_drawn_by_class():
    figure, note = plot_classes(classified({}))
    left, right = figure.axes
    assert left.get_xlabel() == "height"
    assert note == ": 7 of 8 rows have height"
    assert names_of(left.yaxis) == ["lo", "hi", "no label, or other"]
    assert (points(left)["hi"][:, 1].round() == 1).all()
    assert set(names_of(right.yaxis)) == {"height", "colour=blue", "colour=red", "colour=tan"}


def test_columns_without_numbers_are_shown_by_their_shares():
    x = np.array([[0.0, 1], [0, 1], [1, np.nan], [1, 0], [1, 1], [0, 0]])
    tree = tree_of(
        SHARE,
        {"x": (("row", "feature"), x)},
        {"y": ("row", np.array([0, 0, 0, 1, 1, 1]))},
        {"feature": ["flag", "vote"], "class": ["a", "b"]},
        categories=json.dumps({"vote": ["no", "yes"]}),
    )
    left = plot_classes(tree)[0].axes[0]
    assert names_of(left.yaxis) == ["vote=yes", "flag"]
    assert {line.get_label(): line.get_xdata().tolist() for line in left.lines} == {
        "a": pytest.approx([1, 1 / 3]),
        "b": pytest.approx([1 / 3, 2 / 3]),
    }


def test_rejected_points_and_most_probable_classes_are_drawn():
    function = np.zeros((2, 10, 20, 2))
    function[:, :, 0, 1] = 1.0  # the row without a label
    rejected = np.arange(12.0).reshape(4, 3)
    tree = rows_of(
        {
            "function": (("chain", "draw", "row", "class"), function),
            "rejected": (("chain", "draw", "k", "feature"), np.tile(rejected, (2, 10, 1, 1))),
            "num_rejected": (("chain", "draw"), np.full((2, 10), 3)),
        }
    )
    axes = plot_history(tree)[0].axes[0]
    np.testing.assert_allclose(
        axes.lines[0].get_xydata(), (rejected[:3] * STD + MEAN)[:, 1:], rtol=1e-12
    )
    hollow = [each for each in axes.collections if each.get_facecolor().size == 0]
    places = np.concatenate([each.get_offsets() for each in hollow])
    np.testing.assert_allclose(places, own_units(tree)[:1, 1:])
    red = mpl.colors.to_rgb(model_pictures.COLOURS[1])
    of_guess = next(each for each in hollow if len(each.get_offsets()))
    np.testing.assert_allclose(of_guess.get_edgecolor()[0, :3], red)


def ratings(**attrs):
    return tree_of(
        {"rank": (("chain", "draw"), [[2, 2, 3]])},
        {"row": ("entry", np.array([0, 0, 1])), "column": ("entry", np.array([0, 1, 0]))},
        {"y": ("entry", np.array([-1.0, 0.0, 1.0]))},
        entries='["user", "film"]',
        categories=json.dumps({"user": ["ann", "bob"], "film": ["heat", "jaws"]}),
        shift=3.0,
        scale=2.0,
        target="stars",
        **attrs,
    )


def test_surprising_entries_are_named_in_their_units(monkeypatch):
    """Distances of 1, 4 and 2 deviations."""
    mean, std = np.array([2.0, 1.0, 4.0]), np.array([1.0, 0.5, 0.5])
    monkeypatch.setattr(model_pictures, "predicted_entries", lambda *_: (mean, std))
    figure, note = plot_entries(ratings())
    left, table, below = figure.axes
    assert note == ""
    np.testing.assert_allclose(left.lines[1].get_xydata(), np.stack([mean, [1, 3, 5]], 1))
    assert left.get_ylabel() == "observed stars"
    title, *lines = (line.split() for line in table.texts[0].get_text().splitlines())
    assert title == ["user", "film", "stars", "predicted"]
    assert [line[:4] for line in lines] == [
        ["1", "ann", "jaws", "3"],
        ["2", "bob", "heat", "5"],
        ["3", "ann", "heat", "1"],
    ]
    assert lines[0][4:] == ["1.00", "±", "0.50"]
    heights = [bar.get_height() for bar in below.patches]
    np.testing.assert_allclose(heights, [0, 0, 2 / 3, 1 / 3])


# Kinds.


def test_the_command_names_the_kinds_that_are_drawn():
    assert [*cli.KINDS, *cli.ARVIZ_KINDS] == [
        *[name for name in kinds(rows_of({}), ["share"]) if name in cli.KINDS],
        *cli.ARVIZ_KINDS,
    ]
    assert set(kinds(rows_of({}), ["share"])) == {*cli.KINDS, *cli.ARVIZ_KINDS}


@pytest.mark.parametrize(("kind", "name"), [(None, "run.png"), ("forest", "run-forest.png")])
def test_a_kind_has_a_file_of_its_own(kind, name, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(pictures, "open_run", lambda path: rows_of({}))
    monkeypatch.setattr(pictures, "draw", lambda tree, path, *_: seen.append(path))
    run = str(tmp_path / "run.nc")
    pictures.plot(SimpleNamespace(run=run, output=None, kind=kind, var_names=None))
    assert seen == [tmp_path / name]


def test_help_says_what_each_kind_shows(capsys):
    with pytest.raises(SystemExit):
        cli.main(["plot", "--help"])
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in cli.KINDS)
    assert all(name in out for name in cli.ARVIZ_KINDS)


def test_a_kind_that_a_run_lacks_is_refused_with_those_that_it_has(tmp_path):
    with pytest.raises(ValueError, match=r"--kind elbo: this run of aclass has none; .* classes, "):
        draw(rows_of({}), tmp_path / "elbo.png", "elbo")


@pytest.fixture(scope="module")
def complete():
    """A run that has what most kinds show."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.normal(size=shape)
    form = ("chain", "draw", "row")
    tree = rows_of(
        {
            "z": (form, rng.integers(2, size=(2, 10, 20))),
            "noise": (("chain", "draw", "feature"), normal(2, 10, 3)),
        },
        partition='["z", null]',
    )
    tree["sample_stats"] = xr.DataTree(
        xr.Dataset(
            {
                "elbo": (("chain", "step"), normal(2, 30)),
                "log_evidence": (("chain", "step"), normal(2, 30)),
                "ess": (("chain", "step"), normal(2, 30) ** 2),
                "energy": (("chain", "draw"), normal(2, 10)),
            }
        )
    )
    tree["log_likelihood"] = xr.DataTree(xr.Dataset({"y": (form, normal(2, 10, 20))}))
    return tree


@pytest.mark.parametrize(
    "kind",
    ["partition", "groups", "particles", "elbo", "evidence", "trace", "ess", "pair", "parallel"],
)
def test_a_technical_picture_is_one_panel_or_arviz(kind, complete, tmp_path):
    draw(complete, tmp_path / "out.png", kind, ["noise"])
    assert (tmp_path / "out.png").stat().st_size > 5000


def test_the_default_speaks_of_classes(complete, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "gallery.commands.pictures.plot_classes", lambda tree: seen.append(1) or plot_classes(tree)
    )
    draw(complete, tmp_path / "out.png")
    assert seen == [1]
