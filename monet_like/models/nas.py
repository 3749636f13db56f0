"""Networks of cells found by neural architecture search: NASNet-A, AmoebaNet-A and DARTS, for CIFAR-10.

* NASNet-A: Zoph et al., Learning Transferable Architectures for Scalable Image Recognition, CVPR 2018, figure 4.
* AmoebaNet-A: Real et al., Regularized Evolution for Image Classifier Architecture Search, AAAI 2019, figure 5.
* DARTS: Liu, Simonyan, Yang, DARTS: Differentiable Architecture Search, ICLR 2019, figures 4 and 5 (second order).

All three are assembled as DARTS's section 3.1 and appendix A.1 do, which is also how OGC measures them: 20 cells, 36
channels, the cells after a third and after two thirds halve height and width and double the channels. The auxiliary
head and drop-path, which regularise DARTS's training, are left out, as in OGC's table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import nn


@dataclass(frozen=True)
class CellGenotype:
    """The operations of a cell.

    State 0 is the cell before the last, state 1 the last; every pair of edges adds a state.

    Attributes:
        edges: (operation, the state that it reads); a state is the sum of two consecutive ones.
        results: the states that the cell concatenates.
    """

    edges: tuple[tuple[str, int], ...]
    results: tuple[int, ...]


@dataclass(frozen=True)
class Genotype:
    """A network's two kinds of cells; the edges of ``reduce`` from states 0 and 1 have stride 2."""

    normal: CellGenotype
    reduce: CellGenotype


GENOTYPES: Mapping[str, Genotype] = MappingProxyType(
    {
        "nasnet": Genotype(
            normal=CellGenotype(
                edges=(
                    *(("sep_conv_5x5", 1), ("sep_conv_3x3", 0)),
                    *(("sep_conv_5x5", 0), ("sep_conv_3x3", 0)),
                    *(("avg_pool_3x3", 1), ("skip_connect", 0)),
                    *(("avg_pool_3x3", 0), ("avg_pool_3x3", 0)),
                    *(("sep_conv_3x3", 1), ("skip_connect", 1)),
                ),
                results=(2, 3, 4, 5, 6),
            ),
            reduce=CellGenotype(
                edges=(
                    *(("sep_conv_5x5", 1), ("sep_conv_7x7", 0)),
                    *(("max_pool_3x3", 1), ("sep_conv_7x7", 0)),
                    *(("avg_pool_3x3", 1), ("sep_conv_5x5", 0)),
                    *(("skip_connect", 3), ("avg_pool_3x3", 2)),
                    *(("sep_conv_3x3", 2), ("max_pool_3x3", 1)),
                ),
                results=(4, 5, 6),
            ),
        ),
        "amoebanet": Genotype(
            normal=CellGenotype(
                edges=(
                    *(("avg_pool_3x3", 0), ("max_pool_3x3", 1)),
                    *(("sep_conv_3x3", 0), ("sep_conv_5x5", 2)),
                    *(("sep_conv_3x3", 0), ("avg_pool_3x3", 3)),
                    *(("sep_conv_3x3", 1), ("skip_connect", 1)),
                    *(("skip_connect", 0), ("avg_pool_3x3", 1)),
                ),
                results=(4, 5, 6),
            ),
            reduce=CellGenotype(
                edges=(
                    *(("avg_pool_3x3", 0), ("sep_conv_3x3", 1)),
                    *(("max_pool_3x3", 0), ("sep_conv_7x7", 2)),
                    *(("sep_conv_7x7", 0), ("avg_pool_3x3", 1)),
                    *(("max_pool_3x3", 0), ("max_pool_3x3", 1)),
                    *(("conv_7x1_1x7", 0), ("sep_conv_3x3", 5)),
                ),
                results=(3, 4, 6),
            ),
        ),
        "darts": Genotype(
            normal=CellGenotype(
                edges=(
                    *(("sep_conv_3x3", 0), ("sep_conv_3x3", 1)),
                    *(("sep_conv_3x3", 0), ("sep_conv_3x3", 1)),
                    *(("sep_conv_3x3", 1), ("skip_connect", 0)),
                    *(("skip_connect", 0), ("dil_conv_3x3", 2)),
                ),
                results=(2, 3, 4, 5),
            ),
            reduce=CellGenotype(
                edges=(
                    *(("max_pool_3x3", 0), ("max_pool_3x3", 1)),
                    *(("skip_connect", 2), ("max_pool_3x3", 1)),
                    *(("max_pool_3x3", 0), ("skip_connect", 2)),
                    *(("skip_connect", 2), ("max_pool_3x3", 1)),
                ),
                results=(2, 3, 4, 5),
            ),
        ),
    }
)


def nasnet(cells: int = 20, channels: int = 36, classes: int = 10) -> CellNetwork:
    """NASNet-A's cells in `CellNetwork`."""
    return CellNetwork(GENOTYPES["nasnet"], cells, channels, classes)


def amoebanet(cells: int = 20, channels: int = 36, classes: int = 10) -> CellNetwork:
    """AmoebaNet-A's cells in `CellNetwork`."""
    return CellNetwork(GENOTYPES["amoebanet"], cells, channels, classes)


