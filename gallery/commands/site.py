"""`zoo gallery build` and `zoo gallery open`: the pages of the gallery as a site."""

import os
import shutil
import subprocess
import sys
import webbrowser
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

__all__ = ["build", "open_site"]

SITE = Path(__file__).parents[1] / "site"
BUILD = """
import logging, sys
from pathlib import Path
from sphinx.application import Sphinx
from gallery._site import CONFIG, prepare

work, output, runs = sys.argv[1:]
for name in ("arviz", "arviz_stats"):  # Sphinx prints what others only note
    logging.getLogger(name).setLevel(logging.WARNING)
CONFIG["sphinx_gallery_conf"]["plot_gallery"] = runs
prepare(Path(work, "source"))
folders = f"{work}/source", None, output, f"{work}/doctrees"
app = Sphinx(*folders, "html", confoverrides=CONFIG, warningiserror=True)
app.build()
sys.exit(app.statuscode)
"""


def build(args: Any) -> int:
    """Run the pages and render the site; always all of it, for pages depend on all code."""
    _check_sphinx()
    folder = Path(args.output or SITE).resolve()
    if folder.exists():
        if any(folder.iterdir()) and not (folder / "objects.inv").exists():
            raise ValueError(
                f"-o: {folder} holds other files; name a new folder, or that of an earlier site."
            )
        shutil.rmtree(folder)
    environment = dict(os.environ, MPLBACKEND="Agg")
    environment.pop("ZOO_PAGES", None)
    if args.full:
        environment["ZOO_PAGES"] = "full"
    with TemporaryDirectory() as work:
        command = [sys.executable, "-c", BUILD, work, str(folder), str(not args.no_run)]
        code = subprocess.run(command, env=environment, check=False).returncode
    if code:
        raise RuntimeError(
            f"the site was not built; what is wrong stands above. {folder} may be incomplete."
        )
    print(f"built {folder / 'index.html'}")
    return 0


def open_site(args: Any) -> int:
    """Show the site in a browser."""
    index = Path(args.output or SITE).resolve() / "index.html"
    if not index.exists():
        raise ValueError(f"{index} is not there; first: zoo gallery build")
    if not webbrowser.open(index.as_uri()):
        raise ValueError(f"found no browser; open {index}")
    return 0


def _check_sphinx() -> None:
    from importlib.util import find_spec

    missing = [
        name
        for name in ("sphinx", "sphinx_gallery", "furo", "latex2mathml")
        if find_spec(name) is None
    ]
    if missing:
        raise ValueError(
            f"{', '.join(missing)} missing: they come with `uv run`, or with pip install -e "
            "'.[docs]'."
        )
