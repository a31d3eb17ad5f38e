"""Each parser on a small file of its raw format, made here."""

import gzip
import io
import struct
import zipfile
import zlib

import h5py
import numpy as np
import pytest
from scipy import io as scipy_io
from scipy import sparse
from sklearn.decomposition import PCA

from gallery import _baseball, _images, _parsers


def zipped(files):
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return memory.getvalue()


def mat(**arrays):
    memory = io.BytesIO()
    scipy_io.savemat(memory, arrays)
    return {"file.mat": memory.getvalue()}


def cells(*items):
    array = np.empty((1, len(items)), dtype=object)
    array[0, :] = items
    return array


def idx(array):
    header = b"\0\0\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return gzip.compress(header + array.astype(np.uint8).tobytes())


def test_idx():
    images, labels = np.arange(24).reshape(2, 3, 4), np.array([7, 1])
    raw = {"train-images-idx3-ubyte.gz": idx(images), "train-labels-idx1-ubyte.gz": idx(labels)}
    raw |= {
        "t10k-images-idx3-ubyte.gz": idx(images[:1]),
        "t10k-labels-idx1-ubyte.gz": idx(labels[:1]),
    }
    out = _parsers.idx_images(raw)
    assert out["x_train"].dtype == np.uint8
    np.testing.assert_array_equal(out["x_train"], images)
    np.testing.assert_array_equal(out["y_train"], [7, 1])
    assert out["x_test"].shape == (1, 3, 4)
    with pytest.raises(ValueError, match="not an idx file of bytes"):
        _parsers.idx_images(raw | {"train-labels-idx1-ubyte.gz": gzip.compress(b"\0\0\x0d\x01")})


def test_newsgroups():
    documents = sparse.csc_matrix(np.array([[1, 0, 0], [0, 0, 1.0]]))  # 2 words, 3 documents
    raw = mat(
        documents=documents,
        newsgroups=np.array([[1, 2, 4]]),
        wordlist=cells("bible", "car"),
        groupnames=cells("comp.*", "rec.*"),
    )
    out = _parsers.newsgroups_mat(raw)
    np.testing.assert_array_equal(
        np.unpackbits(out["X_packed"], axis=1)[:, :2], [[1, 0], [0, 0], [0, 1]]
    )
    assert list(out["y"]) == [0, 1, 3]
    assert list(out["words"]) == ["bible", "car"]
    assert list(out["groups"]) == ["comp.*", "rec.*"]
    assert out["n_features"] == 2


def test_landmine():
    raw = mat(
        feature=cells(np.ones((2, 9)), np.zeros((3, 9))),
        label=cells(np.array([[0], [1]]), np.array([[1], [0], [0]])),
    )
    out = _parsers.landmine_mat(raw)
    assert out["X"].shape == (5, 9)
    assert list(out["y"]) == [0, 1, 1, 0, 0]
    assert list(out["task"]) == [1, 1, 2, 2, 2]


def test_oil():
    memory, x = io.BytesIO(), np.arange(36.0).reshape(3, 12)
    with h5py.File(memory, "w") as file:
        # Julia's [row, feature] reaches HDF5 as [feature, row]
        file["T"], file["labels"] = x.T, np.array([3, 1, 2])
    out = _parsers.jld2_oil({"oil.jld2": memory.getvalue()})
    np.testing.assert_array_equal(out["X"], x)
    assert list(out["y"]) == [3, 1, 2]


ARFF = """@relation bibtex
% a comment
@attribute word0 {0,1}
@attribute word1 {0,1}
@ATTRIBUTE word2 {0,1}
@attribute TAG_a {0,1}
@attribute TAG_b {0,1}

@data
{0 1,2 1,4 1}
{ 1 1, 3 1, 4 1 }
{}
"""


def test_sparse_arff():
    raw = {"bibtex-train.arff": ARFF.encode(), "bibtex-test.arff": ARFF.encode()}
    out = _parsers.multilabel_arff(raw, num_labels=2)
    assert (out["n_features"], out["n_labels"]) == (3, 2)
    assert list(out["x_train_indptr"]) == [0, 2, 3, 3]
    assert list(out["x_train_indices"]) == [0, 2, 1]
    assert list(out["labels_test_indptr"]) == [0, 1, 3, 3]
    assert list(out["labels_test_indices"]) == [1, 0, 1]
    with pytest.raises(ValueError, match="not a sparse row of ones"):
        _parsers.multilabel_arff(
            {name: data + b"{1 2}\n" for name, data in raw.items()}, num_labels=2
        )


