"""The table of public cases in ``tests/README.md``: all of them are there, and what it names exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
CASES = [f"A{number:02}" for number in range(1, 37)]
SHORT = {"public": "ray/test_public_cases.py"}


def rows() -> dict[str, str]:
    """What runs each case."""
    found = re.findall(r"^\| (A\d\d) \|(.*)\|$", (TESTS / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(found) == len(dict(found)), "a case is there twice"
    return dict(found)


@cache
def names(file: str) -> frozenset[str]:
    """Classes and functions of a file."""
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, kinds))


@pytest.mark.parametrize("case", CASES)
def test_what_the_table_names_is_there(case: str) -> None:
    file, found = "", []
    for reference in re.findall(r"`([^`]*)`", rows()[case]):
        head, *parts = reference.partition("[")[0].split("::")
        if not parts:
            continue  # not a test
        file = SHORT.get(head, head) or file  # one without a file is of the file before it
        found += parts
        assert set(parts) <= names(file), f"{file} has no {'::'.join(parts)}"
    assert found, "nothing runs it"


def test_no_case_is_missing_and_none_is_made_up() -> None:
    assert sorted(rows()) == CASES
