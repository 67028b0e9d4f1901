"""The rules of the house, held by reading the imports of every file."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("conf", "parallel", "model", "corpus", "telemetry", "engine", "recipes", "launch")
FILES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))

# Who may import whom. conf.schema (any room) is apart from the rest of conf (the command line: recipes, and engine for
# what it logs); conf's command line checks plans, so it may import parallel.
MAY_IMPORT = {
    "conf": {"conf", "parallel"},
    "parallel": {"parallel"},
    "model": {"model", "parallel"},
    "corpus": {"corpus", "parallel"},
    "telemetry": {"telemetry", "parallel"},
    "engine": {"engine", "telemetry", "corpus", "model", "parallel", "conf"},
    "recipes": set(ROOMS) - {"launch"},
    "launch": {"launch", "conf", "parallel", "telemetry"},
}
HOMES = {
    "deepspeed": {"engine"},
    "lm_eval": {"engine"},
    "wandb": {"telemetry"},
    "hydra": {"conf"},
    "omegaconf": {"conf"},
}


def imports(path: Path) -> Iterator[str]:
    """Every module imported anywhere in a file, but for type checking only."""
    tree = ast.parse(path.read_text())
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", FILES, ids=name)
def test_imports_go_one_way(path):
    room = path.relative_to(ROOT).parts[0]
    for module in imports(path):
        other = module.split(".")[0]
        if other in ROOMS and module != "conf.schema":
            assert other in MAY_IMPORT[room], f"{name(path)} imports {module}"


@pytest.mark.parametrize("path", FILES, ids=name)
def test_packages_are_imported_in_their_home_only(path):
    room = path.relative_to(ROOT).parts[0]
    for module in imports(path):
        assert room in HOMES.get(module.split(".")[0], {room}), f"{name(path)} imports {module}"


@pytest.mark.parametrize(
    "path",
    [*(p for p in FILES if p.parent.name == "parallel" and p.name != "groups.py"), ROOT / "conf/schema.py"],
    ids=name,
)
def test_plans_and_schema_need_neither_torch_nor_hydra(path):
    heavy = {"torch", "hydra", "omegaconf", "deepspeed", "transformers", "datasets", "numpy"}
    assert not heavy & {module.split(".")[0] for module in imports(path)}


def test_there_is_no_cycle_between_files():
    graph = {
        name(path)[:-3].replace("/", "."): {module for module in imports(path) if module.split(".")[0] in ROOMS}
        for path in FILES
    }
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, " -> ".join([*above, module])
        if module in done:
            return
        for other in graph.get(module, ()):
            visit(other, (*above, module))
        done.add(module)

    for module in graph:
        visit(module, ())


def test_no_room_has_a_drawer_for_odds_and_ends():
    words = {"utils", "util", "helpers", "common", "misc"}
    assert [name(p) for p in FILES if words & {p.stem, p.parent.name}] == []


@pytest.mark.parametrize("path", [path for path in FILES if path.name != "__init__.py"], ids=name)
def test_a_file_opens_with_what_it_is(path):
    assert ast.get_docstring(ast.parse(path.read_text()))


@pytest.mark.parametrize("path", FILES, ids=name)
def test_a_file_is_short_enough_to_be_one_idea(path):
    assert len(path.read_text().splitlines()) <= 300
