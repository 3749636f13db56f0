"""What the compiler made of the CUDA kernels: python -m benchmarks.kernel_code

Compiles csrc/cuda for each architecture and reads the machine code (``cuobjdump -sass``) and its resources. Nothing is
run and nothing is measured: the figures say whether a kernel *can* keep up with a GPU's memory, not that it does.

A row per architecture, kernel and types of its elements. Of each kernel the loops that touch global memory are looked
at, innermost ones only; a kernel without a loop counts as one. Instructions are counted as they stand in the loop, both
sides of a branch together, so that the count is an upper bound.

* **instructions per element, per byte**: of a thread, for one element, and for one byte that the kernel must read or
  write.
* **issue**: share of an H100's issue slots (4 warps a cycle) that this takes at 14.5 bytes per cycle and
  multiprocessor, which is its whole memory bandwidth. Above one the kernel is slower than the memory.
* **load, store**: bytes of the widest instruction in these loops.
* **divisions**: of integers, anywhere in the kernel, as the compiler moves half of one out of its loop. There is no
  instruction for them; each is two dozen others or a call.
* **resident**: threads that a multiprocessor holds at once, by registers and shared memory.

The command fails when a kernel leaves its `BOUNDS`, spills registers, or has none stated.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import click

from benchmarks.rows import markdown_table
from monet_like import build, toolchain
from monet_like.errors import MonetError

#: Bytes that an H100 SXM moves per cycle and multiprocessor: 3.35 TB/s, 132 of them at 1.755 GHz.
BYTES_PER_CYCLE = 14.5
#: Instructions that a multiprocessor issues per cycle, counted per thread.
ISSUED_PER_CYCLE = 128
#: Registers, bytes of shared memory and threads of a multiprocessor.
MULTIPROCESSOR = {"80": (65536, 164 * 1024, 2048), "90": (65536, 228 * 1024, 2048)}
SIZES = {
    "double": 8,
    "unsigned long": 8,
    "float": 4,
    "unsigned int": 4,
    "c10::Half": 2,
    "c10::BFloat16": 2,
    "unsigned short": 2,
}

Sizes = Sequence[int]


@dataclass(frozen=True)
class Bounds:
    """What the code of a kernel must keep.

    Attributes:
        loads, stores: bytes that an element needs, by the sizes of the kernel's element types.
        load, store: width in bytes of the widest instruction, at least.
        issue: share of the issue slots at full bandwidth, at most.
        resident: threads of a multiprocessor, at least.
        threads: of a block.
        spills: bytes of registers that may be kept in memory.
        whole: the kernel counts as one loop: its threads do one thing each, and its loops are parts of that.
        odd: a loop without an access as wide as the kernel's widest is not counted: it has the few elements before and
            behind the vectors of an image.
    """

    loads: Callable[[Sizes], float]
    stores: Callable[[Sizes], float]
    load: int
    store: int
    issue: float
    resident: int = 1024
    threads: int = 256
    spills: int = 0
    whole: bool = False
    odd: bool = False


def own(sizes: Sizes) -> float:
    """An element, as it is."""
    return sizes[0]


def last(sizes: Sizes) -> float:
    """An element of the kernel's last type."""
    return sizes[-1]


def twice(sizes: Sizes) -> float:
    """An element of each of two tensors."""
    return 2 * sizes[0]


def nothing(_: Sizes) -> float:
    """Sums, which are few."""
    return 0


def _of_batch_norm() -> dict[str, Bounds]:
    """Batch norm's kernels, in planes and in columns.

    What follows it is the first template argument: clamps (0) and leaky ReLU (1) keep up with the memory; hardswish and
    SiLU divide, and exceed it in 16 bits. The kernels `any_...` take single elements and look up the activation for
    each; where a jump through a table does, which hides loops, the kernel counts as one.
    """
    found = {}
    for form, threads in (("planes", 256), ("columns", 512)):
        for kernel, loads, stores, issue, of_divisions in (
            ("moments", own, nothing, 0.45, None),
            ("sums", twice, nothing, 0.5, 1.3),
            ("normalise", own, own, 0.8, 1.5),
            ("input_grad", twice, own, 0.9, 1.4),
        ):
            common = Bounds(loads, stores, load=2, store=0, issue=6.5, resident=512, threads=threads, spills=16)
            single = replace(common, store=2, issue=1.8, whole=True) if stores is own else common
            wide = replace(common, load=16, store=16 if stores is own else 0, issue=issue, odd=form == "planes")
            found[f"any_{kernel}_{form}_kernel"] = single
            if of_divisions is None:
                found[f"{kernel}_{form}_kernel"] = wide
                continue
            for follows in range(4):
                bounds = replace(wide, issue=of_divisions, spills=64) if follows >= 2 else wide
                found[f"{kernel}_{form}_kernel<{follows}"] = bounds
    return found


