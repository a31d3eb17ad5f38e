"""Cases of `tests.bench.same`: Markov chains."""

from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import xarray as xr
from numpyro.infer import NUTS, Gibbs, init_to_median

import zoo
from inference import CollapsedGibbs, ConditionalGibbs, LatentHistory
from tests.bench.same_cases import (
    Record,
    bits,
    case,
    chain,
    entries,
    islands,
    line_data,
    named,
    reals,
    together,
)
from tests.inference import mixtures
from tests.inference.models import LABELS, X, logistic
from zoo import aclass as parts
from zoo.bsvd import binomial_probit, gaussian

aclass = zoo.load("aclass").model
archipelago = zoo.load("archipelago").model
bsvd = zoo.load("bsvd").model
iqgme = zoo.load("iqgme").model


def of_partition(posterior: xr.Dataset) -> Record:
    return {"share": posterior["share"].values, "together": together(posterior["z"])}


@case(x64=False)
def collapsed_of_reals() -> Record:
    x, y = reals()
    kernel = partial(CollapsedGibbs, aclass, parameters=True)
    return chain(kernel, of_partition, x, y, component=parts.normal_inverse_chi2)


@case(x64=False)
def collapsed_of_bits() -> Record:
    return chain(partial(CollapsedGibbs, aclass, parameters=True), of_partition, *bits())


@case(x64=False)
def collapsed_beside_nuts() -> Record:
    """NUTS draws the concentration, and collapsed Gibbs draws the rest."""
    own = partial(CollapsedGibbs, aclass, parameters=True)
    kernel = lambda: Gibbs([(own(), ["z", "share", "p"]), (NUTS(aclass), ["alpha"])])
    seen = lambda posterior: of_partition(posterior) | named("alpha")(posterior)
    return chain(kernel, seen, *bits(), alpha=dist.Gamma(2.0, 2.0))


@case(x64=False)
def nuts_of_logistic() -> Record:
    return chain(partial(NUTS, logistic), named("scale", "weight", "norm"), X, LABELS)


@case()
def conditionals() -> Record:
    """Each site by itself."""
    kernel = partial(ConditionalGibbs, regression)
    x, y = line_data(30)
    return chain(kernel, named("noise", "precision", "weight"), x, y, draws=1000)


def regression(x: Any, y: Any) -> None:
    """Weights with a precision each."""
    noise = numpyro.sample("noise", dist.Gamma(1.0, 1.0))
    with numpyro.plate("feature", x.shape[1]):
        precision = numpyro.sample("precision", dist.Gamma(1.0, 1.0))
        weight = numpyro.sample("weight", dist.Normal(0.0, 1 / jnp.sqrt(precision)))
    with numpyro.plate("row", len(x)):
        numpyro.sample("y", dist.Normal(x @ weight, 1 / jnp.sqrt(noise)), obs=y)


CROSSED = {
    "num_components": 3,
    "a": 3.0,
    "alpha_s": dist.Gamma(5.0, 5.0),
    "precision": dist.Gamma(5.0, 5.0),
    "intercept": dist.Normal(0.0, 1.0),
}


@case()
def conditionals_crossed() -> Record:
    model = {**CROSSED, **entries(), "link": partial(gaussian, alpha=dist.Gamma(10.0, 1.0))}
    kernel = partial(ConditionalGibbs, bsvd)
    return chain(kernel, named("rank", "alpha", "alpha_s"), draws=1000, **model)


@case()
def conditionals_crossed_probit() -> Record:
    """Successes among trials, and factors of which means and precisions are learned."""
    model = {**CROSSED, **entries(), "link": binomial_probit, "learn_factors": True}
    model["trials"] = np.arange(len(model["value"])) % 5 + 1
    model["value"] = np.minimum(np.digitize(model["value"], [-0.7, 0.0, 0.7]), model["trials"])
    kernel = partial(ConditionalGibbs, bsvd)
    return chain(kernel, named("rank", "intercept", "alpha_s"), draws=300, **model)


@case()
def conditionals_of_mixture() -> Record:
    x, y = reals(rows=24)
    kernel = partial(ConditionalGibbs, iqgme)
    seen = lambda posterior: named("alpha")(posterior) | {"together": together(posterior["z"])}
    model = {"num_experts": 4, "alpha": dist.Gamma(3.0, 2.0), "expert": mixtures.KNOWN}
    return chain(kernel, seen, x, y, **model)


@case()
def history() -> Record:
    """Beside NUTS of the base density."""
    own = ("num_rejected", "rejected", "rejected_noise", "noise", "amplitude", "lengthscale")
    nuts = partial(NUTS, archipelago, max_tree_depth=4, init_strategy=init_to_median)
    kernel = lambda: Gibbs([(LatentHistory(archipelago), own), (nuts(), None)])
    seen = named("num_rejected", "amplitude", "lengthscale", "function", "mean", "scale")
    model = {"capacity": 32, "amplitude": dist.LogNormal(0.5, 0.2), "persistence": 0.7}
    return chain(kernel, seen, *islands(), warmup=50, draws=200, **model)
