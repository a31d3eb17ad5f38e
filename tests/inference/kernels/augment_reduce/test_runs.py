"""Runs of augment and reduce in the driver: modes against SciPy's, spreads against the prior,
what a step touches, resuming.
"""

import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import sparse
from scipy.optimize import minimize

from inference import AugmentReduce, Driver, Program
from inference.kernels.augment_reduce import weights as _weights
from inference.kernels.augment_reduce.weights import Adagrad, Adaptive, remembered, update_rows
from inference.program.sites import Site
from inference.reading.row_table import note_requests
from tests.inference.reducing import weights_of
from zoo.augment_reduce import SparseRows, augment_reduce, simulate

K = 30  # most are touched in a few steps of a hundred
ROWS = simulate(jax.random.key(1), num_rows=60, num_features=2, num_classes=K, prior_scale=0.5)
TINY = {**ROWS, "batch_size": 3, "num_negatives": 2}
FAST = Adaptive(rate=0.1)


def run(num_steps, seed=0, told=TINY, num_samples=1, **options):
    driver = Driver(
        AugmentReduce(augment_reduce, **options),
        num_warmup=num_steps,
        num_samples=num_samples,
        progress_bar=False,
    )
    return driver, driver.run(seed, **told)


def weights(driver):
    return weights_of(driver.reading, driver.states[0])


@cache
def exact_mode():
    """The largest log joint with eps integrated out, and a function for it."""
    program = Program(augment_reduce, **{**ROWS, "augmented": False})
    unpack = lambda v: {"weights": v[: 2 * K].reshape(K, 2), "biases": v[2 * K :]}
    value = jax.jit(jax.value_and_grad(lambda v: -program.log_joint(unpack(v))))
    found = minimize(
        lambda v: [np.asarray(part, float) for part in value(jnp.asarray(v, jnp.float32))],
        np.zeros(3 * K),
        jac=True,
    )
    return -found.fun, jax.jit(program.log_joint)


def test_a_bound_that_is_no_number_ends_a_run():
    huge = {**TINY, "x": 1e4 * ROWS["x"]}
    with pytest.raises(
        ValueError, match=r"after \d+ steps the bound is no number: .* smaller steps"
    ):
        run(200, told=huge, optimizer=Adagrad(1.0))


