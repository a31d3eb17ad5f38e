"""A model in its two parts, the prior and the likelihood: that they are the model, and which
models have none.
"""

from contextlib import nullcontext

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.contrib.control_flow import scan

from inference import (
    DataTempering,
    ImportanceFinish,
    NestedSampler,
    Program,
    Staged,
    StructureError,
)
from inference.reading.density import Split
from tests.inference.nests import X, Y, line

pytestmark = pytest.mark.usefixtures("x64", "numpyro_promotion")


@pytest.mark.parametrize("bug", [False, True], ids=["right", "planted"])
def test_what_does_not_add_up_to_the_model_is_refused(bug, monkeypatch):
    """The planted bug: a prior without a Jacobian that it has."""
    split = Split(Program(line, X, Y))
    if bug:
        right = split.densities
        monkeypatch.setattr(
            Split,
            "densities",
            lambda self, z, *given: (right(z, *given)[0] - z.sum(), right(z, *given)[1]),
        )
    with (
        pytest.raises(
            StructureError, match=r"sites \['weight'\]: prior and likelihood do not add up"
        )
        if bug
        else nullcontext()
    ):
        split.prove()


def walk(y):
    """A random walk, with a scale of its own, each step of which is seen."""
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))

    def step(at, seen):
        at = numpyro.sample("at", dist.TruncatedNormal(at, scale, low=at - 3.0))
        numpyro.sample("y", dist.Normal(at, 1.0), obs=seen)
        return at, None

    scan(step, 0.0, y)


def test_latent_sites_in_a_scan_are_read():
    split = Split(Program(walk, jnp.linspace(0.0, 2.0, 5)))
    split.prove()
    values = split.values(split.draw(random.key(0)))
    assert {name: value.shape for name, value in values.items()} == {"scale": (), "at": (5,)}
    assert (np.diff(values["at"], prepend=0.0) > -3.0).all()


def rows(level, y):
    with numpyro.plate("row", len(y)):
        numpyro.sample("y", dist.Normal(level, 1.0), obs=y)


def improper(y):
    rows(numpyro.sample("level", dist.ImproperUniform(dist.constraints.real, (), ())), y)


def discrete(y):
    rows(2.0 * numpyro.sample("side", dist.Bernoulli(0.5)), y)


def factor(y):
    level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    numpyro.factor("penalty", -jnp.abs(level))
    rows(level, y)


KERNELS = {
    "Staged": lambda model: Staged(model, num_stages=2, num_live=20),
    "DataTempering": lambda model: DataTempering(model, num_stages=2, num_particles=20),
    "ImportanceFinish": lambda model: ImportanceFinish(NestedSampler(model, num_live=20)),
}


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(
    ("model", "site"),
    [(improper, "level"), (discrete, "side"), (factor, "penalty")],
    ids=["improper", "discrete", "factor"],
)
def test_what_builds_on_the_nested_sampler_refuses_by_name_too(name, model, site):
    kernel, program = KERNELS[name](model), Program(model, np.linspace(-1.0, 1.0, 20))

    def begin():
        kernel.init(random.key(0), *kernel.read(program))

    with pytest.raises(ValueError, match=f"site '{site}': "):
        begin()
