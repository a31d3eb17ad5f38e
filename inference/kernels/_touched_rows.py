"""Sites with a row for each class, of which a step reads and moves few.

A model asks such a site for rows, `weights[classes]`. In its place it is given `Rows`, which notes what was asked; then the asked rows
alone are gathered, differentiated and moved, so that a step costs as much as it touches:

    asked = note_requests(run, sites)          # which rows, in which order
    rows = asked[site].gather(whole)           # [request, ...]
    run({site: asked[site].answers(rows)})     # the model on those rows, differentiable in them

A row that is asked for twice is one row: `slot` is the same for both, and `merged` adds up what belongs together.
"""

from collections.abc import Callable, Mapping
from itertools import cycle
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from inference.sites import Site, StructureError

__all__ = ["Asked", "Rows", "UsedWholeError", "note_requests"]

FEW = 1000  # ids that are sooner compared each with each than sorted
MOST = 2**31 - 1  # rows that an id of 32 bits tells apart


class UsedWholeError(StructureError):
    """A model uses all of a site where it was to ask for rows."""

    def __init__(self, site: str):
        super().__init__(
            f"site {site!r}: the model uses all of it, so that a step would cost as much as it has rows; wanted rows by integers, "
            f"{site}[classes]."
        )
        self.site = site


class Rows:
    """Stands in for a site; knows its shape and gives rows, nothing else."""

    def __init__(self, site: Site, give: Callable[[tuple[Any, ...]], Array]):
        self.site, self.shape, self.dtype, self.ndim = site.name, site.shape, site.dtype, len(site.shape)
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
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __matmul__ = __rmatmul__ = __pow__ = __rpow__ = _refuse

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") and name not in ("__jax_array__", "__array__"):  # by which it would be taken for an array
            raise AttributeError(name)
        raise UsedWholeError(self.site)


def _is_places(part: Any) -> bool:
    return not isinstance(part, slice | type(None) | type(...)) and jnp.issubdtype(jnp.result_type(part), jnp.integer)


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
        """The stand-in that answers with these rows, in the order in which they were asked for, and from the start in a further run."""
        sizes = [int(np.prod(shape)) for shape in self.shapes]
        pieces = jnp.split(rows, np.cumsum(sizes)[:-1].tolist())
        turn = cycle([piece.reshape(*shape, *self.row_shape) for piece, shape in zip(pieces, self.shapes, strict=True)])
        return Rows(self.site, lambda _: next(turn))


def note_requests(run: Callable[[dict[str, Rows]], Any], sites: Mapping[str, Site]) -> dict[str, Asked]:
    """What `run` asks of its stand-ins, which answer with zeros; a site of which it asks nothing is left out. Sites that are asked for the
    same rows, by the very same indices, share `ids` and `slot`."""
    noted: dict[str, list[tuple[Any, ...]]] = {name: [] for name in sites}

    def noting(site: Site) -> Rows:
        def give(parts: tuple[Any, ...]) -> Array:
            noted[site.name].append(parts)
            return jnp.zeros((*jnp.broadcast_shapes(*(jnp.shape(part) for part in parts)), *site.shape[len(parts) :]))

        return Rows(site, give)

    run({name: noting(site) for name, site in sites.items()})
    shared: dict[Any, tuple[Array, Array]] = {}  # by the identity of indices, which `noted` keeps alive
    found = {}
    for name, requests in noted.items():
        if requests:
            lead = _lead(sites[name], requests)
            key = lead, tuple(tuple(map(id, parts)) for parts in requests)
            if key not in shared:
                shared[key] = _places(lead, requests)
            shapes = tuple(jnp.broadcast_shapes(*(jnp.shape(part) for part in parts)) for parts in requests)
            found[name] = Asked(sites[name], *shared[key], shapes, sites[name].shape[len(lead) :])
    return found


def _lead(site: Site, requests: list[tuple[Any, ...]]) -> tuple[int, ...]:
    """Sizes of the axes that are indexed."""
    depths = {len(parts) for parts in requests}
    if len(depths) > 1:
        raise StructureError(f"site {site.name!r}: it is indexed by {sorted(depths)} axes in turn; wanted the same number each time.")
    lead = site.shape[: depths.pop()]
    if prod(lead) > MOST:
        raise StructureError(f"site {site.name!r}: its first axes {lead} have {prod(lead):.2g} rows, wanted {MOST} at most, to count them.")
    return lead


def _places(lead: tuple[int, ...], requests: list[tuple[Any, ...]]) -> tuple[Array, Array]:
    """Ids and slots of all requests."""
    places = [tuple(jnp.broadcast_arrays(*_same_rank(tuple(map(jnp.asarray, parts))))) for parts in requests]
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
