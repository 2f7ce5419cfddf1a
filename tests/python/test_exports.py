"""Exports held against the packages they are for. A test is skipped if its package is not installed: torchtitan, megatron-core,
Megatron-LM, deepspeed, transformers or torchvision.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List

import pytest

torch = pytest.importorskip("torch")
import models  # noqa: E402
import pipec  # noqa: E402

LAYERS = {"llama": 4, "gpt2": 3}
MODEL_ARGUMENTS = (
    "--hidden-size 16 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 32 --lr 1e-4 --train-iters 1 "
    "--tokenizer-type NullTokenizer --vocab-size 64"
)


def planned(name: str, target: str, **options: Any) -> pipec.Plan:
    """A plan of a small model of transformers, or of ResNet-50."""
    pytest.importorskip("torchvision" if name == "resnet50" else "transformers")
    model, inputs, _ = models.made(name)
    given: Dict[str, Any] = dict(gpus=2, batch=models.ROWS, micro_batch=2, stages=[1, 1], device="h100", precision="fp32", target=target)
    return pipec.partition(model, (), inputs, **{**given, **options})


def written(plan: pipec.Plan, target: str, folder: Path) -> List[str]:
    """The files of an export, in a folder."""
    files = plan.export(target)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return sorted(files)


def trained(framework: str, name: str, folder: Path) -> List[Dict[str, Any]]:
    """What two processes of `export_worker.py` found."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    done = subprocess.run(
        [*command, str(Path(__file__).with_name("export_worker.py")), framework, name, str(folder)],
        capture_output=True, text=True, timeout=600, env={**os.environ, "OMP_NUM_THREADS": "1", "PATH": path},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


def needs(module: str) -> None:
    """Skips the test unless a module can be found. It may need a GPU to be imported."""
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        found = None
    if found is None:
        pytest.skip(f"{module} is not installed")


@pytest.mark.parametrize("name", ["llama", "gpt2", "resnet50"])
def test_torchtitan_reads_the_arguments(name: str) -> None:
    needs("torchtitan")
    from torchtitan.config import ConfigManager

    plan = planned(name, "torchtitan", schedule="1f1b")
    config: Any = ConfigManager().parse_args(["--module", "llama3", "--config", "llama3_debugmodel", *plan.torchtitan().split()])
    parts = config.parallelism.module_fqns_per_model_part
    assert (config.parallelism.pipeline_parallel_degree, len(parts)) == (2, 2)
    assert (config.parallelism.pipeline_parallel_schedule, config.parallelism.pipeline_parallel_microbatch_size) == ("1F1B", 2)
    assert (config.training.local_batch_size, config.training.global_batch_size) == (models.ROWS, models.ROWS)
    assert (config.training.mixed_precision_param, config.activation_checkpoint) == ("float32", None)
    if name != "resnet50":
        layers = [f"layers.{at}" for at in range(LAYERS[name])]
        known = ["tok_embeddings", *layers, "norm", "lm_head"]
        assert [part for part in sum(parts, []) if part in known] == known
    else:
        assert parts[0][0] == "conv1" and parts[1][-1] == "fc" and "layer3.5" in sum(parts, [])


def test_torchtitan_reads_replicas_and_recomputation() -> None:
    needs("torchtitan")
    from torchtitan.config import ConfigManager
    from torchtitan.distributed.activation_checkpoint import FullAC

    plan = planned("llama", "torchtitan", gpus=4, stages=[2, 2], precision="bf16", extra=["--zero", "3", "--recompute", "full"])
    config: Any = ConfigManager().parse_args(["--module", "llama3", "--config", "llama3_debugmodel", *plan.torchtitan().split()])
    assert (config.parallelism.data_parallel_shard_degree, config.parallelism.data_parallel_replicate_degree) == (2, 1)
    assert (config.parallelism.fsdp_reshard_after_forward, config.training.mixed_precision_param) == ("always", "bfloat16")
    assert isinstance(config.activation_checkpoint, FullAC.Config)


@pytest.mark.parametrize("schedule,stages", [("1f1b", 2), ("gpipe", 2), ("interleaved", 4), ("zb-h1", 2), ("zbv", 4)])
def test_torchtitan_trains_its_llama(schedule: str, stages: int, tmp_path: Path) -> None:
    needs("torchtitan")
    plan = planned("llama6", "torchtitan", schedule=schedule, stages=[1] * stages, batch=16)
    files = written(plan, "torchtitan", tmp_path)
    assert ("schedule.csv" in files) == (schedule in ("interleaved", "zb-h1"))
    for rank in trained("torchtitan", "llama3_debugmodel", tmp_path):
        assert len(rank["parts"]) == stages
        assert rank["losses"] == pytest.approx(rank["plain"], abs=1e-4)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("schedule,stages", [("1f1b", 2), ("interleaved", 4)])
