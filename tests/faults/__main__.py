"""Kills, damage and signals at length; the table says what came of them."""

# ruff: noqa: E402 (JAX reads these when it is imported)

import os
from pathlib import Path

CACHE = Path(__file__).parents[2] / ".pytest_cache" / "compiled"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")

import argparse
import signal
import sys
from tempfile import TemporaryDirectory

import numpy as np

from tests.faults import faults
from tests.faults.cases import CASES, run, surroundings


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    for name in ("kills", "damage", "signals"):
        parser.add_argument(f"--{name}", type=int, default=0, help="how many, over all cases")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--victim", nargs=2, metavar=("CASE", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.victim:
        with surroundings(faults.CHUNK):
            run(args.victim[0], Path(args.victim[1]))
        return 0
    # a shell has its background ignore Ctrl-C, and so would a run
    signal.signal(signal.SIGINT, signal.default_int_handler)
    is_silent, rng = False, np.random.default_rng(args.seed)
    for kind, do in (
        ("signals", faults.signalled),
        ("damage", faults.damaged),
        ("kills", faults.killed),
    ):
        if not (times := getattr(args, kind)):
            continue
        for name in args.cases:
            with TemporaryDirectory() as folder:
                found = do(name, Path(folder) / "run", -(-times // len(args.cases)), rng)
            is_silent |= faults.is_silent(found)
            told = "; ".join(f"{count} {outcome}" for outcome, count in sorted(found.items()))
            print(f"{kind:8} {name:17} {told}", flush=True)
    return int(is_silent)


if __name__ == "__main__":
    sys.exit(main())
