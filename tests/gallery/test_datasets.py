"""`load` and the way to a file: the table, the folders, every refusal.

The real copies are read where ZOO_DATA names them.
"""

import copy
import gzip
import os
import pickle
import re
import subprocess
import sys
import textwrap
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlparse

import numpy as np
import pooch
import pytest

from gallery import _fetch
from gallery._fetch import CorruptDataError, DataNotFoundError, RawFile, Source, content_hash, fetch
from gallery._sources import SOURCES
from gallery.datasets import Dataset, describe, load, names

BYTES = b"1 2\n3 4\n"
ARRAYS = {"X": np.array([[1.0, 2.0], [3.0, 4.0]])}


def parse(raw):
    (data,) = raw.values()
    return {"X": np.array([line.split() for line in data.decode().splitlines()]).astype(float)}


def toy(url="http://127.0.0.1:9/toy.txt", known_hash=None, path="toy/toy.npz", **changes):
    fields = dict.fromkeys(("title", "description", "licence", "citation", "url"), "toy")
    fields |= {"name": "toy", "path": path, "contents": (content_hash(ARRAYS),), "parse": parse}
    fields |= {
        "raw": (RawFile("toy.txt", (url,), known_hash),),
        "view": lambda stored: {"arrays": {"x": stored["X"]}},
    }
    return Source(**(fields | changes))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder, and no ZOO_DATA."""
    monkeypatch.delenv("ZOO_DATA", raising=False)
    monkeypatch.setattr(_fetch, "cache_folder", lambda: tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def no_network(monkeypatch):
    def unreachable(url, **_):
        raise ConnectionError(f"cannot resolve the host of {url}")

    monkeypatch.setattr(pooch, "retrieve", unreachable)


@pytest.fixture
def serve():
    """Serves bytes on this machine's loopback; returns the address."""
    servers = []

    def start(data):
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_address[1]}/toy.txt"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def put(folder, arrays=ARRAYS):
    path = folder / "toy/toy.npz"
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **arrays)
    return path


def files_in(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


# By name


def test_every_name_is_described():
    assert len(set(names())) == len(names())
    for name in names():
        summary = describe(name)
        assert summary.name == name
        assert len(summary.title) > 10
        assert len(summary.title) < 90
        assert "\n" not in summary.title
        assert summary.where
        assert summary.licence
    assert describe("pinwheel").options[-1] == "seed"
    notice = (
        "The information used here was obtained free of charge from and is copyrighted by "
        "Retrosheet. Interested parties may "
        "contact Retrosheet at www.retrosheet.org."
    )
    assert notice in describe("mlb_batter_pitcher").licence


def test_unknown_name_has_close_matches_and_the_list():
    with pytest.raises(ValueError, match=r"no data set 'mnits'; did you mean 'mnist'.*wine, wdbc"):
        load("mnits")
    with pytest.raises(ValueError, match=r"no data set 'qqqqqq'; there are wine"):
        describe("qqqqqq")


def test_options_reach_generators_and_no_other():
    assert len(load("pinwheel", seed=1, num_classes=4, num_per_class=5).y) == 20
    with pytest.raises(
        ValueError, match=r"'pinwheel' has no option 'num_clases'; its options: num_classes, .*seed"
    ):
        load("pinwheel", num_clases=4)
    with pytest.raises(ValueError, match="'wine' has no option 'seed'; its options: none"):
        load("wine", seed=1)


@pytest.mark.parametrize(
    ("name", "shape", "counts"),
    [
        ("wine", (178, 13), [59, 71, 48]),
        ("wdbc", (569, 30), [212, 357]),
        ("digits", (1797, 64), None),
    ],
)
def test_bundled_tables(name, shape, counts):
    data = load(name)
    assert data.x.shape == shape
    assert data.x.dtype == np.float64
    assert data.y.dtype == np.int64
    assert len(data.feature_names) == shape[1]
    assert len(data.class_names) == data.y.max() + 1
    assert counts is None or list(np.bincount(data.y)) == counts


def test_a_bundled_table_whose_target_is_a_quantity():
    data = load("diabetes")
    assert (data.x.shape, data.y.dtype, data.class_names) == ((442, 10), np.float64, ())
    assert (data.y.min(), data.y.max()) == (25, 346)
    assert "UCI" not in data.licence


def test_dataset_access():
    data = load("gaussian_mixture", num_rows=5)
    assert data.x is data["x"]
    assert list(data.select("x", "group")) == ["x", "group"]
    with pytest.raises(KeyError, match="has no array 'X'; it has x, group, means, weights"):
        data["X"]
    with pytest.raises(AttributeError, match="has no array 'labels'"):
        _ = data.labels
    with pytest.raises(AttributeError):
        data.name = "other"
    for twin in (copy.deepcopy(data), pickle.loads(pickle.dumps(data))):
        assert isinstance(twin, Dataset)
        assert np.array_equal(twin.x, data.x)


def test_import_is_light():
    code = "import sys, gallery.datasets as d; d.names(); d.describe('mnist'); print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not {"sklearn", "scipy", "pooch", "h5py", "jax", "requests", "pandas"} & set(loaded)


# The table


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_every_source_is_complete(source):
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in source.contents)
    assert re.fullmatch(r"\w+/\w+\.(npz|csv\.gz)", source.path)
    for text in (source.title, source.description, source.licence, source.citation):
        assert len(text) > 10
    assert (source.parse is None) == (source.raw == ()) == (source.base is not None)
    addresses = [urlparse(url) for raw in source.raw for url in raw.urls]
    assert all(address.scheme == "https" for address in addresses)
    for raw in source.raw:
        assert raw.known_hash is None or re.fullmatch(
            "md5:[0-9a-f]{32}|[0-9a-f]{64}", raw.known_hash
        )
        assert all(url.endswith("/" + raw.name) for url in raw.urls)


