"""Errors that need no torch: the executable, its exit codes, a missing package."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import pipec
from pipec import binary, errors, exporting


def test_exit_codes_become_classes() -> None:
    line = '{"message":"cannot import m.onnx","causes":["node `a` has no output"],"help":"write it again","exit_code":2}'
    for code, kind in [(1, errors.CheckError), (2, errors.InputError), (3, errors.InfeasibleError), (101, errors.InternalError)]:
        fault = binary.failure(code, ["note", line])
        assert type(fault) is kind and isinstance(fault, pipec.Error)
        assert str(fault) == "cannot import m.onnx\n  node `a` has no output\nhelp: write it again"
        assert fault.help == "write it again"
    assert isinstance(binary.failure(-9, []), errors.InternalError)
    assert binary.failure(2, ["error: no such file", "help: look"]).help == "look"


def test_a_missing_executable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(binary, "script_folders", lambda: [])
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("PIPEC", raising=False)
    with pytest.raises(pipec.BinaryNotFoundError, match="the `pipec` executable was not found") as caught:
        pipec.find_binary()
    assert "pip install pipec" in (caught.value.help or "")
    monkeypatch.setenv("PIPEC", str(tmp_path / "none"))
    with pytest.raises(pipec.BinaryNotFoundError, match="is not an executable file"):
        pipec.find_binary()


def test_a_missing_file() -> None:
    with pytest.raises(pipec.InputError, match="cannot open nothing.onnx"):
        pipec.partition("nothing.onnx")


def test_files_need_no_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "mlp.onnx"
    subprocess.run([pipec.find_binary(), "zoo", "mlp", "-o", str(model), "-qq"], check=True)
    plan = pipec.partition(model, gpus=2, batch=64, device="h100")
    assert plan.predicted.samples_per_s > 0 and "digraph" in plan.export("dot")["plan.dot"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for call in [lambda: plan.build(), lambda: plan.split_spec(), lambda: exporting.need_torch("this")]:
        with pytest.raises(pipec.MissingDependencyError, match="needs torch, which is not installed"):
            call()


def test_the_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "pipec", "--version"], capture_output=True, text=True, env={**os.environ})
    assert done.returncode == 0 and done.stdout.startswith("pipec ")
