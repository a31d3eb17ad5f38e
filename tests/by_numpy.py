"""Models without a compiler: a few calls would be compiled for longer than they run."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from numpyro import handlers
from numpyro.infer.util import log_density

from inference.program.compiling import is_traced
from inference.program.interpreting import interpreted


def by_numpy(function: Callable) -> Callable:
    """The function, traced once for arguments of the same shapes, whose operations NumPy runs.

    It stands where `jax.jit(function)` would compile; code that is long is compiled all the same.
    """
    traced: dict[Any, Callable] = {}

    def call(*arguments: Any) -> Any:
        if is_traced(arguments):
            return function(*arguments)
        leaves, tree = jax.tree.flatten(arguments)
        types = tree, tuple(map(jax.typeof, leaves)), jax.config.jax_enable_x64
        if types not in traced:
            traced[types] = interpreted(function, *arguments)
        return jax.tree.map(jnp.asarray, traced[types](*arguments))

    return call


def log_joint(model, data, values):
    """The log joint density at `values` of the latent sites, with `data` as the keyword
    arguments.
    """
    return by_numpy(lambda values: log_density(model, (), data, values)[0])(values)


def sites_of(model, seed):
    """Values of the sites of a model that is given no data."""

    def values(key):
        trace = handlers.trace(handlers.seed(model, key)).get_trace()
        return {name: site["value"] for name, site in trace.items() if site["type"] == "sample"}

    return by_numpy(values)(jax.random.key(seed))


def simulated(simulate, seed, *args, **options):
    """What `simulate` gives for these arguments."""
    told = {}

    def arrays(key):
        told.update(simulate(key, *args, **options))
        return {name: value for name, value in told.items() if isinstance(value, jax.core.Tracer)}

    return told | by_numpy(arrays)(jax.random.key(seed))
