"""Gibbs sampling by complete conditionals that are read off the model: against exact answers,
NUTS, and Geweke's test.
"""

import pickle
from functools import cache

import arviz as az
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.infer import MCMC, NUTS, Gibbs
from scipy import stats

from diagnostics import geweke
from inference import ConditionalGibbs, Driver, StructureError
from inference.kernels.conditional_gibbs import kernel as conditional_gibbs
from tests.inference.models import Y, exact_posterior, normal_mean

pytestmark = pytest.mark.usefixtures("x64", "numpyro_promotion")

RNG = np.random.default_rng(0)
GROUP = np.repeat(np.arange(6), 5)
SCORES = RNG.normal(RNG.normal(3.0, 1.5, 6)[GROUP], 0.8)
EXPOSURE = RNG.uniform(1.0, 5.0, 12)
COUNTS = RNG.poisson(RNG.gamma(2.0, 1.0, 12) * EXPOSURE)
X = RNG.normal(size=(40, 4))
RESPONSE = X @ np.array([1.5, 0.0, -0.7, 0.0]) + 0.5 * RNG.normal(size=40)


def hierarchical(scores=SCORES):
    """Schools whose means scatter."""
    mean = numpyro.sample("mean", dist.Normal(0.0, 5.0))
    between = numpyro.sample("between", dist.InverseGamma(3.0, 2.0))
    within = numpyro.sample("within", dist.InverseGamma(3.0, 2.0))
    with numpyro.plate("school", 6):
        school = numpyro.sample("effect", dist.Normal(mean, jnp.sqrt(between)))
    with numpyro.plate("pupil", len(GROUP)):
        numpyro.sample("score", dist.Normal(school[GROUP], jnp.sqrt(within)), obs=scores)


def gamma_poisson(counts=COUNTS):
    """Rates that are alike."""
    scale = numpyro.sample("scale", dist.Gamma(2.0, 1.0))
    with numpyro.plate("machine", len(EXPOSURE)):
        rate = numpyro.sample("rate", dist.Gamma(2.0, scale))
        numpyro.sample("count", dist.Poisson(rate * EXPOSURE), obs=counts)


def regression(
    response=RESPONSE, prior=lambda precision: dist.Normal(0.0, 1 / jnp.sqrt(precision))
):
    """Weights with a precision each: those that do not matter shrink."""
    noise = numpyro.sample("noise", dist.Gamma(1.0, 1.0))
    with numpyro.plate("feature", X.shape[1]):
        precision = numpyro.sample("precision", dist.Gamma(1.0, 1.0))
        weight = numpyro.sample("weight", prior(precision))
    numpyro.deterministic("size", jnp.abs(weight).sum())
    with numpyro.plate("row", len(X)):
        numpyro.sample("response", dist.Normal(X @ weight, 1 / jnp.sqrt(noise)), obs=response)


def laplace(precision):
    return dist.Laplace(0.0, 1 / precision)


def edited(response=RESPONSE):
    """Weights that are not Normal any more."""
    return regression(response, laplace)


def run(kernel, num_samples=1500, num_chains=2):
    return Driver(
        kernel, num_warmup=300, num_samples=num_samples, num_chains=num_chains, progress_bar=False
    ).run(0)


def check_same(one, other, most=4.0):
    """Means of all quantities, and of their squares, within so many Monte-Carlo errors."""
    moments = lambda tree: [
        power(tree["posterior"].to_dataset())
        for power in (lambda draws: draws, lambda draws: draws**2)
    ]
    for mine, theirs in zip(moments(one), moments(other), strict=True):
        for name in mine:
            gap = mine[name].mean(("chain", "draw")) - theirs[name].mean(("chain", "draw"))
            error = np.sqrt(
                sum(
                    (draws[name].var(("chain", "draw")) / az.ess(draws)[name]).values
                    for draws in (mine, theirs)
                )
            )
            assert (np.abs(gap.values) < most * error).all(), name


def slowed(name, factor):
    """A draw of one site that misses its conditional."""
    draw = conditional_gibbs.draw_together

    def slip(key, program, sites, values, family):
        drawn, residual = draw(key, program, sites, values, family)
        return {site: drawn[site] * (factor if site == name else 1) for site in drawn}, residual

    return slip


