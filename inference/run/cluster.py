"""Runs as tasks of a Dask cluster: `cluster=` of `Driver`, `Orders` and others.

    from dask.distributed import Client, LocalCluster

    with Client(LocalCluster(n_workers=2, threads_per_worker=1)) as client:
        Driver(NUTS(model), ..., num_chains=8, checkpoint="runs/8", cluster=client).run(0, x, y)

A task is a function of what all tasks share and of its own item. What they share travels to each
worker once. It is pickled by cloudpickle, so a model may be defined in a notebook. Dask gives a
task to another worker when its worker dies, and the driver in it goes on from the checkpoint of the
task, which lies on a path that the workers share.

The client asks the workers twice a second how many steps their tasks have taken, and tells them of
Ctrl-C in the same call. A task that is told ends as a run ends by a signal: it saves its checkpoint
and returns what was drawn. A task whose worker closes, as when the scheduler has gone away, is told
so by the worker.

Cost beside that of the runs: each worker imports the package, and compiles the model, once.
"""

import os
import pickle
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import jax

from inference.run.session import Bar, signals_noted
from inference.run.store import CheckpointError

__all__ = ["TaskBar", "submitted"]

POLL = 0.5  # seconds between two questions to the workers
ANSWER = 10.0  # seconds that a scheduler has to answer at an address
PACKAGES = ("bayes-model-zoo", "jax", "numpyro")  # draws depend on their versions

# of this process, where it is a worker; by the token of a call of `submitted`
TOLD: dict[str, str] = {}  # the signal that is to end its tasks
STEPS: dict[str, dict[int, int]] = {}  # steps of each of its tasks


class TaskBar(Bar):
    """The bar of a run in a task: it counts for the client, and hears from it when to end.

    Args:
        token: of the call of `submitted`.
        number: of the task.
        total, done: as for `Bar`.
    """

    def __init__(self, token: str, number: int, total: int | None, done: int):
        from distributed import get_worker

        super().__init__(False, total, done)
        self.token, self.number, self.worker = token, number, get_worker()
        self.update(0, "", "")

    def update(self, steps: int, phase: str, text: str) -> None:
        """Counts the steps."""
        self.done += steps
        STEPS.setdefault(self.token, {})[self.number] = self.done

    @property
    def signal(self) -> str:
        """The signal that is to end the run, if there is one."""
        is_closing = self.worker.status.name not in ("running", "paused")
        return TOLD.get(self.token, "SIGTERM" if is_closing else "")


@contextmanager
def submitted(
    cluster: Any,
    function: Callable,
    common: tuple,
    items: Sequence[tuple],
    *,
    folder: str | os.PathLike[str] | None = None,
    bar: bool | None = False,
    total: int | None = None,
) -> Generator[Iterator[Any]]:
    """Submits a task for each item; yields an iterator over their results, in order.

    A task that had not begun when a signal ended the others has the name of the signal as its
    result. At the end of the context, what still runs is told to end, and the rest is cancelled.
    An error is raised before anything is submitted if the client is closed, if a worker has other
    versions or does not see the folder, or if something cannot be pickled.

    Args:
        cluster: a client of Dask, or the address of a scheduler.
        function: is called as `function(*common, *item, bar)`, where its drivers have the
            `progress_bar` bar.
        common: what all tasks share.
        items: of the tasks.
        folder: a checkpoint folder, which all workers must share.
        bar, total: of a progress bar over the steps of all tasks; as for `Bar`.
    """
    with _connected(cluster) as client, signals_noted() as signals:
        given, each = _pickled((function, common)), [_pickled(item) for item in items]
        _check_workers(client)
        if folder is not None:
            _check_shared(client, Path(folder))
        token, is_double = uuid4().hex, bool(jax.config.jax_enable_x64)
        client.run(_listen, token, "")  # before Ctrl-C may come
        data = client.scatter(given, broadcast=True, hash=False)
        futures = [
            client.submit(_task, data, token, i, item, is_double, key=f"zoo-{token}-{i}")
            for i, item in enumerate(each)
        ]
        shown = Bar(bar, total, 0)
        try:
            yield _results(client, futures, token, signals, shown, folder)
        finally:
            shown.close()
            left = [future for future in futures if not future.done()]
            with suppress(OSError, TimeoutError, CancelledError):
                if left:
                    client.run(_listen, token, "SIGTERM", on_error="ignore")
                    client.cancel(left)
                else:
                    client.run(_forget, token, on_error="ignore")


def _task(given: bytes, token: str, number: int, item: bytes, is_double: bool) -> bytes | str:
    """The pickled result of a task, or the signal that has ended it before it began.

    It is pickled here, and not by Dask, whose threads do not know the precision of the run.
    """
    if number and token in TOLD:  # the first one begins: a tree needs one chain at least
        return TOLD[token]
    import cloudpickle

    with jax.enable_x64(is_double):
        function, common = pickle.loads(given)
        return cloudpickle.dumps(
            function(*common, *pickle.loads(item), partial(TaskBar, token, number))
        )


