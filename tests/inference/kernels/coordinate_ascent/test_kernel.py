"""Coordinate ascent: its bound against draws, an exact evidence, another library; in the driver;
on data that are not as they should be.
"""

from functools import cache, partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.handlers import seed, trace
from scipy.special import betaln, digamma, logsumexp
from sklearn.mixture import BayesianGaussianMixture

from diagnostics import report
from gallery.generators import three_gaussians
from inference import CoordinateAscent, Driver, Program, StructureError
from inference.kernels.coordinate_ascent import kernel as coordinate_ascent
from inference.kernels.coordinate_ascent import posterior as _posterior
from inference.kernels.coordinate_ascent import rows as _rows
from inference.kernels.coordinate_ascent import start as _start
from inference.kernels.coordinate_ascent.draws import log_rho_of
from inference.kernels.coordinate_ascent.posterior import message_of
from tests.by_numpy import by_numpy
from tests.inference.mixtures import CASES, beta_bernoulli, case
from zoo.iqgme import iqgme, normal_wishart, probit

pytestmark = pytest.mark.usefixtures("x64", "numpyro_promotion")


def ascended(data, num_steps=150, model=iqgme, **options):
    """A kernel, its state after some sweeps, the bounds on the way, the program, and what the
    kernel has read of it.
    """
    program, kernel = Program(model, **data), CoordinateAscent(model, **options)
    read = kernel.read(program)
    start = kernel.init(random.key(0), *read)

    def sweep(state, number):
        state, told = kernel.step(random.key(number), state, *read)
        return state, told.elbo

    state, elbo = jax.jit(lambda state: jax.lax.scan(sweep, state, jnp.arange(num_steps)))(start)
    return kernel, state, np.asarray(elbo), program, read


def gap_to_draws(kernel, state, program, read, num_draws):
    """The bound of q by draws from it and the model's own log density, less the closed form, in
    standard errors.
    """
    drawn = jax.jit(lambda state: dict(kernel.draw(random.key(2), state, *read, num_draws)))(state)
    log_q = drawn.pop("log_q")
    log_joint = jax.jit(lambda values: jax.lax.map(program.log_joint, values, batch_size=256))(
        drawn
    )
    weight = np.asarray(log_joint - log_q)
    _, told = by_numpy(lambda state: kernel.step(random.key(0), state, *read))(state)
    return (weight.mean() - float(told.elbo)) / (weight.std() / np.sqrt(num_draws))


@pytest.mark.parametrize(
    "name",
    [
        "no labels",
        *(pytest.param(name, marks=pytest.mark.slow) for name in CASES if name != "no labels"),
    ],
)
def test_bound_is_that_of_the_model_and_never_falls(name):
    _, data = case(name)
    kernel, state, elbo, program, read = ascended(data)
    assert np.diff(elbo).min() > -1e-9
    assert elbo[-1] - elbo[-2] < 1e-5 < elbo[-1] - elbo[0]
    assert abs(gap_to_draws(kernel, state, program, read, 20_000)) < 3


def forgets(message):
    """E w_x w_b is left out of what the experts say: its part in C is minus the product of the
    means.
    """
    product = message.answers[..., -1:] * message.answers[..., :-1]
    covariance = message.covariance.at[..., -1, :-1].set(-product).at[..., :-1, -1].set(-product)
    return message._replace(covariance=covariance)


def counts_twice(form_of):
    """E w w' in the place of C: as if the soft label were a factor of its own, and then is not."""
    return lambda message, of: (
        form_of(message, of)
        + jnp.einsum("c,cki,ckj->kij", of.last, message.answers, message.answers)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "twin",
    [lambda right: lambda message, of: right(forgets(message), of), counts_twice],
    ids=["a product less", "a product more"],
)
def test_a_wrong_message_is_seen(twin, monkeypatch):
    monkeypatch.setattr(_rows, "form_of", twin(_rows.form_of))
    _, data = case("binary")
    kernel, state, _, program, read = ascended(data)
    assert abs(gap_to_draws(kernel, state, program, read, 20_000)) > 5


# The evidence, every assignment written down.


def log_evidence_of_bits(x, num_experts, alpha):
    """The log-evidence of `beta_bernoulli` mixtures, sticks and probabilities integrated out."""
    found = []
    for z in product(range(num_experts), repeat=len(x)):
        count = np.bincount(z, minlength=num_experts)
        after = count[::-1].cumsum()[::-1]
        sticks = betaln(1 + count[:-1], alpha + after[1:]) - betaln(1, alpha)
        of_rows = [x[np.array(z) == h] for h in range(num_experts)]
        ones = np.array([np.nansum(rows, 0) for rows in of_rows])
        zeros = np.array([np.nansum(1 - rows, 0) for rows in of_rows])
        found.append(sticks.sum() + (betaln(1.5 + ones, 0.8 + zeros) - betaln(1.5, 0.8)).sum())
    return logsumexp(found)