# The content's checksum


def test_content_hash_sees_names_dtypes_shapes_values():
    base = {"a": np.arange(6), "b": np.array(["x", "yy"])}
    others = [
        {"a": np.arange(6)},
        {"c": np.arange(6), "b": base["b"]},
        {"a": np.arange(6, dtype=np.int32), "b": base["b"]},
        {"a": np.arange(6).reshape(2, 3), "b": base["b"]},
        {"a": np.arange(6)[::-1], "b": base["b"]},
        {"a": np.arange(6), "b": np.array(["xy", "y"])},
    ]
    assert len({content_hash(arrays) for arrays in (base, *others)}) == 7


def test_content_hash_does_not_see_the_memory():
    matrix = np.array([[1.0, np.nan], [-0.0, 4.0]])
    other_nan = matrix.copy()
    other_nan.view(np.uint64)[0, 1] |= 1
    same = [matrix, np.asfortranarray(matrix), matrix.astype(">f8"), matrix + 0.0, other_nan]
    assert len({content_hash({"a": array}) for array in same}) == 1
    texts = np.array(["a", "b"])
    assert content_hash({"a": texts}) == content_hash({"a": texts.astype("U16")})


# From folder to folder


def test_cache_needs_no_network(cache, no_network):
    put(cache)
    np.testing.assert_array_equal(fetch(toy())["X"], ARRAYS["X"])


def test_zoo_data_is_searched_before_the_cache(cache, no_network, tmp_path, monkeypatch):
    put(cache, {"X": np.zeros((2, 2))})  # would be refused
    put(tmp_path / "mine")
    monkeypatch.setenv("ZOO_DATA", str(tmp_path / "mine"))
    np.testing.assert_array_equal(fetch(toy())["X"], ARRAYS["X"])


def test_a_set_that_zoo_data_lacks_is_sought_in_the_cache(cache, no_network, tmp_path, monkeypatch):
    put(cache)
    (tmp_path / "mine").mkdir()
    monkeypatch.setenv("ZOO_DATA", str(tmp_path / "mine"))
    np.testing.assert_array_equal(fetch(toy())["X"], ARRAYS["X"])


def test_zoo_data_that_is_no_folder(cache, tmp_path, monkeypatch):
    monkeypatch.setenv("ZOO_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(DataNotFoundError, match=r"ZOO_DATA='.*nowhere': no such folder"):
        fetch(toy())


@pytest.mark.parametrize("in_zoo_data", [True, False])
@pytest.mark.parametrize("damage", ["cut", "other values", "other file"])
def test_corrupt_copies_are_refused_with_a_remedy(
    cache, no_network, tmp_path, monkeypatch, in_zoo_data, damage
):
    folder = tmp_path / "mine" if in_zoo_data else cache
    path = put(folder, {"X": ARRAYS["X"] + 1} if damage == "other values" else ARRAYS)
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-40])
    if damage == "other file":
        path.write_bytes(b"<html>404</html>")
    if in_zoo_data:
        monkeypatch.setenv("ZOO_DATA", str(folder))
    remedy = (
        "replace it with a good copy, or unset ZOO_DATA"
        if in_zoo_data
        else "delete it and load again"
    )
    with pytest.raises(CorruptDataError, match=f"'toy': .*toy.npz .*{remedy}"):
        fetch(toy())


# Downloads