#: By the kernel's name, or that and its first or last template argument: "kernel<0". Pooling's elements are outputs in
#: the forward and inputs in the backward; windows move by two. Above one in `issue` is what any window or any dtype
#: takes.
BOUNDS: Mapping[str, Bounds] = {
    "pack_kernel": Bounds(own, lambda _: 1 / 8, load=16, store=1, issue=0.45, resident=768),
    "pack_bool_kernel": Bounds(lambda _: 1, lambda _: 1 / 8, load=16, store=2, issue=0.35),
    "unpack_kernel": Bounds(lambda _: 1 / 8, lambda _: 1, load=2, store=16, issue=0.25),
    "keep_where_kernel": Bounds(lambda s: s[0] + 1 / 8, own, load=16, store=16, issue=0.2, resident=1024),
    "scale_where_kernel": Bounds(lambda s: s[0] + 1 / 8, own, load=16, store=16, issue=0.25, resident=1024),
    # An exponential function and divisions for each element; two of each in the backward.
    "swiglu_kernel": Bounds(twice, own, load=16, store=16, issue=1.0),
    "swiglu_backward_kernel": Bounds(lambda s: 3 * s[0], twice, load=16, store=16, issue=1.0, resident=768),
    "swiglu_kernel<double": Bounds(twice, own, load=16, store=16, issue=1.0, resident=768),
    "swiglu_backward_kernel<double": Bounds(lambda s: 3 * s[0], twice, load=16, store=16, issue=1.0, resident=512),
    "join_nibbles_kernel": Bounds(lambda _: 1, lambda _: 1 / 2, load=16, store=8, issue=0.25),
    "split_nibbles_kernel": Bounds(lambda _: 1 / 2, lambda _: 1, load=8, store=16, issue=0.25),
    "pool_planes_kernel": Bounds(lambda s: 4 * s[0], lambda s: s[0] + 1, load=16, store=8, issue=0.45),
    # Of widths that are no multiple of a thread's columns: single elements, most of them from the cache.
    "pool_planes_kernel<false": Bounds(
        lambda s: 4 * s[0], lambda s: s[0] + 1, load=2, store=8, issue=0.6, resident=768
    ),
    # bfloat16 comes near this on sm_80, which does not compare two of them at a time.
    "pool_pixels_kernel": Bounds(lambda s: 4 * s[0], lambda s: s[0] + 1, load=16, store=16, issue=0.9),
    "pool_planes_backward_kernel": Bounds(lambda s: (s[0] + 1) / 4, own, load=8, store=16, issue=0.6),
    "pool_planes_backward_kernel<false": Bounds(lambda s: (s[0] + 1) / 4, own, load=2, store=2, issue=0.9),
    "pool_pixels_backward_kernel": Bounds(
        lambda s: (s[0] + 1) / 4, own, load=16, store=16, issue=0.8, resident=768, spills=16
    ),
    # Any other window: the loops over its cells are short and depend on it.
    "pool_kernel": Bounds(own, own, load=2, store=2, issue=6.0, whole=True),
    "pool_backward_kernel": Bounds(own, own, load=2, store=2, issue=6.0, whole=True),
    "to_indices_kernel": Bounds(lambda _: 1, lambda _: 8, load=1, store=8, issue=0.7),
    "to_offsets_kernel": Bounds(lambda _: 8, lambda _: 1, load=8, store=1, issue=2.0),
    "forward_row_kernel": Bounds(own, last, load=16, store=16, issue=0.5, threads=128),
    "backward_row_kernel": Bounds(
        lambda s: s[0] + s[-1], own, load=16, store=16, issue=0.75, resident=512, threads=128, spills=64
    ),
    # Of a few partial sums for each column, from the L2 cache.
    "column_sums_kernel": Bounds(own, nothing, load=4, store=0, issue=0.6, threads=512),
    # Rows of any width and tensors of any dtype, looked up for each element.
    "forward_kernel": Bounds(own, own, load=2, store=2, issue=1.5),
    "backward_kernel": Bounds(own, own, load=2, store=2, issue=1.5, resident=768),
    "to_int8_kernel": Bounds(own, lambda _: 1, load=16, store=4, issue=0.7, resident=512),
    "from_int8_kernel": Bounds(lambda _: 1, own, load=4, store=16, issue=0.3),
    # Bound by the search for the smallest magnitude that is kept, not by memory.
    "pack_largest_kernel": Bounds(own, own, load=16, store=2, issue=1.0, resident=512, threads=512, whole=True),
    "unpack_largest_kernel": Bounds(own, own, load=2, store=16, issue=0.6, threads=512, whole=True),
    **_of_batch_norm(),
}


