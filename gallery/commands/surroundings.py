"""What a command runs in: libraries that keep quiet, and compiled programs that are kept for the
next time.
"""

import logging
import os
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["cache_folder", "prepared"]

SHORTEST_COMPILATION = 0.1  # seconds; what compiles faster is not kept


@contextmanager
def prepared(debug: bool, compile_cache: bool) -> Generator[None]:
    """Set up before JAX is imported. A cache folder that JAX's own variable names is left to it."""
    import pooch

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # XLA's own log
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", str(SHORTEST_COMPILATION))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "0")
    if not compile_cache:
        os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    elif "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(cache_folder())
    with warnings.catch_warnings():
        if not debug:
            warnings.simplefilter("ignore")
            logging.getLogger("jax").setLevel(logging.ERROR)
            pooch.get_logger().setLevel(logging.ERROR)  # it tells of each download
        yield


def cache_folder() -> Path:
    """The user's cache folder for compiled programs; it may be deleted at any time."""
    import pooch

    return Path(pooch.os_cache("bayes-model-zoo")) / "compiled"
