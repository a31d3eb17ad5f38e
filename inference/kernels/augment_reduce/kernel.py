"""Augment and reduce: stochastic variational EM for sums over very many classes.

    maximise  sum_n E_q[log p(eps_n, row n | weights)] + H[q(eps_n)]  + log p(weights)
    over q(eps_n) and the weights

A step draws some rows and some classes. It moves q of those rows towards its optimum
(`noise_posterior`), and then the weights that the model requested along the gradient
(`inference.reading.row_table`, `weights`). The model is the only place of its mathematics: it is
run on those rows and classes, its own plates scale the terms up, and its prior, its noise and its
utilities may be edited. Estimates are unbiased. `handlers.scale` in the model counts, be it a
number or one for each row or class. With `frequencies` classes are drawn in proportion to their
frequency (footnote 2 of the paper), with importance weights.

The prior of a row of weights counts when the row is touched, then for all steps since it was
touched last. So rows that are not touched cost nothing, and no part of the prior is lost. With
`posterior` each weight has a Normal distribution, which is fitted along reparameterised gradients.
The target of q(eps) is then computed at the same draw of the weights; its expectation is the
moment-generating function of the paper.

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

from inference.kernels.augment_reduce.noise_posterior import (
    LocationScale,
    LogExponential,
    NoisePosterior,
)
from inference.kernels.augment_reduce.weights import (
    Adaptive,
    Row,
    RowLayout,
    check_lazy,
    layouts_of,
    minibatch_of,
    remembered,
)
from inference.maths.host import generator
from inference.program.compiling import is_arrays
from inference.program.interpreting import interpreted
from inference.program.program import Program
from inference.program.sites import StructureError, check_setting, check_whole
from inference.reading.proof import gap_of_numbers
from inference.reading.row_table import ByFrequency, ReducedModel, Strata, read_reduced, with_room
from inference.run.command import Command
from inference.run.protocol import Algorithm, Results

__all__ = ["AugmentReduce", "ReduceData", "ReduceReading", "ReduceReport", "ReduceState"]


class ReduceState(NamedTuple):
    """The state of a run."""

    # [row, number] of `ReduceReading.layouts`: weights and what belongs to them; see
    # `AugmentReduce.values`
    tables: tuple[Array, ...]
    # {"loc": value}, and "log_scale" with `posterior`, of each site that is used as a whole,
    # unconstrained
    whole: dict[str, Any]
    optimizer: dict[str, Any]  # its state for each site, without what belongs to rows
    local: dict[str, Array]  # parameters of q(eps), [row]
    count: Array  # steps
    is_lost: Array  # whether the bound of a step was not finite


class ReduceData(NamedTuple):
    """What steps need beside the state; the same shapes for similar numbers of rows."""

    arguments: dict[str, Any]  # the arrays among the model's arguments, with rows that pad them
    rows: Strata  # of the rows without these
    share: Any  # of the rows that a step sees
    classes: ByFrequency | None  # None: classes are drawn with equal probabilities


class ReduceReport(NamedTuple):
    """The estimate of the bound (ELBO) that a step records."""

    elbo: Array  # unbiased estimate of the bound on the log likelihood of all rows


@dataclass(frozen=True, eq=False)
class ReduceReading:
    """The structure of a model, and the settings that compiled code depends on."""

    kernel: "AugmentReduce"
    program: Program  # the model with its settings; shapes in the place of arrays
    reduced: ReducedModel
    layouts: tuple[RowLayout, ...]
    q_noise: NoisePosterior | None  # q(eps) of a row; None where rows have no noise
    num_places: int  # rows of the data and rows that pad them

    def more(self, program: Program) -> "tuple[ReduceReading, ReduceData]":
        """The reading and the data of other rows of the same model.

        The reading is this one where settings and shapes are the same.
        """
        found, data = self.kernel.read(program)
        shapes = lambda reduced: {
            name: site.shape for name, site in (reduced.by_row | reduced.whole).items()
        }
        if shapes(self.reduced) != shapes(found.reduced):
            raise ValueError(
                "update: other rows must have the classes and features of those before."
            )
        if self.layouts != found.layouts:
            raise ValueError(
                "update: the model asks for rows of its weights along other axes, or gives them "
                "another kind of prior, than before; wanted features of the same kind, "
                "`SparseRows` or an array, and the same settings."
            )
        each = [
            (_settings(one.program), type(one.q_noise), one.reduced.sizes) for one in (self, found)
        ]
        return self if each[0] == each[1] else found, data

    @property
    def attributes(self) -> dict[str, str]:
        """The tree's attributes: how the noise of the rows is augmented."""
        return {"route": "no augmentation" if self.q_noise is None else self.q_noise.route}

    def by_row(self, programs: Sequence[Program]) -> tuple[str, ...]:
        """No variables of the tree are joined over updates: it holds q(eps) of the last rows."""
        return ()

    def start(self) -> dict[str, Array]:
        """The initial parameters of q(eps) of each row."""
        return {} if self.q_noise is None else self.q_noise.start(self.num_places)

    def bound_of_rows(self, terms: Any, local: dict[str, Array], rng_key: Array | None) -> Array:
        """The bound on the log probability of each row.

        Args:
            terms: the log joint as a function of eps.
            local: parameters of q(eps).
            rng_key: for draws of eps; without it they are integrated out by quadrature.
        """
        if self.q_noise is None:
            return terms(None)[0]
        points, weight = self.q_noise.points(local, rng_key)
        at_point = lambda eps: terms(eps)[0]
        each = at_point(points[0])[None] if len(points) == 1 else jax.lax.map(at_point, points)
        return jnp.sum(weight * each, 0) + self.q_noise.entropy(local)


