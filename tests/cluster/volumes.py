"""PersistentVolumes: a folder of this machine for each claim, the same on every node, made and removed at once."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from cluster.client import Client

CLASS = "local"
PROVISIONER = "finetune.local/folder"
FOLDER = "finetune.local/folder"
COLLECTION = "/api/v1/persistentvolumes"


def storage_class() -> dict[str, Any]:
    """The default StorageClass: any access mode, for the folder is on one machine."""
    return {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": CLASS, "annotations": {"storageclass.kubernetes.io/is-default-class": "true"}},
        "provisioner": PROVISIONER,
        "reclaimPolicy": "Delete",
        "volumeBindingMode": "Immediate",
    }


class Provisioner:
    """Creates a volume for each claim, and removes the volumes of deleted claims."""

    def __init__(self, client: Client, directory: Path) -> None:
        self.client = client
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def install(self) -> None:
        """Announce the StorageClass."""
        self.client.apply(f"/apis/storage.k8s.io/v1/storageclasses/{CLASS}", storage_class())

    def step(self) -> None:
        """Look once at all claims and volumes, and do what is to be done."""
        claims = self.client.get("/api/v1/persistentvolumeclaims")
        volumes = self.client.get(COLLECTION)
        if claims is None or volumes is None:
            return
        volume_names = {volume["metadata"]["name"] for volume in volumes["items"]}
        for claim in claims["items"]:
            volume = volume_for(claim, self.directory)
            if volume is not None and volume["metadata"]["name"] not in volume_names:
                folder = self.directory / volume["metadata"]["name"]
                folder.mkdir(exist_ok=True)
                # NB: pods that are not root write here, and fsGroup does nothing to folders of the machine.
                folder.chmod(0o777)
                self.client.call("POST", COLLECTION, volume)
        for volume in volumes["items"]:
            name = volume["metadata"]["name"]
            ours = FOLDER in (volume["metadata"].get("annotations") or {})
            if ours and volume.get("status", {}).get("phase") in {"Released", "Failed"}:
                self.client.call("DELETE", f"{COLLECTION}/{name}")
                shutil.rmtree(self.directory / name, ignore_errors=True)


def volume_for(claim: dict[str, Any], directory: Path) -> dict[str, Any] | None:
    """The volume a claim waits for, if it is ours to give."""
    spec, metadata = claim["spec"], claim["metadata"]
    waits = claim.get("status", {}).get("phase", "Pending") == "Pending" and not metadata.get(
        "deletionTimestamp"
    )
    if not waits or spec.get("volumeName") or spec.get("storageClassName") not in {CLASS, ""}:
        return None
    name = f"folder-{metadata['uid']}"
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name, "annotations": {FOLDER: f"{metadata['namespace']}/{metadata['name']}"}},
        "spec": {
            "capacity": {"storage": spec["resources"]["requests"]["storage"]},
            "accessModes": spec["accessModes"],
            "storageClassName": spec["storageClassName"],
            # NB: with Delete the controllers would wait for a driver to remove it; we are the driver.
            "persistentVolumeReclaimPolicy": "Retain",
            "hostPath": {"path": str(directory / name), "type": "Directory"},
            "claimRef": {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "namespace": metadata["namespace"],
                "name": metadata["name"],
                "uid": metadata["uid"],
            },
        },
    }
