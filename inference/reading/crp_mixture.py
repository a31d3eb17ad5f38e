"""Reads a mixture of one partition site and conjugate components, which can be integrated out.

    structure = read_partition(program)           # the part of each site, or StructureError
    hyper = structure.parameters({"alpha": 1.0})  # hyper-parameters, at these latent scalars
    rows = structure.rows(program)                # the data, one entry a row

The structure is found from types, shapes, plates and dependencies. It is then proved on a few rows,
at random parameters phi and assignments z, for each component:

    log p(phi) + log p(x | phi, z) - log p(phi | x, z)
        =  sum over rows of log p(row | rows before it, z)                                    (1)

On the left stand the model's own terms. The posterior and the right side come from the conjugate
pair, by the functions that a kernel then uses. As the identity must hold for all phi and z, it
checks the family, its normalisers, the indexing by z, missing entries and hyper-parameters at once.
Hyper-parameters must also be the same on other rows, and on another number of rows, because a
kernel reads them once.

Arrays of parameters have the axes [class, group, column, ...], those of data [row, column, ...].

Cost: a few traces of the model on at most `OTHERS` rows; the whole data are read, not traced.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array, random
from jaxtyping import Float, Int
from numpyro import handlers

from inference.distributions.partitions import ExchangeablePartition
from inference.program.compiling import is_arrays, is_traced
from inference.program.interpreting import interpreted
from inference.program.program import Program, num_entries
from inference.program.sites import StructureError, initial_value, model_name, require, unwrap
from inference.reading.conjugate.pairs import columns, term
from inference.reading.conjugate.table import ConjugatePair, pair_of
from inference.reading.proof import gap, gap_of_numbers, prove, random_settings

__all__ = [
    "ComponentBlock",
    "Parameters",
    "Partition",
    "PartitionRows",
    "grid_of",
    "labels_of",
    "read_partition",
    "sites_of_labels",
]


def _started(
    program: Program, z: str, given: Mapping[str, Any], rng_key: Array | None, spread: Any = 1.0
) -> dict[str, dict]:
    """The trace with every latent site at a start: given, or one group a class, or drawn.

    What is drawn lies within `spread` / 2 of 0 in unconstrained space. Matrices are drawn within
    1/2, so that they can be inverted. Without a key they are all at 0: what is computed from the
    start is then the same to the last bit, whatever the number of rows.
    """

    def start(message):
        name = message["name"]
        if name in given:
            return given[name]
        if name == z:
            return jnp.zeros(message["fn"].shape(), jnp.int32)
        is_matrix = message["type"] == "sample" and unwrap(message["fn"]).event_dim > 1
        radius = None if rng_key is None else 0.5 if is_matrix else 0.5 * spread
        return initial_value(message, radius)

    seeded = handlers.seed(program.model, random.key(0) if rng_key is None else rng_key)
    model = handlers.substitute(seeded, substitute_fn=start)
    return handlers.trace(model).get_trace(*program.args, **program.kwargs)


def _by_class(leaf: Array, fn: dist.Distribution, num_axes: int) -> Array:
    """A group parameter with the axes [class, group, column, ...].

    Args:
        leaf: An array over its elements, whose first axes are class and group, or group.
        fn: The distribution of the parameter.
        num_axes: 2 for class and group, 1 for group.
    """
    leaf = leaf if num_axes == 2 else leaf[None]
    # The axes that `to_event` declared are axes of columns too.
    num_element_axes = len(fn.shape()) - unwrap(fn).event_dim
    return leaf if num_element_axes > num_axes else jnp.expand_dims(leaf, 2)


def labels_of(partition: ExchangeablePartition) -> Array:
    """Returns the class of each row that the partition was given, [row]."""
    return jnp.broadcast_to(jnp.asarray(partition.labels, jnp.int32), partition.num_rows)


def sites_of_labels(trace: Mapping[str, dict], name: str | None) -> list[str]:
    """Returns the sample sites of the classes: one, or two where `obs_mask` splits it.

    Args:
        trace: A trace of the model.
        name: The site of the classes, or None.
    """
    names = [f"{name}{suffix}" for suffix in ("", "_observed", "_unobserved")]
    return [site for site in names if site in trace and trace[site]["type"] == "sample"]


FEW = 8  # rows on which the identities are proved
OTHERS = 12  # other rows, on which hyper-parameters must be the same
BOUNDS = (1, 2, 3, 8)  # the most groups of a class in each random partition of the proof
# Distances of latent values from the middle of their support; at the last, probabilities are
# between about .001 and .999.
SPREADS = (1.0, 4.0, 14.0)
TOLERANCE = {"float64": 1e-6, "float32": 3e-4}  # of the relative gap of an identity


class ComponentBlock(NamedTuple):
    """One observed site and the group parameters behind it."""

    site: str
    priors: tuple[str, ...]  # sites of the group parameters, in the order of the family
    family: ConjugatePair
    num_axes: int  # axes of a parameter before its columns: 2 for class and group, 1 for group


class Parameters(NamedTuple):
    """The hyper-parameters of a mixture."""

    seating: ExchangeablePartition  # without rows: its leaves are the parameters of the rule
    # [class]: Dirichlet concentration; fixed probabilities; or ones where the classes are data
    class_weights: Array
    priors: dict[str, Any]  # hyper-parameters of each block's site, [class, column, ...]


class PartitionRows(NamedTuple):
    """The data by row."""

    values: dict[str, Array]  # of each block's site, [row, column, ...], NaN where missing
    labels: Array  # class of each row, -1 where it is latent


@dataclass(frozen=True)
class Partition:
    """The part of each site of a model. Hashable, so that compiled code may depend on it."""

    few: Program  # the model on a few of its rows
    z: str
    labels: str | None  # the site of the classes; None where they are plain data
    shares: str | None  # the Dirichlet site behind them
    blocks: tuple[ComponentBlock, ...]
    scalars: tuple[str, ...]  # latent hyper-parameters, such as a random alpha
    num_classes: int
    max_groups: int | None

    def differences(self, program: Program) -> list[str]:
        """Returns how a program differs from the one that was read, apart from its rows.

        Each difference is a sentence.
        """
        if program.model is not self.few.model:
            return [f"the model is {model_name(program.model)}, was {model_name(self.few.model)}"]
        mine, found = self.few.arguments, program.arguments
        mine_by_row, found_by_row = self._by_row(self.few), self._by_row(program)
        words = [
            f"argument {name!r} is {'new' if name in found else 'missing'}"
            for name in sorted({*mine} ^ {*found})
        ]
        for name in (name for name in mine if name in found):
            old, new = mine[name], found[name]
            if name in mine_by_row and name in found_by_row:
                if old.shape[1:] != new.shape[1:]:
                    words.append(
                        f"argument {name!r} has {new.shape[1:]} a row, had {old.shape[1:]}"
                    )
            elif not _is_same(old, new):
                words.append(f"argument {name!r} is {new!r}, was {old!r}")
        return words

    @property
    def attributes(self) -> dict[str, str]:
        """For the tree: the site of the partition, and the site of its classes."""
        return {"partition": json.dumps([self.z, self.labels])}

    def by_row(self, programs: Sequence[Program]) -> tuple[str, ...]:
        """Returns the names of the arguments that have an entry for each row in all programs.

        The programs must differ in their rows only.
        """
        each = [self._by_row(program) for program in (self.few, *programs)]
        return tuple(name for name in each[0] if all(name in names for names in each))

    def _by_row(self, program: Program) -> dict[str, Any]:
        """The arguments with an entry for each row; the model is traced if lengths do not tell."""
        known = self.few.by_row(self.few.sites[self.z].shape[0])
        lengths = {num_entries(program.arguments.get(name)) for name in known}
        told = lengths.pop() if len(lengths) == 1 else None
        return program.by_row(program.sites[self.z].shape[0] if told is None else told)

    def trace(
        self,
        program: Program,
        given: Mapping[str, Any],
        rng_key: Array | None = None,
        spread: Any = 1.0,
    ) -> dict[str, dict]:
        """Returns a trace with some latent sites at given values, others at a start.

        Without a value of the partition, the rows of each class are in one group.

        Args:
            program: The model with its arguments.
            given: Values of latent sites.
            rng_key: For the start; None: the middle of each support.
            spread: How far the start lies from the middle.
        """
        return _started(program, self.z, given, rng_key, spread)

    def parameters(self, scalars: Mapping[str, Any]) -> Parameters:
        """Returns the hyper-parameters, at values of the latent scalars, which may be tracers."""
        return self.parameters_of(self.trace(self.few, scalars))

    def parameters_of(self, trace: Mapping[str, dict]) -> Parameters:
        """Returns the hyper-parameters in a trace."""
        return Parameters(
            unwrap(trace[self.z]["fn"]).without_rows(),
            self._class_weights(trace),
            {block.site: self._hyper(block, trace) for block in self.blocks},
        )

    def _hyper(self, block: ComponentBlock, trace: Mapping[str, dict]) -> Any:
        """Hyper-parameters of the first group of each class, [class, column, ...]."""
        sites = [trace[name] for name in block.priors]
        read = block.family.read(
            tuple(unwrap(site["fn"]) for site in sites), tuple(site["value"] for site in sites)
        )
        of_first = lambda leaf: _by_class(leaf, sites[0]["fn"], block.num_axes)[:, 0]
        return jax.tree.map(of_first, read)

    def rows(self, program: Program) -> PartitionRows:
        """Returns the data by row; raises ValueError for data outside of a likelihood's support."""
        rows, priors = self._look(program)
        for block in self.blocks:
            block.family.refuse(block.site, rows.values[block.site], priors[block.site])
        bad = np.flatnonzero((rows.labels < -1) | (rows.labels >= self.num_classes))
        if len(bad):
            raise ValueError(
                f"row {bad[0]}: found class {rows.labels[bad[0]]}, wanted 0 to "
                f"{self.num_classes - 1}, or -1 where unlabelled."
            )
        return rows

    def _look(self, program: Program) -> Any:
        """The data by row and the priors; rows of one shape share one trace of the model."""
        values = {name: program.arguments[name] for name in self.by_row([program])}
        if is_arrays(values) and not is_traced(values):
            types = tuple((name, jax.typeof(value)) for name, value in values.items())
            try:
                return _looking(self, types, jax.config.jax_enable_x64)(values)
            except (jax.errors.JAXTypeError, jax.errors.JAXIndexError):
                pass  # the model looks at values of its rows, so it is traced with them
        return interpreted(lambda: self._seen(program))()

    def _seen(self, program: Program) -> tuple[PartitionRows, dict[str, Any]]:
        trace = self.trace(program, {})
        return self.rows_of(trace), self.parameters_of(trace).priors

    def rows_of(self, trace: Mapping[str, dict]) -> PartitionRows:
        """Returns the data in a trace."""
        labels = labels_of(unwrap(trace[self.z]["fn"]))
        if f"{self.labels}_observed" in trace:  # split by `obs_mask`
            fn = trace[f"{self.labels}_observed"]["fn"]
            while not isinstance(fn, dist.MaskedDistribution):
                fn = fn.base_dist
            labels = jnp.where(jnp.asarray(fn._mask), labels, -1)
        elif self.labels and not trace[self.labels]["is_observed"]:
            labels = jnp.full_like(labels, -1)
        return PartitionRows(
            {block.site: columns(trace[block.site]) for block in self.blocks}, labels
        )

    def _class_weights(self, trace: Mapping[str, dict]) -> Array:
        if self.shares:
            return unwrap(trace[self.shares]["fn"]).concentration
        if self.labels is None:
            return jnp.ones(self.num_classes)
        fn = unwrap(trace[sites_of_labels(trace, self.labels)[0]]["fn"])
        codes = jnp.arange(self.num_classes).reshape(-1, *(1,) * len(fn.batch_shape))
        return jnp.exp(fn.log_prob(codes).reshape(self.num_classes, -1)[:, 0])


