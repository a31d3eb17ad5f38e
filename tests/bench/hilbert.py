"""Points a second along the Hilbert curve, ours and the pure Python package `hilbertcurve`:

    export OMP_NUM_THREADS=1 XLA_FLAGS=--xla_cpu_multi_thread_eigen=false
    uv run --with hilbertcurve python -m tests.bench.hilbert

A line a shape: millions of points a second to encode and to decode, and how many times that of the
package, which must find the same codes. Medians of five; each takes turns with the other.
"""

from time import process_time
from typing import Any

import jax
import numpy as np
from hilbertcurve.hilbertcurve import HilbertCurve  # ty: ignore[unresolved-import]  # brought by `uv run --with`

from inference.maths import hilbert

POINTS, ROUNDS = 5000, 5
SHAPES = ((2, 16), (10, 16), (10, 32), (40, 16))  # dimensions, bits


def seconds(work: Any) -> float:
    """The processor time of one call, in seconds."""
    started = process_time()
    jax.block_until_ready(work())
    return process_time() - started


def number(words: np.ndarray, unused: int) -> int:
    """A code as Python's integer."""
    return sum(int(word) << (32 * place) for place, word in enumerate(reversed(words))) >> unused


def raced(dims: int, bits: int) -> np.ndarray:
    """Seconds to encode, ours and theirs, and to decode."""
    cells = np.random.default_rng(0).integers(0, 2**bits, (POINTS, dims), dtype=np.uint32)
    code, rival, listed = hilbert.encode(cells, bits), HilbertCurve(bits, dims), cells.tolist()
    places = rival.distances_from_points(listed)
    unused = 32 * code.shape[-1] - dims * bits
    if [number(words, unused) for words in np.asarray(code)] != places:
        raise AssertionError(f"{dims} dimensions, {bits} bits: the two curves are not the same.")
    jax.block_until_ready(hilbert.decode(code, dims, bits))  # compiled
    works = (
        lambda: hilbert.encode(cells, bits),
        lambda: rival.distances_from_points(listed),
        lambda: hilbert.decode(code, dims, bits),
        lambda: rival.points_from_distances(places),
    )
    return np.median([[seconds(work) for work in works] for _ in range(ROUNDS)], axis=0)


def main() -> None:
    """The table."""
    print(
        "| dimensions | bits | encode, 1e6 a second | times the package | decode | times the "
        "package |\n|" + "---|" * 6
    )
    for dims, bits in SHAPES:
        encode, encode_theirs, decode, decode_theirs = raced(dims, bits)
        cells = (
            f"{POINTS / ours / 1e6:.2f} | {theirs / ours:.0f}"
            for ours, theirs in ((encode, encode_theirs), (decode, decode_theirs))
        )
        print(f"| {dims} | {bits} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
