"""Partitions: losses equal to scikit-learn's, searches equal to enumeration, balls equal to
their definition.
"""

import json
from itertools import combinations

import numpy as np
import pytest
import xarray as xr
from scipy.stats import entropy
from sklearn.cluster import AgglomerativeClustering
from sklearn.metrics import adjusted_rand_score, mutual_info_score, rand_score
from sklearn.mixture import GaussianMixture

from diagnostics import partitions
from diagnostics.partitions import (
    coclustering,
    credible_ball,
    distances,
    expected_loss,
    num_groups,
    partition_of,
    point_estimate,
)
from inference import Driver, ParticleFilter
from tests.inference.partitions import Mixture, bernoulli
from zoo.aclass import aclass

BELL = [1, 1, 2, 5, 15, 52, 203, 877]


def sklearn_loss(a, b, loss, sign=-1):
    if loss == "binder":
        return 1 - rand_score(a, b)
    return entropy(np.bincount(a)) + entropy(np.bincount(b)) + 2 * sign * mutual_info_score(a, b)


def all_partitions(n):
    """Restricted growth strings."""
    found = [[0]]
    for _ in range(n - 1):
        found = [[*one, k] for one in found for k in range(max(one) + 2)]
    return np.array(found)


def mean_loss(draws, one, loss):
    return np.mean([sklearn_loss(draw, one, loss) for draw in draws])


@pytest.fixture
def rng():
    return np.random.default_rng(3)


def noisy(rng, n, draws, groups=3, flips=0.3):
    truth = rng.integers(0, groups, n)
    return np.where(
        rng.uniform(size=(draws, n)) < flips, rng.integers(0, groups + 1, (draws, n)), truth
    )


@pytest.mark.parametrize("loss", ["vi", "binder"])
def test_losses_are_scikit_learn_s(rng, loss):
    labels, center = rng.integers(-2, 4, (2, 5, 30)), rng.integers(0, 5, 30)
    found = distances(labels, center, loss)
    assert found.shape == (2, 5)
    reference = [[sklearn_loss(draw + 2, center, loss) for draw in chain] for chain in labels]
    np.testing.assert_allclose(found, reference, atol=1e-12)
    assert expected_loss(labels, center, loss) == pytest.approx(np.mean(reference))


def test_a_wrong_sign_in_vi_would_be_seen(rng):
    a, b = rng.integers(0, 3, 30), rng.integers(0, 3, 30)
    assert abs(distances(a[None], b)[0] - sklearn_loss(a, b, "vi", sign=1)) > 0.05


def test_names_of_labels_mean_nothing(rng):
    labels = noisy(rng, 12, 20)
    renamed = np.stack([rng.permutation(9)[draw] for draw in labels])
    assert point_estimate(labels).labels.tolist() == point_estimate(renamed).labels.tolist()
    np.testing.assert_array_equal(coclustering(labels), coclustering(renamed))


@pytest.mark.parametrize("loss", ["vi", "binder"])
@pytest.mark.parametrize("n", [1, 2, 5, 7])
def test_search_finds_the_least_expected_loss_of_all_partitions(n, loss):
    every = all_partitions(n)
    assert len(every) == BELL[n]
    for seed in range(3):
        draws = noisy(np.random.default_rng(seed), n, 25, flips=0.5)
        # the table of all partitions by the definition of the loss on crossings is checked against
        # scikit-learn above
        losses = np.array([expected_loss(draws, one, loss) for one in every])
        found = point_estimate(draws, loss, seed=seed)
        assert found.expected_loss == pytest.approx(losses.min(), abs=1e-12)
        assert mean_loss(draws, found.labels, loss) == pytest.approx(losses.min(), abs=1e-12)