@lru_cache(maxsize=16)
def _looking(partition: Partition, types: tuple, x64: bool) -> Callable:
    """A function of the arguments with an entry for each row, traced for arguments of `types`."""
    shapes = {name: jax.ShapeDtypeStruct(of.shape, of.dtype) for name, of in types}
    return interpreted(
        lambda values: partition._seen(partition.few.with_arguments(**values)), shapes
    )


def read_partition(program: Program) -> Partition:
    """Returns the structure of a model, proved.

    Raises StructureError, which names the site, where a group cannot be integrated out.
    """
    z = _partition_site(program)
    few = program if program.sites[z].shape[0] <= FEW else _some_rows(program, z, FEW)
    trace: dict[str, dict] = {}  # abstract: only types and what is not an array may be looked at
    label_site = _label_site(few, z, trace)
    crp = unwrap(trace[z]["fn"])
    label_sites = sites_of_labels(trace, label_site)
    blocks = _blocks(few, z, trace, label_sites)
    shares = _shares(few, label_sites)
    known = {z, *label_sites, shares, *(name for block in blocks for name in block.priors)}
    scalars = tuple(name for name in few.latent if name not in known)
    for name in scalars:
        require(
            not few.sites[name].shape,
            f"site {name!r}: latent, of shape {few.sites[name].shape}, and no parameter of a "
            "group; wanted group parameters with "
            f"conjugate priors, and scalars. Move {name!r} into the plates of class and group, "
            "or fix it.",
        )
    known |= {block.site for block in blocks}
    for name in (name for name in (*few.observed, *few.factors) if name not in known):
        raise StructureError(
            f"site {name!r}: {few.sites[name].kind}, but no feature that depends on {z!r}; its "
            f"term would be left out. Index it by {z!r}, or take it out of the model."
        )
    found = Partition(few, z, label_site, shares, blocks, scalars, crp.num_classes, crp.max_groups)
    _prove(found, program)
    return found


