"""How this machine reaches package registries, handed on to what is built on it."""

from __future__ import annotations

import configparser
import json
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.process import run

if TYPE_CHECKING:
    from collections.abc import Mapping

CERTIFICATES = Path("/usr/local/share/ca-certificates")
BUNDLE = "/etc/ssl/certs/ca-certificates.crt"
APT_SETTINGS = re.compile(r"Acquire::(Check-Valid-Until|Check-Date|Retries|https?::\S+) ")
PIP_VARIABLES = ("index-url", "extra-index-url", "trusted-host", "timeout", "proxy", "retries")
PROXIES = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")


def debian_sources(codename: str) -> list[str]:
    """The lines of sources.list for a Debian release, as this machine has them; none if it has another."""
    if shutil.which("apt-get") is None:
        return []
    form = "$(REPO_URI) $(RELEASE) $(COMPONENT)"
    targets = run(
        "apt-get", "indextargets", "--format", form, "Created-By: Packages", "Origin: Debian", check=False
    )
    components: dict[tuple[str, str], list[str]] = {}
    for line in targets.splitlines():
        uri, release, component = line.split()
        if release.split("-")[0].split("/")[0] == codename:
            components.setdefault((uri, release), []).append(component)
    lines = [
        f"deb {uri} {release} {' '.join(dict.fromkeys(of))}" for (uri, release), of in components.items()
    ]
    return lines if any(release == codename for _, release in components) else []


def apt_settings() -> str:
    """How apt fetches (proxies, certificates, dates), as a configuration file."""
    if shutil.which("apt-config") is None:
        return ""
    lines = run("apt-config", "dump", "Acquire").splitlines()
    return "".join(f"{line}\n" for line in lines if APT_SETTINGS.match(line) and not line.endswith('"";'))


def certificates() -> list[Path]:
    """The certificate authorities that this machine trusts beyond the distribution's."""
    return sorted(CERTIFICATES.rglob("*.crt")) if CERTIFICATES.is_dir() else []


def pip_configuration(files: list[Path], environment: dict[str, str]) -> str:
    """One pip.conf from pip's own files and variables, the later winning; the certificates are the image's."""
    merged = configparser.ConfigParser(interpolation=None)
    merged.read(file for file in files if file.is_file())
    lines: dict[str, str] = {}
    for section in ("global", "install"):
        if merged.has_section(section):
            lines |= {name: value for name, value in merged.items(section) if name in PIP_VARIABLES}
    for name in PIP_VARIABLES:
        value = environment.get("PIP_" + name.upper().replace("-", "_"))
        if value:
            lines[name] = value
    lines["cert"] = BUNDLE
    return "[global]\n" + "".join(f"{name} = {' '.join(value.split())}\n" for name, value in lines.items())


def uv_configuration(environment: dict[str, str]) -> str:
    """A uv.toml: the image's certificates, and the index that this machine uses."""
    lines = ["system-certs = true"]
    index = (
        environment.get("UV_DEFAULT_INDEX")
        or environment.get("UV_INDEX_URL")
        or environment.get("PIP_INDEX_URL")
    )
    if index:
        lines.append(f"index-url = {json.dumps(index)}")
    return "\n".join(lines) + "\n"


def uv_cache(environment: Mapping[str, str]) -> Path:
    """The folder where uv keeps the packages that it has fetched on this machine."""
    configured = environment.get("UV_CACHE_DIR")
    caches = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(configured) if configured else caches / "uv"


def mounts(directory: Path) -> list[tuple[Path, str]]:
    """The files that a build needs to see: (source, target). Those written for it are put into `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    environment = dict(os.environ)
    home = Path.home()
    files = [Path("/etc/pip.conf"), home / ".pip" / "pip.conf", home / ".config" / "pip" / "pip.conf"]
    if "PIP_CONFIG_FILE" in environment:
        files.append(Path(environment["PIP_CONFIG_FILE"]))
    pip, uv = directory / "pip.conf", directory / "uv.toml"
    pip.write_text(pip_configuration(files, environment))
    uv.write_text(uv_configuration(environment))
    volumes = [(pip, "/etc/pip.conf"), (uv, "/etc/uv/uv.toml")]
    maven = home / ".m2" / "settings.xml"
    if maven.exists():
        volumes.append((maven, "/root/.m2/settings.xml"))
    return volumes


def proxies() -> dict[str, str]:
    """The proxy settings of this machine; builders pass them on without lines in the Dockerfile."""
    return {name: os.environ[name] for name in PROXIES if name in os.environ}
