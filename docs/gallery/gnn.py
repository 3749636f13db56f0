"""A net of graphs by PyTorch Geometric: four GraphSAGE layers on one graph."""

import torch
from torch import nn
from torch_geometric.nn import SAGEConv

FEATURES, CLASSES, WIDTH = 128, 40, 256


class Sage(nn.Module):
    """A class for each node."""

    def __init__(self) -> None:
        super().__init__()
        widths = (FEATURES, WIDTH, WIDTH, WIDTH)
        self.layers = nn.ModuleList(SAGEConv(width, WIDTH) for width in widths)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in widths)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        """Nodes' features [N, 128] and edges [2, E] to logits [N, 40]."""
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = nn.functional.dropout(norm(layer(x, edges)).relu(), 0.3, self.training)
        return self.head(x)


def make_model() -> nn.Module:
    """Weights are random: only their sizes count."""
    return Sage()


def make_inputs(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """So many nodes, and ten edges for each."""
    return torch.empty(batch, FEATURES), torch.zeros(2, 10 * batch, dtype=torch.long)
