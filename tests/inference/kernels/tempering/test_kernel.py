"""Data tempering against exact evidences and posteriors; where it walks against SciPy; what has
no rows is refused.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random

from diagnostics import report
from inference import DataTempering, Driver, Program
from inference.kernels.tempering import kernel as tempering
from inference.maths import resampling
from inference.maths.resampling import (
    after_step,
    effective_size,
    new_families,
    next_exponent,
    systematic_parents,
    variance_of,
)
from tests.inference.nests import line, line_evidence
from tests.inference.stages import (
    DEVIATION,
    MEAN,
    REFUSED,
    X,
    Y,
    begun,
    check_refused,
    check_same,
    forget,
)

pytestmark = pytest.mark.usefixtures("x64", "numpyro_promotion")

SMALL = {"num_stages": 3, "num_particles": 60}


def driver_of(checkpoint=None, num_warmup=None, num_chains=1, **settings):
    kernel = DataTempering(line, **(SMALL | settings))
    return Driver(
        kernel,
        num_samples=400,
        num_warmup=num_warmup,
        num_chains=num_chains,
        checkpoint=checkpoint,
        progress_bar=False,
    )


# Exponents, and the error of the evidence.


@pytest.mark.parametrize("bug", [False, True], ids=["right", "planted"])
def test_a_step_leaves_the_share_effective_that_was_asked_for(bug, monkeypatch):
    """The planted bug takes the largest weight for all of them."""
    if bug:
        monkeypatch.setattr(
            resampling, "effective_size", lambda log_weight: jnp.exp(-jnp.max(log_weight))
        )
    log_likelihood = 100 * random.normal(random.key(0), (200,))
    exponent, reached = jnp.asarray(0.2), []
    for share in (0.5, 0.9):
        step = next_exponent(log_likelihood, exponent, share) - exponent
        log_weight = step * log_likelihood
        reached.append(float(effective_size(log_weight - jax.nn.logsumexp(log_weight)) / 200))
    assert np.allclose(reached, [0.5, 0.9], atol=1e-6) != bug


def test_a_step_is_no_longer_than_what_is_left_and_never_nothing():
    even, impossible = jnp.zeros(50), jnp.where(jnp.arange(50) < 40, -jnp.inf, 0.0)
    assert next_exponent(even, jnp.asarray(0.3), 0.5) == 1
    for exponent in (0.0, 0.3):
        assert exponent < next_exponent(impossible, jnp.asarray(exponent), 0.5) < exponent + 1e-10


NUM_RUNS, NUM_PARTICLES = 400, 100


def simulated(key, remembers, num_steps):
    """log Z and its claimed variance, of particles whose weights are log-normal; those that
    remember keep theirs.
    """
    power = 0.2 if remembers else 0.6

    def step(carry, key):
        level, families, log_z = carry
        new_key, parent_key = random.split(key)
        level = level if remembers else random.normal(new_key, level.shape)
        log_weight = power * level
        weight = jax.nn.softmax(log_weight)
        parent = systematic_parents(parent_key, weight)
        log_z = log_z + jax.nn.logsumexp(log_weight) - np.log(NUM_PARTICLES)
        return (level[parent], after_step(families, weight, parent), log_z), None

    start_key, key = random.split(key)
    start = (
        random.normal(start_key, (NUM_PARTICLES,)),
        new_families(NUM_PARTICLES, jnp.zeros(())),
        jnp.zeros(()),
    )
    (_, families, log_z), _ = jax.lax.scan(step, start, random.split(key, num_steps))
    return log_z, variance_of(families)


@pytest.mark.slow
@pytest.mark.parametrize("bug", [False, True], ids=["right", "planted"])
@pytest.mark.parametrize("remembers", [False, True], ids=["forgetful", "remembering"])
def test_the_error_is_told_from_families(remembers, bug, monkeypatch):
    """Particles that forget everything, and that forget nothing.

    A planted bug loses the families before; the other has none.
    """
    if bug and remembers:
        monkeypatch.setattr(resampling, "GENERATIONS", 1)
    if bug and not remembers:
        monkeypatch.setattr(resampling, "variance_of", lambda families: jnp.zeros(()))
    num_steps = 5 if remembers else 20
    keys = random.split(random.key(0), NUM_RUNS)
    log_z, variance = jax.jit(jax.vmap(lambda key: simulated(key, remembers, num_steps)))(keys)
    ratio = np.sqrt(np.mean(variance) / np.var(log_z))
    assert (0.85 < ratio < 1.15) != bug


# What is read.


def several(x, seen, count=None, scale=1.0):
    """Sites of other names, in two plates of which rows are the inner or the outer one, some of
    them masked.
    """
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    spread = numpyro.sample("spread", dist.LogNormal(0.0, scale))
    with numpyro.plate("kind", 3, dim=-1), numpyro.plate("case", len(x), dim=-2):
        numpyro.sample(
            "seen", dist.Normal(x[:, None] * slope, spread).mask(x[:, None] > 0), obs=seen
        )
    with numpyro.plate("case again", 2, dim=-1), numpyro.plate("case", len(x), dim=-2):
        numpyro.sample("count", dist.Poisson(jnp.exp(slope[:2] * x[:, None])), obs=count)


def apart(values, x, seen, count):
    """The terms of rows of `several`, by SciPy's formulas."""
    from scipy import stats

    normal = stats.norm(x[:, None] * values["slope"], values["spread"]).logpdf(seen)
    return np.where(x[:, None] > 0, normal, 0).sum(1) + stats.poisson(
        np.exp(values["slope"][:2] * x[:, None])
    ).logpmf(count).sum(1)


