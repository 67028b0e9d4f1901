"""Harness tasks that cannot be run are refused before weights are loaded, in one line that names task, row or file;
what lm-eval itself needs of rows is asked of its own sampler."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from lm_eval.tasks import TaskManager

from conf.evaluate_schema import HarnessConfig
from engine import harness_tasks
from engine.harness_tasks import load_tasks, prepared, require_documents
from tests.engine.evaluations import ANSWER, CHOICE, NEXT_WORD

ROWS = [{"q": f"is it {n}", "choices": [f"yes {n}", "no"], "gold": n % 2} for n in range(9)]
EXACT = [{"metric": "exact_match"}]


def write(folder: Path, name: str, *, rows: Any = ROWS, shots: Any = None, **task: Any) -> None:
    """A task on rows (or a text) of `test`; `shots`: of the split it is shown examples of."""
    files = {"test": folder / f"{name}.jsonl"} | ({} if shots is None else {"shots": folder / f"{name}-shots.jsonl"})
    for path, held in zip(files.values(), (rows, shots), strict=False):
        path.write_text(held if isinstance(held, str) else "".join(json.dumps(row) + "\n" for row in held))
    about = {
        "task": name, "dataset_path": "json", "test_split": "test",
        "dataset_kwargs": {"data_files": {split: str(path) for split, path in files.items()}},
    }  # fmt: skip
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(about | task))


@pytest.fixture
def refused(tmp_path, monkeypatch, capfd):
    """The line of a task of the folder that cannot be run; nothing else may be printed."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    own = lambda harness: TaskManager(include_path=harness.include_path, include_defaults=False)  # noqa: E731
    monkeypatch.setattr(harness_tasks, "_manager", own)  # lm-eval's 14,000 take 17 s to list

    def line(name: str, *, num_fewshot: int | None = None, limit: int | None = None) -> str:
        said: list[str] = []
        with pytest.raises(ValueError) as caught:
            tasks = load_tasks(HarnessConfig([name], str(tmp_path)))
            require_documents(tasks, num_fewshot=num_fewshot, limit=limit, say=said.append)
        printed = [text for text in "".join(capfd.readouterr()).splitlines() if text.strip() and "/s]" not in text]
        assert (said, printed) == ([], [])
        (only,) = str(caught.value).splitlines()
        return only.removeprefix("evaluate.harness.tasks: ")

    return line


def test_examples_that_a_split_does_not_hold_are_counted_before_anything_starts(refused, tmp_path):
    write(tmp_path, "apart", shots=ROWS, **CHOICE | {"fewshot_split": "shots"})
    write(tmp_path, "same", **CHOICE)
    write(tmp_path, "said", **CHOICE | {"num_fewshot": 12})
    write(tmp_path, "twice", rows=[*ROWS, ROWS[3]], **CHOICE)
    write(tmp_path, "first", **CHOICE | {"fewshot_config": {"sampler": "first_n"}})
    write(tmp_path, "word", **CHOICE | {"num_fewshot": "five"})
    asks = "asks for {} examples before each question (num_fewshot), and its few-shot split {} has {} rows{}; set " \
        "evaluate.harness.num_fewshot={} or less"  # fmt: skip
    of_which = ", of which the question is {}"
    assert refused("apart", num_fewshot=20) == "apart " + asks.format(20, "shots", 9, "", 9)
    assert refused("same", num_fewshot=9) == "same " + asks.format(9, "test", 9, of_which.format("one"), 8)
    assert refused("said") == "said " + asks.format(12, "test", 9, of_which.format("one"), 8)
    assert refused("twice", num_fewshot=9) == "twice " + asks.format(9, "test", 10, of_which.format(2), 8)
    assert refused("first", num_fewshot=9) == "first " + asks.format(9, "test", 9, of_which.format("one"), 8)
    assert refused("word") == "word says num_fewshot: 'five'; use a whole number"


