"""Augment and reduce: categorical models with very many classes, seen as the largest of noisy
utilities.

    weights[k], biases[k] ~ Normal(0, prior_scale)                           of each class
    psi[n, k] = x[n] . weights[k] + biases[k]                                mean utility; x[n] = features[n] @ embedding with `rank`
    y[n] = argmax_k psi[n, k] + noise[n, k]                                  Gumbel noise: softmax; Normal noise: multinomial probit

Augmented with eps[n], the noise of the class that was chosen, the log joint is a sum over the other
classes, which may be subsampled:

    eps[n] ~ noise
    is_below[n, k] ~ Bernoulli(F(eps[n] + psi[n, y[n]] - psi[n, k])) = 1     for each class k other than y[n]

Integrating eps out gives back P(y[n]). Cost of a log density: batch_size x num_negatives x
features.

Ruiz, Titsias, Dieng and Blei (2018), "Augment and reduce: stochastic inference for large
categorical distributions", eqs. 4 to 6. The prior of the weights is ours; `prior_scale=None` is the
paper's maximum likelihood.
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
from numpyro import plate
from numpyro.handlers import seed

from inference.distributions.noise import Below, Choice
from zoo.card import Card

__all__ = ["CARD", "NOISES", "SparseRows", "augment_reduce", "simulate"]

# its declared return type is a number as well, which cannot be indexed
sample: Any = numpyro.sample

NOISES = {
    "gumbel": dist.Gumbel(0.0, 1.0),
    "normal": dist.Normal(0.0, 1.0),
    "logistic": dist.Logistic(0.0, 1.0),
    "laplace": dist.Laplace(0.0, 1.0),
    "student_t": dist.StudentT(5.0, 0.0, 1.0),
}

CARD = Card(
    title="A choice among very many classes, as the largest of noisy utilities",
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
        "embedding": "what a feature adds to each of the few coordinates that classes answer to, "
        "with `rank`",
        "weights": "how the mean utility of a class answers to the features",
        "biases": "the mean utility of a class where all features are 0",
        "eps": "the noise in the utility of the class that was chosen",
        "is_below": "that the utility of another class is below it",
        "y": "the chosen class, where it is not augmented",
    },
    edits=(
        'noise="normal": multinomial probit; or "logistic", "laplace", "student_t", any distribution with a log_cdf',
        "draw the weights from a Laplace prior: few features count",
        "prior_scale=None: maximum likelihood",
        "rank=50: classes answer to 50 combinations of the features, which are learned; for very "
        "many features",
    ),
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SparseRows:
    """Rows of which few features are not 0: the places and values of those, as many in each row;
    a place with the value 0 fills up.
    """

    columns: Any  # [row, place]
    values: Any  # [row, place]
    num_features: int = field(metadata={"static": True})

    @classmethod
    def of(cls, matrix: Any) -> "SparseRows":
        """From a SciPy sparse matrix [row, feature]; memory: rows x the longest row."""
        matrix = matrix.tocsr()
        matrix.sum_duplicates()
        lengths = np.diff(matrix.indptr)
        place = np.arange(matrix.nnz) - np.repeat(matrix.indptr[:-1], lengths)
        row = np.repeat(np.arange(len(lengths)), lengths)
        shape = (len(lengths), max(int(lengths.max(initial=0)), 1))
        columns, values = np.zeros(shape, np.int32), np.zeros(shape, matrix.dtype)
        columns[row, place], values[row, place] = matrix.indices, matrix.data
        last = columns[np.arange(shape[0]), np.maximum(lengths - 1, 0)]
        # touches no other weight
        columns = np.where(np.arange(shape[1]) < lengths[:, None], columns, last[:, None])
        return cls(columns, values, matrix.shape[1])

    @property
    def shape(self) -> tuple[int, int]:
        """Rows, features."""
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
    prior_scale: float | None = 1.0,
    rank: int | None = None,
    batch_size: int | None = None,
    num_negatives: int | None = None,
    augmented: bool = True,
):
    """The model; without `y`, or not `augmented`, the classes themselves are a site, and it returns
    them.

    :param x: features [row, feature], an array or `SparseRows`.
    :param y: the class of each row, 0 .. num_classes - 1.
    :param noise: a name in `NOISES`, or a NumPyro distribution of a number.
    :param prior_scale: standard deviation of weights and biases; None: a flat prior, so that a mode
    is the maximum of the likelihood.
    :param rank: combinations of the features that classes answer to, in place of the features
    themselves.
    :param batch_size: rows that a run of the model sees; None: all, as where classes are drawn.
    :param num_negatives: classes beside the chosen one that it sees; None: all.
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


def _of_others(x, weights, biases, chosen: Array, other: Array, last: int) -> Array:
    """Mean utilities of classes that were not chosen, [other, row]: where `other` is the chosen
    class, the last class stands in for it.

    :param other: of 0 .. last - 1, [other], the same for all rows, or [other, row].
    """
    if other.ndim == 2:
        return _utility(x, weights, biases, jnp.where(other == chosen[None], last, other))
    every = _utility(x, weights, biases, jnp.append(other, last)[:, None])
    return jnp.where(other[:, None] == chosen[None], every[-1:], every[:-1])


def _utility(x, weights, biases, classes: Array) -> Array:
    """Mean utilities of `classes` [..., row], one for each row, or [..., 1], the same for all
    rows.
    """
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
    """Integers of one kind."""
    return jnp.asarray(y).astype(jnp.int32)


def _embedding(num_features: int, rank: int | None):
    """A row for each feature, which keeps the size of what is embedded; None without `rank`."""
    if rank is None:
        return None
    with plate("feature", num_features, dim=-1):
        return sample(
            "embedding",
            dist.Normal(0.0, rank**-0.5).expand((rank,)).to_event(1),
            infer={"event_dims": ["coordinate"]},
        )


def _floats(x, row: Array, embedding):
    """Some rows of the features, as floats; or of their coordinates."""
    if isinstance(x, SparseRows):
        some = x[row]
        values = some.values.astype(jnp.result_type(float))
        if embedding is not None:
            return jnp.sum(values[..., None] * embedding[some.columns], 1)
        return SparseRows(some.columns, values, some.num_features)
    features = jnp.asarray(x)[row].astype(jnp.result_type(float))
    return features if embedding is None else features @ embedding[jnp.arange(x.shape[1])]


def _checked(x, y, num_classes: int, noise: Any) -> dist.Distribution:
    """The noise; refuses what is no choice among classes.

    What a compiled loop traces was seen before.
    """
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
            f"augment_reduce x: row {row} has an entry that is no finite number; fill in what is "
            "missing."
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
            "Leave rows of unknown class out: "
            "they say nothing."
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
    """Data from the model itself, as the model's keyword arguments: standard normal features, and
    the best of noisy utilities.

    :param options: other arguments of the model; they are returned beside the data.
    """
    feature_key, model_key = random.split(rng_key)
    told: dict[str, Any] = {
        "x": random.normal(feature_key, (num_rows, num_features)),
        "num_classes": num_classes,
        **options,
    }
    proper: dict[str, Any] = told | {
        "prior_scale": 1.0 if told.get("prior_scale", 1.0) is None else told.get("prior_scale", 1.0)
    }
    with seed(rng_seed=model_key):  # from a flat prior nothing could be drawn
        return told | {"y": augment_reduce(**proper)}
