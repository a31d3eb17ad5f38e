"""Minibatches of rows and classes, for models whose log joint is a sum over both.

Read off the trace: the observed sites with their plates; the latent site with one value for each
row (`local`), the noise of the class that was chosen; and the sites outside of those plates, of
which the model requests some rows (`by_row`) or uses all (`whole`). The mathematics stays in the
model: it is run with other indices of its plates and with proxies for its sites.

The model indexes a site with a row for each class as `weights[classes]`. In place of the site it
gets a `RowProxy`, which notes the indices: a request. Then the requested rows alone are gathered,
differentiated and moved, so that a step costs as much as it touches:

    requests = note_requests(run, sites)         # which rows, in which order
    rows = requests[site].gather(whole)          # [request, ...]
    run({site: requests[site].answers(rows)})    # the model on those rows, differentiable in them

A row that is requested twice is one row: both requests have the same `slot`, and `merged` adds up
the parts of such requests, for instance gradients.
"""

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from itertools import cycle
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array, random
from numpyro import handlers
from numpyro.distributions import biject_to

from inference.program.compiling import is_traced
from inference.program.program import Program
from inference.program.sites import Site, StructureError, unwrap

__all__ = [
    "Index",
    "ReducedModel",
    "RowProxy",
    "RowRequests",
    "UsedWholeError",
    "note_requests",
    "read_reduced",
]


class UsedWholeError(StructureError):
    """A model uses a whole site of which it should only request rows."""

    def __init__(self, site: str):
        super().__init__(
            f"site {site!r}: the model uses all of it, so that a step would cost as much as it has "
            f"rows; wanted rows by integers, {site}[classes]."
        )
        self.site = site


class RowProxy:
    """Stands in for the value of a site; it has a shape and gives rows, nothing else.

    Args:
        site: the site.
        give: returns the rows for a tuple of indices.
    """

    def __init__(self, site: Site, give: Callable[[tuple[Any, ...]], Array]):
        self.site = site.name
        self.shape = site.shape
        self.dtype = site.dtype
        self.ndim = len(site.shape)
        self._give = give

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Array:
        parts = index if isinstance(index, tuple) else (index,)
        kinds = (slice, type(None), type(...))
        is_integer = lambda part: (
            not isinstance(part, kinds) and jnp.issubdtype(jnp.result_type(part), jnp.integer)
        )
        if not parts or len(parts) > self.ndim or not all(map(is_integer, parts)):
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
        # JAX and NumPy take an object with these two for an array
        if name.startswith("_") and name not in ("__jax_array__", "__array__"):
            raise AttributeError(name)
        raise UsedWholeError(self.site)


class RowRequests(NamedTuple):
    """The rows of one site that a run requests, one after the other."""

    site: Site
    ids: Array  # [request] row numbers; all leading axes that were indexed are counted as one
    slot: Array  # [request], the same for requests of the same row, below the number of requests
    shapes: tuple[tuple[int, ...], ...]  # of each answer, without the axes of a row
    row_shape: tuple[int, ...]

    def gather(self, whole: Array) -> Array:
        """The requested rows [request, ...] of an array [row, ...]."""
        return whole.at[self.ids].get(mode="clip")

    def scatter(self, whole: Array, rows: Array) -> Array:
        """`whole` with these rows put in; rows of the same slot must be equal."""
        return whole.at[self.ids].set(rows, mode="drop")

    def merged(self, parts: Array) -> Array:
        """For each request, the sum of `parts` over all requests of the same row."""
        return self.spread(jax.ops.segment_sum(parts, self.slot, len(self.ids)))

    def spread(self, by_slot: Array) -> Array:
        """For each request the value of its slot, from values by slot."""
        return by_slot[self.slot]

    @property
    def multiplicity(self) -> Array:
        """How often the row of each request is requested."""
        return self.merged(jnp.ones(len(self.ids)))

    def answers(self, rows: Array) -> RowProxy:
        """A proxy that answers with these rows, in the order of the requests.

        After the last one it begins again, for a further run.
        """
        ends = np.cumsum([prod(shape) for shape in self.shapes])
        pieces = zip(jnp.split(rows, ends[:-1].tolist()), self.shapes, strict=True)
        turn = cycle([piece.reshape(*shape, *self.row_shape) for piece, shape in pieces])
        return RowProxy(self.site, lambda _: next(turn))


