"""`python -m pipec` runs the `pipec` command."""

from __future__ import annotations

import os
import subprocess
import sys

from .binary import find_binary
from .errors import BinaryNotFoundError


def main() -> int:
    """Replaces this process by the executable. On Windows, runs it and returns its exit code."""
    try:
        binary = find_binary()
    except BinaryNotFoundError as fault:
        print(f"error: {fault}", file=sys.stderr)
        return 2
    command = [binary, *sys.argv[1:]]
    if sys.platform != "win32":
        os.execv(binary, command)
    return subprocess.run(command).returncode


if __name__ == "__main__":
    sys.exit(main())
