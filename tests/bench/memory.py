"""Memory of long runs: draws that go to disk, and rows that come one at a time.

    python -m tests.bench.memory disk --gigabytes 2    # under a limit of 600 MB above a short run
    python -m tests.bench.memory rows --number 20000   # partial_fit, a row a call

`disk` runs NUTS on 1000 Normal variables with a checkpoint: first ten draws, whose peak of address
space is the run's own need, then draws of as many gigabytes in a process that may take no more than
600 MB above it. The child then summarises ten of the variables with ArviZ, which loads those alone.

`rows` prints memory and CPU seconds of each tenth of the rows, and their trend over the last half:
how much a row at the end costs above one in the middle. Assignments are not kept: with them a call
copies those of all rows so far.
"""

import argparse
import resource
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from time import process_time

import numpy as np

MARGIN = 600 * 2**20
SIZE = 1000  # variables of four bytes


def status(field: str) -> int:
    """A number of bytes that Linux tells of this process, such as "VmPeak"."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field + ":"))


def child(num_draws: int, folder: str, limit: int) -> None:
    """Prints the peaks of address space and of memory after a run on disk."""
    if limit:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    import arviz as az
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer import NUTS

    from inference import Driver

    def model() -> None:
        numpyro.sample("x", dist.Normal(0, 1).expand([SIZE]).to_event(1))

    settings = {"num_warmup": 100, "num_samples": num_draws, "progress_bar": False}
    tree = Driver(NUTS(model, max_tree_depth=3), checkpoint=folder, **settings).run(0)
    own = status("VmPeak")
    table = az.summary(tree.posterior["x"][..., :10], kind="stats")
    assert np.abs(table["mean"].astype(float)).max() < 0.2
    print(own, status("VmPeak"), status("VmHWM"))


def disk(gigabytes: float) -> None:
    """Runs `child` twice, the second time with a limit."""
    num_draws = int(gigabytes * 2**30 / 4 / SIZE)
    limit = 0
    for number in (10_000, num_draws):
        with TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "tests.bench.memory", "child", folder]
            given = [*command, "--number", str(number), "--limit", str(limit)]
            done = subprocess.run(given, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{number} draws: {done.stderr}")
        run, after, memory = (int(each) / 2**20 for each in done.stdout.split())
        print(
            f"{number:>8} draws, {4e-6 * number * SIZE:6.0f} MB: address space {run:.0f} MB, with "
            f"the summary {after:.0f}; memory {memory:.0f} MB; limit {limit / 2**20:.0f} MB"
        )
        limit = limit or int(run * 2**20) + MARGIN


def rows(number: int) -> None:
    """Learns rows of 20 binary columns one at a time."""
    from gallery import AClassClassifier

    rng = np.random.default_rng(0)
    group = rng.integers(0, 4, number)
    x = (rng.random((number, 20)) < rng.random((4, 20))[group]).astype(float)
    y = group % 2
    classifier = AClassClassifier(keep_assignments=False, random_state=0)
    seconds, memory = [], []
    for tenth in np.array_split(np.arange(number), 10):
        started = process_time()
        for i in tenth:
            classifier.partial_fit(x[i : i + 1], y[i : i + 1], classes=[0, 1])
        seconds.append((process_time() - started) / len(tenth))
        memory.append(status("VmRSS") / 2**20)
        print(f"to row {tenth[-1] + 1:>6}: {1e3 * seconds[-1]:.2f} ms a row, {memory[-1]:.0f} MB")
    for name, each in (("time", seconds), ("memory", memory)):
        slope, middle = np.polyfit(np.arange(-2, 3), each[5:], 1)
        print(f"{name}: {100 * 4 * slope / middle:+.1f} % from the sixth tenth to the last")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.bench.memory", description=__doc__)
    parser.add_argument("what", choices=["disk", "rows", "child"])
    parser.add_argument("folder", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--number", type=int, default=20_000)
    parser.add_argument("--limit", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.what == "disk":
        disk(args.gigabytes)
    elif args.what == "rows":
        rows(args.number)
    else:
        child(args.number, args.folder, args.limit)
