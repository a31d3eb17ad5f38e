"""The trees that the driver really leaves behind, through the file and back: the contract between the two rooms."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import xarray as xr
from numpyro.infer import NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal

from diagnostics import compare, report
from inference import Driver

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
    settings = {"num_warmup": 300, "num_samples": 400, "num_chains": 4, "progress_bar": False, "groups": GROUPS} | settings
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
        Driver(svi, num_warmup=n, num_samples=300, num_chains=2, progress_bar=False, groups=GROUPS).run(0, X, y=Y) for n in (1500, 60)
    )
    page = report(long)
    assert page.kind == "variational"
    assert page.conclusion == "trusted", page.text
    assert page["Pareto k-hat"].ok is True
    assert report(short)["ELBO settled"].ok is False
