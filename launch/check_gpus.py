"""What nvidia-smi says of a host's GPUs: counts, models, memory, and what tells that one is not well.

Fields as `nvidia-smi --help-query-gpu` names them. One that this driver does not know is left out and stays None, as
does what it answers with [N/A]. Needs no package. Not here: what is too much (preflight_machine.py).
"""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import Any

FIELDS = (
    "index", "uuid", "name", "memory.total", "memory.used", "temperature.gpu", "ecc.errors.uncorrected.volatile.total",
    "remapped_rows.pending", "remapped_rows.failure",
    "clocks_event_reasons.active", "clocks_throttle_reasons.active",  # since driver 535, and before
)  # fmt: skip
UNKNOWN_FIELD = re.compile(r'Field "([\w.]+)" is not a valid field')
MIB = 1 << 20
PATIENCE_S = 20.0  # without a persistence daemon it takes seconds; on a GPU that hangs, for ever


def gpus() -> tuple[list[dict[str, Any]] | None, str | None]:
    """(the GPUs, what is wrong with asking); None where there is no nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return None, None
    fields = list(FIELDS)
    try:
        while True:
            done = _ask(f"--query-gpu={','.join(fields)}")
            unknown = set(UNKNOWN_FIELD.findall(done.stdout + done.stderr)) & set(fields)
            if done.returncode == 0 or not unknown:
                break
            fields = [field for field in fields if field not in unknown]
        if done.returncode != 0:
            said = (done.stdout + done.stderr).strip().splitlines() or [f"code {done.returncode}"]
            return [], f"nvidia-smi fails: {said[0]}"
        rows = [dict(zip(fields, line.split(", "), strict=True)) for line in done.stdout.splitlines() if line.strip()]
        users = _users()
    except subprocess.TimeoutExpired:
        return [], f"nvidia-smi does not answer within {PATIENCE_S:g} s"
    return [_gpu(row, users.get(row["uuid"], [])) for row in rows], None


def _ask(query: str) -> subprocess.CompletedProcess[str]:
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)


def _users() -> dict[str, list[str]]:
    """The processes that hold memory of a GPU, by its UUID. In a container none is seen."""
    found: dict[str, list[str]] = {}
    for line in _ask("--query-compute-apps=gpu_uuid,pid,process_name").stdout.splitlines():
        parts = line.split(", ", 2)
        if len(parts) == 3:
            found.setdefault(parts[0], []).append(f"{parts[2]} (process {parts[1]})")
    return found


def _gpu(row: dict[str, str], users: list[str]) -> dict[str, Any]:
    reasons = row.get("clocks_event_reasons.active", row.get("clocks_throttle_reasons.active", ""))
    yes = {"Yes": True, "No": False}
    return {
        "index": int(row["index"]),
        "name": row["name"],
        "total": _bytes(row["memory.total"]),
        "used": _bytes(row["memory.used"]),
        "temperature": _number(row.get("temperature.gpu", "")),
        "ecc": _number(row.get("ecc.errors.uncorrected.volatile.total", "")),
        "pending": yes.get(row.get("remapped_rows.pending", "")),
        "failure": yes.get(row.get("remapped_rows.failure", "")),
        "reasons": int(reasons, 16) if reasons.startswith("0x") else None,
        "users": users,
    }


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def _bytes(text: str) -> int | None:
    mebibytes = _number(text)
    return None if mebibytes is None else mebibytes * MIB
