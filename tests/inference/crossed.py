"""A model with a crossed predictor in words of its own, its edits, and small programs of the
zoo's; shared by the tests of that route.
"""

from functools import cache, partial

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import random
from numpyro import handlers

from inference import Program
from inference.reading.crossed import read_crossed, respond
from zoo.bsvd import binomial_probit, bsvd, gaussian, ordered_probit, simulate

RNG = np.random.default_rng(5)
CELLS = np.sort(RNG.choice(30, 20, replace=False))
READER, BOOK = CELLS // 5, CELLS % 5  # 6 readers, 5 books
STARS = RNG.normal(size=20)
# the first is 1 for the first two entries alone
NOTES = np.stack([np.arange(20) < 2, RNG.normal(size=20)], axis=1).astype(float)

LINKS = {
    "gaussian": {"link": partial(gaussian, alpha=dist.Gamma(10.0, 1.0))},
    "ordered": {"link": partial(ordered_probit, num_levels=4)},
    "binomial": {"link": binomial_probit},
}


def small(link="gaussian", num_components=3, **options):
    """The zoo's model on 6 x 5 entries, 18 observed, in float64."""
    return Program(
        bsvd, **simulate(random.key(3), 6, 5, 0.6, num_components, **LINKS[link], **options)
    )


def shelves(reader, book, stars, notes=None, *, sizes=(6, 5), num_topics=3, **edits):
    """Readers, books and topics; `edits` replace a part of the model each."""
    part = {**WHOLE, **edits}
    with numpyro.plate("topic", num_topics):
        read = (
            numpyro.sample("read", part["switch"](num_topics))
            if part["switch"]
            else jnp.ones(num_topics)
        )
        force = (
            numpyro.sample("force", part["amplitude"](read))
            if part["amplitude"]
            else jnp.ones(num_topics)
        )
    part["more"](read, force)
    level = numpyro.sample("level", part["level"](read)) if part["level"] else 0.0
    with numpyro.plate("reader", sizes[0], dim=-2), numpyro.plate("topic", num_topics, dim=-1):
        taste = numpyro.sample("taste", part["taste"](read))
    with numpyro.plate("book", sizes[1], dim=-2), numpyro.plate("topic", num_topics, dim=-1):
        tone = numpyro.sample("tone", part["tone"])
    with numpyro.plate("reader", sizes[0], dim=-2), numpyro.plate("one", 1, dim=-1):
        mood = numpyro.sample("mood", part["mood"](level))
    with numpyro.plate("book", sizes[1], dim=-2), numpyro.plate("one", 1, dim=-1):
        fame = numpyro.sample("fame", dist.Normal(0.0, 1.0))
    mean = level + mood[reader, 0] + fame[book, 0] + (taste[reader] * tone[book]) @ (read * force)
    if notes is not None:
        with numpyro.plate("note", notes.shape[1]):
            mean = mean + notes @ numpyro.sample("slope", dist.Normal(0.0, 1.0))
    with part["around"](len(reader)), numpyro.plate("rating", len(reader)):
        numpyro.sample("stars", part["link"](part["bent"](mean, read), mood[reader, 0]), obs=stars)


WHOLE = {
    "switch": lambda num_topics: dist.Bernoulli(0.4),
    "amplitude": lambda read: dist.HalfNormal(1.5),
    "more": lambda read, force: None,
    "level": lambda read: dist.Normal(0.5, 1.0),
    "taste": lambda read: dist.Normal(0.0, 0.4),
    "tone": dist.Normal(0.1, 0.4),
    "mood": lambda level: dist.Normal(0.0, 1.0),
    "bent": lambda mean, read: mean,
    "link": lambda mean, mood: dist.Normal(mean, 0.5),
    "around": lambda size: handlers.mask(mask=True),
}

