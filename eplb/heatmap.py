"""A heat map as a PNG, written with the standard library: rank loads before and after, layers down, ranks across."""

import struct
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_CELL = 8  # pixels
_GAP = 16  # between the two halves, white
# Rank load / mean of its layer: from 0 over 1 to 2 and more.
_COLOURS = np.array([[33, 64, 154], [245, 245, 240], [178, 24, 43]], np.float64)


def write(path: Path, before: NDArray[np.float64], after: NDArray[np.float64]) -> None:
    """Both [layers, ranks] of rank loads: blue below the layer's mean, white at it, red at twice the mean or above."""
    halves = [np.kron(colours(half), np.ones((_CELL, _CELL, 1), np.uint8)) for half in (before, after)]
    gap = np.full((halves[0].shape[0], _GAP, 3), 255, np.uint8)
    path.write_bytes(png(np.concatenate([halves[0], gap, halves[1]], axis=1)))


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
