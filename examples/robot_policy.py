"""A policy for robots of the structure of ACT (action chunking with transformers), as lerobot has it: a ResNet for each
camera, an encoder of the action sequence to a style variable (a VAE), a transformer that turns images, state and style
into a chunk of actions. Not lerobot's own code, since lerobot 0.6 asks for Python 3.12 and PyTorch below 2.12. With
PyTorch 2.11 its `ACTPolicy` takes the same line, with its batch: ``auto_schedule(policy, (batch,), memory_budget="80%",
exact=True)``, and has plain PyTorch's gradients to the bit.
"""

import torch
import torch.nn.functional as F
import torchvision
from torch import nn
from torchvision.models._utils import IntermediateLayerGetter

import monet_like

CHUNK, ACTIONS, CAMERAS, WIDTH, STYLE = 20, 7, 2, 64, 8


class Policy(nn.Module):
    """``(images, state, actions, padding)`` to the loss of ACT: L1 of actions and KL of the style variable."""

    def __init__(self) -> None:
        super().__init__()
        resnet = torchvision.models.resnet18(norm_layer=torchvision.ops.misc.FrozenBatchNorm2d)
        self.backbone = IntermediateLayerGetter(resnet, {"layer3": "features"})
        self.to_tokens = nn.Conv2d(256, WIDTH, 1)
        layer = {"d_model": WIDTH, "nhead": 4, "dim_feedforward": 4 * WIDTH, "dropout": 0.1, "batch_first": True}
        self.style_encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(**layer), 2)
        self.style_inputs, self.state_input = nn.Linear(ACTIONS, WIDTH), nn.Linear(ACTIONS, WIDTH)
        self.to_style, self.from_style = nn.Linear(WIDTH, 2 * STYLE), nn.Linear(STYLE, WIDTH)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(**layer), 2)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(**layer), 1)
        self.queries, self.summary = nn.Embedding(CHUNK, WIDTH), nn.Embedding(1, WIDTH)
        self.head = nn.Linear(WIDTH, ACTIONS)

    def forward(
        self, images: torch.Tensor, state: torch.Tensor, actions: torch.Tensor, padding: torch.Tensor
    ) -> torch.Tensor:
        batch = len(state)
        summary = self.summary.weight.expand(batch, 1, WIDTH)
        known = torch.cat([summary, self.state_input(state)[:, None], self.style_inputs(actions)], 1)
        hidden = F.pad(padding, (2, 0), value=False)
        mean, log_variance = self.to_style(self.style_encoder(known, src_key_padding_mask=hidden)[:, 0]).chunk(2, 1)
        style = mean + (log_variance / 2).exp() * torch.randn_like(mean)
        seen = self.to_tokens(self.backbone(images.flatten(0, 1))["features"])
        seen = seen.unflatten(0, (batch, CAMERAS)).flatten(3).permute(0, 1, 3, 2).flatten(1, 2)
        tokens = torch.cat([self.from_style(style)[:, None], self.state_input(state)[:, None], seen], 1)
        found = self.head(self.decoder(self.queries.weight.expand(batch, CHUNK, WIDTH), self.encoder(tokens)))
        error = (F.l1_loss(found, actions, reduction="none") * ~padding[..., None]).mean()
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
        return error + 10.0 * divergence


model = monet_like.auto_schedule(Policy().train(), memory_budget="85%")
backbone = [p for name, p in model.named_parameters() if "backbone" in name]
others = [p for name, p in model.named_parameters() if "backbone" not in name]
optimizer = torch.optim.AdamW([{"params": others}, {"params": backbone, "lr": 1e-5}], lr=1e-4)
for _ in range(3):
    images, state = torch.randn(4, CAMERAS, 3, 64, 64), torch.randn(4, ACTIONS)
    actions, padding = torch.randn(4, CHUNK, ACTIONS), torch.arange(CHUNK) >= torch.randint(8, CHUNK, (4, 1))
    loss = model(images, state, actions, padding)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
    optimizer.step()
    optimizer.zero_grad()
