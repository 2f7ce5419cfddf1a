"""Random modules train as in eager PyTorch; see tests/survey/modules.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from conftest import ROOT


def test_random_modules_train_as_in_pytorch(tmp_path: Path) -> None:
    script = ROOT / "tests" / "survey" / "modules.py"
    command = [sys.executable, str(script), os.environ["PIPEC"], "--count", "100", "--quick", "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
