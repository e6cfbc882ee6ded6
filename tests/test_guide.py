"""The user guide names what there is, and its code is code."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest

import twinkle_ray
from twinkle_ray import CheckpointEngineManager, checking, errors
from twinkle_ray.plan import DEFAULT_BUCKET_SIZE

ROOT = Path(__file__).resolve().parent.parent
GUIDE = (ROOT / "examples" / "GUIDE.md").read_text()
EXAMPLES = (ROOT / "examples" / "README.md").read_text()
PAGES = {name: (ROOT / name).read_text() for name in ("README.md", "examples/GUIDE.md", "examples/README.md")}


def in_code(page: str) -> set[str]:
    """Every identifier that stands in code of some form."""
    spans = re.findall(r"```.*?```|`[^`\n]+`", page, re.DOTALL)
    return set(re.findall(r"\w+", " ".join(spans)))


def section(title: str) -> str:
    (text,) = re.findall(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", GUIDE, re.DOTALL | re.MULTILINE)
    return text


def test_every_public_name_is_there() -> None:
    assert set(twinkle_ray.__all__) - in_code(GUIDE) == set()


def test_every_error_has_a_row_with_a_cause_and_a_mend() -> None:
    defined = {
        name
        for module in (errors, checking)
        for name, kind in vars(module).items()
        if inspect.isclass(kind) and issubclass(kind, errors.TwinkleRayError) and kind.__module__ == module.__name__
    }
    rows = re.findall(r"^\| `(\w+)` \| (.+) \| (.+) \|$", section("What does this error mean?"), re.MULTILINE)

    assert {name for name, _, _ in rows} == defined - {"TwinkleRayError"}  # which is the root of all of them
    assert all(len(cause) > 20 and len(mend) > 15 for _, cause, mend in rows)


def test_every_method_and_argument_of_the_manager_is_in_the_table_of_the_api() -> None:
    named = in_code(section("API"))
    methods = {name for name, _ in inspect.getmembers(CheckpointEngineManager, inspect.isfunction)}
    arguments = set(inspect.signature(CheckpointEngineManager).parameters) - {"train_actors", "rollout_replicas"}

    assert {name for name in methods if not name.startswith("_")} - named == set()
    assert arguments - named == set()
    assert f"`bucket_size` | {DEFAULT_BUCKET_SIZE >> 20} MiB |" in section("API")
    assert f"`timeout_s` | {inspect.signature(CheckpointEngineManager).parameters['timeout_s'].default:.0f} |" in GUIDE


@pytest.mark.parametrize("page", PAGES)
def test_code_compiles(page: str) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGES[page], re.DOTALL)

    assert blocks or page == "examples/README.md"
    for block in blocks:
        ast.parse(block)


def test_what_the_code_imports_of_ours_exists() -> None:
    checked = 0
    for page in PAGES.values():
        for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
            for node in ast.walk(ast.parse(block)):
                match node:
                    case ast.ImportFrom(module=str(module), names=names) if module.startswith("twinkle_ray"):
                        for alias in names:
                            assert hasattr(importlib.import_module(module), alias.name)
                            checked += 1
    assert checked > 5


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    found = re.findall(r"\]\(([^)]+)\)", PAGES[page])
    files = [target for target in found if not target.startswith(("http", "#"))]
    anchors = [target[1:] for target in found if target.startswith("#")]
    titles = re.findall(r"^#+ (.+)$", PAGES[page], re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}

    assert [target for target in files if not ((ROOT / page).parent / target.partition("#")[0]).exists()] == []
    assert set(anchors) - slugs == set()


def test_every_test_that_is_named_exists() -> None:
    named = re.findall(r"`(tests/\S+\.py)::(\w+)`", GUIDE)

    assert named
    for file, test in named:
        assert f"def {test}(" in (ROOT / file).read_text()


def test_every_example_has_a_row_with_the_line_that_submits_it() -> None:
    there = {path.stem for path in (ROOT / "examples").glob("rlhf_*.py")}

    submitted = re.findall(r"ray job submit --working-dir \. -- python examples/(\w+)\.py", EXAMPLES)

    assert sorted(submitted) == sorted(there)
