"""The trees that the driver really leaves behind, through the file and back: the contract
between the two rooms.
"""

from functools import partial

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import xarray as xr
from numpyro.infer import NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDelta, AutoMultivariateNormal, AutoNormal
from numpyro.infer.gibbs import Gibbs

from diagnostics import compare, insertion_rank_test, report
from diagnostics._evidence import steps_taken
from diagnostics._psis import densities
from inference import DataTempering, Driver, NestedSampler, Staged
from tests.diagnostics.nesting import LOG_EVIDENCE, ExactNesting, half_normal
from tests.inference import models
from tests.inference.importance import ImportanceSampling

pytestmark = pytest.mark.usefixtures("numpyro_promotion")
GROUPS = ("log_likelihood", "log_prior")
X = np.linspace(-1, 1, 40).astype(np.float32)
Y = (1 + X + 0.5 * np.random.default_rng(0).normal(size=40)).astype(np.float32)


def line(x, y=None):
    level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    with numpyro.plate("row", len(x)):
        numpyro.sample("y", dist.Normal(level + slope * x, 0.5), obs=y)


def flat(x, y=None):
    level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    with numpyro.plate("row", len(x)):
        numpyro.sample("y", dist.Normal(level, 0.5), obs=y)


def two_signs(x, y=None):
    """Only the square of the slope is identified."""
    slope = numpyro.sample("slope", dist.Normal(0.0, 3.0))
    numpyro.deterministic("size", jnp.abs(slope))
    with numpyro.plate("row", len(x)):
        numpyro.sample("y", dist.Normal(slope**2 + x, 0.5), obs=y)


def chains(model, **settings):
    settings = {
        "num_warmup": 300,
        "num_samples": 400,
        "num_chains": 4,
        "progress_bar": False,
        "groups": GROUPS,
    } | settings
    return Driver(NUTS(model), **settings).run(0, X, y=Y)


@pytest.fixture(scope="module")
def good():
    import jax

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return chains(line)


def test_a_good_run_is_trusted_before_and_after_its_file(good, tmp_path):
    page = report(good)
    assert page.trusted, page.text
    assert "line by NUTS" in page.text
    good.to_netcdf(tmp_path / "run.nc", engine="h5netcdf")
    with xr.open_datatree(tmp_path / "run.nc", engine="h5netcdf") as again:
        assert report(again).text == page.text  # the last bits of a sum follow the layout in memory


def test_no_warm_up_is_a_bad_run_of_the_same_model():
    page = report(chains(line, num_warmup=0, num_samples=60))
    assert not page.trusted
    assert page["draws"].ok is False


def test_a_sign_that_is_not_identified():
    tree = chains(two_signs, num_samples=1000)
    assert report(tree)["R-hat"].ok is False  # the chains chose different signs
    tree["posterior"]["slope"].attrs["not_identified"] = 1
    page = report(tree)
    assert page["R-hat"].ok is True, page.text
    assert page["R-hat"].figures["of"] in ("size", "lp")


def test_models_are_compared(good):
    table = compare({"flat": chains(flat), "line": good})
    assert list(table.index) == ["line", "flat"]
    assert table["elpd_diff"]["flat"] < -2 * table["dse"]["flat"]


def test_variational_run_is_judged_by_its_importance_weights():
    svi = SVI(line, AutoNormal(line), numpyro.optim.Adam(0.03), Trace_ELBO(num_particles=5))
    long, short = (
        Driver(
            svi, num_warmup=n, num_samples=300, num_chains=2, progress_bar=False, groups=GROUPS
        ).run(0, X, y=Y)
        for n in (1500, 60)
    )
    page = report(long)
    assert page.kind == "variational"
    assert page.conclusion == "trusted", page.text
    assert page["Pareto k-hat"].ok is True
    assert report(short)["ELBO settled"].ok is False


def test_a_guide_of_points_is_not_trusted_and_not_compared_without_a_word(good):
    svi = SVI(line, AutoDelta(line), numpyro.optim.Adam(0.03), Trace_ELBO())
    tree = Driver(
        svi, num_warmup=1500, num_samples=300, num_chains=2, progress_bar=False, groups=GROUPS
    ).run(0, X, y=Y)
    assert report(tree)["draws"].ok is report(tree)["Pareto k-hat"].ok is False
    with pytest.warns(UserWarning, match="a point mass is no posterior"):
        compare({"points": tree, "line": good})


def tilted(x, y=None):
    """The factor takes the prior away."""
    level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    numpyro.factor("tilt", 0.5 * jnp.square(level))
    with numpyro.plate("row", len(x)):
        numpyro.sample("y", dist.Normal(level, 0.5), obs=y)


