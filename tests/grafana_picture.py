"""Draws ``ray_configs/grafana/twinkle_ray.json`` from a Prometheus, without Grafana. Not collected by pytest.

    python -m tests.grafana_picture run OUT.png [SECONDS]     # needs a `prometheus` on PATH
    python -m tests.grafana_picture draw URL OUT.png [SECONDS]

``run`` starts a Ray and a Prometheus that scrapes it, and syncs: a rollout is slow for a while, one sync fails, a later
one recovers. The drawing has the panels' places, queries, thresholds and mappings, not Grafana's looks.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import ray

from tests.actors import Rollout, RolloutBase, Trainer, at_launch, no_power
from twinkle_ray import CheckpointEngineManager, SyncError

DASHBOARD = Path(__file__).resolve().parent.parent / "ray_configs" / "grafana" / "twinkle_ray.json"
COLOURS = {"text": "lightgray", "light-blue": "lightskyblue", "blue": "cornflowerblue", "green": "yellowgreen"}
STEP_S = 2


class SlowBase(RolloutBase):
    """Loads everything, and takes its time if it is told to."""

    seconds = 0.0

    def __init__(self, seed: int, **model: Any) -> None:
        super().__init__(seed, **model)
        from twinkle_ray.sinks import ModuleSink

        ready = ModuleSink.ready

        def slow(sink: ModuleSink, tensors: Any) -> None:
            time.sleep(self.seconds)
            ready(sink, tensors)

        ModuleSink.ready = slow  # type: ignore[method-assign]
        ModuleSink._ranges = lambda *_: None  # type: ignore[method-assign]


def run(out: Path, seconds: float) -> None:
    temp_dir = Path(tempfile.mkdtemp(prefix="tw-", dir="/tmp"))
    context = ray.init(
        num_cpus=4, include_dashboard=False, logging_level=logging.ERROR, _temp_dir=str(temp_dir / "ray")
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = {
        "global": {"scrape_interval": f"{STEP_S}s"},
        "scrape_configs": [
            {
                "job_name": "ray",
                "static_configs": [{"targets": [f"127.0.0.1:{context.address_info['metrics_export_port']}"]}],
            }
        ],
    }
    (temp_dir / "prometheus.yml").write_text(json.dumps(config))
    prometheus = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={temp_dir / 'prometheus.yml'}",
            f"--storage.tsdb.path={temp_dir / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=error",
        ]
    )
    try:
        with sync(seconds):
            time.sleep(8)  # until Ray has exported and Prometheus has scraped the last one
            draw(f"http://127.0.0.1:{port}", out, seconds + 15)
    finally:
        prometheus.terminate()
        prometheus.wait(timeout=30)
        ray.shutdown()
        shutil.rmtree(temp_dir, ignore_errors=True)


def sync(seconds: float) -> CheckpointEngineManager:
    """A sync every two seconds: all is well, then ``rollout[2]`` is slow, then one sync fails, then all is well. The
    manager, whose gauges end with it."""
    width = {"width": 512}
    trainer, rollouts = Trainer.remote(1, **width), [Rollout.remote(2, **width), Rollout.remote(3, **width)]
    slow = ray.remote(num_cpus=0.1)(SlowBase).remote(4, **width)
    manager = CheckpointEngineManager([trainer], [*rollouts, slow], bucket_size=1 << 20, timeout_s=60)
    start, failed = time.monotonic(), False
    while (passed := (time.monotonic() - start) / seconds) < 1:
        is_slow = 0.25 < passed < 0.5
        ray.get(slow.call.remote(lambda one, took=0.03 * is_slow: setattr(one, "seconds", took)), timeout=30)
        if passed > 0.65 and not failed:
            failed = True
            ray.get(rollouts[1].call.remote(lambda _: at_launch(2, no_power)), timeout=30)
        ray.get(trainer.step.remote(int(passed * 1000)), timeout=30)
        with contextlib.suppress(SyncError):
            manager.sync_weights()
            time.sleep(2)
            continue
        time.sleep(seconds / 8)  # so that it can be seen
    return manager


def ask(url: str, path: str, **query: Any) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"{url}/api/v1/{path}?{urllib.parse.urlencode(query)}", timeout=20) as answer:
        found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
    return found


def draw(url: str, out: Path, seconds: float) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    dashboard = json.loads(DASHBOARD.read_text())
    end = time.time()
    panels = dashboard["panels"]
    height = max(p["gridPos"]["y"] + p["gridPos"]["h"] for p in panels)
    figure = pyplot.figure(figsize=(20, height * 0.5))
    figure.suptitle(f"{dashboard['title']} (drawn by tests/grafana_picture.py)", y=0.999)
    for panel in panels:
        at = panel["gridPos"]
        box = (at["x"] / 24, 1 - (at["y"] + at["h"]) / height, at["w"] / 24, at["h"] / height)
        if panel["type"] == "row":
            figure.text(box[0] + 0.01, box[1] + box[3] * 0.3, panel["title"], weight="bold", size=13)
            continue
        axes = figure.add_axes((box[0] + 0.035, box[1] + box[3] * 0.2, box[2] - 0.045, box[3] * 0.62))
        axes.set_title(panel["title"], size=10, loc="left")
        series = []
        for one in panel["targets"]:
            query = expand(one["expr"])
            when = (
                {"path": "query", "time": end}
                if one.get("instant")
                else {"path": "query_range", "start": end - seconds, "end": end, "step": STEP_S}
            )
            series += [(label(one, found["metric"]), found) for found in ask(url, query=query, **when)]
        {"stat": stat, "table": table, "state-timeline": states, "timeseries": lines}[panel["type"]](
            axes, panel, series, end
        )
    figure.savefig(out, dpi=70)


def expand(expr: str) -> str:
    values = {"$SessionName": ".+", "$Cluster": ".*", "$Manager": ".+", "$window": "1m", "$__range": "30m"}
    values["$wire_gb_per_s"] = "0.5"
    for name, value in values.items():
        expr = expr.replace(name, value)
    return expr


def label(target: dict[str, Any], tags: dict[str, str]) -> str:
    text = target["legendFormat"]
    for name, value in tags.items():
        text = text.replace("{{" + name + "}}", value)
    return text or ", ".join(value for name, value in sorted(tags.items()))


def stat(axes: Any, panel: dict[str, Any], series: list[Any], end: float) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    axes.axis((0, 1, 0, 1))
    axes.axis("off")
    for i, (name, found) in enumerate(series or [(defaults["noValue"], {"value": (0, "nan")})]):
        value = float(found["value"][1])
        colour = defaults["thresholds"]["steps"][0]["color"]
        for step in defaults["thresholds"]["steps"][1:]:
            colour = step["color"] if value >= step["value"] else colour
        shown = f"{value:.0%}" if defaults["unit"] == "percentunit" else f"{value:.{defaults['decimals']}f}"
        axes.text(0.5, 0.5 - i * 0.5, f"{shown}\n{name}", ha="center", va="center", size=15)
        axes.axhspan(0, 1, color=COLOURS.get(colour, colour), alpha=0.6)


def table(axes: Any, panel: dict[str, Any], series: list[Any], end: float) -> None:
    axes.axis("off")
    for i, (_, found) in enumerate(series):
        text = "   ".join(f"{key}={value}" for key, value in found["metric"].items())
        axes.text(0, 0.9 - i * 0.15, f"{found['value'][1]} failed   {text}", size=11)


def states(axes: Any, panel: dict[str, Any], series: list[Any], end: float) -> None:
    mapping = panel["fieldConfig"]["defaults"]["mappings"][0]["options"]
    names = [name for name, _ in series]
    for row, (_, found) in enumerate(series):
        for when, value in found["values"]:
            one = mapping[str(int(float(value)))]
            colour = COLOURS.get(one["color"], one["color"])
            axes.barh(row, STEP_S, left=float(when) - end, color=colour, height=0.8, label=one["text"])
    axes.set_yticks(range(len(names)), names, size=8)
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    axes.legend(handles.values(), handles.keys(), fontsize=8, loc="lower left")


def lines(axes: Any, panel: dict[str, Any], series: list[Any], end: float) -> None:
    stacked = panel["fieldConfig"]["defaults"]["custom"].get("stacking")
    times = sorted({when for _, found in series for when, _ in found["values"]})
    columns = []
    for _, found in series:
        values = dict(found["values"])
        columns.append([float(values.get(when, "nan")) for when in times])
    at = [when - end for when in times]
    if stacked and columns:
        clean = [[0 if math.isnan(v) else v for v in column] for column in columns]
        axes.stackplot(at, clean, labels=[name for name, _ in series], step="post", alpha=0.7)
    else:
        for (name, _), column in zip(series, columns, strict=True):
            width = 5 if name.startswith("trainer 0") else 1.5
            axes.step(at, column, where="post", label=name, lw=width, alpha=0.4 if width == 5 else 1)
    axes.set_ylim(bottom=0)
    axes.set_ylabel(panel["fieldConfig"]["defaults"]["unit"], size=8)
    axes.grid(alpha=0.3)
    if series:
        axes.legend(fontsize=7, loc="upper left")


if __name__ == "__main__":
    if sys.argv[1] == "run":
        run(Path(sys.argv[2]), float(sys.argv[3]) if len(sys.argv) > 3 else 150.0)
    else:
        draw(sys.argv[2], Path(sys.argv[3]), float(sys.argv[4]) if len(sys.argv) > 4 else 1800.0)
