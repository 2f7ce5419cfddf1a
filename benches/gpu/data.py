"""Writes random training data for a model: `pipec inspect MODEL --format json | data.py ROWS FILE.npz`.

`pipec train --synthetic-data` computes targets with a second network, which takes minutes for large models.
"""

from __future__ import annotations

import json
import random
import struct
import sys
import zipfile
from array import array
from typing import Any, List, Tuple

# Letters of `array`, and names of numpy.
LETTERS = {"f32": ("f", "<f4"), "f64": ("d", "<f8"), "i64": ("q", "<i8"), "i32": ("i", "<i4")}


def npy(values: array, kind: str, shape: List[int]) -> bytes:
    """An array in numpy's format."""
    if sys.byteorder == "big":
        values.byteswap()
    dimensions = "".join(f"{size}, " for size in shape)
    header = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': ({dimensions}), }}"
    header += " " * (-(len(header) + 11) % 64) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + values.tobytes()


def drawn(source: random.Random, dtype: str, shape: List[int], most: int) -> bytes:
    """Numbers from -1 to 1, or integers below `most`."""
    letter, kind = LETTERS[dtype]
    count = 1
    for size in shape:
        count *= size
    if letter in "fd":
        values = array(letter, (2 * source.random() - 1 for _ in range(count)))
    else:
        values = array(letter, (int(most * source.random()) for _ in range(count)))
    return npy(values, kind, shape)


def fact(text: str) -> Tuple[str, List[int]]:
    """The type and the shape without the batch, of a text such as `f32[batch, 10]`."""
    dtype, sizes = text.rstrip("]").split("[")
    return dtype, [int(size) for size in sizes.split(",")[1:]]


def main() -> None:
    rows, path = int(sys.argv[1]), sys.argv[2]
    model: Any = json.load(sys.stdin)
    *places, classes = fact(model["outputs"][0]["fact"])[1]
    source = random.Random(0)
    with zipfile.ZipFile(path, "w") as file:
        for given in model["inputs"]:
            dtype, sizes = fact(given["fact"])
            # Segments are those of BERT.
            most = 2 if given["name"] == "segments" else classes
            file.writestr(f"{given['name']}.npy", drawn(source, dtype, [rows, *sizes], most))
        file.writestr("target.npy", drawn(source, "i64", [rows, *places], classes))


if __name__ == "__main__":
    main()
