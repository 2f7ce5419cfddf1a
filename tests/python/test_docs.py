"""The script of docs/python.md trains in two processes, with the losses of the model without a pipeline."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[2]
SMALL = "n_embd=32, n_layer=3, n_head=2, resid_pdrop=0"
PLAIN = """
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(5):
    optimizer.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss:.6f}")
"""
LLAMA = (
    "from transformers import LlamaConfig, LlamaForCausalLM",
    "LlamaForCausalLM(LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2, vocab_size=50257))",
)


def losses(script: str, folder: Path, processes: int) -> list[list[float]]:
    """The losses that each process prints."""
    path = folder / f"train{processes}.py"
    path.write_text(script)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--rdzv-backend", "c10d",
               "--rdzv-endpoint", "localhost:0", "--log-dir", str(folder / f"log{processes}"), "--redirects", "3", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env={**os.environ, "OMP_NUM_THREADS": "1"})
    logs = sorted((folder / f"log{processes}").rglob("stdout.log"))
    found = [[float(loss) for loss in re.findall(r"loss (\d+\.\d+)", log.read_text())] for log in logs]
    errors = [log.read_text() for log in (folder / f"log{processes}").rglob("stderr.log")]
    assert done.returncode == 0, "\n".join([done.stderr, *errors])
    return found


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_script_trains_as_the_model_does(name: str, tmp_path: Path) -> None:
    script = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(encoding="utf-8"), re.DOTALL)[0]
    assert len(script.splitlines()) <= 12 and "resid_pdrop=0" in script
    script = script.replace("resid_pdrop=0", SMALL).replace("(8, 128)", "(8, 16)")
    if name == "llama":
        script = re.sub(r"from transformers import .*", LLAMA[0], script)
        script = re.sub(r"GPT2LMHeadModel\(GPT2Config\(.*?\)\)", LLAMA[1], script)
    pipelined = losses(script, tmp_path, 2)
    kept = [line for line in script.split("plan = ")[0].splitlines()]
    (plain,) = losses("\n".join(kept) + PLAIN, tmp_path, 1)
    assert len(plain) == 5 and plain[-1] < plain[0]
    for found in pipelined:
        assert found == pytest.approx(plain, abs=1e-5)
