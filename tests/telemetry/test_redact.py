"""Secrets are taken out of what is written, by value, by form and by name; code and hashes are left as they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from telemetry.redact import HIDDEN, redacted

WANDB_KEY = "0123456789abcdef" * 2 + "01234567"  # 40 hex digits: looks like a commit


@pytest.fixture(autouse=True)
def no_netrc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("NETRC", raising=False)


@pytest.mark.parametrize(
    "name", [
        "WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "db_password", "OPENAI_APIKEY", "GH_CREDENTIAL",
        "PGPASSWORD", "MYSQL_PWD", "GITHUB_PAT", "OPENAI_KEY_1", "API_TOKENS", "DOCKER_AUTH", "SECRET_KEY_BASE",
        "AZURE_STORAGE_CONNECTION_STRING",
    ],
)  # fmt: skip
def test_values_of_the_environment_are_hidden_wherever_they_stand(name: str) -> None:
    nested = {"command": f"train --key {WANDB_KEY}", "tags": [f"a-{WANDB_KEY}-b", ("x", WANDB_KEY)], "step": 3}
    assert redacted(nested, environ={name: WANDB_KEY}) == {
        "command": f"train --key {HIDDEN}",
        "tags": [f"a-{HIDDEN}-b", ["x", HIDDEN]],
        "step": 3,
    }


def test_what_is_no_secret_of_the_environment_is_left(tmp_path: Path) -> None:
    environ = {
        "TOKENIZERS_PARALLELISM": "disabled-in-workers",  # its name only begins like one
        "KEYBOARD": "qwertyuiop",
        "SSH_KEY": str(tmp_path / "id_ed25519"),  # a path to a secret is none
        "API_KEY": "short",  # a common word would vanish from every file
    }
    (tmp_path / "id_ed25519").write_text("")
    text = " ".join(environ.values())
    assert redacted(text, environ=environ) == text


def test_a_secret_that_begins_like_a_path_is_hidden() -> None:
    assert redacted("/K7MDENG+bPxRfiCY", environ={"AWS_SECRET_ACCESS_KEY": "/K7MDENG+bPxRfiCY"}) == HIDDEN


def test_the_longer_of_two_secrets_leaves_no_rest() -> None:
    environ = {"A_KEY": "abcdefgh", "B_KEY": "abcdefgh-and-more"}
    assert redacted("abcdefgh-and-more", environ=environ) == HIDDEN


def test_passwords_of_netrc_are_hidden(tmp_path: Path) -> None:
    entry = f"machine api.wandb.ai\n  login user\n  password {WANDB_KEY}\n"
    (tmp_path / ".netrc").write_text(entry)
    assert redacted(f"key {WANDB_KEY}", environ={}) == f"key {HIDDEN}"
    (tmp_path / "other").write_text(entry.replace(WANDB_KEY, "another-secret"))
    assert redacted("another-secret", environ={"NETRC": str(tmp_path / "other")}) == HIDDEN
    (tmp_path / ".netrc").write_text("machine\n")  # torn: nobody reads a key from it
    assert redacted("text", environ={}) == "text"


@pytest.mark.parametrize(
    "secret",
    [
        "hf_" + "AbCdEfGhIjKlMnOpQrStUvWx",
        "ghp_" + "a1B2" * 9,
        "github_pat_" + "11AAAAAAA0" * 3,
        "wandb_v1_" + "Zz09" * 8,
        "sk-" + "proj-Ab12" * 4,
        "AKIA" + "IOSFODNN7EXAMPLE",
        "xoxb-" + "123456789012-abcdef",
    ],
)
def test_forms_of_known_services_are_hidden_without_knowing_the_value(secret: str) -> None:
    for text in (secret, f"telemetry.wandb.tags=[{secret}]", f'"{secret}"', f"a {secret}, b"):
        found = redacted(text, environ={})
        assert secret not in found and HIDDEN in found
        assert len(found) == len(text) - len(secret) + len(HIDDEN), "nothing around it is lost"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://me:hunter2hunter2@host/data.jsonl", f"https://{HIDDEN}@host/data.jsonl"),
        ("api_key=1234567890abcdef1234", f"api_key={HIDDEN}"),
        ("WANDB_API_KEY=" + WANDB_KEY, f"WANDB_API_KEY={HIDDEN}"),
        ("'api-key': '" + WANDB_KEY + "'", f"'api-key': '{HIDDEN}'"),
        ('"aws_secret_access_key": "wJalrXUtnFEMI/K7MDENG"', f'"aws_secret_access_key": "{HIDDEN}"'),
        ("password: 'correct horse'", f"password: '{HIDDEN}'"),
        ("+    auth_token = 'ab12cd34'", f"+    auth_token = '{HIDDEN}'"),
        ("export HF_ACCESS_TOKEN=abcdefgh12345678ijkl", f"export HF_ACCESS_TOKEN={HIDDEN}"),
    ],
)
def test_what_is_given_to_a_name_of_a_secret_is_hidden(text: str, shown: str) -> None:
    assert redacted(text, environ={}) == shown


@pytest.mark.parametrize(
    "text",
    [
        "    api_key: str | None = None",
        "def login(password: str, secret_key: bytes) -> None:",
        "password = getpass.getpass()",
        "api_key = os.environ['WANDB_API_KEY']",
        "tokens=256",
        "train/tokens_per_s: 1234567890.123456",
        "tokenizer_fingerprint: 0123456789abcdef0123456789abcdef",
        "git_commit: 8d41e42c0ffee0123456789abcdef0123456789a+changes",
        "config_fingerprint=" + "ab" * 32,
        "/home/me/runs/default/20261130-023405-ab12/checkpoints/step-00000006",
        "data.sources=[{path: hf:HuggingFaceFW/fineweb}]",
        "https://host:8080/path@2",
        "key=value, monkey=1234567890abcdef1234, keyboard",
        "skipped_steps=0 sk-learn hf_hub",
        "num_key_value_heads: 8",
        "secrets.token_hex(2)",
    ],
)
def test_code_hashes_paths_and_counts_are_left_as_they_are(text: str) -> None:
    assert redacted(text, environ={}) == text


def test_a_patch_that_was_redacted_still_has_its_lines(tmp_path: Path) -> None:
    patch = f"@@ -1,2 +1,2 @@\n-api_key = None\n+api_key = '{WANDB_KEY}'\n context\n"
    assert redacted(patch, environ={}) == f"@@ -1,2 +1,2 @@\n-api_key = None\n+api_key = '{HIDDEN}'\n context\n"


def test_other_values_pass_unchanged() -> None:
    for value in (None, 3, 2.5, True, float("inf")):
        assert redacted(value, environ={"A_KEY": "12345678"}) == value


@pytest.mark.parametrize(
    "text",
    [
        "https://user:p@ss@host/x", "glpat-abcdefghij0123456789", "nvapi-abcdefghij0123456789", "AIza" + "b" * 35,
        "Authorization: Bearer abcdefghijklmnop0123", "eyJhbGciOiJI.eyJzdWIiOiIx.c2lnbmF0dXJl",
        "https://hooks.slack.com/services/T0/B0/xyz", "https://x.org/a?token=abcdefgh01234567",
        "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\n-----END RSA PRIVATE KEY-----", 'token: "PATCHtokenzzz999"',
    ],
)  # fmt: skip
def test_forms_of_other_services_are_hidden(text: str) -> None:
    found = redacted(text, environ={})
    assert HIDDEN in found
    for part in ("p@ss", "abcdefghij", "bbbb", "ghijklmnop", "c2lnbm", "xyz", "efgh01234567", "MIIE", "PATCH"):
        assert part not in found
