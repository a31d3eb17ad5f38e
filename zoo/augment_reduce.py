"""Augment and reduce: linear classification with very many classes, as a random utility model.

    weights[k], biases[k] ~ Normal(0, prior_scale)        for each class k
    psi[n, k] = x[n] . weights[k] + biases[k]             mean utility of class k
    y[n] = argmax_k psi[n, k] + noise[n, k]               the class with the largest utility

Shapes: x [row, feature]; y [row]; weights [class, feature]; biases [class].

Gumbel noise gives softmax regression, Normal noise the multinomial probit. The model is augmented
with eps[n], the noise of the chosen class. Then the log joint is a sum over the other classes,
which may be subsampled. With F the distribution function of the noise:

    eps[n]         ~ noise
    is_below[n, k] ~ Bernoulli(F(eps[n] + psi[n, y[n]] - psi[n, k])) = 1      for each k != y[n]

Integrating eps out gives P(y[n]). With `rank`, x[n] is replaced by x[n] @ embedding. Cost of a log
density: batch_size x num_negatives x features.

Ruiz, Titsias, Dieng and Blei (2018), "Augment and reduce: stochastic inference for large
categorical distributions", eqs. 4 to 6. The paper has no prior of the weights; `prior_scale=None`
is its maximum likelihood.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array, random
from jax.core import Tracer
from jaxtyping import Float, Int
from numpyro import plate
from numpyro.handlers import seed

from inference.distributions.noise import Below, Choice
from zoo.card import Card

__all__ = ["CARD", "NOISES", "SparseRows", "augment_reduce", "simulate"]

# numpyro.sample is declared to return a number as well, which cannot be indexed
sample: Any = numpyro.sample

NOISES = {
    "gumbel": dist.Gumbel(0.0, 1.0),
    "normal": dist.Normal(0.0, 1.0),
    "logistic": dist.Logistic(0.0, 1.0),
    "laplace": dist.Laplace(0.0, 1.0),
    "student_t": dist.StudentT(5.0, 0.0, 1.0),
}

CARD = Card(
    title="Linear classification with very many classes, as a random utility model",
    paper="Ruiz, Titsias, Dieng and Blei (2018), Augment and reduce: stochastic inference for "
    "large categorical distributions, ICML",
    bibtex="""@inproceedings{ruiz2018augment,
  title = {Augment and reduce: stochastic inference for large categorical distributions},
  author = {Ruiz, Francisco J. R. and Titsias, Michalis K. and Dieng, Adji B. and Blei, David M.},
  booktitle = {International Conference on Machine Learning},
  year = {2018},
}""",
    data=("bibtex", "mnist", "omniglot"),
    kernels=("AugmentReduce", "NUTS"),
    sites={
        "embedding": "the linear map from features to a few coordinates, with `rank`",
        "weights": "the weights of the features in the mean utility of a class",
        "biases": "the mean utility of a class where all features are 0",
        "eps": "the noise in the utility of the chosen class",
        "is_below": "whether the utility of another class is below that of the chosen class",
        "y": "the chosen class, in the model without augmentation",
    },
    edits=(
        'noise="normal": multinomial probit; or "logistic", "laplace", "student_t", any '
        "distribution with a log_cdf",
        "draw the weights from a Laplace prior: sparse weights",
        "prior_scale=None: maximum likelihood",
        "rank=50: the utilities depend on 50 learned combinations of the features, for very many "
        "features",
    ),
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SparseRows:
    """Sparse rows: the columns and values of the entries that are not 0.

    All rows have the same number of entries; shorter rows are padded with values 0.
    """

    columns: Any  # [row, place]
    values: Any  # [row, place]
    num_features: int = field(metadata={"static": True})

    @classmethod
    def of(cls, matrix: Any) -> "SparseRows":
        """Convert a SciPy sparse matrix [row, feature]; memory: rows x longest row."""
        matrix = matrix.tocsr()
        matrix.sum_duplicates()
        lengths = np.diff(matrix.indptr)
        place = np.arange(matrix.nnz) - np.repeat(matrix.indptr[:-1], lengths)
        row = np.repeat(np.arange(len(lengths)), lengths)
        shape = (len(lengths), max(int(lengths.max(initial=0)), 1))
        columns, values = np.zeros(shape, np.int32), np.zeros(shape, matrix.dtype)
        columns[row, place], values[row, place] = matrix.indices, matrix.data
        last = columns[np.arange(shape[0]), np.maximum(lengths - 1, 0)]
        # padding repeats the last column, so that it touches no other weight
        columns = np.where(np.arange(shape[1]) < lengths[:, None], columns, last[:, None])
        return cls(columns, values, matrix.shape[1])

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, features)."""
        return len(self.columns), self.num_features

    def __len__(self) -> int:
        return len(self.columns)

    def __getitem__(self, rows: Any) -> "SparseRows":
        return SparseRows(
            jnp.asarray(self.columns)[rows], jnp.asarray(self.values)[rows], self.num_features
        )


