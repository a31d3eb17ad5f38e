"""Whether a change of the code has changed a number: every kernel and estimator, on small data.

    python -m tests.bench.same record FOLDER [CASE ...] [--jobs 2]
    python -m tests.bench.same compare FOLDER FOLDER [CASE ...]

The first runs the cases with fixed keys, all by default, and writes FOLDER/CASE.npz: the trees of
the runs, their evidences or bounds, and predictions. The second prints a line for each case, with
the largest relative difference and where it is, and exits with 1 where a case differs or is
missing. Numbers are to agree to 1e-6, in float32 to 1e-4 (those that are small beside the others
of their array to less, see `SMALL`), whole numbers altogether. What the second folder lacks is a
difference, what is new in it is named.

Of a chain there are the draws after one step, compared so, and means over a longer run with their
Monte-Carlo errors: differences of these are to be like the errors, by their root mean square and
by the largest one. Estimators that draw take a few sweeps, so that roundings do not grow.

Record before a change and after it, on the same machine. Names are those that users have; what
else is touched is in `merged`. A case that raises is reported, and the others are run.
"""

# ruff: noqa: E402 (JAX reads these when it is imported)

import os
from pathlib import Path

CACHE = Path(__file__).parents[2] / ".pytest_cache" / "compiled"
FLAGS = "--xla_cpu_multi_thread_eigen=false --xla_backend_optimization_level=0"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("XLA_FLAGS", FLAGS)
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import sys
import traceback
import warnings
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing import get_context
from time import process_time
from typing import NamedTuple

import jax
import numpy as np

from tests.bench import same_algorithms, same_chains, same_estimators  # noqa: F401
from tests.bench.same_cases import CASES, ERROR, MEAN, Record

TOLERANCE = {True: 1e-6, False: 1e-4}  # of float64, and of float32
SMALL = {True: 1e-2, False: 1e-1}  # of the root mean square of an array: the least to compare with
FEW, MOST = 10, {True: 2.0, False: 1.5}  # means; the most root mean square z of few, and of many
LARGEST, ROUNDED = 5.0, 1e-9  # the most z; means that are the same, relatively


# Recording.


def record(name: str, folder: Path) -> str | None:
    """Runs a case, and says how it went: None where it failed."""
    started = process_time()
    jax.clear_caches()  # a case is as if it were alone
    try:
        with jax.enable_x64(CASES[name].x64), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = {path: np.asarray(values) for path, values in CASES[name].run().items()}
    except Exception:
        print(f"FAILED  {name}\n{traceback.format_exc()}", flush=True)
        return None
    np.savez_compressed(folder / f"{name}.npz", **found)
    spent = process_time() - started
    print(f"{'done':7} {name:34} {spent:6.1f} s of the processor, {len(found)} arrays", flush=True)
    return name


