"""The particle filter under way in the driver: room that grows, data that come in batches, a run
that is stopped and resumed.
"""

import shutil
from functools import partial, wraps
from itertools import count

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from numpyro.infer import NUTS

from inference import CheckpointError, Driver, ParticleFilter
from inference.kernels.particle_filter import kernel as particle_filter
from inference.run import loop as _loop
from inference.run import session as _session
from inference.run import store as _store
from inference.run.loop import Step
from tests.inference.filters import (
    LATER,
    OPTIONS,
    X,
    Y,
    check_same,
    driver,
    kernel,
    program,
    put,
    run,
    values,
    whole,
)
from tests.inference.replicates import promoted
from zoo.aclass import aclass, normal_inverse_chi2

pytestmark = pytest.mark.usefixtures("x64", "numpyro_promotion")

BATCHES = slice(0, 9), slice(9, 18), slice(18, 27)  # each is padded to 16 rows

# Evidence.


@pytest.mark.slow
def test_the_evidence_of_many_rows_does_not_drift():
    """A running sum in single precision would: see what the increments of the exact one give."""
    rows = np.random.default_rng(0).random((50_000, 20)) < 0.3

    def filtered():
        settings = {"num_particles": 1, "keep_assignments": False}
        this = Driver(
            ParticleFilter(aclass, **settings), num_samples=1, num_chains=1, progress_bar=False
        )
        tree = this.run(
            0, rows.astype(float), np.zeros(len(rows), int), num_classes=1, max_groups=1
        )
        return float(this.states[0].total_log_evidence()), tree["sample_stats"][
            "log_evidence"
        ].values[0]

    exact, running = filtered()
    with jax.enable_x64(False):
        found, _ = filtered()
    assert abs(found - exact) < 0.05
    assert abs(float(np.cumsum(np.diff(running).astype(np.float32))[-1]) + running[0] - exact) > 0.5


# Room.


def tight(patch, rejuvenate=0):
    """Room for two groups a class, and for two rows of the table a particle."""
    patch.setattr(particle_filter, "NUM_GROUPS", 2)
    patch.setattr(particle_filter, "NUM_ROWS", 2 - 2 * rejuvenate)


def check_growth(patch, later=False, **settings):
    """The same as with room from the start, but for rounding: sums over more room are taken in
    another order.
    """
    _, wanted = whole(later, **settings)
    tight(patch, settings.get("rejuvenate", 0))
    this, found = run(LATER if later else Y, **settings)
    check_same(found, wanted, 1e-12)
    return this.states[0].groups.slot.shape[-1]


@pytest.mark.slow
def test_room_that_grows_changes_nothing(monkeypatch):
    """Room that grows gives the same run.

    Two replicates need not be full at the same time.
    """
    assert check_growth(monkeypatch) >= 8  # it has doubled twice


@pytest.mark.slow
def test_what_growth_forgets_is_seen(monkeypatch):
    wider = particle_filter.wider
    slip = lambda groups: groups._replace(count=jnp.zeros_like(groups.count))
    monkeypatch.setattr(particle_filter, "wider", lambda *given: slip(wider(*given)))
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check_growth(monkeypatch)


def test_replicates_that_are_stacked_grow_together_whatever_each_lacks():
    """One has no room in the table, one none for a group."""
    this = kernel()
    given = this.read(program(X, Y))
    state = this.init(random.key(0), *given)
    lacking = lambda **fields: state._replace(
        groups=state.groups._replace(**{name: jnp.full((1, 2), n) for name, n in fields.items()})
    )
    shapes = lambda *states: [
        [leaf.shape for leaf in jax.tree.leaves(one)] for one in this.on_host(states, *given)
    ]
    assert not this.needs_host(state)
    of_rows, of_groups = lacking(used=50), lacking(widest=32)
    for one in (of_rows, of_groups):
        assert this.needs_host(one)
        assert shapes(one) != shapes(lacking(used=50, widest=32))
    assert shapes(state, of_rows, of_groups) == 3 * shapes(lacking(used=50, widest=32))


