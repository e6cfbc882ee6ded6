"""What a scrape of the driver's node, Ray's state API and the log say after two good syncs and one that failed."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
from prometheus_client.parser import text_string_to_metric_families
from ray.util.state import list_actors, summarize_tasks

from tests.ray.conftest import Program
from twinkle_ray import metrics
from twinkle_ray.metrics import State

RAYS_TAGS = ("Component", "NodeAddress", "SessionName", "Version", "WorkerId")
Samples = dict[tuple[str, ...], float]


def scrape(url: str) -> dict[str, Samples]:
    """By name the value for each set of our tags, in the order of their keys."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        text = answer.read().decode()
    found: dict[str, Samples] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("ray_twinkle_"):
                ours = {k: v for k, v in sample.labels.items() if k not in RAYS_TAGS and not k.startswith("otel_")}
                found.setdefault(sample.name, {})[tuple(ours[key] for key in sorted(ours))] = sample.value
    return found


def wait_for(url: str, wanted: Callable[[dict[str, Samples]], bool]) -> dict[str, Samples]:
    """A scrape once it is as wanted; Ray exports now and then."""
    deadline = time.monotonic() + 40
    while not wanted(found := scrape(url)):
        assert time.monotonic() < deadline, found
        time.sleep(0.3)
    return found


@pytest.fixture(scope="module")
def watched(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    """A cluster of its own with metrics and a dashboard: that of :mod:`tests.ray.watched`, after two good syncs and one
    that failed."""
    temp_dir = tempfile.mkdtemp(prefix="tw-", dir="/tmp")
    log = tmp_path_factory.mktemp("watched") / "head.log"
    program = Program(root, log, "tests.ray.watched", "head", temp_dir, RAY_metrics_report_interval_ms="2000")
    try:
        yield program
    finally:
        program.end()
        shutil.rmtree(temp_dir, ignore_errors=True)


@pytest.fixture(scope="module")
def scraped(watched: Program) -> dict[str, Samples]:
    return wait_for(watched.said["metrics"], lambda found: len(found) >= len(metrics.ALL) + 2)


def only(samples: Samples) -> float:
    (value,) = samples.values()
    return value


def test_every_name_is_exported_and_no_other(scraped: dict[str, Samples]) -> None:
    histograms = {m.exported for m in metrics.ALL if m.kind == "histogram"}
    expected = {m.exported for m in metrics.ALL} - histograms
    expected |= {f"{name}_{part}" for name in histograms for part in ("bucket", "count", "sum")}

    assert set(scraped) == expected


def test_every_value_has_the_tags_that_are_documented(scraped: dict[str, Samples]) -> None:
    for metric in metrics.ALL:
        if metric.kind != "histogram":
            assert {len(tags) for tags in scraped[metric.exported]} == {len(metric.tags)}


def test_counters_are_sums_over_the_reports(watched: Program, scraped: dict[str, Samples]) -> None:
    reports = watched.said["reports"]
    (manager,) = {tags[0] for tags in scraped["ray_twinkle_synced_seconds_total"]}
    seconds: Counter[tuple[str, ...]] = Counter()
    nbytes: Counter[str] = Counter()
    direct: Counter[str] = Counter()
    for report in reports:
        members = [("driver", "driver", report["phases"]), ("trainer[0]", "trainer", report["sender"])]
        members += [(one["name"], "rollout", one["seconds"]) for one in report["replicas"]]
        for member, role, phases in members:
            seconds.update({(manager, member, phase, role): took for phase, took in phases.items()})
        nbytes["trainer[0]"] += report["nbytes"]
        nbytes.update({one["name"]: one["nbytes"] for one in report["replicas"]})
        direct.update({one["name"]: one["direct_bytes"] for one in report["replicas"]})

    assert scraped["ray_twinkle_phase_seconds_total"] == pytest.approx(dict(seconds), rel=1e-9)
    assert {tags[1]: value for tags, value in scraped["ray_twinkle_bytes_total"].items()} == nbytes
    assert {tags[1]: value for tags, value in scraped["ray_twinkle_direct_bytes_total"].items()} == direct
    staged = {tags[1]: value for tags, value in scraped["ray_twinkle_staged_bytes_total"].items()}
    assert staged == {name: nbytes[name] - written for name, written in direct.items()}
    assert only(scraped["ray_twinkle_synced_seconds_total"]) == pytest.approx(sum(r["seconds"] for r in reports))
    assert only(scraped["ray_twinkle_sync_seconds_count"]) == len(reports)
    assert scraped["ray_twinkle_syncs_total"] == {(manager, "gloo", "base"): len(reports)}


def test_gauges_are_those_of_the_last_sync_that_succeeded(watched: Program, scraped: dict[str, Samples]) -> None:
    last = watched.said["reports"][-1]

    assert only(scraped["ray_twinkle_last_sync_seconds"]) == last["seconds"]
    assert only(scraped["ray_twinkle_last_sync_bytes"]) == last["nbytes"]
    phases = scraped["ray_twinkle_last_phase_seconds"]
    assert {tags[2]: took for tags, took in phases.items() if tags[1] == "driver"} == last["phases"]


def test_a_failure_is_counted_and_shows_who_is_behind(watched: Program, scraped: dict[str, Samples]) -> None:
    failure = watched.said["failure"]
    ((tags, count),) = scraped["ray_twinkle_failures_total"].items()

    assert (tags[0], tags[2:], count) == (failure["type"], (failure["actors"][0], failure["phase"]), 1)
    versions = {tags[1]: value for tags, value in scraped["ray_twinkle_weights_version"].items()}
    assert versions == {"trainer[0]": watched.said["reports"][-1]["version"] + 1, **failure["versions"]}
    states = {tags[1]: State(int(value)) for tags, value in scraped["ray_twinkle_replica_state"].items()}
    assert states == {"rollout[0]": State.MIXED, "rollout[1]": State.MIXED}


def test_rays_state_api_shows_our_names(watched: Program) -> None:
    address = watched.said["dashboard"]
    actors = {actor.repr_name for actor in list_actors(address, detail=True, timeout=30)}
    tasks = set(summarize_tasks(address, timeout=30)["cluster"]["summary"])

    assert actors == {"TrainerBase[trainer]", "RolloutBase[rollout]", "as the user says"}
    expected = {"prepare", "connect", "agree", "send", "receive", "receive.poll"}
    assert {f"twinkle.{name}" for name in expected} <= tasks
    assert {name for name in tasks if name.startswith("twinkle.")} <= {f"twinkle.{name}" for name in expected}


def test_log_lines_have_fields(watched: Program) -> None:
    lines = [json.loads(line) for line in watched.log.read_text().splitlines() if line.startswith("{")]
    ours = [line for line in lines if line["message"].startswith("sync v")]

    keys = ("levelname", "version", "phase", "generation")
    assert [tuple(line[key] for key in keys) for line in ours[:3]] == [
        ("INFO", 1, "transfer", 1),
        ("INFO", 2, "transfer", 1),
        ("WARNING", 3, "transfer", 1),
    ]
    assert len({line["manager"] for line in ours}) == 1


def grafana_queries(root: Path) -> list[tuple[str, str]]:
    """Title of the panel or name of the variable, and query, with what Grafana puts for variables."""
    dashboard = json.loads((root / "ray_configs" / "grafana" / "twinkle_ray.json").read_text())
    found = [(panel["title"], one["expr"]) for panel in dashboard["panels"] for one in panel.get("targets", ())]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            series, label = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["definition"]).groups()  # type: ignore[union-attr]
            found.append((variable["name"], f"count by ({label}) ({series})"))
    values = {variable["name"]: variable.get("allValue") for variable in dashboard["templating"]["list"]}
    values |= {"window": "5m", "__range": "30m", "wire_gb_per_s": "100"}
    return [(title, re.sub(r"\$(\w+)", lambda match: values[match[1]], query)) for title, query in found]