class AugmentReduce(Algorithm):
    """Fits a model such as `zoo.load("augment_reduce").model` by stochastic variational EM.

    The plates of the model say how many rows (`batch_size`) and classes (`num_negatives`) a step
    sees.

    Args:
        model: a NumPyro model.
        posterior: whether each weight has a Normal distribution. Else weights are a point, the mode
            (or with a flat prior the maximum of the likelihood).
        own_negatives: whether classes are drawn for each row of a batch. Else rows share them,
            which costs less.
        frequencies: the model's argument with the class of each row. Half of the classes of a step
            are then drawn in proportion to their frequency, with importance weights; the others,
            and with None all, with equal probabilities. That pays where few classes are frequent.
        num_draws: of eps in a step, where q(eps) is not in closed form.
        init_scale: standard deviation of the weights at the start.
        local_decay: step sizes of q(eps) are (1 + epoch)^-local_decay.
        optimizer: of the weights, with `init` and `update` as in optax; a zero slope must move
            nothing.
    """

    report = "variational"
    # a point estimate has no summary
    command = Command({"posterior": True}, {"num_warmup": 5000}, held_out=0.2, is_marginal=True)

    def __init__(
        self,
        model: Any,
        *,
        posterior: bool = False,
        own_negatives: bool = False,
        frequencies: str | None = None,
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
        self.model, self.posterior, self.own_negatives = model, posterior, own_negatives
        self.frequencies, self.num_draws = frequencies, int(num_draws)
        self.init_scale, self.local_decay, self.optimizer = init_scale, local_decay, optimizer
        self._update = Adaptive() if optimizer is None else optimizer
        check_lazy(self._update)

    def read(self, program: Program) -> tuple[ReduceReading, ReduceData]:
        """The structure of the model, and the arrays among its arguments.

        The model is evaluated on one batch of rows; nothing is computed for all classes.
        """
        reduced = read_reduced(program)
        flat = [name for name, site in reduced.by_row.items() if site.family == "ImproperUniform"]
        if self.posterior and flat:
            raise StructureError(
                f"site {flat[0]!r}: its prior is flat, and its posterior need not exist; wanted a "
                "proper one, or posterior=False."
            )
        weighed = tuple(name for name in reduced.by_row if name not in flat)
        layouts = layouts_of(
            reduced, self._update, weighed, ("loc", "log_scale") if self.posterior else ("loc",)
        )
        padded, num_places = with_room(program, reduced)
        key = random.key(0)
        probed = partial(_probed, reduced, program, padded, self.own_negatives)
        finite, gap, gap_of_room = interpreted(probed, key)(key)
        for name, is_finite in finite.items():
            if not is_finite:
                raise ValueError(
                    f"site {name!r}: its log probability is not finite at small weights; look at "
                    "the data that it is given."
                )
        is_linear = float(gap) < 1e-3  # rounding leaves less
        q_noise = LogExponential() if reduced.local and is_linear else None
        if not is_linear:
            q_noise = LocationScale(reduced.noise(program), self.num_draws)
        if not gap_of_room < 1e-5:  # the model looks at other rows than those of a step
            padded, num_places = program, reduced.sizes[reduced.rows][0]
        arguments = {
            name: jax.tree.map(jnp.asarray, value)
            for name, value in padded.arguments.items()
            if is_arrays(value)
        }
        shapes = padded.with_arguments(**jax.eval_shape(lambda: arguments))
        num_rows, num_seen = reduced.sizes[reduced.rows]
        share = np.asarray(num_seen / num_rows, jnp.result_type(float))
        by = self.frequencies
        classes = None if by is None else reduced.frequencies(program, by, num_places)
        data = ReduceData(arguments, Strata.of(num_seen, num_rows), share, classes)
        reading = ReduceReading(self, shapes, reduced, layouts, q_noise, num_places)
        return reading, jax.tree.map(jnp.asarray, data)

    def init(self, rng_key: Array, reading: ReduceReading, data: ReduceData) -> ReduceState:
        """The state before the first step: small random weights, and q(eps) at its start."""
        sites = {**reading.reduced.by_row, **reading.reduced.whole}
        rng = generator(rng_key)
        draw = lambda shape: rng.standard_normal(shape, jnp.result_type(float))
        noise = {name: draw(site.shape) for name, site in sites.items()}
        return jax.tree.map(jnp.asarray, interpreted(partial(self._start, reading), noise)(noise))

    def _start(self, reading: ReduceReading, noise: dict[str, Array]) -> ReduceState:
        reduced, values = reading.reduced, {}
        for name, z in noise.items():
            values[name] = {"loc": self.init_scale * z}
            if self.posterior:
                # a standard deviation of 0.1
                values[name]["log_scale"] = jnp.full_like(z, -2.3)
        tables, common = [], {name: self._update.init(values[name]) for name in reduced.whole}
        for layout in reading.layouts:
            own, known = {}, {}
            for name in layout.sites:
                shape = (-1, *reduced.row_shapes[name])
                own[name] = jax.tree.map(
                    lambda leaf, shape=shape: leaf.reshape(shape), values[name]
                )
                known[name], common[name] = remembered(self._update, own[name])
            first = own[layout.sites[0]]["loc"]
            touched = jnp.zeros(len(first), first.dtype) if layout.weighed else None
            tables.append(layout.pack(Row(own, known, touched)))
        return ReduceState(
            tuple(tables),
            {name: values[name] for name in reduced.whole},
            common,
            reading.start(),
            count=jnp.zeros((), jnp.int32),
            is_lost=jnp.zeros((), bool),
        )

    def values(self, state: ReduceState, reading: ReduceReading) -> dict[str, Any]:
        """The parameters of each site: {"loc": ...}, and "log_scale" with `posterior`.

        They are NumPy arrays. Those of a site that is used as a whole are unconstrained.
        """
        found = jax.tree.map(np.asarray, state.whole)
        for layout, packed in zip(reading.layouts, state.tables, strict=True):
            for name, value in layout.unpack(np.asarray(packed)).values.items():
                shape = reading.reduced.by_row[name].shape
                found[name] = {part: leaf.reshape(shape) for part, leaf in value.items()}
        return found

    def step(
        self, rng_key: Array, state: ReduceState, reading: ReduceReading, data: ReduceData
    ) -> tuple[ReduceState, ReduceReport]:
        """Updates q(eps) of a random batch of rows, then the weights by a stochastic gradient step.

        Classes are subsampled as well. Only the rows of the weights that the model requests for
        these rows and classes are updated.
        """
        model, program = reading.reduced, reading.program.with_arguments(**data.arguments)
        index_key, weight_key, local_key, point_key = random.split(rng_key, 4)
        index = model.draw_index(index_key, self.own_negatives, data.rows, data.classes)
        rows, worth = index[model.rows], None
        if data.classes is not None:
            worth = data.classes.worth[index[str(model.classes)]]
        batch = minibatch_of(reading, program, index, state, weight_key, worth)
        local = jax.tree.map(lambda leaf: leaf[rows], state.local)
        if reading.q_noise is not None:
            epoch = jnp.floor(state.count.astype(float) * data.share)
            drawn = batch.terms(batch.parameters)
            at_means = batch._replace(noise={}).terms(batch.parameters) if batch.noise else drawn
            step_size = (1 + epoch) ** -self.local_decay
            local = reading.q_noise.step(local, drawn, at_means, step_size, local_key)

        def objective(parameters: dict[str, Any]) -> tuple[Array, Array]:
            bound = reading.bound_of_rows(batch.terms(parameters), local, point_key)
            total = jnp.sum(bound) / data.share
            return total + batch.log_prior(parameters), total

        slopes, elbo = jax.grad(objective, has_aux=True)(batch.parameters)
        moved = batch.moved(self._update, jax.tree.map(jnp.negative, slopes))
        local = jax.tree.map(lambda whole, part: whole.at[rows].set(part), state.local, local)
        is_lost = state.is_lost | ~jnp.isfinite(elbo)
        return moved._replace(local=local, is_lost=is_lost), ReduceReport(elbo)

    def finished(self, state: ReduceState) -> Array:
        """False: the number of steps (`num_warmup`) or `stop` ends a run."""
        return jnp.zeros((), bool)

    def needs_host(self, state: ReduceState) -> Array:
        """Whether the bound of a step was not finite: no step goes on from there."""
        return state.is_lost

    def on_host(
        self, states: Sequence[ReduceState], reading: ReduceReading, data: ReduceData
    ) -> Sequence[ReduceState]:
        """Raises ValueError: the steps were too large."""
        count = next(int(state.count) for state in states if state.is_lost)
        raise ValueError(
            f"after {count} steps the bound is no number: the weights of a step were too large. "
            "Give smaller steps, or features whose largest numbers are not far beyond their "
            "standard deviation."
        )

    def bound(
        self,
        state: ReduceState,
        reading: ReduceReading,
        data: ReduceData,
        rows_at_once: int = 64,
    ) -> float:
        """The bound on the log likelihood of all rows, with all classes, at the mean weights.

        Nothing is drawn; what is not in closed form is integrated by quadrature. Cost: rows x
        classes x features.

        Args:
            state: fitted to these rows.
            reading: of the model.
            data: of the reading.
            rows_at_once: in one evaluation of the model.
        """
        num_rows = reading.reduced.sizes[reading.reduced.rows][0]
        chunks = np.array_split(np.arange(num_rows), max(num_rows // rows_at_once, 1))
        bounds = (_bound_of_rows(reading, jnp.asarray(rows), state, data) for rows in chunks)
        return sum(float(np.asarray(each, np.float64).sum()) for each in bounds)

    def draw(
        self,
        rng_key: Array,
        state: ReduceState,
        reading: ReduceReading,
        data: ReduceData,
        num_draws: int,
    ) -> dict[str, Array]:
        """Draws of all sites but the noise of the rows; copies, where the weights are a point.

        The q of the noise is among the results, as variational parameters.
        """
        reduced, found = reading.reduced, {}
        rng = generator(rng_key)
        for name, value in self.values(state, reading).items():
            shape = (num_draws, *value["loc"].shape)
            drawn: Any = np.broadcast_to(value["loc"], shape)
            if self.posterior:
                drawn = drawn + np.exp(value["log_scale"]) * rng.standard_normal(shape, drawn.dtype)
            constrain = jax.vmap(partial(reduced.constrained, name))
            found[name] = constrain(drawn) if name in reduced.whole else drawn
        return found

    def results(self, state: ReduceState, reading: ReduceReading, data: ReduceData) -> Results:
        """The parameters of q(eps), and of the weights where they have a distribution."""
        if state.is_lost:
            self.on_host([state], reading, data)
        reduced = reading.reduced
        dotted = lambda name: name.replace("/", ".")
        num_rows = reduced.sizes[reduced.rows][0]
        found = {
            dotted(f"{reduced.local}_{name}"): jnp.asarray(np.asarray(value)[:num_rows])
            for name, value in state.local.items()
        }
        dims: dict[str, tuple[str, ...]] = dict.fromkeys(found, (dotted(reduced.rows),))
        for name, value in self.values(state, reading).items() if self.posterior else ():
            site = (reduced.by_row | reduced.whole)[name]
            parts = {"loc": value["loc"], "scale": np.exp(value["log_scale"])}
            found |= {dotted(f"{name}_{part}"): leaf for part, leaf in parts.items()}
            dims |= {dotted(f"{name}_{part}"): tuple(map(dotted, site.dims)) for part in parts}
        return Results({"variational_parameters": found} if found else {}, {}, dims)

    def updated(
        self,
        state: ReduceState,
        reading: ReduceReading,
        data: ReduceData,
        before: ReduceData,
    ) -> ReduceState:
        """The state for other rows: the weights stay, q(eps) starts anew."""
        return state._replace(local=reading.start())


@partial(jax.jit, static_argnums=0)
def _bound_of_rows(
    reading: ReduceReading, rows: Array, state: ReduceState, data: ReduceData
) -> Array:
    model, program = reading.reduced, reading.program.with_arguments(**data.arguments)
    every = {model.classes: jnp.arange(model.sizes[model.classes][0])} if model.classes else {}
    batch = minibatch_of(reading, program, every | {model.rows: rows}, state, None)
    local = jax.tree.map(lambda leaf: leaf[rows], state.local)
    return reading.bound_of_rows(batch.terms(batch.parameters), local, None)


def _settings(program: Program) -> tuple[Any, list[Any]]:
    leaves, form = jax.tree.flatten(program.arguments)
    return form, [
        (
            type(leaf),
            leaf if isinstance(leaf, int | float | str | jax.ShapeDtypeStruct) else id(leaf),
        )
        for leaf in leaves
    ]


def _probed(
    model: ReducedModel, program: Program, padded: Program, own_negatives: bool, rng_key: Array
) -> tuple[dict[str, Array], Array, Array]:
    """Whether terms are finite, and two gaps.

    The first is that between the log joint and log u - rate u, u = exp(-eps). The second is that
    between the terms and the priors of the model with and without rows that pad its data.
    """
    index = model.draw_index(rng_key, own_negatives)
    num_rows = len(index[model.rows])
    small = lambda shape: jnp.asarray(1e-3 * np.random.default_rng(0).normal(size=shape), float)
    at = jnp.zeros(num_rows) if model.local else None
    # the stand-ins of one program serve for several runs, in turn
    values = {one: model.some_values(one, index, small) for one in (program, padded)}
    terms = model.terms(program, index, values[program])
    total, sampled = terms(at)
    wide, _ = model.terms(padded, index, values[padded])(at)
    own, other = (
        jax.tree.leaves(model.priors(one, index, values[one])) for one in (program, padded)
    )
    gap_of_room = gap_of_numbers([wide, *other], [total, *own])
    finite = {
        model.observed[0]: jnp.isfinite(sampled).all(),
        model.local or model.observed[-1]: jnp.isfinite(total).all(),
    }
    if not model.local:
        return finite, jnp.zeros(()), gap_of_room
    slope = lambda u: (
        jax.jvp(lambda u: terms(-jnp.log(u))[0], (u,), (jnp.ones(num_rows),))[1] - 1 / u
    )
    each = jax.lax.map(lambda u: slope(jnp.full(num_rows, u)), jnp.array([0.3, 1.0, 2.5]))
    return finite, jnp.max(jnp.ptp(each, axis=0) / (1 + jnp.abs(each[0]))), gap_of_room
