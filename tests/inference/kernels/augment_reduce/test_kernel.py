"""Bounds of augment and reduce against integrals of the model's own log joint; steps against
sums over all rows and classes.
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from scipy.optimize import minimize

from inference.kernels.augment_reduce.kernel import _bound_of_rows
from inference.kernels.augment_reduce.noise_posterior import LocationScale, LogExponential
from inference.kernels.augment_reduce.weights import minibatch_of
from inference.reading import row_table
from tests.inference.reducing import (
    X,
    Y,
    bound,
    every,
    fitted,
    utilities,
    weights_of,
    whole,
    z_scores,
)

pytestmark = pytest.mark.usefixtures("x64")

NOISES = ("gumbel", "normal", "logistic", "laplace", "student_t")
SCIPY = {
    "normal": stats.norm,
    "logistic": stats.logistic,
    "laplace": stats.laplace,
    "student_t": stats.t(5),
}
each_noise = pytest.mark.parametrize("noise", NOISES)


def exact_log_likelihood(reading, program, state):
    """The log likelihood of each row, with eps integrated out."""
    exact = program.with_arguments(batch_size=None, augmented=False)
    return np.asarray(
        jax.jit(lambda weights: exact.log_likelihood(weights)["y"])(weights_of(reading, state))
    )


def best_rate(reading, state):
    psi = utilities(reading, state)
    return np.exp(psi - psi[np.arange(6), Y][:, None]).sum(1)


# Bounds.


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "noise",
    ["gumbel", "normal", *(pytest.param(name, marks=pytest.mark.slow) for name in NOISES[2:])],
)
def test_bound_is_below_the_log_likelihood(noise):
    reading, program, state = fitted(noise)
    exact = exact_log_likelihood(reading, program, state).sum()
    assert bound(reading, program, state) < exact
    nearly = (
        state._replace(local={name: jnp.zeros_like(value) for name, value in state.local.items()})
        if noise != "gumbel"
        else state
    )
    assert bound(reading, program, nearly) < exact


def test_bound_of_softmax_is_tight_at_the_best_rate():
    reading, program, state = fitted("gumbel")
    assert isinstance(reading.q_noise, LogExponential)
    best = state._replace(local={"rate": jnp.asarray(best_rate(reading, state))})
    assert bound(reading, program, best) == pytest.approx(
        exact_log_likelihood(reading, program, state).sum(), abs=1e-6
    )
    rate = np.asarray(state.local["rate"])
    closed = 1 - np.log(rate) - best_rate(reading, state) / rate  # eq. 8
    assert bound(reading, program, state) == pytest.approx(closed.sum(), abs=1e-10)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("noise", NOISES[1:])
def test_bound_is_the_expected_log_joint_and_the_entropy(noise):
    """By draws of eps from SciPy's distribution, put into the model itself."""
    reading, program, state = fitted(noise)
    assert isinstance(reading.q_noise, LocationScale)
    full = program.with_arguments(batch_size=None, num_negatives=None)
    v = {name: jnp.asarray(value) for name, value in weights_of(reading, state).items()}
    z = SCIPY[noise].ppf((np.arange(4000) + 0.5) / 4000)
    loc, scale = np.asarray(state.local["loc"]), np.exp(np.asarray(state.local["log_scale"]))

    def rows(z):
        terms = full.log_probs({**v, "eps": jnp.asarray(loc) + jnp.asarray(scale) * z})
        return terms["eps"] + terms["is_below"].sum(0)

    log_joint = np.asarray(jax.lax.map(jax.jit(rows), jnp.asarray(z))).mean(0)
    entropy = np.log(scale) + float(
        SCIPY[noise]().entropy() if noise != "student_t" else stats.t(5).entropy()
    )
    assert bound(reading, program, state) == pytest.approx((log_joint + entropy).sum(), abs=0.02)


