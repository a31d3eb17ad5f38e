"""Rows that are dealt out to stages, and what has no such rows: what kernels have in common that learn a stage at a time.

A stage knows its rows by their places in the data of the program. All observed sites are in one plate, the rows; arguments with an entry
for each row are cut to those of a stage, and the size of the plate must follow from them. That is proved, and so is that what a row says
does not depend on rows beside it, which may be of other stages.
"""

from collections.abc import Sequence
from numbers import Number
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random

from inference._counts import is_whole
from inference.fingerprint import data_hash, model_hash
from inference.program import Program, num_entries
from inference.proof import gap, prove, random_settings
from inference.protocol import Algorithm
from inference.sites import StructureError
from inference.split import NUM_PROOFS, Split

__all__ = ["ByStages", "check_counts", "row_terms"]

FEW = 64  # rows, of which it is proved that they are independent


def check_counts(**counts: Any) -> None:
    """Settings that are whole numbers, at least 1."""
    for name, value in counts.items():
        if not is_whole(value) or value < 1:
            raise ValueError(f"{name}: found {value!r}, wanted an integer, at least 1.")


def row_terms(split: Split, row_axis: int, z: Array, program: Program) -> tuple[Array, Array]:
    """log prior, and the log likelihood of each row of a program; rows have this axis of the batch dimensions."""
    log_prior, rest = split.terms(z, program)
    terms = {name: jnp.moveaxis(term, row_axis, 0) for name, term in rest.items() if name in program.observed}
    log_prior = log_prior + sum(jnp.sum(term) for name, term in rest.items() if name not in terms)
    return log_prior, jnp.asarray(sum(term.reshape(len(term), -1).sum(1) for term in terms.values()), log_prior.dtype)