@pytest.mark.parametrize("bug", [False, True], ids=["right", "planted"])
def test_walks_are_in_the_posterior_of_rows_so_far(bug, monkeypatch):
    """Earlier rows as they are, those of the stage to a power, room not at all.

    The planted bug forgets earlier rows.
    """
    rng = np.random.default_rng(0)
    x, seen, count = rng.normal(size=13), rng.normal(size=(13, 3)), rng.poisson(1.0, (13, 2))
    if bug:
        monkeypatch.setattr(DataTempering, "_powers", forgets_rows)
    kernel = DataTempering(several, num_stages=2, num_particles=20)
    first, reading, data = begun(kernel, x, seen, count=count)
    (state,) = kernel.on_host([over(first)], reading, data)
    assert [int(state.num_before), int(state.num_rows), len(state.table["x"])] == [7, 13, 16]
    table = [np.asarray(state.table[name])[:13] for name in ("x", "seen", "count")]
    assert sorted(table[0]) == sorted(x)
    target, log_own = jax.jit(jax.vmap(kernel._densities(state, reading, jnp.asarray(0.3))))(
        state.z
    )
    values = jax.tree.map(np.asarray, jax.jit(jax.vmap(reading.split.values))(state.z))
    by_row = np.array(
        [apart({name: value[i] for name, value in values.items()}, *table) for i in range(20)]
    )
    np.testing.assert_allclose(log_own, by_row[:, 7:].sum(1))
    np.testing.assert_allclose(state.log_own, log_own)
    np.testing.assert_allclose(state.log_before, first.log_before + by_row[:, :7].sum(1))
    wanted = first.log_before + by_row[:, :7].sum(1) + 0.3 * by_row[:, 7:].sum(1)
    assert np.allclose(target, wanted) != bug


# Whole runs.


def forgets_rows(self, state, exponent):
    """A planted bug: walks look at the rows of their stage alone."""
    place = jnp.arange(len(next(iter(state.table.values()))))
    return jnp.where((place >= state.num_before) & (place < state.num_rows), exponent, 0.0)


def is_behind(self, state, exponent, powers=DataTempering._powers):
    """A planted bug: walks go on in the distribution before the step."""
    return powers(self, state, state.exponent)


def weighs_all(self, state, exponent):
    """A planted bug: weights of the whole power, not of what it has grown by."""
    return exponent * state.log_own


def log_evidence_is_right(tree):
    """Within the error that the spread of replicates shows, which is small."""
    error = tree.attrs["log_evidence_se"]
    return error < 1 and abs(tree.attrs["log_evidence"] - line_evidence(X, Y)) < 3.5 * error


