"""What of the caller's environment reaches the ranks on other hosts, and how: a shell file that each host sources.

It travels through ssh's stdin into the host's memory file system, readable by its owner only, and removes itself as
soon as it is read. So values may hold anything, and are on no command line, in no output and on no disk.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from conf.load import ConfigError

PREFIXES = (
    "WANDB_", "HF_", "TRANSFORMERS_", "TOKENIZERS_", "HYDRA_", "MLFLOW_",
    "NCCL_", "GLOO_", "UCX_", "FI_", "MV2_", "TORCH_", "PYTORCH_", "TRITON_", "CUDA_", "OMP_", "MKL_",
    "DS_", "DEEPSPEED_", "PYTHON",
)  # fmt: skip
NAMES = (
    "LD_LIBRARY_PATH", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy", "NETRC", "TZ",
)  # fmt: skip
OF_THIS_MACHINE = ("CUDA_VISIBLE_DEVICES", "DS_ENV_FILE")
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


def path_of(launch: str, node: str) -> str:
    """Where a host keeps the file until it is read; node %n: as pdsh writes a host's number."""
    return f"/dev/shm/launch-{launch}-{node}.env"


def marker_of(launch: str) -> str:
    """What rank 0 leaves on its host when it came to its end."""
    return f"/dev/shm/launch-{launch}.done"


def travelling(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that are for all hosts."""
    return {
        name: value
        for name, value in environ.items()
        if (name.startswith(PREFIXES) or name in NAMES) and name not in OF_THIS_MACHINE and NAME.fullmatch(name)
    }


def of_files(environ: Mapping[str, str]) -> dict[str, str]:
    """The lines NAME=VALUE of DeepSpeed's .deepspeed_env, at home and here; blank lines and comments are none.

    Raises ConfigError by line. DeepSpeed ends with a traceback at a blank line, and lets the shell expand values.
    """
    found: dict[str, str] = {}
    name = environ.get("DS_ENV_FILE", ".deepspeed_env")
    for path in dict.fromkeys((Path.home() / name, Path.cwd() / name)):
        if not path.is_file():
            continue
        for number, line in enumerate(path.read_text().split("\n"), start=1):
            entry = line.strip()
            key, equals, value = entry.partition("=")
            if not entry or entry.startswith("#"):
                continue
            if not equals or not NAME.fullmatch(key.strip()):
                raise ConfigError([f"{path} line {number} is not NAME=VALUE; write it so, or # before it"])
            found[key.strip()] = value.strip()
    return found


def with_network(variables: Mapping[str, str], interface: str | None, *, named: bool) -> dict[str, str]:
    """The variables and a host's interface to its peers for both transports; named: it wins over what they say."""
    names = {} if interface is None else {"NCCL_SOCKET_IFNAME": interface, "GLOO_SOCKET_IFNAME": interface}
    return {**variables, **names} if named else {**names, **variables}


def shell_file(path: str, variables: Mapping[str, str], *, removes: bool = True) -> str:
    """What a host sources from `path`. removes: itself."""
    first = [f"rm -f -- {shlex.quote(path)}"] if removes else []
    lines = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    return "\n".join([*first, *lines, ""])


def for_the_launcher(environ: Mapping[str, str], *, ssh_options: str) -> dict[str, str]:
    """For DeepSpeed's runner on this machine: nothing in it that it would put on pdsh's command line."""
    kept = {
        name: value
        for name, value in environ.items()
        if not name.startswith(("PYTHON", "NCCL", "MLFLOW", "MV2", "UCX")) and name not in ("WCOLL", *OF_THIS_MACHINE)
    }
    return kept | {"PDSH_SSH_ARGS_APPEND": ssh_options, "DS_ENV_FILE": os.path.join(os.devnull, "none")}