OTHERS = {
    "past rows redrawn": {"rejuvenate": 8, "num_chains": 8},
    "past rows redrawn, of latent class as well": {"rejuvenate": 2, "later": True},
    "replicates side by side": {"chain_method": "vectorized", "num_chains": 2},
    "multinomial": {"resampling": "multinomial", "later": True},
    "systematic": {"resampling": "systematic", "later": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_room_that_grows_changes_nothing_for_other_settings(name, monkeypatch):
    assert check_growth(monkeypatch, **({"num_chains": 1} | OTHERS[name])) >= 8


def room_for_few_rows(wants, this, state):
    """The table stays as small as it was at the start."""
    return wants(this, state) | {"table": jnp.zeros((), bool)}


def room_for_few_groups(wants, this, state):
    """A silent cap: what has no room joins another group."""
    return wants(this, state) | {"groups": jnp.zeros((), bool)}


@pytest.mark.slow
@pytest.mark.parametrize("slip", [room_for_few_rows, room_for_few_groups])
def test_too_little_room_is_seen(slip, monkeypatch):
    wants = ParticleFilter._wants
    monkeypatch.setattr(ParticleFilter, "_wants", lambda this, state: slip(wants, this, state))
    with pytest.raises((AssertionError, IndexError), match="Not equal to tolerance|out of bounds"):
        check_growth(monkeypatch, **OTHERS["past rows redrawn"])


# More data.


def in_batches(y, is_restored=False, **settings):
    this = driver(**settings)
    first, *more = ((X[batch], y[batch]) for batch in BATCHES)
    this.run(0, *first, **OPTIONS)
    for batch in more:
        if is_restored:
            before, this = this, driver(**settings)
            this.restore(before.tree(), before.steps, **before.whole_program.arguments)
        this.update(*batch, **OPTIONS)
    return this.tree()


def check_batches(patch, is_restored=False, **settings):
    _, wanted = whole(True, **settings)
    # the second batch then makes room for its assignments
    patch.setattr(particle_filter, "NUM_KEPT", 1)
    found = in_batches(LATER, is_restored, **settings)
    of_the_run = found.attrs.keys() - {"created_at", "steps_run", "sampling_time", "compile_time"}
    assert {name: str(found.attrs[name]) for name in of_the_run} == {
        name: str(wanted.attrs[name]) for name in of_the_run
    }
    check_same(found, wanted)


def test_three_batches_equal_one_run_bit_for_bit(monkeypatch):
    """The first row of unknown class comes in the last batch; two replicates."""
    check_batches(monkeypatch)


def test_a_driver_goes_on_where_another_has_ended_bit_for_bit(monkeypatch):
    check_batches(monkeypatch, is_restored=True)


@pytest.mark.slow
@pytest.mark.parametrize("forgotten", ["count", "row"])
def test_what_restoring_forgets_is_seen(forgotten, monkeypatch):
    """How many steps were taken, which the keys depend on; or how many rows."""
    restore = _session.Session.restore

    def forgetful(self, steps, tree):
        if forgotten == "count":
            steps = [step._replace(count=0 * step.count) for step in steps]
        else:
            steps = [step._replace(state=step.state._replace(seen=0)) for step in steps]
        restore(self, steps, tree)

    monkeypatch.setattr(_session.Session, "restore", forgetful)
    with pytest.raises(AssertionError):
        check_batches(monkeypatch, is_restored=True, resampling="systematic")


def test_a_chain_is_not_restored():
    nuts = Driver(NUTS(aclass), num_warmup=1, num_samples=1)
    with pytest.raises(TypeError, match=r"restore: a chain goes on from its checkpoint"):
        nuts.restore(whole()[1], [], X, Y, **OPTIONS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [{}, {"rejuvenate": 2}, pytest.param({"resampling": "systematic"}, marks=pytest.mark.slow)],
    ids=str,
)
def test_three_batches_equal_one_run_for_other_settings(settings, monkeypatch):
    check_batches(monkeypatch, num_chains=1, **settings)


@pytest.mark.parametrize("field", ["class_count", "log_evidence"])
def test_what_a_batch_forgets_is_seen(field, monkeypatch):
    updated = ParticleFilter.updated

    def forgetful(self, state, *given):
        new = updated(self, state, *given)
        return new._replace(**{field: jnp.zeros_like(getattr(new, field))})

    monkeypatch.setattr(ParticleFilter, "updated", forgetful)
    with pytest.raises(AssertionError):
        check_batches(monkeypatch)


def one_by_one(model):
    """A filter of `model` that got its last rows one at a time, and the calls of the model."""
    calls = []

    @wraps(aclass)  # the same arguments
    def counted(*args, **kwargs):
        calls.append(args)
        return model(*args, **kwargs)

    this = Driver(ParticleFilter(counted, num_particles=5), num_samples=1, progress_bar=False)
    this.run(0, X[:9], Y[:9], **OPTIONS)
    for row in range(9, 14):
        this.update(X[row : row + 1], Y[row : row + 1], **OPTIONS)
        if row == 9:  # the first of this shape
            calls.clear()
    return float(this.states[0].total_log_evidence()), len(calls)


def test_rows_that_come_one_by_one_share_a_trace_of_the_model():
    def looks_at_its_rows(x, *args, **kwargs):
        assert not np.isinf(np.asarray(x)).any()
        return aclass(x, *args, **kwargs)

    evidence, calls = one_by_one(aclass)
    looked, traced = one_by_one(looks_at_its_rows)  # by NumPy, so rows cannot be arguments
    assert (calls, traced > 0) == (0, True)
    assert evidence == looked


@pytest.fixture(scope="module")
def first_batch():
    with jax.enable_x64(True), promoted():
        this, tree = run(Y[BATCHES[0]], X[BATCHES[0]])
        return this, values(tree)


MORE = X[9:], Y[9:]
REFUSED = {
    "columns": (
        MORE[0][:, :2],
        MORE[1],
        {},
        r"update: more rows of the same model .* argument 'x' has \(2,\) a row, had \(3,\)",
    ),
    "component": (*MORE, {"component": normal_inverse_chi2}, "argument 'component' is new"),
    "num_classes": (*MORE, {"num_classes": 3}, "argument 'num_classes' is 3, was 2"),
    "alpha": (*MORE, {"alpha": 2.0}, "argument 'alpha' is 2.0, was 1.0"),
    "a two": (put(MORE[0], (5, 1), 2.0), MORE[1], {}, "site 'x': row 5, column 1 is 2.0"),
    "a class": (MORE[0], put(MORE[1], 4, 2), {}, "row 4: found class 2, wanted 0 to 1, or -1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_data_are_refused_and_leave_the_filter_as_it_was(name, first_batch):
    x, y, options, message = REFUSED[name]
    this, before = first_batch
    with pytest.raises(ValueError, match=message):
        this.update(x, y, **(OPTIONS | options))
    after = values(this.tree())
    assert after.keys() == before.keys()
    for variable, value in before.items():
        np.testing.assert_array_equal(after[variable], value, err_msg=variable)


# A run that is stopped.


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A checkpoint of a run whose time was up after two calls of the compiled loop; and the run
    that nothing stopped.
    """
    folder = tmp_path_factory.mktemp("stopped")
    with jax.enable_x64(True), promoted(), pytest.MonkeyPatch.context() as patch:
        tight(patch)
        _, wanted = run(num_chains=1)
        patch.setattr(_session, "perf_counter", partial(next, count()))
        # calls that are quick, so that the second one has ten times the rows of the first
        patch.setattr(_loop, "perf_counter", partial(next, count(0.0, 0.01)))
        this, part = run(num_chains=1, checkpoint=folder, max_time=1.5)
    assert part.attrs["ended"] == "max_time"
    assert 1 < part.attrs["steps"] < 27
    assert this.states[0].groups.slot.shape[-1] > 2  # it has grown
    return folder, part.attrs["steps"], wanted


@pytest.fixture
def resumed(stopped, monkeypatch, tmp_path):
    """A function that goes on with a copy of it."""
    tight(monkeypatch)
    copy = shutil.copytree(stopped[0], tmp_path / "run")
    return partial(run, checkpoint=copy, num_chains=1)


@pytest.fixture
def ended_early(monkeypatch):
    """A driver whose time was up after two calls of the compiled loop, and how many rows it has
    taken.
    """
    with monkeypatch.context() as patch:
        patch.setattr(_session, "perf_counter", partial(next, count()))
        this, part = run(num_chains=1, max_time=1.5)
    this.max_time = None
    return this, part.attrs["steps"]


def test_an_update_drops_no_rows_that_a_run_has_not_come_to(ended_early):
    this, taken = ended_early
    with pytest.raises(
        ValueError, match=f"update: the filter has taken {taken} of 27 rows; finish the run first"
    ):
        this.update(*MORE, **OPTIONS)
    check_same(this.extend(1_000_000), whole(num_chains=1)[1])


@pytest.mark.slow
def test_a_run_that_grew_and_was_stopped_is_resumed_bit_for_bit(stopped, resumed):
    _, steps, wanted = stopped
    this, found = resumed()
    assert (found.attrs["ended"], found.attrs["steps_run"]) == ("finished", 27 - steps)
    check_same(found, wanted)
    this.update(*MORE, **OPTIONS)  # in memory: the folder keeps the run of its own rows
    assert this.tree()["sample_stats"].sizes["step"] == 27 + len(MORE[1])
    assert resumed()[1].attrs["steps_run"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("field", ["log_weight", "count"])
def test_what_a_checkpoint_forgets_is_seen(field, stopped, resumed, monkeypatch):
    """The weights of the particles, or how many steps were taken."""
    load = _store.Store.load

    def forgetful(store, states):
        commit = load(store, states)
        return commit._replace(
            states=jax.tree.map(without, commit.states, is_leaf=lambda node: isinstance(node, Step))
        )

    def without(step):
        groups = step.state.groups._replace(
            log_weight=jnp.full_like(step.state.groups.log_weight, -jnp.log(8.0))
        )
        return (
            step._replace(count=0 * step.count)
            if field == "count"
            else step._replace(state=step.state._replace(groups=groups))
        )

    monkeypatch.setattr(_store.Store, "load", forgetful)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check_same(resumed()[1], stopped[2])


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"x": 1 - X}, "data x"),
        ({"num_particles": 9}, "ParticleFilter.num_particles: 8 there, 9 here"),
        (
            {"resampling": "systematic"},
            "ParticleFilter.resampling: 'optimal' there, 'systematic' here",
        ),
    ],
    ids=["data", "particles", "resampling"],
)
def test_a_checkpoint_of_another_run_is_refused_with_what_differs(other, message, resumed):
    with pytest.raises(CheckpointError, match=f"holds another run .*{message}"):
        resumed(**other)