def test_letters():
    pixels = np.eye(3, 128, dtype=int)
    starts = ["1\to\t2\t1\t1\t0", "2\tm\t-1\t1\t2\t0", "3\ta\t-1\t2\t1\t9"]
    lines = [
        start + "\t" + "\t".join(map(str, row)) + "\t"
        for start, row in zip(starts, pixels, strict=True)
    ]
    out = _parsers.letters({"letter.data.gz": gzip.compress("\n".join(lines).encode())})
    np.testing.assert_array_equal(np.unpackbits(out["X_bits"], axis=1), pixels)
    assert list(out["y"]) == [14, 12, 0]
    assert list(out["word"]) == [0, 0, 1]
    assert list(out["fold"]) == [0, 0, 9]


def test_movielens():
    files = {
        "ml-1m/ratings.dat": "2::1::5::978300760\n1::3::4::978302109\n1::1::3::978301968\n",
        "ml-1m/users.dat": "1::F::1::10::48067\n2::M::56::16::70072\n",
        "ml-1m/movies.dat": "1::Toy Story (1995)::Animation|Comedy\n3::Caf\xe9 "
        "(1995)::Drama\n".encode("latin-1"),
    }
    out = _parsers.movielens({"ml-1m.zip": zipped(files)})
    assert list(out["user"]) == [0, 0, 1]
    assert list(out["movie"]) == [0, 2, 0]
    assert list(out["rating"]) == [3, 4, 5]
    assert list(out["user_gender_male"]) == [0, 1]
    assert list(out["user_age_code"]) == [1, 56]
    assert list(out["user_occupation"]) == [10, 16]
    assert list(out["genre_names"]) == ["Animation", "Comedy", "Drama"]
    np.testing.assert_array_equal(out["movie_genre"], [[1, 1, 0], [0, 0, 0], [0, 0, 1]])
    assert list(out["movie_listed"]) == [1, 0, 1]


def test_horse_colic():
    row = "2 9 530101 38.50 ? 28 3 3 ? 2 5 4 4 ? ? ? 3 5 45.00 8.40 ? ? 2 1 11300 00000 00000 2"
    out = _parsers.horse_colic(
        {"horse-colic.data": f"{row}\n\n{row.replace(' 2 1 11300', ' 2 2 11300')}\n".encode()}
    )
    nan = np.nan
    wanted = [2, 9, 38.5, nan, 28, 3, 3, nan, 2, 5, 4, 4, nan, nan, nan, 3, 5, 45, 8.4, nan, nan]
    np.testing.assert_array_equal(out["X"], [wanted, wanted])
    assert list(out["y"]) == [1, 0]
    assert 2 not in out["source_columns"]


def test_ionosphere():
    text = ",".join(["1", "0", *["-0.05"] * 32]) + ",g\n" + ",".join(["0"] * 34) + ",b\n"
    out = _parsers.ionosphere({"ionosphere.data": text.encode()})
    assert out["X"].shape == (2, 34)
    assert out["X"][0, 2] == -0.05
    assert list(out["y"]) == [0, 1]


def test_pima_zeros_are_missing_where_they_cannot_be():
    raw = {
        "pima.csv": b"# a header\npregnant,a,b,c,d,e,f,g,h\n0,148,0,35,0,33.6,0.627,50,1\n6,0,66,29,94,0,0.351,31,0\n"
    }
    nan = np.nan
    out = _parsers.pima_missing(raw)
    np.testing.assert_array_equal(
        out["X"], [[0, 148, nan, 35, nan, 33.6, 0.627, 50], [6, nan, 66, 29, 94, nan, 0.351, 31]]
    )
    assert list(out["y"]) == [1, 0]
    table = _parsers.pima_table(raw)
    assert list(table["cells"][0]) == [
        "0.0",
        "148.0",
        "",
        "35.0",
        "",
        "33.6",
        "0.627",
        "50.0",
        "pos",
    ]
    assert table["header"][-1] == "diabetes"


def test_uci_tables():
    votes = _parsers.house_votes({"house-votes-84.data": b"republican,n,y,?" + b",y" * 13 + b"\n"})
    assert list(votes["header"][:2]) == ["Class", "V1"]
    assert list(votes["cells"][0, :4]) == ["republican", "n", "y", ""]

    breast = _parsers.breast_cancer(
        {"b.data": b"1000025,5,1,1,1,2,?,3,1,1,2\n1002945,5,4,4,5,7,10,3,2,1,4\n"}
    )
    assert list(breast["cells"][:, -1]) == ["benign", "malignant"]
    assert breast["cells"][0, 6] == ""

    row = "brown-spot," + ",".join("0" * 35)
    soy = _parsers.soybean(
        {
            "soybean-large.test": row.replace("spot", "rust").encode(),
            "soybean-large.data": f"{row}\n".encode(),
        }
    )
    assert list(soy["cells"][:, 0]) == ["brown-spot", "brown-rust"]  # data before test
    assert len(soy["header"]) == 36

    zoo = _parsers.zoo_animals(
        {
            "zoo.data": b"bass,0,0,1,0,0,1,1,1,1,0,0,1,0,1,0,0,4\nflea,0,0,1,0,0,0,0,0,0,1,0,0,6,0,0,0,6\n"
        }
    )
    assert list(zoo["cells"][0, -4:]) == ["True", "False", "False", "fish"]
    assert zoo["cells"][1, 12] == "6"
    assert zoo["cells"][1, -1] == "insect"


