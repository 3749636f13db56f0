"""Rewrites CUDA sources as C++ that cuda_emulator.h understands: launches, shared memory, kernels' names, deliberate
mistakes.

Everything else of the language (`__global__`, `threadIdx`, `__syncthreads()`, intrinsics) is macros and functions of
that header. Lines keep their numbers, so that messages name lines of the original.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mutant:
    """A comparison `a < b` of a kernel that can become `a <= b` at run time, by its number."""

    number: int
    file: str
    line: int
    what: str


@dataclass(frozen=True)
class Sources:
    """What `transform_tree` made: the C++ files to compile, the kernels that they define, the mistakes
    they can make.
    """

    files: tuple[Path, ...]
    kernels: tuple[tuple[str, str], ...]  # file, name
    barriers: tuple[tuple[str, int], ...]  # file, line
    mutants: tuple[Mutant, ...]


def split_arguments(text: str) -> list[str]:
    """Splits a list of arguments at its commas; those within brackets or template arguments belong to an argument."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "([{") - (c in ")]}")
        if c == "," and depth == 0 and text[start:i].count("<") == text[start:i].count(">"):
            parts.append(text[start:i])
            start = i + 1
    return [*parts, text[start:]]


def closing(text: str, opening: int) -> int:
    """Index of the bracket that closes the round or curly one at `opening`."""
    kinds = "()" if text[opening] == "(" else "{}"
    depth = 0
    for i in range(opening, len(text)):
        depth += (text[i] == kinds[0]) - (text[i] == kinds[1])
        if depth == 0:
            return i
    raise ValueError(f"the bracket at {opening} is not closed")


def blanked(text: str) -> str:
    """The text with its comments and strings replaced by blanks, of the same length."""
    pattern = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.S)
    return pattern.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), text)


def line_at(text: str, index: int) -> int:
    """Number of the line, from 1, that this index is in."""
    return text.count("\n", 0, index) + 1


def functions(text: str, qualifier: str) -> Iterator[tuple[str, int, int]]:
    """Name, and indices of the body's brackets, of the functions that are defined with `__global__` or `__device__`."""
    plain = blanked(text)
    for match in re.finditer(rf"{qualifier}\b", plain):
        at = match.end()
        # The name is before the first bracket that is none of __launch_bounds__(...) or decltype(...).
        while opening := re.compile(r"([A-Za-z_]\w*|operator\S+)\s*\(").search(plain, at):
            close = closing(plain, opening.end() - 1)
            if opening[1] not in ("__launch_bounds__", "__align__", "__attribute__", "decltype", "alignas"):
                break
            at = close + 1
        if not opening or ";" in plain[match.end() : opening.start()]:
            continue
        body = re.compile(r"[^;{]*\{").match(plain, close + 1)
        if body:
            yield opening[1], body.end() - 1, closing(plain, body.end() - 1)


def with_entries(text: str) -> tuple[str, list[str]]:
    """Lets every kernel tell its name when it begins; their names."""
    found = list(functions(text, "__global__"))
    for name, begin, _ in reversed(found):
        text = f'{text[: begin + 1]} ::emu::entered("{name}");{text[begin + 1 :]}'
    return text, [name for name, *_ in found]


def with_mutants(text: str, name: str, first: int) -> tuple[str, list[Mutant]]:
    """Gives every comparison of a kernel with a bound that is known at run time only a mistake that can be
    switched on.
    """
    compared = re.compile(
        r"(?<=[(;&|] )([A-Za-z_][\w.]*) < ([a-z_][\w.]*)(?=[;)]| &&| \|\|)"
        r"|(?<=\()([A-Za-z_][\w.]*) < ([a-z_][\w.]*)(?=[;)]| &&| \|\|)"
    )
    bodies = [(begin, end) for q in ("__global__", "__device__") for _, begin, end in functions(text, q)]
    mutants = []
    matches = [m for m in compared.finditer(blanked(text)) if any(b < m.start() < e for b, e in bodies)]
    matches = [m for m in matches if not re.match(r"k[A-Z]", m[2] or m[4])]
    for offset, match in reversed(list(enumerate(matches))):
        left, right = match[1] or match[3], match[2] or match[4]
        number = first + offset
        mutants.append(Mutant(number, name, line_at(text, match.start()), f"{left} <= {right}"))
        changed = f"(::emu::mutated({number}) ? {left} <= {right} : {left} < {right})"
        text = text[: match.start()] + changed + text[match.end() :]
    return text, mutants[::-1]


