"""What a trace of a partition model says, in the axes that kernels work in: [class, group, column, ...] and [row, column, ...]."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array, random
from numpyro import handlers
from numpyro.distributions.util import scale_and_mask
from numpyro.infer import init_to_feasible

from inference.distributions import ExchangeablePartition
from inference.program import Program
from inference.sites import initial_value, unwrap

__all__ = ["by_class", "columns", "kinds", "labelled", "labels_of", "sites_of_labels", "started", "term"]


def started(program: Program, z: str, given: Mapping[str, Any], rng_key: Array | None, spread: Any = 1.0) -> dict[str, dict]:
    """The trace with every latent site at a start: `given`, or the partition of one group in each class, or drawn; without a key at 0
    in unconstrained space, so that what is computed from it is the same to the last bit whatever the number of rows. What is drawn lies
    within `spread` / 2 of that, but for matrices: a spread of many columns is to be inverted."""
    one_group = jnp.zeros(program.sites[z].shape, jnp.int32)  # asked before the model runs, which may be a first time

    def start(message):
        name = message["name"]
        if name in given or name == z:
            return given.get(name, one_group)
        is_matrix = message["type"] == "sample" and unwrap(message["fn"]).event_dim > 1
        value = initial_value(message, radius=0.5 if is_matrix else 0.5 * spread)
        return value if value is None or rng_key is not None else init_to_feasible(message)

    seeded = handlers.seed(program.model, random.key(0) if rng_key is None else rng_key)
    model = handlers.substitute(seeded, substitute_fn=start)
    return handlers.trace(model).get_trace(*program.args, **program.kwargs)


def kinds(program: Program, z: str) -> dict[str, dict]:
    """The same trace run abstractly: only types and what is not an array may be looked at."""
    found: dict[str, dict] = {}

    def run(rng_key):
        found.update(started(program, z, {}, rng_key))

    jax.eval_shape(run, random.key(0))
    return found


def term(message: dict) -> Array:
    """The summed log probability of a site, its scale applied."""
    return jnp.sum(scale_and_mask(message["fn"].log_prob(message["value"]), message["scale"]))


def by_class(leaf: Array, fn: dist.Distribution, num_axes: int) -> Array:
    """[class, group, column, ...] from an array over the elements of a group parameter, whose first axes are class and group, or group."""
    leaf = leaf if num_axes == 2 else leaf[None]
    num_elements_axes = len(fn.shape()) - unwrap(fn).event_dim  # those that `to_event` declared included
    return leaf if num_elements_axes > num_axes else jnp.expand_dims(leaf, 2)


def columns(message: dict) -> Array:
    """[row, column, ...] from the value of an observed site."""
    value = jnp.asarray(message["value"])
    value = value if jnp.issubdtype(value.dtype, jnp.inexact) else value.astype(float)
    return value if value.ndim - unwrap(message["fn"]).event_dim > 1 else value[:, None]


def labels_of(partition: ExchangeablePartition) -> Array:
    """The class of each row, as the partition has it."""
    return jnp.broadcast_to(jnp.asarray(partition.labels, jnp.int32), partition.num_rows)


def sites_of_labels(trace: Mapping[str, dict], name: str) -> list[str]:
    """The sample sites behind the classes: one, or the two into which `obs_mask` splits it."""
    return [site for site in (name, f"{name}_observed", f"{name}_unobserved") if site in trace and trace[site]["type"] == "sample"]


def labelled(trace: Mapping[str, dict], name: str | None, num_rows: int) -> Array:
    """Which rows have an observed class."""
    if name is None:
        return jnp.ones(num_rows, bool)
    if f"{name}_observed" not in trace:
        return jnp.full(num_rows, trace[name]["is_observed"])
    fn = trace[f"{name}_observed"]["fn"]
    while not isinstance(fn, dist.MaskedDistribution):
        fn = fn.base_dist
    return jnp.broadcast_to(jnp.asarray(fn._mask), num_rows)