# Proofs.


def _prove(partition: Partition, program: Program) -> None:
    """Raises StructureError where a block is not conjugate, or a prior depends on the rows."""
    z, settings = partition.z, random_settings(random.key(0), SPREADS)

    def refusal(site: str, missed: float) -> str:
        read_as = "the partition" if site == z else "the class of each row"
        suspect = (
            f"parameter that is transformed, scaled, shared between groups, indexed by something "
            f"else than {z!r}, or whose prior differs between groups"
        )
        for block in (block for block in partition.blocks if block.site == site):
            read_as = f"{', '.join(map(repr, block.priors))} -> {block.family.likelihood}"
        if site == z:
            suspect = "term that only one of its log_prob and log_seating has, or for a scale"
        return (
            f"site {site!r}: read as {read_as}, but the log joint of the model misses the "
            f"conjugate one by {missed:.2g} (relative). Look for a {suspect}."
        )

    try:
        identities = lambda few: partial(_gaps, replace(partition, few=few))
        prove(identities, settings, refusal, partition.few, tolerance=TOLERANCE)
    except StructureError:
        partition.rows(program)  # data outside of a support explain it better: they raise first
        raise
    others = _some_rows(program, z, OTHERS)
    prove(
        lambda few, others: partial(_gaps_on_other_rows, replace(partition, few=few), others),
        settings,
        lambda site, missed: (
            f"site {site!r}: the numbers of its prior depend on the rows: on "
            f"{others.sites[z].shape[0]} others they are off by {missed:.2g} (relative). Wanted "
            "numbers that hold for any rows; compute them outside of the model, and give them as "
            "arguments."
        ),
        partition.few,
        others,
        tolerance=TOLERANCE,
    )


