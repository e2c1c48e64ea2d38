"""deploy/kubernetes: every manifest against its schema, the others, and the server itself."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from custom_resources import SCHEMAS
from kustomize import Resource, all_containers, build

from cuengine.api import server
from cuengine.api.routes import ROUTES
from cuengine.api.settings import ServerSettings
from cuengine.cli import serve
from cuengine.cli.arguments import build_parser, engine_config
from cuengine.config import DEFAULT_MODEL, EngineConfig
from cuengine.engine_link import _SECONDS_TO_END

ROOT = Path(__file__).resolve().parents[2]
KUBERNETES = ROOT / "deploy/kubernetes"
OVERLAYS = ("overlays/cpu", "overlays/gpu")
FOLDERS = (*OVERLAYS, "monitoring")
VERSIONS = ("1.30", kubernetes_validate.latest_version())
"""The oldest that has all we use (`preStop.sleep`), and the newest with a schema."""

DEFAULT_MODEL_BYTES = 538e6
"""Of its weights in float32."""


@cache
def _built(folder: str) -> list[Resource]:
    return build(KUBERNETES / folder)


def _one(folder: str, kind: str) -> Resource:
    [found] = [resource for resource in _built(folder) if resource["kind"] == kind]
    return found


def _pod(folder: str) -> dict[str, Any]:
    spec: dict[str, Any] = _one(folder, "Deployment")["spec"]["template"]["spec"]
    return spec


def _server(folder: str) -> dict[str, Any]:
    [container] = _pod(folder)["containers"]
    return container


def _pod_labels(folder: str) -> dict[str, str]:
    labels: dict[str, str] = _one(folder, "Deployment")["spec"]["template"]["metadata"]["labels"]
    return labels


def _arguments(folder: str, container: dict[str, Any]) -> list[str]:
    """As the kubelet hands them over: $(NAME) is a variable of the container."""
    template = _one(folder, "Deployment")["spec"]["template"]["metadata"]
    values = {}
    for variable in container["env"]:
        if "value" in variable:
            values[variable["name"]] = variable["value"]
        elif field := variable["valueFrom"].get("fieldRef"):
            [name] = re.findall(r"metadata\.annotations\['(.*)'\]", field["fieldPath"])
            values[variable["name"]] = template["annotations"][name]
    return [
        re.sub(r"\$\((\w+)\)", lambda found: values[found[1]], text) for text in container["args"]
    ]


def _settings(folder: str) -> tuple[EngineConfig, ServerSettings]:
    args = build_parser().parse_args(_arguments(folder, _server(folder)))
    assert args.command == "serve"
    return engine_config(args), serve._settings(args)


def _mebibytes(quantity: str) -> float:
    number, unit = re.fullmatch(r"(\d+)(Mi|Gi)", quantity).groups()  # type: ignore[union-attr]
    return int(number) * {"Mi": 1, "Gi": 1024}[unit]


# --- schemas ------------------------------------------------------------------------------------


def _check_schema(resource: Resource, version: str) -> None:
    if resource["kind"] in SCHEMAS:
        jsonschema.validate(resource, SCHEMAS[resource["kind"]])
    else:
        kubernetes_validate.validate(resource, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("folder", FOLDERS)
def test_every_manifest_fits_its_schema(folder: str, version: str) -> None:
    for resource in _built(folder):
        _check_schema(resource, version)


def test_the_application_fits_its_schema_and_its_sources_are_here() -> None:
    application = yaml.safe_load((KUBERNETES / "argocd/application.yaml").read_text())
    jsonschema.validate(application, SCHEMAS["Application"])
    paths = [source["path"] for source in application["spec"]["sources"]]
    assert all(build(ROOT / path) for path in paths)


@pytest.mark.parametrize(
    ("folder", "kind", "place"),
    [
        ("overlays/cpu", "Deployment", ("spec", "template", "spec", "containers", 0)),
        ("overlays/cpu", "NetworkPolicy", ("spec", "ingress", 0)),
        ("overlays/cpu", "HorizontalPodAutoscaler", ("spec", "metrics", 0, "pods")),
        ("monitoring", "ServiceMonitor", ("spec", "endpoints", 0)),
        ("monitoring", "PrometheusRule", ("spec", "groups", 0, "rules", 0)),
    ],
)
def test_the_schemas_find_a_misspelt_field(
    folder: str, kind: str, place: tuple[str | int, ...]
) -> None:
    resource = json.loads(json.dumps(_one(folder, kind)))
    part = resource
    for step in place:
        part = part[step]
    part["prots"] = []
    with pytest.raises(jsonschema.ValidationError, match="prots"):
        _check_schema(resource, VERSIONS[0])


@pytest.mark.parametrize("folder", FOLDERS)
def test_kubectl_makes_the_same_of_it(folder: str) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("needs kubectl")
    done = subprocess.run(
        ["kubectl", "kustomize", str(KUBERNETES / folder)],
        capture_output=True,
        text=True,
        check=True,
    )
    theirs = list(yaml.safe_load_all(done.stdout))

    def key(resource: Resource) -> tuple[str, str]:
        return resource["kind"], resource["metadata"]["name"]

    assert sorted(theirs, key=key) == sorted(_built(folder), key=key)


# --- what refers to what ------------------------------------------------------------------------


@pytest.mark.parametrize("folder", OVERLAYS)
def test_selectors_select_the_servers(folder: str) -> None:
    pod = _pod(folder)
    [spread] = pod["topologySpreadConstraints"]
    for selected in (
        _one(folder, "Deployment")["spec"]["selector"]["matchLabels"],
        _one(folder, "Service")["spec"]["selector"],
        _one(folder, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        _one(folder, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
        spread["labelSelector"]["matchLabels"],
    ):
        assert selected
        assert selected.items() <= _pod_labels(folder).items()


@pytest.mark.parametrize("folder", OVERLAYS)
def test_ports_are_named_as_the_container_names_them(folder: str) -> None:
    ports = {port["name"]: port["containerPort"] for port in _server(folder)["ports"]}
    _, settings = _settings(folder)
    assert set(ports.values()) == {settings.port}
    probes = [_server(folder)[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")]
    used = [probe["httpGet"]["port"] for probe in probes]
    used += [port["targetPort"] for port in _one(folder, "Service")["spec"]["ports"]]
    for rule in _one(folder, "NetworkPolicy")["spec"]["ingress"]:
        used += [port["port"] for port in rule["ports"]]
    assert len(used) >= 5
    assert set(used) <= set(ports)


@pytest.mark.parametrize("folder", OVERLAYS)
def test_the_monitor_finds_the_service_and_its_port(folder: str) -> None:
    monitor, service = _one("monitoring", "ServiceMonitor")["spec"], _one(folder, "Service")
    labels = service["metadata"]["labels"]
    assert monitor["selector"]["matchLabels"].items() <= labels.items()
    assert labels[monitor["jobLabel"]] == "cuengine"
    names = {port["name"] for port in service["spec"]["ports"]}
    for endpoint in monitor["endpoints"]:
        assert endpoint["port"] in names
        assert endpoint["path"] in {route.path for route in ROUTES if route.method == "GET"}


@pytest.mark.parametrize("folder", OVERLAYS)
def test_volumes_claims_and_accounts_that_are_named_exist(folder: str) -> None:
    pod = _pod(folder)
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    for container in all_containers(_one(folder, "Deployment")):
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes.keys()
    claim = volumes["models"]["persistentVolumeClaim"]["claimName"]
    assert claim == _one(folder, "PersistentVolumeClaim")["metadata"]["name"]
    assert pod["serviceAccountName"] == _one(folder, "ServiceAccount")["metadata"]["name"]


@pytest.mark.parametrize("folder", OVERLAYS)
def test_nothing_names_a_namespace_so_that_all_go_where_they_are_applied(folder: str) -> None:
    for resource in (*_built(folder), *_built("monitoring")):
        assert "namespace" not in resource["metadata"]


# --- the server ---------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", OVERLAYS)
def test_the_command_line_takes_the_arguments(folder: str) -> None:
    config, settings = _settings(folder)
    assert settings.host == "0.0.0.0"
    assert config.device == {"overlays/cpu": "cpu", "overlays/gpu": "cuda"}[folder]
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    for container in all_containers(_one(folder, "Deployment")):
        assert set(container["command"]) <= scripts.keys()
    [init] = _pod(folder)["initContainers"]
    pull = build_parser().parse_args(_arguments(folder, init))
    assert (pull.command, pull.model, config.model) == ("pull", DEFAULT_MODEL, DEFAULT_MODEL)


@pytest.mark.parametrize("folder", OVERLAYS)
def test_variables_are_those_that_the_readme_describes(folder: str) -> None:
    readme = (ROOT / "README.md").read_text()
    rows = [line for line in readme.splitlines() if re.match(r"\| `(CUENGINE|HF)_", line)]
    known = set(re.findall(r"(?:CUENGINE|HF)_\w+", "".join(row.split("|")[1] for row in rows)))
    for container in all_containers(_one(folder, "Deployment")):
        names = {variable["name"] for variable in container["env"]}
        assert {name for name in names if name.startswith(("CUENGINE_", "HF_"))} <= known
    # Kubernetes makes variables from the names of services: CUENGINE_PORT and others.
    assert _pod(folder)["enableServiceLinks"] is False


@pytest.mark.parametrize("folder", OVERLAYS)
def test_probes_ask_the_routes_that_answer_what_they_are_for(folder: str) -> None:
    routes = {route.path: route for route in ROUTES if route.method == "GET"}
    asked = {
        kind: routes[_server(folder)[f"{kind}Probe"]["httpGet"]["path"]]
        for kind in ("startup", "readiness", "liveness")
    }
    assert {kind: route.path for kind, route in asked.items()} == {
        "startup": "/ready", "readiness": "/ready", "liveness": "/health",
    }  # fmt: skip
    # One that drains gets no new requests, and is not killed for it.
    assert not asked["readiness"].while_draining
    assert asked["liveness"].while_draining
    # With an API key they are asked without one.
    assert not any(route.path.startswith("/v1") for route in asked.values())


@pytest.mark.parametrize("folder", OVERLAYS)
def test_a_replica_has_the_time_to_drain_before_it_is_killed(folder: str) -> None:
    pod, (_, settings) = _pod(folder), _settings(folder)
    before = _server(folder)["lifecycle"]["preStop"]["sleep"]["seconds"]
    after = server._FAREWELL_SECONDS + _SECONDS_TO_END
    assert before >= 5
    assert pod["terminationGracePeriodSeconds"] >= before + settings.drain_timeout + after


@pytest.mark.parametrize("folder", OVERLAYS)
def test_a_start_may_take_ten_minutes_before_the_liveness_probe_counts(folder: str) -> None:
    startup = _server(folder)["startupProbe"]
    seconds = startup["periodSeconds"] * startup["failureThreshold"]
    assert seconds >= 600
    assert _one(folder, "Deployment")["spec"]["progressDeadlineSeconds"] > seconds


# --- replicas -----------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", OVERLAYS)
def test_the_autoscaler_scales_the_deployment_and_one_replica_always_stays(folder: str) -> None:
    deployment = _one(folder, "Deployment")
    scaler = _one(folder, "HorizontalPodAutoscaler")["spec"]
    target = scaler["scaleTargetRef"]
    assert (target["apiVersion"], target["kind"], target["name"]) == (
        deployment["apiVersion"], deployment["kind"], deployment["metadata"]["name"],
    )  # fmt: skip
    assert "replicas" not in deployment["spec"]
    assert scaler["minReplicas"] <= scaler["maxReplicas"]
    budget = _one(folder, "PodDisruptionBudget")["spec"]["maxUnavailable"]
    rolling = deployment["spec"]["strategy"]["rollingUpdate"]
    assert rolling["maxSurge"] + rolling["maxUnavailable"] >= 1
    assert scaler["minReplicas"] > max(budget, rolling["maxUnavailable"])
    assert budget >= 1


@pytest.mark.parametrize("folder", OVERLAYS)
def test_more_replicas_are_started_before_a_batch_is_full(folder: str) -> None:
    config, _ = _settings(folder)
    metrics = {
        metric["pods"]["metric"]["name"]: metric["pods"]["target"]
        for metric in _one(folder, "HorizontalPodAutoscaler")["spec"]["metrics"]
    }
    running = metrics["cuengine_requests_running"]
    assert running == {
        "type": "AverageValue", "averageValue": str(config.max_num_seqs * 3 // 4),
    }  # fmt: skip


def test_the_claim_can_be_mounted_by_all_replicas() -> None:
    for folder in OVERLAYS:
        claim = _one(folder, "PersistentVolumeClaim")["spec"]
        assert claim["accessModes"] == ["ReadWriteMany"]


# --- what a container may do, and gets ----------------------------------------------------------


@pytest.mark.parametrize("folder", OVERLAYS)
def test_pods_keep_to_the_restricted_pod_security_standard(folder: str) -> None:
    pod = _pod(folder)
    assert pod["automountServiceAccountToken"] is False
    assert _one(folder, "ServiceAccount")["automountServiceAccountToken"] is False
    security = pod["securityContext"]
    assert security["runAsNonRoot"] is True
    assert security["runAsUser"] == security["runAsGroup"] == security["fsGroup"] == 10001
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
    assert {next(iter(volume.keys() - {"name"})) for volume in pod["volumes"]} <= {
        "emptyDir", "persistentVolumeClaim",
    }  # fmt: skip
    for container in all_containers(_one(folder, "Deployment")):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


@pytest.mark.parametrize("folder", OVERLAYS)
def test_what_is_written_lies_in_volumes_and_models_are_only_read_by_the_server(
    folder: str,
) -> None:
    [init], container = _pod(folder)["initContainers"], _server(folder)
    for one in (init, container):
        mounts = {mount["mountPath"] for mount in one["volumeMounts"]}
        values = {variable["name"]: variable.get("value") for variable in one["env"]}
        assert values["HOME"] == "/tmp"
        assert {"/tmp", values["CUENGINE_CACHE"]} <= mounts
        assert values["HF_HOME"] == "/models"

    def models(one: dict[str, Any]) -> dict[str, Any]:
        mounts = [mount for mount in one["volumeMounts"] if mount["name"] == "models"]
        return {mount["mountPath"]: mount.get("subPath") for mount in mounts}

    assert models(init) == models(container)
    for mount in container["volumeMounts"]:
        assert mount.get("readOnly", False) == (mount["name"] == "models")


@pytest.mark.parametrize("folder", OVERLAYS)
def test_every_container_says_what_it_needs_and_what_it_may_take(folder: str) -> None:
    for container in all_containers(_one(folder, "Deployment")):
        asked, limits = (container["resources"][name] for name in ("requests", "limits"))
        assert _mebibytes(asked["memory"]) <= _mebibytes(limits["memory"])
        # cpu_quota() rounds up: with 2.5 CPUs three threads would be throttled.
        assert int(asked["cpu"]) <= int(limits["cpu"])


def test_on_cpus_weights_kv_cache_and_the_rest_fit_into_the_memory_limit() -> None:
    config, _ = _settings("overlays/cpu")
    limits = _server("overlays/cpu")["resources"]["limits"]
    assert config.kv_cache_memory is not None
    needed = (DEFAULT_MODEL_BYTES + config.kv_cache_memory) / 2**20 + 1024
    assert needed <= _mebibytes(limits["memory"])
    assert limits == _server("overlays/cpu")["resources"]["requests"]


def test_on_gpus_each_replica_has_one_of_its_own_and_an_update_needs_no_spare_one() -> None:
    assert _server("overlays/gpu")["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert "nvidia.com/gpu" in {each["key"] for each in _pod("overlays/gpu")["tolerations"]}
    rolling = _one("overlays/gpu", "Deployment")["spec"]["strategy"]["rollingUpdate"]
    assert rolling["maxSurge"] == 0


def test_the_images_are_those_that_the_dockerfiles_are_for() -> None:
    for folder, image in zip(OVERLAYS, ("cuengine:cpu", "cuengine:cuda"), strict=True):
        images = {container["image"] for container in all_containers(_one(folder, "Deployment"))}
        assert images == {image}


def test_the_commands_in_the_readmes_name_folders_that_are_here() -> None:
    text = "".join(path.read_text() for path in (ROOT / "README.md", KUBERNETES / "README.md"))
    named = re.findall(r"kubectl [^\n`]*apply -k (\S+)", text)
    assert {f"deploy/kubernetes/{folder}" for folder in FOLDERS} <= set(named)
    for path in named:
        assert (ROOT / path / "kustomization.yaml").is_file(), path
