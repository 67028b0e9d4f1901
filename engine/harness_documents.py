"""The rows of harness tasks, looked at before weights are loaded: questions and answers that a request can be made of,
and enough rows to show as examples.

lm-eval notices when it builds its requests, after the model is loaded; an answer that is none of the choices it scores
as wrong without a word. Not here: tasks and their files (`engine.harness_tasks`, `engine.harness_faults`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

Say = Callable[[str], None]


def require_rows(task: Any, *, shots: Any, limit: int | None, say: Say) -> None:
    """Of lm_eval's ConfigurableTask, `shots` examples before each of the first `limit` questions. ValueError, a line,
    where it cannot be run; `say` gets one where answers of some rows are none of their choices.
    """
    if not isinstance(shots, int):
        raise ValueError(f"{task.task_name} says num_fewshot: {shots!r}; use a whole number")
    documents = list(islice(task.task_docs, limit))
    if shots > 0:
        _require_examples(task, shots, documents)
    unanswered = []
    for number, document in enumerate(documents, start=1):
        where = _where(task, number)
        fault, gold = _question(task, document)
        if fault is not None:
            raise ValueError(f"{where} {fault}")
        if gold is not None:
            unanswered.append(f"{where} has the answer {gold}")
    if not unanswered:
        return
    line = f"{unanswered[0]}, which is none of its choices"
    if len(unanswered) == len(documents):
        raise ValueError(f"{line}, and so it is in all {len(documents)} rows; see doc_to_target in its file")
    say(f"harness    {line}; lm-eval counts this as wrong, in {len(unanswered)} of {len(documents)} rows")


def first_row_fault(task: Any) -> str | None:
    """Of a task whose constructor raised, which looks at its first row last; None where that is not the reason."""
    if "multiple_input" not in vars(task):
        return None
    fault, _ = _question(task, task.task_docs[0])
    return None if fault is None else f"{_where(task, 1)} {fault}"


def _where(task: Any, number: int) -> str:
    return f"{task.task_name}: row {number} of {task.config.test_split or task.config.validation_split}"


def _require_examples(task: Any, shots: int, documents: Sequence[Any]) -> None:
    """lm_eval's own samplers; how one of the user's draws is not known."""
    from lm_eval.api.samplers import ContextSampler, FirstNSampler

    kind, rows = type(task.sampler), list(task.sampler.df)
    if kind not in (ContextSampler, FirstNSampler):
        return
    dropped = 0
    if task.fewshot_cfg.split == task.config.test_split:  # the rows that equal the question are left out
        held = Counter(map(repr, rows))
        dropped = max(held[repr(document)] for document in documents)
        if kind is ContextSampler:
            dropped = max(dropped, 1)  # it draws one more than it shows, wherever the question lies
    room = len(rows) - dropped
    if shots > room:
        less = "" if dropped == 0 else f", of which the question is {'one' if dropped == 1 else f'{dropped}'}"
        raise ValueError(
            f"{task.task_name} asks for {shots} examples before each question (num_fewshot), and its few-shot split "
            f"{_split(task)} has {len(rows)} rows{less}; set evaluate.harness.num_fewshot={room} or less"
        )
    try:
        _show(task, rows[0])  # what is wrong with a task's file shows in the first
    except Exception as error:  # templates and functions of the task raise of many kinds
        raise ValueError(
            f"{task.task_name}: row 1 of its few-shot split {_split(task)} gives no example ({_reason(error)})"
        ) from None


def _split(task: Any) -> str:
    """As lm_eval chooses it."""
    if task.fewshot_cfg.split is None and task.fewshot_cfg.samples is not None:
        return "fewshot_config.samples"
    config = task.config
    return task.fewshot_cfg.split or config.training_split or config.validation_split or config.test_split


def _show(task: Any, document: Any) -> None:
    """An example made, as lm_eval's fewshot_context does."""
    said = task.fewshot_cfg
    question, choices = task.doc_to_text(document, said.doc_to_text), None
    if said.doc_to_choice:
        choices = task.doc_to_choice(document, said.doc_to_choice)
    if task.multiple_input:
        assert choices is not None, "doc_to_text is a number, and there is no doc_to_choice"
        question, choices = choices[question], None
    task.build_qa_turn(q=question, c=choices, a=task.doc_to_target(document, said.doc_to_target))


def _question(task: Any, document: Any) -> tuple[str | None, str | None]:
    """(why no request can be made of a row, an answer that is none of its choices), None where all is well."""
    config = task.config
    try:
        choices = task.doc_to_choice(document) if config.doc_to_choice is not None else None
        fault = _choice_fault(choices) if task.OUTPUT_TYPE == "multiple_choice" else None
        if fault is None:
            context = task.fewshot_context(document, num_fewshot=0)
            made = task.construct_requests(document, context, metadata=(config.task, 0, 1))
            fault = _request_fault(made if isinstance(made, list) else [made])
        if fault is not None or choices is None or callable(config.process_results):
            return fault, None
        gold = task.doc_to_text(document) if task.multiple_input else task.doc_to_target(document)
    except Exception as error:  # templates and functions of the task raise of many kinds
        return f"gives no question ({_reason(error)})", None
    if task.OUTPUT_TYPE == "generate_until" and not _number(gold, choices):
        return f"has the answer {gold!r}, which is no number of one of its {len(choices)} choices", None
    return None, None if _chosen(gold, choices) else repr(gold)


def _choice_fault(choices: Any) -> str | None:
    if not isinstance(choices, list) or not choices:
        return f"has no list of choices: {choices!r}"
    bad = next((number for number, choice in enumerate(choices, start=1) if not isinstance(choice, str)), None)
    if bad is not None:
        return f"has choice {bad} of {len(choices)} that is no text: {choices[bad - 1]!r}"
    return f"has an empty choice: {choices.index('') + 1} of {len(choices)}" if "" in choices else None


def _request_fault(requests: Sequence[Any]) -> str | None:
    """Texts are what the model is asked for; of an answer without a letter there is no likelihood."""
    for request in requests:
        texts = request.args[:1] if request.request_type == "generate_until" else request.args
        for text in texts:
            if not isinstance(text, str):
                return f"gives {text!r}, which is no text"
        if request.request_type == "loglikelihood" and texts[1] == "":
            return "has an empty answer"
    return None


def _number(gold: Any, choices: Sequence[str]) -> bool:
    return isinstance(gold, int) and 0 <= gold < len(choices)


def _chosen(gold: Any, choices: Sequence[str]) -> bool:
    """As lm_eval reads an answer: a number, one of the choices itself, or several numbers of which one will do."""
    if isinstance(gold, list):
        return any(_number(one, choices) for one in gold)
    return _number(gold, choices) or (isinstance(gold, str) and gold in choices)


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or ["no more is said"]
    return f"{type(error).__name__}: {lines[0]}"
