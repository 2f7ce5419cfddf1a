"""Trains every plan of a folder in two processes, and writes the losses: `train_worker.py FOLDER` under torchrun."""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any, Dict

import torch
import torch.distributed as dist

import models
import pipec

STEPS = 5


def train(path: Path) -> Dict[str, Any]:
    """Losses, and the names in the state dict. The file is named MODEL.VARIANT.plan.json."""
    name, variant = path.name.split(".")[:2]
    model, inputs, target = models.made(name)
    state = model.state_dict()
    if variant == "meta":
        models.forget(model)
    loss_fn = None if "labels" in inputs else models.loss
    autocast = torch.bfloat16 if variant == "autocast" else None
    pipeline = pipec.Plan.load(path, model).build(example_kwargs=inputs, loss_fn=loss_fn, autocast=autocast)
    if variant == "meta":
        pipeline.load_state_dict(state)
    if variant == "own_rows":
        rows = slice(pipeline.replica * models.ROWS // 2, (pipeline.replica + 1) * models.ROWS // 2)
        inputs, target = {name: value[rows] for name, value in inputs.items()}, target[rows]
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-2)
    losses = []
    for _ in range(STEPS):
        losses.append(pipeline.step(**inputs, target=target).item())
        norm = pipeline.clip_grad_norm_(models.NORM)
        optimizer.step()
    state = pipeline.full_state_dict()
    if dist.get_rank() == 0 and variant != "meta":
        model.load_state_dict(state)
    return {"losses": losses, "names": sorted(state), "norm": norm.item()}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder = Path(sys.argv[1])
    results: Dict[str, Any] = {}
    for path in sorted(folder.glob("*.plan.json")):
        try:
            results[path.name] = train(path)
        except Exception:
            results[path.name] = {"error": traceback.format_exc()}
        (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(results))
        if "error" in results[path.name]:
            # torchrun then ends the other process.
            os._exit(1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
