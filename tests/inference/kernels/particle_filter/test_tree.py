"""What a run of the particle filter leaves behind, and what it is refused: settings, and bad
input.
"""

import json
from dataclasses import replace

import arviz as az
import jax
import numpy as np
import numpyro.distributions as dist
import pytest
import xarray as xr
from jax import random
from scipy.special import logsumexp
from scipy.stats import gamma

from diagnostics import report
from inference import Driver, ParticleFilter, Program, StructureError
from inference.kernels.particle_filter import kernel as particle_filter
from inference.maths.averages import log_mean_error
from inference.reading.crp_mixture import read_partition
from tests.inference.filters import (
    OPTIONS,
    RNG,
    X,
    Y,
    check_same,
    driver,
    kernel,
    program,
    put,
    run,
    values,
    whole,
)
from tests.inference.replicates import promoted
from zoo.aclass import aclass, beta_bernoulli, normal_inverse_chi2, normal_inverse_wishart

pytestmark = pytest.mark.usefixtures("x64", "numpyro_promotion")


def test_groups_and_dimensions():
    _, tree = whole(True)
    assert tree.attrs["partition"] == json.dumps(["z", "y"])
    # one filter, of both classes
    of_particle = {"chain": 2, "point": 1, "filter": 1, "particle": 8}
    of_row = {"chain": 2, "point": 1, "particle": 8, "row": 27}
    wanted = {
        "posterior/z": {"chain": 2, "draw": 50, "row": 27},
        "posterior/y_unobserved": {"chain": 2, "draw": 50, "row": 27},
        "posterior/share": {"chain": 2, "draw": 50, "class": 2},
        **{
            f"sample_stats/{name}": {"chain": 2, "step": 27}
            for name in ("ess", "resampled", "num_groups", "log_evidence")
        },
        "particles/log_weight": of_particle,
        "particles/num_groups": {**of_particle, "class": 2},
        "particles/class_of_row": of_row,
        "particles/group_of_row": of_row,
        "ancestry/unique_ancestors": {"chain": 2, "row": 27},
        "observed_data/y_observed": {"row": 27},
        "observed_data/x": {"row": 27, "feature": 3},
        "constant_data/y": {"y_dim_0": 27},
        "log_evidence": {},
    }
    assert {name: dict(value.sizes) for name, value in values(tree).items()} == wanted
    _, apart = whole()
    assert dict(apart["particles"]["log_weight"].sizes) == {**of_particle, "filter": 2}
    assert set(apart["posterior"].data_vars) == {"z", "share"}


def test_the_evidence_grows_by_what_each_row_adds():
    """A row of which nothing is known adds the probability of its class."""
    _, tree = whole()
    path = tree["sample_stats"]["log_evidence"].values
    np.testing.assert_array_equal(tree.attrs["log_evidence_of_replicates"], path[:, -1])
    np.testing.assert_allclose(
        path[:, 5] - path[:, 4], np.log((1 + (Y[:5] == Y[5]).sum()) / (2 + 5)), rtol=1e-12
    )


def test_replicates_are_averaged_as_evidences():
    _, tree = whole(num_chains=4)
    each = tree.attrs["log_evidence_of_replicates"]
    assert each.shape == (4,)
    ratio = np.exp(each - tree.attrs["log_evidence"])
    assert ratio.mean() == pytest.approx(1.0, rel=1e-12)
    assert tree.attrs["log_evidence_se"] == log_mean_error(each)
    assert tree.attrs["log_evidence_se"] == pytest.approx(each.std(ddof=1) / 2, rel=0.2)
    # the mean of the logarithms is another number
    assert abs(each.mean() - tree.attrs["log_evidence"]) > 1e-6


@pytest.fixture(scope="module")
def five_rows():
    """After a few rows there are fewer partitions than particles, and they are uneven."""
    with jax.enable_x64(True), promoted():
        this = driver(num_chains=1)
        this.num_warmup = 5
        tree = this.run(0, X, Y, **OPTIONS)
        assert tree.attrs["ended"] == "budget"
        return this, tree


def test_draws_are_particles_by_weight(five_rows):
    """The partition of a class in a draw is that of a particle of its filter, as often as its
    weight says.
    """
    this, tree = five_rows
    drawn = this.kernel.draw(
        random.key(1), this.states[0], this.reading, this.kernel.read(this.program)[1], 4000
    )
    for label in range(2):
        filtered, rows = tree["particles"].isel(chain=0, point=0), np.flatnonzero(label == Y[:5])
        weight = np.exp(filtered["log_weight"].values[label])
        of_particle, used = filtered["group_of_row"].values[:, rows], weight > 0
        assert len(np.unique(of_particle[used], axis=0)) == used.sum() > 1
        assert (of_particle.max(1) + 1 == filtered["num_groups"].values[label, :, 0])[used].all()
        share = (np.asarray(drawn["z"])[:, None, rows] == of_particle).all(-1).mean(0)
        np.testing.assert_allclose(share[used], weight[used], atol=0.03)
        # each as often as the others would be wrong
        assert abs(share[used] - 1 / used.sum()).max() > 0.06


