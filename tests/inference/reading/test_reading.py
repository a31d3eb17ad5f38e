"""A kernel holds its settings and nothing else, so that drivers and threads share it: each run
is that of a kernel of its own.
"""

import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from itertools import pairwise
from threading import Barrier, Thread, get_ident
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import numpyro.primitives
import pytest
import xarray as xr
from numpyro import plate
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.mcmc import MCMCKernel

from inference import (
    Algorithm,
    AugmentReduce,
    CoordinateAscent,
    DataTempering,
    Driver,
    ImportanceFinish,
    MergedStages,
    NestedSampler,
    ParticleFilter,
    Program,
    Staged,
)
from inference.distributions import CRP, Missing
from inference.kernels.particle_filter import kernel as particle_filter
from inference.run import driver
from inference.run import session as _session
from inference.run.loop import Chain, Loop
from inference.run.svi import StochasticVI
from tests.inference.importance import ImportanceSampling
from tests.inference.mixtures import beta_bernoulli
from tests.inference.replicates import promoted
from zoo.augment_reduce import augment_reduce
from zoo.iqgme import iqgme

pytestmark = pytest.mark.usefixtures("x64", "numpyro_promotion")

# Models, each of which asks for a number that is defined outside of it.


def amount():
    return 1.0


def bounded(x, top=1.0):
    level = numpyro.sample("level", dist.Uniform(0.0, top))
    with plate("row", len(x)):
        numpyro.sample("x", dist.Normal(level, amount()), obs=x)


def grouped(bits, top=1.0):
    z = numpyro.sample("z", CRP(top, len(bits)))
    features = plate("feature", bits.shape[1], dim=-1)
    with plate("group", len(bits), dim=-2), features:
        p = numpyro.sample("p", dist.Beta(amount(), 0.5))
    with plate("row", len(bits), dim=-2), features:
        numpyro.sample("bits", Missing(dist.Bernoulli(p[z])), obs=bits)


def experts(x):
    return iqgme(
        x, num_experts=3, alpha=dist.Gamma(3.0, 2.0 * amount()), expert=None, gate=beta_bernoulli
    )


def reduced(x, y):
    return augment_reduce(x, y, num_classes=3, prior_scale=amount(), batch_size=5, num_negatives=1)


# Kernels.


class Bound(NamedTuple):
    """What was read: draws of a run with another bound are out of proportion."""

    program: Program
    top: float

    def more(self, program):
        if program.arguments["top"] != self.top:
            raise ValueError(f"update: top was {self.top}.")
        return Bound(program, self.top), {}

    def by_row(self, programs):
        return ("x",)


class Streaming(ImportanceSampling):
    """Shares of the bound. Draws that were weighed by earlier rows keep their weights."""

    def read(self, program):
        super().read(program)
        return Bound(program, program.arguments["top"]), {}

    def init(self, rng_key, reading, data):
        return super().init(rng_key, reading.program, data)

    def step(self, rng_key, state, reading, data):
        return super().step(rng_key, state, reading.program, data)

    def draw(self, rng_key, state, reading, data, num_draws):
        found = super().draw(rng_key, state, reading.program, data, num_draws)
        return {name: value / reading.top for name, value in found.items()}

    def updated(self, state, reading, data, before):
        return state._replace(batch=state.batch - 1)


class Keeper(Streaming):
    """The planted bug: what it has read last serves all."""

    def read(self, program):
        self.last, data = super().read(program)
        return self.last, data

    def draw(self, rng_key, state, reading, data, num_draws):
        return super().draw(rng_key, state, self.last, data, num_draws)


def staged():
    return Staged(bounded, num_stages=1, num_live=20, num_walkers=0, num_sweeps=1.0)


def merged():
    parts = [Driver(staged(), num_samples=1, progress_bar=False) for _ in range(2)]
    for seed, part in enumerate(parts):
        part.run(seed, X[seed::2], top=3.0)
    return MergedStages(parts)


