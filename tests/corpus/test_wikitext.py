"""WikiText's text as it was, and its words, against lines undone by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from corpus.wikitext import detokenised, read_wikitext, word_count

BY_HAND = [
    (" = Robert Boulter = \n", " = Robert Boulter =\n"),
    (" = = Career = = \n \n In 2006 , he", " == Career ==\n\nIn 2006, he"),
    (" = = = Reception = = = \n", " === Reception ===\n"),
    ("a guest @-@ starring role", "a guest-starring role"),
    ("1 @,@ 500 men and 3 @.@ 5 km", "1,500 men and 3.5 km"),
    ("the band 's songs", "the band's songs"),
    ("the boys ' school", "the boys' school"),
    ("( born 1980 ) was [ sic ] here", "(born 1980) was [sic] here"),
    ('titled " Herons " ; it', 'titled "Herons"; it'),
    ("he said : no ! why ? because .", "he said: no! why? because ."),  # a last point has no space behind it
    ("end . Next", "end. Next"),
    ("at 40 ° N , 3 ° W", "at 40°N, 3°W"),
    ("called ' Big Ben ' today", "called 'Big Ben' today"),
    ("N is N times", "N is 1 times"),
]


@pytest.mark.parametrize(("tokenised", "ordinary"), BY_HAND)
def test_the_text_is_as_it_was_before_it_was_tokenised(tokenised, ordinary):
    assert detokenised(tokenised) == ordinary


def test_words_are_what_single_spaces_part_with_line_ends_among_them():
    assert word_count(" \n = Title = \n \n One , two . \n") == len(
        ["=", "Title", "=", "\n", "\n", "One", ",", "two", "."]
    )
    assert word_count("a  b") == 3  # two spaces part an empty word, as str.split(" ") has it


def test_files_that_hold_no_raw_text_are_named(tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text("{}\n")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 is here")
    (tmp_path / "one.txt").write_text("word\n")
    for name, words in (
        ("nowhere", "nowhere: no such file"), ("rows.jsonl", "not the raw text whose words are counted"),
        ("latin.txt", "is not UTF-8 .at byte 3."), ("one.txt", "fewer than two words"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=rf"^evaluate.wikitext: .*{words}"):
            read_wikitext(str(tmp_path / name))
    (tmp_path / "marked.txt").write_bytes(b"\xef\xbb\xbfone two")
    assert read_wikitext(str(tmp_path / "marked.txt")) == "one two"
