"""Prove what was read of a model: identities that must hold at random values of its sites.

The identities of a structure are a function of one setting: a random key, perhaps with the spread
and the size of the values. It returns, for each site, the relative gap between what was read and
what the model computes. The proof takes the largest gap of each site over all settings. Where one
is too large, it raises StructureError with the message of the structure.

    message = lambda site, gap: f"site {site!r}: misses by {gap:.2g}."
    prove(lambda program: identities, random_settings(random.key(0)), message, program)

A model may differ from the structure at some values only: `clip(score, -5, 5)`,
`maximum(alpha, 0.1)`. So a structure asks for settings that lie further and further out: by spreads
of its own, or by `further`, whose values have magnitudes from a thousandth to far beyond the data,
and probabilities from about .0025 to .9975.

Cost: one trace of the identities, and one evaluation by NumPy at each setting. Where they fail in
single precision, as much again in double precision.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float
from numpyro.distributions import constraints

from inference.program.interpreting import interpreted, split
from inference.program.sites import StructureError, entry_support

__all__ = [
    "TOLERANCE",
    "Magnitude",
    "at_magnitude",
    "further",
    "gap",
    "gap_of_numbers",
    "gap_of_sums",
    "prove",
    "random_settings",
    "refuse",
    "root_epsilon",
    "worst",
]

TOLERANCE = {"float64": 1e-6, "float32": 1e-3}  # of a relative gap

Tolerance = Mapping[str, float] | float  # by precision, or the same for both


def prove(
    identities: Callable[..., Callable],
    settings: Sequence[tuple],
    words: Callable[[str, float], str],
    *programs: Any,
    tolerance: Tolerance = TOLERANCE,
) -> list[Any]:
    """Raises StructureError where an identity fails; returns what else was found at each setting.

    In single precision a sum of many terms, or a number far from the others, looks like a wrong
    identity; in double precision it does not. So identities that fail are computed once more, of
    the same programs in double precision.

    Args:
        identities: a function of the programs that returns the function of one setting.
        settings: arguments of that function.
        words: message of the refusal, by a site and its gap.
        *programs: `Program`s that hold the data.
        tolerance: a gap must be below this.
    """
    gaps, found = worst(identities(*programs), settings)
    if _wrong(gaps, tolerance) and programs and not jax.config.read("jax_enable_x64"):
        try:
            with jax.enable_x64(True):
                doubled = lambda program: program.with_arguments(**_in_double(program.arguments))
                # The identities get no name. While such a function is alive, JAX would use its
                # constants for the next trace.
                gaps, _ = worst(identities(*map(doubled, programs)), _in_double(settings))
        except (TypeError, jax.errors.JaxRuntimeError):
            pass  # the model has arrays of its own in single precision: the first gaps count
    refuse(gaps, words, tolerance)
    return found


def worst(identities: Callable, settings: Sequence[tuple]) -> tuple[dict[str, Any], list[Any]]:
    """The largest gap of each site over the settings, and what else the identities return.

    Args:
        identities: a function of one setting that returns gaps by site; or a pair, of these gaps
            and of what else it has found.
        settings: its arguments.

    Returns:
        The gaps, infinite where one is NaN; and what else was found at each setting, or None.
    """
    gaps_at = interpreted(identities, *settings[0])
    answers = [jax.device_get(gaps_at(*setting)) for setting in settings]
    gaps, found = zip(
        *(answer if isinstance(answer, tuple) else (answer, None) for answer in answers),
        strict=True,
    )
    largest = lambda site: np.max(
        np.nan_to_num([each[site] for each in gaps], nan=np.inf, posinf=np.inf)
    )
    return {site: largest(site) for site in gaps[0]}, list(found)


def refuse(
    gaps: Mapping[str, Any], words: Callable[[str, float], str], tolerance: Tolerance = TOLERANCE
) -> None:
    """Raises StructureError for the first site whose gap is too large, with its message."""
    for site in _wrong(gaps, tolerance):
        raise StructureError(words(site, gaps[site]))


def _wrong(gaps: Mapping[str, Any], tolerance: Tolerance) -> list[str]:
    limit = lambda size: tolerance[size.dtype.name] if isinstance(tolerance, Mapping) else tolerance
    return [site for site, size in gaps.items() if not size < limit(size)]


def _in_double(tree: Any) -> Any:
    is_single = lambda leaf: isinstance(leaf, np.ndarray | Array) and leaf.dtype == np.float32
    return jax.tree.map(
        lambda leaf: np.asarray(leaf, np.float64) if is_single(leaf) else leaf, tree
    )


# Gaps.


def gap(found: Any, wanted: Any, scale: Any = None) -> Array:
    """The largest relative difference of two arrays.

    Args:
        found, wanted: the arrays. Equal infinities have no gap; that of a NaN is infinite.
        scale: what differences are relative to; None for 1 + |wanted|.
    """
    found, wanted = jnp.asarray(found), jnp.asarray(wanted)
    each = jnp.abs(found - wanted) / (1 + jnp.abs(wanted) if scale is None else scale)
    each = jnp.where(jnp.isnan(each), jnp.inf, each)
    return jnp.max(jnp.where(found == wanted, 0.0, each), initial=0.0)


def gap_of_numbers(found: Any, wanted: Any, least: float = 1.0) -> Array:
    """The largest difference of two trees of arrays, relative to `least` + |wanted|.

    It is infinite where shapes differ.
    """
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    each = [
        gap(a, b, least + jnp.abs(b)) if jnp.shape(a) == jnp.shape(b) else jnp.full((), jnp.inf)
        for a, b in pairs
    ]
    return jnp.max(jnp.stack(each))


def gap_of_sums(found: Float[Array, " row"], wanted: Array, size: Any) -> Float[Array, ""]:
    """The largest relative difference of two sums, with an allowance for their rounding.

    Args:
        found: the sums that were read, [row].
        wanted: those of the model, [row]; or one number, the sum over all rows.
        size: the sum of the absolute values of the terms of each sum.
    """
    if wanted.size != found.size:
        found, wanted, size = jnp.sum(found), jnp.sum(wanted), jnp.sum(size)
    # A hundred machine epsilons of the terms pass: they may be much larger than their sum.
    rounding = 100.0 * float(jnp.finfo(found.dtype).eps) / TOLERANCE[found.dtype.name]
    wanted = jnp.ravel(wanted)
    return gap(jnp.ravel(found), wanted, 1 + jnp.abs(wanted) + rounding * jnp.ravel(size))


def root_epsilon() -> float:
    """The square root of the machine epsilon: the tolerance of what is computed by derivatives."""
    return math.sqrt(jnp.finfo(jnp.result_type(float)).eps)


# Settings.


def random_settings(rng_key: Array, *others: Sequence[Any], num: int = 3) -> list[tuple]:
    """Settings, each of which begins with a key of its own.

    Args:
        rng_key: a JAX key.
        *others: further parts of each setting, such as spreads.
        num: how many, where there are no further parts.
    """
    num = len(others[0]) if others else num
    return list(zip(split(rng_key, num), *others, strict=True))


class Magnitude(NamedTuple):
    """Factors that move values away from the middle of their supports."""

    size: Any  # of real, positive and positive definite values
    spread: Any  # of other values in unconstrained space, towards their bounds


def further(start: Callable[[int], Any], *data: np.ndarray) -> list[tuple]:
    """Settings of three parts: a first start in common, another start, and its magnitude.

    Args:
        start: a function of a seed that returns values in unconstrained space.
        *data: the largest size is far beyond them, as long as its fourth power does not overflow.
    """
    largest = max((np.abs(part[np.isfinite(part)]).max(initial=1.0) for part in data), default=1.0)
    most = float(jnp.finfo(jnp.result_type(float)).max) ** 0.2
    far = max(min(1000.0 * largest, most / largest), 1.0)
    magnitudes = [(1.0, 1.0), (10.0, 3.0), (far, 6.0), (0.03, 6.0), (1e-3, 3.0)]
    first = start(0)
    return [(first, start(n), Magnitude(*each)) for n, each in enumerate(magnitudes, 1)]


def at_magnitude(
    program: Any, unconstrained: dict[str, Array], magnitude: Magnitude
) -> dict[str, Array]:
    """Values of all latent sites at a magnitude.

    Args:
        program: the model with its data.
        unconstrained: values in unconstrained space.
        magnitude: the factors.
    """
    scalable = (constraints.real, constraints.positive, constraints.positive_definite)
    sites = {name: program.sites[name] for name in unconstrained}
    is_free = lambda name: entry_support(sites[name].support) in scalable
    latent = [name for name in sites if not sites[name].is_discrete]
    stretched = {
        name: _some_stretched(unconstrained[name], magnitude.spread)
        for name in latent
        if not is_free(name)
    }
    values = program.constrain(unconstrained | stretched)
    scaled = {
        name: values[name] * magnitude.size.astype(values[name].dtype)
        for name in latent
        if is_free(name)
    }
    return values | scaled


def _some_stretched(value: Array, factor: Array) -> Array:
    """The value with about eight entries along the last axis multiplied by a factor.

    If many sticks were near a bound, stick-breaking weights would underflow.
    """
    if not value.ndim:
        return value * factor.astype(value.dtype)
    is_some = jnp.arange(value.shape[-1]) % max(1, value.shape[-1] // 8) == 0
    return jnp.where(is_some, value * factor.astype(value.dtype), value)
