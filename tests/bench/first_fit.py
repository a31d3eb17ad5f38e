"""CPU seconds until the first answer of each estimator, in units of NUTS on eight schools.

    python -m tests.bench.first_fit                        # all cases, three times each
    python -m tests.bench.first_fit aclass iqgme --repeats 1
    python -m tests.bench.first_fit aclass --phases        # where the programs are compiled

A case runs in processes of its own, on one core: first with an empty compilation cache, then with
the cache that this process has left. In a process it fits, predicts, fits the same rows again,
fits a tenth fewer rows, and predicts another number of rows. Imports of the packages are apart;
what is imported within a fit counts. What the compiled loop itself takes (`Loop.chunk`) is
subtracted: it grows with the data, and other benchmarks measure it. Draws that an estimator makes
when they are first asked for are not made.

The unit is the CPU time of `numpyro.infer.MCMC(NUTS)` on eight schools, 1000 + 1000 steps, with an
empty cache, in the same run of this script. Columns of the table:

    first        fit and prediction, empty cache           programs   compiled in the first fit
    cached       the same in a second process              slowest    of them, in units
    again        the same fit again in the first process
    fewer        a fit of a tenth fewer rows
    other        a prediction of another number of rows

With `--phases` a table for each case says in which part of a fit programs are traced, lowered and
compiled, in seconds. `prove` is the check of what was read of the model.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from time import process_time
from typing import Any

if "--child" in sys.argv:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

import jax
import numpy as np

ROOT = Path(__file__).parents[2]
EVENTS = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "compile",
}
# the innermost function of these on the stack names the phase
PHASES = {
    "prove": "prove",
    "read": "read",
    "init": "start",
    "start": "start",
    "chunk": "loop",
    "Loop.__init__": "loop",
    "on_host": "host",
    "draw": "draws",
    "results": "tree",
    "tree": "tree",
    "predict": "predict",
    "predict_proba": "predict",
}


class Spent:
    """Seconds that JAX reports of tracing, lowering and compiling, by phase."""

    def __init__(self):
        self.seconds: dict[tuple[str, str], float] = defaultdict(float)
        self.programs: list[float] = []
        self._ended: dict[str, list[tuple[float, float]]] = defaultdict(list)

    def __call__(self, event: str, duration: float, **settings: Any) -> None:
        """Notes an event; one that lies within another of its kind is counted once."""
        kind = EVENTS.get(event)
        if kind is None:
            return
        end = process_time()
        begun = end - duration
        within = [each for each in self._ended[kind] if each[0] >= begun]
        self._ended[kind] = [each for each in self._ended[kind] if each[0] < begun]
        self._ended[kind].append((begun, end))
        own = duration - sum(b - a for a, b in within)
        self.seconds[_phase(), kind] += max(own, 0.0)
        if kind == "compile":
            self.programs.append(duration)


def _phase() -> str:
    frame = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(str(ROOT)):
            for name in (code.co_qualname, code.co_name):
                if name in PHASES:
                    return PHASES[name]
        frame = frame.f_back
    return "other"


# Cases: fit(share of the rows) -> estimator; predict(estimator, number of rows).


def _classifier(make: Callable, x: np.ndarray, y: np.ndarray) -> tuple[Callable, Callable]:
    def fit(share: float) -> Any:
        rows = slice(int(len(x) * share))
        return make().fit(x[rows], y[rows])

    return fit, lambda fitted, number: fitted.predict_proba(x[:number])


def aclass() -> tuple[Callable, Callable]:
    """Wine, 178 rows of 13 columns."""
    from sklearn.datasets import load_wine

    from gallery import AClassClassifier

    return _classifier(lambda: AClassClassifier(random_state=0), *load_wine(return_X_y=True))


def augment_reduce() -> tuple[Callable, Callable]:
    """Digits, 1500 rows of 64 columns."""
    from sklearn.datasets import load_digits

    from gallery import AugmentReduceClassifier

    x, y = load_digits(return_X_y=True)
    return _classifier(lambda: AugmentReduceClassifier(random_state=0), x[:1500] / 16, y[:1500])


def iqgme() -> tuple[Callable, Callable]:
    """Ionosphere, every second row: 176 rows of 33 columns."""
    from gallery import IQGMEClassifier
    from gallery.datasets import load

    data = load("ionosphere")
    x, y = np.asarray(data["x"])[::2], np.asarray(data["y"])[::2]
    return _classifier(lambda: IQGMEClassifier(random_state=0), x[:, x.std(0) > 0], y)


def iqgme_factors() -> tuple[Callable, Callable]:
    """The same rows, three factors."""
    from gallery import IQGMEClassifier
    from gallery.datasets import load

    data = load("ionosphere")
    x, y = np.asarray(data["x"])[::2], np.asarray(data["y"])[::2]
    make = lambda: IQGMEClassifier(n_factors=3, random_state=0)
    return _classifier(make, x[:, x.std(0) > 0], y)


def iqgme_tasks() -> tuple[Callable, Callable]:
    """Three tasks of 60 rows of 8 columns."""
    from sklearn.datasets import make_classification

    from gallery import MultiTaskIQGMEClassifier

    x, y = make_classification(180, 8, n_informative=5, random_state=0)
    task = np.arange(180) % 3

    def fit(share: float) -> Any:
        rows = slice(int(180 * share))
        return MultiTaskIQGMEClassifier(random_state=0).fit(x[rows], y[rows], task[rows])

    return fit, lambda fitted, number: fitted.predict_proba(x[:number], task[:number])


def bsvd() -> tuple[Callable, Callable]:
    """600 ratings of 60 users and 40 items."""
    from gallery import BSVDCompleter

    rng = np.random.default_rng(0)
    rows, columns = np.divmod(rng.permutation(2400)[:600], 40)
    left, right = rng.normal(size=(60, 2)), rng.normal(size=(40, 2))
    values = (left[rows] * right[columns]).sum(1) + 0.3 * rng.normal(size=600)

    def fit(share: float) -> Any:
        some = slice(int(600 * share))
        completer = BSVDCompleter((60, 40), random_state=0)
        return completer.fit((rows[some], columns[some], values[some]))

    return fit, lambda fitted, number: fitted.predict(rows[:number], columns[:number])


def staged() -> tuple[Callable, Callable]:
    """Wine, every second row, three columns; order 2."""
    from sklearn.datasets import load_wine

    from gallery import StagedMixtureClassifier

    x, y = load_wine(return_X_y=True)
    return _classifier(
        lambda: StagedMixtureClassifier(2, random_state=0), x[::2, [0, 6, 9]], y[::2]
    )


def archipelago() -> tuple[Callable, Callable]:
    """Two moons, 60 rows, two labels of each class."""
    from sklearn.datasets import make_moons

    from gallery import ArchipelagoClassifier

    x, y = make_moons(60, noise=0.1, random_state=0)
    known = np.concatenate([np.flatnonzero(y == k)[:2] for k in (0, 1)])
    seen = np.full(60, -1)
    seen[known] = y[known]
    return _classifier(lambda: ArchipelagoClassifier(random_state=0), x, seen)


def eight_schools() -> tuple[Callable, Callable]:
    """The unit."""
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer import MCMC, NUTS

    effects = jnp.array([28.0, 8, -3, 7, -1, 1, 18, 12])
    errors = jnp.array([15.0, 10, 16, 11, 9, 11, 10, 18])

    def model():
        mu = numpyro.sample("mu", dist.Normal(0, 5))
        tau = numpyro.sample("tau", dist.HalfCauchy(5))
        with numpyro.plate("school", 8):
            theta = numpyro.sample("theta", dist.Normal(mu, tau))
            numpyro.sample("effect", dist.Normal(theta, errors), obs=effects)

    def fit(share: float) -> Any:
        mcmc = MCMC(NUTS(model), num_warmup=1000, num_samples=1000, progress_bar=False)
        mcmc.run(jax.random.key(0))
        return jax.block_until_ready(mcmc.get_samples()) and None

    return fit, lambda fitted, number: None


CASES = {
    case.__name__: case
    for case in (
        augment_reduce,
        aclass,
        iqgme,
        iqgme_tasks,
        bsvd,
        staged,
        iqgme_factors,
        archipelago,
    )
}
UNIT = {"eight_schools": eight_schools}


def child(name: str) -> None:
    """Runs a case, and prints what it took as JSON."""
    import arviz  # noqa: F401
    import numpyro  # noqa: F401
    import xarray  # noqa: F401

    import gallery  # noqa: F401
    from inference.run.loop import Loop

    fit, predict = (CASES | UNIT)[name]()
    found, chunk = {}, Loop.chunk
    in_loop = 0.0

    def timed(*args: Any, **kwargs: Any) -> Any:
        nonlocal in_loop
        begun = process_time()
        taken = chunk(*args, **kwargs)
        in_loop += process_time() - begun
        return taken

    Loop.chunk = timed

    def measured(label: str, action: Callable) -> Any:
        nonlocal in_loop
        spent, in_loop = Spent(), 0.0
        jax.monitoring.register_event_duration_secs_listener(spent)
        begun = process_time()
        result = action()
        cpu = process_time() - begun
        jax.monitoring.unregister_event_duration_listener(spent)
        found[label] = {
            "cpu": cpu,
            "loop": in_loop,
            "programs": spent.programs,
            "phases": [[*where, seconds] for where, seconds in spent.seconds.items()],
        }
        return result

    fitted = measured("fit", lambda: fit(1.0))
    measured("predict", lambda: predict(fitted, 40))
    if name not in UNIT:
        measured("predict other", lambda: predict(fitted, 33))
        measured("fit again", lambda: fit(1.0))
        measured("fit fewer", lambda: fit(0.9))
    print(json.dumps(found))


def _run(name: str, cache: str) -> dict[str, Any]:
    environment = os.environ | {"XDG_CACHE_HOME": cache, "JAX_PLATFORMS": "cpu"}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    command = [sys.executable, "-m", "tests.bench.first_fit", "--child", name]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{name}: {done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def _net(part: dict[str, Any]) -> float:
    return part["cpu"] - part["loop"]


def _both(found: dict[str, Any]) -> float:
    return _net(found["fit"]) + _net(found["predict"])


def _phases(found: dict[str, Any]) -> None:
    for label, part in found.items():
        print(
            f"  {label}: {part['cpu']:.2f} s of the processor, of which the loop {part['loop']:.2f}; "
            f"{len(part['programs'])} programs, {sum(s > 0.3 for s in part['programs'])} over .3 s"
        )
        table: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for phase, kind, seconds in part["phases"]:
            table[phase][kind] += seconds
        for phase, kinds in table.items():
            print(f"    {phase:9}" + "  ".join(f"{k} {kinds[k]:6.2f}" for k in EVENTS.values()))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; all by default")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--phases", action="store_true")
    parser.add_argument("--child")
    args = parser.parse_args()
    if args.child:
        return child(args.child)
    median = statistics.median
    units = []
    for _ in range(args.repeats):
        with tempfile.TemporaryDirectory() as cache:
            units.append(_run("eight_schools", cache)["fit"]["cpu"])
    unit = median(units)
    print(f"unit: {unit:.2f} CPU seconds for NUTS on eight schools, 1000 + 1000 steps")
    heads = ("case", "first", "cached", "again", "fewer", "other", "programs", "slowest")
    print("".join(f"{head:>16}" if not i else f"{head:>9}" for i, head in enumerate(heads)))
    for name in args.cases or CASES:
        cold, warm = [], []
        for _ in range(args.repeats):
            with tempfile.TemporaryDirectory() as cache:
                cold.append(_run(name, cache))
                warm.append(_run(name, cache))
        row = [
            median(map(_both, cold)),
            median(map(_both, warm)),
            median(_net(each["fit again"]) for each in cold),
            median(_net(each["fit fewer"]) for each in cold),
            median(_net(each["predict other"]) for each in cold),
        ]
        programs = cold[0]["fit"]["programs"]
        print(
            f"{name:>16}"
            + "".join(f"{each / unit:9.2f}" for each in row)
            + f"{len(programs):9}{max(programs, default=0.0) / unit:9.2f}",
            flush=True,
        )
        if args.phases:
            _phases(cold[0])


if __name__ == "__main__":
    main()
