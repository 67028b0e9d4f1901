"""The table, the remedies and the JSON: equal cells are joined, and colours are a terminal's."""

from __future__ import annotations

from launch.preflight_table import Row, as_json, good, named, text, wrong

HOSTS = [f"w{number}" for number in range(64)]


def test_hosts_in_a_row_are_joined_in_the_order_of_the_hostfile():
    assert named(HOSTS, HOSTS) == "w0..w63"
    assert named(["w5", "w1", "w0"], HOSTS) == "w0, w1, w5"
    assert named([host for host in HOSTS if host != "w9"], HOSTS) == "w0..w8, w10..w63"
    assert named(["b", "a"], ["b", "a"]) == "b, a" and named([], HOSTS) == ""


def rows() -> list[Row]:
    fine = dict.fromkeys(HOSTS, good())
    lost = {host: good() for host in HOSTS if host != "w7"}
    return [
        Row.over("reachable", HOSTS, fine | {"w7": wrong("no route", "look at its cable")}),
        Row.over("python", HOSTS, lost),
    ]


def test_any_number_of_hosts_is_a_line_a_finding_and_a_remedy_a_red_cell():
    assert text(rows(), colours=False).splitlines() == [
        "check      hosts            finding",
        "---------  ---------------  -----------",
        "reachable  w0..w6, w8..w63  ok",
        "           w7               no route",
        "python     w0..w6, w8..w63  ok",
        "           w7               not checked",
        "",
        "what to do",
        "w7: reachable: no route",
        "    look at its cable",
        "",
        "preflight: 1 of 2 checks found something wrong, on w7",
    ]


def test_colours_change_no_word():
    painted = text(rows(), colours=True)
    assert "\033[32mok\033[0m" in painted and "\033[31mno route\033[0m" in painted
    for code in ("\033[31m", "\033[32m", "\033[0m"):
        painted = painted.replace(code, "")
    assert painted == text(rows(), colours=False)


def test_all_well_says_so():
    found = [Row.over("reachable", ["w0"], {"w0": good()})]
    assert text(found, colours=False).endswith("preflight: 1 checks on 1 host, nothing is wrong")
    assert as_json(found) == {"ok": True, "hosts": ["w0"], "checks": {"reachable": {"w0": {"ok": True, "text": "ok"}}}}


def test_json_has_every_cell_with_its_remedy():
    found = as_json(rows())
    assert found["ok"] is False and len(found["checks"]["python"]) == 64
    assert found["checks"]["reachable"]["w7"] == {"ok": False, "text": "no route", "remedy": "look at its cable"}
    assert found["checks"]["python"]["w7"] == {"ok": None, "text": "not checked"}
