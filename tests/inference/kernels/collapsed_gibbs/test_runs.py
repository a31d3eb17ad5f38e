"""Collapsed Gibbs as it is used: in the driver, in NumPyro's MCMC and Gibbs, with room that runs
out, from a given start, refused.
"""

import pickle
from functools import cache, partial
from itertools import count

import arviz as az
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from jax import tree as trees
from numpyro.infer import MCMC, NUTS, Gibbs

import diagnostics
from inference import CollapsedGibbs, Driver
from inference.kernels.collapsed_gibbs import kernel as collapsed_gibbs
from zoo.aclass import aclass, beta_bernoulli, normal_inverse_chi2, simulate

pytestmark = pytest.mark.usefixtures("numpyro_promotion")

X = np.array([[1, 1, 0], [1, 1, 1], [0, 0, 1], [0, np.nan, 0], [1, 0, 0], [0, 1, 1]])
Y = np.array([0, -1, 0, 1, 1, -1])
KNOWN = np.array([0, 1, 0, 1, 1, 1])
APART = np.eye(6)  # each row wants a group of its own
LEARNED = {"alpha": dist.Gamma(2.0, 1.0)}
QUIET = {"progress_bar": False}


def gibbs(model=aclass, own=("z", "share", "p"), other=("alpha",), parameters=True):
    return Gibbs(
        [(CollapsedGibbs(model, parameters=parameters), list(own)), (NUTS(model), list(other))]
    )


@cache
def kernel(model=aclass, **settings):
    return CollapsedGibbs(model, **settings)


@cache
def run(num_samples=40):
    settings = {
        "num_warmup": 10,
        "num_samples": num_samples,
        "num_chains": 2,
        "groups": ("log_likelihood", "posterior_predictive"),
    }
    return Driver(kernel(parameters=True), **settings, **QUIET).run(7, X, Y)


@pytest.fixture
def unproved(monkeypatch):
    """For tests that read many models: the proofs have their own, and take most of the time."""
    monkeypatch.setattr("inference.reading.crp_mixture.prove", lambda *_, **__: None)


# Draws, and the tree.


@pytest.mark.slow
@pytest.mark.parametrize("chain_method", ["sequential", "vectorized"])
def test_draws_equal_those_of_numpyros_mcmc(chain_method):
    reference = MCMC(
        kernel(parameters=True),
        num_warmup=10,
        num_samples=40,
        num_chains=2,
        chain_method=chain_method,
        **QUIET,
    )
    reference.run(random.key(7), X, Y)
    found, posterior = reference.get_samples(group_by_chain=True), run().posterior
    assert set(found) == set(posterior.data_vars) == {"share", "y_unobserved", "y", "z", "p"}
    for name, draws in found.items():
        # a batch of chains is rounded in another way
        np.testing.assert_allclose(draws, posterior[name], rtol=1e-4, err_msg=name)


@pytest.mark.slow
def test_the_tree_has_names_for_everything():
    tree = run()
    assert tree.posterior["z"].dims == ("chain", "draw", "row")
    assert tree.posterior["p"].dims == ("chain", "draw", "class", "group", "feature")
    assert tree.posterior["share"].dims[2:] == ("class",)
    assert tree.attrs["partition"] == '["z", "y"]'
    assert tree.sample_stats["num_groups"].shape == (2, 40, 2)
    y, z = tree.posterior["y"], tree.posterior["z"]
    assert (y.values[..., Y >= 0] == Y[Y >= 0]).all()
    np.testing.assert_array_equal(diagnostics.partition_of(tree), y * (z.max() + 1) + z)
    opened = np.stack([np.where(y == c, z, -1).max(-1) + 1 for c in range(2)], axis=-1)
    np.testing.assert_array_equal(tree.sample_stats["num_groups"], opened)


@pytest.mark.slow
def test_arviz_and_the_report_read_the_tree():
    tree = run()
    assert set(az.summary(tree, var_names=["share", "p"]).index) >= {"share[0]", "p[1, 5, 2]"}
    report = diagnostics.report(tree)
    assert "CollapsedGibbs" in str(report)
    assert np.isfinite(tree.log_likelihood["x"]).all()
    assert set(np.unique(tree.posterior_predictive["x"])) == {0.0, 1.0}