def ancestors(state, y):
    """How many particles of each row those in use at the end come from, one parent after the
    other.
    """
    parent, link, joined = (
        np.asarray(part)
        for part in (state.genealogy.parent[:, 0], state.genealogy.link[0], state.genealogy.joined)
    )
    alive = [np.flatnonzero(each > -np.inf) for each in state.groups.log_weight[0]]
    counts = []
    for row in reversed(range(int(state.seen))):
        if row == joined - 1:
            alive = [each[alive[0]] for each in link]
        own = y[row] if len(alive) > 1 else 0
        alive[own] = np.unique(alive[own])
        counts.append(len(alive[own]))
        alive[own] = parent[row, alive[own]]
    return counts[::-1]


@pytest.mark.parametrize("later", [False, True], ids=["classes apart", "joined"])
def test_ancestors_are_counted(later):
    this, tree = whole(later)
    for state, found in zip(this.states, tree["ancestry"]["unique_ancestors"], strict=True):
        np.testing.assert_array_equal(found, ancestors(state, Y))


def test_particles_that_are_not_in_use_are_no_ancestors(five_rows):
    this, tree = five_rows
    assert (tree["particles"]["log_weight"].values == -np.inf).any()
    np.testing.assert_array_equal(
        tree["ancestry"]["unique_ancestors"][0], ancestors(this.states[0], Y)
    )


def test_arviz_reads_the_tree_and_its_file(tmp_path):
    _, tree = whole(num_chains=4)
    assert list(az.summary(tree, var_names=["share"]).index) == ["share[0]", "share[1]"]
    tree.to_netcdf(tmp_path / "run.nc", engine="h5netcdf")
    with xr.open_datatree(tmp_path / "run.nc", engine="h5netcdf") as again:
        check_same(again, tree)
        assert report(again).text == report(tree).text


def test_one_replicate_is_undecided_and_four_are_trusted():
    assert report(whole(num_chains=1)[1]).conclusion == "undecided"
    assert report(whole(num_chains=4)[1]).conclusion == "trusted"


LATENT = OPTIONS | {"alpha": dist.Gamma(1.5, 1.0)}


@pytest.mark.slow
def test_a_grid_is_in_the_tree():
    """The points and their posterior: prior density times spacing times evidence."""
    alpha = np.array([0.3, 1.0, 4.0])
    this = Driver(
        ParticleFilter(aclass, num_particles=8, grid={"alpha": alpha}),
        num_samples=4000,
        progress_bar=False,
    )
    tree = this.run(0, X, Y, **LATENT)
    grid = tree["grid"].isel(chain=0)
    assert grid["alpha"].dims == grid["log_weight_of_point"].dims == ("point",)
    np.testing.assert_array_equal(grid["alpha"], alpha)
    prior = gamma.logpdf(alpha, 1.5) + np.log([0.7, 1.85, 3.0])
    joint = prior - logsumexp(prior) + np.asarray(this.states[0].log_evidence)
    np.testing.assert_allclose(grid["log_weight_of_point"], joint - logsumexp(joint), rtol=1e-10)
    assert tree.attrs["log_evidence"] == pytest.approx(logsumexp(joint), rel=1e-12)
    share = (tree["posterior"]["alpha"].values[0, :, None] == alpha).mean(0)
    np.testing.assert_allclose(share, np.exp(grid["log_weight_of_point"]), atol=0.03)


# Settings.


def test_assignments_that_are_not_kept_change_nothing_else():
    (other, wanted), (this, tree) = whole(), run(keep_assignments=False)
    assert set(tree["posterior"].data_vars) == {"share"}
    assert set(tree["particles"].data_vars) == {"log_weight", "num_groups"}
    assert "ancestry" not in tree.children
    found, wanted = values(tree), values(wanted)
    for name in found.keys() - {"log_evidence"}:
        np.testing.assert_array_equal(found[name], wanted[name], err_msg=name)
    np.testing.assert_array_equal(
        *(
            each.kernel.log_classes(each.states[0], each.reading, program(X, Y))
            for each in (this, other)
        )
    )


