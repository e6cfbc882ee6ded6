"""One sync against the limit of its wire, both measured in one run, in a local Ray; see :mod:`twinkle_ray.bench`.

    python tests/benchmarks/bench_sync.py                              # CPU: Gloo, small widths, real layer counts
    python tests/benchmarks/bench_sync.py --device cuda --scale 1      # two NVIDIA GPUs, full size
    python tests/benchmarks/bench_sync.py --device cuda --scale 1 --replicas 1 3       # four of them

Prints a row of JSON for each model and kind of rollout as it comes, and then all of them as a table. What the columns
mean stands in ``twinkle_ray/bench.py``; ``python -m twinkle_ray bench`` shows a part of them, on a running cluster too.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
# Ray's workers import the actors by name, also where nothing is installed by pip.
os.environ["PYTHONPATH"] = f"{sys.path[0]}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(os.pathsep)

import ray

from twinkle_ray.bench import Options, measure
from twinkle_ray.cli import add_measuring
from twinkle_ray.shapes import MODELS

ELSEWHERE = ("GB/s", "machine")  # in the row, but not a column


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    heads = list(rows[0])
    lines = [heads, ["---"] * len(heads), *([str(row[head]) for head in heads] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_measuring(parser, models=list(MODELS), default_models=["0.6b", "7b"], default_rollouts=["module", "engine"])
    parser.add_argument("--out", type=Path, help="also write the table here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tw-", dir="/tmp") as folder:
        gpus = 1 + max(options.replicas) if options.device == "cuda" else 0
        ray.init(num_gpus=gpus, include_dashboard=False, _temp_dir=folder, log_to_driver=False)
        rows: list[dict[str, Any]] = []
        for model, kind, replicas in itertools.product(options.models, options.rollouts, options.replicas):
            row = measure(model, kind, Options.of(options, replicas))
            machine = row["machine"]
            rows.append({head: value for head, value in row.items() if head not in ELSEWHERE})
            print(json.dumps(rows[-1]), flush=True)
        ray.shutdown()
    text = f"{machine}; scale 1/{options.scale}; median of {options.rounds}\n\n{table(rows)}\n"
    print(text)
    if options.out is not None:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
