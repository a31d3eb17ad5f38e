"""The driver: NumPyro's kernels run unchanged and equal NumPyro's own MCMC; algorithms meet
exact answers; bad input is refused.
"""

import os
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path

import arviz as az
import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import xarray as xr
from jax import random
from numpyro.infer import (
    HMC,
    MCMC,
    NUTS,
    SA,
    SVI,
    BarkerMH,
    DiscreteGibbs,
    DiscreteHMCGibbs,
    Gibbs,
    Trace_ELBO,
)
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.gibbs import discrete_latent_sites
from scipy import stats

from inference import Driver, converged, settled
from inference.run.loop import Loop
from tests.inference.importance import ImportanceSampling
from tests.inference.models import (
    LABELS,
    X,
    Y,
    exact_log_evidence,
    exact_posterior,
    logistic,
    normal_mean,
    two_groups,
)

pytestmark = pytest.mark.usefixtures("numpyro_promotion")
QUIET = {"progress_bar": False}


def nuts(model=logistic, **settings):
    return Driver(NUTS(model), **{"num_warmup": 50, "num_samples": 60, **QUIET, **settings})


def hmc(model=logistic, **settings):
    """Where it does not matter which chain it is."""
    return Driver(
        HMC(model, trajectory_length=None, num_steps=3),
        **{"num_warmup": 50, "num_samples": 60, **QUIET, **settings},
    )


def svi(model=logistic, **settings):
    kernel = SVI(model, AutoNormal(model), numpyro.optim.Adam(0.02), Trace_ELBO())
    return Driver(kernel, **{"num_warmup": 300, "num_samples": 50, **QUIET, **settings})


@pytest.fixture(scope="module")
def chains() -> xr.DataTree:
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        groups = ("log_likelihood", "log_prior", "posterior_predictive", "prior")
        return Driver(
            NUTS(logistic), num_warmup=200, num_samples=200, num_chains=2, groups=groups, **QUIET
        ).run(0, X, LABELS)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("thinning", [7, 1])
def test_draws_equal_those_of_numpyros_mcmc(thinning):
    reference = MCMC(
        NUTS(logistic), num_warmup=50, num_samples=60, thinning=thinning, progress_bar=False
    )
    reference.run(random.key(7), X, LABELS, extra_fields=("energy",))
    tree = nuts(thinning=thinning).run(7, X, LABELS)
    for name, draws in reference.get_samples().items():
        np.testing.assert_array_equal(tree.posterior[name].values[0], draws)
    np.testing.assert_array_equal(
        tree.sample_stats["energy"].values[0], reference.get_extra_fields()["energy"]
    )


def test_several_chains_equal_those_of_numpyros_mcmc():
    reference = MCMC(
        NUTS(logistic),
        num_warmup=50,
        num_samples=60,
        num_chains=2,
        chain_method="sequential",
        progress_bar=False,
    )
    reference.run(random.key(7), X, LABELS)
    tree = nuts(num_chains=2).run(random.key(7), X, LABELS)
    np.testing.assert_array_equal(
        tree.posterior["weight"].values, reference.get_samples(group_by_chain=True)["weight"]
    )


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("chain", "method"), [(hmc, "vectorized"), (nuts, "vectorized"), (nuts, jax.vmap)]
)
def test_chain_methods_agree(chain, method):
    one = chain(num_chains=2, num_samples=5, num_warmup=5).run(1, X, LABELS)
    other = chain(num_chains=2, num_samples=5, num_warmup=5, chain_method=method).run(1, X, LABELS)
    np.testing.assert_allclose(
        one.posterior["weight"], other.posterior["weight"], rtol=2e-3, atol=2e-3
    )


