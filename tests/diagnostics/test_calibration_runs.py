"""Calibration of any kernel of the driver: a folder that is gone on from, data that are found,
kernels that are refused.
"""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import xarray as xr
from jax import random
from numpyro.infer import HMC, NUTS, BarkerMH, DiscreteHMCGibbs
from numpyro.infer.gibbs import CustomGibbs, Gibbs

from diagnostics._calibration_band import band
from diagnostics.calibration import geweke, on_host, plot_calibration_ecdf, sbc, with_kernel
from inference import Driver
from tests.diagnostics.planted import (
    NESTED,
    NUM_DRAWS,
    WAITING,
    LogWalk,
    Uneven,
    exact,
    nested,
    waiting,
)
from tests.inference import models
from tests.inference.importance import ImportanceSampling

pytestmark = pytest.mark.usefixtures("numpyro_promotion")


@pytest.mark.slow
def test_an_algorithm_is_a_fit():
    few, many = (
        with_kernel(ImportanceSampling(models.normal_mean, n, 64), None, 7) for n in (1, 16)
    )
    assert sbc(models.normal_mean, many, models.Y).passed
    assert not sbc(
        models.normal_mean,
        with_kernel(ImportanceSampling(models.normal_mean, 16, 4), 1, 31),
        models.Y,
    ).passed
    assert not sbc(models.normal_mean, few, models.Y, num_replicates=1000).passed


def gibbs(model):
    """HMC for the mean, an exact conditional for the effects."""

    def effects(rng_key, gibbs_sites, hmc_sites):
        y = jnp.zeros(3)
        return {"effect": (hmc_sites["mean"] + y) / 2 + 0.5**0.5 * random.normal(rng_key, (3,))}

    return Gibbs(
        [
            (CustomGibbs(effects), ["effect"]),
            (HMC(model, step_size=0.5, trajectory_length=1.5), ["mean"]),
        ]
    )


KERNELS = {
    "NUTS": (waiting, WAITING, lambda model: NUTS(model, step_size=0.7), True),
    "HMC": (nested, NESTED, lambda model: HMC(model, step_size=0.6, trajectory_length=1.5), True),
    "BarkerMH": (
        waiting,
        WAITING,
        lambda model: BarkerMH(model, step_size=0.8, adapt_step_size=False),
        True,
    ),
    "DiscreteHMCGibbs": (
        models.two_groups,
        NESTED,
        lambda model: DiscreteHMCGibbs(HMC(model, step_size=0.7, trajectory_length=1.5)),
        True,
    ),
    "Gibbs that forgets its data": (nested, NESTED, gibbs, False),
}


@pytest.mark.slow
# which ignores `init_params`
@pytest.mark.parametrize("name", [name for name in KERNELS if name != "BarkerMH"])
def test_kernels_of_numpyro_by_geweke(name):
    model, y, make, is_right = KERNELS[name]
    calibration = geweke(model, make, y, num_steps=5)
    assert calibration.passed is is_right, calibration.text


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_of_numpyro_by_sbc(name):
    model, y, make, is_right = KERNELS[name]
    fit = with_kernel(make, 200, 31 * 20, 20)
    calibration = sbc(model, fit, y)
    assert calibration.passed is is_right, calibration.text


def test_a_kernel_is_taken_as_an_object_too():
    kernel = LogWalk(waiting)
    assert geweke(waiting, kernel, WAITING, num_replicates=20, num_steps=2).ranks["rate"].shape == (
        20,
    )
    assert vars(kernel) == {"model": waiting, "bug": False}


def test_a_fit_on_the_host_by_the_driver():
    def fit(rng_key, program):
        driver = Driver(
            Uneven(program.model), num_warmup=10, num_samples=9, num_chains=2, progress_bar=False
        )
        return driver.run(rng_key, **program.arguments)

    calibration = sbc(waiting, on_host(fit), WAITING, num_replicates=3)
    assert calibration.num_draws == 18
    assert set(calibration.ranks) == {"rate", "log_likelihood"}


# The folder.


def counted(runs):
    def fit(rng_key, program):
        runs.append(rng_key)
        mu = exact()(rng_key, program)["mu"]
        return xr.DataTree.from_dict(
            {"posterior": xr.Dataset({"mu": (("chain", "draw"), np.asarray(mu)[None])})}
        )

    return on_host(fit)


