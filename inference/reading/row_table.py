"""Sites with a row for each class, of which a step reads and moves few.

A model asks such a site for rows, `weights[classes]`. In its place it is given `Rows`, which notes
what was asked; then the asked rows alone are gathered, differentiated and moved, so that a step
costs as much as it touches:

    asked = note_requests(run, sites)          # which rows, in which order
    rows = asked[site].gather(whole)           # [request, ...]
    run({site: asked[site].answers(rows)})     # the model on those rows, differentiable in them

A row that is asked for twice is one row: `slot` is the same for both, and `merged` adds up what
belongs together.

A model whose log joint is a sum over rows and over the classes of each row, cut to some of both.

Read off the trace: the observed sites and the plates that they are in; the site that each row has
of its own (`local`), the noise of what was chosen; the sites outside of those plates, of which the
model asks for some rows (`by_row`) or uses all (`whole`). The mathematics stays in the model: it is
run with other indices of its plates and with stand-ins for its sites.
"""

import warnings
from collections.abc import Callable, Mapping
from itertools import cycle
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array, random
from jax.core import Tracer
from numpyro import handlers
from numpyro.distributions import biject_to

from inference.program.program import Program
from inference.program.sites import Site, StructureError, unwrap

__all__ = [
    "Asked",
    "Index",
    "ReducedModel",
    "Rows",
    "UsedWholeError",
    "note_requests",
    "read_reduced",
]

FEW = 1000  # ids that are sooner compared each with each than sorted
MOST = 2**31 - 1  # rows that an id of 32 bits tells apart


class UsedWholeError(StructureError):
    """A model uses all of a site where it was to ask for rows."""

    def __init__(self, site: str):
        super().__init__(
            f"site {site!r}: the model uses all of it, so that a step would cost as much as it has "
            "rows; wanted rows by integers, "
            f"{site}[classes]."
        )
        self.site = site


class Rows:
    """Stands in for a site; knows its shape and gives rows, nothing else."""

    def __init__(self, site: Site, give: Callable[[tuple[Any, ...]], Array]):
        self.site, self.shape, self.dtype, self.ndim = (
            site.name,
            site.shape,
            site.dtype,
            len(site.shape),
        )
        self._give = give

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Array:
        parts = index if isinstance(index, tuple) else (index,)
        if not parts or len(parts) > self.ndim or not all(_is_places(part) for part in parts):
            raise UsedWholeError(self.site)
        return self._give(parts)

    def _refuse(self, *_: Any) -> Any:
        raise UsedWholeError(self.site)

    __iter__ = __neg__ = __abs__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = (
        _refuse
    )
    __matmul__ = __rmatmul__ = __pow__ = __rpow__ = _refuse

    def __getattr__(self, name: str) -> Any:
        # by which it would be taken for an array
        if name.startswith("_") and name not in ("__jax_array__", "__array__"):
            raise AttributeError(name)
        raise UsedWholeError(self.site)


def _is_places(part: Any) -> bool:
    return not isinstance(part, slice | type(None) | type(...)) and jnp.issubdtype(
        jnp.result_type(part), jnp.integer
    )


