"""The manifests for Kubernetes: each fits its API's schema, and the things that they name exist.

Kubernetes' own kinds are checked against lightkube's models, which are made from its OpenAPI
schema; RayCluster against the fields below. No cluster has run these manifests here.
"""

import copy
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import msgspec
import pytest
import yaml
from lightkube.models import apps_v1, core_v1, meta_v1, networking_v1, policy_v1, scheduling_v1
from msgspec import structs
from typer.main import get_command

from hadal.cli import app
from hadal.core.config import ROLES, Deployment, read_deployment, units_of
from hadal.runtime.memory import ranks_in_fp32
from hadal.runtime.resolve import plan
from hadal.runtime.topology import num_nodes, place_units

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "kuberay"
PAGE = ROOT / "docs" / "cluster.md"
PUBLISHED = ROOT / "configs" / "v3_ep32_ep144.toml"
FILES = sorted(path.stem for path in FOLDER.glob("*.yaml"))

END_S = 25
"""Seconds that `hadal serve` may need to end its processes, nodes and node provider after draining."""
PUBLISHED_NODES = 30
IMAGE_USER = 10001
"""User and group of deploy/kuberay/Dockerfile (tests/unit/test_deploy.py)."""
OBJECT_STORE_BYTES = 80_000_000
"""Bytes of Ray's object store, which is unused. By default it would take 30 % of the memory, which
KV pools need.
"""
HEAD_ENVIRONMENT = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_memory_monitor_refresh_ms": "0",
}
NODE_ENVIRONMENT = {
    "RAY_worker_niceness": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
}
UNITS = {"": 1.0, "m": 1e-3, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}

Document = dict[str, Any]


# RayCluster of ray.io/v1, KubeRay 1.7: the fields that the manifests use. All others are refused.


class AuthOptions(msgspec.Struct):
    mode: Literal["disabled", "token"]
    secretName: str | None = None


class RedisCredential(msgspec.Struct):
    valueFrom: core_v1.EnvVarSource
    """Source of a credential; as a plain `value` everyone could read it in the manifest."""


class GcsFaultToleranceOptions(msgspec.Struct):
    redisAddress: str
    redisPassword: RedisCredential


class AutoscalerOptions(msgspec.Struct):
    version: Literal["v1", "v2"]
    idleTimeoutSeconds: int | None = None


class HeadGroupSpec(msgspec.Struct):
    template: core_v1.PodTemplateSpec
    rayStartParams: dict[str, str]


class WorkerGroupSpec(msgspec.Struct):
    groupName: str
    minReplicas: int
    maxReplicas: int
    template: core_v1.PodTemplateSpec
    rayStartParams: dict[str, str]
    labels: dict[str, str]
    numOfHosts: Literal[1]
    """Hosts per group: KubeRay ends all of a larger group if one is gone."""
    replicas: int | None = None


class RayClusterSpec(msgspec.Struct):
    headGroupSpec: HeadGroupSpec
    workerGroupSpecs: list[WorkerGroupSpec]
    rayVersion: str
    authOptions: AuthOptions
    gcsFaultToleranceOptions: GcsFaultToleranceOptions | None = None
    enableInTreeAutoscaling: bool | None = None
    autoscalerOptions: AutoscalerOptions | None = None


class RayCluster(msgspec.Struct):
    apiVersion: str
    kind: str
    metadata: meta_v1.ObjectMeta
    spec: RayClusterSpec


KINDS = {
    ("v1", "Namespace"): core_v1.Namespace,
    ("v1", "ConfigMap"): core_v1.ConfigMap,
    ("v1", "PersistentVolumeClaim"): core_v1.PersistentVolumeClaim,
    ("v1", "Service"): core_v1.Service,
    ("apps/v1", "StatefulSet"): apps_v1.StatefulSet,
    ("networking.k8s.io/v1", "NetworkPolicy"): networking_v1.NetworkPolicy,
    ("policy/v1", "PodDisruptionBudget"): policy_v1.PodDisruptionBudget,
    ("scheduling.k8s.io/v1", "PriorityClass"): scheduling_v1.PriorityClass,
    ("ray.io/v1", "RayCluster"): RayCluster,
}


