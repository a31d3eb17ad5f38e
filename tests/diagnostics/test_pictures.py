"""Pictures: what the artists hold, not only that they are drawn."""

from itertools import pairwise

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.collections import LineCollection

from diagnostics import pictures
from diagnostics.partitions import coclustering, point_estimate
from diagnostics.scores import calibration_curve, expected_calibration_error
from tests.diagnostics import trees


@pytest.fixture
def rng():
    return np.random.default_rng(5)


@pytest.fixture(autouse=True)
def _off_screen():
    import matplotlib.pyplot as plt

    before = mpl.get_backend()
    plt.switch_backend("Agg")
    yield
    plt.close("all")
    plt.switch_backend(before)


@pytest.fixture
def given():
    """An axes of the caller, and the call that renders it."""
    from matplotlib.figure import Figure

    return Figure(layout="constrained").subplots()


def rendered(ax):
    ax.figure.canvas.draw()
    return ax


def curves(ax, prefix):
    return [line for line in ax.lines if str(line.get_label()).startswith(prefix)]


def test_elbo_draws_every_estimate_and_its_moving_mean(rng, given):
    tree = trees.variational(rng)
    ax = pictures.plot_elbo(tree, window=10, ax=given)
    assert ax is given
    trace = tree["sample_stats"]["elbo"].values
    for raw, smooth, values in zip(
        [line for line in ax.lines if line.get_alpha()], curves(ax, "replicate"), trace, strict=True
    ):
        np.testing.assert_array_equal(raw.get_ydata(), values)
        assert smooth.get_xdata()[0] == 10  # the first mean is known after ten steps
        assert smooth.get_ydata()[0] == pytest.approx(values[:10].mean())
        assert smooth.get_ydata()[-1] == pytest.approx(values[-10:].mean())
    low, high = ax.get_ylim()
    assert low < trace[:, 80:].min()
    assert high > trace[:, 80:].max()
    assert low > trace.min() + 10  # the climb is cut
    rendered(ax)


def test_evidence_over_the_shrinkage(rng, given):
    tree = trees.nested(rng)
    ax = rendered(pictures.plot_evidence(tree, ax=given))
    stats = tree["sample_stats"]
    for i, line in enumerate(curves(ax, "replicate")):
        np.testing.assert_array_equal(line.get_xdata(), -stats["log_volume"].values[i])
        np.testing.assert_array_equal(line.get_ydata(), stats["log_evidence"].values[i])
    (final,) = curves(ax, "run")
    assert final.get_ydata()[0] == tree.attrs["log_evidence"]
    band = ax.patches[0].get_extents().transformed(ax.transData.inverted())
    assert band.height == pytest.approx(4 * tree.attrs["log_evidence_se"])
    (beside,) = [other for other in ax.figure.axes if other is not ax]
    corners = beside.collections[0].get_paths()[0].vertices
    peak = corners[corners[:, 1].argmax(), 0]
    # log weight -x - (x - 8)^2 / (2 1.5^2) is largest there
    assert peak == pytest.approx(8 - 1.5**2, abs=0.1)
    x, share = (
        -stats["log_volume"].values[0][1:],
        corners[1 : len(stats["log_volume"].values[0]), 1],
    )
    assert np.sum(share) * (x[1] - x[0]) == pytest.approx(1.0, abs=0.01)


def test_evidence_of_a_filter_over_its_steps(rng):
    tree = trees.particles(rng)
    increments = rng.normal(size=(3, 20))
    stats = tree["sample_stats"].to_dataset()
    tree["sample_stats"].dataset = stats.assign(
        log_evidence=(["chain", "step"], increments.cumsum(1))
    )
    ax = rendered(pictures.plot_evidence(tree))
    np.testing.assert_array_equal(curves(ax, "replicate 2")[0].get_ydata(), increments[2].cumsum())
    assert ax.get_xlabel() == "step"
    assert len(ax.figure.axes) == 1


