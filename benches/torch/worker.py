"""Runs the plans of a folder in turn, in the processes of torchrun: `worker.py MODEL FOLDER ROUNDS`. Writes rankN.json."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, Dict, List

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

import models
import pipec


def many(values: Any, count: int) -> Any:
    """The rows of a minibatch: those of a micro-batch, `count` times."""
    return pytree.tree_map_only(torch.Tensor, lambda value: torch.cat([value] * count), values)


def main() -> None:
    name, folder, rounds = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    running: Dict[str, Any] = {}
    for path in sorted(folder.glob("*.plan.json")):
        subject = models.made(name)
        plan = pipec.Plan.load(path, subject.model)
        pipeline = plan.build(example_kwargs=subject.inputs, loss_fn=subject.loss)
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=1e-3, momentum=0.9)
        count = plan.schedule.microbatches
        running[path.name] = (pipeline, optimizer, many(subject.inputs, count), many(subject.target, count))
    measured: Dict[str, Dict[str, List[float]]] = {name: {"seconds": [], "cpu": [], "losses": []} for name in running}
    for turn in range(rounds + 2):
        for plan_name, (pipeline, optimizer, inputs, target) in running.items():
            dist.barrier()
            begin, cpu = time.perf_counter(), time.process_time()
            loss = pipeline.step(**inputs, target=target)
            optimizer.step()
            dist.barrier()
            found = measured[plan_name]
            found["losses"].append(loss.item())
            # The first two steps allocate memory and momentum.
            if turn >= 2:
                found["seconds"].append(time.perf_counter() - begin)
                found["cpu"].append(time.process_time() - cpu)
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(measured))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