class ToolMissing(MonetError):
    """The compiler, or what reads its code, was not found."""


def find_cuobjdump() -> str:
    """``cuobjdump`` of the CUDA toolkit or of the Python package.

    Raises:
        ToolMissing: neither is there.
    """
    nvcc = toolchain.find_nvcc()
    folders = [Path(nvcc).resolve().parent] if nvcc else []
    for spec in filter(None, [importlib.util.find_spec("nvidia")]):
        folders += [folder for root in spec.submodule_search_locations or () for folder in Path(root).glob("*/bin")]
    for folder in folders:
        if found := shutil.which("cuobjdump", path=str(folder)):
            return found
    if found := shutil.which("cuobjdump"):
        return found
    raise ToolMissing(
        "cuobjdump was not found: install it with `python -m pip install monet_like[cuda-code]`, or the CUDA toolkit's "
        "cuda-cuobjdump, and run this again"
    )


@dataclass(frozen=True)
class Code:
    """The machine code of one kernel and what it uses."""

    name: str  # as in C++, with the types of its elements
    source: str  # name of the file that it is in, without suffix; empty where the compiler does not tell
    instructions: tuple[tuple[int, str], ...]  # address and text
    registers: int
    shared_bytes: int
    stack_bytes: int


def compiled(source: Path, architecture: str, folder: Path) -> Path:
    """The source compiled for one architecture, as the build compiles it.

    Raises:
        ToolMissing: no nvcc.
        MonetError: the compiler failed.
    """
    try:
        tools = toolchain.toolchain(True)
    except toolchain.KernelBuildError as error:
        hint = "install the CUDA toolkit of torch's major version and set CUDA_HOME"
        raise ToolMissing(f"{error}; {hint}") from error
    assert tools.nvcc is not None
    target = folder / f"{source.stem}.{architecture}.cubin"
    version = "-DMONET_LIKE_FOR_TORCH=code"
    command = [tools.nvcc, "-ccbin", tools.cxx, *build._NVCC_FLAGS, version, *tools.torch_flags]
    command += [f"-arch=sm_{architecture}", "-cubin", str(source), "-o", str(target)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise MonetError(f"compiling {source} for sm_{architecture} failed:\n{done.stderr[-4000:]}")
    return target


def _output(*command: str, given: str | None = None) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, input=given).stdout


def _readable(names: Sequence[str]) -> list[str]:
    """Demangled names without namespaces of ours and without arguments."""
    tool = shutil.which("c++filt")
    if tool is None:
        raise ToolMissing(
            "c++filt was not found: it belongs to binutils, as the assembler does (apt-get install binutils)"
        )
    lines = _output(tool, given="\n".join(names)).splitlines()
    unwanted = r"monet_like::|\(anonymous namespace\)::|^void |\(\S+\)(?=\d)"  # the last: of numbers of an enumeration
    return [re.sub(unwanted, "", line).split("(")[0] for line in lines]


def read_code(cubin: Path) -> list[Code]:
    """The kernels of a compiled file."""
    tool = find_cuobjdump()
    usage = _output(tool, "-res-usage", str(cubin))
    resources = {
        name: tuple(map(int, numbers))
        for name, *numbers in re.findall(r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)", usage)
    }
    try:
        sass = _output(tool, "-sass", str(cubin))
    except subprocess.CalledProcessError as error:
        raise ToolMissing(
            f"{tool} could not disassemble, for which it needs nvdisasm: {error.stderr.strip()}"
        ) from error
    parts = re.split(r"Function : (\w+)", sass)[1:]
    names, texts = parts[::2], parts[1::2]
    found = []
    for mangled, name, text in zip(names, _readable(names), texts, strict=True):
        lines = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(@?[^;/]*[^;]*);", text)
        registers, stack, shared = resources[mangled]
        instructions = tuple((int(address, 16), " ".join(words.split())) for address, words in lines)
        # Names of an anonymous namespace hold the file's, with its length before it.
        file = re.search(r"_GLOBAL__N__[0-9a-f]+_\d+_(\w+?)_cu_", mangled)
        found.append(Code(name, file[1] if file else "", instructions, registers, shared, stack))
    return found


