"""Crossed predictors are found by what they are, whatever their names, and what is none is
refused.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.infer.gibbs import GIBBS_SITES_KWARG

from inference import ConditionalGibbs, Program, StructureError
from inference.distributions import Missing
from inference.reading import crossed
from inference.reading.crossed import (
    Components,
    Crossed,
    Side,
    hold,
    predictor,
    read_crossed,
    respond,
)
from tests.inference.crossed import (
    BOOK,
    EDITS,
    NOTES,
    READER,
    REFUSED,
    RNG,
    STARS,
    shelves,
    shop,
    small,
)

pytestmark = pytest.mark.usefixtures("x64", "numpyro_promotion")

READERS, BOOKS = (
    Side("reader", 6, "reader", ("taste", "mood")),
    Side("book", 5, "book", ("tone", "fame")),
)
TOPICS = Components("read", "force", ("taste", "tone"))
WHOLE = Crossed(
    "stars",
    ("reader", "book", "stars"),
    (READERS, BOOKS),
    TOPICS,
    ("level",),
    ((READERS, 3, 3), (BOOKS, 3, 3)),
)


def read(program):
    return read_crossed(program, random.key(0))


# What is found.

FEATURES = {"row_features": RNG.normal(size=(6, 2)), "column_features": RNG.normal(size=(5, 1))}
BSVD = {
    "gaussian": lambda: small(),
    "ordered": lambda: small("ordered"),
    "binomial": lambda: small("binomial"),
    "learned factors": lambda: small("binomial", learn_factors=True),
    "features": lambda: small(**FEATURES),
    "one component": lambda: small(num_components=1),
}


SLOW = ("ordered", "learned factors", "one component", "binomial", "features")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in BSVD]
)
def test_the_zoos_model_is_read_whatever_its_options(name):
    program = BSVD[name]()
    rows, columns = (
        Side("row", 6, "row", ("u", "row_weights")),
        Side("column", 5, "column", ("v", "column_weights")),
    )
    width = program.sites["s"].shape[0]
    levels = (rows, width, width), (columns, width, width)
    found = read(program)
    assert found == Crossed(
        "y",
        found.by_entry,
        (rows, columns),
        Components("z", "s", ("u", "v")),
        ("intercept",),
        levels,
    )
    assert set(found.by_entry) == {"row", "column", "value"} | (
        {"trials"} if "trials" in program.arguments else set()
    )


@pytest.mark.slow
def test_a_known_intercept_is_no_shared_site():
    found = read(small(intercept=0.5))
    assert (found.shared, found.intercepts) == ((), ())


@pytest.mark.slow
def test_names_mean_nothing():
    assert read(shop()) == WHOLE


@pytest.mark.slow
def test_neither_does_the_order_of_the_arguments():
    def swapped(told, book, stars, reader):
        return shelves(reader, book, stars)

    assert read(Program(swapped, 3, BOOK, STARS, reader=READER)).sides == (READERS, BOOKS)


NORMAL = dist.Normal(0.0, 1.0)


def effects(
    reader,
    book,
    stars,
    *,
    size=None,
    level=NORMAL,
    fame=NORMAL,
    bent=lambda mean: mean,
    more=lambda: None,
):
    """Only an effect of each reader and of each book."""
    level = numpyro.sample("level", level) if level else 0.5
    with numpyro.plate("reader", 6):
        mood = numpyro.sample("mood", NORMAL)
    with numpyro.plate("book", 5):
        fame = numpyro.sample("fame", fame)
    more()
    with numpyro.plate("rating", size or len(reader)):
        numpyro.sample(
            "stars", dist.Normal(bent(level + mood[reader] + fame[book]), 0.5), obs=stars
        )


def few(**edits):
    return Program(partial(effects, **edits), READER, BOOK, STARS)


@pytest.mark.slow
def test_without_components_rows_and_columns_are_left():
    sides = Side("reader", 6, "reader", ("mood",)), Side("book", 5, "book", ("fame",))
    levels = (sides[0], 0, 0), (sides[1], 0, 0)
    assert read(few()) == Crossed(
        "stars", ("reader", "book", "stars"), sides, None, ("level",), levels
    )


def test_without_shared_sites_rows_and_columns_are_left():
    found = read(few(level=None))
    assert (found.shared, found.intercepts) == ((), ())


@pytest.mark.slow
def test_features_of_entries_have_shared_coefficients():
    found = read(shop(NOTES))
    assert found.by_entry == ("reader", "book", "stars", "notes")
    assert found.shared == ("level", "slope")
    assert found.intercepts == WHOLE.intercepts


@pytest.mark.slow
def test_a_feature_that_is_one_at_first_is_no_level():
    assert read(shop(NOTES, level=None)).intercepts == ()


FOUND = {
    "no amplitudes": (None, ("level",)),
    "shared amplitudes": (None, ("force", "level")),
    "amplitudes of either sign": (TOPICS, ("level",)),
    "switches of their own": (TOPICS, ("level",)),
    "half is masked": (TOPICS, ("level",)),
    "watched amplitudes": (TOPICS, ("level",)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUND)
def test_an_edit_is_followed(name):
    found = read(shop(**EDITS[name]))
    assert (found.components, found.shared) == FOUND[name]
    assert found.sides == (READERS, BOOKS)


@pytest.mark.slow
def test_a_table_that_is_as_long_as_the_entries_is_not_theirs():
    k = {
        "row": READER[:6],
        "column": BOOK[:6],
        "value": STARS[:6],
        "row_features": RNG.normal(size=(6, 2)),
    }
    found = read(Program(small().model, **k, shape=(6, 5), num_components=2))
    assert found.sides[0].sites == ("u", "row_weights")


# What is refused.


def test_factors_that_are_vectors_are_refused():
    def vectors(reader, book, stars):
        with numpyro.plate("topic", 3):
            weight = numpyro.sample("read", dist.Bernoulli(0.5)) * numpyro.sample(
                "force", dist.HalfNormal(1.0)
            )
        vector = lambda name: numpyro.sample(
            name, dist.Normal(jnp.zeros(3), 1.0).to_event(1), infer={"event_dims": ["topic"]}
        )
        with numpyro.plate("reader", 6):
            taste = vector("taste")
        with numpyro.plate("book", 5):
            tone = vector("tone")
        with numpyro.plate("rating", len(reader)):
            numpyro.sample(
                "stars", dist.Normal((taste[reader] * tone[book]) @ weight, 1.0), obs=stars
            )

    with pytest.raises(StructureError, match="no crossed predictor"):
        read(Program(vectors, READER, BOOK, STARS))


@pytest.mark.slow_after(3)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if "not Normal" in name else ())
        for name in REFUSED
    ],
)
def test_another_model_is_refused(name):
    with pytest.raises(StructureError, match="no crossed predictor"):
        read(shop(**REFUSED[name]))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "name", ["a bent predictor", "factors that are not Normal", "entries counted twice"]
)
def test_it_is_the_proof_that_refuses(name, monkeypatch):
    monkeypatch.setattr(crossed, "_gap", lambda found, wanted: jnp.zeros(()))
    monkeypatch.setattr(crossed, "_gap_of_normal", lambda *given: jnp.zeros(()))
    assert read(shop(**REFUSED[name])).components == TOPICS


def test_rows_beyond_the_last_are_refused():
    with pytest.raises(StructureError, match="no sites and indices have the shapes of one"):
        read(Program(shelves, READER + 1, BOOK, STARS))


def start(program, route="auto", **others):
    kernel = ConditionalGibbs(program.model, route=route)
    kernel.init(random.key(0), 0, None, program.args, others)
    return kernel.reading


def sites_of_families(reading):
    return [site for sites in reading.families for site in sites]


@pytest.mark.slow
def test_the_kernel_takes_the_route_that_it_is_told():
    for route in ("auto", "crossed"):
        assert start(few(), route).route.crossed == read(few())
        assert start(few(), route).families == {}
    each = start(few(), "each")
    assert each.attributes == {"route": "each"}
    assert sites_of_families(each) == ["level", "mood", "fame"]
    with pytest.raises(
        ValueError,
        match=r"route: found 'both', wanted one of \('auto', 'mixture', 'crossed', 'each'\)",
    ):
        ConditionalGibbs(shelves, route="both")


OTHERS = {
    "two observed sites": {"more": lambda: numpyro.sample("other", dist.Normal(0.0, 1.0), obs=1.0)},
    "a factor": {"more": lambda: numpyro.factor("other", 1.0)},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_the_kernel_falls_back_to_one_site_after_the_other(name):
    program = few(**OTHERS[name])
    found = start(program)
    assert (found.route.name, sites_of_families(found)) == ("each", ["level", "mood", "fame"])
    with pytest.raises(StructureError, match="no crossed predictor"):
        start(program, "crossed")


@pytest.mark.slow
def test_the_kernel_falls_back_where_a_model_takes_no_fewer_entries():
    assert start(few(size=20)).route.name == "each"


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("edit", "site"),
    [({"bent": jnp.exp}, "level"), ({"fame": dist.Laplace(0.0, 1.0)}, "fame")],
    ids=["a bent predictor", "effects that are not Normal"],
)
def test_what_no_route_can_draw_is_refused_by_name(edit, site):
    with pytest.raises(StructureError, match=f"site '{site}'.* Give '{site}' to NUTS"):
        start(few(**edit))


@pytest.mark.slow
def test_sites_of_another_kernel_leave_no_crossed_predictor():
    others = {GIBBS_SITES_KWARG: {"fame": jnp.zeros(5)}}
    found = start(few(), **others)
    assert (found.route.name, sites_of_families(found)) == ("each", ["level", "mood"])
    with pytest.raises(
        StructureError,
        match=r"no crossed predictor: its sites \['fame'\] are drawn by another kernel",
    ):
        start(few(), "crossed", **others)


def test_places_of_entries_must_be_those_of_init():
    route = start(few()).route
    assert set(route.data(few())["arguments"]) == {"reader", "book", "stars"}
    with pytest.raises(
        StructureError, match="rows and columns of the entries differ from those at `init`"
    ):
        route.data(few().with_arguments(reader=READER[::-1]))
    with pytest.raises(StructureError, match="rows and columns of the entries are traced"):
        jax.jit(lambda reader: start(Program(effects, reader, BOOK, STARS), "crossed") and 0)(
            READER
        )


# The Normal behind the entries.


def held_terms(shift=0.0):
    program = small("binomial", learn_factors=True)
    values = program.draw_prior(random.key(1))
    held = hold(program, "y", predictor(program, "y", values) + shift)
    moved = {**values, "u": values["u"] + 1.0, "row_precision": values["row_precision"] * 2}
    return (
        program.log_probs(values)["y"],
        held.log_probs(moved)["y"],
        program.log_probs(moved),
        held.log_probs(moved),
    )


@pytest.mark.slow
def test_a_held_model_knows_its_predictor_and_all_else_follows():
    before, after, wanted, found = held_terms()
    np.testing.assert_allclose(after, before, rtol=1e-12)
    for name in set(wanted) - {"y"}:
        np.testing.assert_allclose(found[name], wanted[name], rtol=1e-12)
    assert not np.allclose(held_terms(0.1)[1], before)


@pytest.mark.slow
def test_nothing_of_the_predictor_is_computed_where_it_is_held():
    program = small()
    values = jax.jit(program.draw_prior)(random.key(1))
    assert program.parents["y"] == {
        "z",
        "s",
        "u",
        "v",
        "intercept",
        "row_weights",
        "column_weights",
        "alpha",
    }
    assert hold(
        program, "y", jax.jit(lambda values: predictor(program, "y", values))(values)
    ).parents["y"] == {"alpha"}


def latent_normal(program, values):
    """The latent Normal responses of the entries, and their weights."""

    def of(values):
        site = program.trace(values)["stars"]
        return respond(random.key(0), site["fn"], site["value"])

    return jax.jit(of)(values)


def test_a_missing_entry_weighs_nothing():
    program = shop(link=lambda mean, mood: Missing(dist.Normal(mean, 0.5))).with_arguments(
        stars=np.where(np.arange(20) == 3, np.nan, STARS)
    )
    assert read(program) == WHOLE
    response, weight = latent_normal(program, jax.jit(program.draw_prior)(random.key(1)))
    assert np.isfinite(response).all()
    np.testing.assert_array_equal(weight, np.where(np.arange(20) == 3, 0.0, 4.0))


def test_a_masked_entry_weighs_nothing():
    program = shop(**EDITS["half is masked"])
    values = jax.jit(program.draw_prior)(random.key(1))
    response, weight = latent_normal(program, values)
    np.testing.assert_array_equal(weight, np.where(np.arange(20) % 2 == 0, 4.0, 0.0))
    np.testing.assert_array_equal(response[::2], STARS[::2])
    held = hold(
        program, "stars", jax.jit(lambda values: predictor(program, "stars", values))(values)
    )
    found, wanted = jax.jit(
        lambda values: (held.log_probs(values)["stars"], program.log_probs(values)["stars"])
    )(values)
    np.testing.assert_allclose(found, wanted, rtol=1e-12)
