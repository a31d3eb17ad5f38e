"""Rows that each replicate reads in an order of its own: the run is that of the table in this
order, and everything that it says of rows is put back into the order of the table.
"""

from functools import partial
from itertools import count

import numpy as np
import pytest

from inference.kernels.particle_filter.kernel import FilterState
from inference.run import session as _session
from tests.inference.filters import LATER, OPTIONS, X, Y, check_same, driver, run
from tests.inference.partitions import ordered

pytestmark = pytest.mark.usefixtures("x64", "numpyro_promotion")


def check_order(y, **settings):
    """One replicate against a run on the permuted table; returns its order."""
    this, found = run(y, num_chains=1, shuffle=True, **settings)
    order = np.asarray(this.states[0].order)[: len(y)]
    assert sorted(order) == list(range(len(y)))
    _, wanted = run(y[order], X[order], num_chains=1, **settings)
    assert found.attrs["log_evidence"] == wanted.attrs["log_evidence"]
    back = np.argsort(order)
    labels = np.broadcast_to(y, (1, 50, len(y)))
    if "y_unobserved" in wanted["posterior"]:
        labels = wanted["posterior"]["y_unobserved"].values[..., back]
        np.testing.assert_array_equal(found["posterior"]["y_unobserved"], labels)
    np.testing.assert_array_equal(
        found["posterior"]["z"], ordered(labels, wanted["posterior"]["z"].values[..., back])
    )
    for group, name in (
        ("particles", "class_of_row"),
        ("particles", "group_of_row"),
        ("ancestry", "unique_ancestors"),
    ):
        np.testing.assert_array_equal(found[group][name], wanted[group][name].values[..., back])
    return order


def test_a_run_is_that_of_the_table_in_its_order():
    order = check_order(Y)
    assert list(order) != list(range(len(Y)))


@pytest.mark.slow
def test_rows_that_are_redrawn_are_put_back_as_well():
    check_order(Y, rejuvenate=2)


def test_rows_of_known_class_are_read_first():
    few = np.where(np.arange(len(Y)) % 3 == 0, -1, Y)
    order = check_order(few)
    assert (np.diff((few[order] < 0).astype(int)) >= 0).all()


def test_replicates_have_orders_of_their_own():
    this, _ = run(num_chains=3, shuffle=True)
    assert len({tuple(np.asarray(state.order)) for state in this.states}) == 3


def test_rows_of_an_update_come_as_they_are_given():
    """The update is that of a filter which read the first rows in the same order."""
    first, more = slice(0, 9), slice(9, 27)
    this = driver(num_chains=1, shuffle=True)
    this.run(0, X[first], Y[first], **OPTIONS)
    order = np.asarray(this.states[0].order)[:9]
    this.update(X[more], LATER[more], **OPTIONS)
    _, wanted = run(
        np.concatenate([Y[:9][order], LATER[more]]),
        np.concatenate([X[:9][order], X[more]]),
        num_chains=1,
    )
    found = this.tree()
    assert found.attrs["log_evidence"] == wanted.attrs["log_evidence"]
    back = np.concatenate([np.argsort(order), np.arange(9, 27)])
    np.testing.assert_array_equal(
        found["particles"]["group_of_row"], wanted["particles"]["group_of_row"].values[..., back]
    )


def test_rows_that_were_not_read_have_no_group(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(_session, "perf_counter", partial(next, count()))
        this, part = run(num_chains=1, shuffle=True, max_time=1.5)
    z, seen = part["unfinished"]["z"].values, part.attrs["steps"]
    assert seen < len(Y)
    assert ((z >= 0).sum(-1) == seen).all()
    this.max_time = None
    check_same(this.extend(1_000_000), run(num_chains=1, shuffle=True)[1])


def test_rows_that_are_not_put_back_are_seen(monkeypatch):
    monkeypatch.setattr(FilterState, "by_row", lambda self, values: values)
    with pytest.raises(AssertionError):
        check_order(Y)


def test_an_order_that_is_not_followed_is_seen(monkeypatch):
    monkeypatch.setattr(FilterState, "place", lambda self, row: row)
    with pytest.raises(AssertionError):
        check_order(Y)
