"""From what a run leaves behind to an ArviZ `DataTree`: groups, dimensions named after plates,
attributes.

What a run is (its identity, for the checkpoint) and what it returns (its tree).
"""

import inspect
import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import xarray as xr
from jax import Array, random
from jax.scipy.special import logsumexp
from numpyro.infer.mcmc import MCMCKernel

from inference.program.compiling import compiled, data_hash, trace_hash
from inference.program.program import Program
from inference.run.loop import Chain, Replicate
from inference.run.protocol import Algorithm
from inference.run.session import Session

__all__ = [
    "GROUPS",
    "Run",
    "check_names",
    "data_groups",
    "joined",
    "keep",
    "kernel_settings",
    "named",
    "requested_groups",
    "variable_dims",
    "with_coordinates",
]

# what `Driver(groups=)` may ask for
GROUPS = ("log_likelihood", "log_prior", "posterior_predictive", "prior")
# draws that are pushed through the model at once: bounds memory, and keeps the device busy
BATCH = 64


def named(dataset: xr.Dataset, dims: dict[str, tuple[str, ...]]) -> xr.Dataset:
    """Dimensions after the model's plates, and a coordinate for each, as ArviZ gives them."""
    variables = {}
    for name, values in dataset.data_vars.items():
        inner = dims.get(str(name), ())
        placeholders = values.dims[len(values.dims) - len(inner) :]
        variables[name] = values.rename(
            {old: new for old, new in zip(placeholders, inner, strict=True) if old != new}
        ).variable
    return with_coordinates(xr.Dataset(variables))


def joined(programs: Sequence[Program], by_row: Sequence[str]) -> Program:
    """The model on the rows of all programs, one after the other."""
    if len(programs) == 1:
        return programs[0]
    rows = {
        name: np.concatenate([np.asarray(each.arguments[name]) for each in programs])
        for name in by_row
    }
    return programs[0].with_arguments(**rows)


def data_groups(program: Program) -> dict[str, xr.Dataset]:
    """`observed_data`: what the model observes; `constant_data`: the other arrays among its
    arguments.
    """
    observed = {name: np.asarray(value) for name, value in program.observed_values.items()}
    constant = {
        name: np.asarray(value)
        for name, value in program.arguments.items()
        if isinstance(value, np.ndarray | Array)
        and not any(_same(np.asarray(value), other) for other in observed.values())
    }
    groups = {
        "observed_data": {
            _dotted(name): (list(variable_dims(program)[_dotted(name)]), value)
            for name, value in observed.items()
        },
        "constant_data": {
            name: ([f"{name}_dim_{i}" for i in range(value.ndim)], value)
            for name, value in constant.items()
        },
    }
    return {
        group: with_coordinates(xr.Dataset(variables))
        for group, variables in groups.items()
        if variables
    }


def requested_groups(
    program: Program, posterior: xr.Dataset, wanted: tuple[str, ...], rng_key: Array
) -> dict[str, xr.Dataset]:
    """The groups that cost another pass through the model; a `prior` brings its
    `prior_predictive`.
    """
    draws = {
        name: _draws_first(posterior[_dotted(name)])
        for name in program.latent
        if _dotted(name) in posterior
    }
    shape = (posterior.sizes["chain"], posterior.sizes["draw"])
    predict_key, prior_key, prior_predict_key = random.split(rng_key, 3)
    groups: dict[str, xr.Dataset] = {}
    if "log_likelihood" in wanted:
        groups["log_likelihood"] = _grouped(
            program, _over(program.log_likelihood, draws), shape, batch_only=True
        )
    if "log_prior" in wanted:
        groups["log_prior"] = _grouped(
            program, _over(program.log_prior, draws), shape, batch_only=True
        )
    # the third part of the log joint
    if program.factors and {"log_likelihood", "log_prior"} & set(wanted):
        groups["log_factor"] = _grouped(
            program, _over(program.log_factors, draws), shape, batch_only=True
        )
    if "posterior_predictive" in wanted:
        predicted = _over_keys(program, draws, predict_key)
        groups["posterior_predictive"] = _grouped(
            program, {k: predicted[k] for k in program.observed}, shape
        )
    if "prior" in wanted:
        count = shape[0] * shape[1]
        prior = program.draw_prior(prior_key, count)
        predicted = _over_keys(program, prior, prior_predict_key)
        groups["prior"] = _grouped(program, prior, (1, count))
        groups["prior_predictive"] = _grouped(
            program, {k: predicted[k] for k in program.observed}, (1, count)
        )
    return groups


