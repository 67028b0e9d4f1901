"""What must be equal or shared, at its boundary: the majority is the norm, who differs is told by what."""

from __future__ import annotations

import pytest

from launch import preflight_checks as checks
from launch.preflight_table import Cell


def red(cells: dict[str, Cell]) -> dict[str, str]:
    assert all(cell.remedy for cell in cells.values() if cell.ok is False)
    return {host: cell.text for host, cell in cells.items() if cell.ok is False}


def test_the_majority_is_the_norm_and_of_two_the_first_host():
    facts = {host: {"python": version} for host, version in (("a", "3.11"), ("b", "3.12"), ("c", "3.12"))}
    assert red(checks.python(facts)) == {"a": "3.11 here, 3.12 on b, c"}
    assert red(checks.python({host: facts[host] for host in ("a", "b")})) == {"b": "3.12 here, 3.11 on a"}
    assert red(checks.python({"a": facts["a"]})) == {}


def test_each_package_that_differs_is_told_with_both_versions():
    all_alike = {"torch": "2.13.0", "wandb": "0.31", "numpy": "2.1"}
    facts = {host: {"packages": all_alike} for host in ("w0", "w1", "w2", "w3")}
    assert {cell.text for cell in checks.packages(facts).values()} == {"ok: 3 packages"}
    facts["w2"] = {"packages": all_alike | {"torch": "2.12.1", "wandb": None}}
    assert red(checks.packages(facts)) == {
        "w2": "torch 2.12.1 here, 2.13.0 on w0, w1, w3; wandb missing here, 0.31 on w0, w1, w3"
    }


def test_a_package_that_all_lack_is_wrong_on_all():
    facts = {host: {"packages": {"wandb": None}} for host in ("w0", "w1")}
    assert red(checks.packages(facts)) == {"w0": "wandb missing", "w1": "wandb missing"}


def test_three_differences_are_named_and_the_rest_counted():
    assert checks.some(["a", "b", "c"]) == "a; b; c"
    assert checks.some(["a", "b", "c", "d", "e"]) == "a; b; c; and 2 more"


def test_code_differs_by_commit_or_by_the_files_that_a_run_reads():
    files = {"conf/load.py": "1", "engine/loop.py": "2"}
    facts = {host: {"code": files} for host in ("w0", "w1", "w2")}
    views = {host: {"commit": "e650a60aaaaaaaa"} for host in facts}
    assert red(checks.code(facts, views)) == {}
    facts["w1"] = {"code": files | {"engine/loop.py": "3", "engine/new.py": "4"}}  # one changed, one untracked
    views["w2"] = {"commit": "0123456789abcd"}
    assert red(checks.code(facts, views)) == {
        "w1": "engine/loop.py, engine/new.py are not as on w0, w2",
        "w2": "commit 0123456789 here, e650a60aaa on w0, w1",
    }


def test_files_are_compared_where_there_is_no_checkout():
    facts = {"w0": {"code": {"a.py": "1"}}, "w1": {"code": {"a.py": "2"}}}
    views = {"w0": {"commit": None}, "w1": {"commit": None}}
    assert checks.code(facts, views)["w0"].text == "ok: no git checkout"
    assert red(checks.code(facts, views)) == {"w1": "a.py is not as on w0"}


def test_variables_are_named_and_their_values_never_told():
    views = {"w0": {"environ": {"A": "s3cret", "B": "x"}}, "w1": {"environ": {"A": "other", "C": "y"}}}
    told = red(checks.environment(views))
    assert told == {
        "w1": "A has another value, unlike on w0; B is not set here, unlike on w0; C is set here, unlike on w0"
    }


def test_knobs_that_make_another_fingerprint_are_named():
    views = {
        "w0": {"fingerprint": "f" * 64, "knobs": {"train.lr": "0.1", "seed": "1"}},
        "w1": {"fingerprint": "0" * 64, "knobs": {"train.lr": "0.2", "seed": "1"}},
    }
    assert checks.config(views)["w0"].text == "ok: ffffffffffff"
    assert red(checks.config(views)) == {"w1": "train.lr=0.2 here, 0.1 on w0"}


def folders(unseen: dict[str, list[int]], *, paths: dict[str, str] | None = None, **problems: str) -> dict[str, str]:
    """What is red where these hosts do not see the tokens of these numbers, and could not leave theirs."""
    nodes, paths = list(unseen), paths or {}
    cells = checks.shared_folder(
        "run folder", "run.dir",
        {host: paths.get(host, "/r") for host in nodes},
        {host: {"problems": {"run folder": problems[host]} if host in problems else {}} for host in nodes},
        {host: {"unseen": {"run folder": of}} for host, of in unseen.items()},
        nodes=nodes,
    )  # fmt: skip
    return red(cells)


def test_a_host_on_another_disk_is_told_and_not_those_that_miss_its_token():
    late = "another disk, or a file system that shows files late"
    assert folders({"w0": [], "w1": [], "w2": []}) == {}
    assert folders({"w0": [1], "w1": [0, 2], "w2": [1]}) == {"w1": f"/r here lacks what w0, w2 wrote: {late}"}
    assert folders({"w0": [1], "w1": [0]}) == {"w1": f"/r here lacks what w0 wrote: {late}"}  # of two the second
    assert folders({"w0": [], "w1": [], "w2": [1]}) == {"w2": f"/r here lacks what w1 wrote: {late}"}
    assert folders({"w0": [1], "w1": [], "w2": [1]}) == {"w1": f"what it wrote to /r is not seen on w0, w2: {late}"}


def test_a_folder_that_one_host_cannot_write_or_has_elsewhere_is_that_hosts_fault_alone():
    told = folders({"w0": [1], "w1": [1], "w2": [1]}, w1="Permission denied")
    assert told == {"w1": "/r cannot be written here: Permission denied"}
    assert folders({"w0": [2], "w1": [2], "w2": [0, 1]}, paths={"w2": "/q"}) == {"w2": "it is /q here, /r on w0, w1"}


@pytest.mark.parametrize(
    ("offset", "error", "text"),
    [
        (1.0, 0.0, None),  # within a second
        (1.02, 0.01, None),  # by more, but the round trips (0.01 of either) may be all of it
        (1.03, 0.0, "1.0 s ahead of w0 (the round trip leaves 0.01 s)"),
        (-7.5, 0.2, "7.5 s behind w0 (the round trip leaves 0.21 s)"),
    ],
)
def test_clocks_may_differ_by_a_second_beyond_what_the_round_trip_leaves(offset, error, text):
    cells = checks.clocks({"w0": (0.0, 0.01), "w1": (offset, error)})
    assert red(cells) == ({} if text is None else {"w1": text})


def test_the_clock_that_most_keep_to_is_the_norm():
    offsets = {"w0": (5.0, 0.0), "w1": (0.1, 0.0), "w2": (0.0, 0.0)}
    assert list(red(checks.clocks(offsets))) == ["w0"]