KERNELS = {
    "HMC": (lambda: HMC(logistic), (X, LABELS)),
    "BarkerMH": (lambda: BarkerMH(logistic), (X, LABELS)),
    "SA": (lambda: SA(logistic), (X, LABELS)),
    "DiscreteHMCGibbs": (lambda: DiscreteHMCGibbs(NUTS(two_groups)), (Y,)),
    "Gibbs": (
        lambda: Gibbs(
            [(DiscreteGibbs(two_groups), discrete_latent_sites), (NUTS(two_groups), None)]
        ),
        (Y,),
    ),
}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(k, marks=pytest.mark.slow) if k in ("SA", "DiscreteHMCGibbs") else k
        for k in KERNELS
    ],
)
def test_numpyros_kernels_run_unchanged(name):
    kernel, args = KERNELS[name]
    tree = Driver(kernel(), num_warmup=20, num_samples=20, num_chains=2, **QUIET).run(0, *args)
    reference = MCMC(
        kernel(),
        num_warmup=20,
        num_samples=20,
        num_chains=2,
        chain_method="sequential",
        progress_bar=False,
    )
    reference.run(random.key(0), *args)
    for site, draws in reference.get_samples(group_by_chain=True).items():
        np.testing.assert_allclose(tree.posterior[site].values, draws, rtol=1e-5, atol=1e-6)
    assert tree.attrs["kernel"].startswith(name)


def test_potential_function_without_a_model():
    kernel = NUTS(potential_fn=lambda z: 0.5 * ((z["a"] - 3.0) ** 2).sum())
    tree = Driver(kernel, num_warmup=200, num_samples=500, **QUIET).run(
        0, init_params={"a": np.zeros(2, np.float32)}
    )
    assert tree.posterior["a"].shape == (1, 500, 2)
    assert abs(float(tree.posterior["a"].mean()) - 3.0) < 0.2


def test_a_model_with_arguments_filled_in_keeps_its_name():
    tree = hmc(partial(normal_mean, spread=1.0), num_warmup=1, num_samples=1).run(0, Y)
    assert tree.attrs["model"] == "normal_mean"


def test_nuts_meets_the_exact_posterior():
    tree = nuts(normal_mean, num_warmup=300, num_samples=2000).run(3, Y)
    mean, spread = exact_posterior()
    assert abs(float(tree.posterior["mu"].mean()) - mean) < 4 * spread / np.sqrt(
        float(az.ess(tree).dataset["mu"])
    )


def test_svi_tree_has_chains_draws_and_the_elbo():
    tree = svi(normal_mean, num_warmup=800, num_samples=400, num_chains=2).run(0, Y)
    mean, spread = exact_posterior()
    assert tree.posterior["mu"].dims == ("chain", "draw")
    assert tree.posterior["mu"].shape == (2, 400)
    assert tree.sample_stats["elbo"].dims == ("chain", "step")
    assert abs(float(tree.posterior["mu"].mean()) - mean) < 0.2
    assert abs(float(tree.posterior["mu"].std()) - spread) < 0.15
    assert float(tree.sample_stats["elbo"][:, -200:].mean()) < exact_log_evidence() + 0.05
    fitted = {
        name: float(values[1]) for name, values in tree["variational_parameters"].data_vars.items()
    }
    log_q = stats.norm(fitted["mu_auto_loc"], fitted["mu_auto_scale"]).logpdf(
        tree.posterior["mu"][1]
    )
    np.testing.assert_allclose(tree["log_q"]["log_q"][1], log_q, rtol=1e-3, atol=1e-3)
    assert set(tree["variational_parameters"].data_vars) == {"mu_auto_loc", "mu_auto_scale"}


@pytest.mark.slow
def test_evidence_of_an_algorithm_meets_the_exact_one():
    tree = Driver(
        ImportanceSampling(normal_mean, 40, 512), num_samples=2000, num_chains=4, **QUIET
    ).run(0, Y)
    assert tree.attrs["ended"] == "finished"
    assert (
        abs(tree.attrs["log_evidence"] - exact_log_evidence()) < 4 * tree.attrs["log_evidence_se"]
    )
    mean, spread = exact_posterior()
    assert abs(float(tree.posterior["mu"].mean()) - mean) < 0.05
    assert abs(float(tree.posterior["mu"].std()) - spread) < 0.03
    assert tree["particles"]["log_weight"].dims == ("chain", "particle")
    assert tree.sample_stats["ess"].shape == (4, 40)


def test_budget_ends_an_algorithm_before_it_has_finished():
    tree = Driver(ImportanceSampling(normal_mean, 40), num_warmup=7, num_samples=10, **QUIET).run(
        0, Y
    )
    assert tree.attrs["ended"] == "budget"
    assert tree.sample_stats.sizes["step"] == 7


