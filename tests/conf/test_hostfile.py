"""Hostfiles and filters: as DeepSpeed's own parser reads them where both accept, and the line where one cannot be."""

from __future__ import annotations

import subprocess
import sys

import pytest

from conf.hostfile import chosen, plan_problem, read
from conf.load import ConfigError

HOSTS = {"w0": [0, 1], "w1": [0, 1, 2, 3]}
ACCEPTED = {
    "two": "w0 slots=2\nw1 slots=4\n",
    "order kept": "b slots=1\na slots=3\n",
    "comments and blank lines": "# all\n\n  # more\nw0 slots=2  # a comment\n   \n",
    "tabs and trailing blanks": "w0\tslots=2 \t \n \tw1   slots=4\t\n",
    "CRLF": "w0 slots=2\r\nw1 slots=4\r\n",
    "no last newline": "w0 slots=2",
    "max_slots": "w0 slots=2 max_slots=4\n",
    "user": "me@w0 slots=2\n",
    "address": "10.0.0.1 slots=2\nw-1.example.org slots=08\n",
}
REFUSED = {  # text -> the line's number, and words of the message
    "w0\n": (1, "'w0': it is not `NAME slots=RANKS`"),
    "w0 slots=2\n\nw0 slots=4\n": (3, "'w0 slots=4': w0 is in line 1 already"),
    "w0 slots=0\n": (1, "it has no slot"),
    "w0 slots=99999999999\n": (1, "no host has 99999999999 devices"),
    "w0 slots=two\n": (1, "'w0 slots=two': it is not"),
    "w0 slots=-1\n": (1, "'w0 slots=-1': it is not"),
    "w0 slots=2x\n": (1, "it is not `NAME slots=RANKS`"),
    "w0 SLOTS=2\n": (1, "small letters"),
    "w0 slots = 2\n": (1, "it is not"),
    "\ufeffw0 slots=2\n": (1, "byte order mark"),
    "# first\nw0:2222 slots=2\n": (2, "'w0:2222 slots=2': a port does not belong here; use -p PORT"),
    "w[0-3] slots=2\n": (1, "w[0-3] is not a host's name"),
    "w0,w1 slots=2\n": (1, "w0,w1 is not a host's name"),
    "-w0 slots=2\n": (1, "-w0 is not a host's name"),
}


def by_deepspeed(text: str, *, include: str = "", exclude: str = "") -> dict[str, list[int]]:
    runner = pytest.importorskip("deepspeed.launcher.runner")
    pool = runner._parse_hostfile(text.replace("\r\n", "\n").split("\n"))
    return dict(runner.parse_inclusion_exclusion(pool, include, exclude))


@pytest.mark.parametrize("text", ACCEPTED.values(), ids=ACCEPTED)
def test_what_both_accept_is_read_as_deepspeed_reads_it(tmp_path, text):
    (tmp_path / "hosts").write_text(text, newline="")
    mine = read(tmp_path / "hosts")
    assert mine == by_deepspeed(text) and list(mine) == list(by_deepspeed(text))


@pytest.mark.parametrize(("text", "told"), REFUSED.items(), ids=map(repr, REFUSED))
def test_a_bad_line_is_refused_by_number_and_text(tmp_path, text, told):
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(ConfigError) as refusal:
        read(tmp_path / "hosts")
    (line,) = refusal.value.problems
    assert f"hosts line {told[0]}: " in line and told[1] in line


def test_all_bad_lines_are_told_at_once(tmp_path):
    (tmp_path / "hosts").write_text("w0\nw1 slots=1\nw2 slots=0\n")
    with pytest.raises(ConfigError) as refusal:
        read(tmp_path / "hosts")
    assert [line.split(": ")[0][-1] for line in refusal.value.problems] == ["1", "3"]


@pytest.mark.parametrize("content", [None, b"", b"# none\n\n", b"w\xe4 slots=2\n"])
def test_no_file_no_host_and_no_text_are_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "hosts").write_bytes(content)
    words = {None: "No such file", b"": "names no host", b"# none\n\n": "names no host"}
    with pytest.raises(ConfigError, match=words.get(content, "not text in UTF-8")):
        read(tmp_path / "hosts")


@pytest.mark.parametrize(
    ("include", "exclude"),
    [
        ("w0", ""), ("w1:0,2", ""), ("w1@w0:1", ""), ("w1:3@w0", ""), ("w1:2,0,2", ""), ("w1:0@w1:1", ""),
        ("", "w0"), ("", "w1:0,2"), ("", "w0:0,1"), ("", "w0@w1:3"), ("", ""),
    ],
)  # fmt: skip
def test_filters_leave_what_deepspeeds_leave(include, exclude):
    mine = chosen(HOSTS, include=include, exclude=exclude)
    theirs = by_deepspeed("w0 slots=2\nw1 slots=4", include=include, exclude=exclude)
    assert mine == theirs and list(mine) == list(theirs)


@pytest.mark.parametrize(
    ("include", "exclude", "told"),
    [
        ("", "w0@w1", "-e w0@w1 leaves no host of w0, w1"),
        ("w2", "", "-i w2: 'w2' is not in the hostfile; it has w0, w1"),
        ("w0:0-2", "", "-i w0:0-2: '0-2' are not slots; list them, as in w0:0,2"),
        ("w0:", "", "'' are not slots"),
        ("w0:2", "", "w0 has no slot 2; its slots are 0 to 1"),
        ("w0:1@w0", "", "w0 is named twice"),
        ("w0", "w1", "-i and -e exclude each other"),
    ],
)
def test_a_filter_that_cannot_be_is_refused(include, exclude, told):
    with pytest.raises(ConfigError) as refusal:
        chosen(HOSTS, include=include, exclude=exclude)
    assert told in refusal.value.problems[0]


def test_users_cannot_be_filtered_and_it_says_where_to_put_them():
    with pytest.raises(ConfigError, match=r"'me' is not in the hostfile.*write users in ~/.ssh/config"):
        chosen({"me@w0": [0]}, include="me@w0")


def test_slots_must_share_out_the_plan():
    hosts = {"w0": [0, 1], "w1": [0]}
    assert plan_problem(hosts, tp=3, pp=1) is None
    told = plan_problem(hosts, tp=2, pp=1)
    assert told is not None and told.startswith("parallel.tp=2 x parallel.pp=1 = 2 does not divide the 3 slots")
    assert "(w0 2, w1 1); give 4 slots, or 2" in told
    few = plan_problem(hosts, tp=2, pp=2)
    assert few is not None and few.endswith("4 ranks but the hosts have 3 slots (w0 2, w1 1); give 4")


def test_a_hostfile_is_read_without_torch():
    code = "import sys, conf.hostfile; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
