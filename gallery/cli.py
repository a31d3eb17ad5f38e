"""The command `zoo`: fit a model to data, look at the run, predict, without writing Python.

Nothing heavy is imported here, so that `zoo --help` answers at once. Each command lives in
`gallery.commands`.
"""

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

__all__ = ["main"]

EXAMPLES = """examples:
  zoo fit aclass --data wine -o wine.nc --plot wine.png
  zoo fit aclass --data patients.csv --target outcome --option num_samples=2000 num_chains=4
  zoo report wine.nc
  zoo predict wine.nc new.csv -o classes.csv
"""


class _CommandError(Exception):
    """A command line that cannot be read."""


class _Parser(argparse.ArgumentParser):
    """Raises an error where argparse would print its usage and exit."""

    def __init__(self, **settings):
        super().__init__(**settings, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Raise an error that `main` prints in one line."""
        raise _CommandError(f"{message} (see {self.prog} --help)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: the command line; None for that of the process.

    Returns:
        The exit code: 0, 1 for a run that is not trusted, 2 for an error, 130 and 143 for signals.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    debug = "--debug" in arguments
    try:
        args = _parser().parse_args(arguments)
        if "command" not in args:
            _parser().print_help()
            return 0
        return _run(args)
    except KeyboardInterrupt:
        print("zoo: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `zoo ... | head`
        # what is left in the buffer goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        if debug:
            raise
        print(f"zoo: {_one_line(error)}", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace) -> int:
    import importlib

    module, _, function = args.command.partition(":")
    _set_jax_variables(keeps_programs=not getattr(args, "no_compile_cache", False))
    with _quiet_libraries(is_debug=getattr(args, "debug", False)):
        code = getattr(importlib.import_module(f"gallery.commands.{module}"), function)(args)
        sys.stdout.flush()
        return code


def _set_jax_variables(keeps_programs: bool) -> None:
    """Runs before JAX is imported; a compilation cache that the user has set up stays as it is."""
    import pooch

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # XLA's own log
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "0")
    if keeps_programs:
        folder = Path(pooch.os_cache("bayes-model-zoo")) / "compiled"
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder))
    else:
        os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"


@contextmanager
def _quiet_libraries(is_debug: bool) -> Generator[None]:
    import pooch

    with warnings.catch_warnings():
        if not is_debug:
            warnings.simplefilter("ignore")
            logging.getLogger("jax").setLevel(logging.ERROR)
            pooch.get_logger().setLevel(logging.ERROR)  # it logs each download
        yield


def _one_line(error: Exception) -> str:
    """An error as one line; unexpected errors with their type."""
    if isinstance(error, OSError) and error.strerror and error.filename:
        text = f"{error.filename}: {error.strerror}"
    elif isinstance(error, ValueError | OSError | _CommandError):
        text = str(error) or type(error).__name__
    else:
        text = f"{type(error).__name__}: {error} (--debug shows where)"
    notes = [
        note
        for note in getattr(error, "__notes__", ())
        if "JAX has removed its internal frames" not in note
    ]
    return " ".join("; ".join([text, *notes]).split())


def _seed(text: str) -> int:
    """Refuse a seed that JAX does not take."""
    try:
        seed = int(text)
    except ValueError:
        seed = -1
    if not 0 <= seed < 2**63:
        raise argparse.ArgumentTypeError(
            f"wanted a whole number from 0 to 2**63 - 1, found {text!r}"
        )
    return seed


def _parser() -> _Parser:
    common = _Parser(add_help=False, argument_default=argparse.SUPPRESS)
    common.add_argument(
        "--debug",
        action="store_true",
        help="show the traceback of an error, and the warnings of libraries",
    )
    common.add_argument(
        "--no-compile-cache",
        action="store_true",
        help="do not keep compiled programs in the user's cache folder",
    )
    parser = _Parser(
        prog="zoo",
        description="Bayesian models of papers: fit them to data, look at the posterior, predict.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[common],
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    def add(name: str, target: str, text: str) -> _Parser:
        command = commands.add_parser(name, help=text, description=text, parents=[common])
        command.set_defaults(command=target)
        return command

    add("list", "browse:list_models", "the models")
    add(
        "show", "browse:show", "a model: its paper, its sites and their priors, edits to try"
    ).add_argument("model", metavar="MODEL")
    _add_data(add("data", "browse:data", "the data sets, or one of them"))
    _add_fit(add("fit", "fit:fit", "fit a model to data and save the run"))
    _add_run(
        add("summary", "reports:summary", "means, intervals, effective sample sizes of a run"),
        names=True,
    )
    _add_run(add("report", "reports:report", "whether to trust a run; exit code 1 if not"))
    _add_plot(add("plot", "pictures:plot", "a picture of a run"))
    _add_compare(add("compare", "reports:compare", "predictive scores of runs on the same data"))
    _add_predict(
        add(
            "predict",
            "predict:predict",
            "class probabilities of the rows of a CSV file, or entries of a matrix",
        )
    )
    _add_run(add("cite", "reports:cite", "BibTeX of the model and the kernels of a run"))
    add("resume", "fit:resume", "go on with a fit that was stopped or killed").add_argument(
        "folder", metavar="FOLDER"
    )
    _add_site(add("gallery", "site:build", "the pages of the gallery as a site"))
    return parser


def _add_data(parser: _Parser) -> None:
    parser.add_argument("name", metavar="NAME", nargs="?")
    parser.add_argument(
        "-o",
        dest="output",
        metavar="OUT.csv",
        help="write it there, as a table that `zoo fit` and `zoo predict` read",
    )
    parser.add_argument("--force", action="store_true", help="replace the file of -o")


def _add_fit(parser: _Parser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help="a name of `zoo list`")
    add("--data", required=True, metavar="NAME|FILE.csv", help=_DATA_HELP)
    add(
        "--target",
        metavar="COL",
        help="the column of the CSV file that holds classes, or entries (default: the last)",
    )
    add(
        "--task",
        metavar="COL",
        help="the column of the CSV file that says of which task a row is, for models of several "
        "tasks",
    )
    add("--option", action="extend", nargs="+", default=[], metavar="KEY=VALUE", help=_OPTION_HELP)
    add(
        "--kernel",
        metavar="NAME",
        help="nuts, svi, ...: one that the model's card names (default: its first)",
    )
    add("--seed", type=_seed, default=0, metavar="N", help="of all random numbers (default: 0)")
    add(
        "--raw",
        action="store_true",
        help="leave features, and real entries of a matrix, as they are; else they get mean 0 and "
        "deviation 1",
    )
    add(
        "--checkpoint",
        metavar="FOLDER",
        help="keep the run there while it goes on; `zoo resume FOLDER` goes on after a kill",
    )
    add(
        "-o", dest="output", metavar="RUN.nc", help="where to save the run (default: MODEL-DATA.nc)"
    )
    add("--plot", metavar="OUT.png", help="save a picture too")
    add("--force", action="store_true", help="replace the file of -o")


_DATA_HELP = (
    "a name of `zoo data`, or a CSV file: a header, missing cells empty or NA; for a model of a "
    "matrix the first two columns name the row "
    "and the column of an entry"
)
_OPTION_HELP = (
    "num_warmup, num_samples, num_chains, thinning, max_time (seconds), save_every (seconds), "
    "chain_method; an argument of the kernel, "
    "such as num_particles or target_accept_prob; or of the model, such as alpha. Defaults "
    "num_warmup=500 num_samples=1000 num_chains=4; "
    "SVI: num_warmup=5000, its steps; a particle filter: num_particles=200, no warm-up"
)


def _add_run(parser: _Parser, names: bool = False) -> None:
    parser.add_argument("run", metavar="RUN.nc")
    if names:
        parser.add_argument(
            "--var-names",
            nargs="+",
            metavar="SITE",
            help="only these (default: all but those with a value for each row)",
        )


def _add_plot(parser: _Parser) -> None:
    _add_run(parser, names=True)
    parser.add_argument("-o", dest="output", metavar="OUT.png", help="default: RUN.png")
    kinds = (
        "trace_dist",
        "dist",
        "forest",
        "rank",
        "energy",
        "elbo",
        "evidence",
        "partition",
        "matrix",
        "history",
    )
    parser.add_argument(
        "--kind",
        choices=kinds,
        help="default: the first of elbo, evidence, partition, matrix, history that the run has, "
        "else trace_dist",
    )


def _add_compare(parser: _Parser) -> None:
    parser.add_argument("first", metavar="RUN.nc")
    parser.add_argument("others", metavar="RUN.nc", nargs="+")


def _add_predict(parser: _Parser) -> None:
    _add_run(parser)
    parser.add_argument(
        "table",
        metavar="NEW.csv",
        help="a header with the columns of the fit, in any order; others are passed over",
    )
    parser.add_argument("-o", dest="output", metavar="OUT.csv", help="default: the standard output")
    parser.add_argument("--force", action="store_true", help="replace the file of -o")


def _add_site(parser: _Parser) -> None:
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    build = actions.add_parser("build", help="run the pages and render the site")
    build.set_defaults(command="site:build")
    build.add_argument(
        "--full",
        action="store_true",
        help="with the settings of the papers, which takes hours; else with small ones",
    )
    build.add_argument("--no-run", action="store_true", help="render the words and the code alone")
    show = actions.add_parser("open", help="show the site in a browser")
    show.set_defaults(command="site:open_site")
    for action in (build, show):
        action.add_argument(
            "-o", dest="output", metavar="FOLDER", help="of the site (default: gallery/site)"
        )


if __name__ == "__main__":
    sys.exit(main())