@pytest.mark.slow
def test_a_run_is_gone_on_from(tmp_path):
    settings = {"num_warmup": 10, "num_chains": 2, "checkpoint": tmp_path / "run", **QUIET}
    first, whole = (
        Driver(kernel(parameters=True), num_samples=n, **settings).run(7, X, Y) for n in (15, 40)
    )
    assert (first.attrs["steps_run"], whole.attrs["steps_run"]) == (25, 25)
    for name in whole.posterior.data_vars:
        np.testing.assert_array_equal(whole.posterior[name], run().posterior[name])


@pytest.mark.slow
def test_the_structure_is_read_again_where_an_argument_has_another_name(unproved):
    """The numbers are the same; only the names tell that there are now at most two groups."""
    two, one = kernel(), np.zeros(6, int)
    two.init(random.key(0), 0, None, (X, one), {"num_classes": 2})
    assert two.reading.partition.num_classes == 2
    two.init(random.key(0), 0, None, (X, one), {"max_groups": 2})
    assert two.reading.partition.max_groups == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Out-of-support")
def test_data_that_were_changed_in_place_are_looked_at_again(unproved):
    x = X.copy()
    kernel().init(random.key(0), 0, None, (x, KNOWN), {})
    x[2, 1] = 2.0
    with pytest.raises(ValueError, match=r"site 'x': row 2, column 1 is 2\.0"):
        kernel().init(random.key(0), 0, None, (x, KNOWN), {})


@pytest.mark.slow
def test_a_kernel_that_has_read_a_model_can_be_pickled():
    used = kernel()
    used.init(random.key(0), 0, None, (X, Y), {})
    again = pickle.loads(pickle.dumps(used))
    assert again.reading is None
    state = again.init(random.key(0), 0, None, (X, Y), {})
    np.testing.assert_array_equal(
        state.values["z"], used.init(random.key(0), 0, None, (X, Y), {}).values["z"]
    )


# Groups in blocks, and room that is not looked at: neither changes a draw.


@pytest.mark.slow
def test_what_is_not_in_use_changes_nothing(monkeypatch, unproved):
    data = simulate(random.key(0), 40, 4, num_classes=2, alpha=3.0, unlabelled=0.3)
    driver = Driver(CollapsedGibbs(aclass), num_warmup=0, num_samples=20, **QUIET)
    whole = driver.run(3, **data)
    monkeypatch.setattr(collapsed_gibbs, "sweep", collapsed_gibbs.sweep.__wrapped__)
    monkeypatch.setattr(collapsed_gibbs, "BLOCK", 3)
    monkeypatch.setattr(collapsed_gibbs, "NARROW", 7)
    largest = whole.posterior["z"].max("row")
    # now and then all that is in use is within the narrow room
    assert largest.min() < 6 < 7 < largest.max()
    np.testing.assert_array_equal(driver.run(3, **data).posterior["z"], whole.posterior["z"])


# Room that runs out.

FULL = "site 'z': class 1 has 2 groups, all that the capacity of its CRP has room for.*max_groups"
TIGHT = {"alpha": 20.0, "num_groups": 2}
ONE_GROUP = {"z": np.zeros(6, int)}  # there is room at the start
SEATED = np.array([0, 0, 1, 1, 1, 1])  # class 0 has two rows, and so never more groups


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("start", [None, ONE_GROUP])
def test_a_full_class_stops_the_driver(start):
    with pytest.raises(ValueError, match=FULL):
        Driver(kernel(), num_warmup=0, num_samples=50, **QUIET).run(
            0, APART, SEATED, init_params=start, **TIGHT
        )


def test_a_full_class_stops_numpyros_mcmc_where_it_has_a_bar(monkeypatch):
    for name in ("CI", "PYTEST_XDIST_WORKER"):  # in whose presence NumPyro draws none
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match=FULL):
        MCMC(kernel(), num_warmup=0, num_samples=50).run(
            random.key(0), APART, SEATED, init_params=ONE_GROUP, **TIGHT
        )


def test_without_a_bar_the_draws_of_numpyros_mcmc_are_void():
    mcmc = MCMC(kernel(), num_warmup=0, num_samples=50, **QUIET)
    mcmc.run(random.key(0), APART, SEATED, init_params=ONE_GROUP, **TIGHT)
    assert (mcmc.get_samples()["z"][-1] == 2).all()
    assert jnp.isnan(mcmc.get_samples()["share"][-1]).all()
    with pytest.raises(ValueError, match=FULL):
        mcmc.sampler.get_diagnostics_str(mcmc.last_state)


