"""The rows of a model, dealt out to the stages of a kernel that learns a stage at a time.

A stage has the indices of its rows in the data of the program. All observed sites are in one plate,
the rows. The arguments with an entry for each row are cut to the rows of a stage, and the size of
the plate must follow from them. It is proved that the likelihood of a row does not depend on the
other rows, which may belong to other stages.
"""

from dataclasses import dataclass
from numbers import Number
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from inference.maths.host import Array, generator
from inference.program.compiling import data_hash, model_hash
from inference.program.program import Program, num_entries
from inference.program.sites import StructureError, require
from inference.reading.density import NUM_PROOFS, Split
from inference.reading.proof import gap, prove

__all__ = [
    "StageData",
    "StageRows",
    "check_at_end",
    "check_finished",
    "known",
    "padded",
    "room_for",
    "row_dim",
    "row_terms",
    "taken",
]


def row_terms(split: Split, row_axis: int, z: Array, program: Program) -> tuple[Array, Array]:
    """Log prior, and the log likelihood of each row of a program.

    Args:
        split: prior and likelihood of the model.
        row_axis: axis of the rows among the batch dimensions.
        z: a vector [size].
        program: the model with some rows.
    """
    log_prior, rest = split.terms(z, program)
    terms = [
        jnp.moveaxis(term, row_axis, 0) for name, term in rest.items() if name in program.observed
    ]
    log_prior = log_prior + sum(
        jnp.sum(term) for name, term in rest.items() if name not in program.observed
    )
    by_row = sum(term.reshape(len(term), -1).sum(1) for term in terms)
    return log_prior, jnp.asarray(by_row, log_prior.dtype)


class StageData(NamedTuple):
    """The rows of a run or an update."""

    # the arguments by row, with copies of the last row behind (`room_for`)
    columns: dict[str, Array]
    num_rows: np.ndarray


