"""A model as one program: operation by operation, hundreds would be compiled."""

import jax
from numpyro import handlers
from numpyro.infer.util import log_density


def log_joint(model, data, values):
    """The log joint density at `values` of the latent sites, with `data` as the keyword
    arguments.
    """
    return jax.jit(lambda values: log_density(model, (), data, values)[0])(values)


def traced(model, seed):
    """Values of the sites of a model that is given no data."""

    def values(key):
        trace = handlers.trace(handlers.seed(model, key)).get_trace()
        return {name: site["value"] for name, site in trace.items() if site["type"] == "sample"}

    return jax.jit(values)(jax.random.key(seed))


def simulated(simulate, seed, *args, **options):
    """What `simulate` gives for these arguments."""
    told = {}

    def arrays(key):
        told.update(simulate(key, *args, **options))
        return {name: value for name, value in told.items() if isinstance(value, jax.core.Tracer)}

    return told | jax.jit(arrays)(jax.random.key(seed))