def _opcode(text: str) -> str:
    return text.split()[0]


def _width(opcode: str) -> int:
    """Bytes of a load or store."""
    for part in opcode.split("."):
        if part in ("128", "64"):
            return int(part) // 8
        if re.fullmatch(r"[US](8|16)", part):
            return int(part[1:]) // 8
    return 4


def _is_division(text: str) -> bool:
    """Whether the instruction is the one that every division of integers has: a conversion that rounds up."""
    return re.search(r"\bI2F\S*\.RP\b", text) is not None


@dataclass(frozen=True)
class Loop:
    """Part of a kernel; `widths` of its accesses to global memory, by instruction."""

    instructions: int
    loads: Counter[int]
    stores: Counter[int]

    @property
    def loaded(self) -> int:
        return sum(width * count for width, count in self.loads.items())

    @property
    def stored(self) -> int:
        return sum(width * count for width, count in self.stores.items())


def _flow(code: Code) -> tuple[list[range], list[set[int]]]:
    """Blocks of instructions without a branch, and the blocks that may follow each."""
    where = {address: i for i, (address, _) in enumerate(code.instructions)}
    starts, targets = {0}, {}
    for i, (_, text) in enumerate(code.instructions):
        jump = re.match(r"(@\S+ )?(BRA|EXIT|RET)", text)
        if jump:
            starts.add(i + 1)
            to = re.search(r"\b0x([0-9a-f]+)", text) if jump[2] == "BRA" else None
            follows = {where[int(to[1], 16)]} if to and int(to[1], 16) in where else set()
            starts |= follows
            targets[i] = follows | ({i + 1} if jump[1] or "BRA.DIV" in text or re.search(r"U?P\d,", text) else set())
    order = sorted(start for start in starts if start < len(code.instructions))
    number = {start: i for i, start in enumerate(order)}
    blocks = [range(start, end) for start, end in zip(order, [*order[1:], len(code.instructions)], strict=True)]
    after = [{number[t] for t in targets.get(block[-1], {block.stop}) if t in number} for block in blocks]
    return blocks, after


def _natural_loops(after: Sequence[set[int]]) -> list[set[int]]:
    """Blocks of each loop: of those that lead back to a block through which alone they can be reached."""
    before: list[set[int]] = [set() for _ in after]
    for block, following in enumerate(after):
        for other in following:
            before[other].add(block)
    everything = set(range(len(after)))
    dominators = [{0}, *(set(everything) for _ in after[1:])]
    changed = True
    while changed:
        changed = False
        for block in range(1, len(after)):
            common = set.intersection(*(dominators[other] for other in before[block])) if before[block] else set()
            if (found := common | {block}) != dominators[block]:
                dominators[block], changed = found, True
    loops: dict[int, set[int]] = {}
    for block, following in enumerate(after):
        for head in following & dominators[block]:
            body, waiting = {head}, [block]
            while waiting:
                if (one := waiting.pop()) not in body:
                    body.add(one)
                    waiting += before[one]
            loops[head] = loops.get(head, set()) | body
    return list(loops.values())


def loops(code: Code, whole: bool = False) -> list[Loop]:
    """The innermost loops that write to global memory, those beside them that only read, or else the whole kernel.

    Args:
        whole: the kernel counts as one in any case.
    """
    blocks, after = _flow(code)

    def part(body: set[int]) -> Loop:
        texts = [re.sub(r"^@\S+ ", "", code.instructions[i][1]) for block in body for i in blocks[block]]
        texts = [text for text in texts if _opcode(text) != "NOP"]
        loads = Counter(_width(_opcode(text)) for text in texts if re.match(r"LDG|LD\.", text))
        stores = Counter(_width(_opcode(text)) for text in texts if re.match(r"STG|ST\.", text))
        return Loop(len(texts), loads, stores)

    if whole:
        return [part(set(range(len(blocks))))]
    found = [(body, part(body)) for body in _natural_loops(after)]
    writing = [(body, loop) for body, loop in found if loop.stores]
    reading = [(body, loop) for body, loop in found if loop.loads and not loop.stores]
    reading = [one for one in reading if not any(one[0] < body for body, _ in writing if _is_innermost(body, writing))]
    kept = [loop for group in (writing, reading) for body, loop in group if _is_innermost(body, group)]
    return kept or [part(set(range(len(blocks))))]