def darts(cells: int = 20, channels: int = 36, classes: int = 10) -> CellNetwork:
    """The cells of DARTS (second order) in `CellNetwork`."""
    return CellNetwork(GENOTYPES["darts"], cells, channels, classes)


class CellNetwork(nn.Module):
    """A stem, cells in a row, each of which reads the two before it, global pooling and a linear layer.

    Args:
        genotype: of the cells.
        cells: how many; two of them reduce.
        channels: of every state of the first cells; even.
        classes: of the result.
    """

    def __init__(self, genotype: Genotype, cells: int, channels: int, classes: int) -> None:
        super().__init__()
        stem = 3 * channels
        self.stem = nn.Sequential(nn.Conv2d(3, stem, 3, padding=1, bias=False), nn.BatchNorm2d(stem))
        before, last, after_reduction = stem, stem, False
        self.cells = nn.ModuleList()
        for index in range(cells):
            reduces = index in (cells // 3, 2 * cells // 3)
            if reduces:
                channels *= 2
            kind = genotype.reduce if reduces else genotype.normal
            cell = _Cell(kind, before, last, channels, stride=2 if reduces else 1, halve_first=after_reduction)
            self.cells.append(cell)
            before, last, after_reduction = last, channels * len(kind.results), reduces
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(last, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Floats ``[N, 3, H, W]``, H and W multiples of 4, to ``[N, classes]``."""
        before = last = self.stem(images)
        for cell in self.cells:
            before, last = last, cell(before, last)
        result: torch.Tensor = self.classifier(self.pool(last).flatten(1))
        return result


class _Cell(nn.Module):
    """A cell; ``halve_first``: the state before the last is still twice as high and wide."""

    def __init__(
        self, genotype: CellGenotype, before: int, last: int, channels: int, stride: int, halve_first: bool
    ) -> None:
        super().__init__()
        self.first = _Halved(before, channels) if halve_first else _relu_conv_norm(before, channels)
        self.second = _relu_conv_norm(last, channels)
        self.sources = tuple(source for _, source in genotype.edges)
        self.results = genotype.results
        self.edges = nn.ModuleList(
            _operation(name, channels, stride if source < 2 else 1) for name, source in genotype.edges
        )

    def forward(self, before: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """The two cells' results before this one to its own, ``[N, channels * len(results), H / stride, W
        / stride]``.
        """
        states = [self.first(before), self.second(last)]
        for edge in range(0, len(self.edges), 2):
            left, right = (self.edges[i](states[self.sources[i]]) for i in (edge, edge + 1))
            states.append(left + right)
        return torch.cat([states[index] for index in self.results], dim=1)


def _operation(name: str, channels: int, stride: int) -> nn.Module:
    """An edge: ``[N, channels, H, W]`` to ``[N, channels, H / stride, W / stride]``."""
    kind, _, size = name.rpartition("_")
    match kind:
        case "skip":
            return nn.Identity() if stride == 1 else _Halved(channels, channels)
        case "avg_pool":
            return nn.AvgPool2d(3, stride, padding=1, count_include_pad=False)
        case "max_pool":
            return nn.MaxPool2d(3, stride, padding=1)
        case "sep_conv":
            width = int(size[0])
            return nn.Sequential(*_separable(channels, width, stride), *_separable(channels, width, 1))
        case "dil_conv":
            return nn.Sequential(*_separable(channels, int(size[0]), stride, dilation=2))
    assert name == "conv_7x1_1x7", name
    return nn.Sequential(
        nn.ReLU(),
        nn.Conv2d(channels, channels, (1, 7), (1, stride), (0, 3), bias=False),
        nn.Conv2d(channels, channels, (7, 1), (stride, 1), (3, 0), bias=False),
        nn.BatchNorm2d(channels),
    )


def _separable(channels: int, size: int, stride: int, dilation: int = 1) -> tuple[nn.Module, ...]:
    """ReLU, a convolution of each channel by itself, one of each pixel by itself, batch norm."""
    padding = dilation * (size - 1) // 2
    return (
        nn.ReLU(),
        nn.Conv2d(channels, channels, size, stride, padding, dilation, groups=channels, bias=False),
        nn.Conv2d(channels, channels, 1, bias=False),
        nn.BatchNorm2d(channels),
    )


def _relu_conv_norm(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.ReLU(), nn.Conv2d(inputs, outputs, 1, bias=False), nn.BatchNorm2d(outputs))


class _Halved(nn.Module):
    """Half the height and width: the even pixels make one half of the channels, the odd ones the other."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.relu = nn.ReLU()
        self.even = nn.Conv2d(inputs, outputs // 2, 1, stride=2, bias=False)
        self.odd = nn.Conv2d(inputs, outputs - outputs // 2, 1, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[N, inputs, H, W]`` to ``[N, outputs, H / 2, W / 2]``."""
        x = self.relu(x)
        result: torch.Tensor = self.norm(torch.cat((self.even(x), self.odd(x[:, :, 1:, 1:])), dim=1))
        return result
