"""Seconds of two chains on a cluster of two processes, and of one after the other in one process.

    uv run --extra distributed python -m tests.bench.cluster              # chains of about a second
    uv run --extra distributed python -m tests.bench.cluster --draws 600000      # of a minute

Wall seconds on a busy machine say little; CPU seconds are those of all processes. The first run of
each compiles. Threads of XLA are off, so that a chain has one core.
"""

import argparse
import os

os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"

from time import perf_counter, process_time

from numpyro.infer import NUTS

from inference import Driver
from tests.inference.models import LABELS, X, logistic


def main() -> None:
    from dask.distributed import Client, LocalCluster

    parser = argparse.ArgumentParser()
    parser.add_argument("--draws", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()

    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):

        def spent() -> float:
            return process_time() + sum(client.run(process_time).values())

        drivers = {
            name: Driver(
                NUTS(logistic),
                num_warmup=100,
                num_samples=options.draws,
                num_chains=2,
                progress_bar=False,
                cluster=where,
            )
            for name, where in {"one process": None, "cluster": client}.items()
        }
        print("| run | one process, wall | CPU | cluster, wall | CPU |\n|---|---|---|---|---|")
        for number in range(1 + options.rounds):
            figures = []
            for driver in drivers.values():
                wall, cpu = perf_counter(), spent()
                driver.run(number, X, LABELS)
                figures += [f"{perf_counter() - wall:.2f}", f"{spent() - cpu:.2f}"]
            print(f"| {number or 'first'} | {' | '.join(figures)} |", flush=True)


if __name__ == "__main__":
    main()
