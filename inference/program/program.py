"""A model with its arguments, and every question that may be asked of it.

A NumPyro model is a Python function whose density is never written down but found by running it
under handlers. A kernel, the driver and the diagnostics all need to run it so, and they ask the
same questions: which sites, which plates, the log joint and its terms, the way to unconstrained
space and back, draws from the prior and of new data. `Program` answers them in one place, from a
trace, so that nothing else in the project repeats a model's mathematics.

Values are always a dictionary `{site: array}` of one draw; `jax.vmap` gives many. The answers are
pure functions of the values and may be jitted. Which sites there are is found once, abstractly: the
model runs under `jax.eval_shape`, the data stay concrete (a model may look at the pattern of
missing entries), and no array is computed.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from jax.core import Tracer
from numpyro import handlers
from numpyro.infer.util import compute_log_probs, constrain_fn, potential_energy, unconstrain_fn
from numpyro.ops.provenance import eval_provenance

from inference.program.compiling import data_hash, is_traced, model_hash
from inference.program.sites import (
    Inspection,
    Plate,
    Site,
    StructureError,
    check,
    initial_value,
    inspect_model,
    is_data,
    model_name,
    named_error,
)

__all__ = ["Program", "evenly", "num_entries"]


class Program:
    """`model` with its arguments; the arguments are checked against its signature, nothing is
    traced yet.
    """

    def __init__(self, model: Callable, *args, **kwargs):
        if not callable(model):
            raise TypeError(
                f"model: found {type(model).__name__}, wanted a function of NumPyro primitives."
            )
        self.model, self.args, self.kwargs = model, args, kwargs
        self._bound = _bind(model, args, kwargs)

    def __reduce__(self):
        """What a trace has found holds tracers, and is found anew."""
        return _rebuilt, (self.model, self.args, self.kwargs)

    def __repr__(self):
        return f"Program({model_name(self.model)}, {', '.join(self.arguments)})"

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments by name, defaults not included."""
        named = dict(self._bound.arguments)
        return named | named.pop(_rest(self._bound.signature), {})

    def with_arguments(self, **changes) -> "Program":
        """The same model with some arguments replaced or added."""
        bound, rest = _bind(self.model, self.args, self.kwargs), _rest(self._bound.signature)
        for name, value in changes.items():
            if name in bound.signature.parameters and name != rest:
                bound.arguments[name] = value
            elif rest:
                bound.arguments[rest] = {**bound.arguments.get(rest, {}), name: value}
            else:
                raise TypeError(
                    f"{model_name(self.model)}{bound.signature} has no argument {name!r}."
                )
        return Program(self.model, *bound.args, **bound.kwargs)

    def with_stand_ins(self) -> "Program":
        """The program with numbers in place of traced arguments, of their shapes and in every
        support: 1 for floats, 0 for integers.
        """
        inside = lambda leaf: np.full(
            leaf.shape, jnp.issubdtype(leaf.dtype, jnp.inexact), leaf.dtype
        )
        fill = lambda leaf: inside(leaf) if isinstance(leaf, Tracer) else leaf
        traced = {
            name: jax.tree.map(fill, value)
            for name, value in self.arguments.items()
            if is_traced(value)
        }
        return self.with_arguments(**traced) if traced else self

    # Rows: of some arguments each entry is one.

    def by_row(self, num_rows: int, lists: bool = False) -> dict[str, Any]:
        """The arrays among the arguments that have an entry for each of so many rows; with `lists`
        also what NumPy makes an array of."""
        is_one = lambda value: isinstance(value, np.ndarray | Array) or lists
        return {
            name: value
            for name, value in self.arguments.items()
            if is_one(value) and num_entries(value) == num_rows
        }

    def on_rows(
        self, rows: np.ndarray, by_row: Iterable[str], site: str | None = None
    ) -> "Program":
        """The same model on some rows, by their numbers, of the arguments `by_row`.

        :param site: it is refused where it has not that many entries then; None: nothing is traced.
        """
        values = {name: self.arguments[name] for name in by_row}
        arrays = {
            name: value if isinstance(value, Array) else np.asarray(value)
            for name, value in values.items()
        }
        some = self.with_arguments(**{name: value[rows] for name, value in arrays.items()})
        if site is None:
            return some
        cut = (
            f"when the arguments {sorted(arrays)} are cut to {len(rows)} rows; wanted a model "
            "whose number of rows follows from its data."
        )
        try:
            found = some.sites[site].shape
        except (TypeError, ValueError) as error:
            error.add_note(f"site {site!r}: the model does not run {cut}")
            raise
        if found != (len(rows),):
            num_rows = self.sites[site].shape[0]
            raise StructureError(
                f"site {site!r}: {found[0]} rows remain of {num_rows} {cut} Take it from the "
                "length of an argument."
            )
        return some

    def few_rows(self, num_rows: int, size: int) -> np.ndarray:
        """Numbers of `size` rows: of different labels and with missing entries where it can be
        told, the others spread evenly over all; the last is repeated where there are fewer.
        """
        arrays = [np.asarray(value) for value in self.by_row(num_rows).values()]
        firsts = [
            i
            for value in arrays
            if value.ndim == 1
            for i in np.unique(value, return_index=True)[1][: size // 2]
        ]
        tables = [value for value in arrays if value.ndim == 2 and value.dtype.kind == "f"]
        holed = [i for value in tables for i in np.flatnonzero(np.isnan(value).any(1))[: size // 3]]
        chosen = np.sort(list(dict.fromkeys([*firsts, *holed, *evenly(num_rows, size)]))[:size])
        return np.pad(chosen, (0, size - len(chosen)), mode="edge")

    # What the trace says.

    @cached_property
    def _inspection(self) -> Inspection:
        try:
            return inspect_model(self.model, self.args, self.kwargs)
        except TypeError as error:
            raise named_error(self, error) from error

    @property
    def sites(self) -> Mapping[str, Site]:
        """Every sample and deterministic site, in the order of the trace."""
        return self._inspection.sites

    @property
    def plates(self) -> Mapping[str, Plate]:
        """Every plate, in the order of the trace."""
        return self._inspection.plates

    @property
    def latent(self) -> tuple[str, ...]:
        """Names of the sites that are drawn."""
        return self._names("latent")

    @property
    def observed(self) -> tuple[str, ...]:
        """Names of the sites that hold data; factors are not among them."""
        return self._names("observed")

    @property
    def deterministic(self) -> tuple[str, ...]:
        """Names of the sites that other sites determine: `numpyro.deterministic`, and a Delta
        without data.
        """
        return self._names("deterministic")

    @property
    def factors(self) -> tuple[str, ...]:
        """Names of the `numpyro.factor` sites."""
        return self._names("factor")

    def _names(self, kind: str) -> tuple[str, ...]:
        return tuple(name for name, site in self.sites.items() if site.kind == kind)

    @property
    def dims(self) -> dict[str, tuple[str, ...]]:
        """A name for each dimension of each site, as ArviZ gives them: plates, then
        `infer={"event_dims": [...]}`, then x_dim_0.
        """
        return {name: site.dims for name, site in self.sites.items() if site.kind != "factor"}

    @cached_property
    def parents(self) -> dict[str, frozenset[str]]:
        """The latent sites that each site's log probability, or deterministic value, is computed
        from, itself excluded.

        They are found by following the arrays through the program (`numpyro.ops.provenance`), not
        by their numbers: `0 * x` counts as a use of x, and so does a loop that carries x. No parent
        is ever missed.
        """

        indices = self._whole_indices()

        def answers(**values):
            values |= indices
            trace = self.trace(values)
            fixed = {name: trace[name]["value"] for name in self.deterministic}
            return {**self.log_probs(values), **fixed}

        found = eval_provenance(answers, **self._shapes())
        return {name: frozenset(found[name]) - {name} for name in self.sites}

    @cached_property
    def support_parents(self) -> dict[str, frozenset[str]]:
        """The latent sites that the bounds of each sample site's support are computed from."""
        indices = self._whole_indices()
        names = [name for name, site in self.sites.items() if site.support is not None]

        def bounds(**values):
            trace = self.trace(values | indices)
            return {
                name: [
                    leaf
                    for leaf in jax.tree.leaves(trace[name]["fn"].support)
                    if isinstance(leaf, Tracer)
                ]
                for name in names
            }

        return {
            name: frozenset().union(*leaves)
            for name, leaves in eval_provenance(bounds, **self._shapes()).items()
        }

    def _shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        return {
            name: jax.ShapeDtypeStruct(self.sites[name].shape, self.sites[name].dtype)
            for name in self.latent
        }

    @property
    def _subsampled(self) -> tuple[str, ...]:
        """The plates of which a run of the model sees a part."""
        return tuple(
            name for name, plate in self.plates.items() if plate.subsample_size < plate.size
        )

    def _whole_indices(self) -> dict[str, Array]:
        """Some indices of each subsampled plate, for questions whose answer does not depend on
        them.
        """
        return {name: jnp.arange(self.plates[name].subsample_size) for name in self._subsampled}

    @cached_property
    def observed_values(self) -> dict[str, Array]:
        """The data as the observed sites hold them; an entry that is itself latent (imputed by the
        model) is NaN.

        A site inside a subsampled plate is left out: it holds other rows in each run of the model,
        and so no one data set.
        """
        whole = [
            name
            for name in self.observed
            if not set(self.sites[name].plates) & set(self._subsampled)
        ]
        given = {name: self._inspection.observed[name] for name in whole}
        if not any(isinstance(value, Tracer) for value in given.values()):
            return {name: jnp.asarray(value) for name, value in given.items()}

        @jax.jit
        def at(rng_key):
            trace = self.trace(self._draw_start(rng_key))
            return {name: jnp.asarray(trace[name]["value"]) for name in given}

        first, second = (at(random.key(seed)) for seed in (0, 1))
        return {name: _where_equal(first[name], second[name]) for name in first}

    # The density and its terms.

    def trace(self, values: Mapping[str, Any], rng_key: Array | None = None) -> dict[str, dict]:
        """The model's trace with its latent sites at `values`; sites left out are drawn with
        `rng_key`.

        `values` may also give the indices of a subsampled plate, by its name. A deterministic site
        in it is ignored: the model computes it. An observed site keeps its data.
        """
        model = handlers.substitute(
            self.model, data=self._accepted(values, complete=rng_key is None)
        )
        if rng_key is not None:
            model = handlers.seed(model, rng_key)
        return handlers.trace(model).get_trace(*self.args, **self.kwargs)

    def log_probs(
        self, values: Mapping[str, Any], held: Mapping[str, Any] | None = None
    ) -> dict[str, Array]:
        """Log probability of each sample site, factors included, shaped by its batch dimensions;
        masks and scales applied.

        :param held: values of deterministic sites, in place of those that the model computes.
        """
        data = {**self._accepted(values), **(held or {})}
        return compute_log_probs(self.model, self.args, self.kwargs, data, sum_log_prob=False)[0]

    def log_prior(self, values: Mapping[str, Any]) -> dict[str, Array]:
        """The terms of the latent sites (and of a Delta without data)."""
        return self._terms(values, "latent", "deterministic")

    def log_likelihood(self, values: Mapping[str, Any]) -> dict[str, Array]:
        """The terms of the observed sites, one number for each observation; a plate must not be
        subsampled without its indices.
        """
        return self._terms(values, "observed")

    def log_factors(self, values: Mapping[str, Any]) -> dict[str, Array]:
        """The terms of the factors, which are neither prior nor likelihood."""
        return self._terms(values, "factor")

    def _terms(self, values, *kinds: str) -> dict[str, Array]:
        return {
            name: term
            for name, term in self.log_probs(values).items()
            if self.sites[name].kind in kinds
        }

    def log_joint(self, values: Mapping[str, Any]) -> Array:
        """Sum of all terms: prior, likelihood and factors."""
        return jnp.asarray(sum(jnp.sum(term) for term in self.log_probs(values).values()))

    # Unconstrained space: discrete sites pass through unchanged.

    def constrain(self, unconstrained: Mapping[str, Any]) -> dict[str, Any]:
        """Values in the support of each site, which may depend on other sites, from values
        anywhere.
        """
        fixed, free = self._split(unconstrained)
        model = handlers.substitute(self.model, data=fixed)
        return {**fixed, **constrain_fn(model, self.args, self.kwargs, free)}

    def unconstrain(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The inverse of `constrain`."""
        fixed, free = self._split(values)
        # observed: NumPyro looks for no transform of a discrete site
        model = handlers.condition(self.model, data=fixed)
        return {**fixed, **unconstrain_fn(model, self.args, self.kwargs, free)}

    def log_density_unconstrained(self, unconstrained: Mapping[str, Any]) -> Array:
        """Log joint with the Jacobian of `constrain`: minus NumPyro's potential energy."""
        fixed, free = self._split(unconstrained)
        return -potential_energy(
            handlers.substitute(self.model, data=fixed), self.args, self.kwargs, free
        )

    def _split(self, values) -> tuple[dict[str, Any], dict[str, Any]]:
        """What has no unconstrained form (discrete sites, indices of plates), and the rest."""
        known = self._known(values)
        free = {name: known[name] for name in self.latent if not self.sites[name].is_discrete}
        return {name: value for name, value in known.items() if name not in free}, free

    # Draws.

    def draw_initial(self, rng_key: Array) -> dict[str, Array]:
        """Latent values to start from: uniform on (-2, 2) in unconstrained space, from the prior
        where a site has no such space.
        """
        return self._latent_of(self._initial_trace(rng_key, {}))

    def _draw_start(
        self, rng_key: Array, given: Mapping[str, Any] | Callable | None = None
    ) -> dict[str, Array]:
        """`draw_initial` with the indices of the subsampled plates; sites in `given` stay, and
        others start in a support given them.
        """
        given = given if callable(given) else self._accepted(given or {}, complete=False)
        trace = self._initial_trace(rng_key, given)
        return {name: trace[name]["value"] for name in (*self.latent, *self._subsampled)}

    def _draw_prior_start(self, rng_key: Array) -> dict[str, Array]:
        trace = self.trace({}, rng_key)
        return {name: trace[name]["value"] for name in (*self.latent, *self._subsampled)}

    def _initial_trace(self, rng_key: Array, given: Mapping[str, Any] | Callable):
        def start(message):
            value = given(message) if callable(given) else given.get(message["name"])
            return initial_value(message) if value is None else value

        model = handlers.substitute(handlers.seed(self.model, rng_key), substitute_fn=start)
        return handlers.trace(model).get_trace(*self.args, **self.kwargs)

    def draw_prior(self, rng_key: Array, num_draws: int | None = None) -> dict[str, Array]:
        """Latent values from the prior; the observed sites keep their data, should a latent site
        depend on them.
        """
        for name in self.latent:
            if self.sites[name].family == "ImproperUniform":
                raise StructureError(
                    f"site {name!r}: its prior is ImproperUniform, which cannot be drawn from; "
                    f"wanted a proper prior. Give {name!r} "
                    f"one, or start from draw_initial."
                )
        draw = lambda key: self._latent_of(self.trace({}, key))
        return (
            draw(rng_key) if num_draws is None else jax.vmap(draw)(random.split(rng_key, num_draws))
        )

    def predict(self, rng_key: Array, values: Mapping[str, Any], **changes) -> dict[str, Array]:
        """New data from the model, and its deterministic sites, with the latent sites at `values`.

        The observed sites are drawn anew although the arguments hold data for them. `changes`
        replace arguments: new covariates, say, or `y=None` where the size of `y` counts. A latent
        site that is not in `values` is drawn given the rest.
        """
        program = self.with_arguments(**changes) if changes else self
        latent = self._known(values, complete=False)
        model = handlers.substitute(
            program.model, substitute_fn=lambda message: _fitting(message, latent)
        )
        trace = handlers.trace(handlers.uncondition(handlers.seed(model, rng_key))).get_trace(
            *program.args, **program.kwargs
        )
        wanted = lambda name, message: (
            is_data(message) or name in self.observed or message["type"] == "deterministic"
        )
        return {name: message["value"] for name, message in trace.items() if wanted(name, message)}

    def deterministics(self, values: Mapping[str, Any]) -> dict[str, Array]:
        """The deterministic sites at `values`."""
        trace = self.trace(values)
        return {name: trace[name]["value"] for name in self.deterministic}

    def _latent_of(self, trace) -> dict[str, Array]:
        return {name: trace[name]["value"] for name in self.latent}

    def _known(self, values, complete: bool = True) -> dict[str, Any]:
        """The latent sites and plates in `values`, checked by name."""
        unknown = [name for name in values if name not in self.sites and name not in self.plates]
        missing = [name for name in self.latent if name not in values] if complete else []
        if unknown or missing:
            problem = (
                f"has no site {unknown[0]!r}"
                if unknown
                else f"needs a value of site {missing[0]!r}"
            )
            raise ValueError(
                f"{model_name(self.model)} {problem}; found {sorted(values)}, wanted its latent "
                f"sites {list(self.latent)}."
            )
        for name in self._subsampled if complete else ():
            if name not in values:
                plate = self.plates[name]
                raise StructureError(
                    f"plate {name!r}: it shows {plate.subsample_size} of {plate.size} rows, and "
                    "the values do not say which. The "
                    "pointwise log likelihood needs the whole plate: drop subsample_size. For one "
                    "subsample give its indices, "
                    f"values[{name!r}]."
                )
        return {
            name: value
            for name, value in values.items()
            if name in self.latent or name in self.plates
        }

    def _accepted(self, values, complete: bool = True) -> dict[str, Any]:
        """The latent sites and plates in `values`, checked by name and shape."""
        known = self._known(values, complete)
        for name, value in known.items():
            if name in self.sites and jnp.shape(value) != self.sites[name].shape:
                raise ValueError(
                    f"site {name!r}: found a value of shape {jnp.shape(value)}, wanted "
                    f"{self.sites[name].shape}. "
                    f"For many draws use jax.vmap."
                )
        return known

    # Identity and sanity, each in its own module.

    def fingerprint(self) -> dict[str, Any]:
        """`{"model": hash, "data": {argument: hash}}`: the same in every process, another after
        any edit of the mathematics.
        """
        return {
            "model": model_hash(self),
            "data": {name: data_hash(value) for name, value in self.arguments.items()},
        }

    def check(self, start: Mapping[str, Any] | Callable | None = None) -> None:
        """Raises ValueError, before anything is compiled for long, where the data or the model
        cannot give a finite density.

        :param start: where to look first: values of latent sites, in their supports (sites left out
        are drawn), or one of
            NumPyro's initial strategies.
        """
        check(self, start)


def evenly(num_rows: int, size: int) -> np.ndarray:
    """Numbers of `size` rows, spread evenly over all."""
    return ((np.arange(size) + 0.5) * num_rows // size).astype(int)


def num_entries(value: Any) -> int | None:
    """Rows of an array, or of what NumPy makes an array of; None for a number and for a tuple of
    arrays of unlike lengths.
    """
    try:
        return len(value) if np.ndim(value) else None
    except ValueError:
        return None


def _rebuilt(model: Callable, args: tuple, kwargs: dict[str, Any]) -> Program:
    return Program(model, *args, **kwargs)


def _bind(model, args, kwargs) -> inspect.BoundArguments:
    signature = inspect.signature(model)
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{model_name(model)}{signature}: {error}.") from None


def _rest(signature: inspect.Signature) -> str | None:
    """Name of the parameter that takes any keyword, `**kwargs`."""
    names = [p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD]
    return names[0] if names else None


def _fitting(message, latent):
    """The value of a latent site, refused where changed arguments have changed its shape."""
    value = latent.get(message["name"])
    if (
        value is not None
        and message["type"] == "sample"
        and jnp.shape(value) != tuple(message["fn"].shape())
    ):
        raise ValueError(
            f"site {message['name']!r}: its value has shape {jnp.shape(value)}, the changed "
            "arguments ask for "
            f"{tuple(message['fn'].shape())}. Leave {message['name']!r} out of the values: it is "
            "then drawn given the others."
        )
    return value


def _where_equal(first: Array, second: Array) -> Array:
    """NaN where two runs of the model disagree on what is observed."""
    same = (
        (first == second) | (jnp.isnan(first) & jnp.isnan(second))
        if jnp.issubdtype(first.dtype, np.inexact)
        else first == second
    )
    return first if bool(same.all()) else jnp.where(same, first, jnp.nan)
