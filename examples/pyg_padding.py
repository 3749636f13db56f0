"""PyTorch Geometric: batches of graphs padded to a few sizes, so that shapes repeat and each is captured once.

Padding has nodes and edges of its own: edges of the padding join the last node, which is of the padding, too, so no
real node hears of it. A mask takes it out of the loss.
"""

import torch
import torch.nn.functional as F
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GraphNorm, SAGEConv, global_mean_pool

import monet_like


def padded(batch: Batch, nodes: int = 128, edges: int = 512) -> Batch:
    """The batch with its counts of nodes and edges rounded up to multiples, and one graph more, which is padding."""
    more_nodes = -batch.num_nodes % nodes or nodes
    more_edges = -batch.num_edges % edges
    last = batch.num_nodes + more_nodes - 1
    batch.x = F.pad(batch.x, (0, 0, 0, more_nodes))
    batch.edge_index = F.pad(batch.edge_index, (0, more_edges), value=last)
    batch.batch = F.pad(batch.batch, (0, more_nodes), value=batch.num_graphs)
    return batch


class Net(torch.nn.Module):
    """A label for each graph."""

    def __init__(self, width: int = 32, classes: int = 3) -> None:
        super().__init__()
        self.convolutions = torch.nn.ModuleList([SAGEConv(8, width), SAGEConv(width, width), SAGEConv(width, width)])
        self.norms = torch.nn.ModuleList([GraphNorm(width) for _ in self.convolutions])
        self.head = torch.nn.Linear(width, classes)

    def forward(self, x: torch.Tensor, edges: torch.Tensor, graph: torch.Tensor, graphs: int) -> torch.Tensor:
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = norm(convolution(x, edges), graph, graphs).relu()
        return self.head(global_mean_pool(x, graph, graphs))


def graph(label: int) -> Data:
    """A random graph of a random size; labels differ in the mean of their features."""
    nodes = int(torch.randint(12, 24, ()))
    return Data(
        x=torch.randn(nodes, 8) + label, edge_index=torch.randint(nodes, (2, 4 * nodes)), y=torch.tensor([label])
    )


model = monet_like.auto_schedule(Net(), memory_budget="70%", optimizer="adamw")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for _ in range(6):
    batch = padded(Batch.from_data_list([graph(k % 3) for k in range(24)]))
    optimizer.zero_grad()
    found = model(batch.x, batch.edge_index, batch.batch, 25)[:24]  # the last graph is padding
    F.cross_entropy(found, batch.y).backward()
    optimizer.step()