def _is_innermost(body: set[int], group: Sequence[tuple[set[int], Loop]]) -> bool:
    return not any(other < body for other, _ in group)


@dataclass(frozen=True)
class Row:
    """A kernel on one architecture, and what of its bounds it does not keep."""

    architecture: str
    kernel: str
    per_element: float
    per_byte: float
    issue: float
    load: int
    store: int
    divisions: int
    registers: int
    shared_bytes: int
    resident: int
    problems: tuple[str, ...]


def resident_threads(architecture: str, registers: int, shared_bytes: int, threads: int) -> int:
    """Threads that a multiprocessor holds at once; registers are handed out to warps 256 at a time, shared memory with
    1 KB for the system."""
    all_registers, all_shared, most = MULTIPROCESSOR[architecture]
    warps = threads // 32
    by_registers = all_registers // (-(-registers * 32 // 256) * 256) // warps
    by_shared = all_shared // (shared_bytes + 1024)
    return min(by_registers, by_shared, most // threads, 32) * threads


def judged(code: Code, architecture: str, bounds: Mapping[str, Bounds]) -> Row:
    """The figures of a kernel, compared with its bounds."""
    kernel, _, types = code.name.partition("<")
    first, last = types.partition(",")[0], types.rpartition(", ")[2].rstrip("> ")
    stated = bounds.get(f"{kernel}<{first}") or bounds.get(f"{kernel}<{last}") or bounds.get(kernel)
    limit = stated or Bounds(own, own, load=1, store=1, issue=float("inf"), resident=0)
    sizes = [SIZES[t] for t in re.split(r"[<>,]\s*", types) if t in SIZES] or [1]
    parts = loops(code, limit.whole)
    if limit.odd:
        parts = [p for p in parts if max([*p.loads, *p.stores]) == max(w for q in parts for w in (*q.loads, *q.stores))]
    needs = limit.loads(sizes), limit.stores(sizes)
    per_element = 0.0
    for loop in parts:
        moved, needed = (loop.stored, needs[1]) if loop.stores else (loop.loaded, needs[0])
        per_element += loop.instructions * needed / moved if moved else float("inf")
    per_byte = per_element / sum(needs)
    issue = per_byte * BYTES_PER_CYCLE / ISSUED_PER_CYCLE
    load, store = (
        max([w for p in parts for w in widths(p)], default=0) for widths in (lambda p: p.loads, lambda p: p.stores)
    )
    divisions = sum(_is_division(text) for _, text in code.instructions)
    resident = resident_threads(architecture, code.registers, code.shared_bytes, limit.threads)
    problems = []
    if stated is None:
        problems.append("no bounds are stated in benchmarks/kernel_code.py")
    if divisions:
        problems.append(f"{divisions} divisions of integers")
    for what, value, least in (("loads", load, limit.load), ("stores", store, limit.store)):
        if value < least:
            problems.append(f"{what} {value} bytes at a time, not {least}")
    if issue > limit.issue:
        problems.append(f"takes {issue:.2f} of the issue slots, more than {limit.issue}")
    if resident < limit.resident:
        problems.append(f"{resident} resident threads, not {limit.resident}")
    if code.stack_bytes > limit.spills:
        problems.append(f"{code.stack_bytes} bytes of stack, more than {limit.spills}")
    return Row(
        architecture, code.name, per_element, per_byte, issue, load, store, divisions, code.registers,
        code.shared_bytes, resident, tuple(problems),
    )  # fmt: skip


def rows_of(
    sources: Sequence[Path], architectures: Sequence[str], bounds: Mapping[str, Bounds] = BOUNDS
) -> Iterator[Row]:
    """A row per kernel and architecture, compiled on two processors at a time.

    Raises:
        ToolMissing: no nvcc or no cuobjdump.
        MonetError: a source does not compile.
    """
    find_cuobjdump()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        jobs = [(source, architecture) for architecture in architectures for source in sources]
        made = pool.map(lambda job: compiled(*job, Path(folder)), jobs)
        for (_, architecture), cubin in zip(jobs, made, strict=True):
            yield from (judged(code, architecture, bounds) for code in read_code(cubin))


def rows_of_built(built: Path, names: Sequence[str], architectures: Sequence[str]) -> Iterator[Row]:
    """The same from a compiled library or object, for those architectures that are in it.

    Args:
        built: the file.
        names: of the sources whose kernels are wanted; none: all.

    Raises:
        ToolMissing: no cuobjdump.
        MonetError: the file has no code for any of the architectures.
    """
    if not built.exists():
        raise MonetError(f"{built} is not there: compile it with MONET_LIKE_CUDA=1 python -m monet_like.build")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [find_cuobjdump(), "-xelf", "all", str(built.resolve())], check=True, cwd=folder, capture_output=True
        )
        cubins = [
            (cubin, arch)
            for cubin in sorted(Path(folder).iterdir())
            for arch in architectures
            if f".sm_{arch}." in cubin.name
        ]
        if not cubins:
            raise MonetError(
                f"{built} has no code for sm_{' or sm_'.join(architectures)}: set TORCH_CUDA_ARCH_LIST, build anew"
            )
        codes = [(code, arch) for cubin, arch in cubins for code in read_code(cubin)]
    wanted = [(code, arch) for code, arch in codes if not names or code.source in names]
    yield from (judged(code, arch, BOUNDS) for code, arch in sorted(wanted, key=lambda one: (one[1], one[0].source)))


