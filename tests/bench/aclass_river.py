"""AClass, the online peer: river's BernoulliNB, which predicts each row and then learns from it.

    export OMP_NUM_THREADS=1 XLA_FLAGS=--xla_cpu_multi_thread_eigen=false
    uv run --with river python -m tests.bench.aclass_river

river is no dependency of the project; `--with` lends it to this one run. A missing feature is left
out of a row's dictionary, which river's predictions then take for a zero. Making the dictionaries
is not timed. Cost: O(F K) a row, a Python call each.
"""

from time import process_time

import numpy as np
from river.naive_bayes import BernoulliNB  # ty: ignore[import-not-found]

from gallery import AClassClassifier
from tests.bench.aclass_protocols import repetition
from tests.bench.aclass_speed import rows_per_second

__all__ = ["aclass", "prequential"]

SIZE = 10_000


def prequential(x: np.ndarray, y: np.ndarray) -> tuple[float, float, float]:
    """The share of rows predicted wrongly; rows per CPU second, of predicting and learning and
    of learning alone.
    """
    # river adds NumPy's booleans up to one
    rows = [{str(f): value for f, value in enumerate(row) if value == value} for row in x.tolist()]
    model, wrong, started = BernoulliNB(), 0, process_time()
    for row, label in zip(rows, y.tolist(), strict=True):
        wrong += model.predict_one(row) != label
        model.learn_one(row, label)
    both, model, started = process_time() - started, BernoulliNB(), process_time()
    for row, label in zip(rows, y.tolist(), strict=True):
        model.learn_one(row, label)
    return wrong / len(y), len(y) / both, len(y) / (process_time() - started)


def aclass(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Rows per CPU second of the particle filter: of a pass that predicts and one that learns,
    and of learning alone; nothing compiles.
    """
    learn, _ = rows_per_second(x, y)
    classifier = AClassClassifier(random_state=0, keep_assignments=False).fit(x, y)
    classifier.predict(x)
    started = process_time()
    classifier.predict(x)
    return 1 / (1 / learn + (process_time() - started) / len(y)), learn


if __name__ == "__main__":
    print(
        "| 20news_w100, missing | rows | river: error | predict and learn, points/CPU s | learn | "
        "AClass: predict and learn | learn |"
    )
    print("|" + "---|" * 7)
    for missing in (0.0, 0.5):
        x, y, _, _ = repetition("20news_w100", SIZE, missing)
        error, both, learn = prequential(np.asarray(x), y)
        ours = " | ".join(f"{speed:.0f}" for speed in aclass(np.asarray(x), y))
        print(
            f"| {missing:g} | {len(y)} | {error:.3f} | {both:.0f} | {learn:.0f} | {ours} |",
            flush=True,
        )
