"""The lines about a run, next to trees whose draws are made up."""

import json

import numpy as np
import xarray as xr

from diagnostics import report
from gallery._dataset import Dataset
from gallery.commands.findings import contrasts, findings
from gallery.commands.reports import trust_text

FEATURES = ["height", "colour"]


def tree_of(posterior, constant=None, observed=None, names=None, **attrs):
    """A run of `zoo fit` as later commands see it."""
    tree = xr.DataTree.from_dict(
        {
            "posterior": xr.Dataset(posterior),
            "constant_data": xr.Dataset(constant or {}, names or {}),
            "observed_data": xr.Dataset(observed or {}),
        }
    )
    arrays = {name: ("constant_data", name) for name in ("x",) if name in (constant or {})}
    arrays |= {name: ("observed_data", name) for name in ("y",) if name in (observed or {})}
    given = {"model": "aclass", "data": "mine", "arrays": json.dumps(arrays), "categories": "{}"}
    tree.attrs = given | attrs
    return tree


def classified(posterior, **attrs):
    rng = np.random.default_rng(0)
    y = np.array([0, 0, 0, 1, 1, 1, 1, -1])
    x = np.stack([rng.normal(size=8) + 2 * y, rng.integers(3, size=8).astype(float)], axis=1)
    x[2, 0] = np.nan
    return tree_of(
        posterior,
        {"x": (("row", "feature"), x)},
        {"y": ("row", y)},
        {"feature": FEATURES, "class": ["lo", "hi"]},
        **{"categories": json.dumps({"colour": ["blue", "red", "tan"]})} | attrs,
    )


def test_a_class_has_its_groups_and_the_columns_that_tell_it_apart():
    z = np.array([[[0, 0, 0, 0, 1, 2, 2, 5]] * 3 + [[0, 1, 1, 0, 0, 0, 0, 5]]])  # [1, 4, row]
    tree = classified({"z": (("chain", "draw", "row"), z)}, partition='["z", "y"]')
    x, y = tree["constant_data"]["x"].values[:7], tree["observed_data"]["y"].values[:7]
    columns = {"height": x[:, 0]}
    columns |= {f"colour={name}": x[:, 1] == k for k, name in enumerate(["blue", "red", "tan"])}
    apart = {
        name: (np.nanmean(values[y == 0]) - np.nanmean(values[y == 1])) / np.nanstd(values)
        for name, values in columns.items()
    }
    top = sorted(apart, key=lambda name: -abs(apart[name]))[:3]
    assert [line.split("  ")[0] for line in findings(tree)] == ["class", "lo", "hi"]
    title, low, high = ([cell for cell in line.split("  ") if cell] for line in findings(tree))
    assert [cell.strip() for cell in title] == [
        "class",
        "labelled rows",
        "groups",
        "mean furthest from the other classes, in sd",
    ]
    words = ", ".join(f"{name} {apart[name]:+.2g}" for name in top)
    assert [cell.strip() for cell in low] == ["lo", "43%", "1 (75% of draws)", words]
    words = ", ".join(f"{name} {-apart[name]:+.2g}" for name in top)
    assert [cell.strip() for cell in high] == ["hi", "57%", "3 (75% of draws)", words]


def test_a_column_that_does_not_vary_tells_nothing_apart():
    data = Dataset("mine", "", {}, feature_names=("a", "b"))
    x = np.array([[1.0, 0.0], [1.0, 2.0], [1.0, np.nan]])
    assert contrasts(x, np.array([True, False, False]), data) == [("b", -2.0)]


def test_linear_weights_of_a_class_are_its_own():
    weights = np.zeros((1, 2, 2, 2))
    weights[0, :, 0] = [[1.0, -3.0], [2.0, -4.0]]
    dims = ("chain", "draw", "class", "feature")
    lines = findings(classified({"weights": (dims, weights)}))
    assert lines[0].endswith("largest weights")
    assert lines[1].endswith("colour -3.5, height +1.5")


def test_experts_are_counted_by_size_whatever_their_labels():
    z = np.array([[[0, 0, 0, 1], [2, 1, 1, 1], [0, 0, 0, 0]]])
    draws = {
        "z": (("chain", "draw", "row"), z),
        "mu": (("chain", "draw", "expert"), np.zeros((1, 3, 4))),
    }
    [line] = findings(tree_of(draws))
    assert line == "experts in use: 2 (67% of draws) of 4; shares of rows 83%, 17%"


def test_rank_and_effects_have_names_and_units():
    """The third user's effect is two draws of opposite signs, and the films' weights are two each."""
    rows = np.array([[0.5, -1.0, 3.0], [0.5, -1.0, 3.0], [0.5, -1.0, -4.0]])[None, ..., None]
    draws = {
        "rank": (("chain", "draw"), [[2, 2, 3]]),
        "row_weights": (("chain", "draw", "row", "f"), rows),
        "column_weights": (("chain", "draw", "column", "g"), np.ones((1, 3, 2, 2))),
    }
    categories = json.dumps({"user": ["ann", "bob", "cid"], "film": ["f", "g"]})
    tree = tree_of(draws, entries='["user", "film"]', categories=categories, scale=3.0)
    assert findings(tree) == ["rank: 2 (67% of draws)", "effects of user: bob -3, ann +1.5"]
    tree["posterior"]["row_weights"] *= 0
    assert findings(tree)[1] == "effects of user: none is clearly different from 0"


def test_clusters_are_those_of_the_likeliest_draw():
    draws = {
        "beta": (("chain", "draw", "cluster"), [[[0.3, 0.7], [0.5, 0.5]]]),
        "gamma": (("chain", "draw", "cluster", "class"), [[[[0.9, 0.1], [0.2, 0.8]]] * 2]),
        "mu": (("chain", "draw", "cluster", "feature"), [[[[0, 1.0], [-2, 1]]] * 2]),
    }
    tree = classified(draws)
    tree["log_likelihood"] = xr.DataTree(
        xr.Dataset({"y": (("chain", "draw", "row"), [[[-1.0, -1.0], [-1.0, -2.0]]])})
    )
    lines = [" ".join(line.split()) for line in findings(tree)]
    assert lines[1:3] == ["0 70% hi 80% height -2, colour +1", "1 30% lo 90% colour +1, height +0"]


def test_rejected_points_are_counted():
    [line] = findings(tree_of({"num_rejected": (("chain", "draw"), [[3, 4, 8]])}))
    assert line == "rejected points: 5.0, the mean over draws"


def test_trust_is_the_report_s_and_says_what_to_do():
    tree = tree_of({"mu": (("chain", "draw"), np.zeros((2, 5)))}, report="chains", kernel="NUTS")
    found = report(tree)
    failed = next(verdict for verdict in found.verdicts if verdict.ok is False)
    text = " ".join(trust_text(tree, "run.nc").split())
    wanted = f"{found.text.splitlines()[0]} {failed.reason} More: zoo report run.nc"
    assert text == " ".join(wanted.split())