def check_names(program: Program) -> None:
    """Before anything runs: sites and plates must have names that a DataTree can hold side by
    side.
    """
    dims = variable_dims(program)
    if len(dims) < len(program.dims):
        twice = sorted(
            name
            for name in program.dims
            if sum(_dotted(name) == _dotted(other) for other in program.dims) > 1
        )
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
    return compiled(lambda values: jax.lax.map(function, values, batch_size=BATCH), draws)(draws)


def _over_keys(program: Program, draws: dict[str, Any], rng_key: Array) -> dict[str, Array]:
    keys = random.split(rng_key, len(jax.tree.leaves(draws)[0]))
    return _over(lambda pair: program.predict(*pair), (keys, draws))


def _grouped(
    program: Program, values: dict[str, Any], shape: tuple[int, int], batch_only: bool = False
) -> xr.Dataset:
    variables = {}
    for name, value in values.items():
        site = program.sites[name]
        dims = tuple(map(_dotted, site.dims))
        dims = dims[: len(dims) - site.event_dim] if batch_only else dims
        array = np.asarray(value)
        variables[_dotted(name)] = (
            ["chain", "draw", *dims],
            array.reshape(*shape, *array.shape[1:]),
        )
    return with_coordinates(xr.Dataset(variables))


def _draws_first(values: xr.DataArray) -> np.ndarray:
    array = values.transpose("chain", "draw", ...).values
    return array.reshape(-1, *array.shape[2:])


def with_coordinates(dataset: xr.Dataset) -> xr.Dataset:
    """A coordinate for every dimension, as ArviZ gives them."""
    return dataset.assign_coords({dim: np.arange(size) for dim, size in dataset.sizes.items()})


def _dotted(site: str) -> str:
    """A scope's "/" would be a group in a DataTree."""
    return site.replace("/", ".")


def _same(first: np.ndarray, second: np.ndarray) -> bool:
    return first.shape == second.shape and np.array_equal(
        first, second, equal_nan=first.dtype.kind == "f" and second.dtype.kind == "f"
    )


VERSION = version("bayes-model-zoo")