def _gaps(partition: Partition, rng_key: Array, spread: Array) -> dict[str, Array]:
    start_key, z_key, seating_key = random.split(rng_key, 3)
    about_z = partition.few.sites[partition.z]
    z = random.randint(z_key, about_z.shape, 0, min(3, about_z.support.capacity))
    trace = partition.trace(partition.few, {partition.z: z}, start_key, spread)
    # at other values of everything else
    read = partition.parameters({name: trace[name]["value"] for name in partition.scalars})
    gaps = {
        block.site: _gap_of_block(partition, block, trace, z, read.priors[block.site])
        for block in partition.blocks
    }
    gaps[partition.z] = _gap_of_seating(trace[partition.z], read.seating, seating_key)
    if partition.labels:
        gaps[partition.labels] = _gap_of_classes(partition, trace, read.class_weights)
    return gaps


def _gap_of_seating(message: dict, seating: ExchangeablePartition, rng_key: Array) -> Array:
    """The gap between the probability of a partition and the product of its seating probabilities.

    Rows are seated in random order, in one random partition for each of `BOUNDS`.
    """
    labels = labels_of(unwrap(message["fn"]))
    rows, same_class = jnp.arange(len(labels)), labels[:, None] == labels
    bounds = np.minimum(BOUNDS, unwrap(message["fn"]).support.capacity)[:, None]
    each_drawn = jnp.floor(random.uniform(rng_key, (len(BOUNDS), len(rows))) * bounds)
    places = jnp.stack([np.random.default_rng(bound).permutation(len(rows)) for bound in BOUNDS])

    def missed(drawn: Float[Array, " row"], place: Int[Array, " row"]) -> Float[Array, ""]:
        first = jnp.argmax(same_class & (drawn[:, None] == drawn), axis=1)  # of each row's group
        z = jnp.sum(  # labels in order of appearance
            same_class & (rows == first) & (rows < first[:, None]), axis=1, dtype=labels.dtype
        )
        is_mine = z[:, None] == rows  # [row, group]
        # [row, group]: rows that were seated before
        sizes = jnp.sum((same_class & (place < place[:, None]))[..., None] & is_mine, axis=1)
        is_old = jnp.any(is_mine & (sizes > 0), axis=1, keepdims=True)
        terms = jax.nn.logsumexp(
            seating.log_seating(sizes), axis=1, where=jnp.where(is_old, is_mine, sizes == 0)
        )
        return gap(jnp.sum(terms), term({**message, "value": z}))

    return jnp.max(jax.vmap(missed)(each_drawn, places))


