"""BSVD: matrix completion by a Bayesian singular value decomposition that learns its rank.

    z[k]      ~ Bernoulli(a / (a + b (K - 1)))        whether component k is switched on
    s[k]      ~ HalfNormal(1 / sqrt(alpha_s))         amplitude of the component
    u[i, k]   ~ Normal(0, 1)                          row factors
    v[j, k]   ~ Normal(0, 1)                          column factors
    eta[i, j] = intercept + sum_k s[k] z[k] u[i, k] v[j, k]
                + row_weights[i] . C[j] + column_weights[j] . R[i]
    y[i, j]   ~ Normal(eta[i, j], 1 / sqrt(alpha))    observed entries; or a probit link

Shapes: z and s [component]; u [row, component]; v [column, component]; y [entry].

The amplitude is the standard deviation of the component's contribution to an entry. R and C are
features of rows and columns. Both begin with a constant, which gives every row and every column an
effect of its own. The weights of a feature are Normal(0, 1 / sqrt(precision)). Only observed
entries are stored, as vectors `row`, `column`, `value`.

Wang (2010), "Bayesian approaches to learning from incomplete data", chapter 5. Its priors are the
defaults. The Beta weight of each z is integrated out. Factors have variance 1, not 1 / I and 1 / J,
which only changes the scale of s. Cost of a log density: entries x components.
"""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from numbers import Integral
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array, random
from jax.core import Tracer
from numpyro import deterministic, plate
from numpyro.handlers import mask, seed

from inference.distributions.probit import BinomialProbit, OrderedProbit
from zoo.card import Card

__all__ = [
    "CARD",
    "VAGUE",
    "WIDE",
    "binomial_probit",
    "bsvd",
    "gaussian",
    "ordered_probit",
    "simulate",
]

# numpyro.sample is declared to return a number as well, which cannot be indexed
sample: Any = numpyro.sample

type Entries = AbstractContextManager[None]

VAGUE = dist.Gamma(1e-6, 1e-6)  # for precisions
WIDE = dist.Normal(0.0, 100.0)  # for the intercept

CARD = Card(
    title="A singular value decomposition of a matrix with missing entries",
    paper="Wang (2010), Bayesian approaches to learning from incomplete data, dissertation, Duke "
    "University, chapter 5",
    bibtex="""@phdthesis{wang2010incomplete,
  title = {Bayesian approaches to learning from incomplete data},
  author = {Wang, Chunping},
  school = {Duke University},
  year = {2010},
}""",
    data=("movielens_1m", "mlb_batter_pitcher"),
    kernels=("ConditionalGibbs", "NUTS"),
    sites={
        "z": "whether a component is switched on",
        "s": "the amplitude of a component",
        "u": "the row factors of a component; u, v, s and z are identified up to order, sign and "
        "scale",
        "v": "the column factors of a component",
        "rank": "the number of components that are switched on",
        "intercept": "the mean level of all entries",
        "row_weights": "the effect of a row, and its weights of the column features",
        "column_weights": "the effect of a column, and its weights of the row features",
        "row_precision": "precision of the row weights over the rows",
        "column_precision": "precision of the column weights over the columns",
        "alpha_s": "precision of the amplitudes",
        "alpha": "precision of the noise",
        "y": "the observed entries",
    },
    edits=(
        "learn_factors=True: means and precisions of the factors are learned, the better choice "
        "for ratings",
        "link=partial(ordered_probit, num_levels=5): ratings are levels, not numbers",
        "link=binomial_probit with trials=...: entries are counts of successes",
        "a=10.0: more components are expected a priori",
        "alpha=dist.Gamma(2.0, 0.1): an informative prior of the noise",
        "draw `v` from a Laplace prior: ConditionalGibbs refuses it; use NUTS",
    ),
)


def gaussian(predictor, value, trials, entries: Entries, alpha: Any = VAGUE):
    """Real entries: y ~ Normal(predictor, 1 / sqrt(alpha)).

    Args:
        predictor: [entry].
        value: observed entries, [entry]; None: drawn.
        trials: not used.
        entries: the plate of the entries.
        alpha: precision of the noise; a distribution makes it a latent site.
    """
    alpha = _drawn("alpha", alpha)
    with entries:
        return sample("y", dist.Normal(predictor, 1 / jnp.sqrt(alpha)), obs=value)


