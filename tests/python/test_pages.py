"""The Python code and the shell commands of the page for PyTorch users, in the order of the page.

`torchrun` runs as many processes as this machine has devices to try, two. Commands of torchtitan and Megatron-LM only parse their arguments,
and `srun` runs its command here.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Dict, List, Tuple

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
import pipec  # noqa: E402
from pipec.binary import find_binary  # noqa: E402

PAGE = Path(__file__).resolve().parents[2] / "docs" / "from-pytorch.md"
MODEL_ARGUMENTS = (
    "--hidden-size 4096 --num-attention-heads 32 --seq-length 8192 --max-position-embeddings 8192 --lr 1e-4 --train-iters 1 "
    "--tokenizer-type NullTokenizer --vocab-size 128256"
)
TORCHRUN = """#!/bin/bash
words=("$@")
for at in "${!words[@]}"; do
    if [ "${words[$at]}" = --nproc-per-node ]; then words[$((at + 1))]=2; fi
    if [ "${words[$at]}" = --rdzv-endpoint ]; then words[$((at + 1))]=localhost:0; fi
    if [ "${words[$at]}" = torchtitan.train ]; then exec "$PYTHON" -m torchtitan.config.manager "${words[@]:$((at + 1))}"; fi
    if [ "${words[$at]}" = pretrain_gpt.py ]; then exec "$PYTHON" -c "$MEGATRON" "${words[@]:$((at + 1))}"; fi
done
exec "$PYTHON" -m torch.distributed.run --rdzv-backend c10d --rdzv-endpoint localhost:0 "${words[@]}"
"""
MEGATRON = (
    "import typing, typing_extensions, types, torch; typing.override = typing_extensions.override; "
    "torch.cuda.get_device_properties = lambda device: types.SimpleNamespace(major=9); "
    "from megatron.training.arguments import parse_args, validate_args; validate_args(parse_args())"
)


def blocks(heading: str) -> List[Tuple[str, str]]:
    """The language and text of the code below a heading."""
    text = PAGE.read_text(encoding="utf-8").split(f"## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"```(python|sh)\n(.*?)```", text, re.S)


def save(folder: Path, text: str) -> None:
    """Writes a script that begins with its name."""
    name = re.match(r"# (\w+\.py)\n", text)
    assert name is not None, text
    (folder / name.group(1)).write_text(text, encoding="utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the scripts of the page, and the programs that its commands run."""
    made = tmp_path_factory.mktemp("page")
    (made / "bin").mkdir()
    programs = {
        "torchrun": TORCHRUN,
        "python": f'#!/bin/bash\nexec "{sys.executable}" "$@"\n',
        "srun": '#!/bin/bash\nexec "$@"\n',
        "scontrol": "#!/bin/bash\necho localhost\n",
        "pipec": f'#!/bin/bash\nexec "{find_binary()}" "$@"\n',
    }
    for name, text in programs.items():
        (made / "bin" / name).write_text(text)
        (made / "bin" / name).chmod(0o755)
    return made


def shell(folder: Path, text: str, **variables: str) -> str:
    """Runs commands as bash does, until one fails."""
    environment: Dict[str, str] = {
        **os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "PYTHON": sys.executable, "MEGATRON": MEGATRON, "OMP_NUM_THREADS": "1", **variables
    }
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", text], cwd=folder, capture_output=True, text=True, timeout=900, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout


def lines(text: str) -> List[str]:
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def test_one_machine(folder: Path) -> None:
    (_, script), (_, commands), (_, load) = blocks("Train on one machine")
    save(folder, script)
    for command in lines(commands):
        output = shell(folder, command)
        losses = [float(value) for value in re.findall(r"loss (\d+\.\d+)", output)]
        assert len(losses) == 10 and losses[-1] < losses[0] and "predicted" in output, output
    assert "<svg" in (folder / "plan.html").read_text()
    start = script.split("dist.init_process_group()")[0] + re.search(r"model = .*\n", script)[0]  # type: ignore[index]
    (folder / "load.py").write_text(start + load)
    shell(folder, f"{sys.executable} load.py")
    # Two stages give the same losses.
    (folder / "two.py").write_text(script.replace("batch=32)", "batch=32, stages=[1, 1])").replace("trained.pt", "two.pt"))
    output = shell(folder, "torchrun --nproc-per-node 2 two.py")
    assert [float(value) for value in re.findall(r"loss (\d+\.\d+)", output)] == pytest.approx(losses, abs=0.05)