def _gap_of_block(
    partition: Partition, block: ComponentBlock, trace: dict[str, dict], z: Array, prior: Any
) -> Array:
    """Identity (1), with the same `prior` [class, ...] for all groups of a class."""
    family, x, crp = block.family, columns(trace[block.site]), unwrap(trace[partition.z]["fn"])
    labels = labels_of(crp)
    hyper = jax.tree.map(lambda leaf: jnp.repeat(leaf[:, None], crp.capacity, axis=1), prior)

    def add(carry, row):
        hyper, total = carry
        label, group, entry = row
        mine = jax.tree.map(lambda leaf: leaf[label, group], hyper)
        hyper = jax.tree.map(
            lambda leaf, new: leaf.at[label, group].set(new), hyper, family.add(mine, entry)
        )
        return (hyper, total + jnp.sum(family.log_predictive(mine, entry))), None

    (hyper, right), _ = jax.lax.scan(add, (hyper, jnp.zeros(())), (labels, z, x))
    values = tuple(
        _by_class(trace[name]["value"], trace[name]["fn"], block.num_axes) for name in block.priors
    )
    terms = jnp.stack([term(trace[name]) for name in (block.site, *block.priors)])
    return gap(right, jnp.sum(terms) - jnp.sum(family.log_prior(hyper, values)))


def _gap_of_classes(partition: Partition, trace: dict[str, dict], weights: Array) -> Array:
    """Identity (1) for the classes of the rows, whose probabilities are Dirichlet or fixed."""
    classes = labels_of(unwrap(trace[partition.z]["fn"]))
    counts = jnp.zeros(partition.num_classes).at[classes].add(1.0)
    log_prob = sum(term(trace[name]) for name in sites_of_labels(trace, partition.labels))
    if not partition.shares:
        return gap(jnp.sum(counts * jnp.log(weights)), log_prob)
    shares, lgamma = trace[partition.shares]["value"], jax.scipy.special.gammaln
    log_z = lambda a: jnp.sum(lgamma(a)) - lgamma(jnp.sum(a))
    posterior = jnp.sum((weights + counts - 1) * jnp.log(shares)) - log_z(weights + counts)
    log_prob = log_prob + term(trace[partition.shares])
    return gap(log_z(weights + counts) - log_z(weights), log_prob - posterior)