def test_search_that_only_looks_at_draws_would_miss_it():
    """The best partition is often no draw at all: taking the best draw fails the enumeration."""
    missed = 0
    for seed in range(6):
        draws = noisy(np.random.default_rng(seed), 7, 25, flips=0.5)
        best_draw = min(expected_loss(draws, draw) for draw in draws)
        missed += best_draw > point_estimate(draws, seed=seed).expected_loss + 1e-9
    assert missed >= 2


def test_binder_depends_on_the_coclustering_alone(rng):
    """Mean over pairs of the probability of the wrong answer (Wade and Ghahramani, section 2)."""
    labels = noisy(rng, 15, 40)
    together = coclustering(labels).values
    one = point_estimate(labels, "binder").labels
    pairs = np.triu_indices(15, 1)
    wrong = np.where((one[:, None] == one)[pairs], 1 - together[pairs], together[pairs])
    assert expected_loss(labels, one, "binder") == pytest.approx(wrong.mean())


def test_coclustering_and_number_of_groups_by_hand():
    labels = xr.DataArray(
        [[[0, 0, 1], [5, 5, 5]], [[2, 1, 2], [1, 1, 0]]], dims=("chain", "draw", "row")
    )
    np.testing.assert_allclose(
        coclustering(labels), [[1, 0.75, 0.5], [0.75, 1, 0.25], [0.5, 0.25, 1]]
    )
    found = num_groups(labels)
    assert dict(zip(found["groups"].values.tolist(), found.values.tolist(), strict=True)) == {
        1: 0.25,
        2: 0.75,
    }


@pytest.mark.parametrize("loss", ["vi", "binder"])
def test_ball_is_the_smallest_that_holds_its_level(rng, loss):
    draws = noisy(rng, 6, 200, flips=0.5)
    center = point_estimate(draws, loss).labels
    ball = credible_ball(draws, center, 0.8, loss)
    apart = np.array([sklearn_loss(draw, center, loss) for draw in draws])
    inside = apart <= ball.radius + 1e-9
    assert ball.probability == pytest.approx(inside.mean())
    assert inside.mean() >= 0.8
    assert (apart < ball.radius - 1e-9).mean() < 0.8  # a smaller radius holds less
    counts = np.array([len(set(draw)) for draw in draws])
    for bound, chosen in (
        (ball.upper, inside & (counts == counts[inside].min())),
        (ball.lower, inside & (counts == counts[inside].max())),
        (ball.horizontal, inside),
    ):
        furthest = apart[chosen].max()
        expected = {
            tuple(partitions._canonical(draw)) for draw in draws[chosen & (apart > furthest - 1e-9)]
        }
        assert {tuple(one) for one in bound.tolist()} == expected


def test_ball_of_one_partition_has_radius_zero():
    ball = credible_ball(np.array([[1, 1, 2]] * 10), np.array([0, 0, 1]))
    assert (ball.radius, ball.probability) == (0.0, 1.0)
    assert ball.upper.tolist() == ball.lower.tolist() == ball.horizontal.tolist() == [[0, 0, 1]]


def test_known_mixture_is_recovered_as_scikit_learn_recovers_it(rng):
    """Draws of labels from the exact posterior of a known mixture; the estimate is as near to
    the truth as the best classifier.
    """
    truth = np.repeat([0, 1, 2], 30)
    x = np.array([[-4.0, 0], [0, 4], [4, 0]])[truth] + rng.normal(size=(90, 2))
    mixture = GaussianMixture(3, random_state=0).fit(x)
    gumbel = rng.gumbel(size=(300, 90, 3))
    labels = (np.log(mixture.predict_proba(x)) + gumbel).argmax(-1)
    found = point_estimate(labels, restarts=3)
    assert adjusted_rand_score(found.labels, mixture.predict(x)) > 0.95
    assert adjusted_rand_score(found.labels, truth) > 0.9
    tree = AgglomerativeClustering(3, metric="precomputed", linkage="average").fit_predict(
        1 - coclustering(labels).values
    )
    assert found.expected_loss <= expected_loss(labels, tree) + 1e-12
    assert found.expected_loss <= expected_loss(labels, mixture.predict(x)) + 1e-12
    assert num_groups(labels).sel(groups=3) > 0.99