MODELS = {
    "hierarchical": (hierarchical, "between"),
    "gamma_poisson": (gamma_poisson, "rate"),
    "regression": (regression, "precision"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_posterior_is_that_of_nuts(name, monkeypatch):
    model, site = MODELS[name]
    reference = run(NUTS(model))
    found = run(ConditionalGibbs(model))
    check_same(found, reference)
    assert found["sample_stats"]["residual"].max() < 1e-8
    monkeypatch.setattr(conditional_gibbs, "draw_together", slowed(site, 1.2))
    with pytest.raises(AssertionError):
        check_same(run(ConditionalGibbs(model)), reference)


def test_one_site_is_drawn_from_its_exact_posterior():
    """The data are arguments of the loop: a start whose energy nobody knows is no start that is
    impossible.
    """
    driver = Driver(
        ConditionalGibbs(normal_mean),
        num_warmup=0,
        num_samples=4000,
        jit_model_args=True,
        progress_bar=False,
    )
    draws = driver.run(0, Y)["posterior"]["mu"].values.ravel()  # independent: nothing else is drawn
    mean, deviation = exact_posterior()
    assert stats.kstest(draws, stats.norm(mean, deviation).cdf).pvalue > 1e-3
    assert stats.kstest(draws, stats.norm(mean, 1.2 * deviation).cdf).pvalue < 1e-6


@pytest.mark.slow
def test_driver_and_mcmc_draw_the_same():
    tree = Driver(
        ConditionalGibbs(regression), num_warmup=20, num_samples=50, progress_bar=False
    ).run(3)
    mcmc = MCMC(ConditionalGibbs(regression), num_warmup=20, num_samples=50, progress_bar=False)
    mcmc.run(random.key(3))
    for name, values in mcmc.get_samples().items():
        np.testing.assert_array_equal(tree["posterior"][name].values[0], values)
    assert {"weight", "precision", "noise", "size"} == set(tree["posterior"].data_vars)
    np.testing.assert_allclose(
        tree["posterior"]["size"], np.abs(tree["posterior"]["weight"]).sum("feature")
    )


@pytest.mark.slow
def test_chains_side_by_side():
    settings = {"num_warmup": 0, "num_samples": 5, "num_chains": 2, "progress_bar": False}
    first, second = (
        Driver(ConditionalGibbs(regression), chain_method=how, **settings).run(0)
        for how in ("sequential", "vectorized")
    )
    np.testing.assert_allclose(
        first["posterior"]["weight"], second["posterior"]["weight"], rtol=1e-9
    )


def test_a_discrete_site_is_not_sent_to_nuts():
    """Which would refuse it as well."""

    def counted():
        number = numpyro.sample("number", dist.Poisson(3.0))
        numpyro.sample("y", dist.Normal(number, 1.0), obs=jnp.array(2.0))

    with pytest.raises(
        StructureError,
        match=r"site 'number': Poisson has the support .* NUTS draws no discrete site",
    ):
        ConditionalGibbs(counted).init(random.key(0), 0, None, (), {})


@pytest.mark.slow
def test_another_kernel_takes_what_is_refused():
    with pytest.raises(
        StructureError,
        match=r"site 'weight': its complete conditional is of no family .* Give 'weight' to NUTS",
    ):
        run(ConditionalGibbs(edited))
    blocks = [(ConditionalGibbs(edited), ["noise"]), (NUTS(edited), None)]
    check_same(run(Gibbs(blocks)), run(NUTS(edited)))


@pytest.mark.slow
def test_names_mean_nothing():
    renamed = numpyro.handlers.scope(regression, prefix="new")
    kernel = ConditionalGibbs(renamed)
    tree = Driver(kernel, num_warmup=0, num_samples=3, progress_bar=False).run(0)
    assert {"new.weight", "new.precision", "new.noise", "new.size"} == set(
        tree["posterior"].data_vars
    )
    families = kernel.reading.families.items()
    assert {site: family.name for sites, family in families for site in sites} == {
        "new/noise": "Gamma",
        "new/precision": "Gamma",
        "new/weight": "joint Normal of the last dimension",
    }


@cache
def reader():
    """What it has read off the model serves again."""
    return ConditionalGibbs(regression)


def test_the_chain_starts_where_it_is_told():
    values = {"noise": 4.0, "precision": np.ones(4), "weight": np.array([9.0, 8.0, 7.0, 6.0])}
    state = reader().init(random.key(0), 0, values, (), {})
    for name, value in values.items():
        np.testing.assert_array_equal(state.values[name], value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"wheight": np.ones(4)},
            r"init_params: found \['wheight'\], wanted sites of \['noise', 'precision', 'weight'\]",
        ),
        ({"weight": np.ones(3)}, r"init_params: 'weight' has the shape \(3,\), wanted \(4,\)"),
    ],
)
def test_a_start_that_does_not_fit_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        reader().init(random.key(0), 0, values, (), {})


