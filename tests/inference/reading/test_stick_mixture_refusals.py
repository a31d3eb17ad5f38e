"""What is no truncated mixture is refused by name, whatever hides it."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import plate

from inference import Program, StructureError
from inference.distributions import Missing
from inference.reading import proof
from inference.reading.proof import further
from inference.reading.stick_mixture import read
from inference.reading.stick_mixture.read import read_assignment
from tests.inference.mixtures import GATE, beta_bernoulli, columns_of, normal_columns
from tests.inference.reading.test_stick_mixture import BITS, HOLES, X, Y, quick
from zoo.iqgme import iqgme, normal_wishart, probit, soft_probit

pytestmark = pytest.mark.usefixtures("x64", "numpyro_promotion")
sample = numpyro.sample


def gate_with(prior, likelihood):
    def gate(x, z, at):
        experts, rows, columns = columns_of(at)
        with experts, columns:
            p = sample("p", prior)
        with rows, columns:
            return sample("x", Missing(likelihood(p[z])), obs=x)

    return gate


def own_prior(x, z, at):
    with at.experts:
        Lambda = sample("Lambda", dist.Wishart(4.0, rate_matrix=jnp.eye(2)))
        mu = sample("mu", dist.MultivariateNormal(jnp.zeros(2), jnp.eye(2)))
    with at.rows:
        return sample("x", dist.MultivariateNormal(mu[z], precision_matrix=Lambda[z]), obs=x)


def shifted(x, z, at):
    with at.experts:
        Lambda = sample("Lambda", dist.Wishart(4.0, rate_matrix=jnp.eye(2)))
        mu = sample("mu", dist.MultivariateNormal(jnp.zeros(2), precision_matrix=Lambda))
    with at.rows:
        return sample("x", dist.MultivariateNormal(1.1 * mu[z], precision_matrix=Lambda[z]), obs=x)


def heavy(x, z, at):
    with at.experts:
        Lambda = sample("Lambda", dist.Wishart(4.0, rate_matrix=jnp.eye(2)))
        mu = sample("mu", dist.MultivariateNormal(jnp.zeros(2), precision_matrix=Lambda))
    root = dist.MultivariateNormal(mu, precision_matrix=Lambda).scale_tril
    with at.rows:
        return sample("x", dist.MultivariateStudentT(4.0, mu[z], root[z]), obs=x)


def by_the_rows(x, z, at):
    return normal_wishart(x, z, at, centre=x.mean(0))


def moved(x, z, at, loc):
    with at.experts:
        Lambda = sample("Lambda", dist.Wishart(4.0, rate_matrix=jnp.eye(2)))
        mu = sample("mu", dist.MultivariateNormal(jnp.zeros(2), precision_matrix=Lambda))
    with at.rows:
        return sample("x", dist.MultivariateNormal(loc(mu[z]), precision_matrix=Lambda[z]), obs=x)


def by_their_number(x, z, at):
    """The same for all tables of fewer than 25 rows."""
    return normal_wishart(x, z, at, centre=0.0 if len(x) < 25 else 1.0)


def masked_last(x, z, at):
    return beta_bernoulli(
        x, z, at, wrap=lambda fn: Missing(fn).mask(jnp.arange(at.rows.size)[:, None] < 29)
    )


def shared_spread(x, z, at):
    Lambda = sample("Lambda", dist.Wishart(4.0, rate_matrix=jnp.eye(2)))
    with at.experts:
        mu = sample("mu", dist.MultivariateNormal(jnp.zeros(2), precision_matrix=Lambda))
    with at.rows:
        return sample("x", dist.MultivariateNormal(mu[z], precision_matrix=Lambda), obs=x)


def shared_chance(x, z, at):
    with at.experts:
        p = sample("p", dist.Beta(1.0, 1.0))
    _, rows, columns = columns_of(at)
    with rows, columns:
        return sample("x", Missing(dist.Bernoulli(p[z][:, None])), obs=x)


def shared_precision(x, y, z, at):
    spread = sample("lambda", dist.Gamma(2.0, 2.0)) ** -0.5
    with at.experts:
        w = sample("w", dist.Normal(jnp.zeros(2), spread).to_event(1))
    with at.rows:
        t = sample("t", dist.Normal(jnp.sum(w[z] * x, -1), 1.0))
        return sample("y", dist.Delta((t > 0).astype(int)), obs=y)


def beside(x, z, at):
    x = GATE(x, z, at)
    sample("side", dist.Normal(x.sum(), 1.0), obs=0.0)
    return x


def penalised(x, z, at):
    numpyro.factor("few", -1.0 * z.max())
    return GATE(x, z, at)


def masked(x, z, at):
    return beta_bernoulli(
        x, z, at, wrap=lambda fn: Missing(fn).mask(jnp.arange(at.rows.size)[:, None] > 3)
    )


def logit(x, y, z, at):
    with at.experts:
        w = sample("w", dist.Normal(jnp.zeros(2), 1.0).to_event(1))
    with at.rows:
        return sample("y", dist.Bernoulli(logits=jnp.sum(w[z] * x, -1)), obs=y)


def soft_with(score=lambda w, x: jnp.sum(w * x, -1), scale=1.0, label=lambda t: t > 0, prior=None):
    def expert(x, y, z, at):
        with at.experts:
            w = sample("w", dist.Normal(jnp.zeros(2), 1.0).to_event(1) if prior is None else prior)
        with at.rows:
            t = sample("t", dist.Normal(score(w[z], x), scale))
            return sample("y", dist.Delta(label(t).astype(int)), obs=y)

    return expert


def best_of_all(x, y, z, at):
    """The class of the largest soft label: no product of half-lines."""
    with plate("class", 2, dim=-2), at.experts:
        w = sample("w", dist.Normal(jnp.zeros(2), 1.0).to_event(1))
    with plate("class", 2, dim=-2), at.rows:
        t = sample("t", dist.Normal(jnp.sum(w[:, z] * x, -1), 1.0))
    with at.rows:
        return sample(
            "y", dist.Delta(jnp.argmax(jnp.concatenate([jnp.zeros((1, t.shape[1])), t]), 0)), obs=y
        )


REFUSALS = {
    "concentration": (
        {"alpha": dist.LogNormal(0.0, 1.0)},
        "site 'V': its concentration comes from 'alpha' .LogNormal.; wanted one scalar Gamma",
    ),
    "integrated labels": (
        {"expert": probit},
        "site 'y': CategoricalLogits with .*'w' ~ Normal.* is not in .* Labels need soft labels",
    ),
    "logistic": (
        {"expert": logit},
        "site 'y': BernoulliLogits with 'w' ~ Normal is not in the table.*SVI with an autoguide",
    ),
    "heavy tails": ({"gate": heavy}, "site 'x': MultivariateStudentT with .* is not in the table"),
    "loc of its own": (
        {"gate": own_prior},
        "site 'mu' .*: read as 'Lambda', 'mu' -> MultivariateNormal of 'z', but .* misses",
    ),
    "scaled loc": ({"gate": shifted}, "site 'x' .MultivariateNormal.: read as .* misses that by"),
    "prior of the rows": (
        {"gate": by_the_rows},
        "site 'z': the numbers of the priors of its groups depend on the rows",
    ),
    "side": (
        {"gate": beside},
        "site 'side' .Normal.: observed, and no block of the mixture reads it",
    ),
    "factor": ({"gate": penalised}, "site 'few' .Unit.: factor, and no block"),
    "masked": (
        {"gate": masked, "x": BITS, "expert": None},
        "site 'x' .BernoulliProbs.: read as .* misses that by",
    ),
    "square": (
        {
            "gate": gate_with(dist.Beta(1.0, 1.0), lambda p: dist.Bernoulli(p**2)),
            "x": BITS,
            "expert": None,
        },
        "site 'x' .BernoulliProbs.: read as 'p' -> BernoulliProbs of 'z', but",
    ),
    "log-normal rate": (
        {"gate": gate_with(dist.LogNormal(0.0, 1.0), dist.Poisson), "x": BITS, "expert": None},
        "site 'x': Poisson with 'p' ~ LogNormal is not in the table of conjugate pairs; register "
        "it",
    ),
    "noise": (
        {"expert": soft_with(scale=2.0)},
        "site 't' .Normal.: read as Normal.* misses that by",
    ),
    "link": ({"expert": soft_with(score=lambda w, x: jnp.tanh(jnp.sum(w * x, -1)))}, "site 't'.*"),
    "squared features": (
        {"expert": soft_with(score=lambda w, x: jnp.sum(w * x**2, -1)), "x": HOLES},
        "site 't': what weight 0 multiplies changes with missing entries and is no column of the "
        "features",
    ),
    "threshold": (
        {"expert": soft_with(label=lambda t: t > 3.0)},
        "site 'y': no signs of 't' make its value possible",
    ),
    "argmax": ({"expert": best_of_all}, "site 'y' .Delta.: read as the signs of 't'"),
    "one p for all columns": (
        {"gate": shared_chance, "x": BITS, "expert": None},
        "site 'p' .Beta.: its shape is .3,., wanted .3, 2.: no parameter that .* columns, .* "
        "share. Use SVI",
    ),
    "one Lambda for all groups": (
        {"gate": shared_spread},
        "site 'Lambda' .Wishart.: its shape is .2, 2., wanted .3, 2, 2.",
    ),
    "one lambda for all weights": (
        {"expert": shared_precision},
        "site 'lambda' .Gamma.: its shape is .., wanted .2,.: .* Use SVI",
    ),
    "cauchy weights": (
        {"expert": soft_with(prior=dist.Cauchy(jnp.zeros(2), 1.0).to_event(1))},
        "site 't': its loc is computed from .'w'.",
    ),
}


SILENT = {
    "other rows": (
        {
            "gate": lambda x, z, at: moved(
                x, z, at, lambda mu: mu + 5.0 * (jnp.arange(at.rows.size) >= 20)[:, None]
            )
        },
        "site 'x'",
    ),
    "rows by their data": (
        {
            "gate": lambda x, z, at: moved(
                x, z, at, lambda mu: mu + 1.0 * (x[:, :1] > X[:, 0].max() - 1e-9)
            )
        },
        "site 'x'",
    ),
    "clipped loc": (
        {"gate": lambda x, z, at: moved(x, z, at, lambda mu: jnp.clip(mu, -500.0, 500.0))},
        "site 'x'",
    ),
    "clipped score": (
        {"expert": soft_with(score=lambda w, x: jnp.clip(jnp.sum(w * x, -1), -5.0, 5.0))},
        "site 't'",
    ),
    "loc near 0": (
        {
            "gate": lambda x, z, at: moved(
                x, z, at, lambda mu: jnp.where(jnp.abs(mu) < 0.01, 0.0, mu)
            )
        },
        "site 'x'",
    ),
    "label near 0": ({"expert": soft_with(label=lambda t: t > 0.0004)}, "site 'y'"),
    "clipped chance": (
        {
            "gate": gate_with(dist.Beta(1.0, 1.0), lambda p: dist.Bernoulli(jnp.clip(p, 0.1, 0.9))),
            "x": BITS,
            "expert": None,
        },
        "site 'x'",
    ),
    "floored rate": (
        {
            "gate": gate_with(
                dist.Gamma(2.0, 1.0), lambda rate: dist.Poisson(jnp.maximum(rate, 0.3))
            ),
            "x": BITS,
            "expert": None,
        },
        "site 'x'",
    ),
    "masked last row": ({"gate": masked_last, "x": BITS, "expert": None}, "site 'x'"),
    "number of rows": (
        {"gate": by_their_number},
        "site 'z': the numbers of the priors of its groups depend on the rows",
    ),
}


def with_change(change):
    """The arguments of the model; without experts there are no labels."""
    told = {"x": X, "y": Y, "num_experts": 3, "alpha": 1.0} | change
    return {
        name: value
        for name, value in told.items()
        if name != "y" or told.get("expert", soft_probit) is not None
    }


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "name", ["clipped loc", "other rows", *sorted(set(SILENT) - {"clipped loc", "other rows"})]
)
def test_what_acts_on_some_rows_or_at_some_values_is_refused(name, monkeypatch):
    """It is seen in all rows, at large values and at small ones; not, and so the case has power,
    in twelve rows at values of about 1.
    """
    change, message = SILENT[name]
    told = with_change(change)
    with pytest.raises(StructureError, match=message):
        read_assignment(Program(iqgme, **told))
    monkeypatch.setattr(read, "many_rows", lambda program, z, _: read.some_rows(program, z, 12))
    monkeypatch.setattr(read, "prove_for", lambda *_: None)
    near = lambda *given: [(*starts, proof.Magnitude(1.0, 1.0)) for *starts, _ in further(*given)]
    monkeypatch.setattr(read, "further", near)
    read_assignment(Program(iqgme, **told))


@pytest.mark.slow
def test_of_more_rows_than_are_compared_at_once_some_of_all_places_are(monkeypatch):
    monkeypatch.setattr(read, "MOST", 20 * 9)
    told = {"num_experts": 3, "alpha": 1.0, "expert": None}
    found = read_assignment(Program(iqgme, np.tile(X, (4, 1)), **told))
    assert found.prior is not None
    late = lambda x, z, at: moved(x, z, at, lambda mu: mu + 5.0 * (x[:, :1] > 9.0))
    with pytest.raises(StructureError, match="site 'x'"):
        read_assignment(
            Program(
                iqgme,
                np.tile(X, (4, 1)) + 10.0 * (np.arange(120) >= 90)[:, None],
                gate=late,
                **told,
            )
        )
    with pytest.raises(StructureError, match="site 'z': the numbers of the priors"):
        read_assignment(Program(iqgme, np.tile(X, (4, 1)), gate=by_their_number, **told))


PROVED = {"loc of its own", "prior of the rows", "link", "noise", "square", "masked"}


@pytest.mark.slow_after(4)
@pytest.mark.parametrize("name", quick(REFUSALS, set(REFUSALS) - PROVED))
def test_what_is_not_conjugate_is_refused_by_name(name):
    change, message = REFUSALS[name]
    told = with_change(change)
    with pytest.raises(StructureError, match=message):
        read_assignment(Program(iqgme, **told))


def test_missing_entries_with_bounds_are_refused(monkeypatch):
    """What a mixture says of them are Normals."""
    bounded = lambda: dist.ImproperUniform(dist.constraints.positive, (), ())
    monkeypatch.setattr(
        "zoo.iqgme.sample",
        lambda name, fn, **told: sample(name, bounded() if name == "x_missing" else fn, **told),
    )
    with pytest.raises(StructureError, match="site 'x_missing': missing entries that have bounds"):
        read_assignment(Program(iqgme, HOLES, num_experts=3, expert=None))


def test_missing_entries_beside_independent_columns_are_summed_out():
    """Not latent: then nothing sees them but their own column."""
    found = read_assignment(Program(iqgme, HOLES, num_experts=3, expert=None, gate=normal_columns))
    assert found.holes is None
    codes = np.where(np.arange(2) == 1, 7.0, BITS)
    with pytest.raises(ValueError, match="site 'x': row 0, column 1 is 7.0"):
        read_assignment(Program(iqgme, codes, num_experts=3, expert=None, gate=beta_bernoulli))
