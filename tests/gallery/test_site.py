"""The site: it is built without a warning, and every link in it resolves."""

import shutil
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import zoo
from gallery._site import PAGES, _literal_blocks, cards, pages_of
from gallery.cli import main


class Links(HTMLParser):
    """What a page points at, and the places in it that can be pointed at."""

    def __init__(self, text: str):
        super().__init__()
        self.targets, self.places, self.unlabelled = [], set(), []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        told = dict(attrs)
        self.targets += [told[name] for name in ("href", "src") if told.get(name)]
        self.places |= {told[name] for name in ("id", "name") if told.get(name)}
        if tag == "img" and told.get("alt") is None:  # "" is for decoration
            self.unlabelled.append(told.get("src"))


def broken(folder: Path) -> list[str]:
    """Links within the site that lead nowhere, and pictures without words."""
    pages = {path: Links(path.read_text()) for path in folder.rglob("*.html")}
    found = [
        f"{path.name}: {src} has no alt text"
        for path, links in pages.items()
        for src in links.unlabelled
    ]
    for path, links in pages.items():
        for target in links.targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            there = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            is_place = (
                not parts.fragment
                or there not in pages
                or unquote(parts.fragment) in pages[there].places
            )
            if not there.exists() or not is_place:
                found.append(f"{path.relative_to(folder)}: {target}")
    return found


def test_every_page_is_there_and_every_link_resolves(site):
    assert {path.stem for path in (site / "pages").glob("*.html")} >= {
        path.stem for path in PAGES.glob("*.py")
    }
    assert not broken(site)


def test_a_broken_link_would_be_seen(site, tmp_path):
    shutil.copytree(site, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "install.html"
    path.write_text(
        path.read_text().replace(
            "</body>", '<a href="nowhere.html">x</a><img src="index.html"></body>'
        )
    )
    assert len(broken(tmp_path)) == 2


def test_no_page_asks_for_another_machine(site):
    """It is read offline: fonts, scripts and formulas are its own."""
    for path in site.rglob("*.html"):
        text = path.read_text()
        assert not [
            line
            for line in text.splitlines()
            if ("<script" in line or "<link" in line) and "://" in line
        ], path


def test_the_reference_knows_every_estimator(site):
    import gallery

    assert not [
        name
        for name in gallery.__all__
        if f'id="gallery.{name}"' not in (site / "api.html").read_text()
    ]


def test_formulas_are_mathml(site):
    assert "<math" in (site / "pages" / "aclass.html").read_text()


def test_each_page_is_of_the_model_that_its_name_begins_with():
    assert pages_of("aclass") == ["aclass"]
    assert all("trust_a_run" not in pages_of(name) for name in zoo.names())


def test_every_model_has_a_card_a_page_and_a_place_on_the_landing_page(site):
    landing, written = (site / "index.html").read_text(), cards()
    for name in zoo.names():
        assert f"**{name}: {zoo.load(name).card.title}**" in written
        pages = pages_of(name)
        assert pages, (
            f"zoo/{name}.py has no page: write gallery/pages/{name}.py, or one whose name begins so"
        )
        assert all(f"pages/{page}.html" in landing for page in pages)


def test_an_indented_paragraph_is_code_unless_it_belongs_to_a_field_or_a_list():
    lines = [
        "Words:",
        "",
        "    x = 1",
        "",
        "    y = 2",
        "",
        "More.",
        ":param x: words",
        "",
        "    of x",
    ]
    _literal_blocks(lines)
    assert lines == [
        "Words:",
        "",
        "::",
        "",
        "    x = 1",
        "",
        "    y = 2",
        "",
        "More.",
        ":param x: words",
        "",
        "    of x",
    ]


def test_a_folder_of_other_files_is_left_alone(tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("mine")
    assert main(["gallery", "build", "-o", str(tmp_path)]) == 2
    assert "holds other files" in capsys.readouterr().err


def test_a_site_that_is_not_there_is_not_opened(tmp_path, capsys):
    assert main(["gallery", "open", "-o", str(tmp_path / "site")]) == 2
    assert "first: zoo gallery build" in capsys.readouterr().err
