"""buildah with a store of its own: images are built, kept and pushed without touching the machine's."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from cluster import image_store, snapshots
from cluster.binaries import say
from cluster.packages import SEARCHED
from cluster.paths import ClusterError
from support.cache import cache
from support.process import ASIDE

if TYPE_CHECKING:
    from collections.abc import Sequence


def folder() -> Path:
    """Where buildah keeps images, layers and what RUN caches."""
    return cache() / "buildah"


def buildah(*argv: str, aloud: str = "") -> str:
    """Run buildah and return what it printed; or say, in the name of `aloud`, which step it is at."""
    root, run, temporary = image_store.folder(), folder() / "run", folder() / "tmp"
    for each in (root, run, temporary):
        each.mkdir(parents=True, exist_ok=True)
    options = ["--root", str(root), "--runroot", str(run), "--storage-driver", "overlay"]
    environment = {**os.environ, "TMPDIR": str(temporary), "PATH": SEARCHED}
    if aloud:
        _tell_steps(aloud, [*ASIDE, "buildah", *options, *argv], environment)
        return ""
    done = subprocess.run(
        [*ASIDE, "buildah", *options, *argv],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise ClusterError(f"buildah {argv[0]} failed ({done.returncode}):\n{done.stderr.strip()[-3000:]}")
    return done.stdout.strip()


def _tell_steps(name: str, command: list[str], environment: dict[str, str]) -> None:
    """Run a build and say which instruction it is at; all that it printed last is in the error."""
    last: deque[str] = deque(maxlen=60)
    with subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as building:
        for line in building.stdout or ():
            last.append(line)
            if " RUN " in line and "STEP " in line:
                say(f"        {name}: {line.strip()[:100]}")
    if building.returncode != 0:
        raise ClusterError(f"the build of {name} failed ({building.returncode}):\n{''.join(last)}")


def copy(image: str, tag: str, reference: str, *, tls: bool) -> str:
    """Push `localhost/<image>:<tag>` as `reference`; return its digest there."""
    with tempfile.NamedTemporaryFile("r", prefix="digest-") as digest:
        # NB: gzip, the default, takes twice as long as the rest of a push and pull.
        argv = ["push", f"--tls-verify={str(tls).lower()}", "--compression-format=zstd"]
        argv += ["--signature-policy", str(_policy()), "--digestfile", digest.name]
        buildah(*argv, image_store.local_name(image, tag), f"docker://{reference}")
        return digest.read().strip()


def pull(reference: str) -> None:
    """Have an image of a registry here, to build on."""
    buildah("pull", "--signature-policy", str(_policy()), reference)


def _policy() -> Path:
    """Whose signatures images need: nobody's."""
    file = folder() / "policy.json"
    file.write_text('{"default": [{"type": "insecureAcceptAnything"}]}\n')
    return file


def build(image: str, tag: str, dockerfile: str, context: Path, *options: str, aloud: bool = False) -> None:
    """Build `localhost/<image>:<tag>`."""
    buildah(
        *("bud", "--isolation", "chroot", "--network", "host", "--layers", "--pull-never"),
        *("--file", dockerfile, "--tag", image_store.local_name(image, tag)),
        *options,
        str(context),
        aloud=image if aloud else "",
    )


def program(image: str, static: Path, command: Sequence[str]) -> str:
    """Build an image of one static program and nothing else; return what pods call it."""
    content = hashlib.sha256(static.read_bytes() + repr(command).encode())
    tag = content.hexdigest()[:16]
    if not image_store.has(image, tag):
        words = ", ".join(f'"{word}"' for word in command)
        with tempfile.TemporaryDirectory(prefix="image-") as directory:
            context = Path(directory)
            (context / image).write_bytes(static.read_bytes())
            (context / image).chmod(0o755)
            dockerfile = context / "Dockerfile"
            dockerfile.write_text(
                f"FROM scratch\nCOPY {image} /{image}\nUSER 65532:65532\nENTRYPOINT [{words}]\n"
            )
            build(image, tag, str(dockerfile), context)
    return snapshots.reference(image, tag)