def test_bound_stays_below_the_evidence_and_not_far():
    x = np.array([[1.0, 1, 0], [1, np.nan, 0], [0, 0, 1], [0, 1, 1], [1, 1, 0], [np.nan, 0, 1]])
    _, _, elbo, *_ = ascended(
        {"x": x, "alpha": 0.7, "num_experts": 3, "expert": None, "gate": beta_bernoulli}
    )
    exact = log_evidence_of_bits(x, 3, 0.7)
    assert exact - 3 < elbo[-1] < exact


def evidence_of_labels(data, num_draws=4000):
    """Log evidence and its standard error by draws from the prior, soft labels and groups summed
    out, the missing entry on a grid.
    """
    expert = partial(probit, **data["expert"].keywords)
    settings = {name: value for name, value in data.items() if name not in ("x", "y", "expert")} | {
        "expert": expert
    }
    program = Program(iqgme, data["x"], data["y"], **settings)
    grid = jnp.linspace(-8.0, 8.0, 161)

    def log_likelihood(key):
        prior = trace(seed(iqgme, key)).get_trace(shape=(1, 1), **settings)
        values = {
            name: prior[name]["value"] for name in program.latent if name not in ("z", "x_missing")
        }

        def of_rows(x, h):
            terms = program.log_probs(
                values | {"x_missing": x[None], "z": jnp.full(len(data["y"]), h)}
            )
            return terms["z"] + terms["x"] + terms["y"]

        # [grid, group, row]
        each = jax.vmap(lambda x: jax.vmap(lambda h: of_rows(x, h))(jnp.arange(2)))(grid)
        by_row = jax.nn.logsumexp(each, axis=1)
        is_holed = np.isnan(data["x"][:, 0])
        return jnp.sum(
            jnp.where(
                is_holed, jax.nn.logsumexp(by_row, axis=0) + jnp.log(grid[1] - grid[0]), by_row[0]
            )
        )

    found = np.asarray(
        jax.jit(lambda keys: jax.lax.map(log_likelihood, keys, batch_size=50))(
            random.split(random.key(0), num_draws)
        )
    )
    weight = np.exp(found - found.max())
    return np.log(weight.mean()) + found.max(), weight.std() / weight.mean() / np.sqrt(num_draws)


@pytest.mark.slow
def test_bound_of_labels_stays_below_the_evidence_and_not_far():
    _, data = case("binary")
    data = data | {
        "x": np.array([[0.4], [-1.2], [np.nan]]),
        "y": np.array([1, 0, 1]),
        "num_experts": 2,
    }
    _, _, elbo, *_ = ascended(data)
    exact, error = evidence_of_labels(data)
    assert error < 0.1
    # three rows leave much that a product of factors cannot say
    assert exact - 5 < elbo[-1] < exact - 3 * error


# Another library.


class Peer(BayesianGaussianMixture):
    """scikit-learn's, from given groups; and the last stick, for which it fits a Beta, takes all
    that is left.
    """

    def _initialize_parameters(self, X, random_state, xp=None):
        self._initialize(X, np.eye(self.n_components)[self.start])

    def _estimate_log_weights(self, xp=None):
        a, b = self.weight_concentration_
        taken, left = digamma(a) - digamma(a + b), digamma(b) - digamma(a + b)
        taken[-1] = 0.0
        return taken + np.hstack([0.0, np.cumsum(left[:-1])])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_complete_data_have_the_optimum_of_another_library(monkeypatch):
    rng = np.random.default_rng(0)
    centre, scale = (
        np.array([[3.0, 2, 3], [0, 0, 0], [-3, 0, -1]]),
        np.array([[1.0, 1, 1], [1, 0.3, 2], [1, 1, 1]]),
    )
    group = np.repeat([0, 1, 2], [60, 60, 40])
    x = rng.normal(size=(160, 3)) * scale[group] + centre[group]
    start = np.sort(rng.integers(0, 6, 160))
    start = np.argsort(np.argsort(-np.bincount(start), kind="stable"))[start]
    monkeypatch.setitem(_start.STARTS, "kmeans", lambda *_: start)
    gate = partial(normal_wishart, u0=0.3, nu0=5.0, covariance=2.0)
    _, state, _, _, (reading, data) = ascended(
        {"x": x, "alpha": 0.5, "num_experts": 6, "expert": None, "gate": gate}, 1000
    )
    peer = Peer(
        n_components=6,
        weight_concentration_prior=0.5,
        mean_prior=np.zeros(3),
        mean_precision_prior=0.3,
        reg_covar=0.0,
    )
    peer.set_params(
        degrees_of_freedom_prior=5.0, covariance_prior=2.0 * np.eye(3), max_iter=1000, tol=1e-13
    )
    peer.start = start
    peer.fit(x)
    assert sorted(np.asarray(state.size) > 1) == sorted(peer.degrees_of_freedom_ > 6)
    mine = state.factors.features
    np.testing.assert_allclose(mine.loc, peer.means_, atol=1e-4)
    np.testing.assert_allclose(mine.concentration, peer.degrees_of_freedom_, atol=1e-3)
    np.testing.assert_allclose(
        mine.rate / mine.concentration[:, None, None], peer.covariances_, atol=1e-3
    )
    message = message_of(reading.found, reading.shape, state.factors)
    (bucket,) = data.buckets
    row = np.ravel(bucket.row)  # those that pad the bucket are of no row
    rho = np.exp(log_rho_of(message, bucket, state.score[0])).reshape(-1, 6)[np.argsort(row)][:160]
    np.testing.assert_allclose(rho, peer.predict_proba(x), atol=1e-4)