@pytest.mark.slow
def test_a_factor_counts_in_the_weights():
    """What is left is the likelihood: log p - log q is known but for a constant."""
    svi = SVI(
        tilted,
        AutoMultivariateNormal(tilted),
        numpyro.optim.Adam(0.01),
        Trace_ELBO(num_particles=10),
    )
    tree = Driver(svi, num_warmup=2000, num_samples=1000, progress_bar=False, groups=GROUPS).run(
        0, X, y=Y
    )
    log_p = -0.5 * ((tree["posterior"]["level"] - Y.mean()) / 0.5) ** 2 * len(Y)
    apart = densities(tree) - (log_p - tree["log_q"]["log_q"])
    assert float(apart.std()) < 1e-3
    assert report(tree)["Pareto k-hat"].ok is True
    without = tree.copy()
    del without["log_factor"]
    assert report(without).unknown == ["Pareto k-hat"]


def funnel(y=None):
    mean = numpyro.sample("mean", dist.Normal(0.0, 1.0))
    v = numpyro.sample("v", dist.Normal(0.0, 3.0))
    numpyro.sample("x", dist.Normal(0.0, jnp.exp(v / 2)).expand((5,)).to_event(1))
    numpyro.sample("y", dist.Normal(mean, 1.0), obs=y)


@pytest.mark.slow
def test_divergences_of_a_second_block():
    kernel = Gibbs([(NUTS(funnel), ["mean"]), (NUTS(funnel), ["v", "x"])])
    tree = Driver(kernel, num_warmup=200, num_samples=300, num_chains=2, progress_bar=False).run(
        0, y=jnp.array(0.3)
    )
    assert int(tree["sample_stats"]["diverging"].sum()) == 0
    page = report(tree)
    assert page["divergences"].ok is False
    assert (
        page["divergences"].figures["count"] == int(tree["sample_stats"]["diverging_1"].sum()) > 0
    )
    assert page["E-BFMI"].ok is None


@pytest.mark.slow
def test_nested_replicates_that_end_at_different_steps():
    """The rows that one which has finished repeats are no steps of it."""
    kernel = ExactNesting(half_normal)
    tree = Driver(kernel, num_samples=200, num_chains=8, progress_bar=False).run(0, y=jnp.zeros(()))
    taken, stats = steps_taken(tree), tree["sample_stats"]
    assert len(set(taken.tolist())) > 4
    assert taken.max() == stats.sizes["step"]
    for each, steps in zip(stats["log_volume"].values, taken, strict=True):
        np.testing.assert_allclose(each[:steps], -np.arange(1, steps + 1) / 50, rtol=1e-6)
        assert (each[steps:] == each[steps - 1]).all()
    page = report(tree)
    assert page.trusted, page.text
    assert page["insertion ranks"].figures["insertions"] == taken.sum()
    ranks = [
        insertion_rank_test(each[:steps], 50)
        for each, steps in zip(stats["insertion_rank"].values, taken, strict=True)
    ]
    assert page["insertion ranks"].figures["p"] == min(1.0, 8 * min(ranks))
    assert tree.attrs["log_evidence"] == pytest.approx(
        float(LOG_EVIDENCE), abs=4 * tree.attrs["log_evidence_se"]
    )
    low = Driver(
        ExactNesting(half_normal, low=1.5), num_samples=200, num_chains=8, progress_bar=False
    ).run(0, y=jnp.zeros(()))
    assert report(low)["insertion ranks"].ok is False


def test_a_filter_that_its_budget_cut_is_not_trusted_and_not_compared_without_a_word():
    kernel = ImportanceSampling(models.normal_mean, 20)
    run = lambda steps: Driver(
        kernel, num_warmup=steps, num_samples=200, num_chains=2, progress_bar=False
    ).run(0, models.Y)
    whole, cut = run(None), run(5)
    assert report(whole).trusted, report(whole).text
    assert report(cut)["ended"].ok is False
    with pytest.warns(UserWarning, match="its run ended by 'budget' before it had finished"):
        compare({"whole": whole, "cut": cut})


@pytest.mark.slow
@pytest.mark.parametrize("value", [np.nan, -np.inf], ids=["NaN", "impossible"])
@pytest.mark.parametrize(
    "kernel",
    [
        partial(NestedSampler, num_live=50),
        partial(Staged, num_stages=3, num_live=50),
        partial(DataTempering, num_stages=3),
    ],
    ids=["nested sampling", "stages", "data tempering"],
)
def test_a_likelihood_that_is_nan_in_a_corner_is_told(kernel, value):
    """So rarely under the prior that nothing is refused at the start, and near to where the data
    lead.
    """

    def cornered(x):
        level = numpyro.sample("level", dist.Normal(0.0, 1.0))
        with numpyro.plate("row", len(x)):
            numpyro.sample(
                "x",
                dist.Delta(x, log_density=jnp.where(level > 3.7, value, -0.5 * (x - level) ** 2)),
                obs=x,
            )

    tree = Driver(kernel(cornered), num_samples=50, progress_bar=False).run(0, 2.9 + Y[:12])
    found = report(tree)["likelihood"]
    assert (found.figures["NaN"] > 0) == np.isnan(value)
    assert found.ok is (None if np.isnan(value) else True)