def augment_reduce(
    x,
    y=None,
    *,
    num_classes: int,
    noise: Any = "gumbel",
    prior_scale: Any = 1.0,
    rank: int | None = None,
    batch_size: int | None = None,
    num_negatives: int | None = None,
    augmented: bool = True,
):
    """The model.

    Args:
        x: features [row, feature], an array or `SparseRows`.
        y: the class of each row, 0 .. num_classes - 1, [row]; None: drawn.
        num_classes: number of classes.
        noise: a name in `NOISES`, or a univariate NumPyro distribution.
        prior_scale: standard deviation of weights and biases, a number or an array of shape ();
            None: a flat prior, whose posterior mode is the maximum likelihood estimate.
        rank: number of learned combinations of the features; None: the features themselves.
        batch_size: number of rows that are subsampled; None: all.
        num_negatives: number of other classes that are subsampled; None: all.
        augmented: whether the model has the sites `eps` and `is_below`. Without them, or without
            `y`, the classes are the site `y`.

    Returns:
        The classes.
    """
    noise = _checked(x, y, num_classes, noise)
    _refuse_size("batch_size", None if y is None else batch_size, len(x))
    _refuse_size("num_negatives", num_negatives, num_classes - 1)
    _refuse_size("rank", rank, x.shape[1])
    prior = (
        dist.ImproperUniform(dist.constraints.real, (), ())
        if prior_scale is None
        else dist.Normal(0.0, prior_scale)
    )
    embedding = _embedding(x.shape[1], rank)
    width, of = (x.shape[1], "feature") if rank is None else (rank, "coordinate")
    with plate("class", num_classes, dim=-1):
        weights = sample("weights", prior.expand((width,)).to_event(1), infer={"event_dims": [of]})
        biases = sample("biases", prior)
    rows = plate("row", len(x), subsample_size=None if y is None else batch_size, dim=-1)
    if y is None or not augmented:
        with rows as row:
            every = _utility(
                _floats(x, row, embedding), weights, biases, jnp.arange(num_classes)[:, None]
            )
            return sample("y", Choice(every.T, noise), obs=None if y is None else _codes(y)[row])
    others = plate("other", num_classes - 1, subsample_size=num_negatives, dim=-2)
    with rows as row:
        features, chosen = _floats(x, row, embedding), _codes(y)[row]
        eps = sample("eps", noise)
        with others as other:
            bound = (eps + _utility(features, weights, biases, chosen))[None]
            bound = bound - _of_others(
                features, weights, biases, chosen, _codes(other), num_classes - 1
            )
            sample("is_below", Below(bound, noise), obs=np.broadcast_to(np.int32(1), bound.shape))
    return y


def _of_others(
    x, weights, biases, chosen: Int[Array, " row"], other: Array, last: int
) -> Float[Array, "other row"]:
    """Mean utilities of the other classes, [other, row].

    `other` holds 0 .. last - 1, [other] for all rows or [other, row]. Where it is the chosen class,
    it is replaced by the last class.
    """
    if other.ndim == 2:
        return _utility(x, weights, biases, jnp.where(other == chosen[None], last, other))
    every = _utility(x, weights, biases, jnp.append(other, last)[:, None])
    return jnp.where(other[:, None] == chosen[None], every[-1:], every[:-1])


def _utility(x, weights, biases, classes: Array) -> Array:
    """Mean utilities of `classes` [..., row], or [..., 1] for the same classes in all rows."""
    if isinstance(x, SparseRows):
        places = x.columns.reshape(*(1,) * (classes.ndim - 1), *x.columns.shape)
        values = x.values.reshape(places.shape)
        return jnp.sum(values * weights[classes[..., None], places], -1) + biases[classes]
    if classes.shape[-1] == 1:
        shared = classes[..., 0]
        return weights[shared] @ x.T + biases[shared][..., None]
    rows = x.reshape(*(1,) * (classes.ndim - 1), *x.shape)
    return jnp.sum(rows * weights[classes], -1) + biases[classes]