def misfits(value: Any, kind: Any, at: str) -> Iterator[str]:
    """Yield the places where a value does not fit a kind: fields unknown, missing or of another type."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        kinds = [one for one in inner if one is not type(None)]
        found_in = [list(misfits(value, one, at)) for one in kinds]
        if all(found_in) and not (value is None and len(kinds) < len(inner)):
            yield from found_in[0]
    elif origin is Literal:
        if value not in inner:
            yield f"{at} is {value!r}, not one of {inner}"
    elif origin is list:
        if not isinstance(value, list):
            yield f"{at} is no list"
            return
        for index, one in enumerate(value):
            yield from misfits(one, inner[0], f"{at}[{index}]")
    elif origin is dict:
        if not isinstance(value, dict):
            yield f"{at} is no map"
            return
        for name, one in value.items():
            yield from misfits(one, inner[1], f"{at}.{name}")
    elif isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield from _struct_misfits(value, kind, at)
    elif kind is not Any and type(value) is not kind:
        yield f"{at} is {value!r}, no {getattr(kind, '__name__', kind)}"


_fields = cache(structs.fields)


def _struct_misfits(value: Any, kind: type[msgspec.Struct], at: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"{at} is no {kind.__name__}"
        return
    fields = {field.encode_name: field for field in _fields(kind)}
    for name in value.keys() - fields.keys():
        yield f"{at}.{name} is no field of {kind.__name__}"
    for name, field in fields.items():
        if name in value:
            yield from misfits(value[name], field.type, f"{at}.{name}")
        elif field.required:
            yield f"{at}.{name} is missing"


def schema_problems(documents: list[Document]) -> Iterator[str]:
    for document in documents:
        name = label_of(document)
        kind = KINDS.get((document.get("apiVersion"), document.get("kind")))
        if kind is None:
            yield f"{name}: {document.get('apiVersion')} has no such kind"
            continue
        yield from misfits(document, kind, name)
        for labels in found(document, "labels", "matchLabels"):
            if not all(isinstance(one, str) for one in labels.values()):
                yield f"{name}: a label is no text"


# Rules beyond the schemas.


class Manifests:
    """The documents of a manifest file, with a property for each part that the checks need."""

    def __init__(self, documents: list[Document]) -> None:
        self.documents = documents
        (self.cluster,) = self.of_kind("RayCluster")
        (self.workers,) = self.cluster["spec"]["workerGroupSpecs"]
        (self.config,) = self.of_kind("ConfigMap")
        self.cells = next(
            one for one in self.of_kind("StatefulSet") if one["metadata"]["name"] == "hadal-cell"
        )
        (self.serve,) = self.cells["spec"]["template"]["spec"]["containers"]

    def of_kind(self, kind: str) -> list[Document]:
        return [one for one in self.documents if one["kind"] == kind]

    def names(self, kind: str) -> set[str]:
        return {one["metadata"]["name"] for one in self.of_kind(kind)}

    @property
    def templates(self) -> dict[str, Document]:
        """Pod templates by their owner's label."""
        named = {label_of(one): one["spec"]["template"] for one in self.of_kind("StatefulSet")}
        spec = self.cluster["spec"]
        named["head"] = spec["headGroupSpec"]["template"]
        return {**named, "workers": self.workers["template"]}

    def argument(self, name: str) -> str:
        """Return the value of an option of `hadal serve`; "" if it is not given."""
        given = [one for one in self.serve["args"] if one.startswith(f"--{name}=")]
        return given[0].partition("=")[2] if given else ""


@cache
def _serve_command() -> Any:
    return get_command(app).commands["serve"]  # type: ignore[attr-defined]


def flag_problems(manifests: Manifests) -> Iterator[str]:
    if manifests.serve["command"] != ["hadal", "serve"]:
        yield "a cell runs something else than `hadal serve`"
    try:
        _serve_command().make_context("serve", list(manifests.serve["args"]))
    except Exception as error:
        # The error's text has only the value, so add the option's name.
        yield f"hadal serve: {error} ({getattr(getattr(error, 'param', None), 'opts', '')})"
    for name in ("config", "api-keys-file", "model", "cache-folder"):
        path, mounts = manifests.argument(name), manifests.serve["volumeMounts"]
        if path and not any(is_below(path, mount["mountPath"]) for mount in mounts):
            yield f"--{name}={path}: nothing is mounted there"
    folder = manifests.argument("cache-folder"), manifests.argument("model")
    workers = manifests.workers["template"]["spec"]["containers"][0]["volumeMounts"]
    for path in filter(None, folder):
        if not any(is_below(path, mount["mountPath"]) for mount in workers):
            yield f"{path} is not mounted on the nodes, which read it as well"