def _gaps_on_other_rows(
    partition: Partition, others: Program, rng_key: Array, spread: Array
) -> dict[str, Array]:
    """The gap between the hyper-parameters of each site and those read on other rows."""
    here = partition.trace(partition.few, {}, rng_key, spread)
    there = partition.trace(
        others, {name: here[name]["value"] for name in partition.scalars}, rng_key, spread
    )
    prior, other = partition.parameters_of(here), partition.parameters_of(there)
    moves = {
        site: gap_of_numbers(other.priors[site], hyper) for site, hyper in prior.priors.items()
    }
    is_same_rule = jax.tree.structure(prior.seating) == jax.tree.structure(other.seating)
    moves[partition.z] = (
        gap_of_numbers(other.seating, prior.seating) if is_same_rule else jnp.full((), jnp.inf)
    )
    if partition.labels:
        moves[partition.labels] = gap_of_numbers(other.class_weights, prior.class_weights)
    return moves


# Parts.


def _is_same(old: Any, new: Any) -> bool:
    (old_leaves, old_form), (new_leaves, new_form) = jax.tree.flatten(old), jax.tree.flatten(new)
    return old_form == new_form and all(
        a is b or np.array_equal(a, b) for a, b in zip(old_leaves, new_leaves, strict=True)
    )


def _some_rows(program: Program, z: str, size: int) -> Program:
    num_rows = program.sites[z].shape[0]
    return program.on_rows(program.few_rows(num_rows, size), program.by_row(num_rows), z)


def _partition_site(program: Program) -> str:
    found = [
        name
        for name, site in program.sites.items()
        if issubclass(site.distribution, ExchangeablePartition)
    ]
    require(
        len(found) == 1,
        f"{model_name(program.model)}: found {len(found)} partition sites {found}, wanted one: "
        f"numpyro.sample('z', CRP(alpha, num_rows, labels)).",
    )
    require(
        program.sites[found[0]].kind == "latent",
        f"site {found[0]!r}: the partition is {program.sites[found[0]].kind}, wanted latent. "
        "Leave out its obs.",
    )
    return found[0]


def _label_site(few: Program, z: str, trace: dict[str, dict]) -> str | None:
    """The site whose value is the class of each row in the partition, at random starts.

    The abstract trace of the model is put into `trace`.
    """

    def are_labels(rng_key):
        trace.update(_started(few, z, {}, rng_key))
        classes = labels_of(unwrap(trace[z]["fn"]))
        like_z = lambda site: (
            site.shape == few.sites[z].shape and jnp.issubdtype(site.dtype, jnp.integer)
        )
        names = [
            name
            for name, site in few.sites.items()
            if name != z
            and like_z(site)
            and not name.endswith(("_observed", "_unobserved"))
            and sites_of_labels(trace, name)
        ]
        return {name: jnp.all(trace[name]["value"] == classes) for name in names}

    equal = interpreted(are_labels, random.key(0))
    found = [equal(random.key(seed)) for seed in range(4)]
    return next((name for name in found[0] if all(each[name] for each in found)), None)


def _shares(few: Program, label_sites: list[str]) -> str | None:
    for name in label_sites:
        require(
            few.sites[name].family.startswith("Categorical"),
            f"site {name!r}: the class of a row is {few.sites[name].family}, wanted Categorical.",
        )
    parents = sorted(set().union(*(few.parents[name] for name in label_sites)) - set(label_sites))
    if not parents:
        return None
    if len(parents) > 1 or few.sites[parents[0]].family != "Dirichlet":
        found = ", ".join(f"{name!r} ~ {few.sites[name].family}" for name in parents)
        raise StructureError(
            f"site {label_sites[0]!r}: its class probabilities come from {found}; wanted one "
            "Dirichlet site, or numbers."
        )
    _refuse_other_children(few, parents[0], label_sites, label_sites[0])
    return parents[0]


def _blocks(
    few: Program, z: str, trace: Mapping[str, dict], label_sites: list[str]
) -> tuple[ComponentBlock, ...]:
    below = [
        name
        for name in few.sites
        if z in few.parents[name] and few.sites[name].kind != "deterministic"
    ]
    for name in below:
        require(
            few.sites[name].kind == "observed",
            f"site {name!r}: {few.sites[name].kind}, and depends on {z!r}; a group can only be "
            "integrated out where observed features "
            f"alone depend on it. Observe {name!r}, or leave the partition to another kernel.",
        )
    require(
        below,
        f"site {z!r}: no observed site depends on it; wanted features, obs=x, whose parameters "
        f"are indexed by {z!r}.",
    )
    return tuple(_block(few, z, name, trace, label_sites) for name in below)