def test_input_is_checked(rng):
    with pytest.raises(ValueError, match="labels: integers"):
        coclustering(rng.normal(size=(3, 4)))
    with pytest.raises(ValueError, match="loss: 'ari' unknown"):
        point_estimate(np.zeros((2, 3), int), loss="ari")
    with pytest.raises(ValueError, match=r"center: one label a row, shape \(3,\)"):
        credible_ball(np.zeros((2, 3), int), np.zeros(4, int))
    with pytest.raises(ValueError, match="level"):
        credible_ball(np.zeros((2, 3), int), np.zeros(3, int), level=0.0)
    for wrong in (np.array([0, 0, 1]), np.zeros((2, 3, 4, 5), int)):
        for question in (
            num_groups,
            coclustering,
            point_estimate,
            lambda labels: distances(labels, np.zeros(3, int)),
        ):
            with pytest.raises(
                ValueError, match=r"labels: \(chain, draw, row\) or \[draw, row\]; found shape"
            ):
                question(wrong)
    with pytest.raises(ValueError, match="center: .* integers; found float64"):
        credible_ball(np.zeros((2, 3), int), np.zeros(3))


def test_dimensions_of_a_data_array_may_come_in_any_order(rng):
    labels = xr.DataArray(noisy(rng, 8, 100).reshape(2, 50, 8), dims=("chain", "draw", "row"))
    center = point_estimate(labels).labels
    for order in (("row", "chain", "draw"), ("draw", "row", "chain")):
        turned = labels.transpose(*order)
        np.testing.assert_array_equal(coclustering(turned), coclustering(labels))
        np.testing.assert_array_equal(num_groups(turned), num_groups(labels))
        np.testing.assert_array_equal(distances(turned, center), distances(labels, center))
        np.testing.assert_array_equal(point_estimate(turned).labels, center)
        assert credible_ball(turned, center).radius == credible_ball(labels, center).radius
    flat = labels.isel(chain=0)
    np.testing.assert_array_equal(coclustering(flat.transpose("row", "draw")), coclustering(flat))
    # an array has only its order
    assert coclustering(labels.transpose("row", "chain", "draw").values).shape == (50, 50)


@pytest.mark.parametrize("loss", ["vi", "binder"])
def test_blocks_of_draws_give_what_all_of_them_give(rng, loss, monkeypatch):
    labels, center = rng.integers(0, 6, (40, 30)), rng.integers(0, 5, 30)
    whole = distances(labels, center, loss)
    sizes = []
    counted = np.bincount
    monkeypatch.setattr(partitions, "MOST_COUNTS", 100)  # crossings: three draws at a time
    monkeypatch.setattr(
        partitions.np,
        "bincount",
        lambda *args, **kwargs: sizes.append(kwargs["minlength"]) or counted(*args, **kwargs),
    )
    np.testing.assert_array_equal(distances(labels, center, loss), whole)
    assert len(sizes) == 14
    assert max(sizes) <= 100


# The labels of a run.

Z = np.array([[[0, 0, 1, 0], [0, 1, 0, 0]], [[0, 0, 0, 1], [0, 0, 0, 0]]])  # within each class
KNOWN = np.array([0, 1, 0, 1])
# rows 2 and 3 have no label
DRAWN = np.array([[[0, 1, 0, 1], [0, 1, 0, 0]], [[0, 1, 1, 1], [0, 1, 0, 1]]])


