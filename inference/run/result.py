"""The identity of a run, for its checkpoint, and the ArviZ `DataTree` that it returns.

The tree has groups whose dimensions are named after the model's plates, and attributes.
"""

import inspect
import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from typing import Any

import jax
import numpy as np
import xarray as xr
from jax import Array, random
from numpyro.infer.mcmc import MCMCKernel

from inference.maths.averages import log_mean, log_mean_error
from inference.program.compiling import compiled, data_hash, trace_hash
from inference.program.program import Program
from inference.run.loop import Replicate
from inference.run.protocol import Algorithm
from inference.run.session import Session

__all__ = [
    "GROUPS",
    "Run",
    "attach_tree",
    "check_names",
    "data_groups",
    "joined",
    "kernel_settings",
    "requested_groups",
    "variable_dims",
    "with_coordinates",
]

# what `Driver(groups=)` may ask for
GROUPS = ("log_likelihood", "log_prior", "posterior_predictive", "prior")
VERSIONS = {
    "zoo": version("bayes-model-zoo"),
    "jax": jax.__version__,
    "numpyro": version("numpyro"),
}


def _named(values: xr.DataArray, dims: tuple[str, ...]) -> xr.Variable:
    """The variable with its last dimensions renamed to `dims`."""
    pairs = zip(values.dims[values.ndim - len(dims) :], dims, strict=True)
    return values.rename({old: new for old, new in pairs if old != new}).variable


def joined(programs: Sequence[Program], by_row: Sequence[str]) -> Program:
    """The model on the rows of all programs, one after the other.

    Args:
        programs: the same model with several data.
        by_row: names of the arguments that have an entry for each row.
    """
    if len(programs) == 1:
        return programs[0]
    values = lambda name: [np.asarray(each.arguments[name]) for each in programs]
    return programs[0].with_arguments(**{name: np.concatenate(values(name)) for name in by_row})


def data_groups(program: Program) -> dict[str, xr.Dataset]:
    """The groups `observed_data` (observed sites) and `constant_data` (other array arguments)."""
    dims = variable_dims(program)
    observed = {_dotted(name): np.asarray(v) for name, v in program.observed_values.items()}
    constant = {
        name: np.asarray(value)
        for name, value in program.arguments.items()
        if isinstance(value, np.ndarray | Array)
        and not any(_same(np.asarray(value), other) for other in observed.values())
    }
    groups = {
        "observed_data": {name: (dims[name], value) for name, value in observed.items()},
        "constant_data": {
            name: ([f"{name}_dim_{i}" for i in range(value.ndim)], value)
            for name, value in constant.items()
        },
    }
    return {name: with_coordinates(xr.Dataset(found)) for name, found in groups.items() if found}


def requested_groups(
    program: Program, posterior: xr.Dataset, wanted: tuple[str, ...], rng_key: Array
) -> dict[str, xr.Dataset]:
    """The groups that cost another pass through the model; `prior` brings `prior_predictive`.

    Args:
        program: the model with its data.
        posterior: draws, [chain, draw, ...].
        wanted: some of `GROUPS`.
        rng_key: a JAX key for new data and draws from the prior.
    """
    draws = {
        name: _draws_first(posterior[_dotted(name)])
        for name in program.latent
        if _dotted(name) in posterior
    }
    shape = (posterior.sizes["chain"], posterior.sizes["draw"])
    predict_key, prior_key, prior_predict_key = random.split(rng_key, 3)
    groups: dict[str, xr.Dataset] = {}
    terms = {"log_likelihood": program.log_likelihood, "log_prior": program.log_prior}
    terms = {name: function for name, function in terms.items() if name in wanted}
    if terms and program.factors:
        terms["log_factor"] = program.log_factors  # the rest of the log joint
    for name, function in terms.items():
        groups[name] = _grouped(program, _over(function, draws), shape, batch_only=True)

    def predictive(draws: dict[str, Any], key: Array, shape: tuple[int, int]) -> xr.Dataset:
        keys = random.split(key, len(jax.tree.leaves(draws)[0]))
        values = _over(lambda pair: program.predict(*pair), (keys, draws))
        return _grouped(program, {name: values[name] for name in program.observed}, shape)

    if "posterior_predictive" in wanted:
        groups["posterior_predictive"] = predictive(draws, predict_key, shape)
    if "prior" in wanted:
        single = (1, shape[0] * shape[1])
        prior = program.draw_prior(prior_key, single[1])
        groups["prior"] = _grouped(program, prior, single)
        groups["prior_predictive"] = predictive(prior, prior_predict_key, single)
    return groups