# In the driver.


FAR, SIDES = 1e4 + np.random.default_rng(0).normal(size=(30, 2)), np.arange(30) % 2


def far_driver(num_sweeps):
    return Driver(
        CoordinateAscent(iqgme), num_warmup=num_sweeps, num_samples=20, progress_bar=False
    )


@cache
def far_tree(num_sweeps):
    return far_driver(num_sweeps).run(0, FAR, SIDES, num_experts=4)


def test_a_run():
    tree = far_tree(1)
    assert tree.attrs["route"] == "mixture"
    assert tree["sample_stats"]["elbo"].dims == ("chain", "step")
    assert tree["posterior"]["z"].dims == ("chain", "draw", "row")


@pytest.fixture(scope="module")
def tree():
    with (
        jax.enable_x64(True),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        _, data = case("binary", num_rows=40)
        return Driver(
            CoordinateAscent(iqgme),
            num_samples=200,
            num_chains=2,
            groups=("log_likelihood", "log_prior"),
        ).run(0, **data)


def cut_short():
    """A run on the same data that ends after a few sweeps."""
    return Driver(CoordinateAscent(iqgme), num_warmup=4, num_samples=10, progress_bar=False).run(
        0, **case("binary")[1]
    )


@pytest.mark.slow
@pytest.mark.parametrize("num_sweeps", [1, 20], ids=["in its last sweep", "on its way"])
def test_a_bound_that_is_no_number_ends_the_run(num_sweeps):
    """Single precision has no digits left for what is 1e-4 of its mean."""
    with (
        jax.enable_x64(False),
        pytest.raises(ValueError, match="the bound is no number.*standardise them"),
    ):
        far_driver(num_sweeps).run(0, np.float32(FAR), SIDES, num_experts=4)
    assert np.isfinite(far_tree(num_sweeps).sample_stats["elbo"]).all()


@pytest.mark.slow
def test_tree_of_a_run(tree):
    stats = tree["sample_stats"].dataset
    assert stats["elbo"].dims == ("chain", "step")
    assert (stats["elbo"].diff("step") > -1e-9).all()
    assert stats["num_groups"].values.max() <= 3
    posterior = tree["posterior"].dataset
    assert posterior["w"].dims == ("chain", "draw", "class", "expert", "weight")
    assert posterior["z"].dims == ("chain", "draw", "row")
    assert tree["log_q"]["log_q"].dims == ("chain", "draw")
    assert {"V_concentration1", "mu_rate", "w_mean", "lambda_rate"} <= set(
        tree["variational_parameters"].data_vars
    )


@pytest.mark.slow
def test_report_knows_the_bound(tree):
    assert report(tree)["ELBO settled"].ok
    assert not report(cut_short())["ELBO settled"].ok


@pytest.mark.slow
def test_single_precision_sums_serve():
    _, data = case("binary", num_rows=60, num_features=3)
    _, _, whole, *_ = ascended(data)
    _, _, single, *_ = ascended(data, dtype="float32")
    np.testing.assert_allclose(single[-1], whole[-1], rtol=1e-5)


@pytest.mark.slow
def test_best_of_several_starts_is_no_worse_than_one():
    _, data = case("binary", num_rows=60)
    ends = [ascended(data, init="random", restarts=number)[2][-1] for number in (1, 6)]
    assert ends[1] >= ends[0] - 1e-6


@pytest.mark.slow
def test_experts_that_differ_are_found(monkeypatch):
    """Three Gaussians, each cut by its own line, a quarter of the cells missing: what experts
    have in common, learned early, is a trap.
    """
    told = three_gaussians(num_rows=600, seed=1)
    x = np.where(np.random.default_rng(0).random(told.x.shape) < 0.25, np.nan, told.x)
    x = (x - np.nanmean(x, 0)) / np.nanstd(x, 0)
    chosen = np.random.default_rng(0).permutation(600) < 300
    data = {"x": x[chosen], "y": told.y[chosen], "num_experts": 8}
    _, _, elbo, *_ = ascended(data)
    monkeypatch.setattr(coordinate_ascent, "NUM_HELD", 0)
    monkeypatch.setattr(_posterior, "WIDE", 1.0)
    _, _, trapped, *_ = ascended(data)
    assert np.diff(elbo).min() > -1e-9
    assert elbo[-1] > trapped[-1] + 5


# Data that are not as they should be.


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda x, y: (np.where(np.arange(2) == 0, np.inf, x), y), "row 0, column 0 is inf"),
        (lambda x, y: (x, y + 1), "found labels"),
    ],
    ids=["infinite", "labels"],
)
def test_wrong_data_are_refused(spoil, message):
    _, data = case("binary")
    x, y = spoil(data["x"], data["y"])
    with pytest.raises(ValueError, match=message):
        Driver(CoordinateAscent(iqgme)).run(0, **data | {"x": x, "y": y})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["row", "column", "constant", "one class", "no label"])