def test_megatron_core_reads_the_layout(name: str, schedule: str, stages: int) -> None:
    needs("megatron.core")
    from megatron.core.transformer import TransformerConfig

    if name == "gpt2" and stages == 4:
        pytest.skip("a model of three layers has no four stages")
    words = planned(name, "megatron", schedule=schedule, stages=[1] * stages).megatron().split()
    given = dict(zip(words[::2], words[1::2]))
    config = TransformerConfig(
        num_layers=int(given["--num-layers"]), hidden_size=16, num_attention_heads=4, pipeline_dtype=torch.float32,
        pipeline_model_parallel_size=int(given["--pipeline-model-parallel-size"]),
        pipeline_model_parallel_layout=given["--pipeline-model-parallel-layout"],
    )
    layout: Any = config.pipeline_model_parallel_layout
    assert (layout.pipeline_model_parallel_size, layout.virtual_pipeline_model_parallel_size) == (2, stages // 2)
    held = [layout.get_num_layers_to_build(vp_stage=chunk, pp_rank=rank) for chunk in range(stages // 2) for rank in range(2)]
    assert sum(held) == LAYERS[name]


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(schedule="interleaved", stages=[1] * 4),
        dict(gpus=4, stages=[2, 2], precision="bf16", extra=["--zero", "1", "--recompute", "full"]),
        dict(gpus=4, stages=[1, 1], precision="fp16", extra=["--tensor", "2"]),
    ],
)
def test_megatron_lm_reads_the_arguments(options: Dict[str, Any]) -> None:
    needs("megatron.training")
    plan = planned("llama", "megatron", **options)
    code = "from megatron.training.arguments import parse_args, validate_args; args = parse_args(); validate_args(args); " \
        "print('|'.join(map(str, ['', args.pipeline_model_parallel_layout, args.data_parallel_size, args.num_layers])))"
    ranks = 2 * 2 if options.get("gpus") == 4 else 2
    # Megatron-LM imports typing.override, which Python has since 3.12, and reads the architecture of the GPU.
    code = "import typing, typing_extensions, types, torch; typing.override = typing_extensions.override; " \
        "torch.cuda.get_device_properties = lambda device: types.SimpleNamespace(major=9); " + code
    done = subprocess.run(
        [sys.executable, "-c", code, *MODEL_ARGUMENTS.split(), *plan.megatron().split()], capture_output=True, text=True, timeout=300,
        env={**os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks), "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    )
    assert done.returncode == 0, done.stderr
    replicas = plan.stages[0].replicas
    words = plan.megatron().split()
    layout = words[words.index("--pipeline-model-parallel-layout") + 1]
    assert done.stdout.splitlines()[-1] == f"|{layout}|{replicas}|4"


@pytest.mark.parametrize("name", ["llama", "gpt2", "resnet50"])
def test_deepspeed_trains(name: str, tmp_path: Path) -> None:
    needs("deepspeed")
    plan = planned(name, "deepspeed", schedule="1f1b")
    written(plan, "deepspeed", tmp_path)
    for rank in trained("deepspeed", name, tmp_path):
        assert rank["losses"] == pytest.approx(rank["plain"], rel=1e-3 if name == "resnet50" else 1e-5)


def test_layers_in_two_lists_are_refused() -> None:
    with pytest.raises(pipec.CheckError, match="and Megatron has one list of transformer layers"):
        planned("resnet50", "megatron").megatron()


def test_the_bundle_trains_a_model_of_transformers(tmp_path: Path) -> None:
    """`--loss model` needs no labels but those that the model reads."""
    numpy = pytest.importorskip("numpy")
    pytest.importorskip("transformers")
    model, inputs, _ = models.made("gpt2_labels")
    model.config.use_cache = False
    rows = {name: {0: torch.export.Dim.AUTO} for name in inputs}
    file = tmp_path / "model.pt2"
    torch.export.save(torch.export.export(model, (), inputs, dynamic_shapes=rows, strict=False), file)
    plan = pipec.partition(file, gpus=2, batch=models.ROWS, micro_batch=2, stages=[1, 1], schedule="1f1b", device="h100", target="torch")
    written(plan, "torch", tmp_path)
    numpy.savez(tmp_path / "data.npz", **{name: value.numpy() for name, value in inputs.items()})
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    given = ["--model", str(file), "--data", "data.npz", "--loss", "model", "--steps", "2", "--lr", "0.1"]
    done = subprocess.run([*command, "train.py", *given], cwd=tmp_path, capture_output=True, text=True, timeout=600, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    found = [float(line.split("loss ")[1]) for line in done.stdout.splitlines() if line.startswith("step ")]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert found == pytest.approx(expected, rel=1e-5)