def check_names(program: Program) -> None:
    """Raises ValueError where names of sites and dimensions would clash in the tree."""
    dims = variable_dims(program)
    if len(dims) < len(program.dims):
        dotted = list(map(_dotted, program.dims))
        twice = sorted(name for name in program.dims if dotted.count(_dotted(name)) > 1)
        raise ValueError(
            f"sites {twice} have the same name once '/' is written '.', as in the tree; rename one."
        )
    used = {dim for names in dims.values() for dim in names}
    if reserved := sorted(used & {"chain", "draw", "step"}):
        raise ValueError(
            f"plate {reserved[0]!r}: the tree needs this name for itself; rename the plate."
        )
    if both := sorted(used & set(dims)):
        raise ValueError(f"site {both[0]!r} and a dimension have the same name; rename one.")


def variable_dims(program: Program) -> dict[str, tuple[str, ...]]:
    """The model's dimensions under the names that its sites have in the tree."""
    return {_dotted(name): tuple(map(_dotted, dims)) for name, dims in program.dims.items()}


def _over(function: Callable, draws: Any) -> dict[str, Array]:
    # in batches, which limit the memory and yet keep the device busy
    return compiled(lambda values: jax.lax.map(function, values, batch_size=64), draws)(draws)


def _grouped(
    program: Program, values: dict[str, Any], shape: tuple[int, int], batch_only: bool = False
) -> xr.Dataset:
    """Values of sites, [chain * draw, ...], as a data set.

    Args:
        program: the model.
        values: by site.
        shape: numbers of chains and draws.
        batch_only: whether values have no event dimensions.
    """
    variables = {}
    for name, value in values.items():
        site, array = program.sites[name], np.asarray(value)
        dims = site.dims[: len(site.dims) - site.event_dim] if batch_only else site.dims
        array = array.reshape(*shape, *array.shape[1:])
        variables[_dotted(name)] = (["chain", "draw", *map(_dotted, dims)], array)
    return with_coordinates(xr.Dataset(variables))


def _draws_first(values: xr.DataArray) -> np.ndarray:
    array = values.transpose("chain", "draw", ...).values
    return array.reshape(-1, *array.shape[2:])


def with_coordinates(dataset: xr.Dataset) -> xr.Dataset:
    """A data set with a coordinate for every dimension, as ArviZ gives them."""
    return dataset.assign_coords({dim: np.arange(size) for dim, size in dataset.sizes.items()})


def _dotted(site: str) -> str:
    """The name of a site in the tree, where a scope's "/" would be a group."""
    return site.replace("/", ".")


def _same(first: np.ndarray, second: np.ndarray) -> bool:
    are_floats = first.dtype.kind == second.dtype.kind == "f"
    return first.shape == second.shape and np.array_equal(first, second, equal_nan=are_floats)