def test_an_algorithm_may_be_run_without_draws():
    driver = Driver(
        ImportanceSampling(normal_mean, 40),
        num_warmup=7,
        num_samples=0,
        groups=("log_prior",),
        **QUIET,
    )
    tree = driver.run(0, Y)
    assert "posterior" not in tree.children
    assert tree.sample_stats.sizes["step"] == 7
    driver.num_samples = 5
    assert driver.tree()["posterior"].sizes["draw"] == 5


def test_extend_equals_a_longer_run():
    driver = nuts(num_chains=2, num_samples=40, thinning=2)
    driver.run(5, X, LABELS)
    extended = driver.extend(20)
    xr.testing.assert_equal(
        extended.posterior.to_dataset(),
        nuts(num_chains=2, thinning=2).run(5, X, LABELS).posterior.to_dataset(),
    )
    assert extended.attrs["steps_run"] == 20
    assert extended.attrs["num_samples"] == 60
    with pytest.raises(ValueError, match="extend: more must be a multiple of thinning, 2; got 5"):
        driver.extend(5)


def test_extend_of_svi_equals_a_longer_run():
    driver = svi(normal_mean, num_warmup=200)
    driver.run(5, Y)
    np.testing.assert_array_equal(
        driver.extend(100).posterior["mu"],
        svi(normal_mean, num_warmup=300).run(5, Y).posterior["mu"],
    )


@pytest.mark.slow
def test_the_same_driver_runs_twice_alike():
    for driver in (nuts(num_samples=10), svi(num_warmup=10, num_chains=2)):
        first, _, again = (
            driver.run(5, X, LABELS),
            driver.run(6, X, LABELS),
            driver.run(5, X, LABELS),
        )
        np.testing.assert_array_equal(first.posterior["weight"], again.posterior["weight"])


def test_init_params_are_where_the_chains_start():
    start = {"mu": np.array([5.0, -5.0], np.float32)}
    still = HMC(normal_mean, step_size=1e-8, num_steps=1, adapt_step_size=False)
    tree = Driver(still, num_warmup=0, num_samples=3, num_chains=2, **QUIET).run(
        0, Y, init_params=start
    )
    np.testing.assert_allclose(tree.posterior["mu"][:, 0], start["mu"], atol=1e-5)


def test_init_params_that_a_kernel_would_ignore_are_refused():
    with pytest.raises(ValueError, match="init_params: BarkerMH does not start"):
        Driver(BarkerMH(normal_mean), num_warmup=0, num_samples=3, **QUIET).run(
            0, Y, init_params={"mu": np.float32(50.0)}
        )


def test_extra_fields():
    tree = hmc(extra_fields=("adapt_state.step_size",), num_samples=5).run(0, X, LABELS)
    assert tree.sample_stats["adapt_state.step_size"].shape == (1, 5)
    with pytest.raises(ValueError, match="extra_fields: .*'step_size'"):
        hmc(extra_fields=("step_size",)).run(0, X, LABELS)


def test_groups_and_dimensions(chains):
    assert list(chains.children) == [
        "posterior",
        "posterior_predictive",
        "log_likelihood",
        "log_prior",
        "sample_stats",
        "prior",
        "prior_predictive",
        "observed_data",
        "constant_data",
    ]
    assert chains.posterior["weight"].dims == ("chain", "draw", "feature")
    assert chains.posterior["norm"].dims == ("chain", "draw")
    assert chains.log_likelihood["y"].dims == ("chain", "draw", "row")
    assert chains.observed_data["y"].dims == ("row",)
    np.testing.assert_array_equal(chains.constant_data["x"], X)
    np.testing.assert_allclose(
        chains.posterior["norm"],
        np.sqrt((chains.posterior["weight"] ** 2).sum("feature")),
        rtol=1e-5,
    )


