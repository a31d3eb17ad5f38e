"""Replicates of calibration tests in batches, compiled or on the host, and saved in a folder."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from itertools import starmap
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from jax.sharding import AxisType, PartitionSpec

from diagnostics._calibration_joint import Joint
from diagnostics._calibration_result import Calibration

__all__ = ["PREFIX", "UNTRACEABLE", "Plan", "check_count", "compiled", "one_by_one"]

UNTRACEABLE = (
    "calibration traces the data, so that replicates run together. A model, or a kernel's `init`, "
    "that inspects the values of its data must skip this for traced values. Or give sbc "
    "`on_host(fit)`, which fits one replicate after the other."
)
PREFIX = "ranks/"  # before the names of quantities in the result of a replicate

Found = Mapping[str, Any]  # "num_draws" and PREFIX + quantity, of one replicate or [replicate, ...]


class Plan(NamedTuple):
    """The settings of a test. Replicate r has the key `fold_in(rng_key, r)`."""

    test: str
    joint: Joint
    rng_key: int | Array
    num_replicates: int
    alpha: float
    folder: str | os.PathLike[str] | None
    batch_size: int | None
    # `inference.run.cluster.submitted` on a cluster; None: batches run here
    submitted: Callable | None = None


def compiled(plan: Plan, replicate: Callable[[Array], Found]) -> Calibration:
    """Run a compiled test in batches that are divided among JAX's devices.

    A batch is vectorised on an accelerator. On a CPU it is a loop, which is as fast there and takes
    half of the compile time. The lowered program identifies the test in a folder, so an edit of the
    model, the kernel, the quantities or the sizes makes another test.

    Args:
        plan: the settings.
        replicate: `rng_key -> {"num_draws": L, PREFIX + quantity: rank}`, traceable.
    """
    check_count("num_replicates", plan.num_replicates)
    devices = len(jax.local_devices())
    size = -(-_batch_size(plan, min(plan.num_replicates, 100)) // devices) * devices
    try:
        lowered = _lowered(replicate, _key(plan.rng_key), size)
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError) as error:
        error.add_note(UNTRACEABLE)
        raise
    executable: list[Callable] = []  # compiled only when a batch is not in the folder

    def batch(key, numbers):
        executable[:] = executable or [lowered.compile()]
        return executable[0](key, jnp.asarray(numbers, jnp.int32))

    def batch_of_task(key, numbers):  # a worker cannot take compiled code
        code = _lowered(replicate, key, len(numbers)).compile()
        return code(key, jnp.asarray(numbers, jnp.int32))

    own = batch if plan.submitted is None else batch_of_task
    return _run_batches(plan, size, own, {"program": _sha(lowered.as_text())})


def _lowered(replicate: Callable[[Array], Found], key: Array, size: int) -> Any:
    """The lowered program of a batch, divided among the devices of this process."""
    devices = jax.local_devices()

    def each(key, numbers):
        one = lambda number: replicate(random.fold_in(key, number))
        return jax.lax.map(one, numbers) if devices[0].platform == "cpu" else jax.vmap(one)(numbers)

    if len(devices) > 1:
        mesh = jax.make_mesh(
            (len(devices),), ("replicate",), axis_types=(AxisType.Auto,), devices=devices
        )
        spread = PartitionSpec("replicate")
        each = jax.shard_map(
            each, mesh=mesh, in_specs=(PartitionSpec(), spread), out_specs=spread, check_vma=False
        )
    return jax.jit(each).lower(key, jnp.arange(size, dtype=jnp.int32))


def one_by_one(
    plan: Plan,
    replicate: Callable[[Array], Found],
    name: str,
    measure: Callable[[Any], Mapping[str, Any]],
) -> Calibration:
    """Run a test on the host, one replicate after the other.

    Args:
        plan: the settings.
        replicate: as in `compiled`, but not traced.
        name: identifies the fit in a folder.
        measure: `values -> {name: array}`, what is ranked; its code identifies it in a folder.
    """

    def batch(key, numbers):
        found = [jax.device_get(replicate(random.fold_in(key, number))) for number in numbers]
        return {name: np.stack([each[name] for each in found]) for name in found[0]}

    identity = (
        {"program": name}
        if plan.folder is None
        else {"program": name, **_ranked(plan.joint, measure)}
    )
    return _run_batches(plan, _batch_size(plan, 1), batch, identity)


def _ranked(joint: Joint, measure: Callable[[Any], Mapping[str, Any]]) -> dict[str, Any]:
    """The lowered code of the quantities, and the argument that holds the data of each site."""
    sites = joint.program.sites
    shapes = {
        site: jax.ShapeDtypeStruct(sites[site].shape, sites[site].dtype)
        for site in joint.program.latent
    }
    lowered = jax.jit(lambda values: dict(measure(values))).lower(shapes)
    return {
        "quantities": sorted(lowered.out_info),
        "code of the quantities": _sha(lowered.as_text()),
        "arguments": joint.arguments,
    }


def check_count(name: str, value: Any) -> None:
    """Raise ValueError unless the value is a positive integer."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}: an integer, at least 1; got {value!r}.")