class Run:
    """Model, kernel and settings of one run, beside the session that advances it."""

    def __init__(self, driver: Any, program: Program | None, session: Session, keys: Array):
        self.driver, self.session, self.stepper, self.keys = driver, session, session.stepper, keys
        self.programs = [] if program is None else [program]  # one more for each `update`
        self.x64 = bool(jax.config.jax_enable_x64)
        self.start = data_hash(jax.tree.leaves(session.lanes))
        self.one = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), session.lanes[0]
        )

    @property
    def program(self) -> Program | None:
        """The model with the data of the run, or of its last update; None where the kernel has
        no model.
        """
        return self.programs[-1] if self.programs else None

    def identity(self) -> dict[str, Any]:
        """Everything that the numbers of the run depend on, in words that an error can show."""
        driver = self.driver
        found: dict[str, Any] = {
            f"kernel {name}": value for name, value in driver._settings.items()
        }
        found |= {f"version of {name}": version for name, version in _versions().items()}
        if self.program is not None:
            fingerprint = self.program.fingerprint()
            found |= {"model": fingerprint["model"]} | {
                f"data {name}": value for name, value in fingerprint["data"].items()
            }
        if self.stepper.warms_up:
            found |= {
                "num_warmup": driver.num_warmup,
                "thinning": driver.thinning,
                "steps before the first draw": self.session.num_warmup,
            }
        return found | {
            "num_chains": driver.num_chains,
            "chain_method": str(getattr(driver.chain_method, "__name__", driver.chain_method)),
            "extra_fields": list(driver.extra_fields),
            "rng_key": np.asarray(random.key_data(self.keys)).tolist(),
            "start of the chains": self.start,
            "x64": self.x64,
            "device": jax.default_backend(),
            "step of the kernel": trace_hash(
                jax.make_jaxpr(self.stepper.step)(self.one, self.stepper.data)
            ),
        }

    def tree_so_far(self) -> xr.DataTree:
        """The records until now, for a stop rule: no draws of an algorithm that is no chain, no
        attributes.
        """
        return xr.DataTree.from_dict(self._records())

    def tree(self) -> xr.DataTree:
        """Everything that the run leaves behind."""
        groups = self._records()
        attrs = self._attributes()
        program = None if self.program is None else self._of_all_rows(groups)
        if isinstance(self.stepper, Replicate) and program is not None:
            results, scalars = self._results(self.stepper)
            groups |= (
                self._draws(self.stepper, program) if self.driver.num_samples else {}
            ) | results
            attrs |= scalars
        if program is not None:
            groups |= data_groups(program)
        if (
            program is not None
            and self.driver.groups
            and "posterior" in groups
            and groups["posterior"].sizes.get("draw", 0)
        ):
            key = random.fold_in(self.keys[0], 1)
            try:
                groups |= requested_groups(program, groups["posterior"], self.driver.groups, key)
            # the draws must not be lost with a group that cannot be computed from them
            except Exception as error:
                keep(error, _assembled(groups, attrs))
                raise
        return _assembled(groups, attrs)

    def _of_all_rows(self, groups: dict[str, xr.Dataset]) -> Program:
        """The model with the data of the run and of its updates; of a chain, with as much room
        as the draws have.
        """
        stepper, program = self.stepper, self.programs[0]
        if isinstance(stepper, Replicate):
            by_row = stepper.reading.by_row(self.programs) if len(self.programs) > 1 else ()
            return joined(self.programs, by_row)
        assert isinstance(stepper, Chain)
        draw = {
            str(name): np.zeros(values.shape[2:])
            for name, values in groups["posterior"].data_vars.items()
        }
        room = stepper.room(self.session.each()[0], draw)
        # which keeps what its trace has found
        return program.with_arguments(**room) if room else program

    def _records(self) -> dict[str, xr.Dataset]:
        dims = {} if self.program is None else variable_dims(self.program)
        groups = ("posterior", "sample_stats") if self.stepper.warms_up else ("sample_stats",)
        found = {group: self.session.store.dataset(group) for group in groups}
        order = list(dims)
        found = {
            group: values[sorted(values.data_vars, key=lambda name: _place(order, name))]
            for group, values in found.items()
        }
        found = {
            group: named(values, dims if group == "posterior" else {})
            for group, values in found.items()
        }
        for name in (
            site.replace("/", ".") for site in getattr(self.stepper.reading, "not_identified", ())
        ):
            # `diagnostics` then asks nothing of it
            found["posterior"][name].attrs["not_identified"] = 1
        return found

    def _draws(self, stepper: Replicate, program: Program) -> dict[str, xr.Dataset]:
        """What determines other sites are all rows; an algorithm is asked as it was left, by the
        last ones.
        """
        each = []
        for step in self.session.each():
            values = stepper.algorithm.draw(
                step.draw_key, step.state, stepper.reading, stepper.data, self.driver.num_samples
            )
            latent = {name: values[name] for name in program.latent if name in values}
            # a site that was summed out leaves nothing for deterministic ones to follow
            whole = len(latent) == len(program.latent)
            each.append(
                values
                | (
                    jax.vmap(program.deterministics)(latent)
                    if whole and program.deterministic
                    else {}
                )
            )
        stacked = {
            name.replace("/", "."): np.stack([values[name] for values in each]) for name in each[0]
        }
        named = variable_dims(program)
        dims = {name: ["chain", "draw", *named.get(name, ())] for name in stacked}
        variables = {name: (dims[name], value) for name, value in stacked.items()}
        groups = {"log_q": {"log_q": variables.pop("log_q")}} if "log_q" in variables else {}
        return {
            group: with_coordinates(xr.Dataset(found))
            for group, found in ({"posterior": variables} | groups).items()
        }

    def _results(self, stepper: Replicate) -> tuple[dict[str, xr.Dataset], dict[str, Any]]:
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
                inner = (*given, *(f"{name}_dim_{i}" for i in range(len(given), value.ndim - 1)))
                variables[name] = (["chain", *inner], value)
            groups[group] = with_coordinates(xr.Dataset(variables))
        scalars = {
            name: np.array([float(one.attrs[name]) for one in each]) for name in each[0].attrs
        }
        return groups, _combined(scalars)

    def update(self, *args: Any, **kwargs: Any) -> None:
        """More data have come.

        Whatever is wrong with them by themselves is found before anything changes.
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
        self.programs = (
            [*self.programs, program] if stepper.reading.by_row([program]) else [program]
        )

    def replicates(self) -> list[Any]:
        """The states of an algorithm, one a replicate."""
        if not isinstance(self.stepper, Replicate):
            raise TypeError("states: a chain has draws; look at the tree.")
        return [step.state for step in self.session.each()]

    def _attributes(self) -> dict[str, Any]:
        driver, session = self.driver, self.session
        versions = _versions()
        return (
            {
                "created_at": datetime.now(UTC).isoformat(),
                "inference_library": "numpyro",
                "inference_library_version": versions["numpyro"],
                "model": "" if self.program is None else _function_name(self.program.model),
                "factors": json.dumps([] if self.program is None else list(self.program.factors)),
                "kernel": _kernel_name(driver.kernel),
                "kernel_settings": json.dumps(driver._settings),
                "num_warmup": -1 if driver.num_warmup is None else driver.num_warmup,
                "num_samples": session.records * driver.thinning
                if driver.is_chain
                else driver.num_samples,
                "num_chains": driver.num_chains,
                "thinning": driver.thinning,
                "tuning_steps": driver.num_warmup if driver.is_chain else 0,
                "rng_key": json.dumps(np.asarray(random.key_data(self.keys)).tolist()),
                "versions": json.dumps(versions),
                "x64": int(self.x64),
                "steps": session.steps,
                "steps_run": session.steps_run,
                "ended": session.ended,
                "sampling_time": session.seconds,
                "compile_time": session.seconds_to_compile,
            }
            | ({"report": report} if (report := self.stepper.report) else {})
            | getattr(self.stepper.reading, "attributes", {})
        )


def kernel_settings(kernel: Any, prefix: str = "") -> dict[str, Any]:
    """What a kernel, and each kernel inside it, was built with: numbers, texts, hashes of arrays,
    names of functions.

    Read before the run, from the attributes that are named like arguments of the constructor. What
    is hidden in closures, such as the learning rate of an optimiser, does not show here; the hash
    of the step covers it.
    """
    name = prefix + type(kernel).__name__
    found: dict[str, Any] = {}
    for i, (part, sites) in enumerate(getattr(kernel, "blocks", ())):
        found |= kernel_settings(part, f"{name}[{i}]/") | {
            f"{name}[{i}].sites": str(getattr(sites, "__name__", sites))
        }
    for argument in inspect.signature(type(kernel)).parameters:
        value = vars(kernel).get(argument, vars(kernel).get(f"_{argument}"))
        if value is not None and not isinstance(value, MCMCKernel | Algorithm):
            found[f"{name}.{argument}"] = _in_words(value)
    for inner in (
        value for value in vars(kernel).values() if isinstance(value, MCMCKernel | Algorithm)
    ):
        found |= kernel_settings(inner, f"{name}/")
    return found


def keep(error: Exception, tree: xr.DataTree) -> None:
    """Hang what was drawn on an error that ends a run."""
    error.tree = tree  # ty: ignore[missing-attribute]
    error.add_note("What was drawn is in `.tree` of this error.")


def _assembled(groups: dict[str, xr.Dataset], attrs: dict[str, Any]) -> xr.DataTree:
    for group in groups.values():
        group.attrs |= {
            name: attrs[name]
            for name in ("created_at", "inference_library", "inference_library_version")
        }
    tree = xr.DataTree.from_dict({name: groups[name] for name in sorted(groups, key=_order)})
    tree.attrs = attrs
    return tree


def _place(order: list[str], name: Any) -> tuple[int, str]:
    """Variables in the order of the model; what is none of its sites behind, by name."""
    return (order.index(name) if name in order else len(order), str(name))


def _stacked(values: list[np.ndarray], name: str) -> np.ndarray:
    """Of all replicates; where some have fewer particles, theirs are filled up with ones of no
    weight.
    """
    most = max((len(value) for value in values if value.ndim), default=0)
    if all(value.ndim == 0 or len(value) == most for value in values):
        return np.stack(values)
    fill = -np.inf if name == "log_weight" else np.nan if values[0].dtype.kind == "f" else -1
    widths = [[(0, most - len(value)), *[(0, 0)] * (value.ndim - 1)] for value in values]
    return np.stack(
        [
            np.pad(value, width, constant_values=fill)
            for value, width in zip(values, widths, strict=True)
        ]
    )


def _in_words(value: Any) -> Any:
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.ndarray | Array):
        return data_hash(value)
    if isinstance(value, list | tuple):
        return [_in_words(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _in_words(item) for key, item in value.items()}
    return getattr(value, "__qualname__", type(value).__qualname__)


def _function_name(function: Any) -> str:
    """That of the function whose arguments a `functools.partial` has filled in."""
    function = function.func if isinstance(function, partial) else function
    return getattr(function, "__name__", type(function).__name__)


def _kernel_name(kernel: Any) -> str:
    inner = [_kernel_name(part) for part, _ in getattr(kernel, "blocks", ())]
    return type(kernel).__name__ + (f"({', '.join(inner)})" if inner else "")


def _combined(scalars: dict[str, np.ndarray]) -> dict[str, Any]:
    """One number for the run: evidences of replicates are averaged as evidences, with the error
    that their spread shows; with none where one of them has none, as of a run that was ended early,
    and an infinite one where one of them may be off by anything.
    """
    if "log_evidence" not in scalars or len(scalars["log_evidence"]) == 1:
        return {
            name: value[0].item() if len(value) == 1 else value for name, value in scalars.items()
        }
    each = jnp.asarray(scalars["log_evidence"])
    mean = logsumexp(each) - np.log(len(each))
    spread = np.std(np.exp(scalars["log_evidence"] - float(mean)), ddof=1) / np.sqrt(len(each))
    if not np.isfinite(errors := scalars.get("log_evidence_se", np.zeros(1))).all():
        spread = np.nan if np.isnan(errors).any() else np.inf
    rest = {f"{name}_of_replicates": value for name, value in scalars.items()}
    return rest | {"log_evidence": float(mean), "log_evidence_se": float(spread)}


def _versions() -> dict[str, str]:
    return {"zoo": VERSION, "jax": jax.__version__, "numpyro": numpyro.__version__}


def _order(group: str) -> int:
    known = (
        "posterior",
        "posterior_predictive",
        "log_likelihood",
        "log_prior",
        "sample_stats",
        "prior",
        "prior_predictive",
    )
    return known.index(group) if group in known else len(known) + (group != "observed_data")
