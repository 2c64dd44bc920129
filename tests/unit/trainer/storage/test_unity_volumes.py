"""The file system of Unity Catalog's volumes, against the stand-in workspace."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from databricks.sdk.config import Config

from finetune_crds.recipe import JobReference
from finetune_trainer.models import download
from finetune_trainer.models.output_folder import ModelFolder
from finetune_trainer.pod.exit_status import PodFailure
from finetune_trainer.storage import filesystems, unity_volumes
from finetune_trainer.storage.unity_volumes import VolumesFileSystem
from finetune_trainer.train.checkpoint.folder import CheckpointFolder, Marker, Save
from fixtures.fake_databricks import Fault, Workspace, running

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

VOLUME = "/Volumes/main/llm/work"
MISSING = "/Volumes/main/llm/nowhere"
MINE = JobReference(name="support", namespace="team", uid="0001")


@pytest.fixture(scope="module")
def server() -> Iterator[Workspace]:
    with running() as state:
        state.files.volumes.add(VOLUME)
        yield state


@pytest.fixture
def workspace(server: Workspace, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    for name, value in server.secret.items():
        monkeypatch.setenv(name, value)
    server.denied.clear()
    server.faults.clear()
    unity_volumes._create_client.cache_clear()
    return server


def folder(files: VolumesFileSystem, name: str, contents: dict[str, bytes]) -> str:
    root = f"{VOLUME}/{name}"
    files.makedirs(f"{root}/sub")
    for file, content in contents.items():
        files.pipe_file(f"{root}/{file}", content)
    return root


def test_files_and_folders(workspace: Workspace, tmp_path: Path) -> None:
    files, path = filesystems.open_filesystem(f"{VOLUME}/files")
    assert (type(files), path) == (VolumesFileSystem, f"{VOLUME}/files")
    workspace.files.page_size = 2
    contents = {"a": b"1", "b": b"22", "c d": b"333", "sub/e": b""}
    root = folder(files, "files", contents)
    assert [(entry["name"], entry["size"], entry["type"]) for entry in files.ls(root)] == [
        (f"{root}/a", 1, "file"),
        (f"{root}/b", 2, "file"),
        (f"{root}/c d", 3, "file"),
        (f"{root}/sub", 0, "directory"),
    ]
    assert files.find(root) == [f"{root}/{name}" for name in contents]
    assert files.ls(f"{root}/b", detail=False) == [f"{root}/b"]
    assert {name: files.cat_file(f"{root}/{name}") for name in contents} == contents
    # A file that is there is replaced, moved, downloaded and deleted.
    files.pipe_file(f"{root}/a", b"new")
    files.mv(f"{root}/a", f"{root}/moved")
    files.get_file(f"{root}/moved", str(tmp_path / "moved"))
    assert (tmp_path / "moved").read_bytes() == b"new"
    there = ("", "a", "moved", "sub", "sub/e", "nothing")
    assert [files.exists(f"{root}/{name}") for name in there] == [True, False, True, True, True, False]
    files.rm(root, recursive=True)
    assert not files.exists(root)


def test_a_file_is_written_whole_or_not_at_all(workspace: Workspace, tmp_path: Path) -> None:
    files = VolumesFileSystem()
    root = folder(files, "whole", {})
    with suppress(ZeroDivisionError), files.open(f"{root}/half", "wb") as file:
        file.write(b"half")
        raise ZeroDivisionError
    with files.open(f"{root}/whole", "wb") as file:
        file.write(b"?hole")
        file.seek(0)
        file.write(b"w")
        assert not files.exists(f"{root}/whole")
    with files.open(f"{root}/whole") as file:
        file.seek(1)
        assert file.read() == b"hole"
    assert files.find(root) == [f"{root}/whole"]


def test_a_large_file_goes_in_parts(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = VolumesFileSystem()
    root = folder(files, "large", {})
    monkeypatch.setattr(Config, "files_ext_multipart_upload_min_stream_size", 1000)
    monkeypatch.setattr(Config, "files_ext_multipart_upload_part_size_options", [1000])
    monkeypatch.setattr(workspace.files, "limit", 1000)
    content = bytes(range(256)) * 10
    (tmp_path / "large").write_bytes(content)
    files.put_file(str(tmp_path / "large"), f"{root}/large")
    assert files.cat_file(f"{root}/large") == content


def failure(call: Callable[[], object]) -> tuple[str, str]:
    with pytest.raises((OSError, PodFailure)) as caught:
        call()
    error = caught.value
    return (
        (error.reason, error.message) if isinstance(error, PodFailure) else (type(error).__name__, str(error))
    )


GRANT = (
    "the pod's credentials have no access to {path}: grant these credentials READ VOLUME and WRITE VOLUME on main.llm.work, and USE CATALOG and "
    "USE SCHEMA above it"
)


def test_what_a_workspace_refuses_is_one_sentence(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = VolumesFileSystem()
    own_folder, missing = f"{VOLUME}/tiny", f"{MISSING}/tiny"
    calls: tuple[Callable[[], object], ...] = (
        lambda: files.cat_file(f"{own_folder}/a"),
        lambda: files.makedirs(own_folder, exist_ok=True),
        lambda: download.fetch(own_folder, tmp_path / "to"),
        ModelFolder(own_folder, MINE, 1).claim,
        # NB: a refusal that reads like no checkpoint would begin the run again.
        lambda: files.exists(own_folder),
        CheckpointFolder(own_folder).list_complete_steps,
    )
    assert [
        failure(lambda: files.makedirs(missing, exist_ok=True)),
        failure(lambda: download.fetch(missing, tmp_path / "to")),
        failure(ModelFolder(missing, MINE, 1).claim),
    ] == [
        (
            "FileNotFoundError",
            f"{missing} cannot be created: create the volume main.llm.nowhere, or correct the path",
        ),
        ("ModelNotFound", f"model.base {missing} does not exist: correct the volume or the folder"),
        (
            "OutputNotFound",
            f"output.uri {missing} does not exist: create the volume, or correct output.uri",
        ),
    ]
    workspace.denied |= {f"{method} /api/2.0/fs/" for method in ("GET", "HEAD", "PUT", "POST")}
    refused = [
        (
            "ModelForbidden",
            f"model.base {own_folder} cannot be read with the pod's credentials: grant these credentials access",
        ),
        (
            "OutputForbidden",
            f"output.uri {own_folder} cannot be written with the pod's credentials: grant these credentials access",
        ),
    ]
    assert [failure(call) for call in calls] == [
        ("PermissionError", GRANT.format(path=f"{own_folder}/a")),
        ("PermissionError", GRANT.format(path=own_folder)),
        *refused,
        ("PermissionError", GRANT.format(path=own_folder)),
        ("PermissionError", GRANT.format(path=own_folder)),
    ]
    monkeypatch.setenv("DATABRICKS_TOKEN", "dapi-wrong")
    sentences = [failure(call) for call in calls]
    renew = "Databricks rejected the pod's credentials for {}: renew the Secret of tracking"
    assert sentences == [
        ("PermissionError", renew.format(f"{own_folder}/a")),
        ("PermissionError", renew.format(own_folder)),
        *refused,
        ("PermissionError", renew.format(own_folder)),
        ("PermissionError", renew.format(own_folder)),
    ]
    monkeypatch.delenv("DATABRICKS_TOKEN")
    monkeypatch.setenv("DATABRICKS_CLIENT_ID", "principal")
    monkeypatch.setenv("DATABRICKS_CLIENT_SECRET", "wrong")
    kind, message = failure(calls[0])
    assert (kind, message) == (
        "PermissionError",
        f"the login to Databricks for {own_folder}/a failed: invalid_client: Client authentication failed",
    )


def test_an_answer_that_is_not_of_the_workspace_is_reported_by_its_status(workspace: Workspace) -> None:
    workspace.faults.append(Fault(503, "busy", path="/api/2.0/fs/"))
    folder = f"{VOLUME}/tiny"
    assert failure(lambda: VolumesFileSystem().ls(folder)) == (
        "OSError",
        f"{folder}: the workspace answered with HTTP status 503",
    )


TOKENS, DISCOVERY = "/oidc/v1/token", "/oidc/.well-known"
REFUSED = {"error": "invalid_client", "error_description": "Client authentication failed"}
UNREADABLE, UNWRITABLE = (1, "ModelUnreadable"), (1, "OutputUnwritable")
FORBIDDEN = [(64, "ModelForbidden"), (64, "OutputForbidden")]
# What the server of logins answers to a service principal, and how a model and a folder of a model end then.
LOGIN_FAULTS: dict[str, tuple[Fault, list[tuple[int, str]]]] = {
    "away": (Fault(503, "<html>busy</html>", path=TOKENS), [UNREADABLE, UNWRITABLE]),
    "too many logins": (
        Fault(429, {"error": "temporarily_unavailable"}, path=TOKENS),
        [UNREADABLE, UNWRITABLE],
    ),
    "no token in the answer": (Fault(200, {"status": "soon"}, path=TOKENS), [UNREADABLE, UNWRITABLE]),
    "no discovery": (Fault(500, path="/.well-known/databricks-config"), [UNREADABLE, UNWRITABLE]),
    "no endpoints": (Fault(500, path=DISCOVERY), [UNREADABLE, UNWRITABLE]),
    "refused": (Fault(401, REFUSED, path=TOKENS), FORBIDDEN),
    "refused scope": (Fault(400, {"error": "invalid_scope"}, path=TOKENS), FORBIDDEN),
}


@pytest.fixture
def as_principal(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    monkeypatch.delenv("DATABRICKS_TOKEN")
    monkeypatch.setenv("DATABRICKS_CLIENT_ID", "principal")
    monkeypatch.setenv("DATABRICKS_CLIENT_SECRET", "principal-secret")
    return workspace


@pytest.mark.parametrize(("fault", "ends"), LOGIN_FAULTS.values(), ids=LOGIN_FAULTS)
def test_a_server_of_logins_that_is_away_is_asked_again_by_the_next_attempt(
    as_principal: Workspace, tmp_path: Path, fault: Fault, ends: list[tuple[int, str]]
) -> None:
    as_principal.faults.append(replace(fault))
    sentences = []
    for call in (lambda: download.fetch(f"{VOLUME}/a", tmp_path), ModelFolder(f"{VOLUME}/a", MINE, 1).claim):
        with pytest.raises(PodFailure) as caught:
            call()
        sentences.append((caught.value.exit_code, caught.value.reason))
    assert sentences == ends


def test_a_login_that_is_not_renewed_stops_no_training(as_principal: Workspace, tmp_path: Path) -> None:
    files = VolumesFileSystem()
    short = {"access_token": "dapi-good", "token_type": "Bearer", "expires_in": 0}
    as_principal.faults.append(Fault(200, short, path=TOKENS))
    assert not files.exists(f"{VOLUME}/nothing")
    # The client is the same, and its login has expired.
    as_principal.faults[:] = [
        Fault(503, {"error_code": "TEMPORARILY_UNAVAILABLE"}, path=TOKENS, times=1),
        Fault(401, REFUSED, path=TOKENS, times=1),
    ]
    ended = [failure(lambda: files.pipe_file(f"{VOLUME}/shard", b"weights")) for _ in range(2)]
    assert [kind for kind, _ in ended] == ["OSError", "PermissionError"]
    files.pipe_file(f"{VOLUME}/shard", b"weights")
    assert files.cat_file(f"{VOLUME}/shard") == b"weights"


def test_an_upload_in_parts_that_fails_is_tried_again(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = VolumesFileSystem()
    root = folder(files, "parts", {})
    monkeypatch.setattr(Config, "files_ext_multipart_upload_min_stream_size", 1000)
    monkeypatch.setattr(Config, "files_ext_multipart_upload_part_size_options", [1000])
    (tmp_path / "large").write_bytes(bytes(2000))
    # An answer without a session.
    workspace.faults.append(Fault(200, {"neither": {}}, "POST", f"/api/2.0/fs/files{root}", times=1))
    sentence = failure(lambda: files.put_file(str(tmp_path / "large"), f"{root}/large"))
    assert sentence == ("OSError", f"{root}/large: Unexpected server response: {{'neither': {{}}}}")


def test_without_a_login(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("DATABRICKS_HOST", "DATABRICKS_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    # Not that of the person who runs this test.
    monkeypatch.setenv("DATABRICKS_CONFIG_FILE", str(tmp_path / "none"))
    assert failure(lambda: download.fetch(VOLUME, tmp_path)) == (
        "ModelForbidden",
        f"model.base {VOLUME} requires credentials, but the environment has none: set tracking.uri to databricks, or "
        "DATABRICKS_HOST and DATABRICKS_TOKEN, in a pod by envFrom",
    )
    assert failure(lambda: CheckpointFolder(VOLUME).list_saves())[1] == (
        "a volume of Unity Catalog requires credentials for its workspace: set tracking.uri to databricks"
    )


def test_a_checkpoint_is_found_by_its_marker(workspace: Workspace) -> None:
    place = CheckpointFolder(f"{VOLUME}/checkpoints")
    assert place.list_saves() == []
    files = VolumesFileSystem()
    saves = [Save(place.uri, step, "attempt-1-0f3a") for step in (2, 4)]
    for save in saves:
        files.makedirs(save.uri)
        files.pipe_file(f"{save.uri}/shard", b"weights")
    place.publish(saves[0], Marker({"step": 2}, {}), place.list_sizes(saves[0]))
    assert (place.list_saves(), place.list_complete_steps(), place.read(2)) == (
        saves,
        [2],
        (Marker({"step": 2}, {}), saves[0]),
    )
    place.remove(saves[:1])
    assert place.list_saves() == saves[1:]
    assert files.ls(place.uri, detail=False) == [f"{place.uri}/step-00000004"]


def test_a_model_that_is_written_again_has_nothing_of_the_earlier_one(
    workspace: Workspace, tmp_path: Path
) -> None:
    place = f"{VOLUME}/again"
    (tmp_path / "config.json").write_text("{}")
    for attempt, parts in enumerate(({"": tmp_path, "base": tmp_path}, {"": tmp_path}), start=1):
        to = ModelFolder(place, MINE, attempt)
        to.claim()
        to.publish(parts)
    assert VolumesFileSystem().find(place) == [f"{place}/config.json", f"{place}/finetune_model.json"]


def test_a_mounted_folder_stays_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    mounted = {VOLUME}
    monkeypatch.setattr("pathlib.Path.is_dir", lambda path: str(path) in mounted)
    assert [filesystems.is_in_unity_catalog(path) for path in (f"{VOLUME}/a", f"{MISSING}/a", "/models")] == [
        False,
        True,
        False,
    ]
