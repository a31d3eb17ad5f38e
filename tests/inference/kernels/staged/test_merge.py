"""What workers have learned apart, put together, against the exact answer; a product that counts
the prior too often; what is refused.
"""

from functools import cache
from inspect import signature

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy import stats

from diagnostics import report
from inference import Driver, MergedStages, NestedSampler, Program, Staged
from inference.kernels.staged import merge
from inference.kernels.staged.merge import Part, Product
from inference.kernels.staged.search import StageArrays
from inference.kernels.staged.weighing import DRAWS, Weighing
from inference.maths.normal_mixture import NormalMixture
from tests.inference import stages
from tests.inference.kernels.staged.test_kernel import over
from tests.inference.kernels.staged.test_peaks import TWO, pair, pair_evidence
from tests.inference.kernels.staged.test_summary_losses import rows as square_rows
from tests.inference.kernels.staged.test_summary_losses import square, square_evidence
from tests.inference.kernels.staged.test_weighing import heavy, scaled
from tests.inference.nests import NOISE, line, line_evidence
from tests.inference.stages import DEVIATION, MEAN, X, Y

pytestmark = pytest.mark.usefixtures("x64", "numpyro_promotion")

PARTS = (slice(0, 30), slice(30, 50), slice(50, 90))


def worker(rows, seed=0, num_stages=1, model=line, **settings):
    driver = Driver(
        Staged(model, num_stages=num_stages, num_live=100, num_walkers=0),
        num_samples=100,
        progress_bar=False,
        **settings,
    )
    driver.run(seed, X[rows], Y[rows])
    return driver