class ByStages(Algorithm):
    """An algorithm whose states have `stage`, `later` [stage, row] and `num_left`, and which begins the next stage by `_next`."""

    num_stages: int
    split: Split
    row_arguments: tuple[str, ...]
    known_rows: tuple[str, ...] | None = None  # names of such arguments, where a run before has told them

    def check(self, program: Program) -> None:
        """The model is read and proved, and there are rows for each stage."""
        if program.factors:
            raise StructureError(
                f"site {program.factors[0]!r}: a factor is none of the rows that are dealt out to stages. Observe it by row."
            )
        by_row = self._by_row(program)
        num_rows = _length(by_row)
        if num_rows < self.num_stages:
            raise ValueError(f"num_stages: found {self.num_stages} for {num_rows} rows; wanted a row or more for each stage.")
        super().check(program)
        self._prove_rows(program, by_row)

    def _prove_rows(self, program: Program, by_row: dict[str, Any]) -> None:
        """At draws from the prior: some rows alone, in another order, have the terms that they have among all."""
        num_rows = _length(by_row)
        places = np.linspace(0, num_rows - 1, min(FEW, num_rows - num_rows // 2)).astype(int)[::-1]
        few = program.on_rows(places, by_row)
        split, axis = Split(few), self._row_axis(program)

        def gaps(key: Array) -> dict[str, Array]:
            z = split.draw(key)
            log_prior, terms = row_terms(split, axis, z, program)
            same_prior, same_terms = row_terms(split, axis, z, few)
            among_all, alone = jnp.append(terms[places], log_prior), jnp.append(same_terms, same_prior)
            either = ~(jnp.isnan(among_all) & jnp.isnan(alone))  # is a number
            missed = gap(jnp.where(either, alone, 0), jnp.where(either, among_all, 0), 10 + jnp.abs(among_all))
            return {f"sites {list(program.observed)}": missed}

        refusal = lambda sites, _: (
            f"{sites}: the log probability of a row, or of the latent sites, is another one where other rows are beside it; wanted "
            f"rows that are independent given the latent sites. Compute what all rows have in common before, and give it to the "
            f"model as an argument."
        )
        prove(lambda: gaps, random_settings(random.key(2), num=NUM_PROOFS), refusal, tolerance=1e-4)

    def _row_axis(self, program: Program) -> int:
        """Of the rows, among batch dimensions."""
        return program.plates[self.row_dim(program)].dim or -1

    def rows_of(self, programs: Sequence[Program]) -> tuple[str, ...]:
        """As the run has read them."""
        return self.row_arguments

    def row_dim(self, program: Program) -> str:
        """The plate that all observed sites are in; where there are several, the last whose size follows from arguments."""
        plates = [site.plates for name, site in program.sites.items() if name in program.observed]
        common = [plate for plate in plates[0] if all(plate in each for each in plates)] if plates else []
        if not common:
            raise StructureError(f"sites {list(program.observed)}: they share no plate; wanted the rows in one, to be dealt out to stages.")
        if len(common) == 1:
            return common[0]
        return next((plate for plate in reversed(common) if self._follows(program, plate)), common[-1])

    def _follows(self, program: Program, plate: str) -> bool:
        try:
            return self._recounted(program, plate).plates[plate].size == _another(program.plates[plate].size)
        except StructureError:
            return False  # of this plate; where it holds of all, `_by_row` says so

    def _with_entries(self, program: Program, plate: str) -> dict[str, Any]:
        """The arguments that have an entry for each member of a plate."""
        found = program.by_row(program.plates[plate].size, lists=True)
        return found if self.known_rows is None else {name: value for name, value in found.items() if name in self.known_rows}

    def _recounted(self, program: Program, plate: str) -> Program:
        """With another number of such entries."""
        by_row, size = self._with_entries(program, plate), program.plates[plate].size
        cut = program.on_rows(np.arange(_another(size)) % size, by_row)
        try:
            cut.plates  # noqa: B018 (the model is run)
        except (TypeError, ValueError, IndexError) as error:
            raise StructureError(
                f"arguments {sorted(by_row)}: each has {size} entries, as many as there are rows, and of {_another(size)} the model "
                f"makes an error: {error} Where one of them is no column of the rows, give it another shape, or bind it by partial."
            ) from error
        return cut

    def _by_row(self, program: Program) -> dict[str, Any]:
        """The arguments that have an entry for each row; refused where the number of rows does not follow from them, or a latent site
        has a part for each row, of which every stage would have its own."""
        plate = self.row_dim(program)
        by_row, cut = self._with_entries(program, plate), self._recounted(program, plate)
        num_rows = program.plates[plate].size
        another = _another(num_rows)
        if not by_row or cut.plates[plate].size != another:
            raise StructureError(
                f"plate {plate!r}: its size does not follow from the arguments {sorted(by_row)}; wanted the number of rows taken from them."
            )
        for name in program.latent:
            if cut.sites[name].shape != program.sites[name].shape:
                raise StructureError(
                    f"site {name!r}: its shape is {program.sites[name].shape} with {num_rows} rows, {cut.sites[name].shape} with "
                    f"{another}; wanted latent sites that all rows have in common. Integrate it out of the model."
                )
        return by_row

    def _num_rows(self, program: Program) -> int:
        """By the arguments in which the run has found the rows: by an update alone, another one might be as long."""
        return len(program.arguments[self.row_arguments[0]])

    def _dealt(self, rng_key: Array, program: Program) -> tuple[Array, Array]:
        """Places of the rows of the first stage, which takes the remainder, and of those to come, [stage, row]."""
        order = random.permutation(rng_key, self._num_rows(program)).astype(jnp.int32)
        each = len(order) // self.num_stages
        first = len(order) - each * (self.num_stages - 1)
        return order[:first], order[first:].reshape(self.num_stages - 1, each)

    def _own(self, program: Program, rows: Array) -> Program:
        """Some rows of a program."""
        return program.on_rows(np.asarray(rows), self.row_arguments)

    def _gone_on(self, state: Any, program: Program, is_over: Array) -> Any:
        """The next of the stages that were dealt, where the one before is over."""
        if not is_over or self.finished(state):  # another replicate is to go on, and this one is not at the end of a stage, or of all
            raise ValueError("chain_method: stages of replicates, or turns in them, end at different steps; use 'sequential'.")
        return self._next_dealt(state, program)

    def _next_dealt(self, state: Any, program: Program) -> Any:
        return self._next(*self._taken(state, 1), program, before=program)

    def _taken(self, state: Any, count: int) -> tuple[Any, Array]:
        """The state without so many of the stages that were dealt, or all that are left; and their rows."""
        taken, first = min(count, int(state.num_left)), len(state.later) - int(state.num_left)
        return state._replace(num_left=state.num_left - taken), state.later[first : first + taken].reshape(-1)

    def updated(self, state: Any, program: Program, before: Program) -> Any:
        """More rows: one more stage. What a stage has not come to yet are rows of the program before, so that all must have finished."""
        if not self.finished(state):
            raise ValueError(
                f"update: the run stands in stage {int(state.stage) + 1} of {int(state.stage + state.num_left) + 1}; wanted one that has "
                f"finished. Let it go on first: `extend(1_000_000)` ends when it has."
            )
        self._check_alike(program)
        return self._next(state, jnp.arange(self._num_rows(program), dtype=jnp.int32), program, before)

    def _check_alike(self, program: Program, asked: str = "update") -> None:
        """More rows of the same model, and nothing else."""
        mine, found = self.split.program.arguments, program.arguments
        rows, rest = set(self.row_arguments), {name for name in {*mine, *found} if name not in self.row_arguments}
        differ = sorted(name for name in rest if name not in mine or name not in found or not _is_same(mine[name], found[name]))
        differ += sorted(name for name in rows if name not in found or _of_row(found[name]) != _of_row(mine[name]))
        if differ:
            raise ValueError(f"{asked}: more rows of the same model are wanted, but argument {differ[0]!r} is another one.")
        sizes = {name: len(found[name]) for name in sorted(rows)}
        if empty := [name for name, size in sizes.items() if not size]:
            raise ValueError(f"{asked}: argument {empty[0]!r} has no rows; wanted one or more.")
        if len(set(sizes.values())) > 1:
            raise ValueError(f"{asked}: arguments have {sizes} rows; wanted as many in each.")
        alike = {name: value for name, value in found.items() if name in rows or _has_content(mine[name], value)}
        if model_hash(self.split.program.with_arguments(**alike)) != model_hash(program):  # as by a function among the arguments
            raise ValueError(f"{asked}: more rows of the same model are wanted, and this is another one.")
        program.check()

    def _next(self, state: Any, rows: Array, program: Program, before: Program) -> Any:
        """The next stage, of these rows of a program; those of the stage that is over are in the program before."""
        raise NotImplementedError(f"{type(self).__name__} has stages, and cannot begin the next.")


def _is_same(mine: Any, found: Any) -> bool:
    """As far as an argument has content; of functions only names are known."""
    is_number = isinstance(mine, Number) and isinstance(found, Number)
    return (is_number and mine == found) or data_hash(mine) == data_hash(found)


def _has_content(mine: Any, found: Any) -> bool:
    """Whether `_is_same` knows all of them: arrays and numbers, in forms that are equal."""
    is_known = lambda leaf: hasattr(leaf, "__array__") or isinstance(leaf, Number)
    return jax.tree.structure(mine) == jax.tree.structure(found) and all(map(is_known, jax.tree.leaves(found)))


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
