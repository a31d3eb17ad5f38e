"""The history kernel against exact answers: a negative binomial count, and exact draws of a
joint distribution that it must leave alone.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro import handlers
from scipy import stats

from inference import LatentHistory, Program, StructureError
from inference.kernels.latent_history.kernel import _partners
from inference.reading.field import read_field
from inference.reading.history import HistorySites, read_history
from tests.inference.histories import ROOM, TOTAL, beads, drift, loss_of_a_bead, orders, run
from zoo.archipelago import archipelago, matern32, mixture, student_t

pytestmark = pytest.mark.usefixtures("x64", "numpyro_promotion")

X = np.random.default_rng(0).normal(size=(5, 2))
Y = np.array([0, -1, 1, -1, -1])


# Everything is known of a history whose functions are independent from point to point.


def distance_to_truth(model=beads, num_sweeps=5000, num_rounds=1):
    """Total variation between the counts of a run and the negative binomial; and the mean of
    `where`^2 over its truth.
    """
    lost, spread = loss_of_a_bead()
    drawn = run(
        LatentHistory(model, capacity="room", num_rounds=num_rounds, num_trajectories=2),
        model,
        (TOTAL,),
        {},
        num_sweeps,
        ("lost", "where"),
    )
    counts = np.bincount(np.asarray(drawn["lost"]), minlength=ROOM + 1) / num_sweeps
    is_used = np.arange(ROOM) < np.asarray(drawn["lost"])[:, None]
    truth = stats.nbinom.pmf(np.arange(ROOM + 1), TOTAL, 1 - lost)
    return 0.5 * np.abs(counts - truth).sum(), np.mean(
        np.asarray(drawn["where"])[is_used] ** 2
    ) / spread


@pytest.mark.slow
def test_count_is_negative_binomial_and_places_follow_their_density():
    distance, spread = distance_to_truth()
    assert distance < 0.04
    assert abs(spread - 1) < 0.04


@pytest.mark.slow
def test_windows_must_be_laid_at_random(monkeypatch):
    """A window that begins at the count lets it rise only."""
    monkeypatch.setattr(random, "randint", lambda key, shape, low, high: jnp.asarray(low))
    distance, _ = distance_to_truth(num_sweeps=2000)
    assert distance > 0.2


@pytest.mark.slow
def test_count_without_its_orders_is_another():
    """The density as it was printed."""
    distance, _ = distance_to_truth(
        partial(beads, prior=lambda most, total: dist.Categorical(logits=jnp.zeros(most + 1)))
    )
    assert distance > 0.2


def forgets_the_proposal(self, rng_key, program, history, values, function):
    """Swaps with points that were drawn from the base density, as if they had not been."""
    events = HistorySites.log_events
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            HistorySites,
            "log_events",
            lambda self, *at: events(self, *at) + self.log_places(*at[:2]),
        )
        return EXCHANGED(self, rng_key, program, history, values, function)


EXCHANGED = LatentHistory._exchanged


@pytest.mark.slow
def test_proposal_must_be_in_the_ratio(monkeypatch):
    monkeypatch.setattr(LatentHistory, "_exchanged", forgets_the_proposal)
    distance, spread = distance_to_truth()
    assert distance > 0.1 or abs(spread - 1) > 0.2


@pytest.mark.slow
def test_density_must_be_in_the_ratio_of_places_nearby(monkeypatch):
    monkeypatch.setattr(
        HistorySites, "log_places", lambda self, program, values: jnp.zeros(self.capacity)
    )
    monkeypatch.setattr(HistorySites, "prove", lambda self, program, rng_key: None)
    _, spread = distance_to_truth()
    assert abs(spread - 1) > 0.03


# Exact draws of the joint distribution stay exact draws.


@pytest.mark.slow
def test_sweeps_leave_the_joint_distribution_alone():
    # trajectories, tested in test_field.py, would mend what is wrong
    found = drift(num_trajectories=0)
    assert max(map(abs, found.values())) < 4, found


def old_noise(self, level, root, function):
    """No new noise for a new order: the mistake of a sampler that forgets that noise belongs to
    a place in the order.
    """
    return jnp.linalg.solve(
        jnp.eye(self.capacity) * jnp.diagonal(root, 0, 1, 2)[..., None],
        (function - level).T[..., None],
    )[..., 0].T


@pytest.mark.slow
@pytest.mark.parametrize("slip", ["no orders", "old noise"])
def test_a_slip_moves_it(slip, monkeypatch):
    monkeypatch.setattr(HistorySites, "prove", lambda self, program, rng_key: None)
    if slip == "no orders":
        monkeypatch.setattr(
            HistorySites, "log_count", lambda self, program, values: jnp.zeros(self.capacity + 1)
        )
    if slip == "old noise":
        monkeypatch.setattr(HistorySites, "noise_of", old_noise)
    found = drift(num_trajectories=0)
    assert max(map(abs, found.values())) > 5, found


# The structure is read, proved, followed through edits, or refused by name.


def test_structure_is_read_by_its_sites():
    history = read_history(Program(beads, TOTAL))
    assert (history.count, history.plate, history.capacity) == ("lost", "bead", ROOM)
    assert (history.places, history.noise, history.function, history.events) == (
        ("where",),
        "spark",
        "height",
        ("arrived",),
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"base": mixture}, marks=pytest.mark.slow),
        pytest.param({"base": student_t}, marks=pytest.mark.slow),
        pytest.param({"covariance": matern32}, marks=pytest.mark.slow),
        pytest.param({"is_ard": True}, marks=pytest.mark.slow),
    ],
    ids=["paper", "mixture", "student_t", "matern", "ard"],
)
def test_edits_are_followed(options):
    program = Program(archipelago, X, Y, capacity=6, **options)
    history = read_history(program)
    history.prove(program, random.key(0))
    assert history.sites == ("num_rejected", "rejected", "rejected_noise")


def edited(edit):
    """`beads` with one line changed."""

    def model(total, room=6):
        is_used = jnp.arange(room) < numpyro.sample("lost", orders(room, total))
        scale = 2.0 if edit == "noise is not standard" else 1.0
        with numpyro.plate("bead", room):
            spark = numpyro.sample("spark", dist.Normal(0.0, scale).expand([2]).to_event(1))
            with handlers.mask(mask=is_used):
                where = numpyro.sample("where", dist.Normal(0.0, 1.0))
            if edit == "later slots":
                where = where + jnp.sum(where)
            height = jnp.stack([where, -where], -1) + (spark**3 if edit == "not affine" else spark)
            height = height if edit == "no function" else numpyro.deterministic("height", height)
            is_masked = jnp.ones(room, bool) if edit == "no mask" else is_used
            order = jnp.arange(room) / room if edit == "order counts" else 0.0
            with handlers.mask(mask=is_masked):
                numpyro.sample(
                    "arrived",
                    dist.Bernoulli(logits=logits(height) + order),
                    obs=jnp.zeros(room, int),
                )

    logits = lambda height: jax.nn.logsumexp(height, -1)
    return model


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("edit", "named"),
    [
        ("noise is not standard", "spark"),
        ("later slots", "height"),
        ("not affine", "height"),
        ("no function", "lost"),
        ("no mask", "lost"),
        ("order counts", "where"),
    ],
    ids=["scale", "later", "cubic", "function", "mask", "order"],
)
def test_other_models_are_refused_by_name(edit, named):
    program = Program(edited(edit), TOTAL)
    with pytest.raises(StructureError, match=named):
        read_history(program).prove(program, random.key(0))


def test_a_count_whose_prior_is_learned_is_refused():
    """It ends at the capacity, and there what it depends on would be learned from that."""

    def learned(x, y, capacity=6):
        return archipelago(
            x, y, capacity=capacity, persistence=numpyro.sample("stay", dist.Beta(9.0, 1.0))
        )

    with pytest.raises(
        StructureError, match=r"site 'num_rejected': its prior depends on \['stay'\]"
    ):
        read_history(Program(learned, X, Y))


def test_a_scale_whose_support_moves_is_refused():
    def bounded(x, y, capacity=6):
        most = numpyro.sample("most", dist.Gamma(2.0, 1.0))
        return archipelago(x, y, capacity=capacity, amplitude=dist.Uniform(0.0, most))

    names = ["rejected_noise", "noise", "amplitude", "lengthscale"]
    program = Program(bounded, X, Y)
    with pytest.raises(
        StructureError, match=r"site 'amplitude': its support depends on \['most'\]"
    ):
        read_field(program, "rejected_noise", names)


@pytest.mark.slow
def test_sites_of_nobody_are_named():
    kernel = LatentHistory(archipelago)
    with pytest.raises(StructureError, match=r"'mean', 'scale', 'root'.* NUTS"):
        kernel.init(random.key(0), 0, None, (X, Y), {"capacity": 6})


def test_float32_is_refused():
    with jax.enable_x64(False), pytest.raises(ValueError, match="float64"):
        LatentHistory(beads, capacity="room").init(random.key(0), 0, None, (TOTAL,), {})


# Room.


def test_partners_are_each_others():
    for count in range(9):
        partner = np.asarray(_partners(jnp.asarray(count), 8))
        assert (partner[partner] == np.arange(8)).all()
        pairs = [(i, j) for i, j in enumerate(partner) if i < j]
        assert all(i < count <= j for i, j in pairs)
        assert len(pairs) == min(count, 8 - count)
