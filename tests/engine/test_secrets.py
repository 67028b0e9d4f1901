"""No byte of a key, token or password reaches a file of a run: not the run's own, not wandb's, not the ranks' logs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.launched import BIN, ROOT, TINY, finish

RECIPE = str(ROOT / "recipes" / "pretrain.py")
WANDB_KEY = "0a1b2c3d4e" * 4
TOKEN = "hf_" + "SecretSecretSecretSecret"
PASSWORD = "correct-horse-battery"
NETRC = "from-the-netrc-file-0123456789"
SECRETS = [text.encode() for text in (WANDB_KEY, TOKEN, PASSWORD, NETRC, "hf_Typed" + "0" * 20, "typedpassword9")]
TYPED = [
    "telemetry.wandb.tags=[hf_Typed" + "0" * 20 + "]",
    f"telemetry.wandb.name={TOKEN}",
    f"telemetry.wandb.group={WANDB_KEY}",
    f"parallel.name={PASSWORD}",
]


def leaks_in(folder: Path) -> list[str]:
    """file: secret, of every file below, names of files included; what a test wrote itself is left out."""
    found = []
    for path in folder.rglob("*"):
        if path.name in ("output.txt", "netrc") or "corpus" in path.parts:
            continue
        held = path.read_bytes() if path.is_file() else b""
        name = str(path.relative_to(folder)).encode()
        found += [f"{path}: {secret.decode()}" for secret in SECRETS if secret in held or secret in name]
    return found


def environ(folder: Path) -> dict[str, str]:
    (folder / "netrc").write_text(f"machine api.wandb.ai\n  login user\n  password {NETRC}\n")
    return {"WANDB_API_KEY": WANDB_KEY, "HF_TOKEN": TOKEN, "DB_PASSWORD": PASSWORD, "NETRC": str(folder / "netrc")}


def test_a_run_keeps_the_secrets_of_its_environment_and_command_to_itself(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(f'{{"text": "{n} plus {n} is {2 * n}. "}}\n' * 5 for n in range(400)))
    command = [str(BIN / "python"), RECIPE, *TINY, "parallel=tp1", *TYPED, "train.train_iters=2"]
    command += [f"data.sources=[{{path: {data}}}]", "telemetry.tensorboard=true"]
    code, output = finish(command, tmp_path, **environ(tmp_path))
    assert code == 0, output
    run = tmp_path / "runs" / "default" / "r"
    kept = {path.name for path in run.rglob("*") if path.is_file()}
    assert {"run.json", "timeline.jsonl", "1.json", "run-r.wandb", "debug.log", "debug-internal.log"} <= kept
    assert b"***" in (run / "run.json").read_bytes(), "the command line is kept, with its secrets hidden"
    assert leaks_in(tmp_path) == []


@pytest.mark.slow
def test_a_failed_run_and_wandbs_own_troubles_keep_them_too(tmp_path: Path) -> None:
    """The key of an online run that cannot reach the service; a URL's password in what a traceback says."""
    where = "https://user:typedpassword9@127.0.0.1:9/corpus.jsonl"
    command = [str(BIN / "python"), RECIPE, *TINY, "parallel=tp1", *TYPED, "train.train_iters=2"]
    command += ["telemetry.wandb.mode=online", "telemetry.wandb.init_timeout_s=5", "run.experiment=failing"]
    command += ["train.max_bad_steps=1", "train.lr=1e30", "optimizer.clip_grad=0", f"train.sample_prompt={where!r}"]
    code, output = finish(command, tmp_path, **environ(tmp_path), WANDB_BASE_URL="http://127.0.0.1:9")
    assert code == 1, output
    assert (tmp_path / "runs" / "failing" / "r" / "failed.json").exists() and "warning: wandb" in output
    assert leaks_in(tmp_path) == []