def test_every_query_of_the_dashboard_asks_for_names_and_labels_that_are_there(
    watched: Program, root: Path, scraped: dict[str, Samples]
) -> None:
    with urllib.request.urlopen(watched.said["metrics"], timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    labels: dict[str, set[str]] = {}
    for sample in (sample for family in families for sample in family.samples):
        labels.setdefault(sample.name, {"ray_io_cluster"}).update(sample.labels)  # KubeRay's PodMonitor sets that one

    for title, query in grafana_queries(root):
        selected: list[Any] = []
        grouped: list[str] = []

        def visit(expr: Any, selected: list[Any] = selected) -> None:
            if isinstance(expr, promql.VectorSelector):
                selected.append(expr)

        promql.walk(promql.parse(query), visit)
        for names in re.findall(r"(?:by|on|ignoring) \(([^)]*)\)", query):
            grouped += names.split(", ")
        assert selected or query.startswith("vector("), title
        for selector in selected:
            assert selector.name in labels, title
            assert {matcher.name for matcher in selector.matchers.matchers} <= labels[selector.name], title
            assert set(grouped) <= labels[selector.name], (title, query)


def test_the_dashboard_maps_every_state(root: Path) -> None:
    dashboard = json.loads((root / "ray_configs" / "grafana" / "twinkle_ray.json").read_text())
    (panel,) = [panel for panel in dashboard["panels"] if panel["type"] == "state-timeline"]
    (mapping,) = panel["fieldConfig"]["defaults"]["mappings"]

    assert {int(n): one["text"] for n, one in mapping["options"].items()} == {s.value: s.name.lower() for s in State}


def test_a_recovery_shows_and_who_has_gone_is_no_ghost(watched: Program) -> None:
    report: dict[str, Any] = watched.tell("recover")["report"]

    def recovered(found: dict[str, Samples]) -> bool:
        states = {tags[1]: value for tags, value in found.get("ray_twinkle_replica_state", {}).items()}
        versions = {tags[1]: value for tags, value in found.get("ray_twinkle_weights_version", {}).items()}
        here = states.pop("rollout[1]", State.GONE) == State.GONE
        behind = set(versions.values()) - {report["version"]}
        return here and states == {"rollout[0]": State.WHOLE} and set(versions) >= {"trainer[0]"} and not behind

    found = wait_for(watched.said["metrics"], recovered)
    assert only(found["ray_twinkle_groups_total"]) == 2

    assert watched.tell("close") == {"closed": True}
    gauges = {metric.exported for metric in metrics.ALL if metric.kind == "gauge"}
    after = wait_for(watched.said["metrics"], lambda found: not gauges & set(found))
    assert only(after["ray_twinkle_failures_total"]) == 1  # counters stay