class Asked(NamedTuple):
    """The rows of one site that a run asks for, one after the other."""

    site: Site
    ids: Array  # [request] of rows, counted over all the leading axes that were indexed
    slot: Array  # [request], the same for requests of the same row, below the number of requests
    shapes: tuple[tuple[int, ...], ...]  # of each answer, without the axes of a row
    row_shape: tuple[int, ...]

    def gather(self, whole: Array) -> Array:
        """[request, ...], of an array [row, ...]."""
        return whole.at[self.ids].get(mode="clip")

    def scatter(self, whole: Array, rows: Array) -> Array:
        """`whole` with these rows; those of the same slot are the same."""
        return whole.at[self.ids].set(rows, mode="drop")

    def merged(self, parts: Array) -> Array:
        """For each request the sum of the parts of all requests of its row."""
        return self.spread(jax.ops.segment_sum(parts, self.slot, len(self.ids)))

    def spread(self, by_slot: Array) -> Array:
        """For each request what belongs to its slot."""
        return by_slot[self.slot]

    @property
    def multiplicity(self) -> Array:
        """[request] how often its row was asked for."""
        return self.merged(jnp.ones(len(self.ids)))

    def answers(self, rows: Array) -> Rows:
        """The stand-in that answers with these rows, in the order in which they were asked for,
        and from the start in a further run.
        """
        sizes = [int(np.prod(shape)) for shape in self.shapes]
        pieces = jnp.split(rows, np.cumsum(sizes)[:-1].tolist())
        turn = cycle(
            [
                piece.reshape(*shape, *self.row_shape)
                for piece, shape in zip(pieces, self.shapes, strict=True)
            ]
        )
        return Rows(self.site, lambda _: next(turn))


def note_requests(
    run: Callable[[dict[str, Rows]], Any], sites: Mapping[str, Site]
) -> dict[str, Asked]:
    """What `run` asks of its stand-ins, which answer with zeros; a site of which it asks nothing is
    left out. Sites that are asked for the same rows, by the very same indices, share `ids` and
    `slot`.
    """
    noted: dict[str, list[tuple[Any, ...]]] = {name: [] for name in sites}

    def noting(site: Site) -> Rows:
        def give(parts: tuple[Any, ...]) -> Array:
            noted[site.name].append(parts)
            return jnp.zeros(
                (
                    *jnp.broadcast_shapes(*(jnp.shape(part) for part in parts)),
                    *site.shape[len(parts) :],
                )
            )

        return Rows(site, give)

    run({name: noting(site) for name, site in sites.items()})
    # by the identity of indices, which `noted` keeps alive
    shared: dict[Any, tuple[Array, Array]] = {}
    found = {}
    for name, requests in noted.items():
        if requests:
            lead = _lead(sites[name], requests)
            key = lead, tuple(tuple(map(id, parts)) for parts in requests)
            if key not in shared:
                shared[key] = _places(lead, requests)
            shapes = tuple(
                jnp.broadcast_shapes(*(jnp.shape(part) for part in parts)) for parts in requests
            )
            found[name] = Asked(sites[name], *shared[key], shapes, sites[name].shape[len(lead) :])
    return found


def _lead(site: Site, requests: list[tuple[Any, ...]]) -> tuple[int, ...]:
    """Sizes of the axes that are indexed."""
    depths = {len(parts) for parts in requests}
    if len(depths) > 1:
        raise StructureError(
            f"site {site.name!r}: it is indexed by {sorted(depths)} axes in turn; wanted the same "
            "number each time."
        )
    lead = site.shape[: depths.pop()]
    if prod(lead) > MOST:
        raise StructureError(
            f"site {site.name!r}: its first axes {lead} have {prod(lead):.2g} rows, wanted {MOST} "
            "at most, to count them."
        )
    return lead


def _places(lead: tuple[int, ...], requests: list[tuple[Any, ...]]) -> tuple[Array, Array]:
    """Ids and slots of all requests."""
    places = [
        tuple(jnp.broadcast_arrays(*_same_rank(tuple(map(jnp.asarray, parts)))))
        for parts in requests
    ]
    ids = jnp.concatenate([_flattened(each, lead) for each in places])
    return ids, _slots(ids)


def _same_rank(parts: tuple[Array, ...]) -> list[Array]:
    rank = max(part.ndim for part in parts)
    return [part.reshape(*(1,) * (rank - part.ndim), *part.shape) for part in parts]


def _flattened(places: tuple[Array, ...], lead: tuple[int, ...]) -> Array:
    """As one number; negative places count from the end."""
    total = jnp.zeros(places[0].shape, jnp.int32)
    for place, size in zip(places, lead, strict=True):
        place = place.astype(jnp.int32)
        total = total * size + jnp.where(place < 0, place + size, place)
    return total.ravel()


