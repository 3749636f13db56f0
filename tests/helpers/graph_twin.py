"""CUDA graphs without a GPU: what was recorded runs again, into the tensors that its first run has made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from monet_like.replay.graphs.copies import Tensors
from monet_like.replay.graphs.model import ModelGraphs
from monet_like.replay.graphs.recorder import Replay


class TwinRecorder:
    """A `Recorder` on a CPU. Recording computes nothing, as on a GPU.

    What a replay makes is made to lie where the first one has made it: parameters are read where they were recorded,
    and results, saved values and gradients are overwritten by the next replay.
    """

    alignment_bytes = 1
    fails_safely = True

    def __init__(self) -> None:
        self.place: object | None = "a stream"
        self.recorded = self.replayed = 0
        self.pool_bytes, self.free, self.beside = 0, 2**40, -1
        #: Seconds between two readings of the clock: without replays meanwhile, and with.
        self.takes = 0.2, 0.1
        #: At each reading of the clock, how many graphs were replayed since the last one.
        self.windows: list[int] = []
        self._now = 0.0

    def seconds(self) -> float:
        """A clock that knows nothing but replays."""
        self.windows.append(self.replayed - sum(self.windows))
        self._now += self.takes[self.windows[-1] > 0]
        return self._now

    def free_bytes(self, beside: int) -> int:
        self.beside = beside
        return self.free

    def stream(self) -> object | None:
        return self.place

    @contextmanager
    def session(self) -> Iterator[None]:
        yield

    def record(self, function: Callable[[], Tensors]) -> Replay:
        self.recorded += 1
        places: Tensors = []
        storages: dict[int, torch.UntypedStorage] = {}

        def replay() -> Tensors:
            self.replayed += 1
            with torch.no_grad():
                for number, made in enumerate(function()):
                    if number == len(places):
                        places.append(None if made is None else _own(made, storages))
                    place = places[number]
                    if made is not None and place is not None:
                        bytes_of(place).copy_(bytes_of(made))
                        made.set_(place.untyped_storage(), place.storage_offset(), place.shape, place.stride())
            return places

        return replay


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """All of the storage that a tensor lies in."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def _own(tensor: torch.Tensor, storages: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    """A tensor that lies as another does, in a copy of its storage; ``storages``: the copies by address."""
    at = tensor.untyped_storage().data_ptr()
    storage = storages.setdefault(at, bytes_of(tensor).clone().untyped_storage())
    other = torch.empty(0, dtype=tensor.dtype)
    return other.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def twin_graphs(recorder: TwinRecorder, *, always: bool = True) -> ModelGraphs:
    """Graphs of a model on a CPU."""
    return ModelGraphs(always, {"cpu": lambda device: recorder})