def test_a_folder_is_gone_on_from(tmp_path):
    runs = []
    settings = {"batch_size": 2, "folder": tmp_path / "sbc"}
    first = sbc(models.normal_mean, counted(runs), models.Y, num_replicates=3, **settings)
    assert len(runs) == 4
    more = sbc(models.normal_mean, counted(runs), models.Y, num_replicates=6, **settings)
    assert len(runs) == 6
    whole = sbc(models.normal_mean, counted([]), models.Y, num_replicates=6)
    for name in whole.ranks:
        np.testing.assert_array_equal(more.ranks[name], whole.ranks[name])
        np.testing.assert_array_equal(first.ranks[name], whole.ranks[name][:3])


def test_a_kill_leaves_whole_batches(tmp_path):
    runs = []
    settings = {"num_replicates": 4, "folder": tmp_path}
    sbc(models.normal_mean, counted(runs), models.Y, **settings)
    (tmp_path / "batch_000002.npz").unlink()
    (tmp_path / "batch_000002.partial").write_bytes(b"half a fi")
    sbc(models.normal_mean, counted(runs), models.Y, **settings)
    assert len(runs) == 5


def test_another_test_is_refused(tmp_path):
    settings = {"num_replicates": 10, "num_steps": 2, "folder": tmp_path / "geweke"}
    once = geweke(waiting, LogWalk, WAITING, **settings)
    again = geweke(waiting, LogWalk, WAITING, **settings)
    np.testing.assert_array_equal(once.ranks["rate"], again.ranks["rate"])
    with pytest.raises(ValueError, match="holds another test .*program"):
        geweke(waiting, lambda model: LogWalk(model, bug=True), WAITING, **settings)
    with pytest.raises(ValueError, match="holds another test .*seed"):
        geweke(waiting, LogWalk, WAITING, rng_key=1, **settings)
    with pytest.raises(ValueError, match="holds another test .*data"):
        geweke(waiting, LogWalk, 2 * WAITING, **settings)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="no calibration test"):
        geweke(waiting, LogWalk, WAITING, **{**settings, "folder": tmp_path})


@pytest.mark.slow
def test_devices_share_the_replicates():
    """Two devices give the ranks of one, and each has half of the batch."""
    script = """
import jax, numpy as np
from diagnostics.calibration import geweke
from tests.diagnostics.planted import LogWalk, WAITING, waiting
print(jax.local_device_count(), *geweke(waiting, LogWalk, WAITING, num_replicates=9, num_steps=2).ranks["rate"])
"""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | flags,
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    devices, *ranks = map(int, done.stdout.split())
    assert devices == 2
    one = geweke(waiting, LogWalk, WAITING, num_replicates=9, num_steps=2).ranks["rate"]
    np.testing.assert_array_equal(ranks, one)


# The data, and what is refused.


def test_the_argument_of_the_data_is_found_or_asked_for():
    def two(y, z):
        mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
        numpyro.sample("seen", dist.Normal(jnp.full(len(z), mu), 1.0), obs=z)

    fit = lambda rng_key, program: {
        "mu": program.arguments["z"].sum() / 3 + random.normal(rng_key, (15,)) / 3**0.5
    }
    zeros = jnp.zeros(2)
    assert sbc(two, fit, jnp.ones(2), zeros).passed
    with pytest.raises(ValueError, match=r"site 'seen'.*equals each of the arguments \['y', 'z'\]"):
        sbc(two, fit, zeros, zeros)
    assert sbc(two, fit, zeros, zeros, data={"seen": "z"}).passed
    assert not sbc(two, fit, zeros, zeros, data={"seen": "y"}).passed
    with pytest.raises(ValueError, match="'other' is no observed site"):
        sbc(two, fit, zeros, jnp.ones(2), data={"other": "z"})
    with pytest.raises(
        ValueError, match="argument 'z': it cannot hold the data of site 'seen': found int32"
    ):
        sbc(two, fit, zeros, jnp.arange(2), data={"seen": "z"})


def test_missing_entries_stay_missing():
    y = jnp.array([0.3, jnp.nan, 1.0])

    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
        is_there = ~jnp.isnan(y)
        with numpyro.handlers.mask(mask=is_there):
            numpyro.sample("y", dist.Normal(mu, 1.0).expand((3,)), obs=jnp.where(is_there, y, 0.0))

    fit = lambda rng_key, program: {
        "mu": jnp.nansum(program.arguments["y"]) / 3 + random.normal(rng_key, (31,)) / 3**0.5
    }
    assert sbc(model, fit, y, data={"y": "y"}).passed


