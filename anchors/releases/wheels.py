"""Read a few source files out of a release wheel on the package index, not the whole wheel.

The index is whatever pip is configured to use; nothing here names a host.
"""

from __future__ import annotations

import base64
import functools
import json
import os
import platform
import re
import shutil
import ssl
import subprocess
import sys
import tempfile
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from anchors.digests import TOOL_ROOT, sha256
from anchors.engine import requirements
from anchors.engine.fast import PACKAGE
from anchors.engine.versions import version_key
from anchors.releases import network
from anchors.releases.links import Links
from anchors.sites import all_anchors

JSON_INDEX = "application/vnd.pypi.simple.v1+json"
TIMEOUT_S = 120
LARGEST = 32 << 20  # bytes of one member; real ones have less than one MiB

# pip's own reading of its files, environment and defaults, printed as one JSON object.
_PIP_OPTIONS = """
import json
from pip._internal.commands import create_command
options, _ = create_command("download").parse_args(["any"])
urls = [] if options.no_index else [options.index_url, *options.extra_index_urls]
print(json.dumps({"urls": urls, "cert": options.cert, "proxy": options.proxy}))
"""

# What the detection of native support, the root discovery and `doctor` read, and what is asked of
# every release beside the files of the sites.
_NEEDED = re.compile(
    r"""vllm/(__init__|_version|version)\.py
      | vllm/models/__init__\.py
      | vllm/models/deepseek_v4/.*\.py
      | vllm/model_executor/models/registry\.py
      | vllm/tokenizers/deepseek_v4_encoding\.py
      | vllm/config/speculative\.py
      | vllm/v1/attention/backends/mla/sparse_swa\.py
      | vllm/transformers_utils/(config|configs/__init__|configs/deepseek_v4)\.py
      | [^/]+\.dist-info/(METADATA|WHEEL|top_level\.txt)""",
    re.VERBOSE,
)

_FINAL = re.compile(r"\d+(\.\d+)*(\.post\d+)?")


class WheelError(Exception):
    """The index or a wheel could not be read. `hint` says what to run next."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True)
class Wheel:
    """One release's wheel as the index lists it."""

    project: str
    version: str
    filename: str
    url: str


@dataclass(frozen=True)
class _Index:
    urls: tuple[str, ...]
    cert: str | None
    proxy: str | None


def needed(name: str) -> bool:
    """Whether this member of a vLLM wheel is one that judging a tree requires."""
    return _NEEDED.fullmatch(name) is not None or name in asked()


@functools.cache
def asked() -> frozenset[str]:
    """Members that the sites and the overlay's run-time needs ask for."""
    needs = requirements.collect(os.path.join(TOOL_ROOT, PACKAGE))
    files = {anchor.file for anchor in all_anchors()} | requirements.files(needs)
    return frozenset(f"vllm/{file}" for file in files)


def key() -> str:
    """Changes with the members that are needed: whoever keeps releases keeps others then."""
    return sha256("\n".join([_NEEDED.pattern, *sorted(asked())]).encode())[:8]


def releases(
    project: str = "vllm", versions: Iterable[str] | None = None, *, posts: bool = False
) -> tuple[Wheel, ...]:
    """One wheel for each final release, oldest first; with `posts` also for `.postN` ones.

    WheelError names a version that was not found.
    """
    index = _pip_index()
    newest: dict[str, tuple[tuple[int, int], Wheel]] = {}
    for filename, url in _listed(index, project):
        found = _choice(project, filename, url)
        if found and (posts or "post" not in found[1].version):
            before = newest.get(found[1].version, found)
            newest[found[1].version] = found if found[0] > before[0] else before
    wanted = sorted(newest, key=version_key) if versions is None else list(versions)
    missing = [version for version in wanted if version not in newest]
    if missing or not wanted:
        raise WheelError(
            f"The package index lists no wheel of {project} {', '.join(missing)}".rstrip(),
            f"See what it offers: {sys.executable} -m pip index versions {project}",
        )
    return tuple(newest[version][1] for version in wanted)


def fetch(wheel: Wheel, dest: Path, wanted: Callable[[str], bool] = needed) -> Path:
    """Put the wanted members of the wheel under `dest`, which appears complete or not at all."""
    dest.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=dest.parent, prefix=f".{dest.name}.") as scratch:
        tree = Path(scratch) / "tree"
        tree.mkdir()
        if not _fetch_ranges(wheel, tree, wanted):
            _fetch_whole(wheel, Path(scratch), tree, wanted)
        if not dest.exists():
            tree.rename(dest)
    return dest


