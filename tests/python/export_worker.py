"""Trains an exported plan in the framework it was exported to, and writes its losses next to those of the model without a pipeline:
`export_worker.py FRAMEWORK MODEL FOLDER` under torchrun.
"""

from __future__ import annotations

import copy
import json
import os
import re
import sys
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Tuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import models

STEPS = 3
LR = 0.003
DOCS = Path(__file__).resolve().parents[2] / "docs"
Pair = Tuple[torch.Tensor, torch.Tensor]


def documented(page: str, heading: str) -> str:
    """The Python code below a heading of a page."""
    text = (DOCS / page).read_text(encoding="utf-8").split(f"## {heading}\n")[1]
    found = re.search(r"```python\n(.*?)```", text, re.S)
    assert found is not None
    return found.group(1)


class Block(nn.Module):
    """A transformer layer as a function of one tensor."""

    def __init__(self, layer: nn.Module, rotary: Any = None) -> None:
        super().__init__()
        self.layer, self.rotary = layer, rotary

    def forward(self, x: torch.Tensor) -> Any:
        at = torch.arange(x.shape[1])[None]
        given = {"position_embeddings": self.rotary(x, at)} if self.rotary else {}
        output = self.layer(x, attention_mask=None, **given)
        return output[0] if isinstance(output, tuple) else output


class Positions(nn.Module):
    """Adds the position embedding."""

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.table = table

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.table(torch.arange(x.shape[1])[None])
        return result


def layers(model: Any, names: List[str]) -> List[Any]:
    """A layer for each module of the plan, which takes the output of the one before."""
    from deepspeed.pipe import TiedLayerSpec

    found: List[Any] = []
    for name in names:
        module = model.get_submodule(name)
        if re.search(r"\.(h|layers)\.\d+$", name):
            found.append(Block(module, getattr(model.model, "rotary_emb", None) if hasattr(model, "model") else None))
        elif name == "transformer.wte":
            found.append(TiedLayerSpec("wte", nn.Embedding, module.num_embeddings, module.embedding_dim))
        elif name == "lm_head" and hasattr(model, "transformer"):
            shape = module.out_features, module.in_features
            found.append(TiedLayerSpec("wte", nn.Embedding, *shape, forward_fn=lambda tied, x: F.linear(x, tied.weight)))
        elif name == "transformer.wpe":
            found.append(Positions(module))
        elif name == "fc":
            found.append(nn.Sequential(nn.Flatten(), module))
        else:
            found.append(module)
    return found


def micro_batches(inputs: Dict[str, torch.Tensor], target: torch.Tensor, size: int) -> List[Pair]:
    """The rows of one minibatch."""
    (x,) = [value for name, value in inputs.items() if name != "attention_mask"]
    return [(x[at : at + size], target[at : at + size]) for at in range(0, len(x), size)]


def plain(model: nn.Module, pairs: List[Pair], loss_fn: Callable[..., torch.Tensor]) -> List[float]:
    """The losses without a pipeline."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for x, y in pairs:
            value = loss_fn(model(x), y) / len(pairs)
            value.backward()
            total += value.item()
        optimizer.step()
        found.append(total)
    return found


def deepspeed_losses(name: str, folder: Path) -> Dict[str, Any]:
    """Losses under DeepSpeed's pipeline engine, with the code of the page on exports."""
    import deepspeed

    os.chdir(folder)
    deepspeed.init_distributed(dist_backend="gloo")
    model, inputs, target = models.made(name)
    reference = copy.deepcopy(model)
    plan = json.loads((folder / "deepspeed.json").read_text(encoding="utf-8"))
    pairs = micro_batches(inputs, target, plan["train_micro_batch_size_per_gpu"])
    assert len(pairs) == plan["gradient_accumulation_steps"]

    def batches() -> Iterator[Pair]:
        while True:
            yield from pairs

    used: Dict[str, Any] = {
        "layers": layers(model, plan["layers"]),
        "loss_fn": models.loss,
        "optimizer_of": lambda parameters: torch.optim.SGD(parameters, lr=LR),
        "batches": batches(),
        "start": lambda net: [tied.load_state_dict({"weight": model.state_dict()["transformer.wte.weight"]}) for tied in net.tied_modules.values()],
    }
    code = documented("exports.md", "DeepSpeed").replace("engine, *_", "start(net)\nengine, *_").replace("loss = engine", "losses = [float(engine")
    code = code.replace("train_batch(batches)", f"train_batch(batches)) for _ in range({STEPS})]")
    exec(code, used)
    return {"losses": used["losses"], "plain": plain(reference, pairs, models.loss)}


