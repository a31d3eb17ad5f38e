"""What has been compiled in this process, by the text of the program; and room for more.

Runs on other data of the same shapes are the same program where the data are its arguments, and need not be compiled again. The text of a
program, StableHLO, has every constant in full, and no name, address or line number.

JAX keeps the code of thousands of programs, each in some hundred maps of memory, of which Linux gives a process 65 530: a process of a
hundred fits would die without a word.
"""

from hashlib import sha256
from pathlib import Path
from typing import Any

import jax

__all__ = ["built", "make_room"]

BUILT: dict[Any, Any] = {}
MOST_BUILT = 32
MAPS, MOST_MAPS = Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count")  # of Linux; others have no such limit


def built(lowered: Any, options: dict[str, Any] | None) -> Any:
    """Compiled with the compiler's options, or what the same program was compiled to. It must have been jitted with `keep_unused`: from
    the text one could not tell which of its arguments were left out."""
    text = sha256(lowered.as_text().encode()).digest()
    key = text, lowered.in_tree, lowered.out_tree, str(options), jax.config.jax_default_device
    BUILT[key] = BUILT.pop(key, None) or lowered.compile(compiler_options=options)
    if len(BUILT) > MOST_BUILT:
        del BUILT[next(iter(BUILT))]  # the one that was not asked for the longest
    return BUILT[key]


def make_room() -> None:
    """Lets go of JAX's compiled code where it has taken half of the maps of memory that the process may have."""
    if MAPS.exists() and 2 * MAPS.read_bytes().count(b"\n") > int(MOST_MAPS.read_text()):
        jax.clear_caches()
