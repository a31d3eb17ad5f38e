"""The engine of proof: what it lets pass, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from jax.scipy.stats import norm

from inference import Program, StructureError
from inference.reading.proof import (
    at_magnitude,
    further,
    gap,
    gap_of_numbers,
    gap_of_sums,
    prove,
    random_settings,
    worst,
)

pytestmark = pytest.mark.usefixtures("numpyro_promotion")

X = np.random.default_rng(0).normal(size=6)
SPREADS = (1.0, 4.0, 14.0)
MISSES = lambda site, missed: f"site {site!r}: misses by {missed:.2g}"


def line(x, most=np.inf):
    """The loc of a row is clipped, far out."""
    level = numpyro.sample("level", dist.Normal(0.0, 2.0))
    with numpyro.plate("row", len(x)):
        numpyro.sample("x", dist.Normal(jnp.clip(level, -most, most), 1.0), obs=x)


def of_line(program, extra=0.0):
    """What was read of it, with one more term at `level`."""

    def gaps(key, spread=1.0):
        level = spread * random.uniform(key, minval=0.5)
        model = program.log_probs({"level": level})
        read = {
            "level": norm.logpdf(level, 0.0, 2.0) + extra,
            "x": jnp.sum(norm.logpdf(program.arguments["x"], level, 1.0)),
        }
        return {site: gap(value, jnp.sum(model[site])) for site, value in read.items()}

    return gaps


def test_a_true_identity_passes(x64):
    prove(of_line, random_settings(random.key(0), SPREADS), MISSES, Program(line, X))


def test_one_wrong_term_is_refused_by_its_site(x64):
    with pytest.raises(StructureError, match="site 'level': misses by 0.0"):
        prove(
            lambda program: of_line(program, extra=0.1),
            random_settings(random.key(0)),
            MISSES,
            Program(line, X),
        )


def test_what_acts_far_out_is_refused_because_of_the_spreads(x64):
    """Without them it passes, and so the case has power."""
    clipped = Program(line, X, most=4.0)
    with pytest.raises(StructureError, match="site 'x': misses by"):
        prove(of_line, random_settings(random.key(0), SPREADS), MISSES, clipped)
    prove(of_line, random_settings(random.key(0), (1.0, 1.0, 1.0)), MISSES, clipped)


@pytest.mark.parametrize("most", [np.inf, 500.0])
def test_values_reach_far_beyond_the_data(most, x64):
    program = Program(line, X, most=most)
    start = lambda seed: {"level": np.random.default_rng(seed).uniform(-1.0, 1.0)}

    def gaps(first, second, size):
        level = at_magnitude(program, second, size)["level"]
        read = jnp.sum(norm.logpdf(X, level, 1.0))
        return {"x": gap(read, jnp.sum(program.log_probs({"level": level})["x"]))}, first["level"]

    found, firsts = worst(gaps, further(start, X))
    assert set(map(float, firsts)) == {float(start(0)["level"])}
    assert bool(found["x"] > 1e-6) is (most < np.inf)


def squares(program, factor=1.0):
    """The sum of squares about the mean, in two ways; the second loses digits where the mean is
    large.
    """
    x = program.arguments["x"]

    def gaps(key):
        y = jnp.asarray(x, float) + random.uniform(key)
        return {
            "x": gap(
                factor * (jnp.sum(y**2) - len(x) * jnp.mean(y) ** 2),
                jnp.sum((y - jnp.mean(y)) ** 2),
            )
        }

    return gaps


def test_rounding_in_single_precision_is_no_wrong_identity():
    """It is one where no program is given whose arguments might be had in double precision."""
    program, keys = Program(line, np.float32(3000 + X)), random_settings(random.key(0))
    with jax.enable_x64(False):
        prove(squares, keys, MISSES, program)
        with pytest.raises(StructureError, match="site 'x'"):
            prove(lambda: squares(program), keys, MISSES)
        with pytest.raises(StructureError, match="site 'x': misses by 0.0"):
            prove(lambda program: squares(program, factor=1.1), keys, MISSES, program)


def test_what_is_no_number_is_infinitely_wrong(x64):
    gaps = lambda key, value: {"a": jnp.abs(value), "b": gap(value, 1.0), "c": gap(0.0, 0.0)}
    found, _ = worst(gaps, random_settings(random.key(0), (0.0, np.nan, 0.5)))
    assert found == {"a": np.inf, "b": np.inf, "c": 0.0}
    with pytest.raises(StructureError, match="site 'a': misses by inf"):
        prove(lambda: gaps, random_settings(random.key(0), (0.0, np.nan)), MISSES)


def test_gaps_of_arrays_of_infinities_and_of_other_shapes(x64):
    assert gap(jnp.array([-jnp.inf, 3.0]), jnp.array([-jnp.inf, 3.0])) == 0.0
    assert gap(-jnp.inf, jnp.inf) == jnp.inf
    assert gap(jnp.array([1.0, 3.0]), jnp.array([1.0, 4.0])) == pytest.approx(0.2)
    assert gap_of_numbers((jnp.ones(2),), (jnp.ones(3),)) == jnp.inf
    assert gap_of_numbers((jnp.ones(2), 1e-5), (jnp.ones(2), 2e-5), least=0.0) == pytest.approx(0.5)
    assert gap_of_sums(jnp.array([1.0, 2.0]), jnp.array(3.0), 0.0) == 0.0
    assert gap_of_sums(jnp.array([1.0 + 1e-9]), jnp.array([1.0]), 1e9) < gap_of_sums(
        jnp.array([1.0 + 1e-9]), jnp.array([1.0]), 0.0
    )
