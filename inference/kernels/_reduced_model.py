"""A model whose log joint is a sum over rows and over the classes of each row, cut to some of both.

Read off the trace: the observed sites and the plates that they are in; the site that each row has of its own (`local`), the noise of what
was chosen; the sites outside of those plates, of which the model asks for some rows (`by_row`) or uses all (`whole`). The mathematics stays
in the model: it is run with other indices of its plates and with stand-ins for its sites.
"""

import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array, random
from jax.core import Tracer
from numpyro import handlers
from numpyro.distributions import biject_to

from inference.kernels._touched_rows import Asked, UsedWholeError, note_requests
from inference.program import Program
from inference.sites import Site, StructureError, unwrap

__all__ = ["Index", "ReducedModel", "read_reduced"]

type Index = dict[str, Array]  # plate -> the indices that a run sees


class ReducedModel(NamedTuple):
    """What was read."""

    local: str | None  # the site that each row has of its own
    rows: str  # plate
    classes: str | None  # plate of what each row is a sum over
    observed: tuple[str, ...]  # and factors
    by_row: dict[str, Site]
    row_shapes: dict[str, tuple[int, ...]]  # of one row of each of them
    together: tuple[tuple[str, ...], ...]  # those that are asked for the same rows, by the same indices
    whole: dict[str, Site]
    sizes: dict[str, tuple[int, int]]  # of each of the two plates: all, and those that a run sees

    def draw_index(self, rng_key: Array, own_negatives: bool) -> Index:
        """Rows and classes, one from each stratum of equal size: each is there with the same probability, and hardly one twice."""
        num_rows = self.sizes[self.rows][1]
        shapes = {self.rows: (num_rows,)}
        if self.classes:
            shapes[self.classes] = (self.sizes[self.classes][1], *((num_rows,) if own_negatives else ()))
        ends = np.cumsum([np.prod(shape) for shape in shapes.values()])
        parts = jnp.split(random.uniform(rng_key, (int(ends[-1]),)), ends[:-1].tolist())  # one call, as each costs some operations
        return {
            name: _one_of_each_stratum(u.reshape(shape), self.sizes[name][0])
            for (name, shape), u in zip(shapes.items(), parts, strict=True)
        }

    def run(self, program: Program, index: Index, values: Mapping[str, Any]) -> dict[str, Any]:
        """The trace of the model at these indices; `values` of sites may be stand-ins."""
        model = handlers.substitute(handlers.seed(program.model, random.key(0)), data={**values, **index})
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "subsample_size does not match")  # a whole plate, or a chunk of it
            return handlers.trace(model).get_trace(*program.args, **program.kwargs)

    def asked(self, program: Program, index: Index, values: Mapping[str, Any]) -> dict[str, Asked]:
        """The rows of the sites in `by_row` that a run asks for."""
        fixed = {name: values[name] for name in self.whole} | self._any_local(index)
        return note_requests(lambda rows: self.run(program, index, {**fixed, **rows}), self.by_row)

    def _any_local(self, index: Index) -> dict[str, Array]:
        return {self.local: jnp.zeros(index[self.rows].shape)} if self.local else {}

    def terms(self, program: Program, index: Index, values: Mapping[str, Any]) -> Callable[[Array | None], tuple[Array, Array]]:
        """A function of the local site [row]: the log joint of each row, without the priors of the other sites; and the terms over which
        it is a sum, before they are scaled up, [any, row]."""

        def of(local: Array | None) -> tuple[Array, Array]:
            trace = self.run(program, index, {**values, **({} if self.local is None else {self.local: local})})
            num_rows = len(index[self.rows])
            by_rows = self.sizes[self.rows][0] / num_rows
            total, sampled = jnp.zeros(num_rows), []
            for name in (*self.observed, *([self.local] if self.local else [])):
                term, scale = _log_prob(trace[name]), (trace[name]["scale"] or 1.0) / by_rows
                term = jnp.broadcast_to(term, jnp.broadcast_shapes(term.shape, (num_rows,))).reshape(-1, num_rows)
                total = total + scale * term.sum(0)
                if name != self.local:
                    sampled.append(term)
            return total, jnp.concatenate(sampled)

        return of

    def priors(self, program: Program, index: Index, values: Mapping[str, Any]) -> tuple[dict[str, dist.Distribution], Array]:
        """The prior of one row of each site that is asked for rows, and the log prior of those that are used as a whole."""
        trace = self.run(program, index, {**values, **self._any_local(index)})
        by_row = {name: _of_one_row(trace[name]["fn"], site) for name, site in self.by_row.items()}
        return by_row, sum((jnp.sum(_log_prob(trace[name])) for name in self.whole), start=jnp.zeros(()))

    def noise(self, program: Program) -> dist.Distribution:
        """The prior of the local site, the same for all rows."""
        assert self.local is not None
        index = {name: jnp.arange(size[1]) for name, size in self.sizes.items()}
        noise = unwrap(self.run(program, index, self.zeros(program, index))[self.local]["fn"])
        if noise.batch_shape or any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(noise)):
            raise StructureError(
                f"site {self.local!r}: its prior {type(noise).__name__} differs from row to row; wanted one noise for all."
            )
        return noise

    def zeros(self, program: Program, index: Index, fill: float = 0.0) -> dict[str, Any]:
        """Values of all sites at which the model can be run at these indices, without any array of as many rows as there are classes."""
        values: dict[str, Any] = {name: jnp.full(site.shape, fill) for name, site in self.whole.items()}
        values = {name: self.constrained(name, value) for name, value in values.items()}
        asked = self.asked(program, index, values)
        if unasked := [name for name in self.by_row if name not in asked]:
            raise StructureError(f"site {unasked[0]!r}: the model asks for none of its rows, so nothing is learned of it; leave it out.")
        rows = {name: one.answers(jnp.full((len(one.ids), *one.row_shape), fill)) for name, one in asked.items()}
        return values | rows | self._any_local(index)

    def constrained(self, name: str, value: Array) -> Array:
        """From anywhere to the support of a site that is used as a whole."""
        return biject_to(self.whole[name].support)(value)