def reference_problems(manifests: Manifests, _: Deployment) -> Iterator[str]:
    """Yield names that are neither in the file nor made by KubeRay or by a command on the page."""
    namespace, cluster = manifests.cluster["metadata"]["namespace"], manifests.cluster["metadata"]
    secrets = {(name, key) for space, name, key in made_by_hand() if space == namespace}
    if "secretName" not in manifests.cluster["spec"]["authOptions"]:
        secrets.add((cluster["name"], "auth_token"))  # KubeRay makes it.
    for document in manifests.documents:
        for chosen in found(document, "secretKeyRef"):
            if (chosen["name"], chosen["key"]) not in secrets:
                yield f"secret {chosen['name']}, key {chosen['key']}: nobody makes it"
        space = document["metadata"].get("namespace", "")
        if document["kind"] not in ("Namespace", "PriorityClass") and space != namespace:
            yield f"{label_of(document)} is in namespace {space!r}"
    if namespace not in manifests.names("Namespace"):
        yield f"namespace {namespace} is not made"
    for name, template in manifests.templates.items():
        yield from _volume_problems(manifests, name, template, {one for one, _ in secrets})
    for workload in manifests.of_kind("StatefulSet"):
        if workload["spec"]["serviceName"] not in manifests.names("Service"):
            yield f"{label_of(workload)}: no Service {workload['spec']['serviceName']}"


def user_problems(manifests: Manifests, _: Deployment) -> Iterator[str]:
    """Yield pods that run as root, unless a container needs a capability."""
    for name, template in manifests.templates.items():
        pod = template["spec"].get("securityContext", {})
        for container in containers(template):
            own = container.get("securityContext", {})
            if own.get("runAsUser") == 0 and own.get("capabilities", {}).get("add"):
                continue
            if not {**pod, **own}.get("runAsNonRoot"):
                yield f"{name}: {container['name']} may run as root"


def _volume_problems(
    manifests: Manifests, owner: str, template: Document, secrets: set[str]
) -> Iterator[str]:
    spec = template["spec"]
    volumes = {one["name"] for one in spec.get("volumes", [])}
    for workload in manifests.of_kind("StatefulSet"):
        if workload["spec"]["template"] is template:
            claims = workload["spec"].get("volumeClaimTemplates", [])
            volumes |= {one["metadata"]["name"] for one in claims}
    for container in containers(template):
        for mount in container.get("volumeMounts", []):
            if mount["name"] not in volumes:
                yield f"{owner}: no volume {mount['name']}"
    for volume in spec.get("volumes", []):
        there = {
            "configMap": manifests.names("ConfigMap"),
            "persistentVolumeClaim": manifests.names("PersistentVolumeClaim"),
            "secret": secrets,
        }
        for source, names in there.items():
            chosen = volume.get(source, {})
            name = chosen.get("name") or chosen.get("claimName") or chosen.get("secretName")
            if source in volume and name not in names:
                yield f"{owner}: no {source} {name}"
        if "secret" in volume:
            # Root owns the secret: the image's user reads it by its group. runtime/process/private
            # refuses files that others may read.
            if volume["secret"].get("defaultMode") != 0o400:
                yield f"{owner}: others may read secret {volume['name']}"
            if spec.get("securityContext", {}).get("fsGroup") != IMAGE_USER:
                yield f"{owner}: its user cannot read secret {volume['name']} without fsGroup"
    asked = spec.get("priorityClassName")
    if asked is not None and asked not in manifests.names("PriorityClass"):
        yield f"{owner}: no PriorityClass {asked}"


def time_problems(manifests: Manifests, deployment: Deployment) -> Iterator[str]:
    """Yield pods without time for their preStop, and cells without time to drain."""
    for name, template in manifests.templates.items():
        needed_s = max(_pre_stop_s(one) for one in containers(template))
        if manifests.serve in containers(template):
            needed_s += deployment.drain_timeout_s + END_S
        given_s = template["spec"].get("terminationGracePeriodSeconds", 30)
        if given_s <= needed_s:
            yield f"{name}: terminationGracePeriodSeconds is {given_s}, and {needed_s} are needed"
    if not _pre_stop_s(manifests.serve):
        yield "a cell refuses connections before its Service knows"
    if deployment.cluster.place_timeout_s < 600:
        yield "place_timeout_s is over before a node has its image"


