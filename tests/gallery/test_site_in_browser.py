"""The site in a browser: as wide as a telephone and as a screen, light and dark, every page is
shown whole, and can be read.
"""

import json
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
WIDTHS = (390, 1440)
LEAST_CONTRAST = 4.5  # of text with what is behind it, as WCAG asks for text of this size
# where a busy machine starts the browser slowly, its virtual time may be over before the first page
# is there
TRIES = 3
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--enable-logging=stderr",
    "--allow-file-access-from-files",
    "--window-size=1500,900",
)

# A page in a frame of the asked width, one after the other: a window of a headless browser is no
# narrower than 500 pixels.
LOOK = """<!doctype html><html><body><iframe id="frame" height="900" style="border: 0"></iframe><script>
const channels = text => (text.match(/[\\d.]+/g) || []).map(Number);
const light = ([r, g, b]) => [r, g, b].map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
  .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
const behind = (view, node) => {
  for (; node; node = node.parentElement) {
    const [r, g, b, a = 1] = channels(view.getComputedStyle(node).backgroundColor);
    if (a > 0.5) return [r, g, b];
  }
  return [255, 255, 255];
};
const faults = (view, scheme, width) => {
  const page = view.document, found = [];
  const over = page.documentElement.scrollWidth - width;
  if (over > 0) found.push(`${over} pixels too wide`);
  for (const image of page.images) {
    if (image.complete && image.naturalWidth === 0) found.push(`picture ${image.getAttribute("src")} is broken`);
  }
  for (const node of page.querySelectorAll("div.math")) {
    if (node.scrollHeight > node.clientHeight) found.push(`formula "${node.textContent.trim().slice(0, 20)}" is higher than its place`);
  }
  for (const node of page.querySelectorAll("article *")) {
    const says = [...node.childNodes].some(part => part.nodeType === 3 && part.data.trim());
    if (!says || !node.checkVisibility({opacityProperty: true, visibilityProperty: true})) continue;
    const a = light(channels(view.getComputedStyle(node).color)), b = light(behind(view, node));
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < LEAST) found.push(`${node.tagName} ${node.className} "${node.textContent.trim().slice(0, 20)}": ${contrast.toFixed(2)}`);
  }
  return found;
};
const frame = document.getElementById("frame");
const shown = (path, width) => new Promise(done => { frame.onload = done; frame.width = width; frame.src = path; });
(async () => {
  const looked = {};
  for (const path of PAGES) for (const width of WIDTHS) {
    await shown(path, width);
    for (const image of frame.contentDocument.images) image.loading = "eager";
    await Promise.all([...frame.contentDocument.images].map(image => image.decode().catch(() => 0)));
    for (const scheme of ["light", "dark"]) {
      frame.contentDocument.body.dataset.theme = scheme;
      looked[`${path}, ${width}, ${scheme}`] = [...new Set(faults(frame.contentWindow, scheme, width))];
    }
  }
  document.body.innerHTML = "<pre id=looked></pre>";
  document.getElementById("looked").textContent = JSON.stringify(looked);
})();
</script></body></html>"""


def look(folder: Path, paths: list[Path]) -> tuple[dict[str, list[str]], list[str]]:
    """What is wrong with each page at each width and in each scheme, and what the console says."""
    names = [str(path.relative_to(folder)) for path in paths]
    text = (
        LOOK.replace("LEAST", str(LEAST_CONTRAST))
        .replace("PAGES", json.dumps(names))
        .replace("WIDTHS", str(list(WIDTHS)))
    )
    (folder / "look.html").write_text(text)
    command = [
        CHROMIUM,
        *OPTIONS,
        "--virtual-time-budget=100000000",
        "--dump-dom",
        (folder / "look.html").as_uri(),
    ]
    for _ in range(TRIES):
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
        if found := done.stdout.partition('id="looked">')[2].partition("</pre>")[0]:
            break
    assert found, "nothing was measured"
    return json.loads(unescape(found)), [
        line for line in done.stderr.splitlines() if "CONSOLE" in line
    ]


@pytest.fixture
def shown(site, tmp_path):
    return shutil.copytree(site, tmp_path / "site")


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here"),
]


def test_every_page_can_be_read(shown):
    paths = sorted(shown.rglob("*.html"))
    looked, complaints = look(shown, paths)
    assert len(looked) == 4 * len(paths)
    assert {where: what for where, what in looked.items() if what} == {}
    assert complaints == []


@pytest.mark.parametrize(
    ("planted", "seen"),
    [
        ('<img src="nowhere.png" alt="x">', "picture nowhere.png is broken"),
        ('<p style="color: #eee; background: #fff">pale</p>', '"pale"'),
        ('<p style="width: 2000px">wide</p>', "pixels too wide"),
        ('<div class="math" style="height: 5px">x</div>', "higher than its place"),
        ("<script>nothing.there()</script>", "nothing is not defined"),
    ],
)
def test_a_fault_would_be_seen(shown, planted, seen):
    path = shown / "install.html"
    path.write_text(path.read_text().replace("</article>", f"{planted}</article>"))
    looked, complaints = look(shown, [path])
    assert any(
        seen in word
        for word in [*complaints, *(word for words in looked.values() for word in words)]
    )