@pytest.mark.slow
def test_a_bounded_number_of_groups_is_never_full():
    tree = Driver(kernel(), num_warmup=0, num_samples=50, **QUIET).run(
        0, APART, SEATED, alpha=20.0, max_groups=2
    )
    assert tree.posterior["z"].max() == 1


class SecondFails(CollapsedGibbs):
    """Its second chain, which no bar shows, is full from the start."""

    def __init__(self, model):
        super().__init__(model)
        self.chain = count()

    def init(self, *args, **kwargs):
        state = super().init(*args, **kwargs)
        return state._replace(
            failed=jnp.full_like(state.failed, (collapsed_gibbs.FULL + 1) * (next(self.chain) == 1))
        )


@pytest.mark.slow
def test_any_chain_stops_the_driver_and_whatever_it_records():
    with pytest.raises(ValueError, match="class 1 has"):
        Driver(
            SecondFails(aclass),
            num_warmup=0,
            num_samples=5,
            num_chains=2,
            extra_fields=("failed",),
            **QUIET,
        ).run(0, X, KNOWN)


def test_a_weight_that_is_no_number_stops_the_driver(unproved):
    chain = kernel()
    state = chain.init(random.key(0), 0, ONE_GROUP, (X, KNOWN), {})
    spoilt = state.prior._replace(
        seating=trees.map(lambda leaf: leaf * jnp.nan, state.prior.seating)
    )
    state = chain.sample(state._replace(prior=spoilt), (X, KNOWN), {})
    with pytest.raises(
        ValueError, match=r"site 'z': the groups of a row have no finite weight.*jax.enable_x64"
    ):
        chain.get_diagnostics_str(state)


# A given start.

GIVEN = {"z": np.array([0, 0, 1, 0, 1, 2]), "y_unobserved": np.array([0, 1, 0, 1, 1, 1])}


def begun(init_params, **settings):
    return kernel(**settings).init(random.key(0), 0, init_params, (X, Y), {}).values


def test_a_given_start_is_kept(unproved):
    p = np.random.default_rng(0).uniform(0.1, 0.9, (2, 6, 3)).astype(np.float32)
    values = begun(GIVEN | {"p": p}, parameters=True)
    for name, value in (GIVEN | {"p": p}).items():
        np.testing.assert_array_equal(values[name], value)
    assert set(begun(GIVEN)) == {"z", "y_unobserved", "share"}


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (
            {"z": np.array([0, 0, 2, 0, 1, 2])},
            "'z' is outside of its support; wanted groups numbered from 0 in order of appearance",
        ),
        ({"z": np.array([1, 0, 0, 0, 0, 0])}, "'z' is outside of its support"),
        ({"z": np.array([0, 0, 1, 0, 1, 6])}, "'z' is outside of its support"),
        (
            {"z": np.array([0.0, 0.5, 1.0, 0.0, 1.0, np.nan])},
            r"found 'z' of float32\[6\], wanted int32\[6\]",
        ),
        ({"z": np.zeros(4, int)}, r"found 'z' of int32\[4\], wanted int32\[6\]"),
        (
            {"y_unobserved": np.full(6, 2)},
            "'y_unobserved' is outside of its support; wanted values of a Categorical",
        ),
        (
            {"share": np.array([0.5, np.nan], np.float32)},
            "'share' is outside of its support; wanted values of a Dirichlet",
        ),
        (
            {"p": np.full((2, 6, 3), 1.5, np.float32)},
            "'p' is outside of its support; wanted values of a Beta",
        ),
        ({"alpha": 2.0}, r"found \['alpha', 'y_unobserved', 'z'\], wanted \['z', 'y_unobserved'\]"),
    ],
)
def test_a_wrong_start_is_refused(start, message, unproved):
    with pytest.raises(ValueError, match=f"init_params: {message}"):
        begun(GIVEN | start, parameters=True)


def test_a_start_must_say_where_every_row_is(unproved):
    with pytest.raises(
        ValueError, match=r"init_params: found \['z'\], wanted \['z', 'y_unobserved'\]"
    ):
        begun({"z": GIVEN["z"]})
    with pytest.raises(ValueError, match="parameters of groups are drawn with parameters=True"):
        begun(GIVEN | {"p": np.full((2, 6, 3), 0.5)})


# Beside another kernel.


