"""The proof that a partition was read right: identity (1) of `inference.partition`, block by block, on a few rows; and that what was
read there holds for others, whatever is in them and however many there are.

A model may be another one at some values: `clip(p, 0.1, 0.9)`, `maximum(rate, 0.3)`. So parameters lie further from the middle of their
support in each proof, in the last from about .001 to .999, or to 1000."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random

from inference._mixture_trace import by_class, columns, labels_of, sites_of_labels, term
from inference._once import once
from inference.sites import StructureError, unwrap

if TYPE_CHECKING:
    from inference.distributions import ExchangeablePartition
    from inference.partition import Block, Partition
    from inference.program import Program

__all__ = ["prove", "prove_for"]

SPREADS = (1.0, 4.0, 14.0)  # one for each proof
BOUNDS = (1, 2, 3, 8)  # on the groups of a class, one for each partition whose rows are seated
TOLERANCE = {"float64": 1e-6, "float32": 3e-4}


def prove(partition: "Partition") -> None:
    """Raises StructureError, by the name of the site, where a block is not the conjugate one that it looks like."""
    for site, gap in _above_tolerance(_gaps, partition):
        block = next((block for block in partition.blocks if block.site == site), None)
        what = "the partition" if site == partition.z else "the class of each row"
        read = f"read as {', '.join(map(repr, block.priors))} -> {block.family.likelihood}" if block else f"read as {what}"
        look = (
            "term that one of its log_prob and log_seating has and the other has not, or for a scale"
            if site == partition.z
            else f"parameter that is transformed, scaled, shared between groups, indexed by something else than {partition.z!r}, or whose "
            f"prior differs between groups"
        )
        raise StructureError(
            f"site {site!r}: {read}, but the log joint of the model misses the conjugate one by {gap:.2g} (relative). Look for a {look}."
        )


def prove_for(others: "Program", partition: "Partition") -> None:
    """Raises StructureError where the numbers of a prior are different ones on the other rows of this program."""
    for site, move in _above_tolerance(_moves, partition, others):
        raise StructureError(
            f"site {site!r}: the numbers of its prior follow the rows: on {others.sites[partition.z].shape[0]} others they are off by "
            f"{move:.2g} (relative). Wanted numbers that hold for any rows; compute them outside of the model, and give them as arguments."
        )


def _above_tolerance(answers: Callable[..., dict[str, Array]], partition: "Partition", *others: "Program") -> list[tuple[str, float]]:
    """The sites at which an answer is too large, and the largest. In single precision a spread of many columns, or a number far from the
    others, looks like a wrong identity; in double precision it does not."""
    found = _worst(answers, partition, *others)
    if not found or jax.config.read("jax_enable_x64"):
        return found
    try:
        with jax.enable_x64(True):
            return _worst(answers, replace(partition, few=_in_double(partition.few)), *map(_in_double, others))
    except (TypeError, jax.errors.JaxRuntimeError):  # the model has arrays of its own in single precision: what was found stands
        return found


def _worst(answers: Callable[..., dict[str, Array]], partition: "Partition", *others: "Program") -> list[tuple[str, float]]:
    compiled = once(lambda key, spread: answers(partition, *others, key, spread), random.key(0), jnp.ones(()))
    keys = random.split(random.key(0), len(SPREADS))
    found = [jax.device_get(compiled(key, jnp.asarray(spread, float))) for key, spread in zip(keys, SPREADS, strict=True)]
    worst = {site: max(np.inf if np.isnan(each[site]) else float(each[site]) for each in found) for site in found[0]}
    return [(site, size) for site, size in worst.items() if size > TOLERANCE[found[0][site].dtype.name]]


def _in_double(program: "Program") -> "Program":
    """The same model, its arguments in double precision."""
    is_single = lambda leaf: isinstance(leaf, np.ndarray | Array) and leaf.dtype == np.float32
    more = lambda leaf: np.asarray(leaf, np.float64) if is_single(leaf) else leaf
    return program.with_arguments(**{name: jax.tree.map(more, value) for name, value in program.arguments.items()})


def _gaps(partition: "Partition", rng_key: Array, spread: Array) -> dict[str, Array]:
    start_key, z_key, seating_key = random.split(rng_key, 3)
    about_z = partition.few.sites[partition.z]
    z = random.randint(z_key, about_z.shape, 0, min(3, about_z.support.capacity))
    trace = partition.trace(partition.few, {partition.z: z}, start_key, spread)
    read = partition.parameters({name: trace[name]["value"] for name in partition.scalars})  # at other values of everything else
    gaps = {block.site: _gap(partition, block, trace, z, read.priors[block.site]) for block in partition.blocks}
    gaps[partition.z] = _gap_of_seating(trace[partition.z], read.seating, seating_key)
    if partition.labels:
        gaps[partition.labels] = _gap_of_classes(partition, trace, read.class_weights)
    return gaps


def _gap(partition: "Partition", block: "Block", trace: dict[str, dict], z: Array, prior: Any) -> Array:
    """The rows are added one after the other, each scored before it is added. `prior` has no groups: it must serve for all of them."""
    family, x, crp = block.family, columns(trace[block.site]), unwrap(trace[partition.z]["fn"])
    labels = labels_of(crp)
    hyper = jax.tree.map(lambda leaf: jnp.repeat(leaf[:, None], crp.capacity, axis=1), prior)

    def seen(carry, row):
        hyper, total = carry
        label, group, entry = row
        mine = jax.tree.map(lambda leaf: leaf[label, group], hyper)
        hyper = jax.tree.map(lambda leaf, new: leaf.at[label, group].set(new), hyper, family.add(mine, entry))
        return (hyper, total + jnp.sum(family.log_predictive(mine, entry))), None

    (hyper, right), _ = jax.lax.scan(seen, (hyper, jnp.zeros((), x.dtype)), (labels, z, x))
    values = tuple(by_class(trace[name]["value"], trace[name]["fn"], block.num_axes) for name in block.priors)
    terms = jnp.stack([term(trace[name]) for name in (block.site, *block.priors)])
    return _relative(jnp.sum(terms) - jnp.sum(family.log_prior(hyper, values)), right)


def _gap_of_seating(message: dict, seating: "ExchangeablePartition", rng_key: Array) -> Array:
    """The probabilities by which rows are seated, one after the other in random order, make up the term of the site: in random partitions
    of at most so many groups in a class as `BOUNDS` say."""
    labels = labels_of(unwrap(message["fn"]))
    rows, same_class = jnp.arange(len(labels)), labels[:, None] == labels
    bounds = np.minimum(BOUNDS, unwrap(message["fn"]).support.capacity)[:, None]
    each_drawn = jnp.floor(random.uniform(rng_key, (len(BOUNDS), len(rows))) * bounds)
    places = np.stack([np.random.default_rng(bound).permutation(len(rows)) for bound in BOUNDS])

    def gap(drawn: Array, place: Array) -> Array:
        first = jnp.argmax(same_class & (drawn[:, None] == drawn), axis=1)  # row of each group
        z = jnp.sum(same_class & (rows == first) & (rows < first[:, None]), axis=1, dtype=labels.dtype)  # in order of appearance
        is_mine = z[:, None] == rows  # [row, group]
        sizes = jnp.sum((same_class & (place < place[:, None]))[..., None] & is_mine, axis=1)  # of the groups when a row comes
        is_old = jnp.any(is_mine & (sizes > 0), axis=1, keepdims=True)
        terms = jax.nn.logsumexp(seating.log_seating(sizes), axis=1, where=jnp.where(is_old, is_mine, sizes == 0))
        return _relative(term({**message, "value": z}), jnp.sum(terms))

    return jnp.max(jax.vmap(gap)(each_drawn, places))


def _gap_of_classes(partition: "Partition", trace: dict[str, dict], weights: Array) -> Array:
    """The same identity for the classes themselves, whose prior is Dirichlet or fixed."""
    classes = labels_of(unwrap(trace[partition.z]["fn"]))
    counts = jnp.zeros(partition.num_classes).at[classes].add(1.0)
    terms = jnp.stack([term(trace[name]) for name in sites_of_labels(trace, partition.labels or "")])
    if not partition.shares:
        return _relative(jnp.sum(terms), jnp.sum(counts * jnp.log(weights)))
    shares, lgamma = trace[partition.shares]["value"], jax.scipy.special.gammaln
    log_z = lambda a: jnp.sum(lgamma(a)) - lgamma(jnp.sum(a))
    posterior = jnp.sum((weights + counts - 1) * jnp.log(shares)) - log_z(weights + counts)
    return _relative(jnp.sum(terms) + term(trace[partition.shares]) - posterior, log_z(weights + counts) - log_z(weights))


def _moves(partition: "Partition", others: "Program", rng_key: Array, spread: Array) -> dict[str, Array]:
    """How far the numbers of each prior are from those on other rows, at the same latent scalars."""
    here = partition.trace(partition.few, {}, rng_key, spread)
    there = partition.trace(others, {name: here[name]["value"] for name in partition.scalars}, rng_key, spread)
    prior, other = partition.parameters_of(here), partition.parameters_of(there)
    moves = {site: _move(hyper, other.priors[site]) for site, hyper in prior.priors.items()}
    is_same_rule = jax.tree.structure(prior.seating) == jax.tree.structure(other.seating)
    moves[partition.z] = _move(prior.seating, other.seating) if is_same_rule else jnp.full((), jnp.inf)
    if partition.labels:
        moves[partition.labels] = _move(prior.class_weights, other.class_weights)
    return moves


def _move(one: Any, other: Any) -> Array:
    """Largest relative difference of two trees of arrays; infinite where their shapes differ."""
    pairs = list(zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))
    return jnp.max(jnp.stack([jnp.max(_relative(a, b)) if a.shape == b.shape else jnp.full((), jnp.inf, a.dtype) for a, b in pairs]))


def _relative(left: Array, right: Array) -> Array:
    return jnp.abs(left - right) / (1 + jnp.abs(left))
