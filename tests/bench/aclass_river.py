"""AClass, the online peer: river's BernoulliNB, which predicts each row and then learns from it.

    OMP_NUM_THREADS=1 uv run --with river python -m tests.bench.aclass_river

river is no dependency of the project; `--with` lends it to this one run. A missing feature is left out of a row's dictionary, which
river's predictions then take for a zero. Making the dictionaries is not timed. Cost: O(F K) a row, a Python call each.
"""

from time import process_time

import numpy as np
from river.naive_bayes import BernoulliNB  # ty: ignore[import-not-found]

from tests.bench.aclass_protocols import repetition

__all__ = ["prequential"]

SIZE = 10_000


def prequential(x: np.ndarray, y: np.ndarray) -> tuple[float, float, float]:
    """The share of rows predicted wrongly; rows per CPU second, of predicting and learning and of learning alone."""
    rows = [{str(f): value for f, value in enumerate(row) if value == value} for row in x.tolist()]  # river adds NumPy's booleans up to one
    model, wrong, started = BernoulliNB(), 0, process_time()
    for row, label in zip(rows, y.tolist(), strict=True):
        wrong += model.predict_one(row) != label
        model.learn_one(row, label)
    both, model, started = process_time() - started, BernoulliNB(), process_time()
    for row, label in zip(rows, y.tolist(), strict=True):
        model.learn_one(row, label)
    return wrong / len(y), len(y) / both, len(y) / (process_time() - started)


if __name__ == "__main__":
    print("| 20news_w100, missing | rows | error | predict and learn, points/CPU s | learn |\n|---|---|---|---|---|")
    for missing in (0.0, 0.5):
        x, y, _, _ = repetition("20news_w100", SIZE, missing)
        error, both, learn = prequential(np.asarray(x), y)
        print(f"| {missing:g} | {len(y)} | {error:.3f} | {both:.0f} | {learn:.0f} |", flush=True)