def test_memory_is_constant_without_assignments(monkeypatch):
    monkeypatch.setattr(particle_filter, "NUM_KEPT", 1)

    def shapes(num_rows, **settings):
        this = kernel(**settings)
        state = this.init(random.key(0), *this.read(program(X[:num_rows], Y[:num_rows])))
        return [leaf.shape for leaf in jax.tree.leaves(state)]

    assert shapes(9, keep_assignments=False) == shapes(27, keep_assignments=False)
    assert shapes(9) != shapes(27)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"resampling": "residual"},
            r"resampling: found 'residual', wanted one of \['multinomial', 'optimal', "
            r"'systematic'\]",
        ),
        ({"num_particles": 0}, "num_particles: found 0, wanted an integer, at least 1"),
        ({"num_particles": 2.5}, "num_particles: found 2.5, wanted an integer, at least 1"),
        ({"rejuvenate": -1}, "rejuvenate: found -1, wanted an integer, at least 0"),
        (
            {"rejuvenate": 1, "keep_assignments": False},
            "rejuvenate: redraws assignments, so they must be kept",
        ),
    ],
)
def test_wrong_settings_are_refused_by_name(settings, message):
    with pytest.raises(ValueError, match=message):
        ParticleFilter(aclass, **settings)


# Bad input, outside of the rows on which the model is read.

BAD = {
    "a two": (
        put(X, (17, 1), 2.0),
        Y,
        "site 'x': row 17, column 1 is 2.0 .*BernoulliProbs takes 0, 1, or NaN where it is missing",
    ),
    "an infinite value": (put(X, (17, 1), np.inf), Y, "site 'x': row 17, column 1 is inf"),
    "class 2": (X, put(Y, 17, 2), "row 17: found class 2, wanted 0 to 1, or -1 where unlabelled"),
    "class -2": (X, put(Y, 17, -2), "row 17: found class -2, wanted 0 to 1"),
    "class NaN": (
        X,
        put(Y.astype(float), 17, np.nan),
        r"CRP labels: found float64\[27\], wanted the class of each row, integers",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_rows_are_named(name):
    x, y, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        run(y, x)


@pytest.mark.slow
def test_a_row_that_is_partly_missing_is_refused_where_columns_are_coupled():
    real = put(RNG.normal(size=(27, 2)), 4, np.nan)  # a whole row may be missing
    this = Driver(ParticleFilter(aclass, num_particles=2), progress_bar=False)
    with pytest.raises(
        ValueError,
        match="site 'x': row 18 misses 1 of 2 features and MultivariateNormal couples them",
    ):
        this.run(0, put(real, (18, 0), np.nan), Y, component=normal_inverse_wishart)


def test_latent_scalars_need_a_grid_and_a_grid_needs_latent_scalars():
    with pytest.raises(
        ValueError, match=r"grid: 'alpha' is no latent scalar of the model, which has \[\]"
    ):
        driver(grid={"alpha": [0.5, 1.0]}).run(0, X, Y, **OPTIONS)
    with pytest.raises(
        StructureError,
        match=r"site 'alpha': a latent scalar is learned over a grid; give its values, say "
        r"grid=\{'alpha'",
    ):
        Driver(ParticleFilter(aclass), progress_bar=False).run(0, X, Y, **LATENT)


def test_numbers_are_the_same_to_the_last_bit_whatever_the_rows_on_which_they_were_read():
    """So that a stream that began with one row equals a run over all."""
    few = lambda num_rows: Program(
        aclass, X[:num_rows], Y[:num_rows], component=normal_inverse_chi2
    )
    found = read_partition(few(5))
    first, *others = (
        jax.jit(replace(found, few=few(num_rows)).parameters)({}).priors["x"]
        for num_rows in (1, 5, 27)
    )
    for other in others:
        assert jax.tree.all(jax.tree.map(lambda one, two: (one == two).all(), first, other))
    drawn = jax.jit(lambda key: found.parameters_of(found.trace(few(27), {}, key)).priors["x"])(
        random.key(0)
    )
    assert (drawn.kappa != first.kappa).any()  # read at a random start it is rounded otherwise


def by_count(x, at):
    """Surer of its features, the more rows there are."""
    return beta_bernoulli(x, at, beta=1 / len(x))


def by_data(x, at):
    """A prior that has seen the data."""
    return normal_inverse_chi2(x, at, mean=x.mean(0))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("component", "num_rows"), [(by_count, 6), (by_data, 27)])
def test_numbers_that_follow_the_rows_are_refused(component, num_rows):
    """They are read on a few rows, and would be wrong for more."""
    x, y = np.nan_to_num(X[:num_rows]), Y[:num_rows]
    with pytest.raises(
        StructureError,
        match="site 'x': the numbers of its prior depend on the rows: on 12 others they are off by",
    ):
        Driver(ParticleFilter(aclass), progress_bar=False).run(0, x, y, component=component)


@pytest.mark.parametrize(
    ("name", "number", "site"),
    [
        ("alpha", 2.0, "z"),
        ("gamma", 2.0, "y"),
        ("max_groups", 2, "z"),
    ],
)
@pytest.mark.slow
def test_numbers_of_the_partition_that_follow_the_rows_are_refused(name, number, site):
    def model(x, y):
        return aclass(x, y, **{name: len(x) * number})

    with pytest.raises(
        StructureError, match=f"site '{site}': the numbers of its prior depend on the rows"
    ):
        Driver(ParticleFilter(model), progress_bar=False).run(0, X, Y)