def _pre_stop_s(container: Document) -> float:
    command = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command")
    return float(command[-1]) if command else 0.0


def probe_problems(manifests: Manifests, _: Deployment) -> Iterator[str]:
    source = (ROOT / "src/hadal/gateway/endpoints.py").read_text(encoding="utf-8")
    rows = " ".join(re.findall(r'Endpoint\("GET", .*', source))
    routes = set(re.findall(r'"(/[a-z]*)"', rows))
    assert {"/", "/health", "/metrics"} <= routes
    for name, template in manifests.templates.items():
        for container in containers(template):
            is_sidecar = container.get("restartPolicy") == "Always"
            needed = {"startupProbe"} if is_sidecar else {"readinessProbe", "livenessProbe"}
            for missing in needed - container.keys():
                yield f"{name}: {container['name']} has no {missing}"
            ports = {one["name"]: one["containerPort"] for one in container.get("ports", [])}
            listens = node_ports(container, manifests) or {*ports, *ports.values()}
            for probe in found(container, "httpGet", "tcpSocket"):
                if probe["port"] not in listens:
                    yield f"{name}: {container['name']} does not listen at {probe['port']}"
                if probe.get("path", "/") not in routes:
                    yield f"{name}: {probe['path']} is no page of the gateway"
    if manifests.serve["readinessProbe"]["httpGet"]["path"] != "/health":
        yield "a cell gets requests before it can answer them"
    if manifests.serve["livenessProbe"]["httpGet"]["path"] == "/health":
        yield "a cell that lost its nodes is killed, though it finds others"


def node_ports(container: Document, manifests: Manifests) -> set[int]:
    """Return the ports of a Ray node, by arguments or by ray parameters."""
    texts = [*container.get("args", [])]
    if container["name"] == "ray-worker":
        texts += [f"--{name}={value}" for name, value in ray_parameters(manifests.workers)]
    return {int(one.partition("=")[2]) for one in texts if one.startswith("--node-manager-port=")}


def deployment_problems(manifests: Manifests, deployment: Deployment) -> Iterator[str]:
    """Yield differences between the deployment and its nodes: address, label, size, number."""
    cluster, workers = deployment.cluster, manifests.workers
    name = manifests.cluster["metadata"]["name"]
    if cluster.address != f"{name}-head-svc:6379":
        yield f"cluster.address is {cluster.address}, and the head is at {name}-head-svc:6379"
    key, _, value = cluster.label.partition("=")
    if workers["labels"].get(key) != value:
        yield f"cluster.label is {cluster.label}, and the nodes have {workers['labels']}"
    resources = workers["template"]["spec"]["containers"][0]["resources"]
    resource = "nvidia.com/gpu" if deployment.device == "cuda" else "cpu"
    has = quantity(resources["limits"].get(resource, 0))
    needed = max(_needed_of_a_node(deployment, role) for role in ROLES)
    if has < needed:
        yield f"a node has {has:g} {resource}, and its ranks need {needed:g}"
    num_cells = manifests.cells["spec"]["replicas"]
    nodes = num_cells * num_nodes(place_units(deployment))
    if workers["maxReplicas"] < nodes:
        yield f"maxReplicas is {workers['maxReplicas']}, and the cells need {nodes} nodes"
    for budget in manifests.of_kind("PodDisruptionBudget"):
        # A RayCluster has no scale, so Kubernetes only takes a number of pods that must stay.
        spec, labels = budget["spec"], pod_labels(workers["template"])
        is_of_nodes = spec["selector"]["matchLabels"].items() <= labels.items()
        if is_of_nodes and (spec.get("minAvailable") != nodes - 1 or "maxUnavailable" in spec):
            yield f"{label_of(budget)}: minAvailable is to be {nodes - 1}"


def _needed_of_a_node(deployment: Deployment, role: str) -> float:
    units = units_of(deployment, role)
    num_ranks = min(units.ranks, units.ranks_per_node)
    return num_ranks if deployment.device == "cuda" else num_ranks * units.threads


