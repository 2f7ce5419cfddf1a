"""A user's script, for the type checker."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

import pipec


def main() -> None:
    dist.init_process_group()
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    x, y = torch.randn(64, 8), torch.randint(4, (64,))
    plan: pipec.Plan = pipec.partition(model, (x,), gpus=2, batch=64)
    seconds: float = plan.predicted.minibatch_us * 1e-6
    most: int = max(stage.memory_bytes for stage in plan.stages)
    pipeline = plan.build(model, loss_fn=nn.functional.cross_entropy)
    optimizer = torch.optim.AdamW(pipeline.parameters())
    loss: torch.Tensor = pipeline.step(x, target=y)
    optimizer.step()
    print(seconds, most, loss.item(), len(pipeline.full_state_dict()))
    try:
        plan.save("plan.json")
    except pipec.Error as fault:
        print(fault.message, fault.help)


if __name__ == "__main__":
    main()
