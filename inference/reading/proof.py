"""The proof that what was read of a model is true: identities at random settings of its sites.

A structure has its identities: a function of one setting (a random key, how far values are spread,
how large they are) that returns, for each site, the relative gap between what was read and what the
model says. The proof takes the worst gap of each site over all settings. It raises StructureError,
in the words of the structure, where one is too large.

    words = lambda site, gap: f"site {site!r}: misses by {gap:.2g}."
    prove(lambda program: identities, random_settings(random.key(0)), words, program)

A model may be another one at some values: `clip(score, -5, 5)`, `maximum(alpha, 0.1)`. So a
structure asks for settings that lie further and further out: by spreads of its own, or by
`further`, whose values have magnitudes from a thousandth to beyond what the data hold, and
probabilities from about .0025 to .9975.

Cost: one compilation of the identities, and one evaluation at each setting. Where they fail in
single precision, the same in double.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from numpyro.distributions import constraints

from inference.program.compiling import once
from inference.program.sites import StructureError

if TYPE_CHECKING:
    from inference.program.program import Program

__all__ = [
    "TOLERANCE",
    "Magnitude",
    "at_magnitude",
    "further",
    "gap",
    "gap_of_numbers",
    "gap_of_sums",
    "magnitudes",
    "prove",
    "prove_numbers",
    "random_settings",
    "refuse",
    "root_epsilon",
    "worst",
]

TOLERANCE = {"float64": 1e-6, "float32": 1e-3}  # of a relative gap
ROUNDING = 100.0  # machine epsilons of the terms of a sum, which may be much larger than it is
SAME = 1e-4  # of numbers that are read twice, relative to each
NUM_SETTINGS = 3
FAR = 1000.0  # times the largest number of the data, or times 1: the largest magnitude of values
SOME = 8  # entries along an axis that are spread

Tolerance = Mapping[str, float] | float  # by precision, or the same for both


def prove(
    identities: Callable[..., Callable],
    settings: Sequence[tuple],
    words: Callable[[str, float], str],
    *programs: "Program",
    tolerance: Tolerance = TOLERANCE,
) -> list[Any]:
    """Raises StructureError where an identity fails; returns what else was found at each setting.

    In single precision a sum of many terms, or a number far from the others, looks like a wrong
    identity; in double precision it does not. So identities that fail are asked once more, of the
    same programs in double precision.

    :param identities: a function of the programs that returns the function of one setting.
    :param words: the refusal, by a site and its gap.
    """
    gaps, found = worst(identities(*programs), settings)
    if _wrong(gaps, tolerance) and programs and not jax.config.read("jax_enable_x64"):
        try:
            with jax.enable_x64(True):
                doubled = lambda program: program.with_arguments(**_in_double(program.arguments))
                # No name for the identities: while they live, JAX takes their numbers for those of
                # the next trace.
                gaps, _ = worst(identities(*map(doubled, programs)), _in_double(settings))
        except (TypeError, jax.errors.JaxRuntimeError):
            pass  # the model has arrays of its own in single precision: what was found stands
    refuse(gaps, words, tolerance)
    return found


def prove_numbers(
    site: str,
    numbers: Any,
    numbers_at: Callable,
    start: Callable,
    others: "Program",
    words: Callable[[str, float], str],
) -> None:
    """Raises StructureError where numbers that were read, a tree of arrays, are different ones on
    the rows of another program.

    :param numbers_at: of a program and values of its sites, those that it has.
    :param start: of a program and a seed, values without bounds.
    """
    gaps = lambda some, at: {
        site: gap_of_numbers(numbers_at(some, some.constrain(at)), numbers, SAME)
    }
    prove(lambda some: partial(gaps, some), [(start(others, 0),)], words, others, tolerance=SAME)


def worst(identities: Callable, settings: Sequence[tuple]) -> tuple[dict[str, Any], list[Any]]:
    """The worst gap of each site over the settings, infinite where one is no number; and, where the
    identities return a pair, its second part at each setting."""
    arrays = lambda setting: jax.tree.map(jnp.asarray, setting)
    compiled = once(identities, *arrays(settings[0]))
    answers = [jax.device_get(compiled(*arrays(setting))) for setting in settings]
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
    """Raises StructureError, in these words, for the first site whose gap is too large."""
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
    """The largest difference, relative to `scale`, by default to 1 + |wanted|: 0 between infinities
    of one sign, infinite where one is no number."""
    found, wanted = jnp.asarray(found), jnp.asarray(wanted)
    each = jnp.abs(found - wanted) / (1 + jnp.abs(wanted) if scale is None else scale)
    return jnp.max(
        jnp.where(found == wanted, 0.0, jnp.where(jnp.isnan(each), jnp.inf, each)), initial=0.0
    )


def gap_of_numbers(found: Any, wanted: Any, least: float = 1.0) -> Array:
    """The same of two trees of arrays, relative to `least` + |wanted|; infinite where their
    shapes differ.
    """
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    each = [
        gap(a, b, least + jnp.abs(b)) if jnp.shape(a) == jnp.shape(b) else jnp.full((), jnp.inf)
        for a, b in pairs
    ]
    return jnp.max(jnp.stack(each))


def gap_of_sums(found: Array, wanted: Array, size: Any) -> Array:
    """The same of sums, [row]; `size` is how large the terms are that each is a sum of. Where the
    model, `wanted`, has only one sum over all rows, that is compared."""
    if wanted.size != found.size:
        found, wanted, size = jnp.sum(found), jnp.sum(wanted), jnp.sum(size)
    rounding = ROUNDING * float(jnp.finfo(found.dtype).eps) / TOLERANCE[found.dtype.name]
    wanted = jnp.ravel(wanted)
    return gap(jnp.ravel(found), wanted, 1 + jnp.abs(wanted) + rounding * jnp.ravel(size))


def root_epsilon() -> float:
    """The square root of the machine epsilon: the tolerance of what is computed by derivatives."""
    return math.sqrt(jnp.finfo(jnp.result_type(float)).eps)


# Settings.


def random_settings(rng_key: Array, *others: Sequence[Any], num: int = NUM_SETTINGS) -> list[tuple]:
    """A key for each setting, and with it one of each of the others, such as a spread."""
    num = len(others[0]) if others else num
    return list(zip(random.split(rng_key, num), *others, strict=True))


class Magnitude(NamedTuple):
    """How many times as large values without bounds are made, and how far others are spread towards
    their bounds."""

    size: Any
    spread: Any


def further(start: Callable[[int], Any], *data: np.ndarray) -> list[tuple]:
    """Settings of three parts: the first start, another start of a seed of its own, and its
    magnitude.
    """
    first = start(0)
    return [(first, start(seed), size) for seed, size in enumerate(magnitudes(*data), 1)]


def magnitudes(*data: np.ndarray) -> list[Magnitude]:
    """The largest is far beyond the data, but its fourth power is a number."""
    largest = max((np.abs(part[np.isfinite(part)]).max(initial=1.0) for part in data), default=1.0)
    most = float(jnp.finfo(jnp.result_type(float)).max) ** 0.2
    far = max(min(FAR * largest, most / largest), 1.0)
    return [
        Magnitude(1.0, 1.0),
        Magnitude(10.0, 3.0),
        Magnitude(far, 6.0),
        Magnitude(0.03, 6.0),
        Magnitude(1e-3, 3.0),
    ]


def at_magnitude(
    program: "Program", unconstrained: dict[str, Array], magnitude: Magnitude
) -> dict[str, Array]:
    """Values of all latent sites."""
    latent = {
        name: program.sites[name] for name in unconstrained if not program.sites[name].is_discrete
    }
    bounded = {name for name, site in latent.items() if not _is_scalable(site.support)}
    stretched = {
        name: _some_times(value, magnitude.spread) if name in bounded else value
        for name, value in unconstrained.items()
    }
    scaled = lambda name, value: (
        value * magnitude.size.astype(value.dtype)
        if name in latent and name not in bounded
        else value
    )
    return {name: scaled(name, value) for name, value in program.constrain(stretched).items()}


def _some_times(value: Array, factor: Array) -> Array:
    """Some eight along the last axis: of many sticks all near a bound the weights would be too
    small for a number.
    """
    length = value.shape[-1] if value.ndim else 1
    some = jnp.arange(length) % max(1, length // SOME) == 0
    return jnp.where(some if value.ndim else True, value * factor.astype(value.dtype), value)


def _is_scalable(support: Any) -> bool:
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    return support in (constraints.real, constraints.positive, constraints.positive_definite)
