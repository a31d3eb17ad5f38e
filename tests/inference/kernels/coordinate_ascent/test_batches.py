"""Coordinate ascent by batches: sums over a batch stand for those over all rows, and the end is
that of whole sweeps.
"""

from functools import cache

import jax
import numpy as np
import pytest
from jax import random

from inference import CoordinateAscent, Driver, Program
from inference.kernels.coordinate_ascent import rows
from tests.inference.kernels.coordinate_ascent.test_kernel import ascended
from tests.inference.mixtures import case
from zoo.iqgme import iqgme

pytestmark = pytest.mark.usefixtures("x64", "numpyro_promotion")

NUM_ROWS = 90


@pytest.fixture
def short_chunks(monkeypatch):
    """Chunks of a few rows, so that few rows are many chunks."""
    monkeypatch.setattr(rows, "LONGEST_CHUNK", {"complete": 8, "incomplete": 8})
    monkeypatch.setattr(rows, "OVERHEAD", 1e9)


@cache
def data():
    return case("binary", num_rows=NUM_ROWS, missing=0.2)[1]


@pytest.mark.slow
def test_a_batch_of_all_rows_is_a_sweep(short_chunks):
    _, _, elbo, *_ = ascended(data(), 1)
    _, state, other, _, read = ascended(data(), 1, batch_size=NUM_ROWS)
    assert len(read[1].buckets[0].row) > 5
    np.testing.assert_allclose(other, elbo, rtol=1e-10)
    assert int(state.step) == 1


def batches(kernel, state, read, number):
    """SufficientSums that batches stand for, [batch, ...]."""
    one = lambda key: kernel.step(key, state, *read)[0].sums.moments
    return np.asarray(
        jax.jit(lambda keys: jax.lax.map(one, keys))(random.split(random.key(3), number))
    )


def off(found, wanted):
    """By how many standard errors the mean of batches misses the sums over all rows."""
    error = found.std(0) / np.sqrt(len(found))
    return np.max(abs(found.mean(0) - wanted) / (error + 1e-9))


@pytest.mark.slow
def test_batches_stand_for_all_rows(short_chunks, monkeypatch):
    program = Program(iqgme, **data())
    complete, kernel = (CoordinateAscent(iqgme, batch_size=size) for size in (NUM_ROWS, 20))
    read = complete.read(program)
    wanted = batches(complete, jax.device_put(complete.init(random.key(0), *read)), read, 1)[0]
    read = kernel.read(program)
    state = jax.device_put(kernel.init(random.key(0), *read))
    assert off(batches(kernel, state, read, 2000), wanted) < 4.5
    monkeypatch.setattr(
        "inference.kernels.coordinate_ascent.rows.SufficientSums.times", lambda self, factor: self
    )  # planted: a batch stands for itself
    assert off(batches(kernel, state, read, 200), wanted) > 5


@pytest.mark.slow
def test_batches_end_where_whole_sweeps_do(short_chunks):
    """Minibatches end at the bound of whole sweeps.

    Clusters are well separated, one for each group, so that there is one optimum.
    """
    rng = np.random.default_rng(0)
    x = rng.normal(size=(NUM_ROWS, 2)) + 8 * np.eye(3, 2)[np.arange(NUM_ROWS) % 3]
    told = {
        "x": np.where(rng.random(x.shape) < 0.1, np.nan, x),
        "expert": None,
        "num_experts": 3,
        "alpha": 1.0,
    }
    _, _, best, _, read = ascended(told, 200)
    _, state, estimates, *_ = ascended(told, 600, batch_size=30)
    whole = CoordinateAscent(iqgme)
    start = whole.init(random.key(0), *read)._replace(factors=state.factors)
    _, found = jax.jit(lambda state: whole.step(random.key(0), state, *read))(start)
    assert best[-1] - 1 < float(found.elbo) < best[-1] + 1e-6
    assert abs(estimates[-200:].mean() - best[-1]) < 5


@pytest.mark.slow
def test_a_run_by_batches():
    tree = Driver(CoordinateAscent(iqgme, batch_size=40), num_warmup=30, num_samples=10).run(
        0, **data()
    )
    assert tree["sample_stats"]["elbo"].shape == (1, 30)
    assert tree["posterior"]["z"].shape == (1, 10, NUM_ROWS)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"batch_size": 0}, "batch_size: found 0"),
        ({"batch_size": 2.5}, "batch_size: found 2.5"),
        ({"forgetting": 0.5}, "forgetting: found 0.5"),
    ],
    ids=["none", "half a row", "forgetting"],
)
def test_wrong_options_are_refused(option, message):
    with pytest.raises(ValueError, match=message):
        CoordinateAscent(iqgme, **option)
