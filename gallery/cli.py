"""The command `zoo`: fit a model to data, look at the run, predict, without writing Python.

Nothing heavy is imported here, so that `zoo --help` answers at once. Each command lives in
`gallery.commands`.
"""

import _thread
import argparse
import logging
import os
import sys
import textwrap
import threading
import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

__all__ = ["main"]

EXAMPLES = """examples:
  zoo fit aclass --data wine -o wine.nc --plot wine.png
  zoo fit aclass --data patients.csv --target outcome --option num_samples=2000 num_chains=4
  zoo report wine.nc
  zoo predict wine.nc new.csv -o classes.csv
  zoo update wine.nc more.csv
  zoo fit mymodel.py:model --data t.csv
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
        args, others = _parser().parse_known_args(arguments)
        if others:
            see = f"(see {getattr(args, 'prog', 'zoo')} --help)"
            raise _CommandError(f"unrecognized arguments: {' '.join(others)} {see}")
        if "command" not in args:
            _parser().print_help()
            return 0
        with _interruptible():
            return _run(args)
    except KeyboardInterrupt as error:
        print("; ".join(["zoo: interrupted", *_notes(error)]), file=sys.stderr)
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


@contextmanager
def _interruptible() -> Generator[None]:
    """Repeat a Ctrl-C that came in a callback of the garbage collector, where Python drops it."""
    before = sys.unraisablehook

    def hook(dropped: Any) -> None:
        if dropped.exc_type is KeyboardInterrupt:
            threading.Timer(0.01, _thread.interrupt_main).start()
        else:
            before(dropped)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before


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
    return " ".join("; ".join([text, *_notes(error)]).split())


def _notes(error: BaseException) -> list[str]:
    notes = getattr(error, "__notes__", ())
    return [note for note in notes if "JAX has removed its internal frames" not in note]


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


def _share(text: str) -> float:
    """Refuse what is no share of the rows."""
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise argparse.ArgumentTypeError(f"wanted a share from 0 to below 1, found {text!r}")
    return share


def _names(text: str) -> list[str]:
    """The names of columns, delimited by commas as the header of a table is."""
    import csv

    return next(csv.reader([text], strict=True))


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

    def add(name: str, target: str, text: str, **settings: Any) -> _Parser:
        command = commands.add_parser(
            name, help=text, description=text, parents=[common], **settings
        )
        command.set_defaults(command=target, prog=command.prog)
        return command

    add("list", "browse:list_models", "the models")
    _add_show(
        add("show", "browse:show", "a model: its paper, its sites and their priors, edits to try")
    )
    _add_data(add("data", "browse:data", "the data sets, or one of them"))
    _add_fit(add("fit", "fit:fit", "fit a model to data and save the run", add_help=False))
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
    _add_update(add("update", "fit:update", "let a run learn more rows, where its kernel can"))
    _add_run(add("cite", "reports:cite", "BibTeX of the model and the kernels of a run"))
    resume = add("resume", "fit:resume", "go on with a fit that was stopped or killed")
    resume.add_argument("folder", metavar="FOLDER")
    resume.add_argument(
        "--salvage",
        action="store_true",
        help="where a file is damaged: go on from the last whole one",
    )
    resume.add_argument("--cluster", metavar="ADDRESS", help=_CLUSTER_HELP)
    add("check", "fit:check", "whether a checkpoint is whole").add_argument(
        "folder", metavar="FOLDER"
    )
    _add_new(add("new", "new:new", "write the files of a new model, or kernel, to begin with"))
    _add_site(add("gallery", "site:build", "the pages of the gallery as a site"))
    return parser


def _add_show(parser: _Parser) -> None:
    parser.add_argument("model", metavar="MODEL", help=_MODEL_HELP)
    parser.add_argument(
        "--data",
        metavar="NAME|FILE",
        help="trace the model on these data (default: simulated ones)",
    )
    parser.add_argument(
        "--option", action="extend", nargs="+", default=[], metavar="KEY=VALUE", help=_OPTION_HELP
    )


def _add_data(parser: _Parser) -> None:
    parser.add_argument("name", metavar="NAME", nargs="?")
    parser.add_argument(
        "-o",
        dest="output",
        metavar="OUT.csv",
        help="write it there, as a table that `zoo fit` and `zoo predict` read",
    )
    parser.add_argument("--force", action="store_true", help="replace the file of -o")


class _FitHelp(argparse.Action):
    """Prints the help of `zoo fit`; after the name of a model, its options too."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        options = ""
        if (model := getattr(namespace, "model", None)) is not None:
            from gallery.commands.browse import options_text

            options = options_text(model, getattr(namespace, "kernel", None))
        parser.print_help()
        print(options, end="\n" if options else "")
        parser.exit()


