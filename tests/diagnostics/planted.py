"""Two small models, and kernels for them with and without a planted bug: what calibration must
tell apart.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax import Array, random
from numpyro.infer.mcmc import MCMCKernel
from numpyro.infer.util import log_density

from diagnostics.calibration import Calibration, geweke, sbc, with_kernel
from tests.inference import models


def waiting(y):
    """One positive site."""
    rate = numpyro.sample("rate", dist.LogNormal(0.0, 0.5))
    with numpyro.plate("row", len(y)):
        numpyro.sample("y", dist.Exponential(rate), obs=y)


def nested(y):
    """A site for each row, and their mean; each conditional is normal."""
    mean = numpyro.sample("mean", dist.Normal(0.0, 1.0))
    with numpyro.plate("row", len(y)):
        effect = numpyro.sample("effect", dist.Normal(mean, 1.0))
        numpyro.sample("y", dist.Normal(effect, 1.0), obs=y)


WAITING, NESTED = jnp.ones(4), jnp.arange(3.0)


class State(NamedTuple):
    z: dict[str, Array]
    rng_key: Array


class Tiny(MCMCKernel):
    """A kernel on few lines; `bug` plants its mistake."""

    sample_field = "z"

    def __init__(self, model, bug=False):
        self.model, self.bug = model, bug

    def init(self, rng_key, num_warmup, init_params, model_args, model_kwargs):
        start = {name: jnp.ones(()) for name in self.sites}
        return State(start if init_params is None else init_params, rng_key)

    def sample(self, state, model_args, model_kwargs):
        rng_key, move_key = random.split(state.rng_key)
        log_joint = lambda z: log_density(self.model, model_args, model_kwargs, z)[0]
        return State(self.move(move_key, state.z, log_joint, *model_args, **model_kwargs), rng_key)


class Uneven(Tiny):
    """Metropolis: rate' ~ Uniform(rate / 3, 3 rate).

    Bug: the ratio of the proposal densities is left out.
    """

    sites = ("rate",)

    def move(self, rng_key, z, log_joint, y):
        propose_key, accept_key = random.split(rng_key)
        new = {"rate": z["rate"] * random.uniform(propose_key, minval=1 / 3, maxval=3.0)}
        ratio = (
            log_joint(new) - log_joint(z) + (0.0 if self.bug else jnp.log(z["rate"] / new["rate"]))
        )
        return {"rate": jnp.where(random.exponential(accept_key) > -ratio, new["rate"], z["rate"])}


class LogWalk(Tiny):
    """A random walk of log(rate), unconstrained like NUTS.

    Bug: the target lacks the Jacobian of exp.
    """

    sites = ("rate",)

    def move(self, rng_key, z, log_joint, y):
        walk_key, accept_key = random.split(rng_key)
        target = lambda z: (
            log_joint({"rate": jnp.exp(z["rate"])}) + (0.0 if self.bug else z["rate"])
        )
        new = {"rate": z["rate"] + 0.8 * random.normal(walk_key)}
        return {
            "rate": jnp.where(
                random.exponential(accept_key) > target(z) - target(new), new["rate"], z["rate"]
            )
        }

    def postprocess_fn(self, model_args, model_kwargs):
        return lambda z: {"rate": jnp.exp(z["rate"])}


class Conditionals(Tiny):
    """Gibbs: the effects, then their mean.

    Bug: the variance of the mean's conditional is doubled.
    """

    sites = ("mean", "effect")

    def init(self, rng_key, num_warmup, init_params, model_args, model_kwargs):
        start = {"mean": jnp.zeros(()), "effect": jnp.zeros(len(model_args[0]))}
        return State(start if init_params is None else init_params, rng_key)

    def move(self, rng_key, z, log_joint, y):
        effect_key, mean_key = random.split(rng_key)
        effect = (z["mean"] + y) / 2 + 0.5**0.5 * random.normal(effect_key, (len(y),))
        variance = (2.0 if self.bug else 1.0) / (len(y) + 1)
        return {
            "mean": effect.sum() / (len(y) + 1) + variance**0.5 * random.normal(mean_key),
            "effect": effect,
        }


CASES = {  # name -> model, data, kernel, thinning that makes its draws nearly independent
    "a wrong proposal ratio": (waiting, WAITING, Uneven, 20),
    "a missing Jacobian": (waiting, WAITING, LogWalk, 20),
    "a conditional off by a factor 2": (nested, NESTED, Conditionals, 5),
}
NUM_REPLICATES = 1000  # see tests/bench/calibration.md
NUM_STEPS = 10
NUM_DRAWS = 63


def calibrate(
    test: str, case: str, bug: bool, num_replicates: int = NUM_REPLICATES, **settings
) -> Calibration:
    """One of the tests on one of the kernels."""
    model, y, kernel, thinning = CASES[case]
    make = lambda model: kernel(model, bug)
    if test == "geweke":
        return geweke(
            model, make, y, num_replicates=num_replicates, num_steps=NUM_STEPS, **settings
        )
    return sbc(
        model,
        with_kernel(make, 60, NUM_DRAWS * thinning, thinning),
        y,
        num_replicates=num_replicates,
        **settings,
    )


def repetitions(
    calibration: Calibration, size: int, alpha: float | None = None
) -> list[Calibration]:
    """Independent repetitions with `size` replicates each: the parts of a long one."""
    starts = range(0, calibration.num_replicates - size + 1, size)
    part = lambda start: {
        name: ranks[start : start + size] for name, ranks in calibration.ranks.items()
    }
    return [
        dataclasses.replace(calibration, ranks=part(start), alpha=alpha or calibration.alpha)
        for start in starts
    ]


def exact(y_scale=1.0, shift=0.0, num_draws=NUM_DRAWS):
    """Independent draws of the posterior of `normal_mean`, whose standard deviation is
    multiplied.
    """

    def fit(rng_key, program):
        y = program.arguments["y"]
        precision = models.SPREAD**-2 + len(y)
        noise = random.normal(rng_key, (num_draws,))
        return {"mu": y.sum() / precision + precision**-0.5 * (shift + y_scale * noise)}

    return fit


def prior_only(rng_key, program):
    """A fit that never looks at its data."""
    return program.draw_prior(rng_key, NUM_DRAWS)