@pytest.fixture(scope="module")
def workers():
    with (
        jax.enable_x64(True),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        return [worker(rows, seed) for seed, rows in enumerate(PARTS)]


def test_settings_are_those_of_the_first_part():
    of_nest = {
        "num_live": 40,
        "batch": 7,
        "num_sweeps": 2.5,
        "memory": 0.5,
        "tolerance": 0.02,
        "track_modes": False,
        "rename": False,
    }
    of_stages = {
        "summary": "code",
        "num_clumps": 3,
        "background": 0.1,
        "most_lost": 0.5,
        "num_walkers": 0,
    }
    names = {*signature(NestedSampler).parameters, *signature(Staged).parameters} - {
        "model",
        "num_stages",
        "settings",
    }
    assert names == {*of_nest, *of_stages}
    part = Part(Staged(line, num_stages=1, **of_nest, **of_stages), None, None, None)
    merged = MergedStages([part, part], num_live=50)
    assert {
        name: getattr(merged.sampler if name in of_nest else merged, name) for name in names
    } == of_nest | of_stages | {"num_live": 50}


def with_prior_each(self, arrays, densities=Product.densities):
    """A planted bug: the prior of every worker counts."""
    own, log_weight = densities(self, arrays), arrays.mixture.log_weight
    if log_weight.ndim == 1:
        return own
    program = self.split.program.with_arguments(**arrays.rows)

    def too_often(z):
        first, rest = own(z)
        return first, rest + (len(log_weight) - 1) * self.split.densities(z, program)[0]

    return too_often


@pytest.mark.slow
@pytest.mark.parametrize("bug", [False, True], ids=["right", "planted"])
def test_evidence_and_posterior_are_those_of_all_rows(bug, workers, monkeypatch):
    if bug:
        monkeypatch.setattr(Product, "densities", with_prior_each)
    driver = Driver(MergedStages(workers), num_samples=400, progress_bar=False)
    tree = driver.run(5, X, Y)
    z = (tree.attrs["nested_log_evidence"] - line_evidence(X, Y)) / tree.attrs[
        "nested_log_evidence_se"
    ]
    drawn = tree["posterior"]["weight"].values[0]
    is_right = abs(z) < 3.5 and (np.abs(drawn.mean(0) - MEAN) < 0.5 * DEVIATION).all()
    assert is_right != bug
    if not bug:
        np.testing.assert_allclose(drawn.std(0), DEVIATION, rtol=0.35)
        trees = [part.tree() for part in workers]
        # slopes, and draws of the summary
        once = lambda tree: 3 * tree["particles"].sizes["particle"] + 50
        told = [once(tree) * tree["observed_data"].sizes["row"] for tree in trees]
        spent = [tree.attrs["num_row_evaluations"] for tree in trees]
        weighed = DRAWS * len(X)
        # no row besides has been looked at
        assert tree.attrs["num_row_evaluations"] == sum(spent) + sum(told) + weighed
        assert tree.attrs["num_stages"] == 3


@pytest.mark.slow
@pytest.mark.parametrize("bug", [False, True], ids=["right", "planted"])
def test_the_end_is_weighed_by_all_rows(bug, monkeypatch):
    """Workers have one component for two modes each.

    The planted bug: weights see the rows of the first alone.
    """
    x = square_rows(6)
    if bug:
        monkeypatch.setattr(Weighing, "so_far", lambda self, state, data: jnp.arange(40))
    settings = {"num_stages": 1, "num_live": 100, "num_clumps": 1}
    parts = [
        Driver(Staged(square, **settings, most_lost=np.inf), num_samples=1, progress_bar=False)
        for _ in range(2)
    ]
    for seed, part in enumerate(parts):
        part.run(seed, x[40 * seed :][:40])
    driver = Driver(
        MergedStages(parts, num_clumps=8, most_lost=0.05), num_samples=400, progress_bar=False
    )
    attrs = driver.run(2, x).attrs
    assert (abs(attrs["log_evidence"] - square_evidence(x)) < 3 * attrs["log_evidence_se"]) != bug
    if not bug:
        assert attrs["log_evidence_se"] < attrs["nested_log_evidence_se"]


@pytest.mark.slow
@pytest.mark.parametrize("bug", [False, True], ids=["right", "planted"])
def test_where_workers_disagree_no_error_is_claimed(bug, monkeypatch):
    """One worker has all outliers. The planted bug: the error of the weights is claimed."""
    if bug:
        monkeypatch.setattr(merge, "NEAR", np.inf)
    x = heavy(12, 15.0, 400)
    x = x[np.argsort(np.abs(x))]
    parts = [
        Driver(Staged(scaled, num_stages=1, num_live=50), num_samples=1, progress_bar=False)
        for _ in range(2)
    ]
    for number, part in enumerate(parts):
        part.run(number, x[200 * number :][:200])
    tree = Driver(MergedStages(parts), num_samples=10, progress_bar=False).run(2, x)
    assert np.isposinf(tree.attrs["log_evidence_se"]) != bug
    assert report(tree)["summaries"].ok is False


@pytest.mark.slow
def test_replicates_side_by_side_are_each_weighed_at_their_end(workers):
    driver = Driver(
        MergedStages(workers),
        num_samples=50,
        num_chains=2,
        chain_method="vectorized",
        progress_bar=False,
    )
    attrs = driver.run(5, X, Y).attrs
    off = np.asarray(attrs["log_evidence_of_replicates"]) - line_evidence(X, Y)
    assert (np.abs(off) < 3.5 * np.asarray(attrs["log_evidence_se_of_replicates"])).all()
    assert not np.isnan(attrs["nats_left_of_replicates"]).any()


@pytest.mark.slow
def test_more_rows_are_one_more_stage(workers):
    driver = Driver(MergedStages(workers[:2]), num_samples=100, progress_bar=False)
    driver.run(1, X[:50], Y[:50])
    driver.update(X[50:], Y[50:])
    tree = driver.tree()
    assert tree["observed_data"].sizes["row"] == 90
    assert tree.attrs["num_row_evaluations"] > 40 * 100
    assert (
        abs(tree.attrs["log_evidence"] - line_evidence(X, Y)) < 3.5 * tree.attrs["log_evidence_se"]
    )


def in_order(rows, ascending):
    """A worker whose labels of two clusters are in this order."""
    for seed in range(20):
        driver = Driver(
            Staged(pair, num_stages=1, num_live=100), num_samples=100, progress_bar=False
        )
        driver.run(seed, rows)
        one, other = driver.states[0].proposal.mixture.mean[0]
        if bool(one < other) == ascending:
            return driver
    raise AssertionError(f"no seed names them {'up' if ascending else 'down'}wards")


@pytest.mark.slow
@pytest.mark.parametrize("bug", [False, True], ids=["right", "planted"])
def test_each_worker_has_named_members_in_a_way_of_its_own(bug, monkeypatch):
    """The planted bug: a vector keeps the places that the first has given it."""
    if bug:
        monkeypatch.setattr(merge, "relabel", lambda exchange, z, reference: z)
    parts = [in_order(TWO[0::2], True), in_order(TWO[1::2], False)]
    attrs = Driver(MergedStages(parts), num_samples=100, progress_bar=False).run(5, TWO).attrs
    assert (
        abs(attrs["nested_log_evidence"] - pair_evidence())
        < min(3.5 * attrs["nested_log_evidence_se"], 0.5)
    ) != bug
    assert abs(attrs["log_evidence"] - pair_evidence()) < 3.5 * attrs["log_evidence_se"]


def test_what_is_drawn_has_its_own_density(monkeypatch):
    """The first worker's draws, wherever its components reach.

    The mean over draws of a Normal density over theirs is 1. Its clusters overlap with their copies.
    """
    kernel = MergedStages([fake(model=pair), fake(model=pair)])
    reading, _ = Staged.read(kernel, Program(pair, TWO))
    search = reading.search
    one = NormalMixture(*map(jnp.asarray, (np.zeros(1), np.array([[0.5, -0.5]]), np.eye(2)[None])))
    both = jax.tree.map(
        lambda *leaves: jnp.asarray(np.stack(leaves)),
        *[search.labelled(jax.random.key(number), one) for number in range(2)],
    )
    start, rows = search.start, {"x": jnp.asarray(TWO)}
    z = start.draws(np.random.default_rng(1), 2000, (both, search.nothing))
    densities = start.nested_densities(StageArrays(both, rows), search.nothing)
    log_prior, rest = jax.jit(jax.vmap(densities))(z)
    ratio = np.exp(stats.norm.logpdf(z, 0, 0.7).sum(1) - np.asarray(log_prior))
    assert np.isfinite(rest).all()
    assert abs(ratio.mean() - 1) < 4 * ratio.std() / np.sqrt(len(z))


@cache
def begun(num_rows, model, x64, **settings):
    """A kernel, its first state, and what it has read."""
    kernel = Staged(model, num_stages=1, num_live=40, num_walkers=0, **settings)
    with jax.enable_x64(x64):
        return kernel, *stages.begun(
            kernel, *((TWO,) if model is pair else (X[:num_rows], Y[:num_rows]))
        )


def line_of_wide_prior(x, y):
    """As `line`, but for its prior."""
    weight = numpyro.sample("weight", dist.Normal(0.0, jnp.array([1.0, 3.0])).to_event(1))
    with numpyro.plate("row", len(x)):
        numpyro.sample("y", dist.Normal(x @ weight, NOISE), obs=y)


def same_line(x, y):
    """As `line`, written anew."""
    weight = numpyro.sample("weight", dist.Normal(0.0, jnp.array([1.0, 2.0])).to_event(1))
    with numpyro.plate("row", len(y)):
        numpyro.sample("y", dist.Normal(x @ weight, NOISE), obs=y)


def fake(is_over=True, num_rows=50, model=line, replicates=1, x64=True, **settings):
    """A driver that stands at its first step, or where it has finished."""
    kernel, state, reading, data = begun(num_rows, model, x64, **settings)
    driver = Driver(kernel, progress_bar=False)
    told = {
        "states": [over(state) if is_over else state] * replicates,
        "reading": reading,
        "data": data,
    }
    assert all(hasattr(Driver, name) for name in told)
    driver.__class__ = type("Fake", (Driver,), told)
    return driver


@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [
        (lambda: [fake()], ValueError, "parts: found 1, wanted two or more"),
        (
            lambda: [fake(), Driver(NestedSampler(line), progress_bar=False)],
            TypeError,
            "parts: number 1 is .*; wanted a Driver of Staged",
        ),
        (
            lambda: [fake(), fake(is_over=False)],
            ValueError,
            "parts: number 1 has 1 replicates, or has not finished",
        ),
        (lambda: [fake(), fake(replicates=2)], ValueError, "parts: number 1 has 2 replicates"),
        (
            lambda: [fake(), fake(num_rows=30)],
            ValueError,
            "plate 'row': found 90 rows, and the parts have learned from 80",
        ),
        (
            lambda: [fake(), fake(x64=False)],
            ValueError,
            "parts, number 1: the run began with jax_enable_x64=False, and now it is True",
        ),
        (
            lambda: [fake(), fake(rename=False)],
            ValueError,
            "rename: found True and False among the parts",
        ),
        (
            lambda: [fake(), fake(num_rows=40, model=line_of_wide_prior)],
            ValueError,
            "parts, number 1: .* but the model is not the same",
        ),
    ],
    ids=[
        "one",
        "of all rows",
        "unfinished",
        "replicates",
        "other rows",
        "other precision",
        "other names",
        "other prior",
    ],
)
def test_what_cannot_be_merged_is_refused(parts, error, message):
    with pytest.raises(error, match=message):
        Driver(MergedStages(parts()), progress_bar=False).run(0, X, Y)


def test_a_model_that_is_the_same_may_be_another_function():
    MergedStages([fake(), fake(num_rows=40, model=same_line)]).read(Program(line, X, Y))