def memory_problems(manifests: Manifests, deployment: Deployment) -> Iterator[str]:
    """Yield memory limits that are too small. KV pools are in /dev/shm, which counts as pod memory."""
    resolved = _resolved(deployment)
    roles = zip(ROLES, ranks_in_fp32(resolved.deployment, resolved.config), strict=True)
    needed = OBJECT_STORE_BYTES + max(
        rank.kv_bytes
        * min(units_of(deployment, role).ranks, units_of(deployment, role).ranks_per_node)
        for role, rank in roles
    )
    spec = manifests.workers["template"]["spec"]
    (mount,) = (
        one for one in spec["containers"][0]["volumeMounts"] if one["mountPath"] == "/dev/shm"
    )
    (volume,) = (one["emptyDir"] for one in spec["volumes"] if one["name"] == mount["name"])
    size = quantity(volume["sizeLimit"])
    if volume["medium"] != "Memory" or size < needed:
        yield f"/dev/shm has {size / 1e9:.1f} GB of memory, and {needed / 1e9:.1f} GB are needed"
    limit = quantity(spec["containers"][0]["resources"]["limits"]["memory"])
    if limit <= size:
        yield "a node's limit of memory leaves nothing beside /dev/shm"
    if cache_mb := manifests.argument("cache-mb"):
        kept = int(cache_mb) * 2**20 * manifests.cells["spec"]["replicas"]
        sizes = {
            one["metadata"]["name"]: quantity(one["spec"]["resources"]["requests"]["storage"])
            for one in manifests.of_kind("PersistentVolumeClaim")
        }
        if kept > sizes.get("hadal-cache", 0):
            yield "the cells keep more on disk than the volume holds"


_resolved = cache(plan)


@cache
def _ray_start_options() -> set[str]:
    """Return the options of `ray start`, from its source: importing Ray takes far too long."""
    package = find_spec("ray")
    assert package is not None
    assert package.origin is not None
    source = (Path(package.origin).parent / "scripts" / "scripts.py").read_text(encoding="utf-8")
    return set(re.findall(r'"--([a-z-]+)"', source))


def ray_problems(manifests: Manifests, deployment: Deployment) -> Iterator[str]:
    """Yield differences between the setup of Ray and docs/cluster.md."""
    spec, workers = manifests.cluster["spec"], manifests.workers
    pin = re.search(r"^ray==(.*)$", (ROOT / "requirements.txt").read_text("utf-8"), re.MULTILINE)
    assert pin is not None
    if spec["rayVersion"] != pin[1]:
        yield f"rayVersion is {spec['rayVersion']}, and the image has {pin[1]}"
    if spec["authOptions"]["mode"] != "token":
        yield "whoever reaches a port of Ray may run code"
    if "gcsFaultToleranceOptions" not in spec and deployment.cluster.volatile_head == "refuse":
        yield "the head keeps nothing, which `hadal serve` refuses"
    if spec["headGroupSpec"]["rayStartParams"].get("num-cpus") != "0":
        yield "something may run beside the head"
    for group in (spec["headGroupSpec"], workers):
        if dict(ray_parameters(group)).get("object-store-memory") != str(OBJECT_STORE_BYTES):
            yield "Ray's object store takes the memory of the KV pools"
        if "labels" in group["rayStartParams"]:
            yield "KubeRay takes labels beside rayStartParams, not in it"
    head, node = spec["headGroupSpec"]["template"], workers["template"]
    for name, template, needed in (
        ("head", head, HEAD_ENVIRONMENT),
        ("workers", node, NODE_ENVIRONMENT),
    ):
        environment = environment_of(containers(template)[0])
        for variable, value in needed.items():
            if environment.get(variable) != value:
                yield f"{name}: {variable} is to be {value}"
    (sidecar,) = manifests.cells["spec"]["template"]["spec"]["initContainers"]
    given = {one.partition("=")[0].removeprefix("--") for one in sidecar["args"]}
    given |= spec["headGroupSpec"]["rayStartParams"].keys() | workers["rayStartParams"].keys()
    if sidecar["command"] != ["ray", "start"] or not given <= _ray_start_options():
        yield f"ray start has no {sorted(given - _ray_start_options())}"
    if sidecar.get("restartPolicy") != "Always":
        yield "a cell has no Ray node while it serves"
    if sidecar.get("env") != manifests.serve.get("env"):
        yield "a cell and its Ray node have not the same environment"
    if environment_of(sidecar).get("RAY_AUTH_MODE") != "token":
        yield "a cell does not prove itself to Ray"
    shared = {(one["name"], one["mountPath"]) for one in sidecar["volumeMounts"]}
    if not shared <= {(one["name"], one["mountPath"]) for one in manifests.serve["volumeMounts"]}:
        yield "a cell does not see the files of its Ray node"
    images = {one["image"] for one in found_containers(manifests) if "hadal" in one["image"]}
    if len(images) != 1:
        yield f"images differ: {sorted(images)}"


