"""Finds the `pipec` executable and runs it. A failed command becomes an exception of `pipec.errors`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any, List, Optional, Sequence

from .errors import BY_EXIT_CODE, BinaryNotFoundError, Error, InternalError, warn

NAME = "pipec.exe" if sys.platform == "win32" else "pipec"


def find_binary() -> str:
    """The path of the executable: of this environment, else `$PIPEC`, else on `$PATH`.

    Raises BinaryNotFoundError.
    """
    for folder in script_folders():
        found = Path(folder) / NAME
        if found.is_file() and os.access(found, os.X_OK):
            return str(found)
    named = os.environ.get("PIPEC")
    if named:
        if not os.access(named, os.X_OK) or os.path.isdir(named):
            raise BinaryNotFoundError(f"PIPEC={named} is not an executable file", "set PIPEC to the path of the `pipec` executable")
        return named
    on_path = shutil.which(NAME)
    if on_path is None:
        raise BinaryNotFoundError(
            "the `pipec` executable was not found",
            "`pip install pipec` installs it; `cargo install --path .` builds it; PIPEC=/path/to/pipec names another one",
        )
    return on_path


def script_folders() -> List[str]:
    """Folders in which pip installs executables of this environment, or of the user."""
    schemes = [None, f"{os.name}_user"]
    folders = [sysconfig.get_path("scripts") if scheme is None else sysconfig.get_path("scripts", scheme) for scheme in schemes
               if scheme is None or scheme in sysconfig.get_scheme_names()]
    # `pip install --target DIR` puts executables in DIR/bin.
    folders.append(str(Path(__file__).resolve().parent.parent / "bin"))
    return [folder for folder in folders if folder]


def run(arguments: Sequence[str], *, cwd: Optional[str] = None, ignore: Sequence[str] = ()) -> str:
    """Runs `pipec ARGUMENTS --format json` in the folder `cwd` and returns its standard output.

    Its warnings become PipecWarning, except those that contain a text of `ignore`.
    """
    return run_text([*arguments, "--format", "json"], cwd=cwd, ignore=ignore)


def run_text(arguments: Sequence[str], *, cwd: Optional[str] = None, ignore: Sequence[str] = ()) -> str:
    """Runs `pipec ARGUMENTS` and returns its standard output."""
    command = [find_binary(), *arguments, "--color", "never", "-q"]
    try:
        done = subprocess.run(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8", errors="replace")
    except OSError as fault:
        raise BinaryNotFoundError(f"cannot run {command[0]}: {fault}", "reinstall pipec: the executable is for another platform") from None
    lines = done.stderr.splitlines()
    if done.returncode != 0:
        raise failure(done.returncode, lines)
    for line in lines:
        if line.strip() and not any(text in line for text in ignore):
            warn(line.strip()[len("warning: ") :] if line.startswith("warning: ") else line.strip())
    return done.stdout


def failure(code: int, lines: Sequence[str]) -> Error:
    """The exception of a failed command, from the JSON object in the last line of standard error."""
    kind = BY_EXIT_CODE.get(code, InternalError)
    try:
        found: Any = json.loads(lines[-1])
        causes = [f"  {cause}" for cause in found.get("causes", [])]
        return kind("\n".join([found["message"], *causes]), found.get("help"))
    except (IndexError, ValueError, KeyError, TypeError):
        helps = [line[len("help: ") :] for line in lines if line.startswith("help: ")]
        said = [line[len("error: ") :] if line.startswith("error: ") else line for line in lines if not line.startswith("help: ")]
        return kind("\n".join(said) or f"pipec ended with exit code {code}", helps[0] if helps else None)
