"""A series that switches between states, which are not seen: a hidden Markov model.

    means         : means[0] ~ Normal(0, 1), log(means[k] - means[k-1]) ~ Normal(0, 1)
    deviations[k] ~ LogNormal(-1/2, 1/2)
    rows[k]       ~ Dirichlet(1, ..., 1 + stay at k, ..., 1)
    state[0]      ~ Uniform on the states
    state[t]      ~ Categorical(rows[state[t-1]])
    y[t]          ~ Normal(means[state[t]], deviations[state[t]])

Shapes: y [step]; means and deviations [state]; rows [state, state]. States are summed out by the
forward algorithm. Means rise with the state, so that no two labellings have the same density. A
large `stay` says that states last long. The series should have mean about 0 and variance about 1.

Rabiner (1989), "A tutorial on hidden Markov models and selected applications in speech
recognition". Cost of a log density: steps x states^2.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax import lax, nn, random
from jax.scipy.special import logsumexp
from numpyro.distributions import constraints

from zoo.card import Card

__all__ = ["CARD", "HiddenMarkov", "hmm", "simulate", "state_probabilities"]

# numpyro.sample is declared to return a number as well, which cannot be indexed
sample: Any = numpyro.sample

CARD = Card(
    title="A series that switches between hidden states, each with a mean and a deviation",
    paper="Rabiner (1989), A tutorial on hidden Markov models and selected applications in speech "
    "recognition, Proceedings of the IEEE 77",
    doi="10.1109/5.18626",
    kernels=("NUTS", "NestedSampler", "SVI"),
    sites={
        "means": "the mean of the series in each state, in rising order",
        "deviations": "the standard deviation of the series in each state",
        "rows": "the probabilities of the next state, given this one",
        "y": "the series, one vector",
    },
    edits=(
        "num_states=3: one more state",
        "stay=50.0: states last longer beforehand",
        "dist.StudentT(4.0, means, deviations) for the emission: outliers are no states",
    ),
)


class HiddenMarkov(dist.Distribution):
    """A series whose hidden states are summed out; the first state has equal probabilities.

    Args:
        rows: probabilities of the next state, [state, state].
        emission: the distribution of a value in each state, of batch shape [state].
        num_steps: length of the series.
    """

    support = constraints.real_vector
    pytree_data_fields = ("emission", "rows")
    pytree_aux_fields = ("num_steps",)

    def __init__(self, rows, emission, num_steps: int, *, validate_args=None):
        self.rows, self.emission, self.num_steps = rows, emission, num_steps
        super().__init__((), (num_steps,), validate_args=validate_args)

    def log_prob(self, value, intermediates=None):
        """Return log densities of series [..., step]."""
        forward = jnp.vectorize(partial(_forward, self.rows), signature="(t,k)->()")
        return forward(self.emission.log_prob(value[..., None]))

    def sample(self, key, sample_shape=()):
        """Draw the states, one after the other, and then the values."""
        first_key, move_key, value_key = random.split(key, 3)
        num_states = len(self.rows)
        first = random.randint(first_key, sample_shape, 0, num_states)

        def move(state, key):
            return random.categorical(key, jnp.log(self.rows)[state]), state

        _, states = lax.scan(move, first, random.split(move_key, self.num_steps))
        # a value in each state, of which one is kept
        values = self.emission.sample(value_key, (*sample_shape, self.num_steps))
        chosen = nn.one_hot(jnp.moveaxis(states, 0, -1), num_states, dtype=values.dtype)
        return jnp.sum(values * chosen, axis=-1)


def _forward(rows, log_emission):
    """Log density of a series, by the forward algorithm, from terms [step, state]."""

    def move(log_joint, terms):  # of the past and the state
        return logsumexp(log_joint[:, None] + jnp.log(rows), axis=0) + terms, None

    start = log_emission[0] - jnp.log(jnp.asarray(len(rows), log_emission.dtype))
    return logsumexp(lax.scan(move, start, log_emission[1:])[0])


def hmm(y, *, num_steps: int = 100, num_states: int = 2, stay: float = 5.0):
    """The model.

    Args:
        y: [step]; None: drawn.
        num_steps: length of the series where y is None.
        num_states: number of states.
        stay: how much likelier it is beforehand that a state lasts.

    Returns:
        y.
    """
    spaced = dist.TransformedDistribution(
        dist.Normal(0.0, 1.0).expand([num_states]).to_event(1), dist.transforms.OrderedTransform()
    )
    means = sample("means", spaced)
    with numpyro.plate("state", num_states):
        deviations = sample("deviations", dist.LogNormal(-0.5, 0.5))
        rows = sample("rows", dist.Dirichlet(1.0 + stay * jnp.eye(num_states)))
    length = num_steps if y is None else len(y)
    return sample("y", HiddenMarkov(rows, dist.Normal(means, deviations), length), obs=y)


def state_probabilities(y, draw):
    """Return the probability of each state at each step, given the whole series, for one draw.

    They are the derivatives of the log density by the log emission densities.

    Args:
        y: [step].
        draw: values of the latent sites.

    Returns:
        Probabilities [step, state]. Cost: steps x states^2.
    """
    emission = dist.Normal(draw["means"], draw["deviations"])
    terms = emission.log_prob(jnp.asarray(y)[:, None])
    return jax.grad(_forward, argnums=1)(draw["rows"], terms)


def simulate(rng_key, num_steps: int = 100, **options):
    """Draw a series from the model.

    Args:
        rng_key: a key.
        num_steps: length of the series.
        **options: other arguments of the model; they are returned as well.

    Returns:
        Keyword arguments of the model.
    """
    return options | {
        "y": numpyro.handlers.seed(hmm, rng_key)(None, num_steps=num_steps, **options)
    }