def _codes(y) -> Array:
    return jnp.asarray(y).astype(jnp.int32)


def _embedding(num_features: int, rank: int | None):
    """The embedding [feature, rank], whose scale keeps the variance; None without `rank`."""
    if rank is None:
        return None
    with plate("feature", num_features, dim=-1):
        return sample(
            "embedding",
            dist.Normal(0.0, rank**-0.5).expand((rank,)).to_event(1),
            infer={"event_dims": ["coordinate"]},
        )


def _floats(x, row: Array, embedding):
    """Features of some rows as floats, after the embedding."""
    if isinstance(x, SparseRows):
        some = x[row]
        values = some.values.astype(jnp.result_type(float))
        if embedding is not None:
            return jnp.sum(values[..., None] * embedding[some.columns], 1)
        return SparseRows(some.columns, values, some.num_features)
    features = jnp.asarray(x)[row].astype(jnp.result_type(float))
    return features if embedding is None else features @ embedding[jnp.arange(x.shape[1])]


def _checked(x, y, num_classes: int, noise: Any) -> dist.Distribution:
    """The noise distribution, after checks of all arguments; traced values are not checked."""
    noise = NOISES.get(noise, noise) if isinstance(noise, str) else noise
    if not isinstance(noise, dist.Distribution):
        raise ValueError(
            f"augment_reduce noise: found {noise!r}, wanted a NumPyro distribution or one of "
            f"{', '.join(NOISES)}."
        )
    if num_classes < 2:
        raise ValueError(f"augment_reduce num_classes: found {num_classes}, wanted 2 or more.")
    if len(x.shape) != 2 or 0 in x.shape:
        raise ValueError(
            f"augment_reduce x: found shape {tuple(x.shape)}, wanted [row, feature] with at least "
            "one of each."
        )
    values = x.values if isinstance(x, SparseRows) else x
    if not isinstance(values, Tracer) and not np.isfinite(np.asarray(values)).all():
        row = np.argwhere(~np.isfinite(np.asarray(values)))[0, 0]
        raise ValueError(
            f"augment_reduce x: row {row} has an entry that is not finite; impute missing entries."
        )
    if y is None:
        return noise
    if np.shape(y) != (len(x),) or not jnp.issubdtype(jnp.result_type(y), jnp.integer):
        raise ValueError(
            f"augment_reduce y: found {jnp.result_type(y)} {np.shape(y)}, wanted integers "
            f"({len(x)},), a class for each row."
        )
    low, high = (0, 0) if isinstance(y, Tracer) else (np.asarray(y).min(), np.asarray(y).max())
    if low < 0 or high >= num_classes:
        raise ValueError(
            f"augment_reduce y: found {low} .. {high}, wanted classes 0 .. {num_classes - 1}. "
            "Leave out rows of unknown class, which carry no information."
        )
    return noise


def _refuse_size(name: str, size: int | None, most: int) -> None:
    if size is not None and not 1 <= size <= most:
        raise ValueError(
            f"augment_reduce {name}: found {size}, wanted 1 .. {most}, or None for all."
        )


def simulate(
    rng_key: Array, num_rows: int = 200, num_features: int = 3, num_classes: int = 10, **options
) -> dict[str, Any]:
    """Draw standard normal features, and classes from the model.

    Args:
        rng_key: a key.
        num_rows: number of rows.
        num_features: number of features.
        num_classes: number of classes.
        **options: other arguments of the model; they are returned as well.

    Returns:
        Keyword arguments of the model.
    """
    feature_key, model_key = random.split(rng_key)
    arguments: dict[str, Any] = {
        "x": random.normal(feature_key, (num_rows, num_features)),
        "num_classes": num_classes,
        **options,
    }
    proper = dict(arguments)  # a flat prior cannot be drawn from
    if proper.get("prior_scale", 1.0) is None:
        proper["prior_scale"] = 1.0
    with seed(rng_seed=model_key):
        return arguments | {"y": augment_reduce(**proper)}