def test_ancestry_follows_the_parents(rng, given):
    tree = trees.particles(rng, replicates=2, steps=3, size=4)
    stats = tree["sample_stats"].to_dataset()
    stats["ancestor"].values[1] = [[9, 9, 9, 9], [0, 0, 1, 3], [1, 2, 2, 2]]
    tree["sample_stats"].dataset = stats
    ax = rendered(pictures.plot_ancestry(tree, chain=1, ax=given))
    dead, living = (
        next(c for c in ax.collections if isinstance(c, LineCollection) and c.get_label() == name)
        for name in ("died out", "reaches the end")
    )
    edges = lambda lines: sorted((*map(float, a), *map(float, b)) for a, b in lines.get_segments())
    # at step 1 particles 1 and 2 have descendants; they come from 0 and 1 at step 0
    assert edges(living) == [
        (0, 0, 1, 1),
        (0, 1, 1, 2),
        (1, 1, 2, 0),
        (1, 2, 2, 1),
        (1, 2, 2, 2),
        (1, 2, 2, 3),
    ]
    assert edges(dead) == [(0, 0, 1, 0), (0, 3, 1, 3)]
    assert ax.get_title(loc="left").startswith("2 of 4 ")


def test_ancestry_lines_do_not_cross(rng):
    tree = trees.particles(rng, replicates=1)
    parents = rng.integers(0, 200, (1, 20, 200))
    tree["sample_stats"].dataset = (
        tree["sample_stats"].to_dataset().assign(ancestor=(["chain", "step", "particle"], parents))
    )
    ax = pictures.plot_ancestry(tree)
    lines = np.concatenate([c.get_segments() for c in ax.collections])
    for t in range(19):
        here = lines[lines[:, 0, 0] == t]
        here = here[np.argsort(here[:, 0, 1], kind="stable")]
        for place in np.unique(here[:, 0, 1])[1:]:
            assert (
                here[here[:, 0, 1] == place][:, 1, 1].min()
                > here[here[:, 0, 1] < place][:, 1, 1].max()
            )


def test_partition_is_the_sorted_matrix_with_framed_groups(rng, given):
    truth = np.array([0, 1, 1, 0, 1, 2, 1])
    labels = np.where(rng.uniform(size=(2, 50, 7)) < 0.1, 3, truth)
    ax = rendered(pictures.plot_partition(labels, ax=given))
    groups = point_estimate(labels).labels
    assert len(np.unique(groups)) == 3
    shown, together = ax.images[0].get_array(), coclustering(labels).values
    assert sorted(shown.ravel()) == pytest.approx(sorted(together.ravel()))
    assert [patch.get_width() for patch in ax.patches] == [4, 2, 1]  # the largest group first
    for patch in ax.patches:
        low, high = int(patch.get_x() + 0.5), int(patch.get_x() + 0.5 + patch.get_width())
        assert shown[low:high, low:high].min() > 0.6
        assert shown[low:high, [*range(low), *range(high, 7)]].max() < 0.2
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["1", "0", "2"]


def test_partition_of_another_estimate(rng):
    labels = np.array([[0, 0, 1, 1]])
    ax = pictures.plot_partition(labels, estimate=np.array([0, 1, 0, 1]))
    np.testing.assert_array_equal(ax.images[0].get_array()[:2, :2], np.eye(2))
    with pytest.raises(ValueError, match="estimate: one label for each of the 4 rows"):
        pictures.plot_partition(labels, estimate=np.zeros(3, int))


def test_regions_are_pale_where_the_prediction_is_uncertain(rng, given):
    def predict(points):  # two draws; class 1 on the right, with a logistic border at 0
        p = 1 / (1 + np.exp(-4 * points[:, 0]))
        return np.stack([np.stack([1 - p, p], -1)] * 2)

    x = rng.uniform(-3, 3, (40, 2))
    y = (x[:, 0] > 0).astype(int)
    y[:5] = -1
    ax = rendered(
        pictures.plot_decision_regions(
            predict, x, y, class_names=["no", "yes"], resolution=101, ax=given
        )
    )
    image = np.asarray(ax.images[0].get_array())
    left, right, _, _ = ax.images[0].get_extent()
    assert left < x[:, 0].min() < x[:, 0].max() < right
    across = np.linspace(left, right, 101)
    colors = np.array(mpl.colormaps["tab10"].colors[:2])
    # sure: the colour of the class
    np.testing.assert_allclose(image[50, 0], 0.25 + 0.75 * colors[0], atol=0.01)
    np.testing.assert_allclose(image[50, -1], 0.25 + 0.75 * colors[1], atol=0.01)
    middle = np.abs(across).argmin()
    assert image[50, middle].min() > 0.98  # know-nothing: white
    quarter = np.abs(across - np.log(3) / 4).argmin()  # p = 3 / 4 there
    p = 1 / (1 + np.exp(-4 * across[quarter]))
    pale = -(p * np.log(p) + (1 - p) * np.log(1 - p)) / np.log(2)
    np.testing.assert_allclose(image[20, quarter], (1 - pale) * (0.25 + 0.75 * colors[1]) + pale)
    names = [text.get_text() for text in ax.get_legend().get_texts()]
    assert names == ["no class", "no", "yes"]
    assert sum(len(c.get_offsets()) for c in ax.collections if c.get_label() in names) == 40


