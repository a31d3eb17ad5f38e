"""How often the calibration tests fail: for each planted bug and for its correct twin, by the
number of replicates.

    uv run python -m tests.bench.calibration

One long run of each kernel is cut into independent repetitions, so there are ten times as many of
100 replicates as of 1000. Kernels, models and settings are those of
tests/diagnostics/test_calibration.py, where the chosen number of replicates is 1000.
"""

from time import perf_counter

from tests.diagnostics.planted import CASES, NUM_REPLICATES, calibrate, repetitions

SIZES = (100, 200, 500, NUM_REPLICATES)
POWER_REPETITIONS = 50  # of each kernel with a bug, with the chosen number of replicates
FALSE_REPETITIONS = 200  # of each correct kernel
ALPHA = 0.01


def row(test: str, case: str, bug: bool, count: int) -> str:
    """A line of the table: the share of repetitions that fail, for each number of replicates."""
    started = perf_counter()
    long_run = calibrate(test, case, bug, count * NUM_REPLICATES, alpha=ALPHA, batch_size=5000)
    seconds = perf_counter() - started
    shares = []
    for size in SIZES:
        failed = [not each.passed for each in repetitions(long_run, size)]
        shares.append(f"{sum(failed) / len(failed):.3g}")
    kernel = CASES[case][2].__name__
    return (
        f"| {kernel} | {case if bug else 'none'} | {test} | {count} | {' | '.join(shares)} | "
        f"{1e3 * seconds / count:.0f} |"
    )


if __name__ == "__main__":
    columns = (
        "kernel",
        "bug",
        "test",
        f"repetitions of {NUM_REPLICATES}",
        *(f"{size} replicates" for size in SIZES),
        f"ms for {NUM_REPLICATES} replicates",
    )
    print(f"| {' | '.join(columns)} |")
    print(f"|{'---|' * len(columns)}")
    for bug, count in ((True, POWER_REPETITIONS), (False, FALSE_REPETITIONS)):
        for case in CASES:
            for test in ("sbc", "geweke"):
                print(row(test, case, bug, count), flush=True)