def note_requests(
    run: Callable[[dict[str, RowProxy]], Any], sites: Mapping[str, Site]
) -> dict[str, RowRequests]:
    """The requests of a run; its proxies answer with zeros.

    Sites that are requested by the very same indices share `ids` and `slot`.

    Args:
        run: a function of the proxies.
        sites: the sites that proxies replace; those without a request are left out of the result.
    """
    noted: dict[str, list[tuple[Any, ...]]] = {name: [] for name in sites}
    shape_of = lambda parts: jnp.broadcast_shapes(*map(jnp.shape, parts))

    def give(site: Site, parts: tuple[Any, ...]) -> Array:
        noted[site.name].append(parts)
        return jnp.zeros((*shape_of(parts), *site.shape[len(parts) :]))

    run({name: RowProxy(site, partial(give, site)) for name, site in sites.items()})
    # by the identity of indices, which `noted` keeps alive
    shared: dict[Any, tuple[Array, Array]] = {}
    found = {}
    for name, requests in noted.items():
        if requests:
            lead = _lead(sites[name], requests)
            key = lead, tuple(tuple(map(id, parts)) for parts in requests)
            if key not in shared:
                ids = jnp.concatenate(
                    [_row_ids(parts, shape_of(parts), lead) for parts in requests]
                )
                shared[key] = ids, _slots(ids)
            shapes = tuple(map(shape_of, requests))
            row_shape = sites[name].shape[len(lead) :]
            found[name] = RowRequests(sites[name], *shared[key], shapes, row_shape)
    return found


def _lead(site: Site, requests: list[tuple[Any, ...]]) -> tuple[int, ...]:
    depths = {len(parts) for parts in requests}
    if len(depths) > 1:
        raise StructureError(
            f"site {site.name!r}: it is indexed by {sorted(depths)} axes in turn; wanted the same "
            "number each time."
        )
    lead, most = site.shape[: depths.pop()], 2**31 - 1
    if prod(lead) > most:
        raise StructureError(
            f"site {site.name!r}: its first axes {lead} have {prod(lead):.2g} rows, wanted {most} "
            "at most, to count them."
        )
    return lead


def _row_ids(parts: tuple[Any, ...], shape: tuple[int, ...], lead: tuple[int, ...]) -> Array:
    """Indices along the leading axes as one row number; negative ones count from the end."""
    total = jnp.zeros(shape, jnp.int32)
    for part, size in zip(parts, lead, strict=True):
        place = jnp.broadcast_to(jnp.asarray(part).astype(jnp.int32), shape)
        total = total * size + jnp.where(place < 0, place + size, place)
    return total.ravel()


def _slots(ids: Array) -> Array:
    """The slot of each request, a number below their count; requests of one row have one slot."""
    if len(ids) <= 1000:  # comparing all pairs is faster than sorting
        place = jnp.arange(len(ids))
        return jnp.min(jnp.where(ids[:, None] == ids[None], place[:, None], len(ids)), axis=0)
    order = jnp.argsort(ids)
    ranked = ids[order]
    is_new = jnp.concatenate([jnp.zeros(1, bool), ranked[1:] != ranked[:-1]])
    return jnp.zeros_like(ids).at[order].set(jnp.cumsum(is_new, dtype=ids.dtype))


type Index = dict[str, Array]  # {plate: the indices of a run}