def test_poor_data_still_have_a_bound(name):
    """What is missing altogether is as the prior has it; a class that is not there is
    improbable.
    """
    _, data = case("binary", num_rows=40)
    x, y = np.array(data["x"]), np.array(data["y"])
    if name == "row":
        x[4] = np.nan
    elif name == "column":
        x[:, 1] = np.nan
    elif name == "constant":
        x[:, 1] = 2.0
    else:
        y[:] = 1 if name == "one class" else -1
    kernel, state, elbo, program, (reading, _) = ascended(data | {"x": x, "y": y})
    assert np.isfinite(elbo).all()
    assert np.diff(elbo).min() > -1e-9
    if name in ("one class", "no label"):
        one, other = (
            kernel.predict(state, reading, program.with_arguments(y=np.full(40, code))).log_label
            for code in (1, 0)
        )
        share = np.exp(one) / (np.exp(one) + np.exp(other))
        assert share.mean() > 0.9 if name == "one class" else abs(share.mean() - 0.5) < 0.1
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.factors))
    if name == "column":
        np.testing.assert_allclose(state.factors.features.loc[:, 1], 0.3, atol=0.2)


def test_an_edit_that_is_not_conjugate_is_refused_before_it_runs():
    _, data = case("binary")
    with pytest.raises(StructureError, match="site 'V'.*Use SVI with an autoguide"):
        Driver(CoordinateAscent(iqgme)).run(0, **data | {"alpha": dist.LogNormal(0.0, 1.0)})


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"init": "here"}, "init: found 'here'"),
        ({"restarts": 0}, "restarts"),
        ({"tolerance": -1.0}, "tolerance"),
        ({"dtype": "f"}, "dtype"),
    ],
    ids=["init", "restarts", "tolerance", "dtype"],
)
def test_wrong_options_are_refused(option, message):
    with pytest.raises(ValueError, match=message):
        CoordinateAscent(iqgme, **option)


@pytest.mark.parametrize("is_unrolled", [False, True], ids=["loop", "unrolled"])
@pytest.mark.parametrize("size", [0, 1, 5])
def test_inverse_of_many_matrices(size, is_unrolled):
    root = np.random.default_rng(0).normal(size=(4, 6, size, size))
    matrix = root @ root.mT + np.eye(size)
    inverse, log_det = _rows.inverse(jnp.moveaxis(jnp.asarray(matrix), (2, 3), (0, 1)), is_unrolled)
    np.testing.assert_allclose(
        np.moveaxis(np.asarray(inverse), (0, 1), (2, 3)), np.linalg.inv(matrix), atol=1e-10
    )
    np.testing.assert_allclose(log_det, np.linalg.slogdet(matrix)[1], atol=1e-12)


@pytest.mark.slow
def test_buckets_and_chunks_change_nothing(monkeypatch):
    """The bound is the same in one bucket and chunk as in four buckets with chunks of 7."""
    _, data = case("three classes", num_rows=60, num_features=3)
    _, _, elbo, _, read = ascended(data, 30)
    assert len(read[1].buckets) == 1
    monkeypatch.setattr(_rows, "OVERHEAD", 0.0)
    monkeypatch.setattr(_rows, "LONGEST_CHUNK", {"complete": 7, "incomplete": 7})
    _, _, other, _, read = ascended(data, 30)
    assert len(read[1].buckets) == 4
    np.testing.assert_allclose(other, elbo, rtol=1e-10)