def _one_of_each_stratum(u: Array, size: int) -> Array:
    """[stratum, ...] of 0 .. size - 1, from uniform numbers; the ends of strata are computed exactly, a draw lies anywhere in between."""
    num = len(u)
    ends = np.arange(num, dtype=np.float64) * size / num
    low, rest = (part.reshape(num, *(1,) * (u.ndim - 1)) for part in (np.floor(ends), ends % 1))
    step = jnp.floor(jnp.asarray(rest, u.dtype) + u * (size / num)).astype(int)
    return jnp.minimum(jnp.asarray(low, int) + step, size - 1)


def _log_prob(site: dict[str, Any]) -> Array:
    try:
        return site["fn"].log_prob(site["value"])
    except (TypeError, NotImplementedError) as error:
        raise StructureError(f"site {site['name']!r}: its log probability cannot be computed. {error}") from error


def _of_one_row(prior: dist.Distribution, site: Site) -> dist.Distribution:
    """The distribution under what a plate has expanded."""
    if isinstance(prior, dist.MaskedDistribution):
        raise StructureError(f"site {site.name!r}: its prior is masked, so that rows differ; wanted the same prior for all rows.")
    while isinstance(prior, dist.ExpandedDistribution | dist.Independent):
        prior = prior.base_dist
    shape = prior.shape()
    if len(shape) >= len(site.shape) and shape[0] != 1:
        raise StructureError(
            f"site {site.name!r}: its prior differs from row to row (parameters of shape {shape}); wanted the same for all rows."
        )
    return prior