def test_log_likelihood_is_the_models(chains):
    weight = chains.posterior["weight"].values[1, 17]
    signs = 2.0 * LABELS - 1
    np.testing.assert_allclose(
        chains.log_likelihood["y"][1, 17],
        -np.log1p(np.exp(-signs * (X @ weight))),
        rtol=1e-4,
        atol=1e-6,
    )


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("kind", ["chains", "svi", "algorithm"])
def test_arviz_reads_the_tree_as_it_is(kind, chains, tmp_path):
    settings = {"num_chains": 2, "groups": ("log_likelihood",), **QUIET}
    if kind == "svi":
        tree = svi(**settings).run(0, X, LABELS)
    elif kind == "algorithm":
        tree = Driver(ImportanceSampling(logistic, 30, 64), num_samples=100, **settings).run(
            0, X, LABELS
        )
    else:
        tree = chains
    assert "weight[0]" in az.summary(tree).index
    with warnings.catch_warnings():
        # two hundred draws
        warnings.filterwarnings("ignore", "Estimated shape parameter of Pareto")
        loo = az.loo(tree)
        assert loo.n_data_points == len(LABELS)
        assert len(az.compare({"a": tree, "b": tree})) == 2
    picture = az.plot_trace_dist(tree, var_names=["scale", "weight"], backend="none")
    assert picture is not None
    tree.to_netcdf(tmp_path / "run.nc", engine="h5netcdf")
    again = xr.open_datatree(tmp_path / "run.nc", engine="h5netcdf")
    xr.testing.assert_equal(again["posterior"].to_dataset().load(), tree["posterior"].to_dataset())
    assert again.attrs["kernel"] == tree.attrs["kernel"]


def test_stop_rule_ends_the_run_at_a_fixed_number_of_draws():
    runs = [
        nuts(
            normal_mean, num_samples=100_000, num_chains=2, stop=converged(rhat=1.05, ess=100)
        ).run(0, Y)
        for _ in range(2)
    ]
    assert runs[0].attrs["ended"] == "stop"
    assert 100 <= runs[0].posterior.sizes["draw"] < 5000
    xr.testing.assert_equal(runs[0].posterior.to_dataset(), runs[1].posterior.to_dataset())
    assert converged(rhat=1.05, ess=100)(runs[0])


def test_converged_is_not_fooled_by_a_chain_that_is_stuck_or_nan(chains):
    rule = converged(rhat=1.1, ess=20)
    assert rule(chains)
    for wrong in (np.float32(40.0), np.nan):
        posterior = chains.posterior.to_dataset().copy(deep=True)
        posterior["scale"][1] = wrong
        assert not rule(xr.DataTree.from_dict({"posterior": posterior}))


def test_a_stop_rule_that_fails_loses_nothing(tmp_path):
    def rule(tree):
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine") as caught:
        hmc(normal_mean, num_samples=1000, stop=rule, checkpoint=tmp_path / "run").run(0, Y)
    assert caught.value.tree.posterior.sizes["draw"] == 100
    assert (
        hmc(normal_mean, num_samples=1000, checkpoint=tmp_path / "run").run(0, Y).attrs["steps_run"]
        == 900
    )
    with pytest.raises(ValueError, match="converged: this run has no draws before its end"):
        svi(normal_mean, stop=converged()).run(0, Y)


def test_converged_reads_a_boolean_site():
    def model(y):
        normal_mean(y)
        numpyro.deterministic("flag", numpyro.sample("other", dist.Normal(0.0, 1.0)) > 0)

    tree = nuts(model, num_samples=3000, num_chains=2, stop=converged(rhat=1.05, ess=50)).run(0, Y)
    assert tree.attrs["ended"] == "stop"


@pytest.mark.filterwarnings("ignore:Found vars in model but not guide")
def test_a_group_that_cannot_be_computed_does_not_lose_the_run():
    def guide(x, y):
        numpyro.sample("scale", dist.Delta(numpyro.param("at", 1.0)))

    # weight stays with its prior
    kernel = SVI(logistic, guide, numpyro.optim.Adam(0.02), Trace_ELBO())
    driver = Driver(kernel, num_warmup=10, num_samples=20, groups=("log_likelihood",), **QUIET)
    with pytest.raises(ValueError, match="weight") as caught:
        driver.run(0, X, LABELS)
    assert caught.value.tree.posterior["scale"].shape == (1, 20)


