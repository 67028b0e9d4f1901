"""Which difference brings a parting: with a player whose curves are known, and what of a run can be played again."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

from conf.cli import compose_config
from conf.load import to_plain
from engine import replay
from engine.bisect import Bisection, bisect
from engine.checkpoint_folder import FORMAT, checkpoint_path, write_manifest
from engine.replay import Code, Player, Recipe, Unplayable, called_from, hydra_value, overrides
from telemetry.compare.divergence import divergence, tolerance_of
from telemetry.compare.runs import Run, Start, load_run
from tests.telemetry.run_folders import COMMIT, loss_at, plain_config, step_row, write_run

PARTS_AT = 23
Effect = Callable[[Recipe], float]


def effect_of(recipe: Recipe) -> float:
    """How much a recipe's losses are off: only of what the planted causes change."""
    config = recipe.config
    off = 0.01 * (config["train"]["lr"] != 3e-4) + 0.02 * (recipe.code.commit != COMMIT)
    return off + 0.03 * (config["data"]["sequence_length"] != 256) + 0.04 * (recipe.ranks != 2)


def made(folder: Path, effect: float = 0.0, *, checkpoints: tuple[int, ...] = (10, 20, 30), **named: Any) -> Run:
    rows = [step_row(step, train__loss=loss_at(step) + effect * (step >= PARTS_AT)) for step in range(1, 41)]
    write_run(folder, rows=rows, **named)
    for step in checkpoints:
        path = checkpoint_path(folder / "checkpoints", step)
        path.mkdir(parents=True)
        write_manifest(path, {"format": FORMAT})
    return load_run(folder)


class Known:
    """Plays by `effect`; keeps the recipes that it was given."""

    def __init__(self, effect: Effect = effect_of, *, corpus: str = "corpus-1", unplayable: str = "") -> None:
        self.effect, self.corpus, self.unplayable = effect, corpus, unplayable
        self.recipes: list[Recipe] = []

    def __call__(self, recipe: Recipe) -> Run:
        self.recipes.append(recipe)
        if recipe.name == self.unplayable:
            raise Unplayable("it has no such device")
        first = int(recipe.checkpoint.name.rpartition("-")[2]) if recipe.checkpoint else 0
        rows = {
            step: step_row(step, train__loss=loss_at(step) + self.effect(recipe) * (step >= PARTS_AT))
            for step in range(first + 1, recipe.last + 1)
        }
        start = Start(1, 0, {"corpus_fingerprint": self.corpus}, dict(recipe.config), {}, {})
        return Run(recipe.name, Path(recipe.name), [start], rows, {})


def bisected(first: Run, second: Run, play: Known, **named: Any) -> Bisection:
    tolerance = tolerance_of([first, second])
    return bisect(first, second, divergence(first, second, tolerance), tolerance, play, **named)


ALL = {
    "config": {"config": plain_config(train__lr=1e-3, optimizer__beta2=0.9, seed=7)},
    "code": {"identity": {"git_commit": "f" * 40}, "patch": "diff"},
    "data": {"config": plain_config(data__sequence_length=128)},
    "plan": {"config": plain_config(parallel__tp=2), "plan": {"world_size": 4}},
}
OFF = {"config": 0.01, "code": 0.02, "data": 0.03, "plan": 0.04}


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("config", "config: train.lr 0.0003 -> 0.001"),
        ("code", f"code: git_commit {COMMIT} -> {'f' * 40}"),
        ("data", "data: data.sequence_length 256 -> 128"),
        ("plan", "plan: parallel.tp 1 -> 2"),
    ],
)
def test_the_planted_cause_is_the_one_that_is_confirmed(kind: str, cause: str, tmp_path: Path) -> None:
    first, second = made(tmp_path / "a"), made(tmp_path / "b", OFF[kind], **ALL[kind])
    play = Known()
    found = bisected(first, second, play)
    assert found.parting is not None and found.parting.place == PARTS_AT
    assert found.confirmed is not None and found.confirmed.startswith(cause)
    assert [recipe.checkpoint for recipe in play.recipes[:2]] == [
        checkpoint_path(run.folder / "checkpoints", 20) for run in (first, second)
    ]
    assert all(recipe.checkpoint == play.recipes[0].checkpoint for recipe in play.recipes[2:])
    assert {recipe.last for recipe in play.recipes} == {PARTS_AT + 2}


