"""A stand-in S3 that can be read with temporary credentials: each opens one folder, and every request has to be signed with it.

It has what a reader needs: objects, ranges of them, and listings.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import formatdate
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.sax.saxutils import escape

from databricks.sdk.service.catalog import AwsCredentials

from support.http_server import Answer, Request, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_SIGNED = re.compile(
    r"AWS4-HMAC-SHA256 Credential=(?P<key>[^/]+)/(?P<scope>[^,]+), ?SignedHeaders=(?P<headers>[^,]+), ?Signature=(?P<signature>\w+)"
)


class _Refusal(Exception):  # noqa: N818
    """An error of S3: HTTP status and code."""


@dataclass(frozen=True)
class Grant:
    """Credentials, and the folder `bucket/prefix` that they open."""

    login: AwsCredentials
    opens: str


@dataclass
class Store:
    """Buckets, each a folder in `folder`.

    Attributes:
        grants: credentials that were given out, by their access key.
        expired: access keys whose time is over.
        reads: path of every object that was read, with the access key.
    """

    folder: Path
    uri: str = ""
    grants: dict[str, Grant] = field(default_factory=dict)
    expired: set[str] = field(default_factory=set)
    reads: set[tuple[str, str]] = field(default_factory=set)

    def grant(self, location: str) -> AwsCredentials:
        """New credentials that read s3://bucket/prefix."""
        login = AwsCredentials(
            access_key_id=f"ASIA{secrets.token_hex(8).upper()}",
            secret_access_key=secrets.token_urlsafe(30),
            session_token=secrets.token_urlsafe(60),
        )
        self.grants[str(login.access_key_id)] = Grant(login, location.removeprefix("s3://"))
        return login


@contextmanager
def running(store: Store) -> Iterator[Store]:
    """A store that answers on loopback for as long as the block runs."""
    with serving(lambda request: _respond(store, request)) as store.uri:
        yield store


def _respond(store: Store, request: Request) -> Answer:
    url = urlsplit(request.target)
    bucket, _, key = unquote(url.path).lstrip("/").partition("/")
    query = dict(parse_qsl(url.query, keep_blank_values=True))
    try:
        signer = _signer(store, request, f"{bucket}/{key or query.get('prefix', '')}")
        if not key:
            return _listing(store, bucket, query)
        store.reads.add((f"{bucket}/{key}", signer))
        return _object(store.folder / bucket / key, request)
    except _Refusal as refusal:
        status, code = refusal.args
        text = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>"
        return Answer(status, text, {"Content-Type": "application/xml"})


def _signer(store: Store, request: Request, requested_path: str) -> str:
    """Return the access key that signed a request for bucket/key."""
    authorization = _SIGNED.fullmatch(request.headers.get("Authorization", ""))
    if authorization is None:
        raise _Refusal(403, "AccessDenied")
    grant = store.grants.get(authorization["key"])
    if grant is None:
        raise _Refusal(403, "InvalidAccessKeyId")
    if request.headers.get("x-amz-security-token") != grant.login.session_token:
        raise _Refusal(400, "InvalidToken")
    if authorization["key"] in store.expired:
        raise _Refusal(400, "ExpiredToken")
    if not hmac.compare_digest(
        _signature(request, authorization, str(grant.login.secret_access_key)), authorization["signature"]
    ):
        raise _Refusal(403, "SignatureDoesNotMatch")
    if request.method not in ("GET", "HEAD") or not f"{requested_path}/".startswith(f"{grant.opens}/"):
        raise _Refusal(403, "AccessDenied")
    return authorization["key"]


def _signature(request: Request, authorization: re.Match[str], secret: str) -> str:
    """Signature Version 4 of a request."""
    url = urlsplit(request.target)
    query = "&".join(sorted(part if "=" in part else f"{part}=" for part in url.query.split("&") if part))
    names = authorization["headers"].split(";")
    headers = "".join(f"{name}:{' '.join(str(request.headers[name]).split())}\n" for name in names)
    content = request.headers["x-amz-content-sha256"]
    canonical = "\n".join((request.method, url.path, query, headers, authorization["headers"], str(content)))
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    text = "\n".join(("AWS4-HMAC-SHA256", str(request.headers["x-amz-date"]), authorization["scope"], digest))
    key = f"AWS4{secret}".encode()
    for part in authorization["scope"].split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    return hmac.digest(key, text.encode(), "sha256").hex()


def _object(path: Path, request: Request) -> Answer:
    if not path.is_file():
        raise _Refusal(404, "NoSuchKey")
    content = path.read_bytes()
    about = {
        "Content-Type": "application/octet-stream",
        "ETag": f'"{hashlib.md5(content, usedforsecurity=False).hexdigest()}"',
        "Last-Modified": formatdate(path.stat().st_mtime, usegmt=True),
        "Accept-Ranges": "bytes",
    }
    byte_range = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range") or "")
    if request.method == "HEAD":
        return Answer(200, b"", about | {"Content-Length": str(len(content))})
    if byte_range is None:
        return Answer(200, content, about)
    first, last = int(byte_range[1]), min(int(byte_range[2] or len(content)), len(content) - 1)
    if first > last:
        raise _Refusal(416, "InvalidRange")
    return Answer(
        206, content[first : last + 1], about | {"Content-Range": f"bytes {first}-{last}/{len(content)}"}
    )


def _listing(store: Store, bucket: str, query: dict[str, str]) -> Answer:
    """ListObjectsV2, in one page."""
    root, prefix, delimiter = store.folder / bucket, query.get("prefix", ""), query.get("delimiter", "")
    files = {
        key: path
        for path in root.rglob("*")
        if path.is_file() and (key := path.relative_to(root).as_posix()).startswith(prefix)
    }
    folders = set()
    for key in [*files] if delimiter else []:
        name, separator, _ = key.removeprefix(prefix).partition(delimiter)
        if separator:
            folders.add(f"{prefix}{name}{delimiter}")
            del files[key]
    contents = "".join(
        f"<Contents><Key>{escape(key)}</Key><Size>{path.stat().st_size}</Size><ETag>&quot;e&quot;</ETag>"
        f"<LastModified>{datetime.fromtimestamp(path.stat().st_mtime, UTC):%FT%TZ}</LastModified></Contents>"
        for key, path in sorted(files.items())
    )
    common = "".join(
        f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" for name in sorted(folders)
    )
    text = (
        f"<ListBucketResult><Name>{bucket}</Name><Prefix>{escape(prefix)}</Prefix><IsTruncated>false</IsTruncated>"
        f"<KeyCount>{len(files) + len(folders)}</KeyCount>{contents}{common}</ListBucketResult>"
    )
    return Answer(200, text, {"Content-Type": "application/xml"})