def read_reduced(program: Program) -> ReducedModel:
    """Reads the structure; refuses, by the site's name, what is no sum over rows."""
    observed = tuple(name for name in (*program.observed, *program.factors))
    plates = {name: program.sites[name].plates for name in observed}
    if not observed or not all(plates.values()):
        lacking = next((name for name in observed if not plates[name]), "")
        raise StructureError(f"site {lacking!r}: it is observed outside of any plate; wanted a plate of rows around all that is observed.")
    inside = {plate for each in plates.values() for plate in each}
    local = [name for name in program.latent if set(program.sites[name].plates) & inside]
    if len(local) > 1:
        raise StructureError(f"site {local[1]!r}: {local} lie in the plates of the data; wanted at most one, the noise of what was chosen.")
    rows = _row_plate(program, local[0] if local else None, inside)
    inside |= {name for name, plate in program.plates.items() if plate.subsample_size < plate.size}  # may be summed over by hand
    others = sorted(inside - {rows})
    if len(others) > 1:
        raise StructureError(f"plate {others[1]!r}: the data lie in {sorted(inside)}; wanted a plate of rows, and one of classes in it.")
    for name, each in plates.items():
        if rows not in each:
            raise StructureError(f"site {name!r}: it is not in the plate {rows!r} of the rows, as the others are.")
    sizes = {name: (program.plates[name].size, program.plates[name].subsample_size) for name in inside}
    found = ReducedModel(local[0] if local else None, rows, others[0] if others else None, observed, {}, {}, (), {}, sizes)
    return _with_globals(program, found, {name: program.sites[name] for name in program.latent if name not in local})


def _row_plate(program: Program, local: str | None, inside: set[str]) -> str:
    if local is None:
        return next(name for name in inside if program.plates[name].dim == max(program.plates[each].dim or -99 for each in inside))
    site = program.sites[local]
    if len(site.plates) != 1 or len(site.shape) != 1 or site.is_discrete or repr(site.support) != "Real()":
        raise StructureError(
            f"site {local!r}: found {site.family} of shape {site.shape} in plates {list(site.plates)}; wanted one real number for each row."
        )
    return site.plates[0]


def _with_globals(program: Program, found: ReducedModel, sites: dict[str, Site]) -> ReducedModel:
    """Which sites are asked for rows: all but those that turn out to be used as a whole, which must not lie in a plate."""
    for name, site in sites.items():
        if site.is_discrete:
            raise StructureError(f"site {name!r}: {site.family} is discrete, and moves along no gradient.")
    index = {name: jnp.arange(size[1]) for name, size in found.sizes.items()}
    whole = {name: site for name, site in sites.items() if not site.shape}
    while True:
        trial = found._replace(by_row={name: site for name, site in sites.items() if name not in whole}, whole=whole)
        try:
            shapes, together = _asked_rows(trial, program, index)
            trial = trial._replace(row_shapes=shapes, together=together)
        except UsedWholeError as error:
            if sites[error.site].plates:
                raise
            whole = whole | {error.site: sites[error.site]}
            continue
        for name, site in trial.by_row.items():
            if _support_of_one(site) != "Real()":
                raise StructureError(f"site {name!r}: its support is {site.support!r}; wanted rows of real numbers.")
        return trial


def _asked_rows(model: ReducedModel, program: Program, index: Index) -> tuple[dict[str, tuple[int, ...]], tuple[tuple[str, ...], ...]]:
    """Shapes of one row of each site, and which are asked for together, by an abstract run with stand-ins, which meets whatever does not
    work."""
    shapes: dict[str, tuple[int, ...]] = {}
    together: dict[Any, list[str]] = {}

    def run() -> Array:
        values = model.zeros(program, index)
        total, _ = model.terms(program, index, values)(jnp.zeros(len(index[model.rows])) if model.local else None)
        model.priors(program, index, values)
        asked = model.asked(program, index, values)
        for name, one in asked.items():
            shapes[name] = one.row_shape
            together.setdefault((id(one.ids), one.site.dtype), []).append(name)
        return total

    jax.eval_shape(run)
    return shapes, tuple(map(tuple, together.values()))


def _support_of_one(site: Site) -> str:
    """The constraint on one number."""
    support = site.support
    while hasattr(support, "base_constraint"):
        support = support.base_constraint
    return repr(support)
