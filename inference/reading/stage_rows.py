"""Rows that are dealt out to stages, and what has no such rows: what kernels have in common that
learn a stage at a time.

A stage knows its rows by their places in the data of the program. All observed sites are in one
plate, the rows; arguments with an entry for each row are cut to those of a stage, and the size of
the plate must follow from them. That is proved, and so is that what a row says does not depend on
rows beside it, which may be of other stages.
"""

from dataclasses import dataclass
from numbers import Number
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random

from inference.program.compiling import data_hash, model_hash
from inference.program.program import Program, num_entries
from inference.program.sites import StructureError
from inference.reading.density import NUM_PROOFS, Split
from inference.reading.proof import gap, prove, random_settings

__all__ = [
    "StageData",
    "StageRows",
    "check_at_end",
    "check_finished",
    "row_dim",
    "row_terms",
    "taken",
]

FEW = 64  # rows, of which it is proved that they are independent


def row_terms(split: Split, row_axis: int, z: Array, program: Program) -> tuple[Array, Array]:
    """log prior, and the log likelihood of each row of a program; rows have this axis of the
    batch dimensions.
    """
    log_prior, rest = split.terms(z, program)
    terms = {
        name: jnp.moveaxis(term, row_axis, 0)
        for name, term in rest.items()
        if name in program.observed
    }
    log_prior = log_prior + sum(jnp.sum(term) for name, term in rest.items() if name not in terms)
    return log_prior, jnp.asarray(
        sum(term.reshape(len(term), -1).sum(1) for term in terms.values()), log_prior.dtype
    )


class StageData(NamedTuple):
    """The rows of a run or an update."""

    # the arguments by row, padded to a power of two, so that updates of similar size share compiled
    # code
    columns: dict[str, Array]
    num_rows: Array