class ReducedModel(NamedTuple):
    """Which sites of a model are by row, local or whole, and its plates of rows and classes."""

    local: str | None  # the latent site with one value for each row
    rows: str  # plate
    classes: str | None  # plate of the classes: each row's term is a sum over them
    observed: tuple[str, ...]  # and factors
    by_row: dict[str, Site]  # of which the model requests rows
    row_shapes: dict[str, tuple[int, ...]]  # the shape of one row of each of `by_row`
    # sites of `by_row` that are requested by the same indices
    together: tuple[tuple[str, ...], ...]
    whole: dict[str, Site]
    sizes: dict[str, tuple[int, int]]  # of each of the two plates: whole, and in one run

    def draw_index(self, rng_key: Array, own_negatives: bool) -> Index:
        """Random rows and classes by stratified sampling, one from each stratum of equal size.

        Each is drawn with the same probability, and hardly any one twice.

        Args:
            rng_key: a key.
            own_negatives: whether each row gets classes of its own.
        """
        num_rows = self.sizes[self.rows][1]
        shapes = {self.rows: (num_rows,)}
        if self.classes:
            num_classes = self.sizes[self.classes][1]
            shapes[self.classes] = (num_classes, num_rows) if own_negatives else (num_classes,)
        ends = np.cumsum([prod(shape) for shape in shapes.values()])
        # one call of the generator, since each call costs some operations
        parts = jnp.split(random.uniform(rng_key, (int(ends[-1]),)), ends[:-1].tolist())
        return {
            name: _one_of_each_stratum(u.reshape(shape), self.sizes[name][0])
            for (name, shape), u in zip(shapes.items(), parts, strict=True)
        }

    def run(self, program: Program, index: Index, values: Mapping[str, Any]) -> dict[str, Any]:
        """The trace of the model at these indices; `values` of sites may be proxies."""
        model = handlers.substitute(
            handlers.seed(program.model, random.key(0)), data={**values, **index}
        )
        with warnings.catch_warnings():
            # NumPyro warns of indices for a whole plate, or for a chunk of it
            warnings.filterwarnings("ignore", "subsample_size does not match")
            return handlers.trace(model).get_trace(*program.args, **program.kwargs)

    def requests(
        self, program: Program, index: Index, values: Mapping[str, Any]
    ) -> dict[str, RowRequests]:
        """The rows that the model requests of each site in `by_row`, at these indices."""
        fixed = {name: values[name] for name in self.whole} | self._any_local(index)
        return note_requests(lambda rows: self.run(program, index, {**fixed, **rows}), self.by_row)

    def _any_local(self, index: Index) -> dict[str, Array]:
        return {self.local: jnp.zeros(index[self.rows].shape)} if self.local else {}

    def terms(
        self, program: Program, index: Index, values: Mapping[str, Any]
    ) -> Callable[[Array | None], tuple[Array, Array]]:
        """A function of the local site [row] that returns the log joint of each row, and its terms.

        The log joint is without the priors of the other sites. The terms, [any, row], are those of
        the observed sites before they are scaled up.
        """

        def log_joint(local: Array | None) -> tuple[Array, Array]:
            own = {self.local: local} if self.local else {}
            trace, num_rows = self.run(program, index, {**values, **own}), len(index[self.rows])
            by_rows = self.sizes[self.rows][0] / num_rows
            total, sampled = jnp.zeros(num_rows), []
            for name in (*self.observed, *own):
                term, scale = _log_prob(trace[name]), (trace[name]["scale"] or 1.0) / by_rows
                shape = jnp.broadcast_shapes(term.shape, (num_rows,))
                term = jnp.broadcast_to(term, shape).reshape(-1, num_rows)
                total = total + scale * term.sum(0)
                if name not in own:
                    sampled.append(term)
            return total, jnp.concatenate(sampled)

        return log_joint

    def priors(
        self, program: Program, index: Index, values: Mapping[str, Any]
    ) -> tuple[dict[str, dist.Distribution], Array]:
        """The prior of one row of each site in `by_row`, and the log prior of those in `whole`."""
        trace = self.run(program, index, {**values, **self._any_local(index)})
        by_row = {name: _of_one_row(trace[name]["fn"], site) for name, site in self.by_row.items()}
        whole = (jnp.sum(_log_prob(trace[name])) for name in self.whole)
        return by_row, sum(whole, start=jnp.zeros(()))

    def noise(self, program: Program) -> dist.Distribution:
        """The prior of the local site, the same for all rows."""
        assert self.local is not None
        index = {name: jnp.arange(size[1]) for name, size in self.sizes.items()}
        noise = unwrap(self.run(program, index, self.zeros(program, index))[self.local]["fn"])
        if noise.batch_shape or is_traced(noise):
            raise StructureError(
                f"site {self.local!r}: its prior {type(noise).__name__} differs from row to row; "
                "wanted one noise for all."
            )
        return noise

    def zeros(self, program: Program, index: Index, fill: float = 0.0) -> dict[str, Any]:
        """Values of all sites at which the model can be run at these indices.

        No array among them has as many rows as there are classes.
        """
        values: dict[str, Any] = {
            name: self.constrained(name, jnp.full(site.shape, fill))
            for name, site in self.whole.items()
        }
        requests = self.requests(program, index, values)
        if unused := [name for name in self.by_row if name not in requests]:
            raise StructureError(
                f"site {unused[0]!r}: the model asks for none of its rows, so nothing is learned "
                "of it; leave it out."
            )
        rows = {
            name: one.answers(jnp.full((len(one.ids), *one.row_shape), fill))
            for name, one in requests.items()
        }
        return values | rows | self._any_local(index)

    def constrained(self, name: str, value: Array) -> Array:
        """The constrained value of a site of `whole`, from an unconstrained one."""
        return biject_to(self.whole[name].support)(value)


