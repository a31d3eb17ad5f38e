"""Augment and reduce: stochastic variational EM for sums over very many classes.

    maximise  sum_n E_q[log p(eps_n, row n | weights)] + H[q(eps_n)]  + log p(weights)      over q(eps_n) and the weights

A step draws some rows and some classes, moves q of those rows towards its optimum
(`noise_posterior`), and then the weights that the model asked for along the gradient
(`inference.reading.row_table`, `weights`, `row_optimizer`). The model is the only place of its
mathematics: it is run on those rows and classes, its own plates scale the terms up, and its prior,
its noise and its utilities may be edited. Estimates are unbiased.

The prior of a row of weights is felt when the row is touched, then for all steps since it was
touched last, so that rows which are not touched cost nothing and none of it is lost. With
`posterior` the weights have a normal distribution each, which is fitted along reparameterised
gradients; the target of q(eps) is that of the same draw, whose expectation is the moment-generating
function of the paper.

Cost of a step: batch_size x num_negatives x features, whatever the number of classes. Memory: twice
the weights (four times with `posterior`), one or two numbers a row of the data.

Ruiz, Titsias, Dieng and Blei (2018), algorithms 1 and 2.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random

from inference.kernels.augment_reduce.noise_posterior import Local, LocationScale, LogExponential
from inference.kernels.augment_reduce.row_optimizer import Adaptive, check_lazy, remembered
from inference.kernels.augment_reduce.weights import Row, Table, tables_of, view_of
from inference.program.compiling import is_arrays, once
from inference.program.program import Program
from inference.program.sites import StructureError, check_setting, check_whole
from inference.reading.row_table import ReducedModel, read_reduced
from inference.run.protocol import Algorithm, Results

__all__ = ["AugmentReduce", "ReduceReading", "ReduceReport", "ReduceState"]

PROBES = (0.3, 1.0, 2.5)  # where the slope in exp(-eps) is compared
LINEAR = 1e-3  # the relative difference of slopes that rounding leaves
LOG_START = -2.3  # of the standard deviation of weights, with `posterior`


class ReduceState(NamedTuple):
    """Where a run stands."""

    # [row, number] of `ReduceReading.tables`: weights and what belongs to them; see
    # `AugmentReduce.values`
    tables: tuple[Array, ...]
    # {"loc": value}, and "log_scale" with `posterior`, of each site that is used as a whole,
    # unconstrained
    whole: dict[str, Any]
    optimizer: dict[str, Any]  # what it knows of each site, beside its rows
    local: dict[str, Array]  # parameters of q(eps), [row]
    count: Array  # steps
    is_lost: Array  # whether the bound of a step was no number


class ReduceReport(NamedTuple):
    """What a step reports."""

    # unbiased estimate of the bound on the log likelihood of all rows; the prior of the weights is
    # not in it
    elbo: Array


@dataclass(frozen=True, eq=False)
class ReduceReading:
    """What was read of a model."""

    kernel: "AugmentReduce"
    program: Program  # the model with its settings; shapes in the place of arrays
    reduced: ReducedModel
    tables: tuple[Table, ...]
    reads: Local | None  # how q(eps) of a row moves; None where rows have no noise of their own

    def more(self, program: Program) -> "tuple[ReduceReading, dict[str, Any]]":
        """Other rows of the same model.

        Where settings and shapes are the same, so is the reading.
        """
        found, data = self.kernel.read(program)
        shapes = lambda reduced: {
            name: site.shape for name, site in (reduced.by_row | reduced.whole).items()
        }
        if shapes(self.reduced) != shapes(found.reduced):
            raise ValueError(
                "update: other rows must have the classes and features of those before."
            )
        if self.tables != found.tables:
            raise ValueError(
                "update: the model asks for rows of its weights along other axes, or gives them "
                "another kind of prior, than before; wanted "
                "features of the same kind, `SparseRows` or an array, and the same settings."
            )
        is_same = _settings(self.program) == _settings(found.program) and type(self.reads) is type(
            found.reads
        )
        return self if is_same else found, data

    @property
    def attributes(self) -> dict[str, str]:
        """For the tree: how the noise of the rows is augmented."""
        augmented = "closed form" if isinstance(self.reads, LogExponential) else "by draws"
        return {"route": "no augmentation" if self.reads is None else augmented}

    def by_row(self, programs: Sequence[Program]) -> tuple[str, ...]:
        """None: the tree tells of the last rows, whose q(eps) alone is known."""
        return ()

    def start(self) -> dict[str, Array]:
        """q(eps) of each row, at its start."""
        return (
            {} if self.reads is None else self.reads.start(self.reduced.sizes[self.reduced.rows][0])
        )

    def bound_of_rows(
        self, terms: Any, local: dict[str, Array], num_rows: int, rng_key: Array | None
    ) -> Array:
        """The bound on the log probability of each row, with what a step draws, or without a key
        by quadrature in eps.
        """
        if self.reads is None:
            return terms(None)[0]
        points, weight = self.reads.points(local, rng_key)
        each = (
            terms(points[0])[0][None]
            if len(points) == 1
            else jax.lax.map(lambda eps: terms(eps)[0], points)
        )
        return jnp.sum(weight * each, 0) + self.reads.entropy(local)


class AugmentReduce(Algorithm):
    """Fits a model such as `zoo.load("augment_reduce").model` by stochastic variational EM.

    The plates of the model say how many rows (`batch_size`) and classes (`num_negatives`) a step
    sees.

    :param posterior: the weights have a normal distribution each; else they are a point, the mode
    (or with a flat prior the
        maximum of the likelihood).
    :param own_negatives: classes are drawn for each row of a batch; else rows share them, which
    costs less.
    :param num_draws: of eps in a step, where its q is not in closed form.
    :param init_scale: standard deviation of the weights at the start.
    :param local_decay: step sizes of q(eps) are (1 + epoch)^-local_decay.
    :param optimizer: of the weights, with `init` and `update` as in optax; it must leave alone what
    has no slope.
    """

    report = "variational"

    def __init__(
        self,
        model: Any,
        *,
        posterior: bool = False,
        own_negatives: bool = False,
        num_draws: int = 1,
        init_scale: float = 0.01,
        local_decay: float = 0.9,
        optimizer: Any = None,
    ):
        check_whole(1, num_draws=num_draws)
        check_setting(init_scale >= 0, "a number, at least 0", init_scale=init_scale)
        if not 0.5 < local_decay <= 1:
            raise ValueError(
                f"local_decay: found {local_decay!r}, wanted a number above 0.5, at most 1, so "
                "that steps end but not too soon."
            )
        self.model, self.posterior, self.own_negatives, self.num_draws = (
            model,
            posterior,
            own_negatives,
            int(num_draws),
        )
        self.init_scale, self.local_decay, self.optimizer = init_scale, local_decay, optimizer
        self._update = Adaptive() if optimizer is None else optimizer
        check_lazy(self._update)

    def read(self, program: Program) -> tuple[ReduceReading, dict[str, Any]]:
        """The structure, by an evaluation on one batch of rows, and the arrays among the arguments;
        nothing is computed for all classes.
        """
        reduced = read_reduced(program)
        flat = [name for name, site in reduced.by_row.items() if site.family == "ImproperUniform"]
        if self.posterior and flat:
            raise StructureError(
                f"site {flat[0]!r}: its prior is flat, and its posterior need not exist; wanted a "
                "proper one, or posterior=False."
            )
        weighed = tuple(name for name in reduced.by_row if name not in flat)
        tables = tables_of(
            reduced, self._update, weighed, ("loc", "log_scale") if self.posterior else ("loc",)
        )
        finite, gap = once(partial(_probed, reduced, program, self.own_negatives), random.key(0))(
            random.key(0)
        )
        for name, is_finite in finite.items():
            if not is_finite:
                raise ValueError(
                    f"site {name!r}: its log probability is not finite at small weights; look at "
                    "the data that it is given."
                )
        is_linear = float(gap) < LINEAR
        reads = (
            None
            if not reduced.local
            else LogExponential()
            if is_linear
            else LocationScale(reduced.noise(program), self.num_draws)
        )
        data = {
            name: jax.tree.map(jnp.asarray, value)
            for name, value in program.arguments.items()
            if is_arrays(value)
        }
        shapes = program.with_arguments(**jax.eval_shape(lambda: data))
        return ReduceReading(self, shapes, reduced, tables, reads), data

    def init(self, rng_key: Array, reading: ReduceReading, data: dict[str, Any]) -> ReduceState:
        """Small weights; q(eps) at its start."""
        reduced = reading.reduced
        sites = {**reduced.by_row, **reduced.whole}
        values: dict[str, Any] = {}
        for key, (name, site) in zip(
            random.split(rng_key, max(len(sites), 1)), sites.items(), strict=False
        ):
            loc = self.init_scale * random.normal(key, site.shape)
            values[name] = {"loc": loc} | (
                {"log_scale": jnp.full(site.shape, LOG_START, loc.dtype)} if self.posterior else {}
            )
        tables, common = [], {name: self._update.init(values[name]) for name in reduced.whole}
        for table in reading.tables:
            of_rows = lambda name: jax.tree.map(
                lambda leaf: leaf.reshape(-1, *reduced.row_shapes[name]), values[name]
            )
            own = {name: of_rows(name) for name in table.sites}
            known = {name: remembered(self._update, value) for name, value in own.items()}
            common |= {name: rest for name, (_, rest) in known.items()}
            first = own[table.sites[0]]["loc"]
            touched = jnp.zeros(len(first), first.dtype) if table.weighed else None
            tables.append(
                table.pack(Row(own, {name: by_row for name, (by_row, _) in known.items()}, touched))
            )
        return ReduceState(
            tuple(tables),
            {name: values[name] for name in reduced.whole},
            common,
            reading.start(),
            jnp.zeros((), jnp.int32),
            jnp.zeros((), bool),
        )

    def values(self, state: ReduceState, reading: ReduceReading) -> dict[str, Any]:
        """{"loc": ...}, and "log_scale" with `posterior`, of each site; unconstrained where it
        is used as a whole.
        """
        found = dict(state.whole)
        for table, packed in zip(reading.tables, state.tables, strict=True):
            for name, value in table.unpack(packed).values.items():
                found[name] = {
                    part: leaf.reshape(reading.reduced.by_row[name].shape)
                    for part, leaf in value.items()
                }
        return found

    def step(
        self, rng_key: Array, state: ReduceState, reading: ReduceReading, data: dict[str, Any]
    ) -> tuple[ReduceState, ReduceReport]:
        """Some rows and classes: their q(eps), then the weights that they ask for."""
        model, program = reading.reduced, reading.program.with_arguments(**data)
        index_key, weight_key, local_key, point_key = random.split(rng_key, 4)
        index = model.draw_index(index_key, self.own_negatives)
        rows = index[model.rows]
        view = view_of(reading, program, index, state, weight_key)
        local = jax.tree.map(lambda leaf: leaf[rows], state.local)
        if reading.reads is not None:
            num_all, num_seen = model.sizes[model.rows]
            epoch = jnp.floor(state.count.astype(float) * (num_seen / num_all))
            drawn, at_means = (
                each.terms(each.parameters) for each in (view, view._replace(noise={}))
            )
            local = reading.reads.step(
                local, drawn, at_means, (1 + epoch) ** -self.local_decay, local_key
            )

        def objective(parameters: dict[str, Any]) -> tuple[Array, Array]:
            bound = reading.bound_of_rows(view.terms(parameters), local, len(rows), point_key)
            total = jnp.sum(bound) * (model.sizes[model.rows][0] / len(rows))
            return total + view.log_prior(parameters), total

        slopes, elbo = jax.grad(objective, has_aux=True)(view.parameters)
        moved = view.moved(self._update, jax.tree.map(jnp.negative, slopes))
        local = jax.tree.map(lambda whole, part: whole.at[rows].set(part), state.local, local)
        return moved._replace(
            local=local, is_lost=state.is_lost | ~jnp.isfinite(elbo)
        ), ReduceReport(elbo)

    def finished(self, state: ReduceState) -> Array:
        """Never by itself: the steps are the budget (`num_warmup`), or `stop` ends them."""
        return jnp.zeros((), bool)

    def needs_host(self, state: ReduceState) -> Array:
        """Whether weights have grown until the bound was no number: no step goes on from there."""
        return state.is_lost

    def on_host(
        self, states: Sequence[ReduceState], reading: ReduceReading, data: dict[str, Any]
    ) -> Sequence[ReduceState]:
        """Refuses to go on."""
        count = next(int(state.count) for state in states if state.is_lost)
        raise ValueError(
            f"after {count} steps the bound is no number: the weights of a step were too large. "
            "Give smaller steps, or features whose "
            "largest numbers are not far beyond their standard deviation."
        )

    def bound(
        self,
        state: ReduceState,
        reading: ReduceReading,
        data: dict[str, Any],
        rows_at_once: int = 64,
    ) -> float:
        """The bound on the log likelihood of all rows that `state` was fitted to, with all classes,
        at the means of the weights.

        Nothing is drawn; what is not in closed form is integrated by quadrature. Cost: rows x
        classes x features.
        """
        model, total = reading.reduced, 0.0
        every = {model.classes: jnp.arange(model.sizes[model.classes][0])} if model.classes else {}

        @jax.jit
        def of(rows: Array, state: ReduceState, data: dict[str, Any]) -> Array:
            index = every | {model.rows: rows}
            view = view_of(reading, reading.program.with_arguments(**data), index, state, None)
            local = jax.tree.map(lambda leaf: leaf[rows], state.local)
            return reading.bound_of_rows(view.terms(view.parameters), local, len(rows), None)

        for chunk in np.array_split(
            np.arange(model.sizes[model.rows][0]),
            max(model.sizes[model.rows][0] // rows_at_once, 1),
        ):
            total += float(np.asarray(of(jnp.asarray(chunk), state, data), np.float64).sum())
        return total

    def draw(
        self,
        rng_key: Array,
        state: ReduceState,
        reading: ReduceReading,
        data: dict[str, Any],
        num_draws: int,
    ) -> dict[str, Array]:
        """Draws of the weights and of what else is used as a whole; where they are a point,
        `num_draws` copies of it. The noise of the rows is left out: its q is among the variational
        parameters.
        """
        reduced, values, found = reading.reduced, self.values(state, reading), {}
        for key, (name, value) in zip(
            random.split(rng_key, max(len(values), 1)), values.items(), strict=False
        ):
            shape = (num_draws, *value["loc"].shape)
            drawn = jnp.broadcast_to(value["loc"][None], shape)
            if self.posterior:
                drawn = drawn + jnp.exp(value["log_scale"])[None] * random.normal(key, shape)
            constrain = jax.vmap(partial(reduced.constrained, name))
            found[name] = constrain(drawn) if name in reduced.whole else drawn
        return found

    def results(self, state: ReduceState, reading: ReduceReading, data: dict[str, Any]) -> Results:
        """The parameters of q(eps), and of the weights where they have a distribution."""
        if state.is_lost:
            self.on_host([state], reading, data)
        reduced = reading.reduced
        found = {f"{reduced.local}_{name}": value for name, value in state.local.items()}
        dims: dict[str, tuple[str, ...]] = dict.fromkeys(found, (reduced.rows,))
        values = self.values(state, reading) if self.posterior else {}
        for name, site in {**reduced.by_row, **reduced.whole}.items() if self.posterior else ():
            found |= {
                f"{name}_loc": values[name]["loc"],
                f"{name}_scale": jnp.exp(values[name]["log_scale"]),
            }
            dims |= {f"{name}_{part}": site.dims for part in ("loc", "scale")}
        dotted = lambda name: name.replace("/", ".")
        groups = (
            {"variational_parameters": {dotted(name): value for name, value in found.items()}}
            if found
            else {}
        )
        return Results(
            groups, {}, {dotted(name): tuple(map(dotted, own)) for name, own in dims.items()}
        )

    def updated(
        self,
        state: ReduceState,
        reading: ReduceReading,
        data: dict[str, Any],
        before: dict[str, Any],
    ) -> ReduceState:
        """Goes on with other rows: the weights stay, q(eps) starts anew."""
        return state._replace(local=reading.start())


def _settings(program: Program) -> tuple[Any, list[Any]]:
    """The arguments, in a form that is the same only where they are."""
    leaves, form = jax.tree.flatten(program.arguments)
    return form, [
        (
            type(leaf),
            leaf if isinstance(leaf, int | float | str | jax.ShapeDtypeStruct) else id(leaf),
        )
        for leaf in leaves
    ]


def _probed(
    model: ReducedModel, program: Program, own_negatives: bool, rng_key: Array
) -> tuple[dict[str, Array], Array]:
    """Which terms are finite; how far the log joint is from log u - rate u, u = exp(-eps)."""
    index = model.draw_index(rng_key, own_negatives)
    num_rows = len(index[model.rows])
    # The stand-ins answer in turn, once, so each run takes new ones.
    terms = lambda local: model.terms(program, index, model.zeros(program, index, 0.1))(local)
    total, sampled = terms(jnp.zeros(num_rows) if model.local else None)
    finite = {
        model.observed[0]: jnp.isfinite(sampled).all(),
        model.local or model.observed[-1]: jnp.isfinite(total).all(),
    }
    if not model.local:
        return finite, jnp.zeros(())
    slope = lambda u: (
        jax.jvp(lambda u: terms(-jnp.log(u))[0], (u,), (jnp.ones(num_rows),))[1] - 1 / u
    )
    each = jnp.stack([slope(jnp.full(num_rows, u)) for u in PROBES])
    return finite, jnp.max(jnp.ptp(each, axis=0) / (1 + jnp.abs(each[0])))
