"""The few marks of an incident's record as HTML: headings, lists, tables, code, bold."""

from __future__ import annotations

import re
from html import escape
from itertools import groupby


def shown_text(text: str) -> str:
    """Escaped whatever it holds. A replay's text has no heading and is shown line by line."""
    if not text.startswith("# "):
        return f"<pre>{escape(text)}</pre>"
    return "".join(_block(kind, list(lines)) for kind, lines in groupby(text.splitlines(), key=_kind))


def _kind(line: str) -> str:
    return "heading" if line.startswith("#") else "list" if line.startswith("- ") else "|" if line[:1] == "|" else ""


def _block(kind: str, lines: list[str]) -> str:
    if kind == "heading":
        return "".join(f"<h3>{_inline(line.lstrip('# '))}</h3>" for line in lines)
    if kind == "list":
        return f"<ul>{''.join(f'<li>{_inline(line[2:])}</li>' for line in lines)}</ul>"
    if kind == "|":
        head, *rows = [_cells(line) for line in lines if not line.startswith("|---")]
        body = "".join(_row(one, "td") for one in rows)
        return f'<div class="scroll"><table><thead>{_row(head, "th")}</thead><tbody>{body}</tbody></table></div>'
    return "".join(f"<p>{_inline(line)}</p>" for line in lines if line.strip())


def _cells(line: str) -> list[str]:
    """Split at bars that are none of the text's."""
    return [one.strip().replace("\\|", "|") for one in re.split(r"(?<!\\)\|", line.strip())[1:-1]]


def _row(cells: list[str], tag: str) -> str:
    return f"<tr>{''.join(f'<{tag} class=value>{_inline(cell)}</{tag}>' for cell in cells)}</tr>"


def _inline(text: str) -> str:
    return re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", re.sub(r"`(.+?)`", r"<code>\1</code>", escape(text)))