@pytest.mark.slow
def test_another_kernel_hands_over_what_it_draws():
    chain = gibbs()
    state = chain.init(random.key(0), 0, {"alpha": jnp.log(7.0)}, (X, KNOWN), LEARNED)
    mine, (block, _) = state.block_states[0], chain.blocks[0]
    assert mine.prior.seating.concentration == pytest.approx(7.0)
    moved = block.refresh(mine, (X, KNOWN), LEARNED | {"_gibbs_sites": {"alpha": jnp.asarray(3.0)}})
    assert moved.prior.seating.concentration == 3.0


@pytest.mark.slow
def test_a_full_class_beside_another_kernel_stops_the_driver():
    with pytest.raises(ValueError, match=FULL):
        Driver(gibbs(), num_warmup=0, num_samples=500, **QUIET).run(
            0, APART, SEATED, num_groups=2, alpha=dist.Gamma(2.0, 4.0)
        )


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        (
            {"own": ["z", "p"], "other": ["alpha", "share"]},
            r"site 'share': it belongs to another block.*wanted for this block \['z', 'share', "
            r"'p'\]",
        ),
        (
            {"own": ["z", "share"], "other": ["alpha", "p"], "parameters": False},
            "site 'p': it belongs to another block.*parameters=True",
        ),
        ({"parameters": False}, "parameters of groups are drawn with parameters=True"),
    ],
)
def test_wrong_blocks_are_refused(blocks, message, unproved):
    with pytest.raises(ValueError, match=message):
        gibbs(**blocks).init(random.key(0), 0, None, (X, KNOWN), LEARNED)


# What is refused.


def logistic(x, at):
    with at.classes, at.groups, at.features:
        w = numpyro.sample("w", dist.Normal(0.0, 1.0))
    with at.rows, at.features:
        return numpyro.sample("x", dist.Bernoulli(logits=w[at.z]), obs=x)


def no_partition(x, y):
    mean = numpyro.sample("mean", dist.Normal(0.0, 1.0))
    numpyro.sample("x", dist.Normal(mean, 1.0), obs=x[:, 0])


REFUSED = {
    "latent scalar": (LEARNED, "site 'alpha': a latent scalar.*NUTS"),
    "latent hyper-parameter": (
        {"component": partial(beta_bernoulli, beta=dist.Gamma(1.0, 1.0))},
        "site 'beta': a latent scalar",
    ),
    "no partition": ({"model": no_partition}, "no_partition: found 0 partition sites"),
    "no pair": (
        {"x": np.nan_to_num(X), "component": logistic},
        "site 'x': BernoulliLogits with 'w' ~ Normal is not in the table",
    ),
    "NaN label": (
        {"y": np.where(np.arange(6) == 4, np.nan, Y)},
        r"CRP labels: found float32\[6\], wanted the class of each row, integers",
    ),
    "label 2": (
        {"y": np.where(np.arange(6) == 4, 2, Y)},
        "row 4: found class 2, wanted 0 to 1, or -1 where unlabelled",
    ),
    "label -2": ({"y": np.where(np.arange(6) == 4, -2, Y)}, "row 4: found class -2, wanted 0 to 1"),
    "not a bit": ({"x": np.where(X == 1, 2.0, X)}, r"site 'x': .*2\.0"),
    "infinite": (
        {"x": np.where(X == 1, np.inf, X), "component": normal_inverse_chi2},
        "site 'x': .*inf",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore:Out-of-support")
def test_bad_models_and_data_are_refused_by_name(name, unproved):
    changes, message = REFUSED[name]
    given = {"model": aclass, "x": X, "y": Y} | changes
    chain = CollapsedGibbs(given.pop("model"))
    with pytest.raises(ValueError, match=message):
        chain.init(random.key(0), 0, None, (), given)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("name", "message"),
    [("NaN label", "CRP labels"), ("label 2", "site 'y.*first is 2"), ("latent scalar", "'alpha'")],
)
def test_the_driver_refuses_them_too(name, message, unproved):
    with pytest.raises(ValueError, match=message):
        Driver(kernel(), num_warmup=1, num_samples=1, **QUIET).run(
            0, **({"x": X, "y": Y} | REFUSED[name][0])
        )


@pytest.mark.parametrize("component", [normal_inverse_chi2, beta_bernoulli])
def test_it_runs_in_double_precision(component, unproved):
    with jax.enable_x64(True):
        model = partial(aclass, component=component, num_classes=2)
        kernel = CollapsedGibbs(model, parameters=True)
        tree = Driver(kernel, num_warmup=0, num_samples=2, **QUIET).run(0, X, Y)
    assert tree.posterior["share"].dtype == np.float64
