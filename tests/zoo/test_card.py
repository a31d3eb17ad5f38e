"""A card that is complete, and a registry that finds models by their files."""

import subprocess
import sys

import pytest

import zoo
from zoo import Card, aclass

GOOD = {"title": "A title", "paper": "Someone (2000), Somewhere", "sites": {"mu": "the mean"}}


def test_card_is_kept_as_given_and_cannot_be_changed():
    card = Card(**GOOD, edits=("try this",))
    assert (card.title, card.kernels, card.edits) == ("A title", ("NUTS",), ("try this",))
    with pytest.raises(AttributeError):
        card.title = "another"


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"title": " "}, ValueError, "Card title: it is empty"),
        ({"paper": ""}, ValueError, "Card paper: it is empty"),
        ({"title": 3}, TypeError, "Card title: found int"),
        ({"sites": {}}, ValueError, "Card sites: none"),
        ({"sites": {"mu": ""}}, ValueError, "no words for 'mu'"),
        ({"kernels": ()}, ValueError, "Card kernels: none"),
        ({"data": "wine"}, TypeError, r"Card data: found 'wine', wanted a tuple"),
        ({"edits": ("",)}, TypeError, "Card edits"),
        ({"doi": "https://doi.org/10.1/2"}, ValueError, "the bare DOI"),
    ],
)
def test_incomplete_card_is_refused(change, error, message):
    with pytest.raises(error, match=message):
        Card(**GOOD | change)


@pytest.mark.parametrize("name", zoo.names())
def test_each_model_of_the_zoo_is_complete(name):
    entry = zoo.load(name)
    assert entry.name == name
    assert entry.model.__name__ == name
    assert callable(entry.simulate)
    assert isinstance(entry.card, Card)


def test_names_are_found_by_file_and_the_card_is_none_of_them(tmp_path, monkeypatch):
    for file in ("card.py", "_helper.py", "second.py", "first.py"):
        (tmp_path / file).write_text("")
    monkeypatch.setattr(zoo, "__path__", [str(tmp_path)])
    assert zoo.names() == ("first", "second")


def test_load_names_close_matches(tmp_path, monkeypatch):
    (tmp_path / "archipelago.py").write_text("")
    monkeypatch.setattr(zoo, "__path__", [str(tmp_path)])
    with pytest.raises(ValueError, match="no model 'archipelgo'; did you mean 'archipelago'"):
        zoo.load("archipelgo")


def test_module_without_its_parts_is_refused(tmp_path, monkeypatch):
    (tmp_path / "unfinished.py").write_text("def unfinished(): pass\n")
    monkeypatch.setattr(zoo, "__path__", [str(tmp_path)])
    with pytest.raises(ValueError, match=r"zoo\.unfinished defines no CARD, simulate"):
        zoo.load("unfinished")
    sys.modules.pop("zoo.unfinished")


def test_entry_of_a_module():
    entry = zoo.Entry.of(aclass)
    assert (entry.name, entry.model, entry.simulate, entry.card) == (
        "aclass",
        aclass.aclass,
        aclass.simulate,
        aclass.CARD,
    )


def test_import_of_the_zoo_and_its_names_imports_no_jax():
    code = (
        "import sys, zoo; zoo.names(); print(sorted({'jax', 'numpyro', 'numpy'} & "
        "set(sys.modules)))"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )
