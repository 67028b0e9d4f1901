"""Keys, tokens and passwords taken out of everything that a run writes or logs.

Known ones by value (this process's environment, ~/.netrc), others by how they look: the forms that well-known services
give, URLs with a user's password, and what is assigned to a name such as api_key. A 40-digit wandb key looks like a
commit, so it is known by value or by its name only.
"""

from __future__ import annotations

import contextlib
import netrc
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HIDDEN = "***"
SHORTEST = 8  # characters of a value of the environment that counts; shorter ones would hide common words
NAMES = re.compile(
    r"((^|_)(KEYS?|APIKEY|TOKENS?|SECRETS?|PWD|PAT|AUTH|CREDENTIALS?|CONNECTION_STRING|WEBHOOK_URL)|PASSWORD|PASSWD)"
    r"(_(\d+|BASE|ID))?$",
    re.IGNORECASE,
)
NAMED = (
    r"(?:\w*[_-])?(?:api[_-]?key|secret(?:[_-]?key)?|access[_-]?key|private[_-]?key|passw(?:or)?d|token|sig(?:nature)?)"
)
FORMS = (
    (re.compile(r"\b(?:hf_\w{20,}|gh[pousr]_\w{20,}|github_pat_\w{20,}|wandb_v\d_\w{20,})"), HIDDEN),
    (
        re.compile(r"\b(?:sk-[\w-]{20,}|[rs]k_live_\w{16,}|AKIA[0-9A-Z]{16}|xox[abprs]-[\w-]{10,}|AIza[\w-]{30,})"),
        HIDDEN,
    ),
    (re.compile(r"\b(?:glpat-[\w-]{16,}|nvapi-[\w-]{20,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,})"), HIDDEN),
    (re.compile(r"(?s)-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|$)"), HIDDEN),
    (re.compile(r"\bhttps://hooks\.slack\.com/\S+"), HIDDEN),
    (re.compile(r"(?i)\b(Bearer\s+)[\w.~+/-]{16,}"), rf"\1{HIDDEN}"),
    (re.compile(r"(?<=://)[^/\s:@]+:[^/\s]+(?=@)"), HIDDEN),
    (re.compile(rf"(?i)\b({NAMED}[\"']?\s*[=:]\s*[\"'])([^\"']{{6,}})"), rf"\1{HIDDEN}"),
    (re.compile(rf"(?i)\b({NAMED}[\"']?\s*[=:]\s*)((?=[\w+/.-]*\d)[\w+/.-]{{16,}})"), rf"\1{HIDDEN}"),
)


def redacted(value: Any, *, environ: Mapping[str, str] = os.environ) -> Any:
    """The same text, or nested dicts, lists and tuples of texts and other values, without secrets."""
    return _walked(value, _known(environ))


def _walked(value: Any, known: list[str]) -> Any:
    if isinstance(value, str):
        for secret in known:
            value = value.replace(secret, HIDDEN)
        for form, replacement in FORMS:
            value = form.sub(replacement, value)
        return value
    if isinstance(value, Mapping):
        return {key: _walked(child, known) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return [_walked(child, known) for child in value]
    return value


def _known(environ: Mapping[str, str]) -> list[str]:
    """Longest first, so that no rest of one stays."""
    found = {value for name, value in environ.items() if NAMES.search(name) and not os.path.exists(value)}
    file = Path(environ.get("NETRC") or Path.home() / ".netrc")
    if file.is_file():
        with contextlib.suppress(netrc.NetrcParseError, OSError):  # nobody reads a key from it either
            found |= {entry[2] for entry in netrc.netrc(file).hosts.values() if entry[2]}
    return sorted((value for value in found if len(value) >= SHORTEST), key=len, reverse=True)
