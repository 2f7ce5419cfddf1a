"""Finds the package and the executable of this checkout. Tests that need torch are skipped without it."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python"))
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "python"), str(ROOT / "tests" / "python"), os.environ.get("PYTHONPATH", "")])

built = ROOT / "target" / "release" / "pipec"
if "PIPEC" not in os.environ and built.exists():
    os.environ["PIPEC"] = str(built)

if importlib.util.find_spec("torch") is None:
    collect_ignore = ["test_docs.py", "test_exports.py", "test_modules.py", "test_pages.py", "test_partition.py", "test_training.py"]


def pytest_report_header(config: pytest.Config) -> str:
    return "torch is not installed: tests of modules are skipped" if importlib.util.find_spec("torch") is None else "torch is installed"