HEADER = (
    *("arch", "kernel", "per element", "per byte", "issue", "load", "store", "divisions", "registers", "shared"),
    *("resident", "problems"),
)


def cells(row: Row) -> list[str]:
    """A row as text."""
    numbers = (row.load, row.store, row.divisions, row.registers, row.shared_bytes, row.resident)
    shares = (f"{row.per_element:.1f}", f"{row.per_byte:.2f}", f"{row.issue:.2f}")
    kernel = row.kernel.replace("c10::", "")
    return [f"sm_{row.architecture}", kernel, *shares, *map(str, numbers), "; ".join(row.problems)]


def markdown(rows: Sequence[Row]) -> str:
    """The committed result."""
    return (
        "# `python -m benchmarks.kernel_code`\n\n"
        "Read from compiled code (nvcc, cuobjdump), not measured on a GPU. Columns are explained in "
        "`benchmarks/kernel_code.py`, which also states the bounds of every kernel and fails when one leaves them.\n\n"
        f"{markdown_table(HEADER, map(cells, rows))}\n"
    )


@click.command()
@click.argument("names", nargs=-1)
@click.option(
    "--arch",
    "architectures",
    multiple=True,
    default=("80", "90"),
    type=click.Choice(sorted(MULTIPROCESSOR)),
    help="Compute capability; may be given twice.",
)
@click.option("--built", is_flag=True, help="Read the library that is built instead of compiling.")
@click.option("--markdown", "into", type=click.Path(path_type=Path, dir_okay=False), help="Also write this file.")
def main(names: Sequence[str], architectures: Sequence[str], built: bool, into: Path | None) -> None:
    """Read what the compiler made of csrc/cuda, and fail where a kernel leaves its bounds.

    NAMES are files of csrc/cuda without their suffix, such as masks; default: all.
    """
    sources = sorted((toolchain.source_directory() / "cuda").glob("*.cu"))
    if unknown := set(names) - {source.stem for source in sources}:
        there = ", ".join(source.stem for source in sources)
        raise click.ClickException(f"csrc/cuda has no {', '.join(sorted(unknown))}: give any of {there}")
    sources = [source for source in sources if not names or source.stem in names]
    try:
        library = build.library_path("kernels_cuda")
        rows = list(rows_of_built(library, names, architectures) if built else rows_of(sources, architectures))
    except MonetError as error:
        raise click.ClickException(str(error)) from error
    text = markdown(rows)
    click.echo(text)
    if into:
        into.write_text(text)
    if wrong := [row for row in rows if row.problems]:
        raise click.ClickException(f"{len(wrong)} of {len(rows)} kernels leave their bounds")


if __name__ == "__main__":
    main()