def test_slurm(folder: Path) -> None:
    (_, plan), (_, job) = blocks("Train on Slurm")
    save(folder, plan)
    # This machine has two processes, not sixteen.
    code = plan.replace('levels=[(8, "450GB/s"), (2, "50GB/s")]', "gpus=2, stages=[1, 1]")
    assert code != plan
    shell(folder, f"{sys.executable} plan.py")
    (folder / "plan.py").write_text(code)
    shell(folder, f"{sys.executable} plan.py")
    page = PAGE.read_text(encoding="utf-8")
    changes = re.search(r"replace the call of `partition` by `(.*?)`.*\n`(plan\.build.*?)`", page)
    assert changes is not None
    ((_, script),) = blocks("Train on one machine")[:1]
    script = re.sub(r"plan = pipec\.partition\(.*\)", changes.group(1), script).replace("plan.build(model)", changes.group(2))
    save(folder, script)
    output = shell(folder, job, SLURM_JOB_NODELIST="localhost", SLURM_NNODES="1")
    assert len(re.findall(r"loss \d", output)) == 10, output


def test_torchtitan_and_megatron(folder: Path) -> None:
    (_, plan), (_, titan) = blocks("Train in torchtitan")
    ((_, megatron),) = blocks("Train in Megatron-LM")
    save(folder, plan)
    commands = [*lines(titan), *lines(megatron)]
    assert len(commands) == 6
    for command in [*commands[:2], *commands[3:5]]:
        shell(folder, command)
        assert pipec.Plan.load(folder / "llama.json").ranks == 8
    assert "layers.31" in (folder / "titan" / "torchtitan.args").read_text()
    assert "--pipeline-model-parallel-size 4" in (folder / "megatron.args").read_text()
    if importlib.util.find_spec("torchtitan") is not None:
        output = shell(folder, commands[2])
        assert "layers.31" in output, output
    try:
        found = importlib.util.find_spec("megatron.training")
    except ModuleNotFoundError:
        found = None
    if found is not None:
        shell(folder, commands[5], MODEL_ARGUMENTS=MODEL_ARGUMENTS, RANK="0", LOCAL_RANK="0", WORLD_SIZE="8")


def test_exports_of_modules(tmp_path: Path) -> None:
    """The blocks of the section on exports run in order, with a model and its inputs."""
    (tmp_path / "model.py").write_text(
        "import os\nimport torch\nfrom transformers import GPT2Config, GPT2LMHeadModel\n"
        f"os.chdir({str(tmp_path)!r})\n"
        "ids = torch.randint(61, (7, 16))\nmask = torch.ones_like(ids)\nx = torch.randn(7, 8)\n"
        "model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))\n"
    )
    pytest.importorskip("onnx")
    codes = [text for kind, text in blocks("Export") if kind == "python"]
    assert len(codes) == 2
    gpt = "model = GPT2LMHeadModel(GPT2Config(vocab_size=61, n_positions=16, n_embd=16, n_layer=2, n_head=2, use_cache=False))\n"
    text = "from model import *\n" + codes[0] + gpt + codes[1]
    (tmp_path / "run.py").write_text(text)
    shell(tmp_path, f"{sys.executable} run.py")
    assert (tmp_path / "model.pt2").exists() and (tmp_path / "model.onnx").exists()


def test_weights_of_training_load(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    ((_, code),) = [block for block in blocks("Load the weights in PyTorch") if block[0] == "python"]
    start = "import safetensors.torch, torch\nmodel = torch.nn.Linear(2, 2)\nsafetensors.torch.save_file(model.state_dict(), 'weights.safetensors')\n"
    (tmp_path / "run.py").write_text(start + code)
    shell(tmp_path, f"{sys.executable} run.py")