def test_names_with_a_slash_become_dots():
    tree = hmc(
        numpyro.handlers.scope(logistic, prefix="inner"), num_samples=5, groups=("log_likelihood",)
    ).run(0, X, LABELS)
    assert tree.posterior["inner.weight"].dims == ("chain", "draw", "inner.feature")
    assert tree.log_likelihood["inner.y"].dims == ("chain", "draw", "inner.row")


def test_svi_may_hold_arguments_of_the_model():
    def model(y, *, spread):
        normal_mean(y, spread)

    kernel = SVI(model, AutoNormal(model), numpyro.optim.Adam(0.02), Trace_ELBO(), spread=2.0)
    assert Driver(kernel, num_warmup=10, num_samples=5, **QUIET).run(0, Y).posterior[
        "mu"
    ].shape == (1, 5)


def test_variables_come_in_the_order_of_the_model(tmp_path):
    for folder in (None, tmp_path / "run"):
        tree = hmc(num_samples=5, checkpoint=folder).run(0, X, LABELS)
        assert list(tree.posterior.data_vars) == ["scale", "weight", "norm"]


def test_settled_ends_svi():
    tree = svi(normal_mean, num_warmup=100_000, stop=settled(tolerance=1e-2, window=100)).run(0, Y)
    assert tree.attrs["ended"] == "stop"
    assert 200 <= tree.sample_stats.sizes["step"] < 20_000
    with pytest.raises(ValueError, match="settled: this run records no 'loss'"):
        settled("loss")(tree)


def test_time_budget_ends_the_run():
    with pytest.warns(UserWarning, match=r"max_time: 1.0 seconds were over after \d+ steps"):
        tree = hmc(normal_mean, num_warmup=0, num_samples=10**9, max_time=1.0).run(0, Y)
    assert tree.attrs["ended"] == "max_time"
    assert tree.posterior.sizes["draw"] == tree.attrs["steps"] > 0


def test_a_run_that_ends_in_the_warmup_has_no_draws_and_says_so():
    tree = hmc(num_warmup=10**9, max_time=0.0).run(0, X, LABELS)
    assert tree.attrs["ended"] == "max_time"
    assert tree.posterior["weight"].shape == (1, 0, 3)


TWO_DEVICES = """
import numpy as np
from numpyro.infer import NUTS
from inference import Driver
from tests.inference.importance import ImportanceSampling
from tests.inference.models import LABELS, X, logistic

for kernel, settings in ((NUTS(logistic), {"num_warmup": 20}), (ImportanceSampling(logistic, 9), {})):
    run = lambda method: Driver(kernel, num_samples=30, num_chains=2, chain_method=method, **settings).run(0, X, LABELS)
    one, other = run("sequential"), run("parallel")
    for group in ("posterior", "sample_stats"):
        for name, values in one[group].data_vars.items():
            np.testing.assert_allclose(values, other[group][name], rtol=1e-4, atol=1e-5, err_msg=name)
print("equal")
"""


@pytest.mark.slow
def test_parallel_chains_on_two_devices_equal_sequential_ones():
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    command = [sys.executable, "-c", TWO_DEVICES]
    done = subprocess.run(
        command,
        cwd=Path(__file__).parents[3],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "equal\n", done.stderr


@pytest.mark.slow
def test_svi_of_a_subsampled_plate():
    data = np.linspace(-1.0, 3.0, 60).astype(np.float32)

    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0.0, 10.0))
        with numpyro.plate("row", 60, subsample_size=20):
            numpyro.sample("y", dist.Normal(mu, 1.0), obs=numpyro.subsample(y, 0))

    tree = svi(model, num_warmup=3000, num_samples=300).run(0, data)
    # exact: 0.9998, standard deviation 0.129
    assert abs(float(tree.posterior["mu"].mean()) - 1.0) < 0.1
    assert "observed_data" not in tree.children  # each step saw other rows


def test_chunks_grow_however_many_chains_share_them(monkeypatch):
    """Ten chains, each in turn: a chunk is not one step of each for the whole run."""
    sizes, chunk = [], Loop.chunk

    def counted(self, states, size, **how):
        sizes.append(size)
        return chunk(self, states, size, **how)

    monkeypatch.setattr(Loop, "chunk", counted)
    hmc(num_chains=10, num_warmup=60, num_samples=60).run(0, X, LABELS)
    assert max(sizes) > 1
