"""The emulator finds one mistake per wrong kernel (cases.cu) and none in the right ones, in every order of threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from .control import configure

_library = torch.library.Library("monet_like", "FRAGMENT")
_library.define("emulator_run(Tensor x, str which, int blocks) -> Tensor")
_library.define("emulator_unguarded(Tensor x) -> Tensor")
run = torch.ops.monet_like.emulator_run


@pytest.fixture(params=["forward", "reverse", "random:1", "random:2"], autouse=True)
def _order(request: pytest.FixtureRequest) -> Iterator[None]:
    configure(request.param)
    yield


RACE = "race: (reads|writes) 4 bytes of shared variable tile|not written: reads 4 bytes at byte .* tile"
WRONG = [
    ("beyond", 50, 1, r"out of bounds: reads 4 bytes at byte 200 of a tensor of 200 bytes at .*cases.cu:\d\d;"),
    ("before", 50, 1, "out of bounds: reads 4 bytes at byte -4 of a tensor of 200 bytes"),
    ("misaligned", 50, 1, "misaligned: writes 'unsigned int' at an address that is 2 past a multiple of 4 at cases.cu"),
    ("never", 50, 1, "not written: reads 4 bytes at byte .* of a tensor of 200 bytes"),
    ("freed", 50, 1, "out of bounds: reads 4 bytes at an address which is in no tensor"),
    ("host", 50, 1, "writes 8? ?.*the host's stack"),
    ("reversed1", 50, 1, RACE),
    ("reversed2", 50, 1, "not written: reads 4 bytes at byte 196 of shared variable tile"),
    ("reversed3", 50, 1, "out of bounds: reads 4 bytes at byte .* of shared variable tile of 256 bytes|in no tensor"),
    ("reversed4", 50, 1, "barrier that not all threads reach|deadlock: .*wait at __syncthreads .*have left the kernel"),
    ("reversed5", 50, 1, "deadlock: .*|barrier that not all threads reach|race|not written"),
    ("reversed6", 50, 1, "threads meet at different barriers"),
    ("sums1", 50, 1, "__shfl_down_sync that not all lanes reach|wait at __shfl_down_sync .*have left the kernel"),
    ("sums2", 64, 1, "the mask lacks the calling lane"),
    ("sums3", 64, 1, "reads from lane .*, which takes no part"),
    ("sums4", 64, 1, "lanes of a warp meet at different exchanges"),
    ("sums5", 64, 1, "deadlock: .*wait at __syncthreads.*wait at __shfl_xor_sync"),
    ("blocks", 50, 2, "race: writes 4 bytes of byte 0 of a tensor of 200 bytes"),
    ("threads", 50, 1, "race|not written"),
    ("asserts", 50, 1, "device-side assertion"),
    ("vectors1", 50, 1, "misaligned: .*float4' at an address that is 4 past a multiple of 16"),
    ("vectors2", 50, 1, "out of bounds: reads 16 bytes at byte 192 of a tensor of 200 bytes"),
    ("vectors3", 50, 1, "not written: reads 16 bytes at byte .* of a tensor of 200 bytes"),
    ("eight1", 50, 1, "misaligned: .*Eight' at an address that is 8 past a multiple of 16"),
    ("uint41", 50, 1, "misaligned: .*uint4' at an address that is 12 past a multiple of 16"),
    ("dynamic1", 50, 1, RACE),
    ("dynamic2", 50, 1, "out of bounds: writes 4 bytes at byte 196 of shared variable tile of 196 bytes"),
    ("dynamic3", 50, 1, "dynamic shared memory tile of a launch without any"),
    ("dynamic4", 50, 1, "invalid value, from cudaFuncSetAttribute"),
    ("dynamic5", 50, 1, "50000 bytes of dynamic shared memory, 49152 are allowed"),
    ("turned1", 50, 1, RACE),
    ("turned2", 50, 1, RACE),
    ("last1", 50, 5, "race: (reads|writes) 4 bytes of byte .* of a tensor|not written"),
    ("last2", 50, 5, "race: (reads|writes) 4 bytes of byte .* of a tensor|not written"),
    ("large", 50, 1, "cannot be launched"),
    ("beyond", 50, 0, "cannot be launched"),
]


@pytest.mark.parametrize(("which", "n", "blocks", "message"), WRONG)
def test_mistakes_are_found(which: str, n: int, blocks: int, message: str) -> None:
    x = torch.randn(n)
    with pytest.raises(RuntimeError, match=message):
        run(x, which, blocks)
    assert torch.equal(run(x[:50], "reversed", 1), x[:50].flip(0))  # and it goes on


def test_a_guard_is_needed() -> None:
    with pytest.raises(RuntimeError, match="no CUDAGuard"):
        torch.ops.monet_like.emulator_unguarded(torch.randn(5))


def test_right_kernels_run() -> None:
    x = torch.randn(50)
    for n in (1, 31, 32, 33, 50):
        assert torch.equal(run(x[:n].clone(), "reversed", 1), x[:n].flip(0))
        sums = run(x[:n].clone(), "sums", 1) if n > 1 else x[:1]
        assert torch.allclose(sums[0], x[: min(n, 32)].sum(), atol=1e-5)
    x = torch.randn(1000)
    found = run(x, "counts", 16)[:2].view(torch.int32)
    assert found.tolist() == [int((x <= 0).sum()), int((x > 0).sum())]
    x[3] = torch.nan
    assert run(x, "largest", 1)[0] == x.nan_to_num(-9).max()


@pytest.mark.parametrize("blocks", [1, 2, 5])
@pytest.mark.parametrize("n", [16, 50, 1027])
def test_fast_kernels_run(n: int, blocks: int) -> None:
    x = torch.randn(n)
    assert torch.equal(run(x, "vectors", blocks), 2 * x)
    for which in ("eight", "uint4", "pair"):
        assert torch.equal(run(x, which, 1), x), which
    if n <= 50:
        assert torch.equal(run(x, "dynamic", 1), x.flip(0))
        assert torch.equal(run(x, "turned", 1)[: min(n, 32) - 1], x[1 : min(n, 32)])
    assert torch.allclose(run(x, "last", blocks)[0], x.sum(), atol=1e-4)


def test_intrinsics() -> None:
    x = torch.tensor([1 + 2.0**-13, 1 - 2.0**-13, -1.0, *range(47)])
    fused = (x[0].double() * x[1].double() + x[2].double()).float()
    product = x[0] * x[1]
    assert fused != product + x[2]
    # Of lane 3: the high word of word * 0xfffffff0 is word - word / 2**28 - 1, and word is 0x80c0e0f3.
    expected: list[float | torch.Tensor] = [fused, fused, product, 64 - 9, 11, 7, 3 ^ 5, 1, 15 + 4, -x[0], x[1], 2]
    assert run(x, "intrinsics", 2)[:12].tolist() == [float(value) for value in expected]