class Run:
    """Model, kernel and settings of one run, with the session that advances it.

    Args:
        driver: the `Driver`.
        program: the model with its data; None where the kernel has no model.
        session: the session, after `start`.
        keys: a key for each chain.
    """

    def __init__(self, driver: Any, program: Program | None, session: Session, keys: Array):
        self.driver, self.session, self.stepper, self.keys = driver, session, session.stepper, keys
        self.programs = [] if program is None else [program]  # one more for each `update`
        self.x64 = bool(jax.config.jax_enable_x64)
        self.start = data_hash(jax.tree.leaves(session.lanes))
        self.state_shape = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), session.lanes[0]
        )

    @property
    def program(self) -> Program | None:
        """The model with the data of the run, or of its last update; None without a model."""
        return self.programs[-1] if self.programs else None

    def identity(self) -> dict[str, Any]:
        """Everything that determines the draws, under names that an error message can show."""
        driver, session = self.driver, self.session
        found = {f"kernel {name}": value for name, value in driver._settings.items()}
        found |= {f"version of {name}": value for name, value in VERSIONS.items()}
        if self.program is not None:
            fingerprint = self.program.fingerprint()
            found["model"] = fingerprint["model"]
            found |= {f"data {name}": value for name, value in fingerprint["data"].items()}
        if self.stepper.warms_up:
            found |= {
                "num_warmup": driver.num_warmup,
                "thinning": driver.thinning,
                "steps before the first draw": session.num_warmup,
            }
        step = jax.make_jaxpr(self.stepper.step)(self.state_shape, self.stepper.data)
        return found | {
            "num_chains": driver.num_chains,
            "chain_method": str(getattr(driver.chain_method, "__name__", driver.chain_method)),
            "extra_fields": list(driver.extra_fields),
            "rng_key": np.asarray(random.key_data(self.keys)).tolist(),
            "start of the chains": self.start,
            "x64": self.x64,
            "device": jax.default_backend(),
            "step of the kernel": trace_hash(step),
        }

    def tree_so_far(self) -> xr.DataTree:
        """The records until now, for a stop rule; without attributes and an algorithm's draws."""
        return xr.DataTree.from_dict(self._records())

    def tree(self) -> xr.DataTree:
        """The whole tree: records, draws and results, data, requested groups and attributes."""
        groups = self._records()
        attrs = self._attributes()
        if self.program is None:
            return _assembled(groups, attrs)
        program = self._with_room(groups)
        if isinstance(self.stepper, Replicate):
            results, scalars = self._results(self.stepper)
            draws = self._draws(self.stepper, program) if self.driver.num_samples else {}
            if self.stepper.algorithm.draws_at_end and self.session.ended != "finished":
                draws = {"unfinished": draws["posterior"]} if draws else {}
                unknown = [name for name in scalars if "log_evidence" in name or name == "ess"]
                scalars |= {name: scalars[name] * np.nan for name in unknown}
            groups |= draws | results
            attrs |= scalars
        groups |= data_groups(program)
        wanted = self.driver.groups
        if wanted and "posterior" in groups and groups["posterior"].sizes.get("draw", 0):
            key = random.fold_in(self.keys[0], 1)
            try:
                groups |= requested_groups(program, groups["posterior"], wanted, key)
            # the draws must not be lost with a group that cannot be computed from them
            except Exception as error:
                attach_tree(error, _assembled(groups, attrs))
                raise
        return _assembled(groups, attrs)

    @property
    def whole_program(self) -> Program:
        """The model with the data of the run and of its updates."""
        by_row = self.stepper.reading.by_row(self.programs) if len(self.programs) > 1 else ()
        return joined(self.programs, by_row)

    def _with_room(self, groups: dict[str, xr.Dataset]) -> Program:
        """The whole program; with the capacity of the draws for a chain whose arrays may grow."""
        stepper, program = self.stepper, self.whole_program
        if isinstance(stepper, Replicate):
            return program
        draws = groups["posterior"].data_vars.items()
        draw = {str(name): np.zeros(values.shape[2:]) for name, values in draws}
        room = stepper.room(self.session.each()[0], draw)
        # where nothing can grow, the same program, since it caches what its trace has found
        return program.with_arguments(**room) if room else program

    def _records(self) -> dict[str, xr.Dataset]:
        dims = {} if self.program is None else variable_dims(self.program)
        order = list(dims)
        # in the order of the model; variables that are no sites come last, by name
        place = lambda name: (order.index(name) if name in order else len(order), str(name))
        found = {}
        for group in ("posterior", "sample_stats") if self.stepper.warms_up else ("sample_stats",):
            dataset = self.session.store.dataset(group)
            known = dims if group == "posterior" else {}
            variables = {
                name: _named(dataset[name], known.get(str(name), ()))
                for name in sorted(dataset.data_vars, key=place)
            }
            found[group] = with_coordinates(xr.Dataset(variables))
        for site in getattr(self.stepper.reading, "not_identified", ()):
            # `diagnostics` makes no checks of it
            found["posterior"][_dotted(site)].attrs["not_identified"] = 1
        return found

    def _draws(self, stepper: Replicate, program: Program) -> dict[str, xr.Dataset]:
        """The groups `posterior` and `log_q` of an algorithm.

        Args:
            stepper: holds the algorithm, its reading and the data of the last rows.
            program: the model on all rows, which determine the deterministic sites.
        """
        each = []
        for step in self.session.each():
            values = stepper.algorithm.draw(
                step.draw_key, step.state, stepper.reading, stepper.data, self.driver.num_samples
            )
            latent = {name: values[name] for name in program.latent if name in values}
            # deterministic sites need all latent ones, and a site that was summed out has no draws
            if program.deterministic and len(latent) == len(program.latent):
                values = values | jax.vmap(program.deterministics)(latent)
            each.append(values)
        dims = variable_dims(program)
        variables = {
            _dotted(name): (
                ["chain", "draw", *dims.get(_dotted(name), ())],
                np.stack([values[name] for values in each]),
            )
            for name in each[0]
        }
        log_q = {name: variables.pop(name) for name in ("log_q",) if name in variables}
        groups = {"posterior": variables} | ({"log_q": log_q} if log_q else {})
        return {group: with_coordinates(xr.Dataset(found)) for group, found in groups.items()}

    def _results(self, stepper: Replicate) -> tuple[dict[str, xr.Dataset], dict[str, Any]]:
        """Further groups of an algorithm, and its attributes."""
        each = [
            stepper.algorithm.results(state, stepper.reading, stepper.data)
            for state in self.replicates()
        ]
        groups = {}
        for group, names in each[0].groups.items():
            variables = {}
            for name in names:
                value = _stacked([np.asarray(one.groups[group][name]) for one in each], name)
                given = each[0].dims.get(name, ())
                rest = (f"{name}_dim_{i}" for i in range(len(given), value.ndim - 1))
                variables[name] = (["chain", *given, *rest], value)
            groups[group] = with_coordinates(xr.Dataset(variables))
        names = each[0].attrs
        return groups, _combined(
            {n: np.array([float(one.attrs[n]) for one in each]) for n in names}
        )

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Gives the algorithm more data, as arguments of the model.

        Errors for bad data are raised before anything changes.
        """
        stepper, session = self.stepper, self.session
        if not isinstance(stepper, Replicate) or self.program is None:
            raise TypeError(
                "update: a chain samples the posterior of one data set; call `run` with all of the "
                "data."
            )
        program, reading = Program(self.program.model, *args, **kwargs), stepper.reading
        session.lanes = stepper.updated(program, session.lanes)
        if stepper.reading != reading:
            session.compiled.clear()
        keeps_rows = stepper.reading.by_row([program])
        self.programs = [*self.programs, program] if keeps_rows else [program]

    def replicates(self) -> list[Any]:
        """The states of an algorithm, one a replicate."""
        return [step.state for step in self.steps()]

    def steps(self) -> list[Any]:
        """The states of an algorithm with their keys and counters, one a replicate."""
        if not isinstance(self.stepper, Replicate):
            raise TypeError("states: a chain has draws; look at the tree.")
        return self.session.each()

    def _attributes(self) -> dict[str, Any]:
        driver, session = self.driver, self.session
        model = None if self.program is None else self.program.model
        # the function whose arguments a `functools.partial` has filled in
        model = model.func if isinstance(model, partial) else model
        report = self.stepper.report
        num_drawn = session.records * driver.thinning if driver.is_chain else driver.num_samples
        return {
            "created_at": datetime.now(UTC).isoformat(),
            "inference_library": "numpyro",
            "inference_library_version": VERSIONS["numpyro"],
            "model": "" if model is None else getattr(model, "__name__", type(model).__name__),
            "factors": json.dumps([] if self.program is None else list(self.program.factors)),
            "kernel": _kernel_name(driver.kernel),
            "kernel_settings": json.dumps(driver._settings),
            "num_warmup": -1 if driver.num_warmup is None else driver.num_warmup,
            "num_samples": num_drawn,
            "num_chains": len(session.each()),
            "thinning": driver.thinning,
            "tuning_steps": driver.num_warmup if driver.is_chain else 0,
            "rng_key": json.dumps(np.asarray(random.key_data(self.keys)).tolist()),
            "versions": json.dumps(VERSIONS),
            "x64": int(self.x64),
            "steps": session.steps,
            "steps_run": session.steps_run,
            "ended": session.ended,
            "sampling_time": session.seconds,
            "compile_time": session.seconds_to_compile,
            **({"report": report} if report else {}),
            **({"steps_run_of_chains": alone} if (alone := session.steps_run_of_chains) else {}),
            **getattr(self.stepper.reading, "attributes", {}),
        }


def kernel_settings(kernel: Any, prefix: str = "") -> dict[str, Any]:
    """The settings of a kernel, and of each kernel inside it, for JSON.

    They are read before the run, from attributes that are named like arguments of the constructor.
    Values in closures, such as the learning rate of an optimiser, are not among them; the hash of
    the step covers these.

    Args:
        kernel: the kernel.
        prefix: names of the kernels that it is inside of.
    """
    name = prefix + type(kernel).__name__
    found: dict[str, Any] = {}
    for i, (part, sites) in enumerate(getattr(kernel, "blocks", ())):
        found |= kernel_settings(part, f"{name}[{i}]/")
        found[f"{name}[{i}].sites"] = str(getattr(sites, "__name__", sites))
    for argument in inspect.signature(type(kernel)).parameters:
        value = vars(kernel).get(argument, vars(kernel).get(f"_{argument}"))
        if value is not None and not isinstance(value, MCMCKernel | Algorithm):
            found[f"{name}.{argument}"] = _for_json(value)
    for value in vars(kernel).values():
        if isinstance(value, MCMCKernel | Algorithm):
            found |= kernel_settings(value, f"{name}/")
    return found


def attach_tree(error: Exception, tree: xr.DataTree) -> None:
    """Puts what was drawn into `.tree` of an error that ends a run."""
    error.tree = tree  # ty: ignore[missing-attribute]
    error.add_note("What was drawn is in `.tree` of this error.")


def _assembled(groups: dict[str, xr.Dataset], attrs: dict[str, Any]) -> xr.DataTree:
    """The tree; the groups that users look at most come first."""
    order = (
        *("posterior", "posterior_predictive", "log_likelihood", "log_prior", "sample_stats"),
        *("prior", "prior_predictive", "observed_data"),
    )
    creation = ("created_at", "inference_library", "inference_library_version")
    for group in groups.values():
        group.attrs |= {name: attrs[name] for name in creation}
    place = lambda name: order.index(name) if name in order else len(order)
    tree = xr.DataTree.from_dict({name: groups[name] for name in sorted(groups, key=place)})
    tree.attrs = attrs
    return tree


def _stacked(values: list[np.ndarray], name: str) -> np.ndarray:
    """Replicates stacked; those with fewer particles are padded by particles of weight 0."""
    most = max((len(value) for value in values if value.ndim), default=0)
    if all(value.ndim == 0 or len(value) == most for value in values):
        return np.stack(values)
    fill = -np.inf if name == "log_weight" else np.nan if values[0].dtype.kind == "f" else -1
    width = lambda value: [(0, most - len(value)), *[(0, 0)] * (value.ndim - 1)]
    return np.stack([np.pad(value, width(value), constant_values=fill) for value in values])


def _for_json(value: Any) -> Any:
    """Numbers and texts as they are, arrays by their hash, functions by their name."""
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.ndarray | Array):
        return data_hash(value)
    if isinstance(value, list | tuple):
        return [_for_json(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _for_json(item) for key, item in value.items()}
    return getattr(value, "__qualname__", type(value).__qualname__)


def _kernel_name(kernel: Any) -> str:
    inner = [_kernel_name(part) for part, _ in getattr(kernel, "blocks", ())]
    return type(kernel).__name__ + (f"({', '.join(inner)})" if inner else "")


def _combined(scalars: dict[str, np.ndarray]) -> dict[str, Any]:
    """Attributes of the run: the mean evidence of the replicates, its error by their spread.

    The error is NaN if that of any replicate is NaN, as in a run that was ended early; otherwise it
    is infinite if that of any replicate is infinite.
    """
    if "log_evidence" not in scalars or len(scalars["log_evidence"]) == 1:
        return {
            name: value[0].item() if len(value) == 1 else value for name, value in scalars.items()
        }
    each = scalars["log_evidence"]
    spread = log_mean_error(each)
    if not np.isfinite(errors := scalars.get("log_evidence_se", np.zeros(1))).all():
        spread = np.nan if np.isnan(errors).any() else np.inf
    rest = {f"{name}_of_replicates": value for name, value in scalars.items()}
    return rest | {"log_evidence": log_mean(each), "log_evidence_se": spread}
