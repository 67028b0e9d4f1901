"""Which machine this is, so that two names of one are seen; with Python's own library alone (check_host.py)."""

from __future__ import annotations

import os
import socket
from pathlib import Path

MEMORY = "/dev/shm"


def machine() -> str:
    """The same for two names of one host, of which each launch has one part."""
    boot = Path("/proc/sys/kernel/random/boot_id")  # containers share it, but not the memory file system
    memory = os.stat(MEMORY).st_dev if os.path.isdir(MEMORY) else None
    return f"{boot.read_text().strip() if boot.exists() else socket.gethostname()} {memory}"