def record_all(names: list[str], folder: Path, jobs: int) -> bool:
    """Whether all went well."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:  # one that fails is not to be that of before
        (folder / f"{name}.npz").unlink(missing_ok=True)
    if jobs == 1:
        done = [record(name, folder) for name in names]
    else:
        with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
            done = list(pool.map(record, names, repeat(folder)))
    return None not in done


# Comparing.


class Gap(NamedTuple):
    """How far two arrays are from each other."""

    over: float  # what they may be, times this
    size: float
    place: str


def compare(name: str, one: Path, other: Path) -> bool:
    """Prints a line of a case: whether it is the same in two folders."""
    files = [folder / f"{name}.npz" for folder in (one, other)]
    if absent := [str(file) for file in files if not file.exists()]:
        print(f"{'MISSING':7} {name:34} {', '.join(absent)}")
        return False
    first, second = (dict(np.load(file)) for file in files)
    names = [path for path in first if path in second and not path.startswith((MEAN, ERROR))]
    lacking = sorted(first.keys() - second.keys())
    gaps = [gap_of(path, first[path], second[path], CASES[name].is_double) for path in names]
    worst = max(gaps, key=lambda gap: gap.over)
    differing = sum(gap.over > 1 for gap in gaps)
    words, is_same = [f"{worst.size:8.1e} at {worst.place}"], not differing and not lacking
    if differing:
        words += [f"{differing} of {len(gaps)} arrays differ", *of_evidence(first, second)]
    if any(path.startswith(MEAN) for path in first):
        root, largest, place, bar = z_of_means(first, second)
        words.append(f"z {root:.2f} of means, {largest:.1f} at {place}")
        is_same &= root <= bar and largest <= LARGEST
    if lacking:
        words.append(f"lacking: {', '.join(lacking)}")
    if more := sorted(second.keys() - first.keys()):
        words.append(f"new: {', '.join(more)}")
    print(f"{'same' if is_same else 'DIFFERS':7} {name:34} {'; '.join(words)}")
    return is_same


def gap_of(path: str, one: np.ndarray, other: np.ndarray, is_double: bool) -> Gap:
    """The largest relative difference and where it is; infinite where shapes or kinds differ."""
    if one.shape != other.shape:
        return Gap(np.inf, np.inf, f"{path}, whose shape was {one.shape} and is {other.shape}")
    if not one.size:
        return Gap(0.0, 0.0, path)
    if one.dtype != other.dtype and "f" in (one.dtype.kind, other.dtype.kind):
        return Gap(np.inf, np.inf, f"{path}, which was {one.dtype} and is {other.dtype}")
    if one.dtype.kind != "f":
        return largest_of(path, one != other, 0.0)
    is_double &= one.dtype == np.float64
    is_same = (one == other) | (np.isnan(one) & np.isnan(other))
    with np.errstate(invalid="ignore"):
        apart = np.where(is_same, 0.0, np.abs(one - other))
    finite = np.isfinite(one) & np.isfinite(other)
    size = np.maximum(np.abs(one), np.abs(other))
    usual = np.sqrt(np.mean(size[finite].astype(float) ** 2)) if finite.any() else 0.0
    size = np.maximum(size, max(SMALL[is_double] * usual, np.finfo(float).tiny))
    with np.errstate(invalid="ignore"):
        relative = np.where(finite, apart / size, np.where(apart == 0, 0.0, np.inf))
    return largest_of(path, relative, TOLERANCE[is_double])


def largest_of(path: str, relative: np.ndarray, tolerance: float) -> Gap:
    """Where it is, and whether that is too much."""
    place = np.unravel_index(np.argmax(relative), relative.shape)
    size = float(relative[place])
    over = size / tolerance if tolerance else np.inf * size if size else 0.0
    return Gap(over, size, f"{path}{list(map(int, place)) if place else ''}")


def of_evidence(first: Record, second: Record) -> list[str]:
    """How far evidences are apart: runs that part by a rounding are to find the same."""
    found = []
    for path in (path for path in first if path.endswith("attrs/log_evidence")):
        error = f"{path}_se"
        if path in second and error in first and error in second:
            spread = np.hypot(first[error], second[error])
            found.append(float(np.abs(first[path] - second[path]) / spread))
    return [f"evidences {max(found):.2f} of their errors apart"] if found else []


def z_of_means(first: Record, second: Record) -> tuple[float, float, str, float]:
    """The root mean square z, the largest one and its place, and what the first may be.

    Each array of means has the same weight.
    """
    squares, largest, count = [], Gap(0.0, -1.0, ""), 0
    for path in (path for path in first if path.startswith(MEAN) and path in second):
        of = path.replace(MEAN, ERROR)
        if first[path].shape != second[path].shape:
            return np.inf, np.inf, f"{path}, whose shape is another", MOST[True]
        apart, error = np.abs(first[path] - second[path]), np.hypot(first[of], second[of])
        with np.errstate(divide="ignore", invalid="ignore"):
            z = np.where(apart <= ROUNDED * np.abs(first[path]), 0.0, apart / error)
        squares.append(np.mean(z**2))
        count += z.size
        here = largest_of(path.removeprefix(MEAN), z, 1.0)
        largest = max(largest, here, key=lambda gap: gap.size)
    return float(np.sqrt(np.mean(squares))), largest.size, largest.place, MOST[count < FEW]


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for command, number in (("record", 1), ("compare", 2)):
        of = commands.add_parser(command)
        of.add_argument("folders", nargs=number, type=Path, metavar="FOLDER")
        of.add_argument("cases", nargs="*", metavar="CASE", help="all by default")
        if command == "record":
            of.add_argument("--jobs", type=int, default=1, help="processes side by side")
    told = parser.parse_args()
    if unknown := sorted(set(told.cases) - set(CASES)):
        parser.error(f"no case {unknown[0]!r}; there are {', '.join(CASES)}")
    names = told.cases or list(CASES)
    if told.command == "record":
        return int(not record_all(names, *told.folders, told.jobs))
    same = [compare(name, *told.folders) for name in names]
    print(f"{sum(same)} of {len(same)} cases are the same")
    return int(not all(same))


if __name__ == "__main__":
    sys.exit(main())
