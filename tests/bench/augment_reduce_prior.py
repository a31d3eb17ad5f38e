"""The classifier at its defaults, whose prior is chosen by it, next to the exact softmax at equal
CPU seconds.

    export OMP_NUM_THREADS=1 XLA_FLAGS=--xla_cpu_multi_thread_eigen=false
    uv run python -m tests.bench.augment_reduce_prior [digits bibtex mnist omniglot] [--seeds 2]

The exact softmax has the same columns and the same kind of prior. It runs by L-BFGS in NumPy, and
with `--minibatches` also by the steps of the kernel, at each scale of a grid for as many CPU
seconds as the whole fit of the classifier took, compilation and choice of the prior included. Its
scale is the best by the test score, which favours it.
"""

import argparse
from collections.abc import Callable
from contextlib import suppress
from time import process_time

import numpy as np
from scipy.optimize import minimize
from sklearn.datasets import load_digits

from gallery import AugmentReduceClassifier
from gallery.augment_reduce import _gain
from inference import AugmentReduce, Driver
from inference.kernels.augment_reduce.weights import Adagrad
from tests.bench.augment_reduce import table_data
from tests.bench.augment_reduce_rivals import exact_softmax

__all__ = ["main"]

SCALES = {
    "digits": (1.0, 2.0, 3.0, 5.0),
    "bibtex": (0.07, 0.1, 0.14, 0.2),
    "mnist": (0.05, 0.1, 0.2, 0.3),
    "omniglot": (0.1, 0.2, 0.3, 0.5),
}


def split(name: str, seed: int) -> tuple[np.ndarray, ...]:
    """Features and classes to learn from and to be tested on; digits are divided at random."""
    if name != "digits":
        return table_data(name)
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(x))
    x, y = x[order].astype(np.float32) / 16, y[order].astype(np.int32)
    return x[:1200], y[:1200], x[1200:], y[1200:]


def score(log_probs: np.ndarray, y: np.ndarray) -> float:
    """The mean log score."""
    return float(log_probs[np.arange(len(y)), y].mean())


def log_softmax(weights: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Log probabilities; the last column of the weights is the bias."""
    utility = x @ weights[:, :-1].T + weights[:, -1]
    utility -= utility.max(1, keepdims=True)
    return utility - np.log(np.exp(utility).sum(1, keepdims=True))


class OutOfTimeError(Exception):
    """Ends a minimisation."""


def by_lbfgs(x: np.ndarray, y: np.ndarray, scale: float, seconds: float) -> np.ndarray:
    """Weights [class, feature and bias] after so many CPU seconds, or at the mode."""
    shape, started = (int(y.max()) + 1, x.shape[1] + 1), process_time()
    last = [np.zeros(shape, np.float32)]

    def loss(vector: np.ndarray) -> tuple[float, np.ndarray]:
        if process_time() - started > seconds:
            raise OutOfTimeError
        weights = vector.astype(np.float32).reshape(shape)
        value, slope = 0.0, np.zeros(shape, np.float32)
        for at in range(0, len(x), 4096):
            some, own = x[at : at + 4096], y[at : at + 4096]
            log_probs = log_softmax(weights, some)
            place = np.arange(len(own)), own
            value -= float(log_probs[place].sum(dtype=float))
            residual = np.exp(log_probs)
            residual[place] -= 1
            slope[:, :-1] += residual.T @ some
            slope[:, -1] += residual.sum(0)
        value += float((vector**2).sum()) / (2 * scale**2)
        return value / len(y), (slope.ravel() + vector / scale**2) / len(y)

    def keep(vector: np.ndarray) -> None:
        last[0] = vector.astype(np.float32).reshape(shape)

    with suppress(OutOfTimeError):
        minimize(
            loss, last[0].ravel(), jac=True, method="L-BFGS-B", callback=keep,
            options={"maxiter": 2000, "gtol": 1e-6},
        )  # fmt: skip
    return last[0]


def by_minibatches(x: np.ndarray, y: np.ndarray, scale: float, seconds: float) -> np.ndarray:
    """Weights after so many CPU seconds of steps of 128 rows and all classes."""
    kernel = AugmentReduce(exact_softmax, optimizer=Adagrad(0.1 * _gain(x)))
    driver = Driver(kernel, num_warmup=1, num_samples=0, progress_bar=False)
    told = {"num_classes": int(y.max()) + 1, "batch_size": 128, "num_negatives": 1}
    driver.run(0, x=x, y=y, prior_scale=scale, **told)
    started = process_time()  # compilation is not counted
    while process_time() - started < seconds:
        driver.extend(50)
    found = kernel.values(driver.states[0], driver.reading)
    return np.column_stack([found["weights"]["loc"], found["biases"]["loc"]])


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sets", nargs="*", default=[])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--minibatches", action="store_true")
    told = parser.parse_args()
    print("| set | seed | A&R | scale | CPU s | exact softmax | scale | by | above it by |")
    print(9 * "|---" + "|")
    rivals: dict[str, Callable] = {"L-BFGS": by_lbfgs}
    rivals |= {"minibatches": by_minibatches} if told.minibatches else {}
    for name in told.sets or SCALES:
        for seed in range(told.seeds):
            x, y, x_test, y_test = split(name, seed)
            started = process_time()
            fit = AugmentReduceClassifier(random_state=seed, progress_bar=False).fit(x, y)
            seconds = process_time() - started
            ours = score(fit.predict_log_proba(x_test), y_test)
            z, z_test = (fit._scaled(each, False) for each in (x, x_test))
            best = max(
                (score(log_softmax(rival(z, y, scale, seconds), z_test), y_test), scale, by)
                for by, rival in rivals.items()
                for scale in SCALES[name]
            )
            print(
                f"| {name} | {seed} | {ours:.4f} | {fit.prior_scale_:.3g} | {seconds:.1f} | "
                f"{best[0]:.4f} | {best[1]} | {best[2]} | {ours - best[0]:+.4f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