def secret_problems(manifests: Manifests, _: Deployment) -> Iterator[str]:
    """Yield secrets written into the file."""
    for secret in manifests.of_kind("Secret"):
        yield f"{label_of(secret)} is in the file"
    for container in found_containers(manifests):
        for variable in container.get("env", []):
            is_secret = re.search(r"PASS|TOKEN|SECRET|KEY|CLI_AUTH", variable["name"])
            if is_secret and "secretKeyRef" not in variable.get("valueFrom", {}):
                yield f"{variable['name']} stands in the file"
        if any(
            one.startswith(("--api-key=", "--redis-password")) for one in container.get("args", [])
        ):
            yield f"{container['name']}: a key stands among the arguments"


def network_problems(manifests: Manifests, _: Deployment) -> Iterator[str]:
    """Yield wrong network rules: only pods reach each other, but all may reach a cell's HTTP port."""
    for name, template in manifests.templates.items():
        labels = pod_labels(template)
        rules = [
            (rule, policy["spec"]["podSelector"]["matchLabels"])
            for policy in manifests.of_kind("NetworkPolicy")
            if policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
            for rule in policy["spec"]["ingress"]
        ]
        if not any("from" in rule for rule, _ in rules):
            yield f"{name}: every port is open to all"
        for rule, chosen in rules:
            if "from" in rule:
                peers = [one["podSelector"]["matchLabels"] for one in rule["from"]]
                if peers != [{"app": "hadal"}]:
                    yield f"{name}: {peers} are let in"
            elif chosen.get("part") != "cell" or [one["port"] for one in rule["ports"]] != [8000]:
                yield f"{name}: more than the gateway is open to all"
    served = [one for one in manifests.of_kind("Service") if "cell" in str(one["spec"]["selector"])]
    for service in served:
        labels = pod_labels(manifests.cells["spec"]["template"])
        if not service["spec"]["selector"].items() <= labels.items():
            yield f"{label_of(service)} chooses no cell"


CHECKS: tuple[Callable[[Manifests, Deployment], Iterator[str]], ...] = (
    reference_problems,
    user_problems,
    time_problems,
    probe_problems,
    deployment_problems,
    memory_problems,
    ray_problems,
    secret_problems,
    network_problems,
)


def problems(documents: list[Document], folder: Path) -> list[str]:
    """Return the problems of a file's documents; the schemas come first."""
    if wrong := list(schema_problems(documents)):
        return wrong
    manifests = Manifests(documents)
    if wrong := list(flag_problems(manifests)):
        return wrong
    (name,) = manifests.config["data"]
    if manifests.argument("config").rpartition("/")[2] != name:
        return [f"--config names no file of the ConfigMap, which has {name}"]
    path = folder / name
    path.write_text(manifests.config["data"][name], encoding="utf-8")
    model = manifests.argument("model")
    # Only config.json is needed here, not weights: DeepSeek-V3's serves for any model of its size.
    deployment = read_deployment(
        path, model=str(PUBLISHED.parent / "deepseek_v3") if model else None
    )
    return [text for check in CHECKS for text in check(manifests, deployment)]


def label_of(document: Document) -> str:
    return f"{document.get('kind')} {document.get('metadata', {}).get('name')}"


def found(value: Any, *names: str) -> Iterator[Any]:
    """Yield the values under these names, at any depth."""
    if isinstance(value, dict):
        for name, one in value.items():
            if name in names:
                yield one
            yield from found(one, *names)
    elif isinstance(value, list):
        for one in value:
            yield from found(one, *names)


def containers(template: Document) -> list[Document]:
    spec = template["spec"]
    return [*spec.get("initContainers", []), *spec["containers"]]


def found_containers(manifests: Manifests) -> Iterable[Document]:
    return [one for template in manifests.templates.values() for one in containers(template)]


def environment_of(container: Document) -> dict[str, str]:
    return {one["name"]: one.get("value", "") for one in container.get("env", [])}


def pod_labels(template: Document) -> dict[str, str]:
    labels: dict[str, str] = template["metadata"]["labels"]
    return labels


def ray_parameters(group: Document) -> Iterable[tuple[str, str]]:
    parameters: dict[str, str] = group["rayStartParams"]
    return parameters.items()


def quantity(text: str | int) -> float:
    """Return a quantity of Kubernetes as a number."""
    number, unit = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", str(text)).groups()  # type: ignore[union-attr]
    return float(number) * UNITS[unit]


