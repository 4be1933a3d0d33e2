"""A heat map as a PNG, written with the standard library: rank loads before and after, layers down, ranks across."""

import struct
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_CELL = 16  # pixels, the last row and column of them a line
_GAP = 16  # between the two halves and around them: dark, so that even halves, which are white, stand out
_LINE, _GROUND = 205, 48  # greys
# Rank load / mean of its layer: from 0 over 1 to 2 and more.
_COLOURS = np.array([[33, 64, 154], [245, 245, 240], [178, 24, 43]], np.float64)


def write(path: Path, before: NDArray[np.float64], after: NDArray[np.float64]) -> None:
    """Both [layers, ranks] of rank loads: blue below the layer's mean, white at it, red at twice the mean or above."""
    layers, ranks = before.shape
    width = ranks * _CELL
    pixels = np.full((layers * _CELL + 2 * _GAP, 2 * width + 3 * _GAP, 3), _GROUND, np.uint8)
    for half, left in ((before, _GAP), (after, width + 2 * _GAP)):
        pixels[_GAP:-_GAP, left : left + width] = cells(colours(half))
    path.write_bytes(png(pixels))


def cells(colour: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """[layers, ranks, 3] → pixels, every cell a square with a line below and to the right of it."""
    layers, ranks, _ = colour.shape
    squares = np.full((layers, _CELL, ranks, _CELL, 3), _LINE, np.uint8)
    squares[:, :-1, :, :-1] = colour[:, None, :, None]
    return squares.reshape(layers * _CELL, ranks * _CELL, 3)


def colours(loads: NDArray[np.float64]) -> NDArray[np.uint8]:
    """[layers, ranks] → [layers, ranks, 3]."""
    mean = loads.mean(axis=1, keepdims=True)
    relative = np.divide(loads, mean, out=np.ones_like(loads), where=mean > 0).clip(0, 2)
    low = relative.astype(np.int64).clip(0, 1)
    part = (relative - low)[..., None]
    return np.rint(_COLOURS[low] * (1 - part) + _COLOURS[low + 1] * part).astype(np.uint8)


def png(pixels: NDArray[np.uint8]) -> bytes:
    """[height, width, 3] as an 8-bit RGB image."""
    height, width, _ = pixels.shape
    rows = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], axis=1)  # 0: no filter
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = (b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 9)), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in parts)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