def _add_fit(parser: _Parser) -> None:
    add = parser.add_argument
    add(
        "-h",
        "--help",
        action=_FitHelp,
        nargs=0,
        help="show this; after MODEL, and --kernel NAME, its options too",
    )
    add("model", metavar="MODEL", help=_MODEL_HELP)
    add("--data", required=True, metavar="NAME|FILE", help=_DATA_HELP)
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
    add("--drop", type=_names, default=[], metavar="COL,COL", help="columns that are no features")
    add("--columns", type=_names, default=[], metavar="COL,COL", help="the features (default: all)")
    add("--id", metavar="COL", help="a column that is no feature and that predictions keep")
    add(
        "--dummies",
        action="store_true",
        help="make each text a column of 0 and 1, for a model that takes numbers only",
    )
    add("--option", action="extend", nargs="+", default=[], metavar="KEY=VALUE", help=_OPTION_HELP)
    add(
        "--kernel",
        metavar="NAME",
        help="nuts, svi, ...: one that the model's card names (default: its first); any one for a "
        "model file (default: nuts)",
    )
    add("--seed", type=_seed, default=0, metavar="N", help="of all random numbers (default: 0)")
    add(
        "--raw",
        action="store_true",
        help="leave features, and real entries of a matrix, as they are; else they get mean 0 and "
        "deviation 1; a model file gets them as they are",
    )
    add(
        "--checkpoint",
        metavar="FOLDER",
        help="keep the run there while it goes on; `zoo resume FOLDER` goes on after a kill",
    )
    add("--cluster", metavar="ADDRESS", help=_CLUSTER_HELP)
    add(
        "-o", dest="output", metavar="RUN.nc", help="where to save the run (default: MODEL-DATA.nc)"
    )
    add("--plot", metavar="OUT.png", help="save a picture too")
    add(
        "--test",
        type=_share,
        metavar="SHARE",
        help="the share of the rows, or entries, that a second fit leaves out, to score what it "
        "predicts of them next to a baseline; 0: no second fit (default: 0.2 where it is cheap)",
    )
    add("--force", action="store_true", help="replace the file of -o")


_MODEL_HELP = (
    "a name of `zoo list`; or a function in a file of your own, mymodel.py:model, whose arguments "
    "are named as columns of the table, or x, the matrix of its features, and y, its target"
)
_CLUSTER_HELP = (
    "of a Dask scheduler: each chain runs on a worker, and keeps a checkpoint of its own in the "
    "folder of --checkpoint"
)
_DATA_HELP = (
    "a name of `zoo data`, a Parquet file, or a CSV file: a header, missing cells empty or NA, "
    "cells delimited by commas, semicolons, tabs or bars; for a model of a matrix the first two "
    "columns name the row and the column of an entry"
)
_OPTION_HELP = (
    "an argument of the model, such as alpha=0.1, of its kernel, such as num_particles=500, or of "
    "the driver, such as num_samples=2000; `zoo fit MODEL --help` lists them"
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


# of a picture -> what it shows; `gallery.commands.pictures.kinds` draws them
KINDS = {
    "classes": "rows of each class, in the columns that tell the classes apart",
    "entries": "entries of a matrix against predictions, the most surprising ones, the rank",
    "matrix": "the completed matrix",
    "history": "rows by most probable class, and rejected points",
    "partition": "the probability of each pair of rows to be in one group",
    "groups": "the number of groups",
    "particles": "the effective number of particles at each row",
    "elbo": "the ELBO over the steps",
    "evidence": "the log-evidence over the steps",
    "insertion": "insertion ranks of a nested sampler",
}
ARVIZ_KINDS = (
    *("trace_dist", "trace", "dist", "forest", "ridge", "rank", "rank_dist", "autocorr", "ess"),
    *("ess_evolution", "mcse", "pair", "parallel", "energy", "ppc_dist", "ppc_pit", "loo_pit"),
    "khat",
)


def _add_plot(parser: _Parser) -> None:
    _add_run(parser, names=True)
    parser.add_argument(
        "-o", dest="output", metavar="OUT.png", help="default: RUN.png, or RUN-KIND.png"
    )
    parser.add_argument(
        "--kind",
        choices=(*KINDS, *ARVIZ_KINDS),
        metavar="KIND",
        help="see below; default: classes or entries, else trace_dist",
    )
    own = "\n".join(f"  {name:<11} {text}" for name, text in KINDS.items())
    of_arviz = textwrap.fill(
        ", ".join(ARVIZ_KINDS), 78, initial_indent="  ", subsequent_indent="  "
    )
    parser.epilog = f"kinds:\n{own}\n\nArviZ's plots, which are kinds too:\n{of_arviz}"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter


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
    parser.add_argument(
        "--option",
        action="extend",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="an argument of a model file that new rows change, such as their number J=8",
    )
    parser.add_argument("-o", dest="output", metavar="OUT.csv", help="default: the standard output")
    parser.add_argument("--force", action="store_true", help="replace the file of -o")


def _add_update(parser: _Parser) -> None:
    _add_run(parser)
    parser.add_argument(
        "table",
        metavar="MORE.csv",
        help="a header with the columns of the fit and its class, in any order; others are passed "
        "over",
    )
    parser.add_argument(
        "-o", dest="output", metavar="OUT.nc", help="default: RUN.nc itself, which is replaced"
    )
    parser.add_argument("--force", action="store_true", help="replace the file of -o")


def _add_new(parser: _Parser) -> None:
    parser.add_argument("name", metavar="NAME", help="such as hidden_markov")
    parser.add_argument(
        "--kernel", action="store_true", help="a kernel with its test, not a model with its page"
    )
    parser.add_argument(
        "-o", dest="output", metavar="FOLDER", help="the clone of the project (default: this one)"
    )


def _add_site(parser: _Parser) -> None:
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    build = actions.add_parser("build", help="run the pages and render the site")
    build.set_defaults(command="site:build", prog=build.prog)
    build.add_argument(
        "--full",
        action="store_true",
        help="with the settings of the papers, which takes hours; else with small ones",
    )
    build.add_argument("--no-run", action="store_true", help="render the words and the code alone")
    show = actions.add_parser("open", help="show the site in a browser")
    show.set_defaults(command="site:open_site", prog=show.prog)
    for action in (build, show):
        action.add_argument(
            "-o", dest="output", metavar="FOLDER", help="of the site (default: gallery/site)"
        )


if __name__ == "__main__":
    sys.exit(main())