def is_below(path: str, folder: str) -> bool:
    return f"{path}/".startswith(f"{folder}/")


@cache
def made_by_hand() -> frozenset[tuple[str, str, str]]:
    """Return namespace, name and key of the secrets that the page says to make."""
    page = PAGE.read_text(encoding="utf-8")
    pattern = r"kubectl -n (\S+) create secret generic (\S+) --from-(?:literal|file)=(\w+)="
    return frozenset(re.findall(pattern, page))


@cache
def _parsed(name: str) -> list[Document]:
    text = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    return list(yaml.safe_load_all(text))


def documents_of(name: str) -> list[Document]:
    return copy.deepcopy(_parsed(name))


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_sound(name: str, tmp_path: Path) -> None:
    assert problems(documents_of(name), tmp_path) == []


def test_the_published_units_are_those_of_configs() -> None:
    manifests = Manifests(documents_of("v3"))
    text = manifests.config["data"]["deployment.toml"]
    assert text.startswith(PUBLISHED.read_text(encoding="utf-8"))
    assert text.removeprefix(PUBLISHED.read_text(encoding="utf-8")).startswith("\n[cluster]\n")
    assert manifests.cells["spec"]["replicas"] > 1
    assert num_nodes(place_units(read_deployment(PUBLISHED))) == PUBLISHED_NODES


def test_the_page_names_every_file() -> None:
    page = PAGE.read_text(encoding="utf-8")
    left_out = [one.name for one in FOLDER.iterdir() if f"deploy/kuberay/{one.name}" not in page]
    assert FILES == ["trial", "v3"]
    assert left_out == []