def _one_of_each_stratum(u: Array, size: int) -> Array:
    """A number from 0 to size - 1 for each stratum, [stratum, ...], from uniform numbers.

    The ends of the strata are exact in float64; a draw lies anywhere between them.
    """
    num = len(u)
    ends = (np.arange(num, dtype=np.float64) * size / num).reshape(num, *(1,) * (u.ndim - 1))
    low, rest = jnp.asarray(np.floor(ends), int), jnp.asarray(ends % 1, u.dtype)
    return jnp.minimum(low + jnp.floor(rest + u * (size / num)).astype(int), size - 1)


def _log_prob(site: dict[str, Any]) -> Array:
    try:
        return site["fn"].log_prob(site["value"])
    except (TypeError, NotImplementedError) as error:
        raise StructureError(
            f"site {site['name']!r}: its log probability cannot be computed. {error}"
        ) from error


def _of_one_row(prior: dist.Distribution, site: Site) -> dist.Distribution:
    """The distribution of one row: without the axes by which a plate expanded it."""
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
    """Reads which sites and plates of a model play which part in its sum over rows and classes.

    Raises:
        StructureError: names the site that keeps it from being a sum over rows.
    """
    sites, observed = program.sites, (*program.observed, *program.factors)
    plates = {name: sites[name].plates for name in observed}
    if not observed or not all(plates.values()):
        lacking = next((name for name in observed if not plates[name]), "")
        raise StructureError(
            f"site {lacking!r}: it is observed outside of any plate; wanted a plate of rows around "
            "all that is observed."
        )
    inside = {plate for each in plates.values() for plate in each}
    local = [name for name in program.latent if set(sites[name].plates) & inside]
    if len(local) > 1:
        raise StructureError(
            f"site {local[1]!r}: {local} lie in the plates of the data; wanted at most one, the "
            "noise of what was chosen."
        )
    outer = max(inside, key=lambda name: program.plates[name].dim or -99)
    rows = _plate_of(sites[local[0]]) if local else outer
    # the model may sum over some of the classes by itself
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
    return _with_globals(program, found)


def _plate_of(site: Site) -> str:
    is_one_number = len(site.plates) == len(site.shape) == 1 and not site.is_discrete
    if not is_one_number or repr(site.support) != "Real()":
        raise StructureError(
            f"site {site.name!r}: found {site.family} of shape {site.shape} in plates "
            f"{list(site.plates)}; wanted one real number for each row."
        )
    return site.plates[0]


def _with_globals(program: Program, found: ReducedModel) -> ReducedModel:
    """Puts all other sites into `by_row`, or into `whole` where the model uses the whole site.

    A site that is used as a whole must not be in a plate.
    """
    sites = {name: program.sites[name] for name in program.latent if name != found.local}
    for name, site in sites.items():
        if site.is_discrete:
            raise StructureError(f"site {name!r}: {site.family} is discrete, and has no gradient.")
    whole = {name: site for name, site in sites.items() if not site.shape}
    while True:
        by_row = {name: site for name, site in sites.items() if name not in whole}
        trial = found._replace(by_row=by_row, whole=whole)
        try:
            shapes, together = _requested_rows(trial, program)
        except UsedWholeError as error:
            if sites[error.site].plates:
                raise
            whole = whole | {error.site: sites[error.site]}
            continue
        for name, site in by_row.items():
            support = site.support
            while hasattr(support, "base_constraint"):
                support = support.base_constraint
            if repr(support) != "Real()":
                raise StructureError(
                    f"site {name!r}: its support is {site.support!r}; wanted rows of real numbers."
                )
        return trial._replace(row_shapes=shapes, together=together)


def _requested_rows(
    model: ReducedModel, program: Program
) -> tuple[dict[str, tuple[int, ...]], tuple[tuple[str, ...], ...]]:
    """Shapes of one row of each site, and which are requested together.

    They are found by an abstract run with proxies, which raises the errors of models that cannot be
    run so.
    """
    index = {name: jnp.arange(size[1]) for name, size in model.sizes.items()}
    shapes: dict[str, tuple[int, ...]] = {}
    together: dict[Any, list[str]] = {}

    def run() -> Array:
        values = model.zeros(program, index)
        eps = jnp.zeros(len(index[model.rows]))
        total, _ = model.terms(program, index, values)(eps)
        model.priors(program, index, values)
        for name, one in model.requests(program, index, values).items():
            shapes[name] = one.row_shape
            together.setdefault((id(one.ids), one.site.dtype), []).append(name)
        return total

    jax.eval_shape(run)
    return shapes, tuple(map(tuple, together.values()))