def ordered_probit(
    predictor, value, trials, entries: Entries, num_levels: int = 5, spread: float = 10.0
):
    """Ordered levels 0 .. num_levels - 1: cutpoints divide predictor + Normal(0, 1) noise.

    Args:
        predictor: [entry].
        value: observed levels, [entry]; None: drawn.
        trials: not used.
        entries: the plate of the entries.
        num_levels: number of levels.
        spread: scale of the gaps between cutpoints, of which the first is 0.
    """
    if num_levels < 2:
        raise ValueError(f"ordered_probit num_levels: found {num_levels}, wanted 2 or more.")
    gaps = jnp.zeros(0)
    if num_levels > 2:
        with plate("gap", num_levels - 2):
            gaps = sample("gaps", dist.HalfNormal(spread))
    with entries:
        return sample("y", OrderedProbit(predictor, jnp.append(0.0, jnp.cumsum(gaps))), obs=value)


def binomial_probit(predictor, value, trials, entries: Entries):
    """Successes among trials: y ~ Binomial(trials, Phi(predictor)).

    Args:
        predictor: [entry].
        value: observed successes, [entry]; None: drawn.
        trials: number of trials, [entry].
        entries: the plate of the entries.
    """
    if trials is None:
        raise ValueError(
            "binomial_probit trials: found None, wanted the number of trials of each entry."
        )
    with entries:
        return sample("y", BinomialProbit(predictor, trials), obs=value)


def bsvd(
    row,
    column,
    value=None,
    *,
    shape: tuple[int, int],
    trials=None,
    counts=True,
    link: Callable = gaussian,
    num_components: int = 50,
    a: float = 1.0,
    b: float = 1.0,
    row_features=None,
    column_features=None,
    learn_factors: bool = False,
    alpha_s: Any = VAGUE,
    precision: Any = VAGUE,
    intercept: Any = WIDE,
):
    """The model.

    Args:
        row: row of each observed entry, 0 .. shape[0] - 1, [entry].
        column: column of each observed entry, 0 .. shape[1] - 1, [entry].
        value: the observed entries, [entry]; None: drawn.
        shape: (rows, columns) of the matrix.
        trials: number of trials of each entry, for `binomial_probit`.
        counts: mask of the entries, [entry]; a masked entry is not observed.
        link: `(predictor, value, trials, entries) -> entries` observes the entries; its parameters
            are set by `functools.partial`.
        num_components: K, the truncation of the number of components.
        a: with `b`, the expected number of components, a / b for large K.
        b: see `a`.
        row_features: R without its constant, [row, feature], scaled to about 1.
        column_features: C without its constant, [column, feature], scaled to about 1.
        learn_factors: whether means and precisions of u and v are learned for each component.
        alpha_s: precision of the amplitudes; a distribution makes it a latent site.
        precision: precision of the weights of each feature; likewise.
        intercept: the mean level; likewise.

    Returns:
        The entries.
    """
    _refuse_wrong(shape, num_components, (a, b), row=row, column=column)
    num_rows, num_columns = shape
    rows, columns = plate("row", num_rows, dim=-2), plate("column", num_columns, dim=-2)
    r, c = (
        _with_constant(row_features, num_rows, "row_features"),
        _with_constant(column_features, num_columns, "column_features"),
    )
    of_rows, of_columns = (
        plate("row_feature", r.shape[1], dim=-1),
        plate("column_feature", c.shape[1], dim=-1),
    )
    components, entries = plate("component", num_components, dim=-1), _entries(len(row), counts)

    alpha_s = _drawn("alpha_s", alpha_s)
    with components:
        z = sample("z", dist.Bernoulli(a / (a + b * (num_components - 1))))
        s = sample("s", dist.HalfNormal(1 / jnp.sqrt(alpha_s)))
    deterministic("rank", jnp.sum(z))
    u = _factors("u", rows, components, learn_factors)
    v = _factors("v", columns, components, learn_factors)
    intercept = _drawn("intercept", intercept)
    row_weights = _weights("row", rows, of_columns, precision)
    column_weights = _weights("column", columns, of_rows, precision)

    # known features of known items are taken at once, by one small program
    c, r = jnp.take(c, column, axis=0, mode="clip"), jnp.take(r, row, axis=0, mode="clip")
    effects = jnp.sum(row_weights[row] * c, -1) + jnp.sum(column_weights[column] * r, -1)
    return link(intercept + (u[row] * v[column]) @ (s * z) + effects, value, trials, entries)