def _slots(ids: Array) -> Array:
    """A number below the number of ids, equal where ids are."""
    if len(ids) <= FEW:
        place = jnp.arange(len(ids))
        return jnp.min(jnp.where(ids[:, None] == ids[None], place[:, None], len(ids)), axis=0)
    order = jnp.argsort(ids)
    ranked = ids[order]
    is_new = jnp.concatenate([jnp.zeros(1, bool), ranked[1:] != ranked[:-1]])
    return jnp.zeros_like(ids).at[order].set(jnp.cumsum(is_new, dtype=ids.dtype))


type Index = dict[str, Array]  # plate -> the indices that a run sees


class ReducedModel(NamedTuple):
    """What was read."""

    local: str | None  # the site that each row has of its own
    rows: str  # plate
    classes: str | None  # plate of what each row is a sum over
    observed: tuple[str, ...]  # and factors
    by_row: dict[str, Site]
    row_shapes: dict[str, tuple[int, ...]]  # of one row of each of them
    # those that are asked for the same rows, by the same indices
    together: tuple[tuple[str, ...], ...]
    whole: dict[str, Site]
    sizes: dict[str, tuple[int, int]]  # of each of the two plates: all, and those that a run sees

    def draw_index(self, rng_key: Array, own_negatives: bool) -> Index:
        """Rows and classes, one from each stratum of equal size: each is there with the same
        probability, and hardly one twice.
        """
        num_rows = self.sizes[self.rows][1]
        shapes = {self.rows: (num_rows,)}
        if self.classes:
            shapes[self.classes] = (
                self.sizes[self.classes][1],
                *((num_rows,) if own_negatives else ()),
            )
        ends = np.cumsum([np.prod(shape) for shape in shapes.values()])
        # one call, as each costs some operations
        parts = jnp.split(random.uniform(rng_key, (int(ends[-1]),)), ends[:-1].tolist())
        return {
            name: _one_of_each_stratum(u.reshape(shape), self.sizes[name][0])
            for (name, shape), u in zip(shapes.items(), parts, strict=True)
        }

    def run(self, program: Program, index: Index, values: Mapping[str, Any]) -> dict[str, Any]:
        """The trace of the model at these indices; `values` of sites may be stand-ins."""
        model = handlers.substitute(
            handlers.seed(program.model, random.key(0)), data={**values, **index}
        )
        with warnings.catch_warnings():
            # a whole plate, or a chunk of it
            warnings.filterwarnings("ignore", "subsample_size does not match")
            return handlers.trace(model).get_trace(*program.args, **program.kwargs)

    def asked(self, program: Program, index: Index, values: Mapping[str, Any]) -> dict[str, Asked]:
        """The rows of the sites in `by_row` that a run asks for."""
        fixed = {name: values[name] for name in self.whole} | self._any_local(index)
        return note_requests(lambda rows: self.run(program, index, {**fixed, **rows}), self.by_row)

    def _any_local(self, index: Index) -> dict[str, Array]:
        return {self.local: jnp.zeros(index[self.rows].shape)} if self.local else {}

    def terms(
        self, program: Program, index: Index, values: Mapping[str, Any]
    ) -> Callable[[Array | None], tuple[Array, Array]]:
        """A function of the local site [row]: the log joint of each row, without the priors of the
        other sites; and the terms over which it is a sum, before they are scaled up, [any, row].
        """

        def of(local: Array | None) -> tuple[Array, Array]:
            trace = self.run(
                program, index, {**values, **({} if self.local is None else {self.local: local})}
            )
            num_rows = len(index[self.rows])
            by_rows = self.sizes[self.rows][0] / num_rows
            total, sampled = jnp.zeros(num_rows), []
            for name in (*self.observed, *([self.local] if self.local else [])):
                term, scale = _log_prob(trace[name]), (trace[name]["scale"] or 1.0) / by_rows
                term = jnp.broadcast_to(
                    term, jnp.broadcast_shapes(term.shape, (num_rows,))
                ).reshape(-1, num_rows)
                total = total + scale * term.sum(0)
                if name != self.local:
                    sampled.append(term)
            return total, jnp.concatenate(sampled)

        return of

    def priors(
        self, program: Program, index: Index, values: Mapping[str, Any]
    ) -> tuple[dict[str, dist.Distribution], Array]:
        """The prior of one row of each site that is asked for rows, and the log prior of those
        that are used as a whole.
        """
        trace = self.run(program, index, {**values, **self._any_local(index)})
        by_row = {name: _of_one_row(trace[name]["fn"], site) for name, site in self.by_row.items()}
        return by_row, sum(
            (jnp.sum(_log_prob(trace[name])) for name in self.whole), start=jnp.zeros(())
        )

    def noise(self, program: Program) -> dist.Distribution:
        """The prior of the local site, the same for all rows."""
        assert self.local is not None
        index = {name: jnp.arange(size[1]) for name, size in self.sizes.items()}
        noise = unwrap(self.run(program, index, self.zeros(program, index))[self.local]["fn"])
        if noise.batch_shape or any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(noise)):
            raise StructureError(
                f"site {self.local!r}: its prior {type(noise).__name__} differs from row to row; "
                "wanted one noise for all."
            )
        return noise

    def zeros(self, program: Program, index: Index, fill: float = 0.0) -> dict[str, Any]:
        """Values of all sites at which the model can be run at these indices, without any array
        of as many rows as there are classes.
        """
        values: dict[str, Any] = {
            name: jnp.full(site.shape, fill) for name, site in self.whole.items()
        }
        values = {name: self.constrained(name, value) for name, value in values.items()}
        asked = self.asked(program, index, values)
        if unasked := [name for name in self.by_row if name not in asked]:
            raise StructureError(
                f"site {unasked[0]!r}: the model asks for none of its rows, so nothing is learned "
                "of it; leave it out."
            )
        rows = {
            name: one.answers(jnp.full((len(one.ids), *one.row_shape), fill))
            for name, one in asked.items()
        }
        return values | rows | self._any_local(index)

    def constrained(self, name: str, value: Array) -> Array:
        """From anywhere to the support of a site that is used as a whole."""
        return biject_to(self.whole[name].support)(value)


