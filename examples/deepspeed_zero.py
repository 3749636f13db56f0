"""DeepSpeed's ZeRO, stage 2: a whole model with a schedule in DeepSpeed's engine: torchrun --nproc-per-node 2
examples/deepspeed_zero.py

Stages 0 to 2 work, with ``engine.backward(loss)``. Refused, in words: stage 3, which gathers parameters while the step
runs (take FSDP2 with ``blocks=``), and ``loss.backward()`` where the engine scales gradients.
"""

import argparse

import deepspeed
import torch
import torch.distributed as dist

import monet_like

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--budget", default="90%", help="of the whole step of one process, without the optimizer")
parser.add_argument("--stage", type=int, default=2)
parser.add_argument("--steps", type=int, default=5)
args = parser.parse_args()

deepspeed.init_distributed(dist_backend="nccl" if torch.cuda.is_available() else "gloo")
torch.manual_seed(0)
layers = [layer for _ in range(4) for layer in (torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))]
model = monet_like.auto_schedule(torch.nn.Sequential(*layers, torch.nn.Linear(64, 10)), memory_budget=args.budget)
config = {
    "train_micro_batch_size_per_gpu": 256, "zero_optimization": {"stage": args.stage}, "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
}  # fmt: skip
engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
draw = torch.Generator().manual_seed(dist.get_rank())
images, labels = torch.randn(256, 64, generator=draw), torch.randint(0, 10, (256,), generator=draw)
for step in range(args.steps):
    loss = torch.nn.functional.cross_entropy(engine(images.to(engine.device)), labels.to(engine.device))
    engine.backward(loss)
    engine.step()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}", flush=True)
dist.destroy_process_group()
