"""WikiText's tokenised text: how many words it has, and the text that was there before it was tokenised.

WikiText (arXiv:1609.07843) keeps words and marks apart by spaces and writes a hyphen, comma or point inside a word as
@-@, @,@ and @.@. A model of ordinary text is to see ordinary text; its perplexity is still counted over the words of
the tokenised file (arXiv:1909.08053 appendix E). The rules, and their order, are those of Megatron-LM's evaluation
(wikitext_detokenizer of tasks/zeroshot_gpt), less one of its lines that matches nothing:

    1  s '  ->  s'                                      a plural's apostrophe
    2   @-@   @,@   @.@   ->  -  ,  .                   inside words and numbers
    3  no space before  : ; . ! ? ,                     where one follows
    4  no space inside ( ) [ ] { } " " ' '              from each opening mark to the next closing one
    5  = = = =, = = =, = =  ->  ====, ===, ==           headings
    6  no space around the degree sign and line ends    line ends: on either side
    7  ' N ' -> ' 1 ';  no space before 's
"""

from __future__ import annotations

import re
from pathlib import Path

PLAIN_FIRST = (("s '", "s'"), (" @-@ ", "-"), (" @,@ ", ","), (" @.@ ", "."))
MARKS = tuple((f" {mark} ", f"{mark} ") for mark in ":;.!?,")
INSIDE = tuple(
    (re.compile(rf"{opening}\s*([^{closing}]*?)\s*{closing}"), rf"{left}\1{right}")
    for opening, closing, left, right in (
        (r"\(", r"\)", "(", ")"), (r"\[", r"\]", "[", "]"), (r"\{", r"\}", "{", "}"),
        ('"', '"', '"', '"'), ("'", "'", "'", "'"),
    )
)  # fmt: skip
PLAIN_LAST = (
    ("= = = =", "===="), ("= = =", "==="), ("= =", "=="), (" \N{DEGREE SIGN} ", "\N{DEGREE SIGN}"),
    (" \n", "\n"), ("\n ", "\n"), (" N ", " 1 "), (" 's", "'s"),
)  # fmt: skip
ROWS = (".jsonl", ".json", ".csv", ".parquet", ".gz", ".zip")  # no raw text


def detokenised(text: str) -> str:
    """The ordinary text of WikiText's tokenised one."""
    for old, new in (*PLAIN_FIRST, *MARKS):
        text = text.replace(old, new)
    for pattern, new in INSIDE:
        text = pattern.sub(new, text)
    for old, new in PLAIN_LAST:
        text = text.replace(old, new)
    return text


def word_count(text: str) -> int:
    """Words of the tokenised text: what single spaces keep apart, a line end counting as one, as Megatron counts."""
    return len(text.strip().split(" "))


def read_wikitext(path: str) -> str:
    """The tokenised text of a file. ValueError where it is not there, no text, or rows of another format."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(f"evaluate.wikitext: {path}: no such file (from {Path.cwd()})")
    if file.suffix in ROWS:
        raise ValueError(
            f"evaluate.wikitext: {path}: {file.suffix} is not the raw text whose words are counted; name the file as "
            "WikiText has it, such as wiki.test.tokens"
        )
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"evaluate.wikitext: {path}: is not UTF-8 (at byte {error.start})") from None
    except OSError as error:
        raise ValueError(f"evaluate.wikitext: {path}: cannot be read ({error.strerror})") from None
    if word_count(text) < 2:
        raise ValueError(f"evaluate.wikitext: {path}: has fewer than two words")
    return text
