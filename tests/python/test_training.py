"""Pipelines train as the model without a pipeline does: the same losses, under every kind of schedule."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, Iterator

import pytest

torch = pytest.importorskip("torch")
import models  # noqa: E402
import pipec  # noqa: E402
from train_worker import STEPS  # noqa: E402

SCHEDULES = {"1f1b": 1, "gpipe": 1, "interleaved": 2, "zb-h1": 1, "zbv": 2}
PROCESSES = {"resnet": 4}
CASES = [
    (name, schedule, schedule, [1] * chunks * PROCESSES.get(name, 2))
    for name in ("resnet", "gpt2", "llama", "unet")
    for schedule, chunks in SCHEDULES.items()
]
CASES += [
    ("gpt2", "own_rows", "1f1b", [2]),
    ("gpt2", "all_rows", "1f1b", [2]),
    ("gpt2_labels", "labels", "interleaved", [1] * 4),
    ("llama", "meta", "1f1b", [1, 1]),
    ("llama", "recompute", "1f1b", [1, 1]),
    ("unet", "autocast", "1f1b", [1, 1]),
    ("unet", "recompute", "zb-h1", [1, 1]),
]


def has(name: str) -> bool:
    try:
        models.made(name)
    except ImportError:
        return False
    return True


NAMES = [name for name in models.MODELS if has(name)]


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dict[str, Any]]:
    """Results of all plans, trained by two or four processes that run once."""
    folders = {count: tmp_path_factory.mktemp("plans") for count in {2, *PROCESSES.values()}}
    for name in NAMES:
        model, inputs, _ = models.made(name)
        rows = {key: {0: torch.export.Dim.AUTO} for key in inputs}
        if hasattr(model, "config"):
            model.config.use_cache = False
        program = torch.export.export(model, (), inputs, dynamic_shapes=rows, strict=False)
        for _, variant, schedule, stages in [case for case in CASES if case[0] == name]:
            # Modules give the same plans, and take longer.
            given = (model, (), inputs) if variant == "1f1b" else (program,)
            processes = PROCESSES.get(name, 2)
            plan = pipec.partition(
                *given, gpus=processes, batch=models.ROWS, micro_batch=models.MICRO_BATCH, schedule=schedule, stages=stages, device="h100"
            )
            for stage in plan.json["stages"]:
                stage["recompute"] = variant == "recompute"
            plan.save(folders[processes] / f"{name}.{variant}.plan.json")
    trained: Dict[str, Any] = {}
    for processes, folder in folders.items():
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--rdzv-backend", "c10d",
                   "--rdzv-endpoint", "localhost:0", str(Path(__file__).with_name("train_worker.py")), str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, env={**os.environ, "OMP_NUM_THREADS": "1"})
        files = [folder / f"rank{rank}.json" for rank in range(processes)]
        found = [json.loads(file.read_text()) for file in files if file.exists()]
        assert found, done.stderr
        trained.update({name: [rank.get(name, {"error": "not run"}) for rank in found] for name in found[0]})
    yield trained


@pytest.mark.parametrize("name,variant", [case[:2] for case in CASES])
def test_losses_are_those_of_the_model(results: Dict[str, Any], name: str, variant: str) -> None:
    if name not in NAMES:
        pytest.skip("transformers is not installed")
    ranks = results[f"{name}.{variant}.plan.json"]
    for rank in ranks:
        assert "error" not in rank, rank["error"]
    plain, norm = models.plain(name, STEPS)
    assert plain[-1] < plain[0]
    for rank in ranks:
        assert rank["losses"] == pytest.approx(plain, abs=2e-2 if variant == "autocast" else 1e-5)
        assert rank["norm"] == pytest.approx(norm, rel=0.2 if variant == "autocast" else 1e-3)
    model, _, _ = models.made(name)
    assert ranks[0]["names"] == sorted(model.state_dict())
