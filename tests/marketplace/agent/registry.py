"""A registry of container images with one image in it, made of busybox; private where it is told to be."""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import shutil
import tarfile
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

NAME = "box"
TAG = "1"
_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
_CONFIG = "application/vnd.docker.container.image.v1+json"
_LAYER = "application/vnd.docker.image.rootfs.diff.tar.gzip"


class Registry:
    """Answers the calls of a pull."""

    def __init__(self, *, login: tuple[str, str] | None = None) -> None:
        """`login` is who alone may pull."""
        self._login = login
        layer = _layer()
        config = _json(
            {
                "architecture": "amd64",
                "os": "linux",
                "config": {"Cmd": ["/bin/sh", "-c", "echo no command; exit 7"], "Env": ["PATH=/bin"]},
                "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
                "history": [{"created_by": "a test"}],
            }
        )
        packed = gzip.compress(layer, 1)
        self.manifest = _json(
            {
                "schemaVersion": 2,
                "mediaType": _MANIFEST,
                "config": {"mediaType": _CONFIG, "size": len(config), "digest": _digest(config)},
                "layers": [{"mediaType": _LAYER, "size": len(packed), "digest": _digest(packed)}],
            }
        )
        self._blobs = {_digest(config): config, _digest(packed): packed}

    def routes(self) -> list[Route]:
        """What a server of it answers."""
        return [
            Route("/v2/", self._root),
            Route("/v2/{name}/manifests/{tag}", self._manifest),
            Route("/v2/{name}/blobs/{digest}", self._blob),
        ]

    def _refusal(self, request: Request) -> Response | None:
        if self._login is None:
            return None
        expected = "Basic " + base64.b64encode(":".join(self._login).encode()).decode()
        if request.headers.get("authorization") == expected:
            return None
        problem = _json({"errors": [{"code": "UNAUTHORIZED", "message": "authentication required"}]})
        return Response(problem, 401, {"WWW-Authenticate": 'Basic realm="box"'}, "application/json")

    async def _root(self, request: Request) -> Response:
        return self._refusal(request) or Response(b"{}", 200, media_type="application/json")

    async def _manifest(self, request: Request) -> Response:
        refusal = self._refusal(request)
        if refusal is not None:
            return refusal
        known = {TAG, _digest(self.manifest)}
        if request.path_params["name"] != NAME or request.path_params["tag"] not in known:
            problem = _json({"errors": [{"code": "MANIFEST_UNKNOWN", "message": "manifest unknown"}]})
            return Response(problem, 404, media_type="application/json")
        headers = {"Docker-Content-Digest": _digest(self.manifest)}
        return Response(self.manifest, 200, headers, _MANIFEST)

    async def _blob(self, request: Request) -> Response:
        refusal = self._refusal(request)
        return refusal or Response(self._blobs[request.path_params["digest"]], 200)


def _layer() -> bytes:
    """busybox with the commands that tests use."""
    busybox = shutil.which("busybox")
    assert busybox is not None, "tests of containers need: apt-get install busybox-static (.ci/run does it)"
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        archive.add(busybox, "bin/busybox")
        for name in ("sh", "echo", "cat", "sleep", "httpd", "mkdir"):
            link = tarfile.TarInfo(f"bin/{name}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            archive.addfile(link)
    return made.getvalue()


def _digest(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def _json(content: Any) -> bytes:
    return json.dumps(content).encode()