def nested():
    return NestedSampler(bounded, num_live=20, num_sweeps=1.0)


def variational():
    return SVI(bounded, AutoNormal(bounded), numpyro.optim.Adam(0.05), Trace_ELBO())


class Case(NamedTuple):
    """Two data sets, of other lengths where the kernel allows it, and more rows of each where it
    goes on with them.
    """

    make: Callable
    data: tuple[tuple, tuple]
    told: tuple[dict, dict] = ({}, {})
    more: tuple[tuple, tuple] | None = None


RNG = np.random.default_rng(0)
X = np.linspace(0.0, 2.0, 20)
BITS = [(RNG.random((n, 3)) < 0.5).astype(float) for n in (12, 9, 5)]
ROWS = [RNG.normal(size=(n, 2)) for n in (12, 15)]
LABELS = [np.arange(n) % 3 for n in (12, 15)]
TOPS = {"top": 3.0}, {"top": 30.0}
of_rows = partial(Case, data=((X,), (X[::-2] + 1,)), told=TOPS)
streaming = partial(of_rows, more=((X[:5],), (X[3:9],)))
CASES = {
    "filter": Case(
        partial(ParticleFilter, grouped, num_particles=4),
        ((BITS[0],), (BITS[1],)),
        TOPS,
        ((BITS[2],), (BITS[2][1:],)),
    ),
    "importance": streaming(partial(Streaming, bounded, num_batches=9, batch_size=16)),
    "variational": of_rows(variational),
    "ascent": Case(partial(CoordinateAscent, experts), ((BITS[0],), (BITS[1],))),
    "reduced": Case(partial(AugmentReduce, reduced), tuple(zip(ROWS, LABELS, strict=True))),
    "nested": of_rows(nested),
    "finish": of_rows(lambda: ImportanceFinish(nested(), num_draws=200)),
    "staged": streaming(staged),
    "merged": of_rows(merged, data=((X,), (X[::-1] + 1,)), told=TOPS[:1] * 2),
    "tempering": streaming(
        partial(DataTempering, bounded, num_stages=1, num_particles=20, num_sweeps=1.0)
    ),
}
QUICK = "filter", "importance", "variational"


def each_of(names):
    return pytest.mark.parametrize(
        "name",
        [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in names],
    )


each_kernel = each_of(CASES)


# What a driver does with a kernel, in steps between which others may do so.


def life(kernel, this, number):
    """A run that is cut short, that goes on, and that has more rows; the tree after each step."""
    at = Driver(kernel, num_warmup=3, num_samples=20, progress_bar=False)
    yield at.run(number, *this.data[number], **this.told[number])
    yield at.extend(2)
    yield at.extend(300)
    if this.more:
        at.update(*this.more[number], **this.told[number])
        yield at.extend(300)
    yield at.tree()


