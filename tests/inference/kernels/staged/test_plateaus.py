"""Learning in stages where the likelihood is constant, or has plateaus: exact evidences, and an
end.
"""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from inference import DataTempering, Driver, Staged

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("x64", "numpyro_promotion")]

Y = np.array([1, 1, 0, 1, 0, 1, 1, 1, 0, 1, 1, 0])
KERNELS = {
    "stages": lambda model: Staged(model, num_stages=2, num_live=60, num_walkers=0),
    "stages, explored": lambda model: Staged(model, num_stages=2, num_live=60),
    "data tempering": lambda model: DataTempering(model, num_stages=2, num_particles=400),
}


def sided(above, below):
    """Rows whose chance depends on the side of 0 where x is, and on nothing else."""

    def model(y):
        x = numpyro.sample("x", dist.Normal(0.0, 1.0))
        with numpyro.plate("row", len(y)):
            numpyro.sample("y", dist.Bernoulli(probs=jnp.where(x > 0, above, below)), obs=y)

    return model


def exact(above, below):
    of = lambda p: Y.sum() * np.log(p) + (1 - Y).sum() * np.log1p(-p)
    return np.logaddexp(of(above), of(below)) - np.log(2)


@pytest.mark.parametrize("name", KERNELS, ids=KERNELS)
@pytest.mark.parametrize("chances", [(0.5, 0.5), (0.8, 0.3)], ids=["constant", "two plateaus"])
def test_evidence_of_plateaus(name, chances):
    tree = Driver(KERNELS[name](sided(*chances)), num_samples=400, progress_bar=False).run(0, Y)
    attrs, x = tree.attrs, tree["posterior"]["x"].values
    assert attrs["ended"] == "finished"
    assert abs(attrs["log_evidence"] - exact(*chances)) < 3.5 * attrs["log_evidence_se"] + 1e-6
    of = lambda p: Y.sum() * np.log(p) + (1 - Y).sum() * np.log1p(-p)
    share = 1 / (1 + np.exp(of(chances[1]) - of(chances[0])))
    # of a constant likelihood live points are all there is
    assert abs((x > 0).mean() - share) < 3.5 / np.sqrt(4 * 60)