@pytest.mark.slow
def test_all_rows_and_classes_lead_to_the_mode():
    best, log_joint = exact_mode()
    driver, _ = run(3000, told=ROWS, optimizer=optax.sgd(0.03))
    assert float(log_joint(weights(driver))) == pytest.approx(best, abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("own_negatives", [False, True], ids=["shared by the batch", "of each row"])
def test_some_rows_and_classes_lead_near_the_mode(own_negatives):
    best, log_joint = exact_mode()
    driver, _ = run(6000, own_negatives=own_negatives, optimizer=FAST)
    # from zeros it rises by 19
    assert float(log_joint(weights(driver))) == pytest.approx(best, abs=1.5)


@pytest.mark.slow
def test_a_prior_that_is_felt_only_when_touched_is_seen(monkeypatch):
    log_prior = _weights.Minibatch.log_prior
    just_now = lambda row, count: row._replace(touched=jnp.full_like(row.touched, count))
    touched_now = lambda view: view._replace(
        rows=tuple(just_now(row, view.state.count) for row in view.rows)
    )
    monkeypatch.setattr(
        _weights.Minibatch,
        "log_prior",
        lambda view, parameters: log_prior(touched_now(view), parameters),
    )
    with pytest.raises(AssertionError):
        test_some_rows_and_classes_lead_near_the_mode(False)


def spread_where_nothing_is_learned():
    """Features of zero: weights are as before."""
    told = TINY | {
        "x": np.zeros((60, 2), np.float32),
        "prior_scale": 0.7,
        "batch_size": 12,
        "num_negatives": 5,
    }
    driver, tree = run(10_000, told=told, posterior=True, num_samples=400, optimizer=FAST)
    return driver.kernel.values(driver.states[0], driver.reading)["weights"], tree


@pytest.mark.slow
def test_posterior_of_what_the_data_do_not_tell_is_the_prior():
    found, tree = spread_where_nothing_is_learned()
    assert np.exp(found["log_scale"]).mean() == pytest.approx(0.7, rel=0.05)
    np.testing.assert_allclose(np.exp(found["log_scale"]), 0.7, atol=0.25)
    np.testing.assert_allclose(found["loc"], 0.0, atol=0.2)
    drawn = tree["posterior"]["weights"]
    assert drawn.dims == ("chain", "draw", "class", "feature")
    np.testing.assert_allclose(drawn.std(("chain", "draw")), np.exp(found["log_scale"]), rtol=0.15)
    assert tree["posterior"]["biases"].std("draw").min() < 0.5  # of which the data tell
    assert set(tree["variational_parameters"].data_vars) == {
        "eps_rate",
        "weights_loc",
        "weights_scale",
        "biases_loc",
        "biases_scale",
    }


@pytest.mark.slow
def test_a_posterior_without_its_entropy_is_seen(monkeypatch):
    def no_entropy(view, parameters):
        by_row, _ = view.model.priors(view.program, view.index, view.values(parameters))
        sites = view.sites(parameters)
        return sum(
            jax.vmap(by_row[name][0].log_prob)(sites[name]).sum()
            for table in view.layouts
            for name in table.weighed
        )

    monkeypatch.setattr(_weights.Minibatch, "log_prior", no_entropy)
    with pytest.raises(AssertionError):
        test_posterior_of_what_the_data_do_not_tell_is_the_prior()


def test_tree_of_a_point():
    driver, tree = run(600, num_samples=2)
    assert tree["sample_stats"]["elbo"].shape == (1, 600)
    assert (
        tree["sample_stats"]["elbo"][0, -200:].mean() > tree["sample_stats"]["elbo"][0, :200].mean()
    )
    assert tree["posterior"]["weights"].dims == ("chain", "draw", "class", "feature")
    np.testing.assert_array_equal(
        tree["posterior"]["weights"][0, 0], tree["posterior"]["weights"][0, 1]
    )
    np.testing.assert_array_equal(tree["posterior"]["weights"][0, 0], weights(driver)["weights"])
    assert tree["variational_parameters"]["eps_rate"].dims == ("chain", "row")
    assert tree.attrs["ended"] == "budget"


@pytest.mark.slow
def test_a_run_that_goes_on_is_the_longer_run(tmp_path):
    driver, _ = run(20)
    driver.extend(20)
    whole, _ = run(40)
    again = Driver(
        AugmentReduce(augment_reduce),
        num_warmup=20,
        num_samples=1,
        progress_bar=False,
        checkpoint=tmp_path,
    )
    again.run(0, **TINY)
    again.num_warmup = 40
    tree = again.run(0, **TINY)
    assert tree.attrs["steps_run"] == 20
    for other in (driver, again):
        jax.tree.map(np.testing.assert_array_equal, other.states[0], whole.states[0])


def test_other_rows_go_on_with_the_weights():
    driver, _ = run(20)
    before, reading = weights(driver), driver.reading
    driver.num_warmup = 40
    driver.update(**{**TINY, "x": ROWS["x"][::-1], "y": ROWS["y"][::-1]})
    assert driver.reading is reading  # so that nothing is compiled again
    assert int(driver.states[0].count) == 40
    assert 0 < np.abs(weights(driver)["weights"] - before["weights"]).max() < 1
    with pytest.raises(ValueError, match="must have the classes and features of those before"):
        driver.update(**{**TINY, "num_classes": K + 1})


def test_an_update_that_was_refused_changes_nothing():
    driver, _ = run(5)
    for _ in range(2):
        with pytest.raises(ValueError, match="must have the classes and features of those before"):
            driver.update(**{**TINY, "num_classes": K + 1})
    driver.num_warmup = 6
    driver.update(**TINY)
    assert int(driver.states[0].count) == 6


def test_an_update_that_lays_rows_out_anew_is_refused():
    driver, _ = run(5)
    packed = SparseRows.of(sparse.csr_matrix(np.asarray(ROWS["x"])))
    for changed in ({"x": packed}, {"prior_scale": None}):
        with pytest.raises(
            ValueError, match="update: the model asks for rows of its weights along other axes"
        ):
            driver.update(**{**TINY, **changed})


def after_an_update(**changed):
    """Weights after as many rows as before, under other settings."""
    driver, _ = run(5)
    driver.num_warmup = 10
    driver.update(**{**TINY, **changed})
    return weights(driver)["weights"]


@pytest.mark.slow
def test_an_update_goes_by_its_own_settings():
    assert np.abs(after_an_update(prior_scale=0.01) - after_an_update()).max() > 1e-4


def test_an_update_by_the_settings_before_is_seen(monkeypatch):
    monkeypatch.setattr("inference.kernels.augment_reduce.kernel._settings", lambda program: {})
    with pytest.raises(AssertionError):
        test_an_update_goes_by_its_own_settings()


# What a step touches.


@pytest.mark.slow  # which is compiled as a run is
@pytest.mark.parametrize(
    "options",
    [{}, {"own_negatives": True}, {"posterior": True}],
    ids=["shared", "of each row", "posterior"],
)
def test_a_step_moves_no_array_of_all_classes_but_by_rows(options):
    told = simulate(jax.random.key(0), num_rows=30, num_features=7, num_classes=1013) | {
        "batch_size": 8,
        "num_negatives": 5,
    }
    driver, _ = run(3, told=told, **options)
    assert driver._last is not None
    loops = list(driver._last.session.compiled.values())
    found = re.findall(r"= \w+\[(?:1,)?1013(?:,\d+)?\]\S* (\w[\w-]*)\(", loops[0].advance.as_text())
    assert found.count("scatter") >= 1
    # a fusion holds the scatter
    assert set(found) <= {"parameter", "get-tuple-element", "bitcast", "fusion", "scatter"}


def test_untouched_rows_stay_as_they_are():
    told = simulate(jax.random.key(0), num_rows=4, num_classes=500) | {
        "batch_size": 2,
        "num_negatives": 3,
    }
    kernel = AugmentReduce(augment_reduce)
    reading, data = kernel.read(Program(augment_reduce, **told))
    state = kernel.init(jax.random.key(0), reading, data)
    new, _ = jax.jit(lambda state, data: kernel.step(jax.random.key(1), state, reading, data))(
        state, data
    )
    moved = np.asarray(
        weights_of(reading, new)["weights"] != weights_of(reading, state)["weights"]
    ).any(1)
    assert 0 < moved.sum() <= 2 + 3 + 1
    [table], [packed] = reading.layouts, new.tables
    np.testing.assert_array_equal(moved, np.asarray(table.unpack(packed).touched) == 1)


# Optimisers.


@pytest.mark.parametrize(
    "optimizer",
    [Adaptive(), Adagrad(0.1), optax.adagrad(0.1), optax.sgd(0.1)],
    ids=["adaptive", "adagrad", "adagrad of optax", "sgd"],
)
def test_steps_of_rows_are_those_of_all_with_slopes_of_zero(optimizer):
    site = Site(
        "w",
        "latent",
        "Normal",
        (5, 2),
        jnp.float32,
        1,
        ("class",),
        None,
        False,
        ("class", "feature"),
    )
    rng = np.random.default_rng(0)
    lazy = dense = jnp.asarray(rng.normal(size=(5, 2)), jnp.float32)
    (known, common), dense_state = remembered(optimizer, lazy), optimizer.init(lazy)

    @jax.jit
    def step(ids, parts, lazy, known, common, dense, dense_state):
        asked = note_requests(lambda rows: rows["w"][ids], {"w": site})["w"]
        rows, some, common = update_rows(
            optimizer,
            asked.merged(parts),
            [asked.gather(each) for each in known],
            common,
            asked.gather(lazy),
        )
        lazy, known = (
            asked.scatter(lazy, rows),
            [asked.scatter(whole, part) for whole, part in zip(known, some, strict=True)],
        )
        moves, new = optimizer.update(jnp.zeros((5, 2)).at[ids].add(parts), dense_state, dense)
        touched = jnp.zeros(5, bool).at[ids].set(True)[:, None]
        frozen = lambda was, now: jnp.where(touched, now, was) if jnp.ndim(was) == 2 else now
        return lazy, known, common, dense + moves, jax.tree.map(frozen, dense_state, new)

    for _ in range(6):
        ids, parts = rng.integers(0, 5, 3), np.float32(rng.normal(size=(3, 2)))
        lazy, known, common, dense, dense_state = step(
            ids, parts, lazy, known, common, dense, dense_state
        )
        np.testing.assert_allclose(lazy, dense, rtol=1e-5)


@pytest.mark.usefixtures("numpyro_promotion")
def test_an_optimizer_with_momentum_is_refused():
    with pytest.raises(ValueError, match="optimizer: it moves a row whose slope is 0"):
        AugmentReduce(augment_reduce, optimizer=optax.adam(0.1))


@pytest.mark.usefixtures("numpyro_promotion")
def test_an_optimizer_that_mixes_rows_is_refused():
    with pytest.raises(
        ValueError,
        match=r"optimizer: for values of shape .* which cannot be shared out among their rows",
    ):
        run(1, optimizer=optax.sm3(0.1, momentum=0.0))


@pytest.mark.parametrize("rows", [1, 2])
def test_what_an_optimizer_keeps_beside_rows_may_look_like_rows(rows):
    pair = optax.GradientTransformation(
        lambda values: (jnp.zeros(2), jnp.zeros(1), jax.tree.map(jnp.zeros_like, values)),
        optax.sgd(1.0).update,
    )
    own, common = remembered(pair, jnp.ones(rows))
    assert [leaf.shape for leaf in own] == [(rows,)]
    assert [leaf.shape for leaf in common] == [(2,), (1,)]


def test_adagrad_is_that_of_optax():
    ours, slopes, value = Adagrad(0.3), jnp.array([2.0, -0.1]), jnp.zeros(2)
    theirs = optax.adagrad(0.3, initial_accumulator_value=0.0, eps=1e-12)
    state, known = ours.init(slopes), theirs.init(slopes)
    for _ in range(3):
        found, state = ours.update(slopes, state)
        wanted, known = theirs.update(slopes, known, value)
        np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_adaptive_steps_are_those_of_the_paper():
    slopes, w, square, state = [3.0, -1.0, 0.5], 0.0, None, Adaptive().init(jnp.zeros(1))
    for t, slope in enumerate(slopes, 1):
        square = slope**2 if square is None else 0.1 * slope**2 + 0.9 * square
        w -= 0.02 * t**-0.5 * slope / (1 + square**0.5)
    found = jnp.zeros(1)
    for slope in slopes:
        moves, state = Adaptive().update(jnp.full(1, slope), state)
        found = found + moves
    assert float(found[0]) == pytest.approx(w, rel=1e-5)