def test_download_is_parsed_checked_and_cached(cache, serve, monkeypatch):
    source = toy(serve(BYTES), known_hash=None)
    np.testing.assert_array_equal(fetch(source)["X"], ARRAYS["X"])
    assert files_in(cache) == ["toy/toy.npz"]
    monkeypatch.setattr(pooch, "retrieve", None)  # a second download would fail
    np.testing.assert_array_equal(fetch(source)["X"], ARRAYS["X"])


def test_tables_of_text_are_cached_as_csv(cache, serve):
    table = {"header": np.array(["a", "b"]), "cells": np.array([["1,5", ""], ['say "no"', "é"]])}
    source = toy(
        serve(b"-"), path="toy/toy.csv.gz", contents=(content_hash(table),), parse=lambda raw: table
    )
    fetch(source)
    assert (
        gzip.decompress((cache / "toy/toy.csv.gz").read_bytes()).decode()
        == 'a,b\n"1,5",\n"say ""no""",é\n'
    )
    assert content_hash(fetch(source)) == content_hash(table)


@pytest.mark.parametrize(
    ("data", "known_hash"),
    [
        (b"1 2\n3 5\n", None),  # only the parsed content tells
        (b"<html>moved</html>", None),  # cannot be parsed
        (BYTES + b"\n", "md5:" + "0" * 32),  # the raw checksum tells
    ],
)
def test_a_corrupt_download_never_enters_the_cache(cache, serve, data, known_hash):
    with pytest.raises(CorruptDataError, match=r"'toy'.*get toy.txt from http://127"):
        fetch(toy(serve(data), known_hash))
    assert files_in(cache) == []


def test_a_mirror_takes_over(cache, serve):
    urls = ("http://127.0.0.1:9/toy.txt", serve(BYTES))
    source = toy(raw=(RawFile("toy.txt", urls),))
    np.testing.assert_array_equal(fetch(source)["X"], ARRAYS["X"])


def test_without_network_the_error_says_where_to_get_and_put_it(cache, no_network):
    with pytest.raises(DataNotFoundError) as error:
        fetch(toy("https://example.org/toy.txt"))
    message = str(error.value)
    assert "cannot resolve the host" in message
    assert "get toy.txt from https://example.org/toy.txt" in message
    assert (
        f"put it into {cache / 'toy'}, or set ZOO_DATA to a folder that holds toy/toy.npz"
        in message
    )
    assert files_in(cache) == []


@pytest.mark.parametrize("name", [name for name in SOURCES if name != "mnist_pca50"])
def test_every_set_says_so_without_network(cache, no_network, name):
    with pytest.raises(
        DataNotFoundError, match=re.escape(f"put it into {(cache / SOURCES[name].path).parent}")
    ):
        load(name)


def test_a_raw_file_put_there_by_hand_is_used(cache, no_network):
    (cache / "toy").mkdir(parents=True)
    (cache / "toy/toy.txt").write_bytes(BYTES)
    np.testing.assert_array_equal(fetch(toy())["X"], ARRAYS["X"])
    assert "toy/toy.npz" in files_in(cache)


def test_a_wrong_raw_file_put_there_by_hand_is_refused(cache, no_network):
    (cache / "toy").mkdir(parents=True)
    (cache / "toy/toy.txt").write_bytes(BYTES)
    with pytest.raises(
        CorruptDataError, match=r"toy.txt: its checksum is not md5:0+; get it again from http"
    ):
        fetch(toy(known_hash="md5:" + "0" * 32))


def test_a_set_is_computed_from_its_base(cache, serve):
    doubled = {"X": 2 * ARRAYS["X"]}
    base = toy(serve(BYTES))
    source = toy(
        path="twice/twice.npz",
        raw=(),
        parse=None,
        base=base,
        derive=lambda a: {"X": 2 * a["X"]},
        contents=(content_hash(doubled),),
    )
    np.testing.assert_array_equal(fetch(source)["X"], doubled["X"])
    assert files_in(cache) == ["toy/toy.npz", "twice/twice.npz"]


@pytest.mark.parametrize("moment", ["os.replace", "np.savez_compressed", "pooch.retrieve"])
def test_a_process_killed_on_the_way_leaves_no_entry(cache, serve, moment):
    script = f"""
        import os, signal, sys
        from pathlib import Path
        import numpy as np, pooch
        from gallery import _fetch
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_datasets import toy
        _fetch.cache_folder = lambda: Path({str(cache)!r})
        {moment} = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL)
        _fetch.fetch(toy({serve(BYTES)!r}))
    """
    environment = {name: value for name, value in os.environ.items() if name != "ZOO_DATA"}
    died = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env=environment,
        capture_output=True,
        check=False,
    )
    assert died.returncode == -9, died.stderr.decode()
    assert not (cache / "toy/toy.npz").exists()
    np.testing.assert_array_equal(fetch(toy(serve(BYTES)))["X"], ARRAYS["X"])
