"""What augment and reduce is measured against, each as a model or a local step of the same kernel,
so that all share batches, negatives, optimiser and start.

| rival             | it maximises                                                                    | after |
|-------------------|---------------------------------------------------------------------------------|-------|
| exact softmax     | sum_n log softmax: the model of the zoo, not augmented                            |       |
| `one_vs_each`     | sum_n sum_{k != y} log sigmoid(psi_y - psi_k), a bound of the softmax              | Titsias (2016) |
| `sampled_softmax` | -log(1 + (K - 1) / S sum_{k in S} e^(psi_k - psi_y)), corrected by log Q, no
bound | Bengio and Senecal (2003) |
| `UMax`            | the bound of augment and reduce, by gradient steps in u = log rate                | Fagan and Iyengar (2018) |
"""

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from numpyro import factor, plate, sample

from inference import AugmentReduce, Program
from inference.kernels.augment_reduce.kernel import ReduceReading
from inference.kernels.augment_reduce.noise_posterior import LogExponential
from zoo.augment_reduce import augment_reduce

__all__ = ["METHODS", "UMax", "exact_softmax", "one_vs_each", "sampled_softmax"]


def exact_softmax(**options):
    """The sum over all classes, of some rows."""
    options.pop("num_negatives", None)
    return augment_reduce(**options, augmented=False)


def linear(x, y, num_classes, prior_scale, batch_size, num_negatives, use):
    """Weights as in the zoo; `use` observes the differences psi_k - psi_y [other, row] of some
    rows and classes.
    """
    prior = (
        dist.ImproperUniform(dist.constraints.real, (), ())
        if prior_scale is None
        else dist.Normal(0.0, prior_scale)
    )
    with plate("class", num_classes, dim=-1):
        weights, biases = (
            sample("weights", prior.expand((x.shape[1],)).to_event(1)),
            sample("biases", prior),
        )
    rows = plate("row", len(x), subsample_size=batch_size, dim=-1)
    others = plate("other", num_classes - 1, subsample_size=num_negatives, dim=-2)
    last = num_classes - 1
    with rows as row:
        z, chosen = jnp.asarray(x)[row].astype(float), jnp.asarray(y)[row].astype(int)
        with others as other:
            every = jnp.append(other, last)
            utility = weights[every] @ z.T + biases[every][:, None]
            utility = jnp.where(other[:, None] == chosen[None], utility[-1:], utility[:-1])
        use(utility - (jnp.sum(weights[chosen] * z, -1) + biases[chosen])[None], others)


def one_vs_each(
    x, y, *, num_classes, prior_scale=1.0, batch_size=None, num_negatives=None, noise="gumbel"
):
    """The bound of Titsias (2016)."""

    def use(gap: Array, others: plate) -> None:
        with others:
            sample("is_below", dist.Bernoulli(logits=-gap), obs=np.ones(gap.shape, np.int32))

    linear(x, y, num_classes, prior_scale, batch_size, num_negatives, use)


def sampled_softmax(
    x, y, *, num_classes, prior_scale=1.0, batch_size=None, num_negatives=None, noise="gumbel"
):
    """A softmax over the sampled classes, each worth as many as it stands for."""

    def use(gap: Array, others: plate) -> None:
        worth = jnp.log((num_classes - 1) / gap.shape[0])
        factor("chosen", -jax.nn.softplus(jax.nn.logsumexp(gap, axis=0) + worth))

    linear(x, y, num_classes, prior_scale, batch_size, num_negatives, use)


class UMaxSteps(NamedTuple):
    """u = log rate: raised at once where a sampled term shows that it is too low, else moved
    along its gradient.
    """

    reads: LogExponential
    route = "U-max"
    step_size: float = 0.5
    slack: float = 1.0

    def start(self, num_rows: int) -> dict[str, Array]:
        """u = 1."""
        return {"rate": jnp.full(num_rows, np.e, jnp.result_type(float))}

    def step(self, local, terms, at_means, step_size: Array, rng_key: Array) -> dict[str, Array]:
        """U-max."""
        target, floor = self.reads.target(terms, len(local["rate"]))
        u = jnp.log(local["rate"])
        least = jnp.log1p(floor)
        u = jnp.where(u < least - self.slack, least, u)
        moved = u - self.step_size * step_size * (1 - target * jnp.exp(-u))
        return {"rate": jnp.exp(jnp.clip(moved, 0.0, u + 2.0))}

    def points(self, local, rng_key):
        """As augment and reduce."""
        return self.reads.points(local, rng_key)

    def entropy(self, local):
        """As augment and reduce."""
        return self.reads.entropy(local)


class UMax(AugmentReduce):
    """Fagan and Iyengar (2018), on the model of the zoo."""

    def read(self, program: Program) -> tuple[ReduceReading, dict]:
        """As the model is read, but for the local step."""
        reading, data = super().read(program)
        assert isinstance(reading.q_noise, LogExponential)
        return replace(reading, q_noise=UMaxSteps(reading.q_noise)), data  # ty: ignore[invalid-argument-type]


METHODS = {  # kernel, model, noise
    "exact softmax": (AugmentReduce, exact_softmax, "gumbel"),
    "OVE": (AugmentReduce, one_vs_each, "gumbel"),
    "sampled softmax": (AugmentReduce, sampled_softmax, "gumbel"),
    "U-max": (UMax, augment_reduce, "gumbel"),
    "A&R softmax": (AugmentReduce, augment_reduce, "gumbel"),
    "A&R probit": (AugmentReduce, augment_reduce, "normal"),
    "A&R logistic": (AugmentReduce, augment_reduce, "logistic"),
}
