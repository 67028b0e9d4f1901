"""The command line's overrides, checked one by one before Hydra composes them, so that all faults show at once.

Hydra's grammar and types stay the judge; what is added is that no key may appear that the schema does not have (Hydra's
`+key` would), and that a typo names what was probably meant.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Sweep
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError

from conf.knobs import did_you_mean, is_known, knobs, names
from conf.schema import Config

PROMPT = "prompt="  # recipes/generate.py: a text as it is typed, which Hydra's grammar would read
# In the words of its lexer and parser: a sign that only quoted text may hold.
UNQUOTED = ("token recognition error", "mismatched input '='")
# Of a list or dict: quoted text (1); else an entry, with its key (2), its text (3) and the blanks behind (4).
ENTRY = re.compile(r"""("[^"]*"|'[^']*')|(\s*(?:\w+:\s)?\s*)([^\[\]{},'"]*?)(\s*)(?=[\[\]{},'"]|$)""")
SINGLE, DOUBLE = "'", '"'
PLAIN = re.compile(r"[\w ./:@%+*$?|\\-]*", re.ASCII)


def problems(overrides: Sequence[str], *, options: Mapping[str, Sequence[str]]) -> list[str]:
    """One line for each override that cannot be; `options`: the YAML groups and what each offers."""
    parser = OverridesParser.create()
    defaults = OmegaConf.structured(Config)
    lines = []
    for text in overrides:
        if (shown := text.encode(errors="replace").decode()) != text:
            lines.append(f"cannot read {shown!r}: ? stands where bytes are no UTF-8; write it in UTF-8")
            continue
        try:
            override = parser.parse_override(text)
        except HydraException as error:
            reason = [line for line in str(error).splitlines() if line and not line.startswith("See ")][-1].strip()
            lines.append(_unreadable(text, reason, parser, options, defaults))
            continue
        line = _problem(override, text, options, defaults)
        if line is not None:
            lines.append(line)
    return lines


def _unreadable(
    text: str, reason: str, parser: OverridesParser, options: Mapping[str, Sequence[str]], defaults: DictConfig
) -> str:
    """What to write in place of an override that Hydra's grammar does not take."""
    if "=" not in text:
        reason = "it has no value"
    advice = "write key=value (quote brackets and spaces for the shell)"
    if any(sign in reason for sign in UNQUOTED):
        quoted = in_quotes(text)
        try:
            problem = _problem(parser.parse_override(quoted), quoted, options, defaults)
        except HydraException:
            problem = None
        else:
            if problem is not None:  # quotes would not help
                return problem
            advice = "put such text in quotes"
            advice += f": {shlex.quote(quoted)}" if quoted.isprintable() else ', key="value"'
    return f"cannot read {text!r}: {reason}; {advice}"


def in_quotes(text: str) -> str:
    """The override with quotes around its value, or around each plain text in its lists and dicts."""
    key, _, value = text.partition("=")
    if value.lstrip().startswith(("[", "{")):
        return f"{key}={ENTRY.sub(_entry_in_quotes, value)}"
    return f"{key}={_between(DOUBLE, value)}"


def _entry_in_quotes(match: re.Match[str]) -> str:
    return match[0] if match[1] or PLAIN.fullmatch(match[3]) else f"{match[2]}{_between(DOUBLE, match[3])}{match[4]}"


def _between(mark: str, text: str) -> str:
    """Quotes around a text as Hydra's grammar wants them, in which a backslash is one but before a quote."""
    inner = re.sub(rf"(\\*)({mark}|\Z)", lambda found: 2 * found[1] + (f"\\{mark}" if found[2] else ""), text)
    return f"{mark}{inner}{mark}"


def opened(overrides: Sequence[str]) -> list[str]:
    """The same, with ++ before keys of free dicts (model.rope_scaling), which Hydra else closes to new keys. One that
    is a group too (alerts) keeps its = for the choice of an option.
    """
    free = [knob.key for knob in knobs() if knob.open_below]
    starts = tuple(start for key in free for start in ((f"{key}=", f"{key}.") if "." in key else (f"{key}.",)))
    return [f"++{text}" if text.startswith(starts) else text for text in overrides]


def _problem(override: Override, text: str, options: Mapping[str, Sequence[str]], defaults: DictConfig) -> str | None:
    key = override.key_or_group
    if key.split(".")[0].split("/")[0] == "hydra":
        return None
    if key in options and (not is_known(key) or _names_option(override)):
        return _option_problem(override, options[key])
    if not is_known(key):
        return f"{key} is not a knob{did_you_mean(key, [*options, *names()])}"
    free = any(key.startswith(f"{knob.key}.") for knob in knobs() if knob.open_below)
    if override.is_delete() and not free:
        return f"{text}: a knob cannot be taken away; leave it out for its default, or set it to null where it may be"
    if override.is_add() and not override.is_force_add() and not free:
        return f"{text}: {key} is there already; write {text.removeprefix('+')} without the +"
    if override.is_delete() or override.is_sweep_override():
        return None
    return _value_problem(key, override.value(), text, defaults)


def _names_option(override: Override) -> bool:
    """model=llama_8b names an option; model={hidden_size: 8} sets values."""
    return not isinstance(override.value(), dict)


def _option_problem(override: Override, offered: Sequence[str]) -> str | None:
    group, value = override.key_or_group, override.value()
    if override.is_add() and override.package is None:
        return f"+{group}: {group} is chosen already; write {group}={override.get_value_string()} without the +"
    if override.is_delete():
        return f"~{group}: a group cannot be taken away; choose one of {', '.join(offered)}"
    if value is None:
        return f"{group}=null is not an option; {group}: {', '.join(offered)}"
    chosen = value.list if isinstance(value, Sweep) and hasattr(value, "list") else [value]
    chosen = [name for one in chosen for name in (one if isinstance(one, list) else [one])]
    for name in chosen:
        if isinstance(name, str) and name not in offered:
            return f"{group}={name} is not an option{did_you_mean(name, offered)}; {group}: {', '.join(offered)}"
    return None


def _value_problem(key: str, value: Any, text: str, config: DictConfig) -> str | None:
    """What OmegaConf says to this value, which stays in config."""
    if any(part.isdigit() for part in key.split(".")):
        return None  # an item of a list that a YAML file may lengthen: left to the composition
    try:
        OmegaConf.update(config, key, value, merge=True)
    except OmegaConfBaseException as error:
        return f"{text}: {explain(error)}"
    return None


def with_prompts(arguments: Sequence[str]) -> list[str]:
    """The arguments with every prompt=TEXT, whatever it holds, together as generate.prompts=[...]."""
    prompts = [quoted(word.removeprefix(PROMPT)) for word in arguments if word.startswith(PROMPT)]
    rest = [word for word in arguments if not word.startswith(PROMPT)]
    return [*rest, f"generate.prompts=[{','.join(prompts)}]"] if prompts else rest


def quoted(text: str) -> str:
    """A text as a quoted value of Hydra's grammar that reads back as it is, with its quotes, backslashes and ${."""
    return _between(SINGLE, re.sub(r"(\\*)\$\{", r"\1\1\\${", text))  # OmegaConf's own escape of an interpolation


def explain(error: BaseException) -> str:
    """A Hydra or OmegaConf error in one line, with the nearest key where it is about an unknown one."""
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{mark.name} line {mark.line + 1} is not YAML: {error.problem}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    cause = error.__cause__
    full_key = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("full_key:")), None)
    head = lines[0] if lines else type(error).__name__
    if head.startswith("Ambiguous value"):
        head += ": write key=[a,b] for a list, or -m for one run of each"
    if cause is not None and full_key is None:
        return f"{head}: {explain(cause)}"
    if full_key is not None and full_key.startswith("hydra."):
        return f"{head} ({full_key})" if full_key not in head else head.removesuffix(".")
    if full_key is not None and not is_known(full_key):
        return f"{full_key} is not a knob{did_you_mean(full_key, names())}"
    return f"{head} ({full_key})" if full_key is not None and full_key not in head else head
