"""Which tensors of a model's blocks are frozen weights, plain or quantised, and the host's memory for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..errors import MonetError
from ..ir.units import format_bytes

#: Smaller tensors stay on the device: a copy of them takes as long as one of a page.
LEAST_BYTES = 4096
#: Slots and weights begin at multiples of this, as PyTorch's allocator has it.
ALIGNMENT = 512
#: Share of the host's available memory that weights may take.
HOST_SHARE = 0.9


@dataclass(frozen=True, eq=False)
class Place:
    """Memory for a weight.

    Attributes:
        whole: uint8 [bytes].
        tensors: like the weight's, in the same storage.
    """

    whole: Tensor
    tensors: list[Tensor]


@dataclass(eq=False)
class Weight:
    """A storage of frozen tensors.

    Attributes:
        name: of the parameter, for people.
        owner: what the module has as its parameter.
        tensors: the model's tensors that lie in the storage.
        bytes: of the storage.
    """

    name: str
    owner: Any
    tensors: list[Tensor]
    bytes: int

    @property
    def plain(self) -> bool:
        """Whether it is one dense parameter; not so numbers and scales of a quantised one."""
        return len(self.tensors) == 1 and type(self.tensors[0]) is nn.Parameter

    def sum(self) -> int:
        """Of its bytes, eight by eight: that of another weight is another, as good as always."""
        with torch.no_grad():
            whole = torch.empty(0, dtype=torch.uint8, device=self.tensors[0].device)
            whole.set_(self.tensors[0].untyped_storage())
            eights = self.bytes // 8 * 8
            return int(whole[:eights].view(torch.int64).sum()) + int(whole[eights:].sum())


def placed(tensors: Iterable[Tensor], storage: torch.UntypedStorage) -> Place:
    """Tensors like others of one storage in another one."""
    device = storage.device
    return Place(
        torch.empty(0, dtype=torch.uint8, device=device).set_(storage),
        [
            torch.empty(0, dtype=t.dtype, device=device).set_(storage, t.storage_offset(), t.shape, t.stride())
            for t in tensors
        ],
    )


def frozen_weights(model: nn.Module, blocks: Sequence[nn.Module]) -> list[list[Weight]]:
    """The weights of every block that may be streamed: frozen, of a page or more, and in no other part of the model."""
    owners: dict[int, set[int]] = {}
    inside = {part for block in blocks for part in block.modules()}
    rest = [module for module in model.modules() if module not in inside]
    groups: list[dict[int, Weight]] = []
    for number, modules in enumerate([*(block.modules() for block in blocks), rest]):
        found: dict[int, Weight] = {}
        trained: set[int] = set()
        for name, owner, tensor, streams in _tensors(modules):
            key = tensor.untyped_storage()._cdata
            owners.setdefault(key, set()).add(number)
            if tensor.requires_grad or not streams:
                trained.add(key)
            weight = found.setdefault(key, Weight(name, owner, [], tensor.untyped_storage().nbytes()))
            if all(tensor is not other for other in weight.tensors):
                weight.tensors.append(tensor)
        groups.append({key: w for key, w in found.items() if w.bytes >= LEAST_BYTES and key not in trained})
    return [[w for key, w in found.items() if len(owners[key]) == 1] for found in groups[:-1]]


def move_rest(module: nn.Module, weights: Iterable[Weight], device: torch.device) -> None:
    """Move what is no streamed weight of a module from the host to a device; its tensors stay the same objects."""
    mine = {id(tensor) for weight in weights for tensor in weight.tensors}
    for _, _, tensor, _ in _tensors(module.modules()):
        if id(tensor) not in mine and tensor.device.type == "cpu":
            tensor.data = tensor.data.to(device)


def _tensors(modules: Iterable[nn.Module]) -> Iterator[tuple[str, Any, Tensor, bool]]:
    """The plain tensors that modules hold: name, the parameter or buffer that each is a part of, the tensor, and
    whether that is a parameter.

    A quantised parameter has its scales as attributes of its own, and its layer may hold them once more.
    """
    for module in modules:
        for name, value in vars(module).items():
            named = value.items() if name in ("_parameters", "_buffers") else [(name, value)]
            for key, held in named if name != "_modules" else ():
                own = name == "_parameters" or (name != "_buffers" and _is_of_quantised(held))
                for part in _parts(held, set()):
                    yield key, held, part, own or isinstance(part, nn.Parameter)


def _is_of_quantised(value: Any) -> bool:
    """Whether a layer of bitsandbytes holds in it what its weight has as well."""
    return type(value).__module__.startswith("bitsandbytes")


def _parts(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """The plain tensors of a tensor: of one of a class with parts these, and those among its attributes."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        if is_traceable_wrapper_subclass(value):
            for name in value.__tensor_flatten__()[0]:
                yield from _parts(getattr(value, name), seen)
        elif value.layout is torch.strided and value.device.type != "meta":
            yield value
    elif not _is_of_quantised(value):
        return
    for held in (getattr(value, "__dict__", None) or {}).values():
        yield from _parts(held, seen)


def slot_bytes(weights: Iterable[Weight]) -> int:
    """What a block's weights take in a slot."""
    return sum(aligned(weight.bytes) for weight in weights)


def aligned(count: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return -(-count // ALIGNMENT) * ALIGNMENT


def host_bytes(count: int, device: torch.device) -> int:
    """What ``count`` bytes take there: PyTorch rounds pinned memory up to a power of two."""
    return 1 << (count - 1).bit_length() if device.type == "cuda" else count


def more_on_host(weights: Sequence[Weight], device: torch.device) -> int:
    """Further bytes of the host that are taken while weights move there one by one; those there already are freed."""
    there = sum(w.bytes for w in weights if w.tensors[0].device.type == "cpu" and device.type == "cuda")
    whole = sum(host_bytes(w.bytes, device) for w in weights)
    return max(max((w.bytes for w in weights), default=0), whole - there)


def available_bytes() -> int:
    """Of the host's memory, as the system estimates it."""
    return int(psutil.virtual_memory().available)


def check_host(wanted_bytes: int, device: torch.device, processes: int = 1) -> None:
    """Check that the host has room for weights of so many processes.

    Raises:
        MonetError: it has not.
    """
    there = available_bytes()
    if wanted_bytes > HOST_SHARE * there:
        whose = f" in {processes} processes" if processes > 1 else ""
        raise MonetError(
            f"weights of {format_bytes(wanted_bytes)}{whose} are to be kept in {'pinned ' * (device.type == 'cuda')}"
            f"memory of the host, of which {format_bytes(there)} are available; free some, quantise the frozen weights "
            "(4 bits take a quarter), give a larger memory_budget, or shard the model over more cards"
        )


def host_memory(count: int, device: torch.device) -> Tensor:
    """uint8 [count] of the host, pinned where a GPU copies from it.

    Raises:
        MonetError: it cannot be pinned.
    """
    try:
        return torch.empty(count, dtype=torch.uint8, pin_memory=device.type == "cuda")
    except RuntimeError as error:
        raise MonetError(
            f"{format_bytes(count)} of the host's memory could not be pinned for a weight: "
            f'{str(error).splitlines()[0]}; raise the limit of locked memory (ulimit -l), or give weights="device"'
        ) from None