def test_a_missing_entropy_is_seen(monkeypatch, request):
    _bound_of_rows.clear_cache()
    request.addfinalizer(_bound_of_rows.clear_cache)
    monkeypatch.setattr(LocationScale, "entropy", lambda self, local: jnp.zeros_like(local["loc"]))
    with pytest.raises(AssertionError):
        test_bound_is_the_expected_log_joint_and_the_entropy("normal")


# Estimates.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("noise", "own_negatives"),
    [*((name, False) for name in NOISES), ("gumbel", True), ("logistic", True)],
    ids=[*NOISES, "gumbel, classes of each row", "logistic, classes of each row"],
)
def test_estimates_of_bound_and_slopes_are_unbiased(noise, own_negatives):
    scores = z_scores(*fitted(noise, own_negatives=own_negatives))
    assert len(scores) == 16
    assert np.abs(scores).max() < 4.5


@pytest.fixture
def scaled_by_k(monkeypatch):
    """K / S for (K - 1) / S."""
    log_prob = row_table._log_prob
    monkeypatch.setattr(
        row_table,
        "_log_prob",
        lambda site: log_prob(site) * (5 / 4 if site["name"] == "is_below" else 1),
    )


def test_classes_that_are_scaled_by_k_are_seen(request):
    reading, program, state = fitted("gumbel")
    exact = np.asarray(whole(reading, program, state))
    assert np.abs(z_scores(reading, program, state, exact)).max() < 4.5
    request.getfixturevalue("scaled_by_k")
    assert np.abs(z_scores(reading, program, state, exact)).max() > 10


# Local steps.


def e_step(reading, program, state, index, key, step_size=1.0):
    @jax.jit
    def step(state, key):
        view = minibatch_of(reading, program, index, state, None)
        rows = index["row"]
        local = jax.tree.map(lambda leaf: leaf[rows], state.local)
        terms = view.terms(view.parameters)
        return reading.q_noise.step(local, terms, terms, step_size, key)

    return step(state, key)


def test_natural_gradient_has_its_fixed_point_at_the_best_rate():
    reading, program, state = fitted("gumbel")
    found = e_step(reading, program, state, every(reading), jax.random.key(0))
    np.testing.assert_allclose(found["rate"], best_rate(reading, state), rtol=1e-10)
    best = state._replace(local=found)
    np.testing.assert_allclose(
        e_step(reading, program, best, every(reading), jax.random.key(0), 0.3)["rate"],
        best_rate(reading, state),
        rtol=1e-10,
    )


def rate_scores(reading, program, state, num_draws=10_000):
    """z of the mean target of sampled classes, for each row."""

    def target(key):
        classes = reading.reduced.draw_index(key, False)["other"]
        view = minibatch_of(reading, program, {"row": jnp.arange(6), "other": classes}, state, None)
        return reading.q_noise.target(view.terms(view.parameters), 6)[0]

    found = np.asarray(jax.jit(jax.vmap(target))(jax.random.split(jax.random.key(1), num_draws)))
    return (found.mean(0) - best_rate(reading, state)) / (found.std(0) / np.sqrt(num_draws))


def test_target_of_the_rate_is_unbiased():
    assert np.abs(rate_scores(*fitted("gumbel"))).max() < 4


def test_a_wrong_scale_moves_the_target(scaled_by_k):
    assert np.abs(rate_scores(*fitted("gumbel"))).max() > 10


def test_rate_is_never_below_a_term_that_it_exceeds():
    reading, program, state = fitted("gumbel")
    state = state._replace(local={"rate": 0.1 * state.local["rate"]})
    index = every(reading) | {"other": jnp.array([3])}
    found = np.asarray(e_step(reading, program, state, index, jax.random.key(0), 1e-9)["rate"])
    psi = utilities(reading, state)
    sampled = np.where(Y == 3, 4, 3)
    assert (found >= np.exp(psi[np.arange(6), sampled] - psi[np.arange(6), Y]) * (1 - 1e-6)).all()
    assert (found > np.asarray(state.local["rate"]) * 1.001).any()