def _refuse_wrong(
    shape: tuple[int, int], num_components: int, expected: tuple[float, float], **places
) -> None:
    """Refuse wrong arguments; JAX would replace an index out of range by the last row.

    Traced values are not checked.
    """
    if not isinstance(num_components, Integral) or num_components < 1:
        raise ValueError(
            f"bsvd num_components: found {num_components}, wanted an integer, 1 or more."
        )
    if not any(isinstance(each, Tracer) for each in expected) and not (
        min(expected) >= 0 and expected[0] > 0
    ):
        raise ValueError(
            f"bsvd a, b: found {expected[0]}, {expected[1]}, wanted a above 0, b from 0 on."
        )
    wanted = (max(jnp.size(places["row"]), 1),)
    for (name, place), size in zip(places.items(), shape, strict=True):
        if jnp.shape(place) != wanted or not jnp.issubdtype(jnp.result_type(place), jnp.integer):
            raise ValueError(
                f"bsvd {name}: found {jnp.result_type(place)} {jnp.shape(place)}, wanted integers "
                f"{wanted}, one for each entry."
            )
        low, high = (
            (0, 0)
            if isinstance(place, Tracer)
            else (np.asarray(place).min(), np.asarray(place).max())
        )
        if low < 0 or high >= size:
            raise ValueError(
                f"bsvd {name}: found {low} .. {high}, wanted 0 .. {size - 1}, as `shape` says."
            )


@contextmanager
def _entries(size: int, counts) -> Generator[None]:
    with plate("entry", size, dim=-1), mask(mask=counts):
        yield


def _factors(name: str, items: plate, components: plate, is_learned: bool) -> Array:
    mean, scale = 0.0, 1.0
    if is_learned:
        with components:
            mean = sample(f"{name}_mean", dist.Normal(0.0, 0.3))
            scale = 1 / jnp.sqrt(sample(f"{name}_precision", dist.Gamma(10.0, 10.0)))
    with items, components:
        return sample(name, dist.Normal(mean, scale))


def _weights(name: str, items: plate, features: plate, precision: Any) -> Array:
    with features:
        precision = _drawn(f"{name}_precision", precision)
    with items, features:
        return sample(f"{name}_weights", dist.Normal(0.0, 1 / jnp.sqrt(precision)))


def _with_constant(features, size: int, name: str) -> Array:
    constant = jnp.ones((size, 1))
    if features is None:
        return constant
    if jnp.ndim(features) != 2 or len(features) != size:
        raise ValueError(
            f"bsvd {name}: found shape {jnp.shape(features)}, wanted ({size}, features)."
        )
    return jnp.concatenate([constant, jnp.asarray(features)], axis=1)


def _drawn(name: str, value: Any) -> Any:
    return sample(name, value) if isinstance(value, dist.Distribution) else value


def simulate(
    rng_key: Array,
    num_rows: int = 30,
    num_columns: int = 20,
    observed: float = 0.5,
    num_components: int = 5,
    **options,
) -> dict[str, Any]:
    """Draw data from the model, with informative priors of the precisions in place of `VAGUE`.

    Args:
        rng_key: a key.
        num_rows: number of rows.
        num_columns: number of columns.
        observed: share of the entries that are observed, chosen at random.
        num_components: K, the truncation of the number of components.
        **options: other arguments of the model; they are returned as well.

    Returns:
        Keyword arguments of the model.
    """
    entry_key, trials_key, model_key = random.split(rng_key, 3)
    cells = num_rows * num_columns
    chosen = jnp.sort(
        random.choice(entry_key, cells, (max(int(observed * cells), 1),), replace=False)
    )
    arguments: dict[str, Any] = {
        "row": chosen // num_columns,
        "column": chosen % num_columns,
        "shape": (num_rows, num_columns),
        "num_components": num_components,
        "link": partial(gaussian, alpha=dist.Gamma(10.0, 1.0)),
        "a": float(num_components),
        "alpha_s": dist.Gamma(5.0, 5.0),
        "precision": dist.Gamma(5.0, 5.0),
        "intercept": dist.Normal(0.0, 1.0),
        **options,
    }
    if arguments["link"] is binomial_probit and "trials" not in arguments:
        arguments["trials"] = random.randint(trials_key, chosen.shape, 1, 10)
    with seed(rng_seed=model_key):
        return arguments | {"value": bsvd(**arguments)}
