"""`zoo cite`: BibTeX of what a run has used."""

from typing import Any

import xarray as xr

from gallery.commands.models import find_model
from gallery.commands.runs import open_run

__all__ = ["cite", "entries_of"]


def cite(args: Any) -> int:
    """The model's paper, those of its kernels, NumPyro and ArviZ; what is outside of an entry
    BibTeX passes over.
    """
    tree = open_run(args.run)
    print(
        f"% Model {tree.attrs.get('model')}, kernel {tree.attrs.get('kernel')}, on "
        f"{tree.attrs.get('data', 'data of your own')}.\n"
    )
    print("\n\n".join(entries_of(tree)))
    return 0


def entries_of(tree: xr.DataTree) -> list[str]:
    """Each once, the model's first."""
    from inference.run.citations import SOFTWARE, citations

    own = find_model(str(tree.attrs.get("model"))).card.bibtex
    return list(
        dict.fromkeys(
            [*filter(None, [own]), *citations(str(tree.attrs.get("kernel", ""))), *SOFTWARE]
        )
    )
