"""Exceptions of pipec. The exit code of the `pipec` command decides the class of an error that comes from it."""

from __future__ import annotations

import os
import sys
import warnings
from typing import Dict, Optional, Type


class Error(Exception):
    """Base class of all errors. `help` is a suggested fix, or None."""

    def __init__(self, message: str, help: Optional[str] = None) -> None:
        super().__init__(message)
        self.message = message
        self.help = help

    def __str__(self) -> str:
        return self.message if self.help is None else f"{self.message}\nhelp: {self.help}"


class InputError(Error, ValueError):
    """Invalid model, plan or option (exit code 2)."""


class InfeasibleError(Error):
    """No plan satisfies the constraints, such as the memory limit (exit code 3)."""


class CheckError(Error):
    """A negative result: a check failed, or a framework cannot run the plan (exit code 1)."""


class InternalError(Error):
    """A bug in pipec (exit code 101, or an exit code that pipec does not document)."""


class ExportError(Error):
    """torch.export cannot export the model."""


class DeviceError(Error, RuntimeError):
    """Devices or processes that a plan needs are missing."""


class BinaryNotFoundError(Error, FileNotFoundError):
    """The `pipec` executable was not found."""


class MissingDependencyError(Error, ImportError):
    """A Python package that this function needs is not installed."""


class PipecWarning(UserWarning):
    """A warning of the `pipec` command or of this package."""


BY_EXIT_CODE: Dict[int, Type[Error]] = {1: CheckError, 2: InputError, 3: InfeasibleError, 101: InternalError}


def fixed_batch(rows: int, name: str, micro_batch: Optional[int]) -> InputError:
    """The error of an exported program that only runs with another micro-batch size."""
    return InputError(
        f"the exported program only runs with {rows} rows of `{name}`, and the micro-batch is {micro_batch}",
        f"export it for any batch size, `torch.export.export(model, args, dynamic_shapes={{\"{name}\": {{0: torch.export.Dim.AUTO}}}})`, "
        f"with such an entry for every input; or pass the module itself; or plan with micro_batch={rows}",
    )


def warn(message: str) -> None:
    """Warns at the line that called this package."""
    here, level = os.path.dirname(os.path.abspath(__file__)), 1
    while True:
        try:
            if not os.path.abspath(sys._getframe(level).f_code.co_filename).startswith(here):
                break
        except ValueError:
            break
        level += 1
    warnings.warn(message, PipecWarning, stacklevel=level + 1)