def test_a_conditional_that_changes_its_family_ends_the_run(monkeypatch):
    monkeypatch.setattr(conditional_gibbs, "MAX_RESIDUAL", -1.0)
    with pytest.raises(
        StructureError,
        match=r"site 'mu': its complete conditional is not the Normal that it was at the start",
    ):
        Driver(ConditionalGibbs(normal_mean), num_warmup=0, num_samples=3, progress_bar=False).run(
            0, Y
        )


@pytest.mark.slow
def test_joint_of_parameters_and_data_is_kept(monkeypatch):
    """Geweke's test, and one that a slip fails."""
    assert geweke(regression, ConditionalGibbs, RESPONSE, num_replicates=400).passed
    monkeypatch.setattr(conditional_gibbs, "draw_together", slowed("noise", 1.2))
    assert not geweke(regression, ConditionalGibbs, RESPONSE, num_replicates=400).passed


def test_nothing_is_compiled_twice():
    """The step is one function of its state: a jaxpr without the values that `init` was given."""
    kernel = ConditionalGibbs(normal_mean)
    state = kernel.init(random.key(0), 0, None, (Y,), {})
    step = jax.jit(lambda at: kernel.sample(at, (Y,), {}))
    for _ in range(3):
        state = step(state)
    assert step._cache_size() == 1


def test_a_model_is_read_once_for_all_chains(monkeypatch):
    """Names of sites may be made anew each time that the model runs; other data are read again."""
    counted = []
    identify = conditional_gibbs.identify_all
    monkeypatch.setattr(
        conditional_gibbs,
        "identify_all",
        lambda *given: counted.extend(given[1]) or identify(*given),
    )

    def model(y):
        mu = numpyro.sample("_".join(["mean", str(len(y))]), dist.Normal(0.0, 1.0))
        with numpyro.plate("row", len(y)):
            numpyro.sample("y", dist.Normal(mu, 1.0), obs=y)

    kernel = ConditionalGibbs(model)
    kernel.init(random.split(random.key(0), 3), 0, None, (Y,), {})
    assert counted == [f"mean_{len(Y)}"]
    kernel.init(random.key(0), 0, None, (Y + 1,), {})
    assert len(counted) == 2


WEIGHT = 1.0


def weighted(y):
    """What else its functions use may change between two runs."""
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
    with numpyro.plate("row", len(y)), numpyro.handlers.scale(scale=WEIGHT):
        numpyro.sample("y", dist.Normal(mu, 1.0), obs=y)


@pytest.mark.parametrize("weight", [1.0, 2.0], ids=["as it was", "redefined"])
def test_a_model_is_read_again_where_it_computes_something_else(weight, monkeypatch):
    kernel = ConditionalGibbs(weighted)
    driver = Driver(kernel, num_warmup=0, num_samples=2, progress_bar=False)
    driver.run(0, Y)
    before = driver.reading
    monkeypatch.setitem(globals(), "WEIGHT", weight)
    driver.run(0, Y)
    assert (driver.reading is before) == (weight == 1.0)


def test_what_was_read_stays_behind():
    kernel = ConditionalGibbs(normal_mean)
    kernel.init(random.key(0), 0, None, (Y,), {})
    assert kernel.reading.attributes == {"route": "each"}
    assert pickle.loads(pickle.dumps(kernel)).reading is None
    assert Gibbs([(kernel, None)]).blocks[0][0].reading is None


def test_data_without_a_finite_density_are_refused():
    with pytest.raises(ValueError, match="site 'y'"):
        ConditionalGibbs(normal_mean).init(
            random.key(0), 0, None, (np.where(Y[0] == Y, np.nan, Y),), {}
        )


def test_the_former_name_of_a_route_is_accepted():
    assert ConditionalGibbs(normal_mean, route="assignment").route == "mixture"