def test_regions_take_an_estimator(rng):
    from sklearn.linear_model import LogisticRegression

    x = rng.normal(size=(60, 2))
    y = x[:, 0] + x[:, 1] > 0
    model = LogisticRegression().fit(x, y)
    ax = rendered(pictures.plot_decision_regions(model, x, y.astype(int), resolution=30))
    border = next(c for c in ax.collections if type(c).__name__ == "QuadContourSet")
    ends = np.concatenate([path.vertices for path in border.get_paths()])
    np.testing.assert_allclose(model.predict_proba(ends)[:, 1], 0.5, atol=0.02)
    with pytest.raises(ValueError, match=r"x: two features, \[row, 2\]; found shape \(60, 3\)"):
        pictures.plot_decision_regions(model, np.zeros((60, 3)))


def test_calibration_draws_the_curve_and_its_intervals(rng, given):
    p = rng.dirichlet(np.ones(3), size=400)
    y = (p.cumsum(1) < rng.uniform(size=(400, 1))).sum(1)
    ax = rendered(pictures.plot_calibration(y, p, of=2, bins=5, ax=given))
    curve = calibration_curve(y, p, of=2, bins=5)
    line, _, (bars,) = ax.containers[1].lines
    np.testing.assert_array_equal(line.get_xdata(), curve["predicted"])
    np.testing.assert_array_equal(line.get_ydata(), curve["observed"])
    ends = np.array([segment[:, 1] for segment in bars.get_segments()])
    np.testing.assert_allclose(ends, np.stack([curve["lower"], curve["upper"]], -1))
    heights = np.array([bar.get_height() for bar in ax.containers[0]])
    np.testing.assert_allclose(heights / heights.sum(), curve["count"] / 400)
    assert ax.get_title().endswith(f"{expected_calibration_error(y, p, of=2, bins=5):.3f}")
    assert ax.get_xlabel() == "probability of class 2"


def test_one_outlier_does_not_set_the_range_of_the_elbo(rng):
    tree = trees.variational(rng)
    plain = pictures.plot_elbo(tree).get_ylim()
    elbo = tree["sample_stats"]["elbo"].values.copy()
    elbo[1, 250] = -2000.0
    ax = rendered(pictures.plot_elbo(trees.replaced(tree, "sample_stats", "elbo", elbo)))
    assert ax.get_ylim() == pytest.approx(plain, abs=0.1)
    # no outlier: a start that ended elsewhere
    two = tree["sample_stats"]["elbo"].values - np.array([[0.0], [0.0], [30.0]])
    assert pictures.plot_elbo(trees.replaced(tree, "sample_stats", "elbo", two)).get_ylim()[0] < -50


@pytest.mark.parametrize("name", ["log_evidence", "log_volume"])
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_evidence_that_is_not_finite_is_left_out(rng, name, value):
    tree = trees.nested(rng)
    values = tree["sample_stats"][name].values.copy()
    values[1, 1500:] = value
    ax = rendered(pictures.plot_evidence(trees.replaced(tree, "sample_stats", name, values)))
    one, other = curves(ax, "replicate")
    assert (len(one.get_xdata()), len(other.get_xdata())) == (2000, 1500)
    assert other.get_label().endswith(f"{tree['sample_stats']['log_evidence'].values[1, 1499]:.2f}")
    values[1] = value
    ax = rendered(pictures.plot_evidence(trees.replaced(tree, "sample_stats", name, values)))
    assert curves(ax, "replicate 1")[0].get_label() == "replicate 1: not finite"
    values[:] = value
    with pytest.raises(
        ValueError, match="plot_evidence: no step of any replicate has a finite log-evidence"
    ):
        pictures.plot_evidence(trees.replaced(tree, "sample_stats", name, values))