@dataclass(frozen=True)
class StageRows:
    """The rows of a model that are dealt out to stages."""

    program: Program  # with the rows of the run, by which more rows are compared
    names: tuple[str, ...]  # of the arguments that have an entry for each row
    axis: int  # of the rows, among batch dimensions

    @classmethod
    def of(cls, program: Program, num_stages: int) -> "StageRows":
        """Reads the rows and proves that they are independent; refuses fewer of them than
        stages.
        """
        if program.factors:
            raise StructureError(
                f"site {program.factors[0]!r}: a factor is none of the rows that are dealt out to "
                "stages. Observe it by row."
            )
        by_row = _by_row(program)
        if _length(by_row) < num_stages:
            raise ValueError(
                f"num_stages: found {num_stages} for {_length(by_row)} rows; wanted a row or more "
                "for each stage."
            )
        return cls(program, tuple(by_row), program.plates[row_dim(program)].dim or -1)

    def prove(self) -> None:
        """At draws from the prior: some rows alone, in another order, have the terms that they
        have among all.
        """
        program, num_rows = self.program, len(self.program.arguments[self.names[0]])
        places = np.linspace(0, num_rows - 1, min(FEW, num_rows - num_rows // 2)).astype(int)[::-1]
        few = program.on_rows(places, self.names)
        split = Split(few)

        def gaps(key: Array) -> dict[str, Array]:
            z = split.draw(key)
            log_prior, terms = row_terms(split, self.axis, z, program)
            same_prior, same_terms = row_terms(split, self.axis, z, few)
            among_all, alone = (
                jnp.append(terms[places], log_prior),
                jnp.append(same_terms, same_prior),
            )
            either = ~(jnp.isnan(among_all) & jnp.isnan(alone))  # is a number
            missed = gap(
                jnp.where(either, alone, 0),
                jnp.where(either, among_all, 0),
                10 + jnp.abs(among_all),
            )
            return {f"sites {list(program.observed)}": missed}

        refusal = lambda sites, _: (
            f"{sites}: the log probability of a row, or of the latent sites, is another one where "
            "other rows are beside it; wanted "
            "rows that are independent given the latent sites. Compute what all rows have in "
            "common before, and give it to the "
            f"model as an argument."
        )
        prove(lambda: gaps, random_settings(random.key(2), num=NUM_PROOFS), refusal, tolerance=1e-4)

    def data(self, program: Program) -> StageData:
        """All rows of a program."""
        columns = {name: np.asarray(program.arguments[name]) for name in self.names}
        count = _length(columns)
        room = (1 << (count - 1).bit_length()) - count
        pad = lambda column: jnp.asarray(
            np.concatenate([column, np.zeros((room, *column.shape[1:]), column.dtype)])
        )
        return StageData(
            {name: pad(column) for name, column in columns.items()}, jnp.asarray(count, jnp.int32)
        )

    def dealt(self, rng_key: Array, num_stages: int, data: StageData) -> tuple[Array, Array]:
        """Places of the rows of the first stage, which takes the remainder, and of those to
        come, [stage, row].
        """
        order = random.permutation(rng_key, int(data.num_rows)).astype(jnp.int32)
        each = len(order) // num_stages
        first = len(order) - each * (num_stages - 1)
        return order[:first], order[first:].reshape(num_stages - 1, each)

    def own(self, data: StageData, rows: Array) -> Program:
        """The model on some of the rows; on the host, where nothing is compiled for their
        number.
        """
        cut = {
            name: jnp.asarray(np.asarray(column)[np.asarray(rows)])
            for name, column in data.columns.items()
        }
        return self.program.with_arguments(**cut)

    def check_alike(self, program: Program, asked: str = "update") -> None:
        """Refuses all but more rows of the same model, in words that name `asked`."""
        mine, found = self.program.arguments, program.arguments
        rows, rest = set(self.names), {name for name in {*mine, *found} if name not in self.names}
        differ = sorted(
            name
            for name in rest
            if name not in mine or name not in found or not _is_same(mine[name], found[name])
        )
        differ += sorted(
            name
            for name in rows
            if name not in found or _of_row(found[name]) != _of_row(mine[name])
        )
        if differ:
            raise ValueError(
                f"{asked}: more rows of the same model are wanted, but argument {differ[0]!r} is "
                "another one."
            )
        sizes = {name: len(found[name]) for name in sorted(rows)}
        if empty := [name for name, size in sizes.items() if not size]:
            raise ValueError(f"{asked}: argument {empty[0]!r} has no rows; wanted one or more.")
        if len(set(sizes.values())) > 1:
            raise ValueError(f"{asked}: arguments have {sizes} rows; wanted as many in each.")
        alike = {
            name: value
            for name, value in found.items()
            if name in rows or _has_content(mine[name], value)
        }
        # as by a function among the arguments
        if model_hash(self.program.with_arguments(**alike)) != model_hash(program):
            raise ValueError(
                f"{asked}: more rows of the same model are wanted, and this is another one."
            )
        program.check()


def taken(state: Any, count: int) -> tuple[Any, Array]:
    """The state without so many of the stages that were dealt, or all that are left; and their
    rows.
    """
    number, first = min(count, int(state.num_left)), len(state.later) - int(state.num_left)
    return state._replace(num_left=state.num_left - number), state.later[
        first : first + number
    ].reshape(-1)


def check_at_end(is_over: Any) -> None:
    """Refuses to begin a stage for a replicate that is not at the end of one: another that is
    stacked with it may be.
    """
    if not is_over:
        raise ValueError(
            "chain_method: stages of replicates, or turns in them, end at different steps; use "
            "'sequential'."
        )


def check_finished(state: Any, is_finished: Array) -> None:
    """What a stage has not come to yet are rows of the program before, so that all must have
    finished before an update.
    """
    if not is_finished:
        raise ValueError(
            f"update: the run stands in stage {int(state.stage) + 1} of "
            f"{int(state.stage + state.num_left) + 1}; wanted one that has "
            f"finished. Let it go on first: `extend(1_000_000)` ends when it has."
        )


def row_dim(program: Program) -> str:
    """The plate that all observed sites are in; where there are several, the last whose size
    follows from arguments.
    """
    plates = [site.plates for name, site in program.sites.items() if name in program.observed]
    common = (
        [plate for plate in plates[0] if all(plate in each for each in plates)] if plates else []
    )
    if not common:
        raise StructureError(
            f"sites {list(program.observed)}: they share no plate; wanted the rows in one, to be "
            "dealt out to stages."
        )
    if len(common) == 1:
        return common[0]
    return next((plate for plate in reversed(common) if _follows(program, plate)), common[-1])


def _follows(program: Program, plate: str) -> bool:
    try:
        return _recounted(program, plate).plates[plate].size == _another(program.plates[plate].size)
    except StructureError:
        return False  # of this plate; where it holds of all, `_by_row` says so


def _with_entries(program: Program, plate: str) -> dict[str, Any]:
    """The arguments that have an entry for each member of a plate."""
    return program.by_row(program.plates[plate].size, lists=True)


def _recounted(program: Program, plate: str) -> Program:
    """With another number of such entries."""
    by_row, size = _with_entries(program, plate), program.plates[plate].size
    cut = program.on_rows(np.arange(_another(size)) % size, by_row)
    try:
        cut.plates  # noqa: B018 (the model is run)
    except (TypeError, ValueError, IndexError) as error:
        raise StructureError(
            f"arguments {sorted(by_row)}: each has {size} entries, as many as there are rows, and "
            f"of {_another(size)} the model "
            f"makes an error: {error} Where one of them is no column of the rows, give it another "
            "shape, or bind it by partial."
        ) from error
    return cut


def _by_row(program: Program) -> dict[str, Any]:
    """The arguments that have an entry for each row; refused where the number of rows does not
    follow from them, or a latent site has a part for each row, of which every stage would have its
    own.
    """
    plate = row_dim(program)
    by_row, cut = _with_entries(program, plate), _recounted(program, plate)
    num_rows = program.plates[plate].size
    another = _another(num_rows)
    if not by_row or cut.plates[plate].size != another:
        raise StructureError(
            f"plate {plate!r}: its size does not follow from the arguments {sorted(by_row)}; "
            "wanted the number of rows taken from them."
        )
    for name in program.latent:
        if cut.sites[name].shape != program.sites[name].shape:
            raise StructureError(
                f"site {name!r}: its shape is {program.sites[name].shape} with {num_rows} rows, "
                f"{cut.sites[name].shape} with "
                f"{another}; wanted latent sites that all rows have in common. Integrate it out of "
                "the model."
            )
    return by_row


def _is_same(mine: Any, found: Any) -> bool:
    """As far as an argument has content; of functions only names are known."""
    is_number = isinstance(mine, Number) and isinstance(found, Number)
    return (is_number and mine == found) or data_hash(mine) == data_hash(found)


def _has_content(mine: Any, found: Any) -> bool:
    """Whether `_is_same` knows all of them: arrays and numbers, in forms that are equal."""
    is_known = lambda leaf: hasattr(leaf, "__array__") or isinstance(leaf, Number)
    return jax.tree.structure(mine) == jax.tree.structure(found) and all(
        map(is_known, jax.tree.leaves(found))
    )


def _of_row(values: Any) -> tuple[Any, ...] | None:
    """The shape of a row, and whether it is of flags: as numbers, earlier flags would be others."""
    if num_entries(values) is None:
        return None
    values = values if isinstance(values, Array) else np.asarray(values)
    return values.shape[1:], values.dtype == bool


def _length(by_row: dict[str, Any]) -> int:
    return len(next(iter(by_row.values())))


def _another(size: int) -> int:
    """Half as many, or one row twice."""
    return 2 if size == 1 else size - size // 2
