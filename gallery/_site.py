"""The site of the gallery: Sphinx's configuration, cards of the models, formulas as MathML.

A page is a script in `gallery/pages`, in percent format. The name of a page about a model begins
with the name of the model. The texts around the pages are in `gallery/pages/text`. The site needs
no internet, neither to be built nor to be read.
"""

import inspect
import re
import shutil
from pathlib import Path
from typing import Any

import zoo

__all__ = ["CONFIG", "PAGES", "cards", "pages_of", "prepare", "setup"]

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "gallery" / "pages"

CONFIG: dict[str, Any] = {
    "project": "A zoo of Bayesian models",
    "copyright": "the authors of the model zoo, Apache 2.0",
    "extensions": [
        "sphinx.ext.autodoc",
        "sphinx.ext.napoleon",
        "sphinx_gallery.gen_gallery",
        "gallery._site",
    ],
    "napoleon_numpy_docstring": True,
    "html_theme": "furo",
    "html_title": "A zoo of Bayesian models",
    "html_show_sourcelink": False,
    "html_copy_source": False,
    "html_math_renderer": "mathml",
    "html_css_files": ["zoo.css"],
    "html_static_path": ["_static"],
    "default_role": "code",  # single backticks are code in this project's docstrings
    "autodoc_member_order": "bysource",
    "autodoc_typehints": "none",
    "autodoc_use_type_comments": False,  # it stumbles over named tuples
    "exclude_patterns": ["**/GALLERY_HEADER.rst"],
    "sphinx_gallery_conf": {
        "examples_dirs": [str(PAGES)],
        "gallery_dirs": ["pages"],
        "filename_pattern": r"\.py$",
        "ignore_pattern": r"__init__\.py",
        "download_all_examples": False,
        "show_signature": False,
        "plot_gallery": "True",
        "remove_config_comments": True,
        "image_scrapers": ("matplotlib",),
        "matplotlib_animations": False,
        "within_subsection_order": "FileNameSortKey",
        "min_reported_time": 1,
        "abort_on_example_error": True,
        "nested_sections": False,
        "capture_repr": (),
        "write_computation_times": False,
    },
}


def prepare(folder: Path) -> None:
    """Copy the texts, cards and sessions to the folder that Sphinx reads."""
    shutil.copytree(PAGES / "text", folder)
    (folder / "cards.txt").write_text(cards())
    (folder / "sessions.txt").write_text(sessions())


def pages_of(model: str) -> list[str]:
    """Return the names of the pages about a model.

    A page is about the model with the longest name that the name of the page begins with.
    """
    names = sorted(path.stem for path in PAGES.glob("*.py"))
    owner = lambda page: max(
        (name for name in zoo.names() if page == name or page.startswith(f"{name}_")),
        key=len,
        default=None,
    )
    return [name for name in names if owner(name) == model]


def cards() -> str:
    """Return a card for each model as reStructuredText, with a thumbnail of its first page."""
    lines = [".. container:: zoo-cards", ""]
    for name in zoo.names():
        card = zoo.load(name).card
        lines += ["   .. container:: zoo-card", ""]
        for page in pages_of(name)[:1]:
            thumbnail = f"/pages/images/thumb/sphx_glr_{page}_thumb.png"
            lines += [
                f"      .. image:: {thumbnail}",
                f"         :alt: First picture of the page {page}",
                f"         :target: pages/{page}.html",
                "",
            ]
        links = (
            ", ".join(f":doc:`{page.replace('_', ' ')} <pages/{page}>`" for page in pages_of(name))
            or "no page yet"
        )
        lines += [
            f"      **{name}: {card.title}**",
            "",
            f"      {card.paper}",
            "",
            f"      Kernels: {', '.join(card.kernels)}. Pages: {links}.",
            "",
        ]
    return "\n".join(lines)


def sessions() -> str:
    """Return a section for each session that `test_sessions.py` recorded, named as its model."""
    shown = lambda name: (
        f"{name}\n{'-' * len(name)}\n\n.. literalinclude:: sessions/{name}.txt\n   :language: "
        "console\n"
    )
    folder = PAGES / "text" / "sessions"
    return "\n".join(map(shown, sorted(path.stem for path in folder.iterdir())))


# Sphinx calls the functions below.


def setup(app: Any) -> dict[str, Any]:
    """Register formulas, docstrings, and the directive `model-source`."""
    app.add_html_math_renderer("mathml", (_visit_inline, None), (_visit_block, None))
    app.connect("autodoc-process-docstring", lambda *given: _literal_blocks(given[-1]))
    app.connect(
        "autodoc-skip-member", lambda _app, _what, name, *_: True if _is_routing(name) else None
    )
    app.add_directive("model-source", _model_source())
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _visit_inline(translator: Any, node: Any) -> None:
    _visit(translator, node, "inline")


def _visit_block(translator: Any, node: Any) -> None:
    _visit(translator, node, "block")


def _visit(translator: Any, node: Any, display: str) -> None:
    from docutils.nodes import SkipNode
    from latex2mathml.converter import convert

    formula = convert(node.astext(), display=display)
    translator.body.append(formula if display == "inline" else f'<div class="math">{formula}</div>')
    raise SkipNode


def _is_routing(name: str) -> bool:
    """Whether a method is one that scikit-learn adds to every estimator."""
    return name == "get_metadata_routing" or (name.startswith("set_") and name.endswith("_request"))


def _literal_blocks(lines: list[str]) -> None:
    """Mark indented paragraphs of docstrings as code; they are never quotations here."""
    found, is_block = [], False
    for i, line in enumerate(lines):
        is_indented = line.startswith("    ")
        starts = (
            is_indented
            and not is_block
            and (i == 0 or not lines[i - 1].strip())
            and _is_prose(lines[: i - 1])
        )
        if starts:
            found += ["::", ""]
        is_block = starts or (is_block and (is_indented or not line.strip()))
        found.append(line)
    lines[:] = found


def _is_prose(before: list[str]) -> bool:
    """Whether the last line without indentation is neither a field nor a list item."""
    flush = [line for line in before if line.strip() and not line.startswith(" ")]
    return not flush or not re.match(r":\w+.*:|[-*] |\d+\. |\.\. ", flush[-1])


def _model_source() -> type:
    from docutils import nodes
    from docutils.parsers.rst import Directive

    class ModelSource(Directive):
        """The current source of a function or class, such as `zoo.aclass.aclass`."""

        required_arguments = 1

        def run(self) -> list[nodes.Node]:
            import importlib

            module, _, name = self.arguments[0].rpartition(".")
            source = inspect.getsource(getattr(importlib.import_module(module), name))
            return [nodes.literal_block(source, source, language="python")]

    return ModelSource
