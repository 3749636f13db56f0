"""Pickles of numbers, strings and containers only: loading one cannot run code."""

from __future__ import annotations

import io
import numbers
import pickle
from pathlib import Path
from typing import Any

from ..errors import ScheduleFileError


class _PlainUnpickler(pickle.Unpickler):
    """Unpickler that refuses every reference to a class or function, by whatever opcode."""

    def find_class(self, module: str, name: str) -> Any:
        raise ScheduleFileError(f"it names {module}.{name}, and a schedule holds plain data only")

    def persistent_load(self, pid: Any) -> Any:
        raise ScheduleFileError("it holds a persistent reference, and a schedule holds plain data only")


def dump_plain(content: Any) -> bytes:
    """Pickle plain builtins (protocol 4) for `load_plain`.

    Raises:
        TypeError: ``content`` holds something that is neither plain nor stands for something plain.
    """
    return pickle.dumps(_plain(content), protocol=4)


def _plain(content: Any) -> Any:
    """Convert to builtins: PyTorch's version (a str) and numpy's numbers would be pickled with their classes."""
    if content is None or isinstance(content, bool):
        return content
    if isinstance(content, dict):
        return {_plain(key): _plain(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_plain(value) for value in content]
    if isinstance(content, str):
        return str(content)
    if isinstance(content, numbers.Integral):
        return int(content)
    if isinstance(content, numbers.Real):
        return float(content)
    raise TypeError(f"{type(content).__name__} is not plain data")


def load_plain(data: bytes, path: Path) -> Any:
    """The content of a pickle that holds nothing but dicts, lists, tuples, strings, numbers, booleans and None.

    Raises:
        ScheduleFileError: truncated, no pickle, or holding anything else; nothing in the file is ever called.
    """
    import pickletools

    refused = {
        "GLOBAL",
        "STACK_GLOBAL",
        "INST",
        "OBJ",
        "NEWOBJ",
        "NEWOBJ_EX",
        "REDUCE",
        "BUILD",
        "EXT1",
        "EXT2",
        "EXT4",
    }
    try:
        for opcode, argument, _ in pickletools.genops(data):  # before anything is built
            if opcode.name in refused or "PERSID" in opcode.name:
                raise ScheduleFileError(
                    f"{path} is refused: a schedule holds plain data only, and this file has "
                    f"{opcode.name} {argument or ''}".strip()
                )
            if "PUT" in opcode.name and int(argument or 0) > len(data):  # pickle would allocate a table up to it
                raise ScheduleFileError(f"{path} is refused: it has the memo index {argument}")
        return _PlainUnpickler(io.BytesIO(data)).load()
    except ScheduleFileError:
        raise
    except Exception as error:  # pickletools and pickle raise whatever the bytes provoke
        raise ScheduleFileError(f"{path} is not a schedule file, or is cut short: {error}") from None