# Images


def png(pixels, depth, kinds):
    """Encodes rows of grey levels, each row by the filter that `kinds` names."""
    width, height = pixels.shape[1], pixels.shape[0]
    bits = ((pixels[..., None] >> np.arange(depth)[::-1]) & 1).reshape(height, -1).astype(np.uint8)
    rows = np.packbits(bits, axis=1).astype(int)
    lines, above = [], np.zeros(rows.shape[1], dtype=int)
    for kind, row in zip(kinds, rows, strict=True):
        a, b, c = np.r_[0, row[:-1]], above, np.r_[0, above[:-1]]
        p = a + b - c
        paeth = np.where(
            (abs(p - a) <= abs(p - b)) & (abs(p - a) <= abs(p - c)),
            a,
            np.where(abs(p - b) <= abs(p - c), b, c),
        )
        guess = [0 * a, a, b, (a + b) // 2, paeth][kind]
        lines.append(bytes([kind]) + ((row - guess) % 256).astype(np.uint8).tobytes())
        above = row
    packed = zlib.compress(b"".join(lines))
    chunk = lambda name, data: (
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
    )
    header = struct.pack(">IIBBBBB", width, height, depth, 0, 0, 0, 0)
    parts = chunk(b"IDAT", packed[:7]) + chunk(b"IDAT", packed[7:])
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + parts + chunk(b"IEND", b"")


@pytest.mark.parametrize("depth", [1, 2, 8])
def test_png_of_every_filter(depth):
    levels = np.random.default_rng(0).integers(2**depth, size=(10, 21))
    image = _images.read_png(png(levels, depth, [0, 1, 2, 3, 4] * 2))
    np.testing.assert_array_equal(image, levels * 255 // (2**depth - 1))


def test_png_of_another_kind_is_refused():
    data = bytearray(png(np.zeros((2, 2), dtype=int), 8, [0, 0]))
    data[25] = 2  # colour
    with pytest.raises(ValueError, match="wanted grey"):
        _images.read_png(bytes(data))
    with pytest.raises(ValueError, match="not a PNG"):
        _images.read_png(b"GIF89a")


def test_box_average_is_the_mean_of_whole_pixels():
    image = np.random.default_rng(1).integers(256, size=(56, 84)).astype(np.uint8)
    exact = image.reshape(28, 2, 28, 3).mean(axis=(1, 3))
    assert np.abs(_images.box_average(image) - exact).max() <= 1  # two roundings of a half each
    ink = np.zeros((105, 105), dtype=np.uint8)
    ink[8:11, 4:8] = 255  # cell 2 is pixels 8, 9, 10; cell 1 is 4, 5, 6, 7
    out = _images.box_average(ink)
    assert out[2, 1] == 255
    assert out.sum() == 255


def test_omniglot():
    drawing = np.ones((105, 105), dtype=int)
    drawing[:4, :4] = 0  # ink is black
    plain, inked = png(drawing * 0 + 1, 1, [0] * 105), png(drawing, 1, [2] * 105)
    background = {
        "images_background/Greek/character02/0002_01.png": plain,
        "images_background/Greek/character01/0001_02.png": inked,
    }
    background["images_background/Greek/character01/0001_01.png"] = plain
    evaluation = {
        "images_evaluation/Atlantean/character01/0003_01.png": plain,
        "images_evaluation/": b"",
    }
    out = _images.omniglot(
        {"images_background.zip": zipped(background), "images_evaluation.zip": zipped(evaluation)}
    )
    assert list(out["class_names"]) == ["0/Greek/01", "0/Greek/02", "1/Atlantean/01"]
    assert list(out["y"]) == [0, 0, 1, 2]
    assert list(out["drawer"]) == [1, 2, 1, 1]
    assert out["x"].shape == (4, 28, 28)
    assert out["x"][1, 0, 0] == 255
    assert out["x"].sum() == 255


def test_component_signs_agree_with_scikit_learn():
    rng = np.random.default_rng(2)
    images = rng.integers(256, size=(400, 8, 8)).astype(np.uint8)
    mnist = {
        "x_train": images[:300],
        "y_train": np.arange(300) % 10,
        "x_test": images[300:],
        "y_test": np.arange(100) % 10,
    }
    out = _images.mnist_component_signs(mnist)
    flat = images.reshape(400, 64).astype(float)
    projected = PCA(50).fit(flat[:300]).transform(flat)
    found = np.unpackbits(out["X_packed"], axis=1)[:, :50]
    agree = (found == (projected > 0)).mean(axis=0)
    assert set(agree.round(6)) <= {0.0, 1.0}  # a component's sign is free
    assert len(out["digit"]) == 400
    assert out["n_train"] == 300


# Baseball


@pytest.mark.parametrize(
    ("event", "counts"),
    [
        ("S8/L.2-H;1-3", (1, 1, 1)),
        ("DGR/L9", (1, 1, 1)),
        ("T9/F", (1, 1, 1)),
        ("HR/78/F.2-H", (1, 1, 1)),
        ("H/9", (1, 1, 1)),
        ("63/G", (1, 1, 0)),
        ("1!3/G+", (1, 1, 0)),
        ("64(1)3/GDP", (1, 1, 0)),
        ("K", (1, 1, 0)),
        ("K+SB2", (1, 1, 0)),
        ("K23", (1, 1, 0)),
        ("E6/TH/G.B-2", (1, 1, 0)),
        ("FC5/G.3XH(525);B-1", (1, 1, 0)),
        ("13/SH/BG.2-3", (1, 0, 0)),
        ("7/SF/F/DP.3-H", (1, 0, 0)),
        ("E8/SF.3-H", (1, 0, 0)),
        ("W+WP.1-3", (1, 0, 0)),
        ("IW", (1, 0, 0)),
        ("HP.1-2", (1, 0, 0)),
        ("C/E2", (1, 0, 0)),
        ("WP.2-3", (0, 0, 0)),
        ("SB2", (0, 0, 0)),
        ("CS2(26)", (0, 0, 0)),
        ("POCS2(136)", (0, 0, 0)),
        ("PB.1-2", (0, 0, 0)),
        ("DI.1-2", (0, 0, 0)),
        ("BK.1-2", (0, 0, 0)),
        ("OA/BINT", (0, 0, 0)),
        ("FLE5/P5F", (0, 0, 0)),
        ("NP", (0, 0, 0)),
    ],
)
def test_events(event, counts):
    assert _baseball.plate_appearance(event) == counts


GAME = """id,ANA200806150
start,away1,"Home, Away",0,1,6
start,pitch0,"A Pitcher",0,0,1
start,home1,"H One",1,1,5
start,pitch1,"B Pitcher",1,0,1
play,1,0,away1,22,FBFX,S9/L
play,1,1,home1,00,.X,SB2
play,1,1,home1,12,.FX,HR/9/F
play,2,0,away1,00,,NP
sub,relief,"C Pitcher",1,0,1
play,2,0,away1,31,.BBB,W
"""


def test_the_pitcher_at_the_end_of_the_turn_counts():
    counts = _baseball.event_counts(GAME.splitlines())
    assert counts == {
        ("away1", "pitch1"): [1, 1, 1, 1],
        ("home1", "pitch0"): [1, 1, 1, 2],
        ("away1", "relief"): [1, 0, 0, 1],
    }


def test_batter_pitcher_joins_tables_and_play_by_play():
    raw = {
        "headtohead-1999.csv": b"YEAR,RESP_BAT_ID,RESP_PIT_ID,B_PA,B_AB,B_H\n1999,away1,zeta,5,4,2\n",
        "headtohead-1998.csv": b"YEAR,PHASE,RESP_BAT_ID,RESP_PIT_ID,B_PA,B_AB,B_H\n1998,D,away1,zeta,9,9,9\n1998,R,home1,zeta,1,1,0\n",
        "2008eve.zip": zipped(
            {
                "2008ANA.EVA": GAME,
                "ANA2008.ROS": "not read",
                "2008SDN.EVN": GAME + "play,9,1,idle,00,.,SB2\n",
            }
        ),
    }
    out = _baseball.batter_pitcher(raw)
    assert list(out["year"]) == [1998, 1999, 2008, 2008, 2008]
    assert list(out["batter_id"]) == ["away1", "home1"]  # idle never ended a turn
    names = [
        (out["batter_id"][b], out["pitcher_id"][p])
        for b, p in zip(out["batter"], out["pitcher"], strict=True)
    ]
    assert names == [
        ("home1", "zeta"),
        ("away1", "zeta"),
        ("away1", "pitch1"),
        ("away1", "relief"),
        ("home1", "pitch0"),
    ]
    assert list(out["pa"]) == [1, 5, 2, 2, 2]
    assert list(out["ab"]) == [1, 4, 2, 0, 2]
    assert list(out["h"]) == [0, 2, 2, 0, 2]
    assert list(out["events2008"]) == [0, 0, 2, 2, 4]
    assert out["pa"].dtype == np.uint8