def _one_of_each_stratum(u: Array, size: int) -> Array:
    """[stratum, ...] of 0 .. size - 1, from uniform numbers; the ends of strata are computed
    exactly, a draw lies anywhere in between.
    """
    num = len(u)
    ends = np.arange(num, dtype=np.float64) * size / num
    low, rest = (part.reshape(num, *(1,) * (u.ndim - 1)) for part in (np.floor(ends), ends % 1))
    step = jnp.floor(jnp.asarray(rest, u.dtype) + u * (size / num)).astype(int)
    return jnp.minimum(jnp.asarray(low, int) + step, size - 1)


def _log_prob(site: dict[str, Any]) -> Array:
    try:
        return site["fn"].log_prob(site["value"])
    except (TypeError, NotImplementedError) as error:
        raise StructureError(
            f"site {site['name']!r}: its log probability cannot be computed. {error}"
        ) from error


def _of_one_row(prior: dist.Distribution, site: Site) -> dist.Distribution:
    """The distribution under what a plate has expanded."""
    if isinstance(prior, dist.MaskedDistribution):
        raise StructureError(
            f"site {site.name!r}: its prior is masked, so that rows differ; wanted the same prior "
            "for all rows."
        )
    while isinstance(prior, dist.ExpandedDistribution | dist.Independent):
        prior = prior.base_dist
    shape = prior.shape()
    if len(shape) >= len(site.shape) and shape[0] != 1:
        raise StructureError(
            f"site {site.name!r}: its prior differs from row to row (parameters of shape {shape}); "
            "wanted the same for all rows."
        )
    return prior