def check_same(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        assert one.children.keys() == other.children.keys()
        for group in one.children:
            xr.testing.assert_equal(one[group].dataset, other[group].dataset)
        # NaN before the end of a run
        np.testing.assert_equal(one.attrs.get("log_evidence"), other.attrs.get("log_evidence"))
        assert one.attrs["ended"] == other.attrs["ended"]


def apart(this):
    return [list(life(this.make(), this, number)) for number in range(2)]


def in_turn(kernel, this):
    return zip(*zip(*(life(kernel, this, number) for number in range(2)), strict=True), strict=True)


@each_kernel
def test_drivers_in_turn_find_what_they_find_apart(name):
    check_same_of_both(in_turn(CASES[name].make(), CASES[name]), apart(CASES[name]))


def check_same_of_both(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        check_same(one, other)


def test_a_kernel_that_keeps_what_it_has_read_is_seen():
    this = CASES["importance"]
    with pytest.raises(AssertionError, match="level"):
        check_same_of_both(
            in_turn(Keeper(bounded, num_batches=9, batch_size=16), this), apart(this)
        )


# The kernel before and after.


def contents(value):
    """All that a kernel holds, in a form that can be compared: numbers by value, other objects
    by who they are.
    """
    if isinstance(value, Algorithm | SVI | AutoNormal):
        return contents(vars(value))
    if isinstance(value, dict):
        return {name: contents(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [contents(entry) for entry in value]
    if isinstance(value, np.ndarray | jax.Array):
        return np.asarray(value).tobytes()  # a list would not equal itself where it has NaN
    return value if isinstance(value, int | float | str | None) else id(value)


def check_unchanged(kernel, this):
    before, driven = contents(kernel), kernel.svi if isinstance(kernel, StochasticVI) else kernel
    for _ in life(driven, this, 0):
        assert contents(kernel) == before


@each_kernel
def test_a_kernel_is_the_same_before_and_after(name):
    kernel = CASES[name].make()
    check_unchanged(kernel, CASES[name])
    if name == "variational":
        check_adapter_unchanged(StochasticVI(kernel), *CASES[name].data[0], **CASES[name].told[0])


def check_adapter_unchanged(kernel, *data, **told):
    """The driver makes an adapter for each run; here is one, by its own methods."""
    before = contents(kernel)
    given = kernel.read(Program(bounded, *data, **told))
    state = kernel.init(jax.random.key(0), *given)
    state, _ = jax.jit(lambda key, state: kernel.step(key, state, *given))(jax.random.key(1), state)
    kernel.draw(jax.random.key(2), state, *given, 3)
    kernel.results(state, *given)
    assert contents(kernel) == before


def test_a_kernel_that_changes_is_seen():
    with pytest.raises(AssertionError, match="last"):
        check_unchanged(Keeper(bounded, num_batches=9, batch_size=16), CASES["importance"])


# A helper of the model that is defined anew, as in a notebook.


def found_after(kernel, this):
    *_, tree = life(kernel, this, 0)
    return tree


@each_of([name for name in CASES if name != "merged"])  # its parts have learned before
def test_a_helper_that_is_defined_anew_changes_the_answer(name, monkeypatch):
    this = CASES[name]
    kernel = this.make()
    before = found_after(kernel, this)
    monkeypatch.setattr(sys.modules[__name__], "amount", lambda: 3.0)
    after = found_after(kernel, this)
    check_same([after], [found_after(this.make(), this)])
    with pytest.raises(AssertionError):
        check_same([before], [after])


# Threads.


def threads(*tasks):
    """What each returns, in a thread of its own; all begin at once.

    What one raises is raised here.
    """
    start, found = Barrier(len(tasks)), {}

    def work(number):
        try:
            start.wait()
            with jax.enable_x64(True), promoted():  # JAX has these for each thread
                found[number] = tasks[number]()
        except BaseException as error:
            found[number] = error

    running = [Thread(target=work, args=(number,)) for number in range(len(tasks))]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    for error in (each for each in found.values() if isinstance(each, BaseException)):
        raise error
    return [found[number] for number in range(len(tasks))]


@pytest.fixture
def turns(monkeypatch):
    """The threads that have run compiled code, in their order.

    Chunks are short, and after each the other thread has the turn, as long as it comes.
    """
    seen, chunk = [], Loop.chunk

    def short(self, *args: Any, **kwargs: Any):
        self.pace = 1.0
        found = chunk(self, *args, **kwargs)
        seen.append(get_ident())
        until = time.monotonic() + 0.5
        while seen[-1] == get_ident() and time.monotonic() < until:
            time.sleep(0.01)
        return found

    monkeypatch.setattr(Loop, "chunk", short)
    return seen


def changes(seen):
    return sum(one != other for one, other in pairwise(seen))


@pytest.mark.parametrize(
    "name", ["filter", "importance", pytest.param("variational", marks=pytest.mark.slow)]
)
def test_threads_that_share_a_kernel_find_what_they_find_apart(name, turns, monkeypatch):
    """Room of the filter grows meanwhile: its host reads the data of its own run."""
    monkeypatch.setattr(particle_filter, "NUM_GROUPS", 2)
    monkeypatch.setattr(particle_filter, "NUM_ROWS", 2)
    monkeypatch.setattr(particle_filter, "NUM_KEPT", 1)
    this = CASES[name]
    wanted, kernel = apart(this), this.make()
    turns.clear()
    found = threads(
        *(lambda number=number: list(life(kernel, this, number)) for number in range(2))
    )
    check_same_of_both(found, wanted)
    assert changes(turns) > 5


def test_threads_that_share_a_kernel_that_keeps_its_reading_are_seen(turns):
    this = CASES["importance"]
    wanted, kernel = apart(this), Keeper(bounded, num_batches=9, batch_size=16)
    with pytest.raises(AssertionError, match="level"):
        check_same_of_both(
            threads(
                *(lambda number=number: list(life(kernel, this, number)) for number in range(2))
            ),
            wanted,
        )


class NoTurn:
    """The planted bug: whoever comes may run a model."""

    acquire = release = lambda self: None
    __enter__ = __exit__ = lambda self, *error: None


@pytest.mark.parametrize("bug", [False, True], ids=["right", "planted"])
def test_one_thread_at_a_time_runs_a_model(bug, turns, monkeypatch):
    """NumPyro has one stack of handlers for all threads.

    The planted bug finds handlers of another thread, and fails in many ways.
    """
    inside, most = [], []

    def watched(x, top):
        inside.append(get_ident())
        most.append(len(set(inside)))
        time.sleep(0.001)
        try:
            bounded(x, top)
        finally:
            inside.remove(get_ident())

    if bug:
        for module in (_session, driver):
            monkeypatch.setattr(module, "TURN", NoTurn())
    kernel, this = Streaming(watched, num_batches=4, batch_size=16), CASES["importance"]
    # the planted bug may end a thread in any way
    with suppress(BaseException) if bug else nullcontext():
        threads(
            *(lambda number=number: list(life(kernel, this, number)) for number in (0, 1, 0, 1))
        )
    numpyro.primitives._PYRO_STACK.clear()
    assert (max(most) == 1) != bug


class Place(NamedTuple):
    z: dict
    count: jax.Array


class Placed(MCMCKernel):
    """A chain of which the host has to say now and then where it is: at the mean of the data,
    which `init` has read.
    """

    model, sample_field = None, "z"

    def init(self, rng_key, num_warmup, init_params, model_args, model_kwargs):
        self.reading = float(np.mean(model_args[0]))
        return Place({"mu": jnp.zeros(())}, jnp.zeros((), int))

    def needs_host(self, state):
        return state.count % 3 == 2

    def on_host(self, states):
        return [Place({"mu": jnp.asarray(self.reading)}, state.count + 1) for state in states]

    def arguments(self, values):
        return {}

    def sample(self, state, model_args, model_kwargs):
        return state._replace(count=state.count + 1)


@pytest.mark.parametrize("bug", [False, True], ids=["right", "planted"])
def test_a_chain_has_the_reading_of_its_own_run_in_each_thread(bug, turns, monkeypatch):
    """The planted bug: it has that of the run that began last."""
    if bug:
        monkeypatch.setattr(Chain, "bind", lambda self: None)
    kernel = Placed()

    def run(data):
        at = Driver(kernel, num_warmup=0, num_samples=10, progress_bar=False)
        at.run(0, data)
        return at.extend(10).posterior["mu"].values[0]

    first, second = threads(lambda: run(np.full(4, 1.0)), lambda: run(np.full(4, 11.0)))
    assert (set(first) == {0.0, 1.0} and set(second) == {0.0, 11.0}) != bug
    assert changes(turns) > 5
