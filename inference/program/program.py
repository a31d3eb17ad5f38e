"""A model with its arguments, and every question that may be asked of it.

A NumPyro model is a Python function. Its density is found by running it under handlers. Kernels,
the driver and the diagnostics need the same answers: which sites and plates there are, the log
joint and its terms, the way to unconstrained space and back, draws from the prior and of new data.
`Program` gives them from a trace, so that nothing else repeats a model's mathematics.

Values are a dictionary `{site: array}` of one draw; `jax.vmap` gives many. The answers are pure
functions of the values and may be jitted. Sites are found once, by an abstract run
(`inference.program.sites`).
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from jax.core import Tracer
from numpyro import handlers
from numpyro.distributions import biject_to
from numpyro.distributions.distribution import validation_enabled
from numpyro.infer.util import compute_log_probs, constrain_fn, potential_energy, unconstrain_fn
from numpyro.ops.provenance import eval_provenance

from inference.program.checks import check, named_error
from inference.program.compiling import data_hash, is_traced, model_hash
from inference.program.interpreting import interpreted
from inference.program.sites import (
    Inspection,
    Plate,
    Site,
    StructureError,
    initial_value,
    inspect_model,
    is_data,
    model_name,
)

__all__ = ["Program", "evenly", "num_entries"]


class Program:
    """A model with its arguments.

    Args:
        model: a function of NumPyro primitives.
        args, kwargs: its arguments, checked against its signature. Nothing is traced yet.
    """

    def __init__(self, model: Callable, *args: Any, **kwargs: Any):
        if not callable(model):
            raise TypeError(
                f"model: found {type(model).__name__}, wanted a function of NumPyro primitives."
            )
        self.model, self.args, self.kwargs = model, args, kwargs
        self._bound = _bind(model, args, kwargs)

    def __reduce__(self):
        """The model and its arguments only: cached answers hold tracers, and are found anew."""
        return partial(Program, self.model, *self.args, **self.kwargs), ()

    def __repr__(self):
        return f"Program({model_name(self.model)}, {', '.join(self.arguments)})"

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments by name, defaults not included."""
        named = dict(self._bound.arguments)
        return named | named.pop(_keyword_parameter(self._bound.signature), {})

    def with_arguments(self, **changes: Any) -> "Program":
        """The same model with some arguments replaced or added."""
        bound = _bind(self.model, self.args, self.kwargs)
        rest = _keyword_parameter(bound.signature)
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
        """The program with ones (floats) or zeros (integers) in place of traced arguments.

        These values are in the supports of most distributions.
        """
        fill = lambda leaf: (
            np.full(leaf.shape, jnp.issubdtype(leaf.dtype, jnp.inexact), leaf.dtype)
            if isinstance(leaf, Tracer)
            else leaf
        )
        traced = {
            name: jax.tree.map(fill, value)
            for name, value in self.arguments.items()
            if is_traced(value)
        }
        return self.with_arguments(**traced) if traced else self

    # Rows: some arguments have an entry for each row.

    def by_row(self, num_rows: int, lists: bool = False) -> dict[str, Any]:
        """The arguments that have an entry for each of `num_rows` rows.

        Args:
            num_rows: how many entries they have.
            lists: whether lists, of which NumPy makes an array, count beside arrays.
        """
        return {
            name: value
            for name, value in self.arguments.items()
            if (lists or isinstance(value, np.ndarray | Array)) and num_entries(value) == num_rows
        }

    def on_rows(
        self, rows: np.ndarray, by_row: Iterable[str], site: str | None = None
    ) -> "Program":
        """The same model on some rows of its data.

        Args:
            rows: indices of the rows.
            by_row: names of the arguments that are cut to them.
            site: a site that must then have as many entries, else StructureError. None makes no
                check, and traces nothing.
        """
        values = {name: self.arguments[name] for name in by_row}
        some = self.with_arguments(**{k: _rows_of(value, rows) for k, value in values.items()})
        if site is None:
            return some
        cut = (
            f"when the arguments {sorted(values)} are cut to {len(rows)} rows; wanted a model "
            "whose number of rows follows from its data."
        )
        try:
            found = some.sites[site].shape
        except (TypeError, ValueError) as error:
            error.add_note(f"site {site!r}: the model does not run {cut}")
            raise
        if found != (len(rows),):
            raise StructureError(
                f"site {site!r}: {found[0]} rows remain of {self.sites[site].shape[0]} {cut} Take "
                "it from the length of an argument."
            )
        return some

    def few_rows(self, num_rows: int, size: int) -> np.ndarray:
        """Indices of `size` rows: of different labels, with missing entries, others spread evenly.

        Labels are arguments with a number for each row, features those with a vector for each row.
        The last index is repeated where there are fewer rows.
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
    def inspection(self) -> Inspection:
        """What one abstract run of the model shows."""
        try:
            return inspect_model(self.model, self.args, self.kwargs)
        except TypeError as error:
            raise named_error(self, error) from error

    @property
    def sites(self) -> Mapping[str, Site]:
        """Every sample and deterministic site, in the order of the trace."""
        return self.inspection.sites

    @property
    def plates(self) -> Mapping[str, Plate]:
        """Every plate, in the order of the trace."""
        return self.inspection.plates

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
        """Names of the sites that other sites determine.

        These are those of `numpyro.deterministic`, and a Delta without data.
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
        """A name for each dimension of each site, as ArviZ gives them.

        It is that of a plate, one of `infer={"event_dims": [...]}`, or x_dim_0.
        """
        return {name: site.dims for name, site in self.sites.items() if site.kind != "factor"}

    @cached_property
    def parents(self) -> dict[str, frozenset[str]]:
        """The latent sites from which each site's log probability, or fixed value, is computed.

        The site itself is excluded. Parents are found by following the arrays through the program
        (`numpyro.ops.provenance`), not by their values: `0 * x` counts as a use of x, and so does
        a loop that carries x. No parent is missed.
        """
        fixed = self.deterministics if self.deterministic else lambda values: {}
        terms = lambda values: {**self.log_probs(values), **fixed(values)}
        found = self._provenance(terms)
        return {name: frozenset(found[name]) - {name} for name in self.sites}

    @cached_property
    def support_parents(self) -> dict[str, frozenset[str]]:
        """The latent sites from which the bounds of each sample site's support are computed."""
        bounds = lambda fn: [
            leaf for leaf in jax.tree.leaves(fn.support) if isinstance(leaf, Tracer)
        ]
        found = self._provenance(
            lambda values: {
                name: bounds(message["fn"])
                for name, message in self.trace(values).items()
                if name in self.sites and self.sites[name].support is not None
            }
        )
        return {name: frozenset().union(*leaves) for name, leaves in found.items()}

    def _provenance(self, function: Callable[[dict[str, Array]], Any]) -> Any:
        """The latent sites from which each output of a function of values is computed."""
        indices = self.some_indices()
        return eval_provenance(lambda **values: function(values | indices), **self.latent_shapes())

    def latent_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and types of the latent sites."""
        sites = {name: self.sites[name] for name in self.latent}
        return {k: jax.ShapeDtypeStruct(site.shape, site.dtype) for k, site in sites.items()}

    @property
    def subsampled(self) -> tuple[str, ...]:
        """The plates of which a run of the model sees a subsample of the rows."""
        return tuple(
            name for name, plate in self.plates.items() if plate.subsample_size < plate.size
        )

    def some_indices(self) -> dict[str, Array]:
        """Some indices of each subsampled plate, for answers that are the same for any rows."""
        return {name: jnp.arange(self.plates[name].subsample_size) for name in self.subsampled}

    @cached_property
    def observed_values(self) -> dict[str, Array]:
        """The data as the observed sites hold them; NaN where the model imputes an entry.

        A site inside a subsampled plate is left out: it holds other rows in each run of the model.
        """
        given = {
            name: value
            for name, value in self.inspection.observed.items()
            if not set(self.sites[name].plates) & set(self.subsampled)
        }
        if not is_traced(given):
            return {name: jnp.asarray(value) for name, value in given.items()}
        observed = lambda rng_key: _values(self._started(rng_key, {}), given)
        keys = [random.key(seed) for seed in (0, 1)]
        first, second = map(interpreted(observed, keys[0]), keys)
        return jax.device_put({name: _where_equal(first[name], second[name]) for name in first})

    @cached_property
    def _quick(self) -> Callable:
        """The model without NumPyro's checks of parameters, which `inspection` makes.

        JAX would compile each operation of a check by itself.
        """
        return validation_enabled(False)(self.model)

    # The density and its terms.

    def trace(
        self, values: Mapping[str, Any], rng_key: Array | None = None
    ) -> dict[str, dict[str, Any]]:
        """The model's trace with its latent sites at `values`.

        Args:
            values: of latent sites, and indices of subsampled plates by the plates' names. A
                deterministic site in it is ignored, since the model computes it. An observed site
                keeps its data.
            rng_key: draws the sites that `values` leaves out; None where it leaves out none.
        """
        model = handlers.substitute(self._quick, data=self._accepted(values, rng_key is None))
        if rng_key is not None:
            model = handlers.seed(model, rng_key)
        return handlers.trace(model).get_trace(*self.args, **self.kwargs)

    def log_probs(
        self, values: Mapping[str, Any], held: Mapping[str, Any] | None = None
    ) -> dict[str, Array]:
        """Log probability of each sample site and factor, with masks and scales, by batch entry.

        Args:
            values: of latent sites, and indices of subsampled plates.
            held: values of deterministic sites, in place of those that the model computes.
        """
        data = {**self._accepted(values), **(held or {})}
        return compute_log_probs(self._quick, self.args, self.kwargs, data, sum_log_prob=False)[0]

    def log_prior(self, values: Mapping[str, Any]) -> dict[str, Array]:
        """The terms of the latent sites (and of a Delta without data)."""
        return self._terms(values, "latent", "deterministic")

    def log_likelihood(self, values: Mapping[str, Any]) -> dict[str, Array]:
        """The terms of the observed sites, a number for each observation.

        Values must have the indices of subsampled plates.
        """
        return self._terms(values, "observed")

    def log_factors(self, values: Mapping[str, Any]) -> dict[str, Array]:
        """The terms of the factors, which are neither prior nor likelihood."""
        return self._terms(values, "factor")

    def _terms(self, values: Mapping[str, Any], *kinds: str) -> dict[str, Array]:
        terms = self.log_probs(values)
        return {name: term for name, term in terms.items() if self.sites[name].kind in kinds}

    def log_joint(self, values: Mapping[str, Any]) -> Array:
        """Sum of all terms: prior, likelihood and factors."""
        return jnp.asarray(sum(jnp.sum(term) for term in self.log_probs(values).values()))

    # Unconstrained space: discrete sites pass through unchanged.

    def constrain(self, unconstrained: Mapping[str, Any]) -> dict[str, Any]:
        """Values in the support of each site, which may depend on other sites.

        Cost: one trace of the model where a support is computed from other sites.
        """
        fixed, free = self._split(unconstrained)
        supports = {name: self.sites[name].support for name in free}
        if not any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(supports)):
            return {**fixed, **{k: biject_to(supports[k])(value) for k, value in free.items()}}
        model = handlers.substitute(self._quick, data=fixed)
        return {**fixed, **constrain_fn(model, self.args, self.kwargs, free)}

    def unconstrain(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The inverse of `constrain`."""
        fixed, free = self._split(values)
        # conditioned, not substituted: NumPyro looks for no transform of an observed site
        model = handlers.condition(self._quick, data=fixed)
        return {**fixed, **unconstrain_fn(model, self.args, self.kwargs, free)}

    def log_density_unconstrained(self, unconstrained: Mapping[str, Any]) -> Array:
        """Log joint with the Jacobian of `constrain`: minus NumPyro's potential energy."""
        fixed, free = self._split(unconstrained)
        model = handlers.substitute(self._quick, data=fixed)
        return -potential_energy(model, self.args, self.kwargs, free)

    def _split(self, values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Values without an unconstrained form (discrete sites, plates' indices), and the rest."""
        known = self._known(values)
        free = {name: known[name] for name in self.latent if not self.sites[name].is_discrete}
        return {name: value for name, value in known.items() if name not in free}, free

    # Draws.

    def draw_initial(self, rng_key: Array) -> dict[str, Array]:
        """Latent values to start from: uniform on (-2, 2) in unconstrained space.

        A site that has no such space is drawn from its prior.
        """
        start = self.draw_start(rng_key)
        return {name: start[name] for name in self.latent}

    def draw_start(
        self, rng_key: Array, given: Mapping[str, Any] | Callable | None = None
    ) -> dict[str, Array]:
        """`draw_initial`, with indices of the subsampled plates.

        Args:
            rng_key: a JAX key.
            given: values of some latent sites, which stay; the others start in their supports given
                these. Or one of NumPyro's initial strategies.
        """
        if not callable(given):
            given = self._accepted(given or {}, complete=False)
        return _values(self._started(rng_key, given), (*self.latent, *self.subsampled))

    def _started(
        self, rng_key: Array, given: Mapping[str, Any] | Callable
    ) -> dict[str, dict[str, Any]]:
        """The model's trace at a start."""

        def start(message: dict[str, Any]) -> Any:
            value = given(message) if callable(given) else given.get(message["name"])
            return initial_value(message) if value is None else value

        model = handlers.substitute(handlers.seed(self._quick, rng_key), substitute_fn=start)
        return handlers.trace(model).get_trace(*self.args, **self.kwargs)

    def draw_prior(self, rng_key: Array, num_draws: int | None = None) -> dict[str, Array]:
        """Latent values from the prior.

        Args:
            rng_key: a JAX key.
            num_draws: how many, along a new first axis; None for one draw without this axis.
        """
        for name in self.latent:
            if self.sites[name].family == "ImproperUniform":
                raise StructureError(
                    f"site {name!r}: its prior is ImproperUniform, which cannot be drawn from; "
                    f"wanted a proper prior. Give {name!r} one, or start from draw_initial."
                )
        draw = lambda key: _values(self.trace({}, key), self.latent)
        return (
            draw(rng_key) if num_draws is None else jax.vmap(draw)(random.split(rng_key, num_draws))
        )

    def predict(
        self, rng_key: Array, values: Mapping[str, Any], **changes: Any
    ) -> dict[str, Array]:
        """New data from the model, and its deterministic sites, with the latent sites at `values`.

        Args:
            rng_key: a JAX key.
            values: of latent sites. A latent site that is not among them is drawn given the rest.
            **changes: arguments to replace: new covariates, or `y=None` where the size of `y`
                counts. Observed sites are drawn anew although the arguments hold data for them.
        """
        program = self.with_arguments(**changes) if changes else self
        latent = self._known(values, complete=False)
        model = handlers.substitute(
            program.model, substitute_fn=lambda message: _checked_value(message, latent)
        )
        model = handlers.uncondition(handlers.seed(model, rng_key))
        trace = handlers.trace(model).get_trace(*program.args, **program.kwargs)
        is_wanted = lambda name, message: (
            is_data(message) or name in self.observed or message["type"] == "deterministic"
        )
        return {k: message["value"] for k, message in trace.items() if is_wanted(k, message)}

    def deterministics(self, values: Mapping[str, Any]) -> dict[str, Array]:
        """The deterministic sites at `values`."""
        return _values(self.trace(values), self.deterministic)

    def _known(self, values: Mapping[str, Any], complete: bool = True) -> dict[str, Any]:
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
        for name in self.subsampled if complete else ():
            if name not in values:
                plate = self.plates[name]
                raise StructureError(
                    f"plate {name!r}: it shows {plate.subsample_size} of {plate.size} rows, and "
                    "the values do not say which. The pointwise log likelihood needs the whole "
                    "plate: drop subsample_size. For one subsample give its indices, "
                    f"values[{name!r}]."
                )
        return {k: value for k, value in values.items() if k in self.latent or k in self.plates}

    def _accepted(self, values: Mapping[str, Any], complete: bool = True) -> dict[str, Any]:
        """The latent sites and plates in `values`, checked by name and shape."""
        known = self._known(values, complete)
        for name, value in known.items():
            if name in self.sites and jnp.shape(value) != self.sites[name].shape:
                raise ValueError(
                    f"site {name!r}: found a value of shape {jnp.shape(value)}, wanted "
                    f"{self.sites[name].shape}. For many draws use jax.vmap."
                )
        return known

    # Identity and sanity.

    def fingerprint(self) -> dict[str, Any]:
        """`{"model": hash, "data": {argument: hash}}`: the same in every process.

        The hash of the model changes with any edit of its mathematics.
        """
        return {
            "model": model_hash(self),
            "data": {name: data_hash(value) for name, value in self.arguments.items()},
        }

    def check(self, start: Mapping[str, Any] | Callable | None = None) -> None:
        """Raises ValueError where the data or the model cannot give a finite density.

        Args:
            start: where to look first: values of latent sites, in their supports (sites left out
                are drawn), or one of NumPyro's initial strategies.

        Cost: one fast compilation, and one evaluation of the density at each start until one fits.
        """
        names = (*self.latent, *self.subsampled)
        from_prior = lambda key: _values(self.trace({}, key), names)
        starts = {} if start is None else {partial(self.draw_start, given=start): 10}
        if not isinstance(start, Mapping):
            # this has few draws, or none, and is compiled faster
            in_the_middle = partial(self.draw_start, given=partial(initial_value, radius=None))
            starts = {in_the_middle: 1} | starts
        check(self, starts | {self.draw_start: 10, from_prior: 10})


def evenly(num_rows: int, size: int) -> np.ndarray:
    """Indices of `size` rows, spread evenly over `num_rows`."""
    return ((np.arange(size) + 0.5) * num_rows // size).astype(int)


def _rows_of(value: Any, rows: np.ndarray) -> Any:
    """Some rows of an argument; those of a JAX array are cut by NumPy, which compiles nothing."""
    if isinstance(value, Tracer):
        return value[rows]
    found = np.asarray(value)[rows]
    return jax.device_put(found) if isinstance(value, Array) else found


def num_entries(value: Any) -> int | None:
    """The length of an array, or of a list that NumPy can make an array of.

    None for a number, and for a tuple of arrays of different lengths.
    """
    try:
        return len(value) if np.ndim(value) else None
    except ValueError:
        return None


def _bind(model, args, kwargs) -> inspect.BoundArguments:
    signature = inspect.signature(model)
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{model_name(model)}{signature}: {error}.") from None


def _keyword_parameter(signature: inspect.Signature) -> str | None:
    """Name of the parameter that takes any keyword, `**kwargs`."""
    return next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), None)


def _values(trace: dict[str, dict[str, Any]], names: Iterable[str]) -> dict[str, Array]:
    return {name: trace[name]["value"] for name in names}


def _checked_value(message: dict[str, Any], latent: Mapping[str, Any]) -> Any:
    """The value of a latent site, refused where changed arguments have changed its shape."""
    value = latent.get(message["name"])
    if (
        value is not None
        and message["type"] == "sample"
        and jnp.shape(value) != (wanted := tuple(message["fn"].shape()))
    ):
        raise ValueError(
            f"site {message['name']!r}: its value has shape {jnp.shape(value)}, the changed "
            f"arguments ask for {wanted}. Leave {message['name']!r} out of the values: it is then "
            "drawn given the others."
        )
    return value


def _where_equal(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """The first array, NaN where two runs of the model differ in an observed value."""
    is_same = (first == second) | ((first != first) & (second != second))  # NaN is the same as NaN
    return first if is_same.all() else np.where(is_same, first, np.nan)