def read_reduced(program: Program) -> ReducedModel:
    """Reads the structure; refuses, by the site's name, what is no sum over rows."""
    observed = tuple(name for name in (*program.observed, *program.factors))
    plates = {name: program.sites[name].plates for name in observed}
    if not observed or not all(plates.values()):
        lacking = next((name for name in observed if not plates[name]), "")
        raise StructureError(
            f"site {lacking!r}: it is observed outside of any plate; wanted a plate of rows around "
            "all that is observed."
        )
    inside = {plate for each in plates.values() for plate in each}
    local = [name for name in program.latent if set(program.sites[name].plates) & inside]
    if len(local) > 1:
        raise StructureError(
            f"site {local[1]!r}: {local} lie in the plates of the data; wanted at most one, the "
            "noise of what was chosen."
        )
    rows = _row_plate(program, local[0] if local else None, inside)
    # may be summed over by hand
    inside |= {name for name, plate in program.plates.items() if plate.subsample_size < plate.size}
    others = sorted(inside - {rows})
    if len(others) > 1:
        raise StructureError(
            f"plate {others[1]!r}: the data lie in {sorted(inside)}; wanted a plate of rows, and "
            "one of classes in it."
        )
    for name, each in plates.items():
        if rows not in each:
            raise StructureError(
                f"site {name!r}: it is not in the plate {rows!r} of the rows, as the others are."
            )
    sizes = {
        name: (program.plates[name].size, program.plates[name].subsample_size) for name in inside
    }
    found = ReducedModel(
        local[0] if local else None,
        rows,
        others[0] if others else None,
        observed,
        {},
        {},
        (),
        {},
        sizes,
    )
    return _with_globals(
        program, found, {name: program.sites[name] for name in program.latent if name not in local}
    )


def _row_plate(program: Program, local: str | None, inside: set[str]) -> str:
    if local is None:
        return next(
            name
            for name in inside
            if program.plates[name].dim == max(program.plates[each].dim or -99 for each in inside)
        )
    site = program.sites[local]
    if (
        len(site.plates) != 1
        or len(site.shape) != 1
        or site.is_discrete
        or repr(site.support) != "Real()"
    ):
        raise StructureError(
            f"site {local!r}: found {site.family} of shape {site.shape} in plates "
            f"{list(site.plates)}; wanted one real number for each row."
        )
    return site.plates[0]


def _with_globals(program: Program, found: ReducedModel, sites: dict[str, Site]) -> ReducedModel:
    """Which sites are asked for rows: all but those that turn out to be used as a whole, which
    must not lie in a plate.
    """
    for name, site in sites.items():
        if site.is_discrete:
            raise StructureError(
                f"site {name!r}: {site.family} is discrete, and moves along no gradient."
            )
    index = {name: jnp.arange(size[1]) for name, size in found.sizes.items()}
    whole = {name: site for name, site in sites.items() if not site.shape}
    while True:
        trial = found._replace(
            by_row={name: site for name, site in sites.items() if name not in whole}, whole=whole
        )
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
                raise StructureError(
                    f"site {name!r}: its support is {site.support!r}; wanted rows of real numbers."
                )
        return trial


def _asked_rows(
    model: ReducedModel, program: Program, index: Index
) -> tuple[dict[str, tuple[int, ...]], tuple[tuple[str, ...], ...]]:
    """Shapes of one row of each site, and which are asked for together, by an abstract run with
    stand-ins, which meets whatever does not work.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    together: dict[Any, list[str]] = {}

    def run() -> Array:
        values = model.zeros(program, index)
        total, _ = model.terms(program, index, values)(
            jnp.zeros(len(index[model.rows])) if model.local else None
        )
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