@cache
def with_a_posterior():
    """As `fitted`, with weights of many widths; and the best rate, by the moment-generating
    function of utilities.
    """
    reading, program, state = fitted("gumbel", posterior=True)
    [table], [packed] = reading.layouts, state.tables
    rows, rng = table.unpack(packed), np.random.default_rng(0)
    for value in rows.values.values():
        value["log_scale"] = jnp.log(jnp.asarray(rng.uniform(0.2, 0.8, value["log_scale"].shape)))
    state = state._replace(tables=(table.pack(rows),))
    variance = {
        name: np.exp(2 * np.asarray(value["log_scale"]))
        for name, value in reading.kernel.values(state, reading).items()
    }
    psi, spread = utilities(reading, state), X**2 @ variance["weights"].T + variance["biases"]
    own = np.arange(6), Y
    terms = np.exp(psi - psi[own][:, None] + (spread + spread[own][:, None]) / 2)
    terms[own] = 1.0
    return reading, program, state, terms.sum(1)


def steps_with_a_posterior(local, step_size, num_draws, floor_at_means=True):
    """Rates after a step with each of many draws of the weights [draw, row]."""
    reading, program, state, _ = with_a_posterior()

    def step(key):
        view = minibatch_of(reading, program, every(reading), state, key)
        drawn, at_means = (each.terms(each.parameters) for each in (view, view._replace(noise={})))
        return reading.q_noise.step(
            local, drawn, at_means if floor_at_means else drawn, step_size, key
        )["rate"]

    return np.asarray(jax.jit(jax.vmap(step))(jax.random.split(jax.random.key(2), num_draws)))


@pytest.mark.parametrize(
    "is_drawn", [True, False], ids=["weights are drawn", "weights at their means, which is seen"]
)
def test_rate_under_a_posterior_is_the_moment_generating_function_on_average(is_drawn):
    reading, _, state, best = with_a_posterior()
    found = (steps_with_a_posterior({"rate": jnp.asarray(best)}, 0.01, 20_000) - 0.99 * best) / 0.01
    if not is_drawn:
        found = found - found.mean(0) + best_rate(reading, state)
    z = (found.mean(0) - best) / (found.std(0) / np.sqrt(len(found)))
    assert (np.abs(z).max() < 4) == is_drawn


@pytest.mark.parametrize(
    "floor_at_means", [True, False], ids=["floor at means", "floor of a draw, which is seen"]
)
def test_no_draw_of_the_weights_pushes_the_rate_above_its_best(floor_at_means):
    *_, best = with_a_posterior()
    found = steps_with_a_posterior({"rate": jnp.asarray(best)}, 1e-9, 1000, floor_at_means)
    assert (found <= best * (1 + 1e-6)).all() == floor_at_means


@pytest.mark.slow
@pytest.mark.parametrize("noise", ["normal", "logistic"])
def test_steps_of_location_and_scale_end_at_the_best_bound(noise):
    reading, program, state = fitted(noise, num_draws=400)
    step = jax.jit(
        lambda state, key, size: state._replace(
            local=e_step(reading, program, state, every(reading), key, size)
        )
    )
    for t in range(60):
        state = step(state, jax.random.key(t), (1 + t / 4) ** -0.9)
    view = minibatch_of(reading, program, every(reading), state, None)
    terms = view.terms(view.parameters)

    @jax.jit
    @jax.value_and_grad
    def loss(vector):
        return -reading.bound_of_rows(
            terms, {"loc": vector[:6], "log_scale": vector[6:]}, None
        ).sum()

    best = minimize(
        lambda v: [np.asarray(part, float) for part in loss(jnp.asarray(v))], np.zeros(12), jac=True
    )
    assert bound(reading, program, state) == pytest.approx(-best.fun, abs=0.02)
    np.testing.assert_allclose(state.local["loc"], best.x[:6], atol=0.1)