def test_of_several_keys_each_is_swapped_alone(tmp_path: Path) -> None:
    found = bisected(made(tmp_path / "a"), made(tmp_path / "b", 0.01, **ALL["config"]), Known())
    assert {swap.what.split()[1]: swap.brings for swap in found.swaps} == {
        "train.lr": True, "optimizer.beta2": False, "seed": False
    }  # fmt: skip


def test_two_causes_are_both_told_and_none_is_confirmed(tmp_path: Path) -> None:
    changed = {"config": plain_config(train__lr=1e-3, data__sequence_length=128)}
    found = bisected(made(tmp_path / "a"), made(tmp_path / "b", 0.04, **changed), Known())
    assert [swap.brings for swap in found.swaps] == [True, True]
    assert found.confirmed is None and found.text().endswith("not confirmed")


def test_a_difference_that_does_not_come_back_is_chance_and_nothing_is_swapped(tmp_path: Path) -> None:
    play = Known(lambda recipe: 0.0)
    found = bisected(made(tmp_path / "a"), made(tmp_path / "b", 0.5, **ALL["config"]), play)
    assert len(play.recipes) == 2 and found.confirmed is None
    assert "b: its replay does not draw its recorded curve" in found.text()
    assert "does not come back" in found.text()


def test_where_no_setting_brings_it_the_checkpoints_are_exchanged(tmp_path: Path) -> None:
    def by_state(recipe: Recipe) -> float:
        assert recipe.checkpoint is not None
        return 0.5 * (recipe.checkpoint.parents[1].name == "b")

    found = bisected(made(tmp_path / "a"), made(tmp_path / "b", 0.5, **ALL["config"]), Known(by_state))
    assert [swap.brings for swap in found.swaps] == [False, True]
    assert found.swaps[1].what == "state: b's checkpoint of step 20"
    assert "the cause came before it" in found.text() and found.confirmed is None


def test_replays_begin_at_an_earlier_checkpoint_where_asked(tmp_path: Path) -> None:
    play = Known()
    assert bisected(made(tmp_path / "a"), made(tmp_path / "b", 0.01, **ALL["config"]), play, begin=19).confirmed
    assert {recipe.checkpoint.name for recipe in play.recipes if recipe.checkpoint} == {"step-00000010"}


def test_what_cannot_be_replayed_is_said(tmp_path: Path) -> None:
    first = made(tmp_path / "a")
    pruned = made(tmp_path / "pruned", 0.01, checkpoints=(30, 40), **ALL["config"])
    found = bisected(first, pruned, Known(), most_steps=20)
    assert "has no checkpoint before that any more: 23 steps to play; --bisect-steps allows 20" in found.text()
    play = Known()
    assert bisected(first, pruned, play).confirmed and play.recipes[1].checkpoint is None
    assert "a: it has no such device" in bisected(first, pruned, Known(unplayable="first")).text()
    found = bisected(first, pruned, Known(unplayable="config"))
    assert [swap.brings for swap in found.swaps] == [None] and found.confirmed is None
    assert "its corpus is not there any more" in bisected(first, pruned, Known(corpus="other")).text()
    unknown = made(tmp_path / "unknown", 0.01, identity={"git_commit": None}, **ALL["config"])
    assert "unknown: its commit is not known" in bisected(first, unknown, Known()).text()
    unkept = made(tmp_path / "unkept", 0.01, identity={"git_commit": COMMIT + "+changes"}, **ALL["config"])
    assert "unkept: it ran with uncommitted changes that were not kept" in bisected(first, unkept, Known()).text()
    other_text = made(tmp_path / "text", 0.01, identity={"corpus_fingerprint": "2", "packages": {"torch": "9"}})
    text = bisected(first, other_text, Known(lambda recipe: 0.01 * ("text" in str(recipe.checkpoint)))).text()
    assert "the text behind the same data.* was another" in text
    assert "cannot be swapped here: packages: torch 2.13.0 -> 9" in text


def test_runs_that_do_not_part_are_not_played(tmp_path: Path) -> None:
    play = Known()
    assert "nothing to bisect" in bisected(made(tmp_path / "a"), made(tmp_path / "b"), play).text()
    assert play.recipes == []


def test_a_run_that_was_started_from_anothers_checkpoint_begins_there(tmp_path: Path) -> None:
    first = made(tmp_path / "a")
    path = checkpoint_path(first.folder / "checkpoints", 20)
    second = made(tmp_path / "b", 0.01, checkpoints=(), config=plain_config(train__lr=1e-3, resume=str(path)))
    play = Known()
    assert bisected(first, second, play).confirmed and play.recipes[1].checkpoint == path
    gone = made(tmp_path / "c", 0.01, checkpoints=(), config=plain_config(resume=str(tmp_path / "x" / "step-00000002")))
    assert "where its checkpoint is gone" in bisected(first, gone, Known()).text()


