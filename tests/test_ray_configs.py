"""The files of ``ray_configs/``: each is what Ray or KubeRay takes, and the doors of a cluster are closed."""

from __future__ import annotations

import copy
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

FOLDER = Path(__file__).resolve().parent.parent / "ray_configs"
CLUSTERS = ("cluster.yaml", "cluster-cpu.yaml", "cluster-npu.yaml")
JOBS = ("rayjob.yaml", "rayjob-cpu.yaml", "rayjob-npu.yaml")
ENVIRONMENTS = ("runtime_env.yaml", "runtime_env-cpu.yaml", "runtime-env-ascend.yaml")


def read(name: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / name).read_text())


def pinned(package: str) -> str:
    (version,) = re.findall(rf"^{package}==(\S+)$", (FOLDER / "requirements-cpu.txt").read_text(), re.MULTILINE)
    return version


def test_every_file_is_tested_here() -> None:
    assert {path.name for path in FOLDER.glob("*.yaml")} == {*CLUSTERS, *JOBS, *ENVIRONMENTS}


# --- ray up ----------------------------------------------------------------------------------------------------


def validate_cluster(config: dict[str, Any]) -> None:
    """As `ray up` does."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    validate_config(prepare_config(copy.deepcopy(config)))


def commands(config: dict[str, Any]) -> list[str]:
    return [command for key, value in config.items() if key.endswith("_commands") for command in value]


@pytest.mark.parametrize("name", CLUSTERS)
def test_ray_takes_the_cluster_file(name: str) -> None:
    validate_cluster(read(name))


@pytest.mark.parametrize("where", [(), ("docker",)])
@pytest.mark.parametrize("name", CLUSTERS)
def test_ray_refuses_a_cluster_file_with_a_key_misspelt(name: str, where: tuple[str, ...]) -> None:
    config = read(name)
    inner = config
    for key in where:
        inner = inner.setdefault(key, {})
    inner["setup_comands"] = inner.pop("setup_commands", [])

    with pytest.raises(jsonschema.ValidationError, match="setup_comands"):
        validate_cluster(config)


@pytest.mark.parametrize("name", CLUSTERS)
def test_every_command_is_one_that_bash_and_ray_take(name: str) -> None:
    from ray.scripts.scripts import start

    starts = []
    for command in commands(read(name)):
        assert subprocess.run(["bash", "-nc", command], timeout=10, check=False).returncode == 0, command
        for part in command.split("&&"):
            words = shlex.split(part)
            if words[:2] == ["ray", "start"]:
                starts.append(
                    start.make_context("start", [word.replace("$RAY_HEAD_IP", "192.0.2.10") for word in words[2:]])
                )

    head, worker = starts
    assert head.params["head"]
    assert head.params["dashboard_host"] == "127.0.0.1"
    assert worker.params["address"] == "192.0.2.10:6379"


@pytest.mark.parametrize("name", CLUSTERS)
def test_tokens_are_on_wherever_ray_runs(name: str, tmp_path: Path) -> None:
    config = read(name)

    assert config["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    (written,) = [command for command in config["setup_commands"] if "> ~/.twinkle_ray/env" in command]
    (tmp_path / ".twinkle_ray").mkdir()
    said = subprocess.run(
        ["bash", "-c", f"{written}; source ~/.twinkle_ray/env; echo $RAY_AUTH_MODE"],
        env={"HOME": str(tmp_path), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=10,
        check=False,
    )
    assert said.stdout == "token\n", said
    started = [command for command in commands(config) if " ray start " in command]
    assert len(started) == 2
    assert all(command.startswith("source ~/.twinkle_ray/env && ") for command in started)


# --- KubeRay ---------------------------------------------------------------------------------------------------


def record(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "required": list(required), "properties": properties}


def table(values: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": values}


def several(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


TEXT, NUMBER, YES_NO = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "boolean"}
NAME = {"type": "string", "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
AMOUNT = {"type": "string", "pattern": r"^\d+(\.\d+)?(m|[KMGT]i?)?$"}
METADATA = record(name=NAME, generateName=TEXT, namespace=NAME, labels=table(TEXT), annotations=table(TEXT))
RESOURCES = record(limits=table(AMOUNT), requests=table(AMOUNT))
SECRET = record(("secretKeyRef",), secretKeyRef=record(("name", "key"), name=TEXT, key=TEXT))
CONTAINER = record(
    ("name", "image", "resources"),
    name=NAME,
    image=TEXT,
    imagePullPolicy={"enum": ["Always", "IfNotPresent", "Never"]},
    env=several(record(("name",), name=TEXT, value=TEXT, valueFrom=SECRET)),
    ports=several(
        record(
            ("containerPort",),
            containerPort={"type": "integer", "minimum": 1, "maximum": 65535},
            name={**NAME, "maxLength": 15},
        )
    ),
    resources=RESOURCES,
    volumeMounts=several(record(("name", "mountPath"), name=NAME, mountPath=TEXT, readOnly=YES_NO)),
)
VOLUME = record(("name",), name=NAME, emptyDir=record(medium={"enum": ["", "Memory"]}, sizeLimit=AMOUNT))
TEMPLATE = record(
    ("spec",),
    metadata=METADATA,
    spec=record(
        ("containers",),
        containers={**several(CONTAINER), "minItems": 1},
        volumes=several(VOLUME),
        nodeSelector=table(TEXT),
        serviceAccountName=TEXT,
    ),
)
WORKERS = record(
    ("groupName", "template", "maxReplicas", "minReplicas"),
    groupName=NAME,
    replicas=NUMBER,
    minReplicas=NUMBER,
    maxReplicas=NUMBER,
    numOfHosts=NUMBER,
    idleTimeoutSeconds=NUMBER,
    rayStartParams=table(TEXT),
    template=TEMPLATE,
)
RAYJOB = record(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=METADATA,
    spec=record(
        ("entrypoint", "rayClusterSpec"),
        entrypoint=TEXT,
        runtimeEnvYAML=TEXT,
        submissionMode={"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"]},
        shutdownAfterJobFinishes=YES_NO,
        ttlSecondsAfterFinished=NUMBER,
        activeDeadlineSeconds={"type": "integer", "minimum": 1},
        backoffLimit=NUMBER,
        suspend=YES_NO,
        entrypointNumCpus={"type": "number"},
        entrypointNumGpus={"type": "number"},
        metadata=table(TEXT),
        rayClusterSpec=record(
            ("headGroupSpec",),
            rayVersion=TEXT,
            authOptions=record(mode={"enum": ["disabled", "token"]}),
            enableInTreeAutoscaling=YES_NO,
            headGroupSpec=record(
                ("template",),
                rayStartParams=table(TEXT),
                serviceType={"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
                enableIngress=YES_NO,
                template=TEMPLATE,
            ),
            workerGroupSpecs=several(WORKERS),
        ),
    ),
)
"""The fields of KubeRay's RayJob (v1, KubeRay 1.5) that these files use or that belong beside them; nothing else."""


def paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The place of every key whose name is KubeRay's or Kubernetes', not a user's."""
    free = {"rayStartParams", "limits", "requests", "labels", "annotations", "nodeSelector"}
    if isinstance(value, dict) and not (at and at[-1] in free):
        return [place for key, inner in value.items() for place in [(*at, key), *paths(inner, (*at, key))]]
    if isinstance(value, list):
        return [place for index, inner in enumerate(value) for place in paths(inner, (*at, index))]
    return []


def test_the_schema_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(RAYJOB)


@pytest.mark.parametrize("name", JOBS)
def test_kuberay_takes_the_job_file(name: str) -> None:
    jsonschema.validate(read(name), RAYJOB)


@pytest.mark.parametrize("name", JOBS)
def test_each_key_misspelt_is_refused(name: str) -> None:
    job = read(name)
    places = paths(job)
    assert len(places) > 40
    for *where, key in places:
        broken = copy.deepcopy(job)
        inner = broken
        for step in where:
            inner = inner[step]
        inner[f"{key}s"] = inner.pop(key)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(broken, RAYJOB)


@pytest.mark.parametrize("name", JOBS)
def test_a_job_says_what_belongs_together(name: str) -> None:
    spec = read(name)["spec"]
    cluster = spec["rayClusterSpec"]

    assert cluster["rayVersion"] == pinned("ray")
    assert cluster["authOptions"] == {"mode": "token"}
    assert cluster["headGroupSpec"]["serviceType"] == "ClusterIP"
    assert spec["shutdownAfterJobFinishes"] is True
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        (container,) = group["template"]["spec"]["containers"]
        assert container["resources"]["limits"] == container["resources"]["requests"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert str(ports["metrics"]) == group["rayStartParams"]["metrics-export-port"]
        (volume,) = group["template"]["spec"]["volumes"]
        assert volume["emptyDir"]["medium"] == "Memory"
        assert container["volumeMounts"] == [{"name": volume["name"], "mountPath": "/dev/shm"}]


@pytest.mark.parametrize("name", JOBS)
def test_ray_takes_what_the_job_gives_it(name: str) -> None:
    from ray.runtime_env import RuntimeEnv
    from ray.scripts.scripts import start

    spec = read(name)["spec"]
    environment = yaml.safe_load(spec["runtimeEnvYAML"])
    del environment["working_dir"]  # a folder of the image

    assert RuntimeEnv(**environment)["env_vars"] == environment["env_vars"]
    groups = (spec["rayClusterSpec"]["headGroupSpec"], *spec["rayClusterSpec"]["workerGroupSpecs"])
    for group in groups:  # KubeRay writes them into a shell command as they are
        line = " ".join(f"--{name}={value}" for name, value in group["rayStartParams"].items())
        start.make_context("start", ["--head", *shlex.split(line)])


def test_the_npu_job_has_the_environment_of_the_runtime_env_for_ascend() -> None:
    job = yaml.safe_load(read("rayjob-npu.yaml")["spec"]["runtimeEnvYAML"])

    assert job["env_vars"] == read("runtime-env-ascend.yaml")["env_vars"]


# --- runtime_env -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_ray_takes_the_runtime_env(name: str) -> None:
    from ray.runtime_env import RuntimeEnv

    environment = read(name)

    assert RuntimeEnv(**environment)["env_vars"] == environment["env_vars"]
    with pytest.raises((TypeError, ValueError)):
        RuntimeEnv(**{**environment, "env_vars": {"A": 1}})
