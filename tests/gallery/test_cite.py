"""What to cite: of each model and kernel, once, and nothing that was not used."""

import re

import pytest
import xarray as xr

import inference
import zoo
from gallery.cli import main
from gallery.commands.citations import SOFTWARE, citations
from gallery.commands.reports import bibtex_entries

KEY = re.compile(r"@\w+\{(\w+),")


def run_of(model, kernel):
    tree = xr.DataTree.from_dict(
        {"posterior": xr.Dataset({"rate": (("chain", "draw"), [[0.1, 0.2]])})}
    )
    tree.attrs |= {"model": model, "kernel": kernel}
    return tree


def keys(model, kernel):
    return [KEY.search(entry)[1] for entry in bibtex_entries(run_of(model, kernel))]


@pytest.mark.parametrize(
    ("model", "kernel", "wanted"),
    [
        ("aclass", "ParticleFilter", ["mansinghka2007aclass", "fearnhead2004particle"]),
        ("aclass", "CollapsedGibbs", ["mansinghka2007aclass", "neal2000markov"]),
        ("bsvd", "Gibbs(ConditionalGibbs, NUTS)", ["wang2010incomplete", "hoffman2014nuts"]),
        (
            "archipelago",
            "Gibbs(LatentHistory, NUTS)",
            ["adams2009archipelago", "murray2010elliptical", "murray2010slice", "hoffman2014nuts"],
        ),
        ("iqgme", "CoordinateAscent", ["wang2010incomplete", "blei2006variational"]),
    ],
    ids=["filter", "gibbs", "composed", "history", "ascent"],
)
def test_model_and_kernels_are_cited_once_and_nothing_else(model, kernel, wanted):
    assert keys(model, kernel) == [*wanted, "phan2019composable", "kumar2019arviz"]


def test_a_key_means_one_entry_wherever_it_stands():
    """A paper may be that of a model and of a kernel."""
    cards = [zoo.load(name).card.bibtex for name in zoo.names()]
    every = {
        *filter(None, cards),
        *SOFTWARE,
        *(entry for name in inference.__all__ for entry in citations(name)),
    }
    found = [KEY.search(entry)[1] for entry in every]
    assert len(set(found)) == len(found)
    assert all(entry.count("{") == entry.count("}") for entry in every)


def test_a_saved_run_is_cited(tmp_path, capsys):
    run_of("bsvd", "ConditionalGibbs").to_netcdf(tmp_path / "run.nc", engine="h5netcdf")
    assert main(["cite", str(tmp_path / "run.nc")]) == 0
    out = capsys.readouterr().out
    assert "kernel ConditionalGibbs" in out
    assert "@phdthesis{wang2010incomplete," in out


def test_a_model_that_is_not_of_the_zoo_is_refused_by_name(tmp_path, capsys):
    run_of("bsdv", "NUTS").to_netcdf(tmp_path / "run.nc", engine="h5netcdf")
    assert main(["cite", str(tmp_path / "run.nc")]) == 2
    assert "did you mean 'bsvd'" in capsys.readouterr().err