def with_launches(text: str, name: str) -> str:
    """Makes `kernel<A, T><<<grid, block, shared, stream>>>(a, b)` a call of emu::launch."""
    while (at := (plain := blanked(text)).find("<<<")) >= 0:
        # `grid_for<kernel<P<T>>>(n)` is no end of the configuration: its brackets are not balanced before.
        end = at + 3
        while True:
            end = plain.index(">>>", end)
            config_text = plain[at + 3 : end]
            if config_text.count("<") == config_text.count(">") and config_text.count("(") == config_text.count(")"):
                break
            end += 1
        config = [part.strip() for part in split_arguments(text[at + 3 : end])]
        config += ["0"] * (4 - len(config))
        start = len(plain[:at].rstrip())
        if plain[start - 1] == ">":  # template arguments
            depth, i = 0, start
            while True:
                i -= 1
                depth += (plain[i] == ">") - (plain[i] == "<")
                if depth == 0:
                    break
            start = i
        identifier = re.search(r"[A-Za-z_]\w*\s*$", plain[:start])
        if not identifier:
            raise ValueError(f"{name}:{line_at(text, at)}: no kernel's name before <<<")
        kernel = text[identifier.start() : at]
        opening = plain.index("(", end)
        if plain[end + 3 : opening].strip():
            raise ValueError(f"{name}:{line_at(text, end)}: no arguments after >>>")
        close = closing(plain, opening)
        arguments = text[opening + 1 : close]
        line = line_at(text, identifier.start())
        newlines = "\n" * (kernel.count("\n") + text[at:opening].count("\n") - "".join(config).count("\n"))
        call = f"[&](auto... emu_a) {{ {' '.join(kernel.split())}(emu_a...); }}"
        site = f'::emu::Site{{"{name}", {line}}}'
        stream = f"(static_cast<void>({config[3]}), {config[2]})"
        made = f'::emu::launch("{identifier.group().strip()}", {site}, {config[0]}, {config[1]}, '
        made += f"{stream}, {newlines}{call}"
        made += f", {arguments})" if arguments.strip() else ")"
        text = text[: identifier.start()] + made + text[close + 1 :]
    return text


def with_shared_variables(text: str, name: str) -> str:
    """Makes `__shared__ int a, b[3];` checked static variables, and `extern __shared__ float c[];` a
    checked pointer.
    """
    modifiers = r"(?:(?:alignas|__align__)\s*\([^)]*\)\s*)?"
    kind = r"((?:unsigned\s+|const\s+)?[\w:]+(?:<[^;]*?>)?\s+)"

    def dynamic(match: re.Match[str]) -> str:
        return f"EMU_DYNAMIC_SHARED({match[1].strip()}, {match[2]});"

    def fixed(match: re.Match[str]) -> str:
        variables = []
        for variable in split_arguments(match[2]):
            parts = re.fullmatch(r"\s*(\w+)\s*((?:\[[^\]]*\]\s*)*)", variable)
            if not parts:
                raise ValueError(
                    f"{name}:{line_at(text, match.start())}: shared variable {variable!r} is not understood"
                )
            made = f"emu_type_{parts[1]}"
            variables.append(f"using {made} = {match[1].strip()}{parts[2]}; EMU_SHARED({made}, {parts[1]});")
        return " ".join(variables)

    text = re.sub(rf"extern\s+__shared__\s+{modifiers}{kind}(\w+)\s*\[\s*\]\s*;", dynamic, text)
    text = re.sub(rf"__shared__\s+{modifiers}{kind}([^;=]+);", fixed, text)
    if left := re.search(r"__shared__", blanked(text)):
        raise ValueError(f"{name}:{line_at(text, left.start())}: this shared variable is not understood")
    return text


def transformed(text: str, name: str, first: int = 1) -> tuple[str, list[str], list[Mutant]]:
    """One source file as C++, the kernels it defines and its mutants.

    Args:
        text: the CUDA source.
        name: what messages call it.
        first: number of the first mutant.
    """
    mutants: list[Mutant] = []
    if name.endswith((".cu", ".cuh")):
        text, mutants = with_mutants(text, name, first)
    text, kernels = with_entries(text)
    text = with_shared_variables(with_launches(text, name), name)
    # The device's side of our headers; torch's own must stay on the host's.
    text = re.sub(r"\b__CUDACC__\b|\b__CUDA_ARCH__\b", "EMU_CUDA", text)
    # Grids that stride are bounded with std::clamp<int64_t>: tests can ask for fewer blocks than the kernels want.
    text = re.sub(r"\bstd::clamp<int64_t>\(", "::emu::clamp<int64_t>(", text)
    text = re.sub(r"\bMONET_KERNELS\(CUDA, m\)", "MONET_KERNELS(CPU, m)", text)
    return f'#line 1 "{name}"\n{text}', kernels, mutants


def transform_tree(source: Path, target: Path, only: Collection[str] = ()) -> Sources:
    """Transforms csrc's headers and cuda/*.cu into `target`; files that stay as they are keep their times.

    Args:
        source: csrc.
        target: the folder for what is made.
        only: names of the .cu files that are taken, default: all.
    """
    files: list[Path] = []
    kernels: list[tuple[str, str]] = []
    barriers: list[tuple[str, int]] = []
    mutants: list[Mutant] = []
    for path in sorted([*source.glob("*.h"), *source.glob("cuda/*.cu*")]):
        if only and path.suffix == ".cu" and path.name not in only:
            continue
        name = path.relative_to(source).as_posix()
        out = target / name
        out = out.with_suffix(".cpp") if path.suffix == ".cu" else out
        original = path.read_text()
        text, defined, possible = transformed(original, name, len(mutants) + 1)
        kernels += [(name, kernel) for kernel in defined]
        mutants += possible
        barriers += [(name, line_at(original, m.start())) for m in re.finditer(r"__syncthreads\(\)", blanked(original))]
        write_if_changed(out, text)
        if out.suffix == ".cpp":
            files.append(out)
    return Sources(tuple(files), tuple(kernels), tuple(barriers), tuple(mutants))


def write_if_changed(path: Path, text: str) -> None:
    """Writes a file unless it has this text already: what depends on its time stays up to date."""
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