def moments_are_right(tree):
    """All replicates together."""
    drawn = tree["posterior"]["weight"].values.reshape(-1, 2)
    return (np.abs(drawn.mean(0) - MEAN) < 0.2 * DEVIATION).all() and np.allclose(
        drawn.std(0), DEVIATION, rtol=0.12
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "bug",
    [{}, {"_powers": forgets_rows}, {"_powers": is_behind}, {"_log_weight": weighs_all}],
    ids=["right", "forgets rows", "is behind", "weighs all"],
)
def test_stages_add_up_to_all_rows_at_once_in_whatever_order(bug, monkeypatch):
    """Evidence and posterior are the exact ones."""
    for name, function in bug.items():
        monkeypatch.setattr(DataTempering, name, function)
    tree = driver_of(num_chains=8, num_particles=100).run(1, X, Y)
    assert set(tree.attrs["num_stages_of_replicates"]) == {3}
    assert (log_evidence_is_right(tree) and moments_are_right(tree)) == (not bug)
    if bug:
        return
    page = report(tree)
    assert (page.kind, page.trusted) == ("smc", True), page
    assert page["walks"].ok
    assert page["evidence error"].ok
    assert np.allclose(np.exp(tree["particles"]["log_weight"]).sum("particle"), 1)
    stats = tree["sample_stats"]
    whole = stats["exponent"].values == 1
    np.testing.assert_array_equal(whole[:, -1], True)
    assert (
        (np.diff(stats["exponent"].values) > 0)
        | (np.diff(stats["stage"].values) > 0)
        | whole[:, 1:]
    ).all()
    assert (np.abs(stats["ess"].values[~whole] - 50) < 1e-3).all()


@pytest.mark.slow
@pytest.mark.parametrize("bug", [False, True], ids=["right", "planted"])
def test_claimed_errors_are_those_that_are_made(bug, monkeypatch):
    """In twenty runs, of many steps. The planted bug claims the error of the last families."""
    if bug:
        monkeypatch.setattr(
            tempering, "variance_of", lambda families: 1e-6 + jnp.sum(families.added**2)
        )
    attrs = driver_of(num_chains=20, num_particles=80, threshold=0.8).run(3, X, Y).attrs
    z = (attrs["log_evidence_of_replicates"] - line_evidence(X, Y)) / attrs[
        "log_evidence_se_of_replicates"
    ]
    assert (0.6 < np.sqrt(np.mean(z**2)) < 1.45) != bug


@pytest.mark.slow
def test_an_update_is_one_more_stage_that_sees_the_rows_before():
    driver = driver_of(num_stages=2, num_particles=300)
    driver.run(1, X[:45], Y[:45])
    driver.update(X[45:], Y[45:])
    tree = driver.tree()
    assert (tree.attrs["ended"], tree.attrs["num_stages"]) == ("finished", 3)
    assert tree["observed_data"].sizes["row"] == 90
    assert log_evidence_is_right(tree)
    drawn = tree["posterior"]["weight"].values[0]
    assert (np.abs(drawn.mean(0) - MEAN) < 0.3 * DEVIATION).all()
    np.testing.assert_allclose(drawn.std(0), DEVIATION, rtol=0.2)
    (state,) = driver.states
    np.testing.assert_array_equal(np.sort(np.asarray(state.table["y"])[:45]), np.sort(Y[:45]))


