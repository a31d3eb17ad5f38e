"""The three Bayesian competitors of the Archipelago paper, each a short NumPyro model that NUTS
samples.

| model | likelihood of a row with latent values g [class] | rows |
|---|---|---|
| softmax GP | exp(g_y) / Σ_k exp(g_k) | labelled |
| probit GP | P(g_y + e_y > g_j + e_j for every other j), e standard normal | labelled |
| null-category noise model | P(g_y + e_y > g_j + e_j + margin for every other j); without a label,
the sum of that over y | all |

In the last, the probability that is left is that of a category that no row is ever in, so that
decision boundaries avoid all rows (Rogers and Girolami 2007); its margin is one standard deviation
of the noise. The classes' functions are independent Gaussian processes with one squared-exponential
covariance, its amplitude and length scale (`ard`: one a feature) drawn too, beside the whitened
values. Cost: O(n³ + n² K + n K²) a gradient for n rows and K classes; O(n² + n K²) a test row and
draw.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array, lax, random
from jax.scipy.linalg import solve_triangular
from jax.scipy.special import erfc, logsumexp
from numpyro.infer import NUTS

from inference import Driver

__all__ = ["log_wins", "null_category", "predict", "probit_gp", "softmax_gp"]

JITTER = 1e-6
MARGIN = 1.0  # of the null category
NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(8)  # for expectations under a standard normal
NUM_WARMUP, NUM_SAMPLES = 150, 200
TREE_DEPTH = 6  # 63 gradients a draw at most


def covariance(x: Array, other: Array, amplitude: Array, length: Array) -> Array:
    """Squared exponential, [row of x, row of other]."""
    gap = (x[:, None] - other[None]) / length
    return amplitude**2 * jnp.exp(-0.5 * jnp.sum(gap**2, axis=-1))


def root(x: Array, amplitude: Array, length: Array) -> Array:
    """The Cholesky factor by which whitened values become those of the process."""
    return jnp.linalg.cholesky(
        covariance(x, x, amplitude, length) + JITTER * amplitude**2 * jnp.eye(len(x))
    )


def latent(x: Array, num_classes: int, ard: bool) -> Array:
    """Values [row, class] of independent Gaussian processes, and their hyper-parameters."""
    num_features = x.shape[1]
    amplitude = numpyro.sample("amplitude", dist.LogNormal(1.0, 1.0))
    # rows are standardised: they are sqrt(2 num_features) apart
    scale = dist.LogNormal(0.5 * np.log(num_features / 2), 1.0)
    length = numpyro.sample("length", scale.expand([num_features if ard else 1]).to_event(1))
    white = numpyro.sample("white", dist.Normal().expand([len(x), num_classes]).to_event(2))
    return root(x, amplitude, length) @ white


def cdf(z: Array) -> Array:
    """The distribution function of the standard normal, at a tenth of the cost of `norm.cdf`."""
    return 0.5 * erfc(-z / np.sqrt(2))


def log_wins(g: Array, u: Array, margin: float) -> Array:
    """log P(g_k + u > g_j + e_j + margin for every j but k), of each k, [row, class], where `u`
    [row] is the winner's own noise.
    """
    gap = g[:, :, None] - g[:, None, :] - margin + u[:, None, None]
    # further it underflows
    return jnp.sum(
        jnp.log(cdf(jnp.maximum(gap, -37.0))), axis=2, where=~jnp.eye(g.shape[1], dtype=bool)
    )


def softmax_gp(x: Array, y: Array, num_classes: int, ard: bool) -> None:
    """Williams and Barber (1998), of labelled rows."""
    numpyro.sample("y", dist.Categorical(logits=latent(x, num_classes, ard)), obs=y)


def probit_gp(x: Array, y: Array, num_classes: int, ard: bool) -> None:
    """Girolami and Rogers (2006), of labelled rows."""
    noisy_argmax(x, y, num_classes, ard, margin=0.0)


def null_category(x: Array, y: Array, num_classes: int, ard: bool) -> None:
    """Rogers and Girolami (2007); `y` is −1 where there is no label."""
    noisy_argmax(x, y, num_classes, ard, margin=MARGIN)


def noisy_argmax(x: Array, y: Array, num_classes: int, ard: bool, margin: float) -> None:
    """A class wins by more than the margin; the winner's noise is a site, so that its likelihood
    is a product.
    """
    g = latent(x, num_classes, ard)
    u = numpyro.sample("u", dist.Normal().expand([len(x)]).to_event(1))
    may_be = (y[:, None] < 0) | (y[:, None] == jnp.arange(num_classes))
    numpyro.factor("y", logsumexp(log_wins(g, u, margin), axis=1, where=may_be).sum())


def probit(g: Array, margin: float) -> Array:
    """Probabilities [row, class] that a class wins, by Gauss-Hermite over the winner's noise."""
    gap = g[:, :, None] - g[:, None, :] - margin
    others = ~jnp.eye(g.shape[1], dtype=bool)
    wins = jnp.stack([jnp.prod(cdf(gap + node), axis=2, where=others) for node in NODES])
    return jnp.tensordot(jnp.asarray(WEIGHTS / WEIGHTS.sum()), wins, axes=((0,), (0,)))


LINKS: dict[Callable, Callable[[Array], Array]] = {  # probabilities [row, class]
    softmax_gp: jax.nn.softmax,
    probit_gp: partial(probit, margin=0.0),
    null_category: partial(probit, margin=MARGIN),
}


def predict(
    model: Callable,
    x: np.ndarray,
    y: np.ndarray,
    x_test: np.ndarray,
    ard: bool = False,
    seed: int = 0,
) -> np.ndarray:
    """Class probabilities [test row, class] of `model`, averaged over draws of one chain; `y` is
    −1 where there is no label.
    """
    num_classes = int(y.max()) + 1
    seen = slice(None) if model is null_category else y >= 0
    with jax.enable_x64(True):
        rows = jnp.asarray(x[seen])
        driver = Driver(
            NUTS(model, max_tree_depth=TREE_DEPTH),
            num_warmup=NUM_WARMUP,
            num_samples=NUM_SAMPLES,
            jit_model_args=True,  # draws of equal shapes share the compiled loop
            progress_bar=False,
        )
        posterior = driver.run(seed, rows, jnp.asarray(y[seen]), num_classes, ard)["posterior"]
        draws = {
            name: jnp.asarray(posterior[name].values[0])
            for name in ("amplitude", "length", "white")
        }
        keys = random.split(random.key(seed), NUM_SAMPLES)
        return np.asarray(_forecast(LINKS[model], rows, jnp.asarray(x_test), keys, draws))


@partial(jax.jit, static_argnums=0)
def _forecast(
    link: Callable, x: Array, x_test: Array, keys: Array, draws: dict[str, Array]
) -> Array:
    def one(given):
        key, (amplitude, length, white) = given
        factor = root(x, amplitude, length)
        # [row, test row]
        weights = solve_triangular(factor, covariance(x, x_test, amplitude, length), lower=True)
        variance = jnp.maximum(amplitude**2 - jnp.sum(weights**2, axis=0), 0)
        noise = random.normal(key, (len(x_test), white.shape[1]))
        return link(weights.T @ white + jnp.sqrt(variance)[:, None] * noise)

    found = lax.map(one, (keys, (draws["amplitude"], draws["length"], draws["white"]))).mean(0)
    # given that a test row is no more in the null category than others are
    return found / found.sum(1, keepdims=True)