def test_a_run_whose_evidence_is_not_finite_has_no_line(rng):
    ax = rendered(pictures.plot_evidence(trees.nested(rng, log_evidence=-np.inf)))
    assert not curves(ax, "run")
    assert np.isfinite(ax.get_ylim()).all()


def test_one_step_has_no_ancestry(rng):
    with pytest.raises(ValueError, match="plot_ancestry: 1 steps have no ancestry; wanted two"):
        pictures.plot_ancestry(trees.particles(rng, steps=1))


def test_labels_of_many_groups_do_not_overlap():
    """Labels of forty groups, one of them large, stand at least the height of a line apart."""
    truth = np.repeat(np.arange(40), [100] + [2] * 39)
    ax = rendered(pictures.plot_partition(np.tile(truth, (5, 1))))
    boxes = sorted(text.get_window_extent().bounds[1::2] for text in ax.get_yticklabels())
    assert len(boxes) > 5
    for (low, height), (above, _) in pairwise(boxes):
        assert low + height <= above + 1
    assert ax.get_ylabel() == "group of the point estimate (40; labels left out)"
    names = [int(text.get_text()) for text in ax.get_yticklabels()]
    for name, place in zip(names, ax.get_yticks(), strict=True):
        assert place == pytest.approx(np.flatnonzero(truth == name).mean())


@pytest.mark.parametrize("labels", [["a", "b"], [10, 30], [-1, 1], [False, True]], ids=str)
def test_regions_take_the_classes_of_the_estimator(rng, labels):
    from sklearn.linear_model import LogisticRegression

    x = rng.normal(size=(60, 2))
    y = np.array(labels)[(x[:, 0] > 0).astype(int)]
    ax = rendered(
        pictures.plot_decision_regions(LogisticRegression().fit(x, y), x, y, resolution=20)
    )
    names = [label if isinstance(label, str) else f"class {label}" for label in labels]
    points = {c.get_label(): c for c in ax.collections if c.get_label() in names}
    assert list(points) == names
    colors = np.array(mpl.colormaps["tab10"].colors[:2])
    for k, name in enumerate(names):
        assert np.sign(points[name].get_offsets()[:, 0]).tolist() == [2 * k - 1] * len(
            points[name].get_offsets()
        )
        np.testing.assert_allclose(points[name].get_facecolor()[0, :3], colors[k])


def test_regions_refuse_classes_that_are_none(rng):
    from sklearn.linear_model import LogisticRegression

    x = rng.normal(size=(20, 2))
    half = lambda points: np.full((len(points), 2), 0.5)
    model = LogisticRegression().fit(x, np.where(x[:, 0] > 0, "a", "b"))
    for predict, y, message in (
        (half, np.full(20, 2), r"y: 2 is no class of the prediction; wanted \[0, 1\], or -1"),
        (half, np.full(20, "a"), r"y: 'a' is no class"),
        (model, np.zeros(20, int), r"y: 0 is no class of the prediction; wanted \['a', 'b'\]"),
        (model, np.full(19, "a"), r"y: one class a row, shape \(20,\); found shape \(19,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            pictures.plot_decision_regions(predict, x, y, resolution=5)


def test_a_picture_without_its_figures_says_what_is_missing(rng):
    for draw, name in (
        (pictures.plot_elbo, "elbo"),
        (pictures.plot_evidence, "log_evidence"),
        (pictures.plot_ancestry, "ancestor"),
    ):
        with pytest.raises(
            ValueError, match=f"{draw.__name__}: needs sample_stats '{name}'.*energy"
        ):
            draw(trees.chains(rng))
    with pytest.raises(ValueError, match="window: from 1 to the 400 steps"):
        pictures.plot_elbo(trees.variational(rng), window=0)


def test_none_makes_a_figure_and_nothing_is_shown(rng, monkeypatch):
    import matplotlib.pyplot as plt

    monkeypatch.setattr(plt, "show", lambda: pytest.fail("a picture called show"))
    ax = rendered(pictures.plot_elbo(trees.variational(rng)))
    assert ax.figure.get_layout_engine() is not None