class Causal(nn.Module):
    """Attention on CPUs; torchtitan's own kernels need a GPU."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        result = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return result.transpose(1, 2)


def torchtitan_losses(name: str, folder: Path) -> Dict[str, Any]:
    """Losses of torchtitan's own Llama, with its own split and schedule."""
    from torch.distributed.device_mesh import init_device_mesh
    from torchtitan.config import ConfigManager
    from torchtitan.distributed import pipeline_parallel

    os.chdir(folder)
    config: Any = ConfigManager().parse_args(["--module", "llama3", "--config", name, *Path("torchtitan.args").read_text().split()])
    settings, rows = config.parallelism, config.training.local_batch_size
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (settings.pipeline_parallel_degree,), mesh_dim_names=("pp",))
    torch.manual_seed(0)
    model = config.model_spec.model.build()
    model.init_states()
    for layer in model.layers.values():
        layer.attention.inner_attention = Causal()
    x, y = torch.randint(2048, (rows, 16)), torch.randint(2048, (rows, 16))
    positions = torch.arange(16).expand(rows, 16)
    size = settings.pipeline_parallel_microbatch_size

    def loss(output: torch.Tensor, target: torch.Tensor) -> Tuple[torch.Tensor, None]:
        return F.cross_entropy(output.flatten(0, 1).float(), target.flatten()), None

    pairs = [(x[at : at + size], y[at : at + size]) for at in range(0, rows, size)]
    reference = copy.deepcopy(model)
    expected = plain(WithPositions(reference, positions[:size]), pairs, lambda output, target: loss(output, target)[0])
    stages, parts = pipeline_parallel._pipeline_module_split(
        model, mesh, settings.pipeline_parallel_schedule, torch.device("cpu"), settings.module_fqns_per_model_part
    )
    schedule: Any = pipeline_parallel._build_pipeline_schedule(parallelism=settings, local_batch_size=rows, stages=stages, loss_fn=loss)
    optimizer = torch.optim.SGD([value for part in parts for value in part.parameters()], lr=LR)
    is_last = any(stage.is_last for stage in stages)
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses: Any = [] if is_last else None
        given = (x,) if any(stage.is_first for stage in stages) else ()
        schedule.step(*given, positions=positions, target=y if is_last else None, losses=losses)
        # The loss of torchtitan is a sum, and that of this test a mean.
        for part in parts:
            for value in part.parameters():
                if value.grad is not None:
                    value.grad /= len(pairs)
        optimizer.step()
        if is_last:
            found.append(sum(value.item() for value in losses) / len(losses))
    return {"losses": found or expected, "plain": expected, "parts": settings.module_fqns_per_model_part}


class WithPositions(nn.Module):
    """A model with its positions."""

    def __init__(self, model: nn.Module, positions: torch.Tensor) -> None:
        super().__init__()
        self.model, self.positions = model, positions

    def forward(self, x: torch.Tensor) -> Any:
        return self.model(x, positions=self.positions)


def main() -> None:
    torch.set_num_threads(1)
    framework, name, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    run = {"deepspeed": deepspeed_losses, "torchtitan": torchtitan_losses}[framework]
    found = run(name, folder)
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
