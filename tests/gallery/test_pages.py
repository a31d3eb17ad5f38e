"""Pages of the gallery run as scripts, with tiny settings, no display and warnings as errors,
and show what their text says.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PAGES = Path(__file__).parents[2] / "gallery" / "pages"
RUN = """  # as `python page`, and then what it drew
import json, runpy, sys
import matplotlib.pyplot as plt

runpy.run_path(sys.argv[1], run_name="__main__")
drawn = []
for number in plt.get_fignums():
    figure = plt.figure(number)
    titles = [figure.get_suptitle(), *(ax.get_title() for ax in figure.axes)]
    figure.savefig(f"{number}.png", dpi=40)
    drawn.append([" ".join(filter(None, titles)), type(figure.get_layout_engine()).__name__])
print(json.dumps(drawn))
"""


QUICK = {"XLA_FLAGS": "--xla_backend_optimization_level=0"}  # most of a small page is compilation


def run(name: str, folder: Path, **changed: str) -> tuple[str, list[list[str]]]:
    """What a page printed, and (titles, layout) of each picture."""
    kept = {key: value for key, value in os.environ.items() if key not in ("ZOO_PAGES", "DISPLAY")}
    environment = kept | {"MPLBACKEND": "Agg"} | changed
    command = [sys.executable, "-W", "error", "-c", RUN, str(PAGES / f"{name}.py")]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    printed, _, drawn = done.stdout.rstrip().rpartition("\n")
    pictures = json.loads(drawn)
    assert len(list(folder.glob("*.png"))) == len(pictures)
    return printed, pictures


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page `trust_a_run`."""
    return run("trust_a_run", tmp_path_factory.mktemp("page"))


# what a page must have printed: that a kernel refused an edit, by the name of what it cannot
# follow, or what it was worth
OF_MODELS = {
    "aclass": "with 'p' ~ Kumaraswamy is not in the table",
    "archipelago": "sites ['where']: found slots whose order counts",
    "augment_reduce": "site 'eps': found Gamma",
    "bsvd_baseball": "site 's': its complete conditional is of no family",
    "bsvd_recovery": "site 's': its complete conditional is of no family",
    "bsvd_ratings": "site 'gaps': its complete conditional is of no family",
    "comparing_models": "groups are worth",
    "iqgme": "site 't': its loc is computed from ['w']",
    "iqgme_factors": "site 'x': it is computed from 'A' (StudentT",
    "iqgme_tasks": "site 't': its loc is computed from ['w']",
    "your_own": "site 'spread': found HalfNormal given nothing",
    "staged_learning": "site 'k': it is latent and discrete",
}


@pytest.mark.parametrize(
    "name", sorted({path.stem for path in PAGES.glob("*.py")} - {"trust_a_run"})
)
def test_a_page_of_a_model_runs_and_a_kernel_refuses_what_it_cannot_follow(name, tmp_path):
    printed, pictures = run(name, tmp_path, **QUICK)
    assert OF_MODELS.get(name, "") in printed  # a model that only NUTS runs has no refusal to show
    assert len(pictures) >= 2
    assert all(title and layout == "ConstrainedLayoutEngine" for title, layout in pictures), (
        pictures
    )


def figures(printed: str, row: str) -> tuple[str, int, float, float]:
    """Conclusion, divergences, E-BFMI and ESS of a row of the page's table."""
    found = re.search(
        rf"^{row} +(trusted|not trusted) +divergences +(\d+) +E-BFMI ([\d.]+) +ESS +(\d+)$",
        printed,
        flags=re.MULTILINE,
    )
    assert found, printed
    return found[1], int(found[2]), float(found[3]), float(found[4])


def test_both_forms_are_one_model(page):
    centred, noncentred = re.search(
        r"log joints: (\S+) centred.*; (\S+) non-centred", page[0]
    ).groups()
    assert float(centred) == pytest.approx(float(noncentred), abs=1e-3)


def test_the_bad_run_is_refused_and_the_good_one_trusted(page):
    conclusion, divergences, energy, draws = figures(page[0], "centred")
    assert conclusion == "not trusted"
    assert divergences > 10
    assert energy < 0.3
    assert draws < 400
    conclusion, divergences, energy, draws = figures(page[0], "non-centred")
    assert conclusion == "trusted"
    assert divergences == 0
    assert energy > 0.5
    assert draws > 800


def test_smaller_steps_do_not_mend_the_bad_run(page):
    assert figures(page[0], "centred, smaller steps")[0] == "not trusted"


def test_the_bad_run_misses_the_neck_of_the_funnel(page):
    bad, good = re.search(r"lies below (\S+) \(bad\), (\S+) \(good\)", page[0]).groups()
    assert float(bad) > 3 * float(good)


def test_the_report_names_what_failed(page):
    bad = page[0].split("BAD\n")[1].split("GOOD\n")[0]
    assert re.search(r"^NOT TRUSTED: .*divergences, E-BFMI\.$", bad, flags=re.MULTILINE)


def test_the_prior_of_tau_is_sensitive_and_the_ranking_is_unsafe(page):
    tau = re.search(r"^tau +([\d.]+) +([\d.]+)", page[0], flags=re.MULTILINE)
    assert float(tau[1]) > 0.05 > float(tau[2])
    assert "schools: ELPD within two standard errors of the best" in page[0]


def test_the_guide_of_the_funnel_is_too_far(page):
    k = dict(
        re.findall(r"^(centred|non-centred): .*Pareto k-hat ([\d.]+)", page[0], flags=re.MULTILINE)
    )
    assert float(k["centred"]) > max(0.7, float(k["non-centred"]))
    assert re.search(r"^centred: not trusted; ", page[0], flags=re.MULTILINE)
    assert re.search(r"^ +yes +ELBO settled", page[0], flags=re.MULTILINE)


def test_calibration_sees_what_the_report_cannot(page):
    mean, right = re.search(
        r"^trusted: tau has mean (\S+), not (\S+)$", page[0], flags=re.MULTILINE
    ).groups()
    assert float(mean) > float(right) + 1
    assert re.search(r"^right sampler: .* PASSED$", page[0], flags=re.MULTILINE)
    assert re.search(r"^wrong sampler: .* FAILED: tau", page[0], flags=re.MULTILINE)


def test_pictures_have_titles_and_do_not_overlap(page):
    assert len(page[1]) == 12
    assert all(title and layout == "ConstrainedLayoutEngine" for title, layout in page[1]), page[1]
