"""What the driver refuses, by the name of the setting, argument or site, before anything is
compiled.
"""

import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.infer import NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal

from inference import Driver, ParticleFilter
from tests.inference.importance import ImportanceSampling
from tests.inference.models import LABELS, X, Y, logistic, normal_mean

pytestmark = pytest.mark.usefixtures("numpyro_promotion")
QUIET = {"progress_bar": False}


def nuts(model=logistic, **settings):
    return Driver(NUTS(model), **{"num_warmup": 50, "num_samples": 60, **QUIET, **settings})


def svi(model=logistic, **settings):
    kernel = SVI(model, AutoNormal(model), numpyro.optim.Adam(0.02), Trace_ELBO())
    return Driver(kernel, **{"num_warmup": 300, "num_samples": 50, **QUIET, **settings})


WRONG_SETTINGS = {
    "num_samples: found 0, wanted an integer, at least 1": {"num_samples": 0},
    "num_warmup: found -1, wanted an integer": {"num_warmup": -1},
    "num_warmup: NUTS needs it": {"num_warmup": None},
    "num_chains: found 1.5, wanted an integer": {"num_chains": 1.5},
    "thinning: found 0, wanted an integer": {"thinning": 0},
    "chain_method: 'parallel' needs a device a chain": {
        "chain_method": "parallel",
        "num_chains": 64,
    },
    "chain_method: 'vectorised' unknown": {"chain_method": "vectorised"},
    "groups: \\['loglik'\\] unknown": {"groups": ("loglik",)},
    "max_time: found -1.0, wanted seconds": {"max_time": -1.0},
}


@pytest.mark.parametrize("message", WRONG_SETTINGS)
def test_wrong_settings_are_refused_by_name(message):
    with pytest.raises(ValueError, match=message):
        nuts(**WRONG_SETTINGS[message])


def test_wrong_kernels_are_refused():
    with pytest.raises(TypeError, match="kernel: .* is no kernel"):
        Driver(logistic, num_warmup=1)
    with pytest.raises(ValueError, match="num_warmup: SVI needs it"):
        svi(num_warmup=None)
    with pytest.raises(ValueError, match="thinning: only draws of a chain"):
        svi(thinning=2)
    with pytest.raises(TypeError, match="AIES moves all chains together"):
        Driver(numpyro.infer.AIES(logistic), num_warmup=1, num_chains=4)


def test_replicates_that_need_the_host_cannot_run_on_devices_of_their_own():
    with pytest.raises(
        ValueError,
        match="chain_method: ParticleFilter changes all replicates together on the host, which "
        "'parallel' cannot do; use 'sequential' or 'vectorized'",
    ):
        Driver(ParticleFilter(normal_mean), chain_method="parallel")
    # it never asks
    assert Driver(ImportanceSampling(normal_mean, 5), chain_method="parallel").num_chains == 1


def test_wrong_arguments_are_refused_before_compilation():
    hole = X.copy()
    hole[3, 1] = np.nan
    with pytest.raises(TypeError, match="logistic"):
        nuts().run(0, X)
    with pytest.raises(
        ValueError, match=r"argument 'x': 1 entries are NaN or infinite, the first at \(3, 1\)"
    ):
        nuts().run(0, hole, LABELS)
    with pytest.raises(TypeError, match="rng_key: an integer or a JAX key"):
        nuts().run("seed", X, LABELS)
    with pytest.raises(ValueError, match="rng_key: an integer from 0 to"):
        nuts().run(2**70, X, LABELS)
    with pytest.raises(ValueError, match="rng_key: \\(3,\\) keys for 2 chains"):
        nuts(num_chains=2).run(random.split(random.key(0), 3), X, LABELS)
    with pytest.raises(ValueError, match="extend: nothing has run yet"):
        nuts().extend(10)


def test_names_that_a_tree_cannot_hold_are_refused_before_the_run():
    def twice(y):
        numpyro.sample("a/mu", dist.Normal(0.0, 1.0))
        normal_mean(y)
        numpyro.sample("a.mu", dist.Normal(0.0, 1.0))

    def draws(y):
        with numpyro.plate("draw", 2):
            numpyro.sample("mu", dist.Normal(0.0, 1.0))

    with pytest.raises(ValueError, match="have the same name once"):
        nuts(twice).run(0, Y)
    with pytest.raises(ValueError, match="plate 'draw': the tree needs this name"):
        nuts(draws).run(0, Y)


def test_a_guide_whose_parameters_are_lost_is_refused():
    """Adam's steps of a thousand: scales overflow, and every bound from then on is no number."""
    kernel = SVI(normal_mean, AutoNormal(normal_mean), numpyro.optim.Adam(1000.0), Trace_ELBO())
    with pytest.raises(
        ValueError, match=r"parameter 'mu_auto_loc': NaN, since the gradient of some step was"
    ):
        Driver(kernel, num_warmup=50, num_samples=5, **QUIET).run(0, Y)