@pytest.mark.parametrize(
    "words",
    [
        ["model=llama_8b", "parallel=tp2_pp2", "precision=bf16"],
        pytest.param(["model=gpt2_125m", "zero=stage3", "optimizer.weight_decay=0"], marks=pytest.mark.slow),
    ],
)
def test_the_overrides_of_a_replay_compose_to_the_recorded_config(words: list[str], tmp_path: Path) -> None:
    odd = ["data.sources=[{path: 'it\\'s, a {file}.txt', weight: 2}, {path: stdlib}]", "train.batch_ramp_up=[4,4,64]",
           "model.rope_scaling={rope_type: linear, factor: 2.0}", "parallel.stages=null"]  # fmt: skip
    config = to_plain(compose_config([*words, *odd]))
    recipe = Recipe("first", config, Code(None, None), 4, None, tmp_path, 5)
    again = to_plain(compose_config(overrides(recipe, tmp_path / "with space")))
    assert {key: again[key] for key in again if key not in replay.ASIDE} == {
        key: config[key] | ({"eval_interval": 0, "sample_tokens": 0} if key == "train" else {})
        if isinstance(config[key], dict) else config[key]
        for key in config if key not in replay.ASIDE
    }  # fmt: skip
    assert again["run"] == {"dir": str(tmp_path / "with space"), "experiment": "replay", "id": "first"}
    assert (again["resume"], again["telemetry"]["wandb"]["mode"]) == ("never", "disabled")


def test_values_read_back_as_they_were() -> None:
    assert hydra_value({"a": [None, True, 1e-5, "x'y"]}) == "{a: [null, true, 1e-05, 'x\\'y']}"


@given(text=st.text(st.characters(min_codepoint=32, max_codepoint=0x17F)).filter(lambda text: "$" not in text))
def test_any_text_reads_back_as_it_was(text: str) -> None:
    assert OverridesParser.create().parse_override(f"key={hydra_value(text)}").value() == text


def test_relative_paths_start_where_the_run_was_called(tmp_path: Path) -> None:
    run = made(tmp_path / "runs" / "exp" / "a", checkpoints=())
    assert called_from(run) == tmp_path
    elsewhere = made(tmp_path / "moved" / "exp" / "a", checkpoints=())
    assert called_from(elsewhere) == Path.cwd()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A checkout of one file in two commits."""
    root = tmp_path / "repository"
    root.mkdir()
    git(root, "init", "-q")
    for text in ("old\n", "new\n"):
        (root / "file").write_text(text)
        git(root, "add", "file")
        git(root, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x")
    return root


def git(root: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout.strip()


def test_code_is_played_at_its_commit_with_its_patch_and_no_worktree_is_left(repository: Path, tmp_path: Path) -> None:
    commit = git(repository, "rev-parse", "HEAD~1")
    patch = "--- a/file\n+++ b/file\n@@ -1 +1 @@\n-old\n+patched\n"
    with Player(tmp_path / "play", repository=repository) as play:
        root = play._root(Code(commit, patch))
        assert (root / "file").read_text() == "patched\n"
        assert play._root(Code(commit, patch)) == root
        with pytest.raises(Unplayable, match="is not in the repository"):
            play._root(Code("f" * 40, None))
        with pytest.raises(Unplayable, match="does not apply"):
            play._root(Code(commit, patch.replace("old", "other")))
    assert not root.exists()
    assert len(git(repository, "worktree", "list").splitlines()) == 1
    assert git(repository, "status", "--porcelain") == ""


def test_the_worktree_of_a_killed_replay_is_removed_by_the_next_and_a_living_ones_stays(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = git(repository, "rev-parse", "HEAD~1")
    roots = {}
    for name, process in (("killed", 2**22 + 1), ("lives", os.getppid())):
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda process=process: process)
            play = Player(tmp_path / name, repository=repository)
            play.folder.mkdir()
            roots[name] = play._root(Code(commit, None))
    with Player(tmp_path / "next", repository=repository):
        assert [roots[name].exists() for name in ("killed", "lives")] == [False, True]
        assert len(git(repository, "worktree", "list").splitlines()) == 2
