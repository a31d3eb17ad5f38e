"""Calibration at its edges: models that are not what their data are drawn from, folders, names,
and SVI as a fit.
"""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import xarray as xr
from jax import random
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal

from diagnostics.calibration import geweke, on_host, plot_calibration_ecdf, sbc, with_kernel
from inference import StructureError
from tests.diagnostics.planted import exact
from tests.inference import models
from tests.inference.importance import ImportanceSampling

pytestmark = pytest.mark.usefixtures("numpyro_promotion")
ZEROS = jnp.zeros(5)


def normal_mean(y, scale=1.0):
    mu = numpyro.sample("mu", dist.Normal(0.0, models.SPREAD))
    with numpyro.handlers.scale(scale=scale):
        numpyro.sample("y", dist.Normal(mu, 1.0).expand((5,)), obs=y)


def test_a_scaled_density_is_refused_by_its_site():
    """The data are drawn from the distribution, whose power the kernel samples: it would be
    called wrong for being right.
    """
    with pytest.raises(ValueError, match="site 'y': its log density is scaled by 3.0"):
        sbc(normal_mean, exact(), ZEROS, 3.0)
    with pytest.raises(ValueError, match="site 'mu': its log density is scaled by 0.5"):
        sbc(numpyro.handlers.scale(models.normal_mean, scale=0.5), exact(), models.Y)
    assert sbc(normal_mean, exact(), ZEROS, 1.0).passed


def test_a_scale_that_is_computed_is_refused():
    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
        with numpyro.handlers.scale(scale=jnp.exp(mu)):
            numpyro.sample("y", dist.Normal(mu, 1.0).expand((5,)), obs=y)

    with pytest.raises(
        ValueError, match="site 'y': its log density is scaled by a computed number"
    ):
        sbc(model, exact(), ZEROS)


def test_an_improper_prior_is_named():
    def model(y):
        mu = numpyro.sample("mu", dist.ImproperUniform(dist.constraints.real, (), ()))
        numpyro.sample("y", dist.Normal(mu, 1.0).expand((5,)), obs=y)

    with pytest.raises(StructureError, match="site 'mu': its prior is ImproperUniform"):
        sbc(model, exact(), ZEROS)


def on_the_host(rng_key, program):
    mu = exact()(rng_key, program)["mu"]
    return xr.DataTree.from_dict(
        {"posterior": xr.Dataset({"mu": (("chain", "draw"), np.asarray(mu)[None])})}
    )


def test_a_folder_of_a_host_fit_knows_what_is_ranked(tmp_path):
    settings = {"num_replicates": 2, "folder": tmp_path}
    square = lambda program, values: {"q": jnp.square(values["mu"])}
    first = sbc(models.normal_mean, on_host(on_the_host), models.Y, quantities=square, **settings)
    again = sbc(
        models.normal_mean,
        on_host(on_the_host),
        models.Y,
        quantities=lambda _, values: {"q": jnp.square(values["mu"])},
        **settings,
    )
    np.testing.assert_array_equal(first.ranks["q"], again.ranks["q"])
    for other in (
        lambda _, values: {"p": jnp.square(values["mu"])},
        lambda _, values: {"q": -jnp.square(values["mu"])},
        None,
    ):
        with pytest.raises(ValueError, match="holds another test .*code of the quantities"):
            sbc(models.normal_mean, on_host(on_the_host), models.Y, quantities=other, **settings)


def test_a_folder_of_a_host_fit_knows_the_argument_of_the_data(tmp_path):
    def two(y, z):
        mu = numpyro.sample("mu", dist.Normal(0.0, models.SPREAD))
        numpyro.sample("seen", dist.Normal(mu, 1.0).expand((5,)), obs=z)

    settings = {"num_replicates": 2, "folder": tmp_path}
    sbc(two, on_host(on_the_host), ZEROS, ZEROS, data={"seen": "z"}, **settings)
    with pytest.raises(
        ValueError, match="holds another test .*arguments: {'seen': 'z'} there, {'seen': 'y'} here"
    ):
        sbc(two, on_host(on_the_host), ZEROS, ZEROS, data={"seen": "y"}, **settings)


def test_names_with_a_scope_are_written_as_the_driver_writes_them():
    import matplotlib

    matplotlib.use("Agg")

    def scoped(y):
        mu = numpyro.sample("outer/mu", dist.Normal(0.0, models.SPREAD))
        numpyro.sample("y", dist.Normal(mu, 1.0).expand((5,)), obs=y)

    fit = lambda rng_key, program: {"outer/mu": exact()(rng_key, program)["mu"]}
    calibration = sbc(scoped, fit, ZEROS, num_replicates=20)
    assert set(calibration.p_values) == {"outer/mu", "log_likelihood"}
    assert set(calibration.as_tree()["prior_sbc"].data_vars) == {"outer.mu", "log_likelihood"}
    figure = plot_calibration_ecdf(calibration, var_names=["outer.mu"])
    assert figure.viz["figure"].item().get_supylabel() == "ECDF minus uniform"
    figure.savefig("/dev/null", format="png")
    both = lambda program, values: {"a/b": values["mu"], "a.b": values["mu"]}
    with pytest.raises(ValueError, match=r"quantity 'a/b': another one is 'a\.b' in the tree"):
        sbc(models.normal_mean, exact(), models.Y, num_replicates=2, quantities=both).as_tree()


def gaussian_guide(model, steps_of=0.05):
    return SVI(model, AutoNormal(model), numpyro.optim.Adam(steps_of), Trace_ELBO(num_particles=4))


def test_svi_is_a_fit():
    """The guide holds the posterior, a normal; before it has been found the test fails."""
    assert sbc(models.normal_mean, with_kernel(gaussian_guide, 600, 63), models.Y).passed
    assert not sbc(
        models.normal_mean, with_kernel(gaussian_guide(models.normal_mean), 3, 63), models.Y
    ).passed
    with pytest.raises(ValueError, match="num_warmup: SVI does not end by itself"):
        sbc(models.normal_mean, with_kernel(gaussian_guide, None, 63), models.Y)
    with pytest.raises(TypeError, match="StochasticVI is no Markov chain.*sbc"):
        geweke(models.normal_mean, gaussian_guide, models.Y)


def test_an_algorithm_that_needs_the_host_is_left_to_it():
    class Growing(ImportanceSampling):
        def needs_host(self, state):
            return state.batch > 3

    with pytest.raises(TypeError, match=r"Growing needs the host between steps.*on_host\(fit\)"):
        sbc(models.normal_mean, with_kernel(Growing(models.normal_mean, 4), None, 7), models.Y)


def test_an_algorithm_is_given_what_it_made_of_its_data():
    class Reading(ImportanceSampling):
        def read(self, program):
            return super().read(program)[0], program.arguments["y"]

        def step(self, rng_key, state, program, y):
            return super().step(rng_key, state, program.with_arguments(y=y), {})

    key = random.key(1)
    settings = {"rng_key": key, "num_replicates": 5}
    plain, reading = (
        sbc(
            models.normal_mean,
            with_kernel(kind(models.normal_mean, 4), None, 7),
            models.Y,
            **settings,
        )
        for kind in (ImportanceSampling, Reading)
    )
    np.testing.assert_array_equal(plain.ranks["mu"], reading.ranks["mu"])