GONE = object()
CLUSTER, CELLS = "RayCluster hadal", "StatefulSet hadal-cell"
TEMPLATE = "spec template spec"
SERVE = f"{TEMPLATE} containers 0"
NODES = "spec workerGroupSpecs 0"
NODE = f"{NODES} template spec"
MUTANTS: dict[str, tuple[str, str, Any, str]] = {
    "unknown field": (CLUSTER, "spec headGroupSpecs", {}, "is no field"),
    "unknown kind": ("Service hadal", "apiVersion", "v2", "no such kind"),
    "missing field": (CLUSTER, f"{NODES} groupName", GONE, "is missing"),
    "field deep down": (CLUSTER, f"{NODE} container", [], "is no field"),
    "number for text": (CELLS, f"{SERVE} args 2", 8000, "no str"),
    "text for number": (CELLS, "spec replicas", "2", "no int"),
    "group of hosts": (CLUSTER, f"{NODES} numOfHosts", 18, "numOfHosts"),
    "flag": (CELLS, f"{SERVE} args 1", "--modle=/models", "--modle"),
    "value": (CELLS, f"{SERVE} args 4", "--gateways=many", "--gateways"),
    "path": (CELLS, f"{SERVE} args 1", "--model=/model", "mounted"),
    "not on the nodes": (CLUSTER, f"{NODE} containers 0 volumeMounts 2", GONE, "as well"),
    "file": (CELLS, f"{SERVE} args 0", "--config=/etc/hadal/v3.toml", "no file"),
    "secret": (CELLS, f"{SERVE} env 2 valueFrom secretKeyRef key", "token", "nobody"),
    "keys": (CELLS, f"{TEMPLATE} volumes 3 secret secretName", "key", "no secret key"),
    "mode": (CELLS, f"{TEMPLATE} volumes 3 secret defaultMode", 0o444, "others"),
    "fsGroup": (CELLS, f"{TEMPLATE} securityContext fsGroup", 1, "without fsGroup"),
    "root": (CELLS, f"{TEMPLATE} securityContext runAsNonRoot", GONE, "as root"),
    "root node": (CLUSTER, f"{NODE} containers 0 securityContext capabilities", GONE, "as root"),
    "configMap": ("ConfigMap hadal", "metadata name", "other", "no configMap"),
    "namespace": ("Service hadal", "metadata namespace", "default", "in namespace"),
    "claim": ("PersistentVolumeClaim hadal-cache", "metadata name", "kv", "persistentVolumeClaim"),
    "priority": ("PriorityClass hadal-serving", "metadata name", "low", "no PriorityClass"),
    "grace": (CELLS, f"{TEMPLATE} terminationGracePeriodSeconds", 120, "needed"),
    "grace of a node": (CLUSTER, f"{NODE} terminationGracePeriodSeconds", 10, "needed"),
    "no preStop": (CELLS, f"{SERVE} lifecycle", GONE, "refuses connections"),
    "page": (CELLS, f"{SERVE} readinessProbe httpGet path", "/ready", "no page"),
    "no probe": (CLUSTER, f"{NODE} containers 0 livenessProbe", GONE, "no livenessProbe"),
    "port": (CLUSTER, f"{NODES} rayStartParams node-manager-port", "6381", "does not listen"),
    "live by health": (CELLS, f"{SERVE} livenessProbe httpGet path", "/health", "killed"),
    "label": (CLUSTER, f"{NODES} labels", {"hadal": "cpu"}, "cluster.label"),
    "head": (CLUSTER, "metadata name", "ray", "cluster.address"),
    "gpus": (CLUSTER, f"{NODE} containers 0 resources limits nvidia.com/gpu", 4, "ranks need"),
    "nodes": (CLUSTER, f"{NODES} maxReplicas", 59, "cells need 60"),
    "budget": (
        "PodDisruptionBudget hadal-node",
        "spec",
        {"maxUnavailable": 1, "selector": {"matchLabels": {"part": "node"}}},
        "minAvailable",
    ),
    "shm": (CLUSTER, f"{NODE} volumes 0 emptyDir sizeLimit", "64Gi", "/dev/shm"),
    "memory": (CLUSTER, f"{NODE} containers 0 resources limits memory", "700Gi", "limit"),
    "cache": (CELLS, f"{SERVE} args 6", "--cache-mb=90000000", "on disk"),
    "version of Ray": (CLUSTER, "spec rayVersion", "2.59.0", "rayVersion"),
    "no token": (CLUSTER, "spec authOptions mode", "disabled", "run code"),
    "no storage": (CLUSTER, "spec gcsFaultToleranceOptions", GONE, "refuses"),
    "work on the head": (CLUSTER, "spec headGroupSpec rayStartParams num-cpus", "4", "beside"),
    "object store": (CLUSTER, f"{NODES} rayStartParams object-store-memory", GONE, "object store"),
    "niceness": (CLUSTER, f"{NODE} containers 0 env 1", GONE, "niceness"),
    "health checks": (
        CLUSTER,
        "spec headGroupSpec template spec containers 0 env 1 value",
        "100",
        "1000",
    ),
    "flag of Ray": (CLUSTER, f"{NODES} rayStartParams num-cores", "2", "num-cores"),
    "sidecar": (CELLS, f"{TEMPLATE} initContainers 0 restartPolicy", GONE, "no Ray node"),
    "image": (CELLS, f"{SERVE} image", "registry.example/hadal:0.0.9", "images"),
    "password": (
        CLUSTER,
        "spec gcsFaultToleranceOptions redisPassword",
        {"value": "x"},
        "is no field",
    ),
    "token in clear": (
        CELLS,
        f"{SERVE} env 2",
        {"name": "RAY_AUTH_TOKEN", "value": "x"},
        "stands in",
    ),
    "key in clear": (CELLS, f"{SERVE} args 3", "--api-key=sk-1", "among the arguments"),
    "open": (
        "NetworkPolicy hadal-cell",
        "spec ingress",
        [{"ports": [{"port": 6379}]}],
        "more than",
    ),
    "open to all": (
        "NetworkPolicy hadal",
        "spec podSelector matchLabels",
        {"app": "other"},
        "every port",
    ),
    "service": ("Service hadal", "spec selector app", "other", "chooses no cell"),
}
"""Name of a mutation -> document, path in it, new value, and a word of the expected problem."""


def mutated(documents: list[Document], document: str, path: str, value: Any) -> None:
    """Put another value at the path within the named document; GONE removes the value there."""
    (place,) = (one for one in documents if label_of(one) == document)
    *steps, last = [int(step) if step.isdecimal() else step for step in path.split()]
    for step in steps:
        place = place[step]
    if value is GONE:
        del place[last]
    else:
        place[last] = value


@pytest.mark.parametrize("case", MUTANTS)
def test_a_mutated_file_is_not_sound(case: str, tmp_path: Path) -> None:
    document, path, value, word = MUTANTS[case]
    documents = documents_of("v3")
    mutated(documents, document, path, value)
    found_now = problems(documents, tmp_path)
    assert any(word in text for text in found_now), found_now