def _run_batches(
    plan: Plan, size: int, batch: Callable[[Array, np.ndarray], Found], what: dict[str, Any]
) -> Calibration:
    """Run all replicates in batches; batches that the folder has are read from it.

    Batches are always complete, so that a later run with more replicates can use them.
    """
    check_count("num_replicates", plan.num_replicates)
    if not 0 < plan.alpha < 1:
        raise ValueError(f"alpha: a rate between 0 and 1; got {plan.alpha!r}.")
    key, program = _key(plan.rng_key), plan.joint.program
    seed = np.asarray(random.key_data(key)).tolist()
    identity = {
        "test": plan.test,
        **program.fingerprint(),
        **what,
        "seed": seed,
        "batch_size": size,
    }
    kept = None if plan.folder is None else Folder(plan.folder, identity)
    every = range(-(-plan.num_replicates // size))
    parts: dict[int, Any] = {number: kept.load(number) if kept else None for number in every}
    left = [number for number in every if parts[number] is None]
    items = [(key, np.arange(number * size, (number + 1) * size)) for number in left]
    here = lambda: nullcontext(starmap(partial(_batch_of, batch), items))
    with plan.submitted(_batch_of, (batch,), items) if plan.submitted else here() as found:
        for number, part in zip(left, found, strict=True):
            if isinstance(part, str):  # the signal that ended the tasks before it began
                raise KeyboardInterrupt(part)
            parts[number] = part
            if kept:
                kept.save(number, part)
    found = {
        name: np.concatenate([part[name] for part in parts.values()])[: plan.num_replicates]
        for name in parts[0]
    }
    lengths = np.unique(found.pop("num_draws"))
    if len(lengths) > 1:
        raise ValueError(
            f"fit: it returned {lengths.tolist()} draws; wanted the same number for each replicate."
        )
    ranks = {name.removeprefix(PREFIX): values for name, values in found.items()}
    for name, values in ranks.items():
        if (bad := np.unique(np.nonzero(values < 0)[0])).size:
            raise ValueError(
                f"quantity {name!r}: NaN in {bad.size} of {plan.num_replicates} replicates, first "
                f"in replicate {bad[0]}."
            )
    return Calibration(
        plan.test,
        getattr(program.model, "__name__", "the model"),
        ranks,
        int(lengths[0]),
        plan.alpha,
    )


def _batch_of(
    batch: Callable[[Array, np.ndarray], Found], key: Array, numbers: np.ndarray, _bar: Any = None
) -> Found:
    """The ranks of a batch; a task of a cluster also gets a bar, which it does not show."""
    return jax.device_get(dict(batch(key, numbers)))


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _batch_size(plan: Plan, default: int) -> int:
    if plan.batch_size is None:
        return default
    check_count("batch_size", plan.batch_size)
    return plan.batch_size


def _key(rng_key: int | Array) -> Array:
    key = random.key(rng_key) if isinstance(rng_key, int | np.integer) else rng_key
    return key if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else random.wrap_key_data(key)


class Folder:
    """Batches of one test on disk: `test.json` identifies it, `batch_<n>.npz` are the batches."""

    def __init__(self, folder: str | os.PathLike[str], identity: dict[str, Any]):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        card = self.folder / "test.json"
        if card.exists():
            there = json.loads(card.read_text())
            if differ := [
                name
                for name in sorted({*there, *identity})
                if there.get(name) != identity.get(name)
            ]:
                lines = "; ".join(
                    f"{name}: {there.get(name)!r} there, {identity.get(name)!r} here"
                    for name in differ
                )
                raise ValueError(
                    f"folder: {str(folder)!r} holds another test ({lines}). Name another folder, "
                    "or remove this one."
                )
        elif any(path.suffix != ".partial" for path in self.folder.iterdir()):
            raise ValueError(
                f"folder: {str(folder)!r} holds files that are no calibration test; name another "
                "folder."
            )
        else:
            self._write(card, lambda file: file.write(json.dumps(identity, indent=1).encode()))

    def load(self, number: int) -> dict[str, np.ndarray] | None:
        """Load a batch; None where it has not run yet."""
        path = self._path(number)
        if not path.exists():
            return None
        with np.load(path) as file:
            return dict(file)

    def save(self, number: int, batch: Mapping[str, Any]) -> None:
        """Save a batch."""
        self._write(self._path(number), lambda file: np.savez(file, allow_pickle=False, **batch))

    def _path(self, number: int) -> Path:
        return self.folder / f"batch_{number:06}.npz"

    @staticmethod
    def _write(path: Path, write: Callable[[Any], Any]) -> None:
        partial = path.with_suffix(".partial")
        with open(partial, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