def _results(
    client: Any,
    futures: Sequence[Any],
    token: str,
    signals: list[str],
    shown: Bar,
    folder: str | os.PathLike[str] | None,
) -> Iterator[Any]:
    from distributed import KilledWorker

    steps: dict[int, int] = {}
    goes_on = "start again; with a checkpoint folder a run goes on from there"
    if folder is not None:
        goes_on = f"the same run with checkpoint={str(folder)!r} goes on, also without `cluster`"
    for future in futures:
        try:
            while not future.done():
                with suppress(TimeoutError):
                    future.exception(timeout=POLL)  # waits
                if client.status != "running":
                    raise CancelledError
                _ask(client, token, signals, shown, steps)
            found = future.result()
        except KilledWorker as error:
            raise ConnectionError(
                f"cluster: {error.allowed_failures + 1} workers died in the same task, as where "
                f"memory is too small; {goes_on}."
            ) from error
        except (CancelledError, OSError) as error:
            if future.status == "error":  # that of the task
                raise
            what = "the scheduler has gone away"
            if client.status == "running":
                what = "all workers that held the data have died"
            raise ConnectionError(f"cluster: {what}; {goes_on}.") from error
        yield found if isinstance(found, str) else pickle.loads(found)


def _ask(client: Any, token: str, signals: list[str], shown: Bar, steps: dict[int, int]) -> None:
    """Moves the bar on, and tells the workers of a signal."""
    before = sum(steps.values())
    found = client.run(_listen, token, "".join(signals[:1]), on_error="return")
    for each in found.values():
        if isinstance(each, dict):
            steps |= each
        elif not isinstance(each, OSError):  # as of a worker that has just died
            raise each
    shown.update(sum(steps.values()) - before, "on workers", f"{len(steps)} tasks begun")


def _listen(token: str, told: str, dask_worker: Any) -> dict[int, int]:
    """The steps of the tasks of this worker, which hear of a signal.

    Ctrl-C on a terminal reaches the workers of a `LocalCluster` as well, and must not kill them.

    Args:
        token: of the call of `submitted`.
        told: the name of the signal; "" for none.
        dask_worker: the worker, which Dask itself gives under this name.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and dask_worker.nanny is not None:  # which can end its worker without Ctrl-C
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if told:
        TOLD[token] = told
    return STEPS.get(token, {})


def _forget(token: str) -> None:
    TOLD.pop(token, None)
    STEPS.pop(token, None)


def _pickled(value: Any) -> bytes:
    import cloudpickle

    try:
        return cloudpickle.dumps(value)
    except Exception as error:  # whatever the value raises
        raise TypeError(
            f"cluster: the model, its arguments or the kernel cannot be sent to workers, because "
            f"they cannot be pickled ({error}); give arrays, and functions without open files, "
            "locks or generators."
        ) from error


@contextmanager
def _connected(cluster: Any) -> Generator[Any]:
    try:
        from distributed import Client
    except ImportError as error:
        raise ImportError(
            "cluster: Dask is not installed; install the extra `distributed` "
            "(`uv sync --extra distributed`)."
        ) from error
    if isinstance(cluster, str):
        try:
            client = Client(cluster, timeout=ANSWER, set_as_default=False)
        except (OSError, ValueError) as error:
            raise ConnectionError(
                f"cluster: no scheduler answers at {cluster!r}; start one by `dask scheduler`, and "
                "give the address that it prints."
            ) from error
        with client:
            yield client
    elif not isinstance(cluster, Client):
        raise TypeError(
            f"cluster: found {cluster!r}, wanted a dask.distributed.Client or an address."
        )
    elif cluster.status != "running":
        raise ValueError(
            f"cluster: the client is {cluster.status}; make a new one of the same cluster."
        )
    else:
        yield cluster


def _check_workers(client: Any) -> None:
    """Raises ValueError if there is no worker, or one with other versions."""

    def versions(names: tuple[str, ...]) -> dict[str, str]:
        # pickled with its code, for workers without this package
        import sys
        from importlib.metadata import PackageNotFoundError, version

        found = {"Python": f"{sys.version_info.major}.{sys.version_info.minor}"}
        for name in names:
            try:
                found[name] = version(name)
            except PackageNotFoundError:
                found[name] = "not there"
        return found

    wanted, found = versions(PACKAGES), client.run(versions, PACKAGES)
    if not found:
        raise ValueError("cluster: it has no workers; start some by `dask worker ADDRESS`.")
    for worker, own in found.items():
        for name in wanted:
            if own[name] != wanted[name]:
                raise ValueError(
                    f"cluster: {name} is {own[name]} on worker {worker}, and {wanted[name]} here; "
                    "install the same version there."
                )


def _check_shared(client: Any, folder: Path) -> None:
    """Raises CheckpointError if a worker does not see what the client writes into the folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / ".shared"
        path.write_text(token := uuid4().hex)
    except OSError as error:
        raise CheckpointError(
            f"checkpoint: cannot write in {str(folder)!r} ({error.strerror}); name another folder."
        ) from error
    try:
        found = client.run(_read_there, str(path))
    finally:
        path.unlink()
    if blind := [worker for worker, text in found.items() if text != token]:
        raise CheckpointError(
            f"checkpoint: worker {blind[0]} does not see what is written into {str(folder)!r} here;"
            " name a folder on a disk that all workers share."
        )


def _read_there(path: str) -> str | None:
    return Path(path).read_text() if os.access(path, os.W_OK) else None