@pytest.mark.parametrize("sampler", ["default", "first_n"])
@pytest.mark.parametrize("copies", [0, 1, 3])
def test_as_many_examples_as_lm_eval_itself_can_draw_are_let_through(sampler, copies, tmp_path, monkeypatch):
    """Against lm-eval's own contexts: it builds those of the most that are let through, and fails with one more."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    shots = [*ROWS, *([{"q": "it", "choices": ["a", "b"], "gold": 1}] * copies)]
    for name, split in (("apart", "shots"), ("same", "test")):
        said = {"fewshot_split": split, "fewshot_config": {"sampler": sampler}}
        write(tmp_path, name, rows=shots, shots=shots, **CHOICE | said)
        tasks = load_tasks(HarnessConfig([name], str(tmp_path)))
        checked, built = [], []
        for count in range(6, len(shots) + 2):
            task = prepared(tasks, num_fewshot=count)["tasks"][name]
            try:
                require_documents(tasks, num_fewshot=count, limit=None, say=print)
                checked.append(count)
            except ValueError:
                pass
            try:
                task.build_all_requests()
                built.append(count)
            except (ValueError, AssertionError):
                pass
        assert checked == built != []


def test_metrics_and_data_that_are_not_there_are_named(refused, tmp_path):
    write(tmp_path, "metric", **ANSWER | {"metric_list": [{"metric": "exact_macth"}]})
    mean = {"aggregation": "mean", "higher_is_better": True}
    write(tmp_path, "ignored", **CHOICE | {"metric_list": [{"metric": "b_metric"} | mean]})
    write(tmp_path, "sum", **CHOICE | {"metric_list": [{"metric": "acc", "aggregation": "meen"}]})
    write(tmp_path, "empty", rows="", **CHOICE)
    write(tmp_path, "blank", rows="\n \n", **CHOICE)
    write(tmp_path, "split", **CHOICE | {"test_split": "validation", "fewshot_split": None})
    (tmp_path / "group.yaml").write_text(yaml.safe_dump({"group": "group", "task": ["metric"]}))
    unknown = "metric: metric exact_macth is known neither to lm-eval nor to the package evaluate here; did you mean "
    assert refused("metric") == refused("group") == f"{unknown}exact_match?"
    assert "ignored: metric b_metric is known neither to lm-eval nor to the package evaluate here" in refused("ignored")
    assert refused("sum") == "sum: metric acc has aggregation meen, which lm-eval does not know; did you mean mean?"
    for name in ("empty", "blank"):
        assert refused(name) == f"{name}: its data file {tmp_path / name}.jsonl is empty"
    assert refused("split") == "split: test_split validation is none of its data's; they have test"


def test_rows_that_no_request_can_be_made_of_are_named(refused, tmp_path):
    odd = [*ROWS[:2], ROWS[2] | {"choices": ["yes", ""]}, *ROWS[3:]]
    write(tmp_path, "first", rows=[ROWS[0] | {"choices": ["", "no"]}], **CHOICE)
    write(tmp_path, "third", rows=odd, **CHOICE)
    write(tmp_path, "none", rows=[*ROWS, ROWS[0] | {"choices": []}], **CHOICE)
    write(tmp_path, "column", **CHOICE | {"doc_to_text": "{{question}}"})
    write(tmp_path, "number", **NEXT_WORD | {"doc_to_text": "q", "doc_to_target": "gold"})
    write(tmp_path, "silent", **NEXT_WORD | {"doc_to_text": "q", "doc_to_target": "{{''}}"})
    write(tmp_path, "shown", shots=[{"q": "it", "choices": ["a"], "gold": 1}],
          **CHOICE | {"fewshot_split": "shots"})  # fmt: skip
    assert refused("first") == "first: row 1 of test has an empty choice: 1 of 2"
    assert refused("third") == "third: row 3 of test has an empty choice: 2 of 2"
    assert refused("none") == "none: row 10 of test has no list of choices: []"
    assert refused("column") == "column: row 1 of test gives no question (UndefinedError: 'question' is undefined)"
    assert refused("number") == "number: row 1 of test gives 0, which is no text"
    assert refused("silent") == "silent: row 1 of test has an empty answer"
    assert refused("shown", num_fewshot=1).startswith("shown: row 1 of its few-shot split shots gives no example (")


def test_answers_that_are_none_of_the_choices_are_not_scored_in_silence(refused, tmp_path):
    write(tmp_path, "misspelt", **CHOICE | {"doc_to_target": "gould"})
    write(tmp_path, "hidden", rows=[row | {"gold": -1} for row in ROWS], **CHOICE)
    write(tmp_path, "index", **ANSWER | {"doc_to_choice": "choices", "doc_to_target": "{{choices[0]}}"})
    ends = ", which is none of its choices, and so it is in all 9 rows; see doc_to_target in its file"
    assert refused("misspelt") == f"misspelt: row 1 of test has the answer 'gould'{ends}"
    assert refused("hidden") == f"hidden: row 1 of test has the answer -1{ends}"
    assert "index: row 1 of test has the answer 'yes 0', which is no number of one of its 2 choices" in refused("index")


def test_some_answers_that_are_none_of_the_choices_are_counted_and_those_that_are_pass(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    some = [*ROWS[:4], ROWS[4] | {"gold": 2}, *ROWS[5:8], ROWS[8] | {"gold": -1}]
    write(tmp_path, "some", rows=some, **CHOICE)
    write(tmp_path, "text", **CHOICE | {"doc_to_target": "{{choices[gold]}}"})
    write(tmp_path, "several", rows=[row | {"gold": [0, 7]} for row in ROWS], **CHOICE)
    said: list[str] = []
    for name, limit in (("some", None), ("some", 4), ("text", None), ("several", None)):
        tasks = load_tasks(HarnessConfig([name], str(tmp_path)))
        require_documents(tasks, num_fewshot=None, limit=limit, say=said.append)
    where = "harness    some: row 5 of test has the answer 2, which is none of its choices"
    assert said == [f"{where}; lm-eval counts this as wrong, in 2 of 9 rows"]


def test_task_files_that_are_no_yaml_are_named_with_their_line(refused, tmp_path):
    write(tmp_path, "good", **CHOICE)
    broken = tmp_path / "below" / "syn.yaml"
    broken.parent.mkdir()
    broken.write_text("task: syn\ndataset_kwargs: {data_files: [\noutput_type: multiple_choice\n")
    reason = refused(str(broken))
    assert reason.startswith(f"{broken} cannot be read (line ")
    assert refused("syn") == f"no task, group or tag syn in {tmp_path} and lm-eval's own; {reason}"
    broken.write_text("include: gone\ntask: syn\n")
    assert "gone" in refused("syn") and f"; {broken} cannot be read (" in refused("syn")
