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

from inference.program.compiling import is_arrays, is_traced
from inference.program.program import Program
from inference.program.sites import Site, StructureError, is_real, require, unwrap

__all__ = [
    "ByFrequency",
    "Index",
    "ReducedModel",
    "RowProxy",
    "RowRequests",
    "Strata",
    "UsedWholeError",
    "note_requests",
    "read_reduced",
    "with_room",
]


MOST_PADDED = 2**14  # rows that are padded


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
        self.site, self.shape, self.dtype = site.name, site.shape, site.dtype
        self.ndim, self._give = len(site.shape), give

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
    require(
        len(depths) <= 1,
        f"site {site.name!r}: it is indexed by {sorted(depths)} axes in turn; wanted the same "
        "number each time.",
    )
    lead, most = site.shape[: depths.pop()], 2**31 - 1
    require(
        prod(lead) <= most,
        f"site {site.name!r}: its first axes {lead} have {prod(lead):.2g} rows, wanted {most} "
        "at most, to count them.",
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


class Strata(NamedTuple):
    """Ranges of equal size that divide the numbers 0 .. last; a draw takes one number of each."""

    low: Any  # [stratum] the smallest number of each
    rest: Any  # [stratum] by which the exact start of a stratum is larger
    width: Any
    last: Any

    @classmethod
    def of(cls, num: int, size: int) -> "Strata":
        """The strata of the numbers 0 .. size - 1, as NumPy arrays."""
        ends, dtype = np.arange(num, dtype=np.float64) * size / num, jnp.result_type(float)
        low = np.floor(ends).astype(jnp.result_type(int))
        number = low.dtype.type(size - 1)
        return cls(low, (ends % 1).astype(dtype), np.asarray(size / num, dtype), number)

    def draw(self, u: Array) -> Array:
        """A number of each stratum, from uniform ones [stratum, ...]."""
        low, rest = (part.reshape(-1, *(1,) * (u.ndim - 1)) for part in (self.low, self.rest))
        return jnp.minimum(low + jnp.floor(rest + u * self.width).astype(low.dtype), self.last)


class ByFrequency(NamedTuple):
    """Draws of classes: half of them uniform, half of them the classes of random rows.

    So a class is drawn in proportion to its frequency among the rows, and one without rows is drawn
    too. The importance weights `worth` make the sum over drawn classes unbiased for that over all.
    """

    uniform: Strata  # of the indices of the plate of classes
    rows: Strata  # of the rows
    chosen: Any  # [row] the class of each row, as an index of the plate
    worth: Any  # [index] uniform probability of a class over the probability that it is drawn with

    @classmethod
    def of(cls, chosen: np.ndarray, size: int, num_seen: int, num_places: int) -> "ByFrequency":
        """How `num_seen` indices of a plate of `size` are drawn; NumPy arrays of `num_places` rows.

        A row whose class is no index of the plate, such as one that stands in for others, gives its
        place to some index, so that all rows count. Cost: rows + classes.
        """
        num_rows = len(chosen)
        is_index = (chosen >= 0) & (chosen < size)
        chosen = np.where(is_index, chosen, np.arange(num_rows) % size).astype(np.int32)
        of_rows = (num_seen // 2) / num_seen
        frequency = np.bincount(chosen, minlength=size) / num_rows
        worth = 1 / (1 - of_rows + of_rows * size * frequency)
        return cls(
            Strata.of(num_seen - num_seen // 2, size),
            Strata.of(num_seen // 2, num_rows),
            np.pad(chosen, (0, num_places - num_rows)),
            worth.astype(jnp.result_type(float)),
        )

    def draw(self, u: Array) -> Array:
        """Indices of the plate, from uniform numbers [index, ...]."""
        of_rows, uniform = jnp.split(u, [len(self.rows.low)])
        drawn = jnp.asarray(self.chosen)[self.rows.draw(of_rows)]
        return jnp.concatenate([drawn, self.uniform.draw(uniform).astype(drawn.dtype)])


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

    def draw_index(
        self,
        rng_key: Array,
        own_negatives: bool,
        rows: Strata | None = None,
        classes: ByFrequency | None = None,
    ) -> Index:
        """Random rows and classes by stratified sampling, one from each stratum of equal size.

        Each is drawn with the same probability, and hardly any one twice, unless `classes` says
        otherwise.

        Args:
            rng_key: a key.
            own_negatives: whether each row gets classes of its own.
            rows: the strata of the rows; None for those of all rows of the model.
            classes: None for classes with equal probabilities.
        """
        num_rows = self.sizes[self.rows][1]
        shapes = {self.rows: (num_rows,)}
        if self.classes:
            num_classes = self.sizes[self.classes][1]
            shapes[self.classes] = (num_classes, num_rows) if own_negatives else (num_classes,)
        ends = np.cumsum([prod(shape) for shape in shapes.values()])
        # one call of the generator, since each call costs some operations
        parts = jnp.split(random.uniform(rng_key, (int(ends[-1]),)), ends[:-1].tolist())
        strata: dict[str, Any] = {
            name: Strata.of(shape[0], self.sizes[name][0]) for name, shape in shapes.items()
        }
        strata |= {self.rows: rows} if rows is not None else {}
        strata |= {self.classes: classes} if self.classes and classes is not None else {}
        return {
            name: strata[name].draw(u.reshape(shape))
            for (name, shape), u in zip(shapes.items(), parts, strict=True)
        }

    def frequencies(self, program: Program, name: str, num_places: int) -> ByFrequency | None:
        """How a step draws classes by their frequency; None where it sees all classes.

        Args:
            program: the model with its data.
            name: its argument with the class of each row.
            num_places: number of rows and of rows that pad them.
        """
        if self.classes is None:
            raise StructureError(
                f"frequencies: the model has no plate of classes, so that {name!r} tells nothing; "
                "leave it out."
            )
        for site in self.observed:
            require(
                self.classes in program.sites[site].plates,
                f"site {site!r}: it is not in the plate {self.classes!r}, and a class that is "
                "drawn by its frequency needs a weight of its own there; put the site into the "
                "plate, or leave `frequencies` out.",
            )
        num_rows = self.sizes[self.rows][0]
        values = np.asarray(program.arguments.get(name))
        if values.shape != (num_rows,) or not np.issubdtype(values.dtype, np.integer):
            raise ValueError(
                f"frequencies: found the argument {name!r} of shape {values.shape}; wanted the "
                f"name of an argument of integers ({num_rows},), the class of each row."
            )
        size, num_seen = self.sizes[self.classes]
        return None if num_seen == size else ByFrequency.of(values, size, num_seen, num_places)

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
        self,
        program: Program,
        index: Index,
        values: Mapping[str, Any],
        worth: Array | None = None,
    ) -> Callable[[Array | None], tuple[Array, Array]]:
        """A function of the local site [row] that returns the log joint of each row, and its terms.

        The log joint is without the priors of the other sites. The terms, [any, row], are those of
        the observed sites before plates scale them up; `handlers.scale` in the model counts.

        Args:
            program: the model with its data.
            index: of its plates.
            values: of its sites.
            worth: importance weights of the classes, [class] or [class, row]; None: 1.
        """

        def log_joint(local: Array | None) -> tuple[Array, Array]:
            own = {self.local: local} if self.local else {}
            trace, num_rows = self.run(program, index, {**values, **own}), len(index[self.rows])
            plates = {name: trace[name]["args"][0] / len(index[name]) for name in self.sizes}
            total, sampled = jnp.zeros(num_rows), []
            for name in (*self.observed, *own):
                around = {frame.name for frame in trace[name]["cond_indep_stack"]} & set(plates)
                by_plates = prod(plates[plate] for plate in around)
                term = (_scale(trace[name]) / by_plates) * _log_prob(trace[name])
                shape = jnp.broadcast_shapes(term.shape, (num_rows,))
                term = jnp.broadcast_to(term, shape).reshape(-1, num_rows)
                if name not in own:
                    sampled.append(term)
                    term = term if worth is None else worth.reshape(len(worth), -1) * term
                total = total + (by_plates / plates[self.rows]) * term.sum(0)
            return total, jnp.concatenate(sampled)

        return log_joint

    def priors(
        self, program: Program, index: Index, values: Mapping[str, Any]
    ) -> tuple[dict[str, tuple[dist.Distribution, Any]], Array]:
        """The prior of one row of each site in `by_row`, and the log prior of those in `whole`.

        With each prior comes the number by which `handlers.scale` scales it in the model.
        """
        trace = self.run(program, index, {**values, **self._any_local(index)})
        by_row = {
            name: (_of_one_row(trace[name]["fn"], site), _scale_of_all(trace[name]))
            for name, site in self.by_row.items()
        }
        whole = (jnp.sum(_scale(trace[name]) * _log_prob(trace[name])) for name in self.whole)
        return by_row, sum(whole, start=jnp.zeros(()))

    def noise(self, program: Program) -> dist.Distribution:
        """The prior of the local site, the same for all rows."""
        assert self.local is not None
        index = {name: jnp.arange(size[1]) for name, size in self.sizes.items()}
        noise = unwrap(self.run(program, index, self.some_values(program, index))[self.local]["fn"])
        require(
            not noise.batch_shape and not is_traced(noise),
            f"site {self.local!r}: its prior {type(noise).__name__} differs from row to row; "
            "wanted one noise for all.",
        )
        return noise

    def some_values(
        self, program: Program, index: Index, fill: Callable = jnp.zeros
    ) -> dict[str, Any]:
        """Values of all sites at which the model can be run at these indices.

        No array among them has as many rows as there are classes.

        Args:
            program: the model with its data.
            index: of its plates.
            fill: unconstrained values of a shape.
        """
        values: dict[str, Any] = {
            name: self.constrained(name, fill(site.shape)) for name, site in self.whole.items()
        }
        requests = self.requests(program, index, values)
        if unused := [name for name in self.by_row if name not in requests]:
            raise StructureError(
                f"site {unused[0]!r}: the model asks for none of its rows, so nothing is learned "
                "of it; leave it out."
            )
        rows = {
            name: one.answers(fill((len(one.ids), *one.row_shape)))
            for name, one in requests.items()
        }
        return values | rows | self._any_local(index)

    def constrained(self, name: str, value: Array) -> Array:
        """The constrained value of a site of `whole`, from an unconstrained one."""
        return biject_to(self.whole[name].support)(value)


def _log_prob(site: dict[str, Any]) -> Array:
    try:
        return site["fn"].log_prob(site["value"])
    except (TypeError, NotImplementedError) as error:
        raise StructureError(
            f"site {site['name']!r}: its log probability cannot be computed. {error}"
        ) from error


def _scale(site: dict[str, Any]) -> Any:
    """What plates and `handlers.scale` multiply the log probability by, a number or an array."""
    scale, shape = site["scale"], site["fn"].batch_shape
    if scale is None or not jnp.ndim(scale):
        return 1.0 if scale is None else scale
    fits = len(jnp.shape(scale)) <= len(shape) and all(
        one in (1, whole) for one, whole in zip(jnp.shape(scale)[::-1], shape[::-1], strict=False)
    )
    require(
        fits,
        f"site {site['name']!r}: handlers.scale has the shape {jnp.shape(scale)}, and its terms "
        f"{shape}; wanted a scale for each of these, indexed as the data are: "
        "`with plate(...) as row, handlers.scale(scale=weights[row])`.",
    )
    return jnp.broadcast_to(scale, shape)


def _scale_of_all(site: dict[str, Any]) -> Any:
    """The scale of a prior, the same for all rows."""
    scale = _scale(site)
    require(
        not jnp.ndim(scale),
        f"site {site['name']!r}: handlers.scale gives its rows different scales (shape "
        f"{jnp.shape(scale)}); wanted a number. To weigh rows of the data or classes, scale the "
        "observed site.",
    )
    return scale


def _of_one_row(prior: dist.Distribution, site: Site) -> dist.Distribution:
    """The distribution of one row: without the axes by which a plate expanded it."""
    require(
        not isinstance(prior, dist.MaskedDistribution),
        f"site {site.name!r}: its prior is masked, so that rows differ; wanted the same prior "
        "for all rows.",
    )
    prior = unwrap(prior)
    shape = prior.shape()
    require(
        len(shape) < len(site.shape) or shape[0] == 1,
        f"site {site.name!r}: its prior differs from row to row (parameters of shape {shape}); "
        "wanted the same for all rows.",
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
        require(
            rows in each,
            f"site {name!r}: it is not in the plate {rows!r} of the rows, as the others are.",
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


def with_room(program: Program, found: ReducedModel) -> tuple[Program, int]:
    """The model with its last row repeated, up to a power of two of rows; and how many these are.

    So other data of a similar size have the same shapes. Where a step sees all rows, or where there
    are many, it is the program itself.
    """
    num_rows, num_seen = found.sizes[found.rows]
    room = (1 << (num_rows - 1).bit_length()) - num_rows
    leaves = lambda value: [np.shape(leaf)[:1] == (num_rows,) for leaf in jax.tree.leaves(value)]
    by_row = {
        name: value
        for name, value in program.arguments.items()
        if is_arrays(value) and all(leaves(value))
    }
    if not (num_seen < num_rows and 64 <= num_rows <= MOST_PADDED and by_row):
        return program, num_rows

    def pad(leaf: Any) -> Any:
        found = np.pad(leaf, ((0, room), *((0, 0),) * (leaf.ndim - 1)), mode="edge")
        return jnp.asarray(found) if isinstance(leaf, Array) else found

    return program.with_arguments(**jax.tree.map(pad, by_row)), num_rows + room


def _plate_of(site: Site) -> str:
    require(
        len(site.plates) == len(site.shape) == 1 and is_real(site),
        f"site {site.name!r}: found {site.family} of shape {site.shape} in plates "
        f"{list(site.plates)}; wanted one real number for each row.",
    )
    return site.plates[0]


def _with_globals(program: Program, found: ReducedModel) -> ReducedModel:
    """Puts all other sites into `by_row`, or into `whole` where the model uses the whole site.

    A site that is used as a whole must not be in a plate.
    """
    sites = {name: program.sites[name] for name in program.latent if name != found.local}
    for name, site in sites.items():
        require(
            not site.is_discrete,
            f"site {name!r}: {site.family} is discrete, and has no gradient.",
        )
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
            require(
                is_real(site),
                f"site {name!r}: its support is {site.support!r}; wanted rows of real numbers.",
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
        values = model.some_values(program, index)
        total, _ = model.terms(program, index, values)(jnp.zeros(len(index[model.rows])))
        model.priors(program, index, values)
        for name, one in model.requests(program, index, values).items():
            shapes[name] = one.row_shape
            together.setdefault((id(one.ids), one.site.dtype), []).append(name)
        return total

    jax.eval_shape(run)
    return shapes, tuple(map(tuple, together.values()))
