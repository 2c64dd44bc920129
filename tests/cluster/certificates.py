"""One certificate authority for a cluster, the certificates it signs, and the kubeconfigs that hold them."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.process import run

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

DAYS = "3650"
CONFIGURATION = "[req]\ndistinguished_name = name\n[name]\n"


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, as files."""

    certificate: Path
    key: Path


class Authority:
    """Signs certificates for servers and clients; created when its folder is empty."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._configuration = directory / "openssl.cnf"
        self._configuration.write_text(CONFIGURATION)
        self.own = Pair(directory / "ca.crt", directory / "ca.key")
        if not self.own.certificate.exists():
            self._request(self.own, "/CN=finetune-test-ca", "basicConstraints=critical,CA:TRUE")

    def issue(self, name: str, user: str, group: str | None = None, hosts: Sequence[str] = ()) -> Pair:
        """A certificate for a user in a group, or a server that answers at `hosts`, kept under `name`."""
        pair = Pair(self.directory / f"{name}.crt", self.directory / f"{name}.key")
        if not pair.certificate.exists():
            extensions = ["basicConstraints=critical,CA:FALSE", "extendedKeyUsage=clientAuth,serverAuth"]
            if hosts:
                extensions.append("subjectAltName=" + ",".join(alternative_name(host) for host in hosts))
            subject = f"/O={group}/CN={user}" if group else f"/CN={user}"
            self._request(pair, subject, *extensions, signer=self.own)
        return pair

    def signing_key(self, name: str) -> Path:
        """A private key that signs tokens."""
        key = self.directory / f"{name}.key"
        if not key.exists():
            run("openssl", "ecparam", "-genkey", "-noout", "-name", "prime256v1", "-out", str(key))
        return key

    def kubeconfig(self, file: Path, server: str, user: Pair, context: str = "cluster") -> Path:
        """A kubeconfig for `user`, complete in itself."""
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(mode=0o600)
        # JSON is YAML: nothing needs a YAML library to write it.
        file.write_text(json.dumps(kubeconfig(server, self.own.certificate, user, context), indent=1) + "\n")
        return file

    def _request(self, pair: Pair, subject: str, *extensions: str, signer: Pair | None = None) -> None:
        argv = [
            "openssl",
            "req",
            "-x509",
            "-new",
            "-config",
            str(self._configuration),
            "-days",
            DAYS,
            "-nodes",
        ]
        argv += ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-subj", subject]
        argv += ["-keyout", str(pair.key), "-out", str(pair.certificate)]
        for extension in extensions:
            argv += ["-addext", extension]
        if signer is not None:
            argv += ["-CA", str(signer.certificate), "-CAkey", str(signer.key)]
        run(*argv)


def alternative_name(host: str) -> str:
    """A host as a certificate names it: an address or a DNS name."""
    return f"IP:{host}" if host.replace(".", "").isdigit() or ":" in host else f"DNS:{host}"


def kubeconfig(server: str, authority: Path, user: Pair, context: str) -> dict[str, object]:
    """The content of a kubeconfig with the certificates inside it."""

    def encoded(file: Path) -> str:
        return base64.b64encode(file.read_bytes()).decode()

    credentials = {
        "client-certificate-data": encoded(user.certificate),
        "client-key-data": encoded(user.key),
    }
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": context,
        "clusters": [
            {"name": context, "cluster": {"server": server, "certificate-authority-data": encoded(authority)}}
        ],
        "users": [{"name": context, "user": credentials}],
        "contexts": [{"name": context, "context": {"cluster": context, "user": context}}],
    }