def room_for(count: int) -> int:
    """Rows of an array for `count` rows: few sizes, so that other data need no other code.

    Powers of two up to 512, of which computing takes less time than compiling; then some 12 % more
    than `count` at the most.
    """
    power = 1 << (max(count, 1) - 1).bit_length()
    step = power if power <= 512 else power // 16
    return -(-count // step) * step


def padded(rows: np.ndarray, count: int) -> np.ndarray:
    """Indices of rows [..., row] with -1 behind, `count` in all."""
    rows = np.asarray(rows, np.int32)
    behind = [(0, 0)] * (rows.ndim - 1) + [(0, count - rows.shape[-1])]
    return np.pad(rows, behind, constant_values=-1)


def known(rows: Any) -> np.ndarray:
    """The indices in a padded array, one after another."""
    rows = np.asarray(rows).reshape(-1)
    return rows[rows >= 0]


@dataclass(frozen=True)
class StageRows:
    """The rows of a model that are dealt out to stages."""

    program: Program  # with the rows of the run, to which more rows are compared
    names: tuple[str, ...]  # of the arguments that have an entry for each row
    axis: int  # axis of the rows among the batch dimensions

    @classmethod
    def of(cls, program: Program, num_stages: int) -> "StageRows":
        """The rows of a program; raises ValueError if they are fewer than the stages."""
        if program.factors:
            raise StructureError(
                f"site {program.factors[0]!r}: a factor is none of the rows that are dealt out to "
                "stages. Observe it by row."
            )
        by_row = _by_row(program)
        if (num_rows := len(next(iter(by_row.values())))) < num_stages:
            raise ValueError(
                f"num_stages: found {num_stages} for {num_rows} rows; wanted a row or more "
                "for each stage."
            )
        return cls(program, tuple(by_row), program.plates[row_dim(program)].dim or -1)

    def prove(self, split: Split, most_rows: int = 64) -> None:
        """Raises StructureError unless rows are independent given the latent sites.

        At draws from the prior, the terms of some rows alone, in another order, must be those that
        they have among all rows.

        Args:
            split: prior and likelihood of the program.
            most_rows: the most rows that are alone.
        """
        program, num_rows = self.program, len(self.program.arguments[self.names[0]])
        count = min(most_rows, num_rows - num_rows // 2)
        places = np.linspace(0, num_rows - 1, count).astype(int)[::-1]
        some = program.on_rows(places, self.names)

        def gaps(z: Array) -> dict[str, Array]:
            log_prior, terms = row_terms(split, self.axis, z, program)
            alone_prior, alone_terms = row_terms(split, self.axis, z, some)
            among_all = jnp.append(terms[places], log_prior)
            alone = jnp.append(alone_terms, alone_prior)
            is_number = ~(jnp.isnan(among_all) & jnp.isnan(alone))
            zero_or = lambda values: jnp.where(is_number, values, 0)
            missed = gap(zero_or(alone), zero_or(among_all), 10 + jnp.abs(among_all))
            return {f"sites {list(program.observed)}": missed}

        refusal = lambda sites, _: (
            f"{sites}: the log probability of a row, or of the latent sites, changes with the "
            "other rows; wanted rows that are independent given the latent sites. Compute what "
            "depends on all rows beforehand, and give it to the model as an argument."
        )
        settings = [(z,) for z in split.draws(np.random.default_rng(2), NUM_PROOFS)]
        prove(lambda: gaps, settings, refusal, tolerance=1e-4)

    def data(self, program: Program) -> StageData:
        """All rows of a program."""
        columns = {name: np.asarray(program.arguments[name]) for name in self.names}
        count = len(next(iter(columns.values())))
        rows = np.minimum(np.arange(room_for(count)), count - 1)
        found = {name: jax.device_put(column[rows]) for name, column in columns.items()}
        return StageData(found, np.asarray(count, np.int32))

    def dealt(self, rng_key: Any, num_stages: int, data: StageData) -> tuple[Array, Array]:
        """Random row indices for each stage: of the first, [row], and of later ones, [stage, row].

        The first stage takes the remainder. Those of later ones are padded.
        """
        order = generator(rng_key).permutation(int(data.num_rows)).astype(np.int32)
        each = len(order) // num_stages
        first = len(order) - each * (num_stages - 1)
        return order[:first], padded(order[first:].reshape(num_stages - 1, each), room_for(each))

    def cut(self, data: StageData, rows: Int[np.ndarray, " row"]) -> dict[str, Array]:
        """The arguments by row, cut to some rows by NumPy, so that nothing is compiled."""
        cut = lambda column: jax.device_put(np.asarray(column)[np.asarray(rows)])
        return {name: cut(column) for name, column in data.columns.items()}

    def check_alike(self, program: Program, asked: str = "update") -> None:
        """Raises ValueError unless a program is the same model on other rows.

        The message begins with `asked`.
        """
        mine, found = self.program.arguments, program.arguments

        def is_alike(name: str) -> bool:
            if name not in found or name not in mine:
                return False
            if name in self.names:
                return _of_row(found[name]) == _of_row(mine[name])
            return _is_same(mine[name], found[name])

        if differ := [name for name in sorted({*mine, *found}) if not is_alike(name)]:
            raise ValueError(
                f"{asked}: more rows of the same model are wanted, but argument {differ[0]!r} is "
                "not the same."
            )
        sizes = {name: len(found[name]) for name in sorted(self.names)}
        if empty := [name for name, size in sizes.items() if not size]:
            raise ValueError(f"{asked}: argument {empty[0]!r} has no rows; wanted one or more.")
        if len(set(sizes.values())) > 1:
            raise ValueError(f"{asked}: arguments have {sizes} rows; wanted as many in each.")
        comparable = {
            name: value
            for name, value in found.items()
            if name in self.names or _has_content(mine[name], value)
        }
        # the model may differ by a function among the arguments
        if model_hash(self.program.with_arguments(**comparable)) != model_hash(program):
            raise ValueError(
                f"{asked}: more rows of the same model are wanted, but the model is not the same."
            )
        program.check()


def taken(state: Any, count: int) -> tuple[Any, Array]:
    """Takes the next `count` stages, or all that are left: the state without them, their rows."""
    number, first = min(count, int(state.num_left)), len(state.later) - int(state.num_left)
    rows = known(state.later[first : first + number])
    return state._replace(num_left=state.num_left - number), rows


def check_at_end(is_over: Any) -> None:
    """Raises ValueError unless a replicate is at the end of a stage, so that the next may begin.

    It may not be, where another replicate that is stacked with it is at its end.
    """
    if not is_over:
        raise ValueError(
            "chain_method: stages of replicates end at different steps; use 'sequential'."
        )


def check_finished(state: Any, is_finished: Array) -> None:
    """Raises ValueError for an update while stages are left, with rows of the earlier data."""
    if not is_finished:
        raise ValueError(
            f"update: the run stands in stage {int(state.stage) + 1} of "
            f"{int(state.stage + state.num_left) + 1}; wanted one that has "
            f"finished. Let it go on first: `extend(1_000_000)` ends when it has."
        )


def row_dim(program: Program) -> str:
    """The plate of all observed sites; of several, the last whose size follows from arguments."""
    plates = [program.sites[name].plates for name in program.observed]
    common = (
        [plate for plate in plates[0] if all(plate in each for each in plates)] if plates else []
    )
    require(
        common,
        f"sites {list(program.observed)}: they share no plate; wanted the rows in one, to be "
        "dealt out to stages.",
    )
    if len(common) == 1:
        return common[0]
    return next((plate for plate in reversed(common) if _follows(program, plate)), common[-1])


def _follows(program: Program, plate: str) -> bool:
    try:
        recounted = _recounted(program, plate)
    except StructureError:
        return False  # `_by_row` raises it again where it holds for all plates
    return recounted.plates[plate].size == _other_size(program.plates[plate].size)


def _recounted(program: Program, plate: str) -> Program:
    """The program with another number of entries, to see which sizes follow from it."""
    size = program.plates[plate].size
    by_row = program.by_row(size, lists=True)
    cut = program.on_rows(np.arange(_other_size(size)) % size, by_row)
    try:
        cut.plates  # noqa: B018 (the model is run)
    except (TypeError, ValueError, IndexError) as error:
        raise StructureError(
            f"arguments {sorted(by_row)}: each has {size} entries, as many as there are rows, and "
            f"with {_other_size(size)} the model raises: {error} Where one of them is no column of "
            "the rows, give it another shape, or bind it by partial."
        ) from error
    return cut


def _by_row(program: Program) -> dict[str, Any]:
    """The arguments that have an entry for each row.

    Raises StructureError where the number of rows does not follow from them, and for latent sites
    with a part for each row.
    """
    plate = row_dim(program)
    num_rows = program.plates[plate].size
    by_row, cut = program.by_row(num_rows, lists=True), _recounted(program, plate)
    require(
        by_row and cut.plates[plate].size == _other_size(num_rows),
        f"plate {plate!r}: its size does not follow from the arguments {sorted(by_row)}; "
        "wanted the number of rows taken from them.",
    )
    for name in program.latent:
        require(
            cut.sites[name].shape == program.sites[name].shape,
            f"site {name!r}: its shape is {program.sites[name].shape} with {num_rows} rows, "
            f"{cut.sites[name].shape} with {_other_size(num_rows)}; wanted latent sites that "
            "all rows have in common. Integrate it out of the model.",
        )
    return by_row


def _is_same(mine: Any, found: Any) -> bool:
    """Whether two arguments have the same content; of functions only names are compared."""
    is_number = isinstance(mine, Number) and isinstance(found, Number)
    return (is_number and mine == found) or data_hash(mine) == data_hash(found)


def _has_content(mine: Any, found: Any) -> bool:
    """Whether `_is_same` compares all of an argument: arrays and numbers, in equal structures."""
    is_known = lambda leaf: hasattr(leaf, "__array__") or isinstance(leaf, Number)
    is_equal = jax.tree.structure(mine) == jax.tree.structure(found)
    return is_equal and all(map(is_known, jax.tree.leaves(found)))


def _of_row(values: Any) -> tuple[Any, ...] | None:
    """The shape of a row, and whether it is boolean; None for an argument without entries."""
    if num_entries(values) is None:
        return None
    values = values if isinstance(values, jax.Array) else np.asarray(values)
    return values.shape[1:], values.dtype == bool


def _other_size(size: int) -> int:
    return 2 if size == 1 else size - size // 2