def _block(
    few: Program, z: str, site: str, trace: Mapping[str, dict], label_sites: list[str]
) -> ComponentBlock:
    crp, own = unwrap(trace[z]["fn"]), few.sites[site].plates
    outer = lambda name: [plate for plate in few.sites[name].plates if plate not in own]
    scalars = [name for name in few.parents[site] if not few.sites[name].shape]
    groups = [
        name for name in few.latent if name in few.parents[site] - {z, *label_sites, *scalars}
    ]
    for name in groups:
        sizes = tuple(few.plates[plate].size for plate in outer(name))
        require(
            sizes
            in ((crp.num_classes, crp.capacity), (crp.capacity,) if crp.num_classes == 1 else ()),
            f"site {name!r}: {site!r} depends on it, and its plates {few.sites[name].plates} "
            f"have the sizes {sizes} beside those of "
            f"{site!r}; wanted a class plate of {crp.num_classes} outside a group plate of "
            f"{crp.capacity}.",
        )
    priors, family = pair_of(
        site, {name: few.sites[name].family for name in groups}, few.sites[site].family
    )
    batch = len(few.sites[site].shape) - unwrap(trace[site]["fn"]).event_dim
    require(
        batch <= 2,
        f"site {site!r}: found {batch} axes before an event, wanted [row] or [row, feature]. "
        "Flatten the features.",
    )
    for name in priors:
        _refuse_other_children(few, name, [*priors, site], site)
    return ComponentBlock(site, priors, family, len(outer(priors[0])))


def _refuse_other_children(few: Program, parent: str, allowed: list[str], site: str) -> None:
    for name, parents in few.parents.items():
        require(
            parent not in parents or name in allowed or few.sites[name].kind == "deterministic",
            f"site {name!r} depends on {parent!r}, a parameter of {site!r}, which can then not "
            "be integrated out.",
        )


def grid_of(partition: Partition, grid: Mapping[str, np.ndarray]) -> tuple[dict[str, Array], Array]:
    """Returns every combination of the values of the latent scalars, and its log prior.

    Args:
        partition: The structure of the model.
        grid: Values of each latent scalar, increasing.

    Returns:
        The values, {site: [point]}, and log(density times spacing), normalised, [point].
    """
    for name in partition.scalars:
        require(
            name in grid,
            f"site {name!r}: a latent scalar is learned over a grid; give its values, say "
            f"grid={{{name!r}: [0.1, 0.3, 1, 3]}}.",
        )
    for name, values in grid.items():
        if name not in partition.scalars:
            raise ValueError(
                f"grid: {name!r} is no latent scalar of the model, which has "
                f"{list(partition.scalars)}."
            )
        if (
            values.ndim != 1
            or not len(values)
            or not (np.diff(values) > 0).all()
            or not np.isfinite(values).all()
        ):
            raise ValueError(
                f"grid: the values of {name!r} must be finite and rise; found {values}."
            )
    if not grid:
        return {}, jax.device_put(np.zeros(1, jnp.result_type(float)))
    mesh = np.meshgrid(*grid.values(), indexing="ij")
    points = {
        name: jnp.asarray(values.ravel(), float) for name, values in zip(grid, mesh, strict=True)
    }
    spacing = np.meshgrid(
        *(np.gradient(values) if len(values) > 1 else np.ones(1) for values in grid.values()),
        indexing="ij",
    )

    def density(point):
        trace = partition.trace(partition.few, point)
        return jnp.sum(jnp.stack([term(trace[name]) for name in partition.scalars]))

    log_prior = jax.vmap(density)(points) + jnp.asarray(
        sum(np.log(space).ravel() for space in spacing), float
    )
    if not jnp.isfinite(log_prior).all():
        raise ValueError(f"grid: the prior density is not positive at every point of {dict(grid)}.")
    return points, log_prior - jax.nn.logsumexp(log_prior)