@functools.cache
def _pip_index() -> _Index:
    run = subprocess.run(
        [sys.executable, "-c", _PIP_OPTIONS],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    if run.returncode:
        raise WheelError(
            f"{sys.executable} has no pip, and pip's configuration says where the package index is",
            f"{sys.executable} -m ensurepip",
        )
    options = json.loads(run.stdout)
    return _Index(tuple(options["urls"]), options["cert"], options["proxy"] or None)


def _listed(index: _Index, project: str) -> list[tuple[str, str]]:
    """(file name, URL) of every file that the first index knowing the project lists."""
    reasons = []
    for base in index.urls:
        page = f"{base.rstrip('/')}/{project}/"
        try:
            files = _read_page(index, page)
        except OSError as error:
            reasons.append(str(error))
            continue
        if files:
            return files
    raise WheelError(
        f"No configured package index lists {project} "
        f"({network.cause('; '.join(reasons) or 'none configured')})",
        f"Check the index: {sys.executable} -m pip config debug",
    )


def _read_page(index: _Index, page: str) -> list[tuple[str, str]]:
    if page.startswith("file:"):
        page += "index.html"
    request = urllib.request.Request(page, headers={"Accept": f"{JSON_INDEX}, text/html;q=0.5"})
    with _opener(index, request).open(request, timeout=TIMEOUT_S) as answer:
        body = answer.read()
        kind = answer.headers.get_content_type()
        page = answer.url
    if kind == JSON_INDEX:
        pairs = [(item["filename"], item["url"]) for item in json.loads(body)["files"]]
    else:
        parser = Links()
        parser.feed(body.decode("utf-8", "replace"))
        pairs = parser.pairs
    return [(name, urllib.parse.urljoin(page, url)) for name, url in pairs]


def _opener(index: _Index, request: urllib.request.Request) -> urllib.request.OpenerDirector:
    """An opener with pip's certificate bundle, proxy and the credentials of the URL."""
    bundle = index.cert or os.environ.get("REQUESTS_CA_BUNDLE")
    context = ssl.create_default_context(cafile=bundle)
    handlers: list[urllib.request.BaseHandler] = [urllib.request.HTTPSHandler(context=context)]
    if index.proxy:
        handlers.append(urllib.request.ProxyHandler({"http": index.proxy, "https": index.proxy}))
    parts = urllib.parse.urlsplit(request.full_url)
    if parts.username is not None:
        login = (
            f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
        )
        request.add_header("Authorization", "Basic " + base64.b64encode(login.encode()).decode())
        request.full_url = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    return urllib.request.build_opener(*handlers)


def _choice(project: str, filename: str, url: str) -> tuple[tuple[int, int], Wheel] | None:
    """The wheel and its preference: this machine's architecture first, then the build number."""
    parts = filename.removesuffix(".whl").split("-")
    if not filename.endswith(".whl") or len(parts) not in (5, 6):
        return None
    if parts[0].replace("_", "-").lower() != project or not _FINAL.fullmatch(parts[1]):
        return None
    build = int(re.match(r"\d*", parts[2]).group() or 0) if len(parts) == 6 else 0  # type: ignore[union-attr]
    native = int(parts[-1].endswith(platform.machine()) or parts[-1] == "any")
    return (native, build), Wheel(project, parts[1], filename, url)


def _fetch_ranges(wheel: Wheel, tree: Path, wanted: Callable[[str], bool]) -> bool:
    """Fetch by HTTP ranges. False when nothing here reads them or the server refuses them."""
    if not wheel.url.startswith("http"):
        return False
    try:
        import remotezip
        import requests
    except ImportError:
        return False
    index = _pip_index()
    with requests.Session() as session:
        if index.cert:
            session.verify = index.cert
        if index.proxy:
            session.proxies = {"http": index.proxy, "https": index.proxy}
        try:
            with remotezip.RemoteZip(
                wheel.url, session=session, initial_buffer_size=1 << 20
            ) as archive:
                unpack(archive, tree, wanted)
        except remotezip.RangeNotSupported:
            return False
        except (requests.RequestException, remotezip.RemoteIOError) as error:
            raise WheelError(
                f"{wheel.filename} could not be read: {error}", "Run the command again."
            ) from error
    return True


def _fetch_whole(wheel: Wheel, scratch: Path, tree: Path, wanted: Callable[[str], bool]) -> None:
    quiet = ("--quiet", "--no-deps", "--only-binary=:all:")
    command = [sys.executable, "-m", "pip", "download", *quiet]
    command += ["--dest", str(scratch), f"{wheel.project}=={wheel.version}"]
    run = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    archives = list(scratch.glob("*.whl"))
    if run.returncode or not archives:
        raise WheelError(
            f"{wheel.filename} could not be downloaded: {network.cause(run.stderr)}",
            "Run the command again.",
        )
    with zipfile.ZipFile(archives[0]) as archive:
        unpack(archive, tree, wanted)


def unpack(archive: zipfile.ZipFile, tree: Path, wanted: Callable[[str], bool]) -> None:
    """Put the wanted members under `tree`. Raises WheelError for a name that leads outside it."""
    for name in archive.namelist():
        if not wanted(name):
            continue
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise WheelError(f"A member of the wheel points outside it: {name}")
        if archive.getinfo(name).file_size > LARGEST:
            raise WheelError(f"A member of the wheel is too large to be a source file: {name}")
        target = tree / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with archive.open(name) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink)
