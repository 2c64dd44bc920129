"""The Kubernetes API as this operator uses it: plain JSON, server-side apply, deletion by uid.

The generated model classes are not used: filling them takes longer than the requests, and drops unknown fields.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self
from urllib.parse import quote, urlencode

import aiohttp
from kubernetes.aio import client, config

from finetune_crds.base import GROUP, VERSION, Json
from finetune_operator import metrics, names, shallow_json
from finetune_operator.fence import PROCESS_FENCE, READING_METHODS, Fence, NotLeaderError
from finetune_operator.proxy import find_proxy

_TIMEOUT_SECONDS = 30
_MAX_RETRY_AFTER_SECONDS = 60
# NB: the response to one request is in memory as a whole. 100 training pods are about 6 MiB of Python objects.
_PAGE_OBJECTS = 100
# How much of a response that is not JSON a message quotes.
_MAX_QUOTED_CHARS = 500
JSON_TYPE = "application/json"
_METADATA_TYPE = f"{JSON_TYPE};as=PartialObjectMetadataList;v=v1;g=meta.k8s.io"
JSON_PATCH_TYPE = "application/json-patch+json"
APPLY_TYPE = "application/apply-patch+yaml"

# kind -> (path before the namespace, plural)
RESOURCES = {
    "FineTuneJob": (f"/apis/{GROUP}/{VERSION}", "finetunejobs"),
    "ModelPromotion": (f"/apis/{GROUP}/{VERSION}", "modelpromotions"),
    "FineTuneSchedule": (f"/apis/{GROUP}/{VERSION}", "finetuneschedules"),
    "Job": ("/apis/batch/v1", "jobs"),
    "Pod": ("/api/v1", "pods"),
    "Service": ("/api/v1", "services"),
    "ConfigMap": ("/api/v1", "configmaps"),
    "NetworkPolicy": ("/apis/networking.k8s.io/v1", "networkpolicies"),
    "Secret": ("/api/v1", "secrets"),
    "Event": ("/api/v1", "events"),
    "Lease": ("/apis/coordination.k8s.io/v1", "leases"),
    "Node": ("/api/v1", "nodes"),
    "Namespace": ("/api/v1", "namespaces"),
    "LocalSubjectAccessReview": ("/apis/authorization.k8s.io/v1", "localsubjectaccessreviews"),
    "SparkApplication": ("/apis/sparkoperator.k8s.io/v1beta2", "sparkapplications"),
    # Kueue's kinds; v1beta1 is for versions of Kueue that do not serve v1beta2.
    "Workload": ("/apis/kueue.x-k8s.io/v1beta2", "workloads"),
    "WorkloadBeta1": ("/apis/kueue.x-k8s.io/v1beta1", "workloads"),
    "LocalQueue": ("/apis/kueue.x-k8s.io/v1beta2", "localqueues"),
    "LocalQueueBeta1": ("/apis/kueue.x-k8s.io/v1beta1", "localqueues"),
    "QueueVisibility": ("/apis/visibility.kueue.x-k8s.io/v1beta1", "localqueues"),
}


class KubeError(Exception):
    """The API server refused a request, or could not be reached (`status` 0).

    Attributes:
        status: the HTTP status; 0 without a response.
        reason: the API server's reason in one word, such as AlreadyExists; may be empty.
        retry_after_seconds: how long the API server asks to wait before the next request; 0 if it does not.
    """

    def __init__(self, status: int, message: str, reason: str = "", retry_after_seconds: float = 0.0) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.retry_after_seconds = retry_after_seconds


class NoClusterError(Exception):
    """The process runs in no pod, and its kubeconfig names no cluster."""


class Listing(NamedTuple):
    """The objects of a list, and the resource version of the list."""

    objects: list[Json]
    version: int


class Created(NamedTuple):
    """An object, and whether this request created it; otherwise it existed before."""

    body: Json
    is_new: bool


class Kube:
    """A client for one API server. Use it as an asynchronous context manager.

    Args:
        fence: refuses writes while this replica does not hold the Lease of the operator.
        timeout_seconds: the longest duration of a request.
    """

    def __init__(self, fence: Fence = PROCESS_FENCE, timeout_seconds: float = _TIMEOUT_SECONDS) -> None:
        self._fence = fence
        self._timeout_seconds = timeout_seconds
        self._api: client.ApiClient | None = None

    async def __aenter__(self) -> Self:
        try:
            config.load_incluster_config()
        except config.ConfigException:
            await _load_kubeconfig()
        configuration = client.Configuration.get_default_copy()
        # NB: with trust_env, aiohttp reads the proxies and .netrc in threads, for each request.
        configuration.client_session_kwargs = {
            "trust_env": False,
            "cookie_jar": aiohttp.DummyCookieJar(),
            "trace_configs": [self._fence.build_trace()],
        }
        configuration.proxy = configuration.proxy or find_proxy(configuration.host)
        self._api = client.ApiClient(configuration)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._api:
            await self._api.close()

    async def get(self, kind: str, namespace: str, name: str, *, subresource: str = "") -> Json | None:
        """An object or its subresource; None if it does not exist. For a cluster-scoped object, `namespace` is empty."""
        try:
            return await self._request("GET", build_path(kind, namespace, name, subresource))
        except KubeError as error:
            if error.status == 404:
                return None
            raise

    async def list(
        self,
        kind: str,
        namespace: str | None,
        *,
        metadata_only: bool = False,
        project: Callable[[Json], Json] | None = None,
        **selectors: str,
    ) -> Listing:
        """All objects of a kind, read page by page.

        Args:
            namespace: None for all namespaces, and for kinds that are cluster-scoped.
            metadata_only: let the API server leave out everything but the metadata of the objects.
            project: returns what to keep of an object. It is called page by page, so that only one page is in memory as a whole.
            selectors: labelSelector and fieldSelector.
        """
        objects: list[Json] = []
        token = ""
        while True:
            query = {"limit": str(_PAGE_OBJECTS), **selectors, **({"continue": token} if token else {})}
            accepted_type = _METADATA_TYPE if metadata_only else JSON_TYPE
            page = await self._request(
                "GET",
                build_path(kind, namespace),
                query=query,
                accepted_type=accepted_type,
                levels_above=shallow_json.LEVELS_ABOVE_ITEMS,
            )
            # NB: the items of a list contain neither kind nor apiVersion. In an empty list of metadata, `items` is null.
            items = page["items"] or []
            objects += map(project, items) if project else items
            token = page["metadata"].get("continue", "")
            if not token:
                return Listing(objects, int(page["metadata"].get("resourceVersion") or 0))

    async def create(self, body: Json, *, dry_run: bool = False) -> Json:
        """Create an object, and return it; KubeError 409 if it exists, 400 if the API server does not know one of its fields.

        Args:
            dry_run: only let the API server check the object, with defaults, quotas and admission.
        """
        kind, namespace = body["kind"], body["metadata"]["namespace"]
        query = {
            "fieldManager": names.FIELD_MANAGER,
            "fieldValidation": "Strict",
            **({"dryRun": "All"} if dry_run else {}),
        }
        return await self._request("POST", build_path(kind, namespace), query=query, body=body)

    async def create_or_get(self, body: Json) -> Created:
        """Create an object, or return the existing one of this name, which may belong to somebody else."""
        kind, name = body["kind"], body["metadata"]["name"]
        try:
            return Created(await self.create(body), is_new=True)
        except KubeError as error:
            # NB: not the status 409, which the API server also answers if a ResourceQuota changes meanwhile.
            if error.reason != "AlreadyExists":
                raise
            existing = await self.get(kind, body["metadata"]["namespace"], name)
            if existing is None:
                raise KubeError(409, f"{kind} {name} no longer exists: retrying") from error
            return Created(existing, is_new=False)

    async def apply(self, body: Json, *, subresource: str = "") -> Json:
        """Server-side apply: set the fields in `body`, take over their ownership, and return the object.

        A uid and a resource version in the metadata are preconditions: KubeError 409 if they no longer hold.
        """
        meta = body["metadata"]
        target = build_path(body["kind"], meta["namespace"], meta["name"], subresource)
        query = {"fieldManager": names.FIELD_MANAGER, "force": "true"}
        return await self._request("PATCH", target, query=query, body=body, content_type=APPLY_TYPE)

    async def set_spec(self, kind: str, namespace: str, name: str, uid: str, fields: Json) -> Json:
        """Replace whole fields of an object's spec, and return the object; KubeError 409 if the object has another uid.

        NB: server-side apply would only add to a field that was set when the object was created.
        """
        # A uid that the object does not have is a conflict.
        operations = [{"op": "replace", "path": "/metadata/uid", "value": uid}]
        operations += [{"op": "add", "path": f"/spec/{field}", "value": fields[field]} for field in fields]
        target, query = build_path(kind, namespace, name), {"fieldManager": names.FIELD_MANAGER}
        return await self._request(
            "PATCH", target, query=query, body=operations, content_type=JSON_PATCH_TYPE
        )

    async def delete(
        self, kind: str, namespace: str, name: str, uid: str, version: str = "", *, foreground: bool = False
    ) -> None:
        """Delete an object and its dependents. Does nothing if the object does not exist, or has another uid or version.

        Args:
            version: the resource version that the object must have; empty for any.
            foreground: keep the object until its dependents are deleted.
        """
        preconditions = {"uid": uid} | ({"resourceVersion": version} if version else {})
        policy = "Foreground" if foreground else "Background"
        body = {"propagationPolicy": policy, "preconditions": preconditions}
        try:
            await self._request("DELETE", build_path(kind, namespace, name), body=body)
        except KubeError as error:
            if error.status not in (404, 409):
                raise

    async def _request(
        self,
        method: str,
        target: str,
        *,
        query: dict[str, str] | None = None,
        body: Json | Sequence[Json] | None = None,
        content_type: str = JSON_TYPE,
        accepted_type: str = JSON_TYPE,
        levels_above: int = 0,
    ) -> Json:
        """Send a request, and return the JSON of the response, without what is nested too deeply.

        Args:
            levels_above: levels of the response around each object.

        Raises:
            KubeError: the fence is closed, the API server cannot be reached, or it refuses the request.
        """
        if self._api is None:
            raise RuntimeError("Kube is used outside of `async with`")
        headers: dict[str, Any] = {"Accept": accepted_type, "Content-Type": content_type}
        await self._api.update_params_for_auth(headers, [], ["BearerToken"], target, method, body)
        try:
            async with self._fence.limit(method, self._timeout_seconds) as timeout_seconds:
                if method not in READING_METHODS:
                    # With this parameter, the API server ends the request too, and does not carry out the write later.
                    query = {**(query or {}), "timeout": f"{timeout_seconds:.3f}s"}
                url = self._api.configuration.host + target + (f"?{urlencode(query)}" if query else "")
                with metrics.measuring_request("Kubernetes") as sent:
                    response = await self._api.rest_client.request(method, url, headers=headers, body=body)
                    text = await response.read()
                    sent.status = response.status
        except NotLeaderError as error:
            raise KubeError(0, str(error)) from error
        except TimeoutError as error:
            raise KubeError(
                0, f"the API server cannot be reached: no response within {round(timeout_seconds, 1):g} s"
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise KubeError(
                0, f"the API server cannot be reached: {str(error) or type(error).__name__}"
            ) from error
        if response.status >= 300:
            raise _parse_error(response.status, text, response.headers.get("Retry-After", ""))
        try:
            return dict(shallow_json.parse(text, levels_above=levels_above))
        except ValueError as error:
            quoted = text.decode(errors="replace")[:_MAX_QUOTED_CHARS]
            raise KubeError(
                response.status, f"the response of the API server is not JSON: {quoted}"
            ) from error


async def _load_kubeconfig() -> None:
    try:
        await config.load_kube_config()
    except config.ConfigException as error:
        raise NoClusterError(
            f"no cluster is configured: run the operator in a pod, or set KUBECONFIG ({error})"
        ) from None


def build_path(kind: str, namespace: str | None, name: str = "", subresource: str = "") -> str:
    """The path of an object, or of all objects of a kind.

    Raises:
        KubeError: the object name is not valid (400).
    """
    base, plural = RESOURCES[kind]
    scope = f"/namespaces/{quote(namespace)}" if namespace else ""
    # NB: users choose names. A name like ../../other/secrets/theirs would lead out of their namespace.
    if "/" in name or name in (".", ".."):
        raise KubeError(400, f"{kind} {name}: this object name is not valid")
    parts = "".join(f"/{quote(part)}" for part in (name, subresource) if part)
    return f"{base}{scope}/{plural}{parts}"


def _parse_error(status: int, text: bytes, retry_after: str) -> KubeError:
    # NB: the API server sends seconds; a proxy in front of it may send a date, or any number.
    seconds = min(float(retry_after), _MAX_RETRY_AFTER_SECONDS) if retry_after.isdecimal() else 0.0
    try:
        body = shallow_json.parse(text)
    except ValueError:
        body = None
    if isinstance(body, dict):
        return KubeError(status, body.get("message", ""), body.get("reason", ""), seconds)
    return KubeError(status, text.decode(errors="replace")[:_MAX_QUOTED_CHARS], retry_after_seconds=seconds)
