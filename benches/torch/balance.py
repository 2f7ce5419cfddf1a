"""Compares plans from `profile --engine torch` with equal numbers of layers per stage, in torch's pipeline runtime.

    python benches/torch/balance.py --models vgg16,t5 --rounds 5

Two processes of one thread each train both plans in turn, under 1F1B. The table has the median step of each plan, the prediction,
and the CPU time of the busier process. Needs two idle cores, torch, transformers, and `pipec` or $PIPEC.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any, Dict, List

import torch

import models
import pipec

HERE = Path(__file__).resolve().parent
EXACT = 1e-5


def torchrun(*command: str) -> None:
    """Runs a command in two processes."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*launcher, *command], capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        raise SystemExit(done.stderr)


def links(folder: Path) -> str:
    """A cluster file with the measured link between two processes."""
    command = [pipec.find_binary(), "cluster", "bench", "--engine", "torch", "--device", "cpu", "--python", sys.executable]
    torchrun("--no-python", *command, "-o", str(folder / "cluster.toml"), "-q")
    return str(folder / "cluster.toml")


def plain(name: str, steps: int, count: int) -> List[float]:
    """The losses of the model without a pipeline, in micro-batches."""
    subject = models.made(name)
    optimizer = torch.optim.SGD(subject.model.parameters(), lr=1e-3, momentum=0.9)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        # All micro-batches are the same rows, and each updates the statistics of BatchNorm.
        losses = []
        for _ in range(count):
            output = subject.model(**subject.inputs)
            loss = output.loss if subject.loss is None else subject.loss(output, subject.target)
            (loss / count).backward()
            losses.append(loss.item())
        optimizer.step()
        found.append(sum(losses) / count)
    return found


def compare(name: str, cluster: str, folder: Path, rounds: int, count: int) -> Dict[str, Any]:
    """One row: the measured and predicted times of both plans."""
    folder.mkdir()
    subject = models.made(name)
    rows = next(iter(subject.inputs.values())).shape[0]
    torch.set_num_threads(1)
    given: Any = (subject.model, (), subject.inputs)
    # Whisper has a frozen embedding.
    warnings.filterwarnings("ignore", message=".*are frozen", category=pipec.PipecWarning)
    profile = pipec.profile(*given, engine="torch", micro_batch=rows, runs=5, extra=["--warmup", "2"])
    middle = subject.layers[len(subject.layers) // 2 - 1]
    chosen = ["--cluster", cluster, "--momentum", "0.9"]
    options: Any = dict(batch=None, microbatches=count, micro_batch=rows, schedule="1f1b", optimizer="sgd", profile=profile, stages=[1, 1])
    plans = {
        "equal": pipec.partition(*given, **options, extra=[*chosen, "--cut-after", middle]),
        "pipec": pipec.partition(*given, **options, extra=chosen),
    }
    for kind, plan in plans.items():
        plan.save(folder / f"{kind}.plan.json")
    torchrun(str(HERE / "worker.py"), name, str(folder), str(rounds))
    ranks = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]
    row: Dict[str, Any] = {"model": name}
    expected = plain(name, 3, count)
    whole = profile.json["whole"]
    ops = sum(op["fwd_us"] + op["bwd_us"] for op in profile.json["ops"])
    row["ops"] = ops / (whole["fwd_us"] + whole["bwd_us"])
    for kind, plan in plans.items():
        found = [rank[f"{kind}.plan.json"] for rank in ranks]
        row[kind] = statistics.median(found[0]["seconds"])
        row[f"{kind}_cpu"] = max(statistics.median(rank["cpu"]) for rank in found)
        row[f"{kind}_predicted"] = plan.predicted.minibatch_us * 1e-6
        row[f"{kind}_all"] = found[0]["seconds"]
        off = max(abs(one - other) for one, other in zip(found[0]["losses"], expected))
        row[f"{kind}_loss"] = off
        if off > EXACT:
            print(f"warning: {name}, {kind}: losses differ by {off:.1e} from those of the model", file=sys.stderr)
    row["cuts"] = [stage.modules[0] if stage.modules else "" for stage in (plans["equal"].stages[1], plans["pipec"].stages[1])]
    return row


def table(rows: List[Dict[str, Any]]) -> str:
    """The rows as a table in Markdown."""
    lines = [
        "| model | equal layers | pipec | speedup | CPU time | predicted, equal | predicted, pipec | ops | loss |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        error = [f"{row[f'{kind}_predicted'] / row[kind] - 1:+.0%}" for kind in ("equal", "pipec")]
        lines.append(
            f"| {row['model']} | {row['equal'] * 1e3:.0f} ms | {row['pipec'] * 1e3:.0f} ms | {row['equal'] / row['pipec']:.2f} "
            f"| {row['equal_cpu'] / row['pipec_cpu']:.2f} | {error[0]} | {error[1]} | {row['ops'] - 1:+.0%} "
            f"| {max(row['equal_loss'], row['pipec_loss']):.0e} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join([*models.UNEQUAL, *models.EQUAL]), help="names, separated by commas [default: all]")
    parser.add_argument("--rounds", type=int, default=5, help="measured steps of each plan [default: 5]")
    parser.add_argument("--microbatches", type=int, default=4, help="micro-batches per step [default: 4]")
    parser.add_argument("--json", help="file for all measurements")
    asked = parser.parse_args()
    if os.getloadavg()[0] > 0.5:
        print("warning: other programs are running, and the measured steps may be too long", file=sys.stderr)
    rows = []
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        cluster = links(folder)
        for name in asked.models.split(","):
            rows.append(compare(name, cluster, folder / name, asked.rounds, asked.microbatches))
            print(table(rows[-1:]).splitlines()[-1], flush=True)
            if asked.json:
                Path(asked.json).write_text(json.dumps(rows, indent=1))
    print(table(rows))


if __name__ == "__main__":
    main()
