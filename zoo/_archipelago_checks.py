"""Checks of the arguments of `zoo.archipelago`."""

from numbers import Integral, Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from jax.core import Tracer

__all__ = [
    "refuse_no_covariance",
    "refuse_wrong_data",
    "refuse_wrong_numbers",
    "refuse_wrong_parts",
]


def refuse_wrong_parts(functions: dict[str, Any], is_ard: Any, priors: dict[str, Any]) -> None:
    """Refuse functions and priors of a wrong type."""
    if not isinstance(is_ard, bool | np.bool_):
        raise ValueError(f"archipelago is_ard: found {is_ard!r}, wanted True or False.")
    for name, value in functions.items():
        if not callable(value):
            raise ValueError(
                f"archipelago {name}: found {value!r}, wanted a function like those of "
                "zoo.archipelago."
            )
    for name, value in priors.items():
        if not isinstance(value, dist.Distribution) or value.support is dist.constraints.real:
            raise ValueError(
                f"archipelago {name}: found {value!r}, wanted a distribution of a positive number."
            )


def refuse_no_covariance(covariance: Any, num_features: int) -> None:
    """Refuse a covariance function that is not positive definite at close and distant points.

    A covariance that depends on latent sites is not checked.
    """
    rng = np.random.default_rng(0)
    plane = np.pad(
        np.indices((8, 8)).reshape(2, -1).T * 0.3, ((0, 0), (0, max(num_features - 2, 0)))
    )[:, :num_features]
    points = np.concatenate(
        [plane, *(size * rng.normal(size=(20, num_features)) for size in (0.3, 1.0, 3.0))]
    )
    with jax.ensure_compile_time_eval():
        found = covariance(jnp.asarray(points), jnp.asarray(points))
    if np.shape(found) != (len(points),) * 2:
        raise ValueError(
            f"archipelago covariance: found shape {np.shape(found)} for {len(points)} and "
            f"{len(points)} points."
        )
    if isinstance(found, Tracer):
        return
    least, largest = np.linalg.eigvalsh(np.asarray(found))[[0, -1]]
    if not least > -1e-7 * largest:
        raise ValueError(
            f"archipelago covariance: found an eigenvalue of {least:.2g} beside one of "
            f"{largest:.2g} at {len(points)} points, wanted a positive definite function. Give "
            "tinygp's stationary kernels `distance=tinygp.kernels.distance.L2Distance()`."
        )


def refuse_wrong_numbers(persistence: Any, **counts: Any) -> None:
    """Refuse a persistence outside of (0, 1], and counts below 1."""
    for name, value in counts.items():
        if not isinstance(value, Integral) or value < 1:
            raise ValueError(
                f"archipelago {name}: found {value!r}, wanted a whole number, 1 or more."
            )
    if not isinstance(persistence, Tracer) and not (
        isinstance(persistence, Real | Array) and 0 < persistence <= 1
    ):
        raise ValueError(
            f"archipelago persistence: found {persistence!r}, wanted a probability in (0, 1]."
        )


def refuse_wrong_data(x: Any, y: Any, num_classes: int) -> None:
    """Refuse wrong rows and labels; traced values are not checked."""
    if not jax.config.jax_enable_x64:
        raise ValueError(
            "archipelago: found float32, wanted float64, which Cholesky factors of smooth "
            "functions need: jax.enable_x64(True)."
        )
    if np.ndim(x) != 2 or 0 in np.shape(x):
        raise ValueError(
            f"archipelago x: found shape {np.shape(x)}, wanted [row, feature], at least one of "
            "each."
        )
    if not isinstance(x, Tracer) and not np.isfinite(x).all():
        raise ValueError(
            f"archipelago x: found {np.asarray(x)[~np.isfinite(x)][0]}, wanted finite numbers."
        )
    if y is None:
        return
    if np.shape(y) != np.shape(x)[:1]:
        raise ValueError(
            f"archipelago y: found shape {np.shape(y)}, wanted {np.shape(x)[:1]}, one for each row "
            "of x."
        )
    if not jnp.issubdtype(jnp.result_type(y), jnp.integer) or not (
        isinstance(y, Tracer) or np.isin(y, np.arange(-1, num_classes)).all()
    ):
        raise ValueError(
            f"archipelago y: found {y}, wanted integers: 0 .. {num_classes - 1}, or -1 where "
            "unlabelled."
        )