def test_a_model_that_looks_at_its_data_is_fitted_on_the_host():
    def looking(y):
        mu = numpyro.sample("mu", dist.Normal(0.0, models.SPREAD))
        scale = 1.0 if np.isfinite(np.asarray(y)).all() else 2.0
        numpyro.sample("y", dist.Normal(mu, scale).expand((5,)), obs=y)

    calibration = sbc(looking, counted([]), models.Y, num_replicates=30)
    assert calibration.passed
    with pytest.raises(jax.errors.JAXTypeError) as caught:
        sbc(looking, exact(), models.Y)
    assert any("on_host(fit)" in note for note in caught.value.__notes__)


def test_a_prior_that_looks_at_the_data_is_refused():
    def empirical(y):
        mu = numpyro.sample("mu", dist.Normal(y.mean(), 1.0))
        numpyro.sample("y", dist.Normal(mu, 1.0).expand((5,)), obs=y)

    def lagged(y):
        slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
        numpyro.sample(
            "y", dist.Normal(slope * jnp.concatenate([jnp.zeros(1), y[:-1]]), 1.0), obs=y
        )

    for model, site in ((empirical, "mu"), (lagged, "y")):
        with pytest.raises(
            ValueError,
            match=f"site '{site}': its distribution is computed from the data in argument 'y'",
        ):
            sbc(model, exact(), models.Y)


def test_models_without_a_joint_are_refused():
    def with_factor(y):
        models.normal_mean(y)
        numpyro.factor("tilt", numpyro.sample("tau", dist.Normal(0.0, 1.0)))

    def in_batches(y):
        mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
        with numpyro.plate("row", len(y), subsample_size=2) as rows:
            numpyro.sample("y", dist.Normal(mu, 1.0), obs=jnp.asarray(y)[rows])

    with pytest.raises(ValueError, match="found no observed site among"):
        sbc(lambda y: numpyro.sample("mu", dist.Normal(0.0, 1.0)), exact(), models.Y)
    with pytest.raises(ValueError, match="site 'tilt': a factor of"):
        sbc(with_factor, exact(), models.Y)
    with pytest.raises(ValueError, match="plate 'row': it is subsampled"):
        sbc(in_batches, exact(), models.Y)


def test_kernels_that_cannot_be_moved_are_refused():
    class Stubborn(LogWalk):
        def init(self, rng_key, num_warmup, init_params, model_args, model_kwargs):
            return super().init(rng_key, num_warmup, None, model_args, model_kwargs)

    with pytest.raises(ValueError, match="Stubborn does not start from a given 'rate'"):
        geweke(waiting, Stubborn, WAITING)
    with pytest.raises(ValueError, match="BarkerMH does not start from a given 'rate'"):
        geweke(waiting, BarkerMH(waiting), WAITING)
    with pytest.raises(TypeError, match="ImportanceSampling is no Markov chain.*sbc"):
        geweke(models.normal_mean, ImportanceSampling(models.normal_mean, 1), models.Y)
    with pytest.raises(TypeError, match="wanted an MCMCKernel"):
        geweke(waiting, lambda model: model, WAITING)


def test_an_init_that_looks_at_the_data_says_what_to_do():
    class Proving(LogWalk):
        def init(self, rng_key, num_warmup, init_params, model_args, model_kwargs):
            assert model_args[0].min() > 0
            return super().init(rng_key, num_warmup, init_params, model_args, model_kwargs)

    with pytest.raises(jax.errors.JAXTypeError) as caught:
        geweke(waiting, Proving, WAITING)
    assert any("on_host(fit)" in note for note in caught.value.__notes__)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_replicates": 0}, "num_replicates: an integer, at least 1"),
        ({"alpha": 1.0}, "alpha: a rate between 0 and 1"),
        ({"batch_size": -1}, "batch_size: an integer, at least 1"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        sbc(models.normal_mean, exact(), models.Y, **settings)


# The picture.


def test_the_picture_shows_the_band_of_the_test():
    import matplotlib

    matplotlib.use("Agg")
    calibration = sbc(models.normal_mean, exact(2.0), models.Y)
    tree = calibration.as_tree()
    assert set(tree["prior_sbc"].data_vars) == {"mu", "log_likelihood"}
    assert 0 < float(tree["prior_sbc"]["mu"].min()) < float(tree["prior_sbc"]["mu"].max()) < 1
    figure = plot_calibration_ecdf(calibration)
    drawn = figure.viz["band"]["mu"].item().get_paths()[0].vertices
    low, high = band(200, NUM_DRAWS, 0.01 / 2)
    assert np.isclose(drawn[:, 1].max(), (high / 200 - np.arange(1, 64) / 64).max(), atol=1e-6)
    assert np.isclose(drawn[:, 1].min(), (low / 200 - np.arange(1, 64) / 64).min(), atol=1e-6)
    figure.savefig("/dev/null", format="png")