@pytest.fixture(scope="module")
def whole():
    """A run of three stages, and at which step each begins."""
    with (
        jax.enable_x64(True),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        tree = driver_of().run(0, X[:50], Y[:50])
    stage = tree["sample_stats"]["stage"].values[0]
    return tree, [int((stage < each).sum()) for each in range(3)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "after"), [(0, 2), (1, 0), (2, 0)], ids=["first", "between", "last"]
)
def test_a_run_that_ended_on_its_way_is_resumed_bit_for_bit(whole, stage, after, tmp_path):
    """By another kernel object, as in another process."""
    wanted, begins = whole
    steps = begins[stage] + after
    driver_of(checkpoint=tmp_path / "run", num_warmup=steps).run(0, X[:50], Y[:50])
    found = driver_of(checkpoint=tmp_path / "run").run(0, X[:50], Y[:50])
    assert found.attrs["steps_run"] == wanted.attrs["steps"] - steps
    check_same(found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("field", ["later", "log_own", "families"])
def test_what_a_checkpoint_forgets_of_a_stage_is_seen(whole, field, tmp_path, monkeypatch):
    wanted, begins = whole
    driver_of(checkpoint=tmp_path / "run", num_warmup=begins[1] - 1).run(0, X[:50], Y[:50])
    forget(monkeypatch, field, lambda value: jax.tree.map(jnp.zeros_like, value))
    with pytest.raises(AssertionError):
        check_same(driver_of(checkpoint=tmp_path / "run").run(0, X[:50], Y[:50]), wanted)


@pytest.mark.slow
def test_where_a_run_stands_is_not_in_the_kernel(whole):
    """It may have seen other data since."""
    wanted, begins = whole
    driver = driver_of(num_warmup=begins[1] - 1)
    driver.run(0, X[:50], Y[:50])
    with pytest.raises(ValueError, match=r"update: the run stands in stage 1 of 3; .* `extend"):
        driver.update(X[50:], Y[50:])
    Driver(driver.kernel, num_warmup=2, num_samples=1, progress_bar=False).run(1, X[60:], Y[60:])
    check_same(driver.extend(1000), wanted)


def over(state):
    """The same state where the stage has finished."""
    return state._replace(exponent=jnp.ones(()))


def test_replicates_whose_stages_end_at_different_steps_are_refused():
    kernel = DataTempering(line, num_stages=3, num_particles=20)
    state, reading, data = begun(kernel, X, Y)
    with pytest.raises(ValueError, match="stages of replicates end at different steps"):
        kernel.on_host([over(state), state], reading, data)
    ended = over(state)._replace(num_left=jnp.zeros((), jnp.int32))
    with pytest.raises(ValueError, match="stages of replicates end at different steps"):
        kernel.on_host([over(state), ended], reading, data)


# Refusals.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": X[:5, :1], "y": Y[:5]}, "argument 'x' is not the same"),
        ({"x": np.full((5, 2), np.nan), "y": Y[:5]}, "site 'y'"),
    ],
    ids=["columns", "NaN"],
)
def test_an_update_of_another_kind_is_refused(arguments, message):
    reading, _ = DataTempering(line, num_stages=1, num_particles=20).read(Program(line, X, Y))
    with pytest.raises(ValueError, match=message):
        reading.more(Program(line, **arguments))


def bounded(x, y):
    """No data are below the bound, whatever it is."""
    bound = numpyro.sample("bound", dist.Uniform(5.0, 6.0))
    with numpyro.plate("row", len(x)):
        log_density = jnp.where(y > bound, 0.0, -jnp.inf)
        numpyro.sample("y", dist.Delta(y, log_density=log_density, validate_args=False), obs=y)


@pytest.mark.parametrize(("model", "arguments", "message"), REFUSED)
def test_models_whose_rows_cannot_be_dealt_out_are_refused(model, arguments, message):
    check_refused(DataTempering(model, num_stages=1), arguments, message)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_stages": 91}, "num_stages: found 91 for 90 rows"),
        ({"num_stages": 0}, "num_stages: found 0"),
        ({"num_particles": 19}, "num_particles: found 19, wanted an integer, at least 20"),
        ({"threshold": 1.0}, "threshold: found 1.0"),
        ({"num_sweeps": 0.0}, "num_sweeps: found 0.0"),
        ({"num_sweeps": np.inf}, "num_sweeps: found inf"),
        ({"memory": 0.0}, "memory: found 0.0"),
        ({"threshold": "half"}, "threshold: found 'half', wanted a number between 0 and 1"),
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Driver(DataTempering(line, **settings), progress_bar=False).run(0, X, Y)


def test_data_that_are_impossible_are_refused(monkeypatch):
    """Also where a start with a density can be found."""
    monkeypatch.setattr(Program, "check", lambda self, start=None: None)
    kernel = DataTempering(bounded, num_stages=1, num_particles=20)
    with pytest.raises(
        ValueError, match="site 'y': its likelihood is 0 at all of 20 draws from the prior"
    ):
        begun(kernel, X, Y)
