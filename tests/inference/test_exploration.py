"""Walkers of a stage end where the posterior is; and whatever they find, the evidence is right."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random

from inference import Driver, Program, Staged
from inference.kernels import _exploration, staged
from inference.kernels._exploration import explored
from inference.kernels._nested_moves import Points
from inference.kernels._summary import Told
from inference.split import Split
from tests.inference.nests import line, line_evidence
from tests.inference.stages import DEVIATION, MEAN, X, Y

pytestmark = pytest.mark.usefixtures("x64", "numpyro_promotion")


def ends(size=400):
    """Where walkers are in the end; they began as draws from the prior."""
    split = Split(Program(line, X, Y))
    z = jnp.stack([split.draw(key) for key in random.split(random.key(0), size)])
    start = Points(z, *map(jnp.stack, zip(*map(split.densities, z), strict=True)), jnp.zeros(size))
    return explored(random.key(1), start, lambda _: split.densities, None, 1.0)


@pytest.mark.parametrize("bug", [False, True], ids=["right", "planted"])
def test_walkers_end_where_the_posterior_is(bug, monkeypatch):
    """The planted bug: walks look at the prior alone, and go back to it."""
    if bug:
        monkeypatch.setattr(_exploration, "powered", lambda log_likelihood, power: 0.0 * log_likelihood)
        monkeypatch.setattr(_exploration, "next_exponent", lambda log_likelihood, exponent, share: exponent + 0.5)
    found = ends()
    assert float(found.exponent) == 1
    off = np.abs(np.asarray(found.at.z).mean(0) - MEAN) / DEVIATION
    assert (off.max() < 0.3 and np.allclose(np.asarray(found.at.z).std(0), DEVIATION, rtol=0.2)) != bug


def evidence(model=line, data=(X, Y), **settings):
    """Of one stage: how far it is from the exact one, where there is one, and the claimed error."""
    kernel = Staged(model, **({"num_stages": 1, "num_live": 100, "num_walkers": 100} | settings))
    attrs = Driver(kernel, num_samples=1, progress_bar=False).run(0, *data).attrs
    return attrs["log_evidence"], attrs["log_evidence_se"]


@pytest.mark.slow
@pytest.mark.parametrize("bug", [False, True], ids=["right", "planted"])
def test_what_walkers_have_missed_changes_no_evidence(bug, monkeypatch):
    """They are told to be three deviations from where they are. The planted bug: the likelihood is left as it is, though what is drawn from
    is not the prior."""
    lost = lambda *given: (found := explored(*given))._replace(at=found.at._replace(z=found.at.z + 3 * DEVIATION))
    monkeypatch.setattr(staged, "explored", lost)
    monkeypatch.setattr(staged, "BELIEVED", 0.0)
    monkeypatch.setattr(Staged, "_told", lambda self, z, *given: (Told(z), 0))  # slopes would tell where the posterior is
    if bug:
        right = Staged._densities

        def wrong(self, clumps, program, sampled=None):
            both = right(self, clumps, program, sampled)
            return lambda z: (both(z)[0], right(self, clumps, program)(z)[1])

        monkeypatch.setattr(Staged, "_densities", wrong)
    found, error = evidence()
    assert (abs(found - line_evidence(X, Y)) < 3.5 * error) != bug


def pair(x):
    """Two clusters without names."""
    with numpyro.plate("cluster", 2):
        place = numpyro.sample("place", dist.Normal(0.0, 4.0))
    with numpyro.plate("row", len(x)):
        numpyro.sample("x", dist.MixtureSameFamily(dist.Categorical(jnp.array([0.5, 0.5])), dist.Normal(place, 1.0)), obs=x)


TWO = np.concatenate([np.linspace(-3, -1, 8), np.linspace(1.5, 3.5, 8)])


def pair_evidence():
    """By a sum over a grid."""
    grid = np.linspace(-16, 16, 801)
    each = np.exp(-0.5 * (TWO[:, None] - grid) ** 2) / np.sqrt(2 * np.pi)
    log_likelihood = np.log(0.5 * each[:, :, None] + 0.5 * each[:, None, :]).sum(0)
    log_prior = -0.5 * (grid / 4) ** 2 - np.log(4 * np.sqrt(2 * np.pi))
    return np.log(np.exp(log_likelihood + log_prior[:, None] + log_prior[None]).sum() * (grid[1] - grid[0]) ** 2)


@pytest.mark.slow
def test_the_evidence_of_members_without_names_is_that_of_all_places():
    found, error = evidence(pair, (TWO,), num_live=400, num_walkers=400)
    assert abs(found - pair_evidence()) < 3.5 * error
    assert error < 0.15


@pytest.mark.parametrize("bug", [False, True], ids=["right", "planted"])
def test_members_without_names_may_change_places_in_what_is_sampled(bug, monkeypatch):
    """The planted bug: what walkers have found is of one arrangement, where the model has two."""
    if bug:
        monkeypatch.setattr(staged, "for_all_places", lambda summary, exchange: summary)
    kernel, program = Staged(pair, num_stages=1), Program(pair, TWO)
    kernel._read(program)
    summary = kernel._backed.summary
    sampled = summary.fitted(random.key(0), Told(jnp.array([-2.0, 2.5]) + random.normal(random.key(1), (200, 2))), jnp.zeros(200), 1)
    densities = kernel._densities(summary.nothing(0), program, sampled)
    one, other = np.array([-1.7, 2.2]), np.array([2.2, -1.7])
    assert np.allclose(densities(one), densities(other)) != bug


@pytest.mark.slow
def test_less_is_left_to_find_out():
    """Claimed errors with walkers are smaller than without."""
    assert evidence()[1] < 0.7 * evidence(num_walkers=0)[1]


@pytest.mark.parametrize(("believed", "places"), [(0.0, 8), (1.1, 0)], ids=["always", "never"])
def test_what_clumps_cannot_say_is_not_gone_over(believed, places, monkeypatch):
    """A state keeps what walkers have found where it is believed; their evaluations count in any case."""
    monkeypatch.setattr(staged, "BELIEVED", believed)
    kernel = Staged(line, num_stages=1, num_live=40, num_walkers=50)
    state = kernel.init(random.key(0), Program(line, X, Y))
    assert len(state.sampled.log_weight) == places
    assert int(state.nest.num_evaluations) > 50


def test_the_effective_share_of_draws():
    assert staged._effective_share(jnp.zeros(10)) == 1
    np.testing.assert_allclose(staged._effective_share(jnp.array([0.0, 0.0, -jnp.inf, -800.0])), 0.5)


@pytest.mark.parametrize("num_walkers", [-1, 5, True, 30.0, "many"])
def test_a_wrong_number_of_walkers_is_refused(num_walkers):
    with pytest.raises(ValueError, match=r"num_walkers: found .*, wanted None, 0, or an integer, at least 20"):
        Staged(line, num_walkers=num_walkers)
