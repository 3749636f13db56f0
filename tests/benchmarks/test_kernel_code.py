"""The reader of compiled CUDA kernels (benchmarks/kernel_code.py) notices what it is there to notice."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import kernel_code
from benchmarks.kernel_code import Bounds, Code, Row
from monet_like import build, toolchain
from monet_like.errors import MonetError

SOURCE = """
struct alignas(16) Four { float at[4]; };
template <typename T>
__global__ void vectors_kernel(const Four* __restrict__ x, Four* __restrict__ y, int count) {
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    Four v = x[i];
    v.at[0] += 1.0f;
    y[i] = v;
  }
}
template <typename T>
__global__ void scalars_kernel(const T* __restrict__ x, T* __restrict__ y, int count) {
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    y[i] = x[i] + T(1);
  }
}
template <typename T>
__global__ void divides_kernel(const T* __restrict__ x, T* __restrict__ y, int count, int width) {
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    y[i] = x[i / width];
  }
}
template <typename T>
__global__ void divides_64_bits_kernel(const T* __restrict__ x, T* __restrict__ y, long long count, long long width) {
  for (long long i = threadIdx.x; i < count; i += blockDim.x) {
    y[i] = x[i % width];
  }
}
__global__ void greedy_kernel(const float* __restrict__ x, float* __restrict__ y, int count) {
  __shared__ float all[12000];
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    all[threadIdx.x] = x[i];
    __syncthreads();
    y[i] = all[(threadIdx.x + 1) % 12000];
  }
}
__global__ void nobody_stated_kernel(float* x) { x[threadIdx.x] = 0; }
template __global__ void vectors_kernel<float>(const Four*, Four*, int);
template __global__ void scalars_kernel<float>(const float*, float*, int);
template __global__ void divides_kernel<float>(const float*, float*, int, int);
template __global__ void divides_64_bits_kernel<float>(const float*, float*, long long, long long);
"""
#: Of csrc/cuda, those whose kernels have bounds.
SOURCES = ("batch_norm", "caches", "masks", "max_pool", "rms_norm")
WIDE = Bounds(kernel_code.own, kernel_code.own, load=16, store=16, issue=0.5)
NARROW = Bounds(kernel_code.own, kernel_code.own, load=4, store=4, issue=2.0)
BOUNDS = {
    "vectors_kernel": WIDE,
    "scalars_kernel": WIDE,
    "divides_kernel": NARROW,
    "divides_64_bits_kernel": NARROW,
    "greedy_kernel": replace(NARROW, resident=1280),
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Row]:
    source = tmp_path_factory.mktemp("code") / "planted.cu"
    source.write_text(SOURCE)
    try:
        found = list(kernel_code.rows_of([source], ["90"], BOUNDS))
    except kernel_code.ToolMissing as reason:
        pytest.skip(str(reason))
    return {row.kernel.partition("<")[0]: row for row in found}


def test_a_kernel_that_keeps_its_bounds(rows: dict[str, Row]) -> None:
    row = rows["vectors_kernel"]
    assert row.problems == ()
    assert (row.load, row.store, row.divisions) == (16, 16, 0)
    assert 1 < row.per_element < 10


def test_scalar_accesses_are_seen(rows: dict[str, Row]) -> None:
    assert {"loads 4 bytes at a time, not 16", "stores 4 bytes at a time, not 16"} <= set(
        rows["scalars_kernel"].problems
    )


@pytest.mark.parametrize("kernel", ["divides_kernel", "divides_64_bits_kernel"])
def test_divisions_in_loops_are_seen(rows: dict[str, Row], kernel: str) -> None:
    assert any("divisions of integers" in problem for problem in rows[kernel].problems)


def test_few_resident_threads_are_seen(rows: dict[str, Row]) -> None:
    assert rows["greedy_kernel"].problems == ("1024 resident threads, not 1280",)


def test_a_kernel_without_bounds_fails(rows: dict[str, Row]) -> None:
    assert any("no bounds are stated" in problem for problem in rows["nobody_stated_kernel"].problems)


def test_the_built_kernels_keep_their_bounds() -> None:
    library = build.library_path("kernels_cuda")
    sources = [*toolchain.source_directory().glob("*.h"), *toolchain.source_directory().glob("cuda/*")]
    if not library.exists() or library.stat().st_mtime < max(path.stat().st_mtime for path in sources):
        pytest.skip(
            "the CUDA kernels are not built from the present sources: MONET_LIKE_CUDA=1 python -m monet_like.build"
        )
    try:
        found = list(kernel_code.rows_of_built(library, SOURCES, ("80", "90")))
    except MonetError as reason:
        pytest.skip(str(reason))
    assert found and not [(row.architecture, row.kernel, row.problems) for row in found if row.problems]


def test_instructions_beyond_the_bound_are_seen() -> None:
    """A loop of 36 instructions for 4 bytes read and 4 written; needs no compiler."""
    body = ["LDG.E R2, [R4.64]", *["FADD R2, R2, R2"] * 33, "STG.E [R6.64], R2", "@!P0 BRA 0x10"]
    texts = ["MOV R1, R2", *body, "EXIT"]
    code = Code("busy_kernel<float>", "", tuple((16 * i, text) for i, text in enumerate(texts)), 32, 0, 0)
    row = kernel_code.judged(code, "90", {"busy_kernel": Bounds(NARROW.loads, NARROW.stores, 4, 4, issue=0.5)})
    assert (row.per_element, row.per_byte) == (36, 4.5)
    assert row.problems == ("takes 0.51 of the issue slots, more than 0.5",)


def test_loops_over_odd_elements_are_left_out_where_that_is_stated() -> None:
    """A loop over vectors of four floats, and one over what is left over; needs no compiler."""
    loop = ["LDG.E{0} R4, [R2.64]", "FADD R4, R4, R4", "STG.E{0} [R6.64], R4", "@!P0 BRA {1}"]
    body = [text.format(*which) for which in ((".128", "0x10"), ("", "0x50")) for text in loop]
    texts = ["MOV R1, R2", *body, "EXIT"]
    code = Code("two_kernel<float>", "", tuple((16 * i, text) for i, text in enumerate(texts)), 32, 0, 0)
    assert kernel_code.judged(code, "90", {"two_kernel": WIDE}).per_element == 5
    assert kernel_code.judged(code, "90", {"two_kernel": replace(WIDE, odd=True)}).per_element == 1
