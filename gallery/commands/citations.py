"""What to cite, as BibTeX entries.

The papers of a kernel stand beside its module, in `kernel.bib` of its folder or in a file of the
module's own name; those of NumPyro and ArviZ in `gallery/software.bib`.
"""

import re
from pathlib import Path

from gallery.commands.kernels import module_file

__all__ = ["SOFTWARE", "citations"]


def _entries(path: Path) -> tuple[str, ...]:
    return tuple(re.split(r"\n\n(?=@)", path.read_text(encoding="utf-8").strip()))


_NUMPYRO, _ARVIZ, _NUTS, _SVI = _entries(Path(__file__).parents[1] / "software.bib")
SOFTWARE = (_NUMPYRO, _ARVIZ)  # which every run uses
_OF_NUMPYRO = {"NUTS": (_NUTS,), "SVI": (_SVI,)}


def citations(kernel: str) -> tuple[str, ...]:
    """Return the entries of a kernel, or of each kernel in a composed one, without repetitions.

    Args:
        kernel: its name, as in a run's `attrs["kernel"]`, such as `"Gibbs(LatentHistory, NUTS)"`.
    """
    found = [entry for name in re.findall(r"\w+", kernel) for entry in _of(name)]
    return tuple(dict.fromkeys(found))


def _of(name: str) -> tuple[str, ...]:
    module = module_file(name)
    if name in _OF_NUMPYRO or module is None:
        return _OF_NUMPYRO.get(name, ())
    own = (module.with_suffix(".bib"), module.with_name("kernel.bib"))
    return next((_entries(path) for path in own if path.exists()), ())
