"""A line that a killed start left torn takes no event with it; what a full disk refuses comes later."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from telemetry.timeline import Timeline


def events(path: Path) -> list[str]:
    return [json.loads(line)["event"] for line in path.read_text().splitlines() if line.endswith("}")]


def test_an_event_after_a_torn_line_stands_on_its_own(tmp_path: Path) -> None:
    path = tmp_path / "timeline.jsonl"
    Timeline(path).add("start", step=0)
    with path.open("a") as file:
        file.write('{"time": "x", "event": "checkp')
    timeline = Timeline(path)
    timeline.add("start", step=4)
    timeline.add("resume", step=4)
    assert events(path) == ["start", "start", "resume"]


def test_what_a_full_disk_refuses_is_kept_and_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    timeline = Timeline(tmp_path / "timeline.jsonl")
    timeline.add("start", step=0)

    def refuse(*args: Any, **named: Any) -> Any:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refuse)
        timeline.add("checkpoint", step=1)
        timeline.add("evaluation", step=2)
    timeline.add("end", step=3)
    assert events(tmp_path / "timeline.jsonl") == ["start", "checkpoint", "evaluation", "end"]
    assert capsys.readouterr().err.count("warning") == 1


def test_the_console_shows_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", "abcdefgh12345")
    Timeline(tmp_path / "timeline.jsonl").add("alert raised", step=1, message="try abcdefgh12345")
    assert "abcdefgh" not in capsys.readouterr().out + (tmp_path / "timeline.jsonl").read_text()