def left_behind(posterior, observed=None, partition=("z", "y")):
    """The tree of a run, with other draws beside those of the partition."""
    drawn = {name: (("chain", "draw", "row"), value) for name, value in posterior.items()}
    drawn["share"] = (("chain", "draw", "class"), np.full((2, 2, 2), 0.5))
    groups = {
        "posterior": drawn,
        "observed_data": {name: (("row",), value) for name, value in (observed or {}).items()},
    }
    tree = xr.DataTree.from_dict(
        {name: xr.Dataset(variables) for name, variables in groups.items()}
    )
    tree.attrs = {} if partition is None else {"partition": json.dumps(partition)}
    return tree


TREES = {
    "observed": (left_behind({"z": Z}, {"y": KNOWN, "x": KNOWN}), KNOWN),
    "observed, under a mask": (left_behind({"z": Z}, {"y_observed": KNOWN}), KNOWN),
    "partly latent": (
        left_behind({"z": Z, "y_unobserved": DRAWN}, {"y_observed": np.zeros(4, int)}),
        DRAWN,
    ),
    "latent": (left_behind({"z": Z, "y": DRAWN}), DRAWN),
    "none": (left_behind({"z": Z}, partition=("z", None)), 0),
    "in a scope": (left_behind({"a.z": Z, "a.y": DRAWN}, partition=("a/z", "a/y")), DRAWN),
}


def check_pairs(labels, classes):
    """Two rows are together where both class and group are the same."""
    assert labels.dims == ("chain", "draw", "row")
    classes = np.broadcast_to(classes, Z.shape)
    for i, j in combinations(range(4), 2):
        together = (classes[..., i] == classes[..., j]) & (Z[..., i] == Z[..., j])
        np.testing.assert_array_equal(labels[..., i] == labels[..., j], together)


@pytest.mark.parametrize("name", TREES)
def test_rows_of_different_classes_are_apart(name):
    tree, classes = TREES[name]
    check_pairs(partition_of(tree), classes)


def test_the_partition_alone_would_join_classes():
    with pytest.raises(AssertionError):
        check_pairs(TREES["observed"][0]["posterior"]["z"], KNOWN)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (
            left_behind({"z": Z}, partition=None),
            "partition_of: the run does not say which site is a partition",
        ),
        (
            left_behind({}),
            "partition_of: the run has no draws of 'z'; run the filter with keep_assignments=True",
        ),
        (
            left_behind({"z": Z}),
            "partition_of: the run has no classes 'y', within which 'z' counts groups",
        ),
    ],
    ids=["another kernel", "not kept", "no classes"],
)
def test_a_run_without_a_partition_is_refused(tree, message):
    with pytest.raises(ValueError, match=message):
        partition_of(tree)


@pytest.mark.slow
@pytest.mark.usefixtures("numpyro_promotion")
def test_the_partition_of_a_real_run_is_that_of_an_enumeration():
    """With a particle for every answer, a label that is missing included."""
    x, y = np.array([[1.0, 1], [1, 1], [0, 1], [0, 0], [0, np.nan]]), np.array([-1, 0, 1, 0, 1])
    driver = Driver(ParticleFilter(aclass, num_particles=32), num_samples=8000, progress_bar=False)
    found = partition_of(driver.run(0, x, y, num_classes=2))
    exact = Mixture(bernoulli, num_classes=2, gamma=(1.0, 1.0)).answers(x, y)
    whole = exact.labels * 5 + exact.groups
    together = exact.posterior @ (whole[:, :, None] == whole[:, None, :]).reshape(len(whole), -1)
    np.testing.assert_allclose(coclustering(found).values.ravel(), together, atol=0.02)
    counts = np.array([len(set(labels)) for labels in whole])
    share = [exact.posterior[counts == groups].sum() for groups in range(1, 6)]
    np.testing.assert_allclose(
        num_groups(found).reindex(groups=range(1, 6), fill_value=0), share, atol=0.02
    )
    mean_loss = [
        exact.posterior @ [sklearn_loss(each, one, "vi") for each in whole]
        for one in all_partitions(5)
    ]
    assert point_estimate(found).labels.tolist() == all_partitions(5)[np.argmin(mean_loss)].tolist()
