"""Which folders are checkpoints, which one is newest, which are kept: cases D2 and D3, and what a torn one is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.checkpoint_folder import (
    FORMAT,
    MANIFEST,
    DamagedError,
    checkpoint_path,
    list_checkpoints,
    prune,
    read_manifest,
    set_aside,
    write_manifest,
)


def make(folder: Path, *steps: int) -> None:
    for step in steps:
        checkpoint_path(folder, step).mkdir(parents=True)
        write_manifest(checkpoint_path(folder, step), {"format": FORMAT, "step": step})


def steps(folder: Path) -> list[int]:
    return [step for step, _ in list_checkpoints(folder)]


def test_the_newest_is_found_by_number_and_other_names_are_left_alone(tmp_path: Path) -> None:
    make(tmp_path, 9, 10, 100)
    for name in ("notes", "step-abc", ".step-00000200.partial", "step-00000300"):
        (tmp_path / name).mkdir()  # the last one has no manifest
    (tmp_path / "latest").write_text("global_step999")
    assert steps(tmp_path) == [9, 10, 100]
    prune(tmp_path, keep_last=2, keep_every=0)
    assert steps(tmp_path) == [10, 100]
    assert {path.name for path in tmp_path.iterdir()} >= {"notes", "step-abc", "step-00000300", "latest"}


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "protected", "kept"),
    [(-1, 0, [], [9, 10, 20, 100]), (2, 0, [], [20, 100]), (1, 10, [], [10, 20, 100]), (1, 0, [9], [9, 100])],
)
def test_what_is_kept(tmp_path: Path, keep_last: int, keep_every: int, protected: list[int], kept: list[int]) -> None:
    make(tmp_path, 9, 10, 20, 100)
    prune(tmp_path, keep_last=keep_last, keep_every=keep_every, protected=protected)
    assert steps(tmp_path) == kept
    assert len(list(tmp_path.iterdir())) == len(kept)


def test_what_a_run_went_back_behind_is_set_aside_and_kept(tmp_path: Path) -> None:
    make(tmp_path, 5, 6, 7)
    assert len(set_aside(tmp_path, after=5)) == 2
    assert steps(tmp_path) == [5]
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("damage", ["cut", "digit", "gone", "format"])
def test_a_changed_manifest_is_damaged(tmp_path: Path, damage: str) -> None:
    make(tmp_path, 7)
    path = checkpoint_path(tmp_path, 7)
    text = (path / MANIFEST).read_text()
    if damage == "cut":
        (path / MANIFEST).write_text(text[: len(text) // 2])
    elif damage == "digit":
        (path / MANIFEST).write_text(text.replace("7", "8", 1))
    elif damage == "format":
        write_manifest(path, json.loads(text) | {"format": FORMAT + 1})
    else:
        (path / MANIFEST).unlink()
    with pytest.raises(DamagedError, match=MANIFEST):
        read_manifest(path)
