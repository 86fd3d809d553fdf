"""Pickles that do something when they are opened. Test support only."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import torch

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)


class Touch:
    """Unpickling it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str, ...]]:
        return os.mkdir, (str(self.marker),)


def assert_live(data: bytes, marker: Path, load: Callable[[io.BytesIO], object] = pickle.load) -> None:
    """The attack works where nobody looks: otherwise its refusal would prove nothing."""
    load(io.BytesIO(data))
    marker.rmdir()


def torch_bytes(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def load_unsafe(stream: io.BytesIO) -> object:
    return torch.load(stream, weights_only=False)
