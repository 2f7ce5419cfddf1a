"""Trains models of pipec's zoo with PyTorch on one GPU, for comparison. Writes JSON.

    python gpu_peers.py --model gpt2 --batch 2 --optimizer adamw --lr 1e-4 -o gpt2.json
    python gpu_peers.py --model gpt2 --batch 2 --optimizer adamw --lr 1e-4 --compile -o gpt2.json
    python gpu_peers.py --ceilings -o ceilings.json

The models have the layers, sizes and dropout of `pipec zoo`. fp32 is without TF32; bf16 is autocast with f32 weights.
The result has the median step and the highest allocated memory of both precisions, or the rates of large matrix products
and copies.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from typing import Any, Callable, Dict, List, Tuple

import torch
import torch.nn.functional as F
from torch import nn

from models import resnet

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Block(nn.Module):
    """A block of a transformer. GPT-2 normalises first and has one product for queries, keys and values; BERT normalises
    last and has three."""

    def __init__(self, width: int, heads: int, dropout: float, epsilon: float, causal: bool) -> None:
        super().__init__()
        self.heads, self.dropout, self.causal = heads, dropout, causal
        widths = [3 * width] if causal else 3 * [width]
        self.qkv, self.proj = nn.ModuleList(nn.Linear(width, each) for each in widths), nn.Linear(width, width)
        self.fc, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.ln1, self.ln2 = nn.LayerNorm(width, epsilon), nn.LayerNorm(width, epsilon)

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = [part for linear in self.qkv for part in linear(x).split(width, 2)]
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts)
        ratio = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=ratio, is_causal=self.causal)
        return self.drop(self.proj(y.transpose(1, 2).reshape(batch, length, width)))

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.out(F.gelu(self.fc(x))))

    def drop(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, self.dropout, self.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.causal:
            x = x + self.attention(self.ln1(x))
            return x + self.inner(self.ln2(x))
        x = self.ln1(x + self.attention(x))
        return self.ln2(x + self.inner(x))


class Gpt(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, context: int, dropout: float) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*[Block(width, heads, dropout, 1e-5, True) for _ in range(layers)])
        self.ln_f, self.dropout = nn.LayerNorm(width), dropout
        for table in (self.wte, self.wpe):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        x = self.blocks(F.dropout(x, self.dropout, self.training))
        return F.linear(self.ln_f(x), self.wte.weight)


class Bert(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, context: int, dropout: float) -> None:
        super().__init__()
        self.words, self.kinds, self.places = nn.Embedding(vocabulary, width), nn.Embedding(2, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*[Block(width, heads, dropout, 1e-12, False) for _ in range(layers)])
        self.norm, self.last = nn.LayerNorm(width, 1e-12), nn.LayerNorm(width, 1e-12)
        self.dense, self.bias, self.dropout = nn.Linear(width, width), nn.Parameter(torch.zeros(vocabulary)), dropout
        for table in (self.words, self.kinds, self.places):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: torch.Tensor, segments: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.kinds(segments) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        x = self.blocks(F.dropout(self.norm(x), self.dropout, self.training))
        return F.linear(self.last(F.gelu(self.dense(x))), self.words.weight, self.bias)


def vgg16() -> nn.Module:
    layers: List[nn.Module] = []
    before = 3
    for width, count in [(64, 2), (128, 2), (256, 3), (512, 3), (512, 3)]:
        for _ in range(count):
            layers += [nn.Conv2d(before, width, 3, padding=1), nn.ReLU()]
            before = width
        layers.append(nn.MaxPool2d(2))
    head: List[nn.Module] = [nn.Flatten(), nn.Linear(512 * 49, 4096), nn.ReLU(), nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU(), nn.Dropout()]
    return nn.Sequential(*layers, *head, nn.Linear(4096, 1000))


def images(batch: int) -> Tuple[List[torch.Tensor], torch.Tensor]:
    return [torch.randn(batch, 3, 224, 224)], torch.randint(1000, (batch,))


def made(name: str, batch: int) -> Tuple[nn.Module, List[torch.Tensor], torch.Tensor]:
    """A model, its inputs, and the classes of its predictions."""
    if name == "gpt2":
        tokens = torch.randint(50257, (batch, 1024))
        return Gpt(12, 768, 12, 50257, 1024, 0.1), [tokens], torch.randint(50257, (batch, 1024))
    if name == "bert-base":
        tokens = torch.randint(30522, (batch, 512))
        return Bert(12, 768, 12, 30522, 512, 0.1), [tokens, torch.zeros_like(tokens)], torch.randint(30522, (batch, 512))
    if name == "resnet50":
        # Of its data only the model is used here.
        return (resnet([3, 4, 6, 3], 224, 1).model, *images(batch))
    if name == "vgg16":
        return (vgg16(), *images(batch))
    raise SystemExit(f"no model {name}")


def optimizer(name: str, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=lr)
    if name == "sgd-momentum":
        return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    raise SystemExit(f"no optimizer {name}")


def trained(arguments: argparse.Namespace, precision: str) -> Dict[str, Any]:
    """The median step, and the highest memory."""
    device = arguments.device
    torch.manual_seed(0)
    model, inputs, target = made(arguments.model, arguments.batch)
    model = model.to(device).train()
    inputs, target = [tensor.to(device) for tensor in inputs], target.to(device)
    rule = optimizer(arguments.optimizer, model, arguments.lr)
    called = torch.compile(model) if arguments.compile else model
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    times, losses = [], []
    begin = time.perf_counter()
    for turn in range(arguments.warmup + arguments.steps):
        if turn == arguments.warmup:
            synchronize()
            ready = time.perf_counter() - begin
        start = time.perf_counter()
        rule.zero_grad(set_to_none=True)
        with torch.autocast(device, dtype=PRECISIONS[precision], enabled=precision != "fp32"):
            logits = called(*inputs)
            loss = F.cross_entropy(logits.flatten(0, -2), target.flatten())
        loss.backward()
        rule.step()
        losses.append(loss.item())
        synchronize()
        times.append(time.perf_counter() - start)
    step = statistics.median(times[arguments.warmup:])
    return {
        "precision": precision,
        "parameters": sum(p.numel() for p in model.parameters()),
        "batch": arguments.batch,
        "step_seconds": step,
        "samples_per_s": arguments.batch / step,
        "ready_seconds": ready,
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None,
        "reserved_memory_bytes": torch.cuda.max_memory_reserved() if device == "cuda" else None,
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }


def seconds(work: Callable[[], Any], runs: int) -> float:
    """Median time on the GPU."""
    for _ in range(3):
        work()
    times = []
    for _ in range(runs):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def ceilings() -> Dict[str, Any]:
    """Rates of a product of two matrices of 4096 x 4096 and of 8192 x 8192, and of a copy of 1 GiB."""
    found: Dict[str, Any] = {"matmul": [], "copy": None}
    for size in (4096, 8192):
        for name, dtype in [("bf16", torch.bfloat16), ("fp16", torch.float16), ("tf32", torch.float32), ("fp32", torch.float32), ("fp64", torch.float64)]:
            if name == "fp64" and size > 4096:
                continue
            torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
            a, b = (torch.randn(size, size, device="cuda").to(dtype) for _ in range(2))
            time_of_one = seconds(lambda: a @ b, 10)
            found["matmul"].append({"precision": name, "size": size, "seconds": time_of_one, "flops_per_s": 2 * size**3 / time_of_one})
    source = torch.randint(255, (1 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    # Bytes read and bytes written.
    found["copy"] = 2 * source.numel() / seconds(lambda: target.copy_(source), 10)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--precisions", default="bf16,fp32")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--ceilings", action="store_true")
    parser.add_argument("-o", "--output", required=True)
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    found: Dict[str, Any] = {"torch": torch.__version__, "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"}

    def write() -> None:
        with open(arguments.output + ".part", "w") as file:
            json.dump(found, file, indent=1)
        os.replace(arguments.output + ".part", arguments.output)

    if arguments.ceilings:
        found.update(ceilings())
    else:
        found.update(model=arguments.model, compiled=arguments.compile, runs=[])
        for precision in arguments.precisions.split(","):
            found["runs"].append(trained(arguments, precision))
            # The first precision is kept if the second takes too long.
            write()
    write()
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
