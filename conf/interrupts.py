"""Ctrl-C while the imports of a command run: one line and exit code 130, and no traceback from inside a library.

    if __name__ == "__main__":  # before all other imports, which take seconds on a busy machine
        interrupts.while_imports_run()

Nothing has begun by then, so the process ends at once. `as_usual` is for a command that has something to put in order:
from there on Ctrl-C is a KeyboardInterrupt. Not here: a run that trains (engine/session.py), and SIGTERM.
"""

from __future__ import annotations

import os
import signal

EXIT_INTERRUPTED = 130


def while_imports_run() -> None:
    """Unless Ctrl-C is ignored, as under nohup."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def as_usual() -> None:
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def tell() -> None:
    """Rank 0 speaks for all."""
    if os.environ.get("RANK", "0") == "0":
        os.write(2, b"interrupted\n")


def _end(number: int, frame: object) -> None:
    """An exception could be caught, or printed, by what is being imported."""
    tell()
    os._exit(EXIT_INTERRUPTED)
