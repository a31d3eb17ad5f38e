"""Every refusal, by the name of the site: models edited out of what a conditional can be read
from.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random

from inference.program.program import Program
from inference.reading.conditional import NORMAL, StructureError, _refusal, identify
from tests.inference.conjugate import LABELS, ROWS, Y, location

pytestmark = pytest.mark.usefixtures("x64", "numpyro_promotion")


def edit(prior=None, likelihood=None, plate=True):
    """The model `x ~ prior, y ~ likelihood(x)` with a site 'x' in a plate of rows."""

    def model():
        with numpyro.plate("row", ROWS):
            x = numpyro.sample("x", prior)
            if plate:
                numpyro.sample("y", likelihood(x), obs=Y)
        if not plate:
            numpyro.sample("y", likelihood(x), obs=Y[0])

    return model


def through(prior, link):
    def model():
        x = numpyro.sample("x", prior)
        with numpyro.plate("row", ROWS):
            numpyro.sample("labels", link(x), obs=LABELS % 2)

    return model


def cut_by_a_label():
    x = numpyro.sample("x", dist.Normal(0.0, 1.0).expand([ROWS]).to_event(1))
    numpyro.sample("label", dist.Delta((x > 0).astype(int), event_dim=1), obs=np.ones(ROWS, int))


def bounds_another():
    x = numpyro.sample("x", dist.Gamma(2.0, 1.0))
    numpyro.sample("below", dist.Uniform(0.0, x))


def subsampled():
    x = numpyro.sample("x", dist.Normal(0.0, 1.0))
    with numpyro.plate("row", 100, subsample_size=ROWS):
        numpyro.sample("y", dist.Normal(x, 1.0), obs=Y)


def many_coupled_labels():
    with numpyro.plate("row", 300):
        x = numpyro.sample("x", dist.Bernoulli(0.5))
    numpyro.sample("total", dist.Normal(x.sum(), 1.0), obs=3.0)


normal, unit = (lambda x: dist.Normal(x, 1.0)), (lambda x: dist.Normal(0.0, x**-0.5))
REFUSED = {
    "Laplace prior": (edit(dist.Laplace(0.0, 1.0), normal), "Normal misses by"),
    "Laplace likelihood": (
        edit(dist.Normal(0.0, 1.0), lambda x: dist.Laplace(x, 1.0)),
        "'y' .Laplace. depends on it",
    ),
    "StudentT likelihood": (
        edit(dist.Normal(0.0, 1.0), lambda x: dist.StudentT(4.0, x, 1.0)),
        "'y' .StudentT. depends on it",
    ),
    "Cauchy prior": (edit(dist.Cauchy(0.0, 1.0), normal), "Its prior is Cauchy"),
    "Normal through exp": (
        edit(dist.Normal(0.0, 1.0), lambda x: dist.Normal(jnp.exp(x), 1.0)),
        "NUTS",
    ),
    "improper": (
        edit(dist.ImproperUniform(dist.constraints.real, (), ()), lambda x: dist.Normal(0.0, 1.0)),
        "is impossible",
    ),
    "LogNormal prior": (
        edit(dist.LogNormal(0.0, 1.0), unit),
        "Gamma is impossible.*Its prior is LogNormal",
    ),
    "HalfCauchy prior": (edit(dist.HalfCauchy(1.0), unit), "Its prior is HalfCauchy"),
    "Gamma on a scale": (
        edit(dist.Gamma(2.0, 1.0), lambda x: dist.Normal(0.0, x)),
        "Gamma misses by.*inverse Gamma is impossible",
    ),
    "coupled Gammas": (
        edit(dist.Gamma(2.0, 1.0), lambda x: dist.Normal(0.0, x.sum() ** -0.5), plate=False),
        "Gamma misses by",
    ),
    "coupled Betas": (
        edit(dist.Beta(2.0, 3.0), lambda x: dist.Normal(x.mean(), 0.1), plate=False),
        "Beta is impossible, truncated Normal misses by",
    ),
    "Beta squared": (
        through(dist.Beta(2.0, 3.0), lambda x: dist.Bernoulli(0.5 * x)),
        "Beta misses by",
    ),
    "logit link": (
        through(dist.Normal(0.0, 1.0), lambda x: dist.Bernoulli(logits=x)),
        "'labels' .BernoulliLogits. depends on it",
    ),
    "Dirichlet through softmax": (
        through(dist.Dirichlet(jnp.ones(3)), lambda x: dist.Categorical(logits=x)),
        "Dirichlet is impossible",
    ),
    "many coupled labels": (many_coupled_labels, "Bernoulli misses by"),
    "a label that cuts": (cut_by_a_label, "cuts its support"),
    "a support that depends": (bounds_another, "the support of 'below' depends on it"),
    "a subsampled plate": (subsampled, "plate 'row' shows 6 of 100 rows"),
    "another support": (
        through(dist.Poisson(3.0), lambda x: dist.Bernoulli(0.5)),
        "Poisson has the support.*wanted",
    ),
}


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name):
    model, text = REFUSED[name]
    program = Program(model)
    values = (
        {"x": jnp.full(ROWS, 0.5)}
        if model is cut_by_a_label
        else program.draw_initial(random.key(0))
    )
    with pytest.raises(StructureError, match=f"site 'x'.*({text})"):
        identify(program, "x", values, random.key(1))


def test_a_site_that_is_not_there():
    with pytest.raises(
        StructureError, match=r"site 'men': no latent site of location; it has \['mean'\]"
    ):
        identify(Program(location), "men", {"mean": jnp.array(0.0)}, random.key(0))


@pytest.mark.parametrize(
    "cut", [lambda x: x > 3, lambda x: abs(x) < 6], ids=["near a start", "near the conditional"]
)
def test_a_factor_that_cuts_the_support(cut):
    def model():
        x = numpyro.sample("x", dist.Normal(4.0, 1.0))
        numpyro.factor("cut", jnp.where(cut(x), 0.0, -jnp.inf))
        numpyro.sample("y", dist.Normal(x, 1.0), obs=7.0)

    with pytest.raises(
        StructureError, match="site 'x': a factor or another site's support cuts its support"
    ):
        identify(Program(model), "x", {"x": jnp.array(5.0)}, random.key(0))


def test_a_small_gap_in_float32_is_put_down_to_rounding():
    with jax.enable_x64(False):
        assert "try numpyro.enable_x64()" in _refusal(Program(location), "mean", {NORMAL: 3e-3})
        assert "enable_x64" not in _refusal(Program(location), "mean", {NORMAL: 0.5})
