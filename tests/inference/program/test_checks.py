"""Bad data and impossible models are named before anything is compiled; what is missing on
purpose passes.
"""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import NUTS, SVI, Gibbs, Trace_ELBO
from numpyro.infer.autoguide import AutoDelta
from numpyro.infer.initialization import init_to_value

from inference import Driver
from inference.program.program import Program
from inference.program.sites import StructureError
from tests.inference.program.test_program import continuous

pytestmark = pytest.mark.usefixtures("x64", "numpyro_promotion")
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(5, 2)), RNG.normal(size=5)


def test_a_model_without_latent_sites_is_refused():
    with pytest.raises(StructureError, match="found no latent site among"):
        Program(lambda y: numpyro.sample("y", dist.Normal(0.0, 1.0), obs=y), 1.0).check()


HOLED = np.where(np.arange(5) == 3, np.nan, Y)


def _rates(counts):
    rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
    with numpyro.plate("row", len(counts)):
        numpyro.sample("counts", dist.Poisson(rate), obs=counts)


def _impossible(y):
    mean = numpyro.sample("mean", dist.Normal(0.0, 1.0))
    numpyro.factor("wall", jnp.where(mean > 1e6, 0.0, -jnp.inf))
    numpyro.sample("y", dist.Normal(mean, 1.0), obs=y)


@pytest.mark.parametrize(
    ("program", "text"),
    [
        (
            Program(continuous, X, HOLED),
            r"site 'y': 1 of its observations are NaN.*first at \(3,\) of argument 'y'.*obs_mask",
        ),
        (
            Program(continuous, np.where(X[1, 1] == X, np.inf, X), Y),
            r"argument 'x': 1 entries.*first at \(1, 1\).*site 'y'",
        ),
        (
            Program(_rates, np.array([1, 2, -1])),
            r"site 'counts': 1 .*outside the support.*Poisson; the first is -1 at \(2,\).*'counts'",
        ),
        (Program(_rates, np.array([1.0, 0.5])), r"site 'counts': 1 .*the first is 0.5 at \(1,\)"),
        (
            Program(_impossible, 0.3),
            "found no start.*not finite at any of 21 starts.*'wall' .Unit: -inf",
        ),
    ],
    ids=["nan", "covariate", "negative", "fraction", "impossible"],
)
def test_bad_data_are_named(program, text):
    with pytest.raises(ValueError, match=text):
        program.check()


@pytest.mark.filterwarnings("ignore:Out-of-support")
def test_data_missing_on_purpose_pass():
    def masked(y):
        mean = numpyro.sample("mean", dist.Normal(0.0, 1.0))
        with numpyro.plate("row", len(y)):
            seen = ~np.isnan(y)
            numpyro.sample("y", dist.Normal(mean, 1.0).mask(seen), obs=y)
            numpyro.sample("sign", dist.Bernoulli(0.5).mask(seen), obs=np.where(seen, 1, 7))

    Program(masked, HOLED).check()


def _subsampled(y):
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
    with numpyro.plate("n", 100, subsample_size=10):
        numpyro.sample("obs", dist.Normal(mu, 1.0), obs=numpyro.subsample(y, 0))


def test_a_subsampled_plate_is_checked_and_its_likelihood_needs_indices():
    program = Program(_subsampled, np.arange(100.0) / 100)
    program.check()
    assert program.observed_values == {}
    assert program.parents["obs"] == {"mu"}
    assert program.fingerprint() == Program(_subsampled, np.arange(100.0) / 100).fingerprint()
    with pytest.raises(StructureError, match="plate 'n'.*10 of 100 rows.*drop subsample_size"):
        program.log_likelihood({"mu": jnp.array(0.0)})
    assert program.log_likelihood({"mu": jnp.array(0.0), "n": jnp.arange(10)})["obs"].shape == (10,)


def _below(y, scale=0.01):
    top = numpyro.sample("top", dist.Gamma(2.0, scale))
    with numpyro.plate("row", len(y)):
        numpyro.sample("y", dist.Uniform(0.0, top), obs=y)


def test_a_support_that_latent_sites_set_needs_a_start_and_no_other_data():
    y = jnp.array([3.0, 100.0])
    Program(_below, y).check()
    with pytest.raises(
        ValueError,
        match=r"site 'y': found no start.*depends on \['top'\]; the first is 3.0.*init_to_value",
    ):
        Program(_below, y, 10.0).check()
    Program(_below, y, 10.0).check(start={"top": jnp.array(150.0)})


@pytest.mark.slow
def test_a_start_that_the_kernel_knows_is_enough():
    y, start = jnp.array([3.0, 100.0]), init_to_value(values={"top": 150.0})
    settings = {"num_warmup": 5, "num_samples": 5, "progress_bar": False}
    for kernel in (
        NUTS(_below, init_strategy=start),
        Gibbs([(NUTS(_below, init_strategy=start), None)]),
    ):
        assert (Driver(kernel, **settings).run(0, y, 10.0).posterior["top"] > 100.0).all()
    guide = AutoDelta(_below, init_loc_fn=start)
    assert (
        Driver(SVI(_below, guide, numpyro.optim.Adam(1e-3), Trace_ELBO()), **settings)
        .run(0, y, 10.0)
        .posterior["top"]
        > 100.0
    ).all()
    with pytest.raises(ValueError, match="init_to_value"):
        Driver(NUTS(_below), **settings).run(0, y, 10.0)


@pytest.mark.parametrize(
    "y",
    [[1.0, 2.0], np.array(["a", "b"]), np.array([1.0, None])],
    ids=["list", "strings", "objects"],
)
def test_data_that_are_no_array_are_named(y):
    with pytest.raises(ValueError, match="argument 'y': found .*wanted an array; numpy.asarray"):
        Program(_rates_of, y).check()


def _rates_of(y):
    numpyro.sample("y", dist.Normal(numpyro.sample("mean", dist.Normal(0.0, 1.0)), 1.0), obs=y)


def test_numpy_data_against_a_traced_bound_are_named():
    with pytest.raises(ValueError, match="argument 'y': found a NumPy array.*jax.numpy.asarray"):
        Program(_below, np.array([3.0, 100.0])).check()
