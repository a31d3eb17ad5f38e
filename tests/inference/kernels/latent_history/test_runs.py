"""The history kernel in the driver, where its capacity grows, and in NumPyro's own `MCMC`."""

from functools import partial

import numpy as np
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.infer import MCMC, NUTS, Gibbs
from scipy import stats

from inference import Driver, LatentHistory
from tests.inference.histories import ROOM, TOTAL, beads, loss_of_a_bead
from zoo.archipelago import archipelago

pytestmark = pytest.mark.usefixtures("x64", "numpyro_promotion")

SMALL = 6  # slots, where 4.3 beads are lost on average


def driver(num_samples=300, **options):
    kernel = LatentHistory(beads, capacity="room", **options.pop("kernel", {}))
    return Driver(kernel, num_warmup=10, num_samples=num_samples, progress_bar=False, **options)


@pytest.mark.slow
def test_capacity_grows_and_nothing_is_cut_off():
    tree = driver(4000, num_chains=2, groups=("log_likelihood",)).run(0, TOTAL, room=SMALL)
    room = tree.posterior.sizes["bead"]
    assert room >= 4 * SMALL
    assert tree.observed_data.sizes["bead"] == tree.log_likelihood.sizes["bead"] == room
    lost, _ = loss_of_a_bead()
    counts = np.bincount(tree.posterior["lost"].values.ravel(), minlength=60) / 8000
    assert (
        0.5 * np.abs(counts - stats.nbinom.pmf(np.arange(len(counts)), TOTAL, 1 - lost)).sum()
        < 0.03
    )


@pytest.mark.slow
def test_slots_are_doubled_for_all_chains_of_a_lane():
    kernel = LatentHistory(beads, capacity="room")
    begin = lambda seed: kernel.init(
        random.key(seed), 0, {"lost": np.int32(3)}, (TOTAL,), {"room": SMALL}
    )
    states = [begin(0)._replace(full=np.array(True)), begin(1)]
    assert [bool(kernel.needs_host(state)) for state in states] == [True, False]
    for before, after in zip(states, kernel.on_host(states), strict=True):
        assert kernel.arguments(after.values) == {"room": 2 * SMALL}
        assert not kernel.needs_host(after)
        np.testing.assert_array_equal(after.values["where"][:SMALL], before.values["where"])


@pytest.mark.slow
def test_memory_has_a_limit_that_is_named():
    with pytest.raises(
        RuntimeError, match=r"found \d+ points .* with 6 slots, and max_capacity is 10"
    ):
        driver(kernel={"max_capacity": 10}).run(0, TOTAL, room=SMALL)


@pytest.mark.parametrize(
    ("most", "named"),
    [
        (0, "max_capacity: found 0"),
        ("a", "max_capacity: found 'a'"),
        (4, "found 6 slots at the start"),
    ],
)
def test_a_limit_that_cannot_be_kept_is_refused(most, named):
    with pytest.raises(ValueError, match=named):
        driver(kernel={"max_capacity": most}).run(0, TOTAL, room=SMALL)


@pytest.mark.slow
def test_history_and_nuts_share_a_model_and_a_history_that_grows():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(8, 1)) ** 3, np.array([0, 1, *[-1] * 6])  # unlike the base density
    blocks = [
        (LatentHistory(archipelago), ["num_rejected", "rejected", "rejected_noise"]),
        (NUTS(archipelago, max_tree_depth=4), None),
    ]
    low = dist.LogNormal(-1.0, 0.3)  # of the amplitude: the count has no long tail
    tree = Driver(Gibbs(blocks), num_warmup=100, num_samples=200, progress_bar=False).run(
        0, x, y, capacity=4, amplitude=low
    )
    assert tree.posterior.sizes["slot"] > 4
    assert tree.posterior["rejected"].dims == ("chain", "draw", "slot", "feature")
    assert np.isfinite(tree.posterior["lengthscale"]).all()
    assert not tree.sample_stats["diverging"].any()


@pytest.mark.slow
def test_numpyro_runs_it():
    mcmc = MCMC(
        LatentHistory(partial(beads, room=ROOM), capacity="room"),
        num_warmup=10,
        num_samples=200,
        progress_bar=False,
    )
    mcmc.run(random.key(0), TOTAL, extra_fields=("full",))
    assert mcmc.get_samples()["lost"].mean() == pytest.approx(4.34, abs=1.0)
    assert not mcmc.get_extra_fields()["full"].any()
