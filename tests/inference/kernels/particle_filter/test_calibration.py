"""Simulation-based calibration of the particle filter, run by the driver: a right one passes, one
with a slip at the same size fails.

Draws of a filter are exact as the number of particles grows; of 12 rows, 300 particles leave no
bias that 200 replicates could see. Cost: about a second a replicate, most of it to lower the
compiled loop anew for each run.
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.special import betaln, gammaln

from diagnostics.calibration import on_host, sbc
from inference import Driver, ParticleFilter, Program
from inference.kernels.particle_filter import particles
from inference.reading.crp_mixture import Partition
from zoo.aclass import aclass

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("numpyro_promotion")]

X = np.zeros((12, 3))  # only the shape counts, and what is missing
X[3, 1] = np.nan
X[7] = np.nan


def model(x):
    """AClass whose first class is more common, so that the two can be told apart."""
    return aclass(x, num_classes=2, gamma=jnp.array([3.0, 1.0]))


def quantities(program, values):
    """Quantities that label switching leaves as they are.

    The log joint is that of all but the parameters of groups, up to a constant.
    """
    share, y, z = values["share"], values["y"], values["z"]
    # [row, class and group]
    member = ((y * len(z) + z)[:, None] == jnp.arange(2 * len(z))).astype(share.dtype)
    rows, x = member.sum(0), jnp.asarray(program.arguments["x"])
    ones, zeros = (member.T @ jnp.where(jnp.isnan(x), 0, seen) for seen in (x, 1 - x))
    in_class = rows.reshape(2, -1).sum(1)
    groups = jnp.sum(jnp.where(rows > 0, gammaln(jnp.maximum(rows, 1)), 0)) - jnp.sum(
        gammaln(1 + in_class)
    )
    features = jnp.sum(betaln(0.5 + ones, 0.5 + zeros) - betaln(0.5, 0.5))
    return {
        "share": share[0],
        "groups": jnp.sum(rows > 0),
        "together": jnp.stack([(y[i] == y[j]) & (z[i] == z[j]) for i, j in ((0, 1), (4, 11))]),
        "in the first class": in_class[0],
        "log joint": jnp.sum((jnp.array([2.0, 0.0]) + in_class) * jnp.log(share))
        + groups
        + features,
    }


@cache
def read():
    """Once, and not for each replicate."""
    return ParticleFilter(model, num_particles=300).read(Program(model, X))[0]


def calibrate():
    """Draws of the filter, ranked with those of the prior that the data come from."""
    kernel = ParticleFilter(model, num_particles=300)
    kernel.read = lambda program: (read(), read().data(program))

    def fit(rng_key, program):
        return Driver(kernel, num_samples=63, progress_bar=False).run(rng_key, **program.arguments)

    return sbc(model, on_host(fit), X, quantities=quantities, num_replicates=200)


def test_draws_of_the_filter_are_calibrated():
    calibration = calibrate()
    assert calibration.passed, calibration.text


def classes_not_counted(patch):
    """Each row has the class probabilities of the first."""
    patch.setattr(
        particles,
        "log_class",
        lambda rules, weights, count: jnp.broadcast_to(
            jnp.log(weights / weights.sum()), count.shape
        ),
    )


def twice_the_concentration(patch):
    parameters = Partition.parameters

    def slip(self, scalars):
        found = parameters(self, scalars)
        return found._replace(seating=jax.tree.map(lambda leaf: 2 * leaf, found.seating))

    patch.setattr(Partition, "parameters", slip)


@pytest.mark.parametrize("slip", [classes_not_counted, twice_the_concentration])
def test_a_slip_is_seen(slip, monkeypatch):
    read()  # before the slip, which would be refused
    slip(monkeypatch)
    calibration = calibrate()
    assert not calibration.passed, calibration.text