EDITS = {  # the mathematics is another, and the predictor is still crossed
    "amplitudes of either sign": {"amplitude": lambda read: dist.Normal(0.5, 1.0)},
    "no amplitudes": {"amplitude": None, "switch": None},
    "shared amplitudes": {"amplitude": lambda read: dist.Normal(1.0, 0.5), "switch": None},
    "switches of their own": {
        "switch": lambda num_topics: dist.Bernoulli(jnp.linspace(0.2, 0.8, num_topics))
    },
    "watched amplitudes": {"more": lambda read, force: numpyro.deterministic("seen", read * force)},
    "half is masked": {"around": lambda size: handlers.mask(mask=np.arange(size) % 2 == 0)},
}


def flags(read, force):
    numpyro.sample("flag", dist.Normal(read.sum(), 1.0), obs=1.0)


REFUSED = {  # what is no crossed predictor, or not all of the model's
    "a bent predictor": {"bent": lambda mean, read: jnp.exp(mean)},
    "factors that are not Normal": {"tone": dist.Laplace(0.0, 0.4)},
    "two observed sites": {"more": flags},
    "a factor": {"more": lambda read, force: numpyro.factor("extra", -force.sum())},
    "noise that knows the readers": {
        "link": lambda mean, mood: dist.Normal(mean, jnp.exp(mood / 2))
    },
    "another likelihood": {"link": lambda mean, mood: dist.StudentT(3.0, mean, 0.5)},
    "entries counted twice": {"around": lambda size: handlers.scale(scale=2.0)},
    "factors that know the switches": {
        "taste": lambda read: dist.Normal(0.0, jnp.where(read > 0, 0.4, 0.1))
    },
    "a level that knows the switches": {"level": lambda read: dist.Normal(read.sum(), 1.0)},
    "amplitudes that know the switches": {"amplitude": lambda read: dist.HalfNormal(1.0 + read)},
    "switches beside the amplitudes": {
        "bent": lambda mean, read: mean + 0.5 * read.sum(),
        "switch": lambda num_topics: dist.Bernoulli(jnp.full(num_topics, 1e-6)),
    },
    "positive amplitudes without switches": {"switch": None},
}


def shop(notes=None, **edits):
    """The program of `shelves`."""
    return Program(
        partial(shelves, **edits),
        READER,
        BOOK,
        STARS,
        **({} if notes is None else {"notes": notes}),
    )


# The log joint given the latent Normals.

CASES = {
    "gaussian": lambda: small(),
    "ordered": lambda: small("ordered"),
    "binomial": lambda: small("binomial", learn_factors=True),
    "features": lambda: small(
        row_features=RNG.normal(size=(6, 2)), column_features=RNG.normal(size=(5, 1))
    ),
    "renamed": lambda: shop(NOTES),
    "masked": lambda: shop(**EDITS["half is masked"]),
}


def as_normal(response, weight):
    """The link of given latent Normals."""

    def link(predictor, value, trials, entries):
        with entries:
            numpyro.sample("y", dist.Normal(predictor, 1 / jnp.sqrt(weight)), obs=response)

    return link


@cache
def drawn(name):
    """Program, structure, values with the first component on and the second off, entries; and
    the log joint given the latent Normals.
    """
    program = CASES[name]()
    crossed = read_crossed(program, random.key(0))
    values = program.draw_prior(random.key(1))
    values[crossed.components.switch] = jnp.array([1, 0, 1])
    site = program.trace(values)[crossed.observed]
    response, weight = respond(random.key(2), site["fn"], site["value"])
    normal = (
        program.with_arguments(link=as_normal(response, weight))
        if name in ("ordered", "binomial")
        else program
    )
    joint = lambda at: normal.log_joint({site: at[site] for site in normal.latent})
    return program, crossed, values, (response, weight, crossed.predictor(program, values)), joint


def indices(crossed, program, side):
    """To which item an entry belongs, of a side and of the other one."""
    return (jnp.asarray(program.arguments[crossed.sides[i].index]) for i in (side, 1 - side))
