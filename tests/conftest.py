"""What holds for every test."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("shared", deadline=None)  # two tests at a time, or a busy machine, say nothing of the code
settings.load_profile("shared")


@pytest.fixture(autouse=True, scope="module")
def _environment_put_back() -> Iterator[None]:
    """What a module, or a library that it imports, sets in this process's environment is not the next one's."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
