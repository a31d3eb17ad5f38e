"""Images: the drawings of Omniglot, and the signs of the principal components of MNIST.

The drawings are read at 28 x 28 from zipped PNG files.

Neither of the two needs an image library: the drawings are grey PNG files of one bit, for which
zlib suffices.
"""

import io
import re
import struct
import zipfile
import zlib
from collections.abc import Mapping

import numpy as np

__all__ = ["box_average", "mnist_component_signs", "omniglot", "read_png"]

SIZE = 28
NUM_COMPONENTS = 50
NUM_FITTED = 5000
DRAWING = re.compile(
    r"images_(?P<part>background|evaluation)/(?P<alphabet>[^/]+)/character(?P<character>\d+)/\d+_(?P<drawer>\d+)\.png"
)


def omniglot(raw: Mapping[str, bytes]) -> dict[str, np.ndarray]:
    """images_background.zip and images_evaluation.zip as 28 x 28 bytes, ink 255, sorted by
    character and drawer.
    """
    drawings = {}
    for data in raw.values():
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for path in archive.namelist():
                found = DRAWING.fullmatch(path)
                if found:
                    part = "01"[found["part"] == "evaluation"]
                    key = (f"{part}/{found['alphabet']}/{found['character']}", int(found["drawer"]))
                    drawings[key] = box_average(255 - read_png(archive.read(path)))
    keys = sorted(drawings)
    names = sorted({name for name, _ in keys})
    index = {name: i for i, name in enumerate(names)}
    return {
        "x": np.stack([drawings[key] for key in keys]),
        "y": np.array([index[name] for name, _ in keys], dtype=np.int16),
        "drawer": np.array([drawer for _, drawer in keys], dtype=np.int8),
        "class_names": np.array(names),
    }


def read_png(data: bytes) -> np.ndarray:
    """A grey PNG image of at most 8 bits a pixel, not interlaced, as bytes 0 .. 255."""
    if data[:8] != b"\x89PNG\r\n\x1a\n":
        raise ValueError("not a PNG file")
    width, height, depth, colour, _, _, interlaced = struct.unpack(">IIBBBBB", data[16:29])
    if colour != 0 or depth > 8 or interlaced:
        raise ValueError(
            f"a PNG file of colour type {colour}, depth {depth}, interlaced {interlaced}; wanted "
            "grey, at most 8 bits, plain"
        )
    packed, position = b"", 8
    while position < len(data):
        (length,) = struct.unpack(">I", data[position : position + 4])
        if data[position + 4 : position + 8] == b"IDAT":
            packed += data[position + 8 : position + 8 + length]
        position += length + 12
    stride = (width * depth + 7) // 8
    lines = np.frombuffer(zlib.decompress(packed), np.uint8).reshape(height, 1 + stride)
    bits = np.unpackbits(_unfilter(lines), axis=1)[:, : width * depth].reshape(height, width, depth)
    levels = bits @ (1 << np.arange(depth)[::-1])
    return (levels * 255 // (2**depth - 1)).astype(np.uint8)


def _unfilter(lines: np.ndarray) -> np.ndarray:
    """The bytes of each line from those on its left (a), above (b) and above left (c), by the
    filter that its first byte names.
    """
    height, stride = lines.shape[0], lines.shape[1] - 1
    # with a line and a column of zeros before the first
    out = np.zeros((height + 1, stride + 1), dtype=np.int64)
    for i in range(height):
        kind, line = int(lines[i, 0]), lines[i, 1:].astype(np.int64)
        if kind > 4:
            raise ValueError(f"PNG filter {kind} does not exist")
        if kind in (0, 1, 2):  # nothing, a, b
            out[i + 1, 1:] = (
                np.cumsum(line) if kind == 1 else line + (out[i, 1:] if kind == 2 else 0)
            ) % 256
            continue
        for j in range(stride):
            a, b, c = out[i + 1, j], out[i, j + 1], out[i, j]
            guess = (
                (a + b) // 2 if kind == 3 else min((a, b, c), key=lambda v, p=a + b - c: abs(p - v))
            )
            out[i + 1, j + 1] = (line[j] + guess) % 256
    return out[1:, 1:].astype(np.uint8)


def box_average(image: np.ndarray, size: int = SIZE) -> np.ndarray:
    """Averages whole pixels: cell k covers round(k r) .. round((k + 1) r), r the ratio of sizes;
    along rows, then columns.

    Each pass rounds to a byte (halves up), as image libraries do; 105 / 28 is 3.75, so that a cell
    is 3 or 4 pixels wide.
    """
    for _ in range(2):
        edges = np.floor(np.arange(size + 1) * image.shape[1] / size + 0.5).astype(int)
        sums = np.add.reduceat(image.astype(np.int64), edges[:-1], axis=1)
        image = (np.floor(sums / np.diff(edges) + 0.5).astype(np.uint8)).T
    return image


def mnist_component_signs(mnist: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Which of its first 50 centred principal components each MNIST image has positive.

    The components are those of 5000 random training images; the largest loading of each is made
    positive. No projection lies within 1e-5 of zero, in pixels of 0 .. 255, so that float64 gives
    the same bits on every machine.
    """
    train = mnist["x_train"].reshape(len(mnist["x_train"]), -1)
    pixels = np.concatenate([train, mnist["x_test"].reshape(len(mnist["x_test"]), -1)])
    chosen = np.random.default_rng(0).choice(len(train), min(NUM_FITTED, len(train)), replace=False)
    fitted = train[chosen].astype(float)
    _, _, components = np.linalg.svd(fitted - fitted.mean(axis=0), full_matrices=False)
    components = components[:NUM_COMPONENTS]
    largest = np.take_along_axis(components, np.abs(components).argmax(axis=1)[:, None], axis=1)
    signs = (pixels - fitted.mean(axis=0)) @ (components * np.sign(largest)).T > 0
    return {
        "X_packed": np.packbits(signs, axis=1),
        "n_features": np.array(len(components), dtype=np.int64),
        "digit": np.concatenate([mnist["y_train"], mnist["y_test"]]),
        "n_train": np.array(len(train), dtype=np.int64),
        "pca_idx": chosen,
    }
