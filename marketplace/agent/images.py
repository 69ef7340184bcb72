"""Disk images: fetched once, checked, kept while there is room, and never trusted.

An image comes from a renter. Its address may not lead into the provider's own network, its header may not name other
files, and its size is known before room is given to it. Machines hold hard links, so that dropping an image here
never takes it from a machine.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO, Literal
from urllib.parse import unquote

import httpx2
import msgspec

from marketplace.agent.drivers.base import DriverError
from marketplace.agent.fetching import Fetcher, bad, shown, split
from marketplace.agent.records import write_whole
from marketplace.agent.wire import DesiredImage

_log = logging.getLogger(__name__)

GIB = 1 << 30
_QCOW2 = b"QFI\xfb"
_CHUNK = 1 << 20
_STEP = 64 << 20
Format = Literal["qcow2", "raw"]


class Image(msgspec.Struct, frozen=True, kw_only=True):
    """An image in the cache."""

    url: str
    sha256: str
    """of the file"""
    size: int
    """bytes of the file"""
    virtual_size: int
    """bytes of the disk that it describes"""
    format: Format
    modified_ns: int
    used_at: int


class ImageStore:
    """The cache of images below one folder. For one event loop."""

    def __init__(
        self,
        folder: Path,
        *,
        now: Callable[[], int],
        local: tuple[Path, ...] = (),
        private: bool = False,
        keep_free: int = 2 * GIB,
        limit: int = 200 * GIB,
        free_bytes: Callable[[Path], int] | None = None,
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        """`local` are folders whose files may be named; `private` allows addresses of private networks.

        `keep_free` stays free on the file system, and the cache holds at most `limit`.
        """
        self._folder = folder
        self._now = now
        self._local = tuple(path.resolve() for path in local)
        self._keep_free = keep_free
        self._limit = limit
        self._free_bytes = free_bytes or (lambda path: shutil.disk_usage(path).free)
        self._fetcher = Fetcher(private=private, transport=transport)
        self._flying: dict[str, asyncio.Task[Image]] = {}
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for left in folder.glob("*.part"):
            left.unlink()

    async def get(self, source: str, *, sha256: str | None, max_bytes: int) -> tuple[Path, Image]:
        """The file of an image, fetched if need be, and what it is. Raises DriverError with cause BadImage.

        `source` is an http(s) address, or a path or file address below a folder that the operator named. Whoever asks
        while it is being fetched gets the same one.
        """
        key = hashlib.sha256(f"{source}\n{sha256 or ''}".encode()).hexdigest()[:32]
        held = await self._held(key)
        if held is None:
            task = self._flying.get(key)
            if task is None:
                task = asyncio.get_running_loop().create_task(self._fetch(key, source, sha256))
                self._flying[key] = task
                task.add_done_callback(lambda _: self._flying.pop(key, None))
            held = await asyncio.shield(task)
        if held.virtual_size > max_bytes:
            raise bad(f"The image needs a disk of {_gib(held.virtual_size)}; the rental has {_gib(max_bytes)}.")
        held = msgspec.structs.replace(held, used_at=self._now())
        self._remember(key, held)
        return self._file(key), held

    async def keep_ready(self, images: Iterable[DesiredImage]) -> list[str]:
        """Fetch those that are not here, one after the other; say which cannot be had, and why."""
        problems = []
        for image in images:
            try:
                await self.get(image.url, sha256=image.sha256, max_bytes=self._limit)
            except DriverError as error:
                problems.append(f"{shown(image.url)}: {error.message}")
        return problems

    def all(self) -> dict[str, Image]:
        """What is in the cache, by key."""
        found = {}
        for path in sorted(self._folder.glob("*.json")):
            if self._file(path.stem).exists():
                found[path.stem] = msgspec.json.decode(path.read_bytes(), type=Image)
        return found

    async def _held(self, key: str) -> Image | None:
        """The image if it is there and is what it was; somebody may have removed or changed it meanwhile."""
        about, file = self._folder / f"{key}.json", self._file(key)
        try:
            image = msgspec.json.decode(about.read_bytes(), type=Image)
            found = file.stat()
        except FileNotFoundError:
            return None
        if found.st_size == image.size and found.st_mtime_ns == image.modified_ns:
            return image
        if found.st_size == image.size and await asyncio.to_thread(_hash_of, file) == image.sha256:
            return msgspec.structs.replace(image, modified_ns=found.st_mtime_ns)
        _log.warning("the cached image of %s is not what was fetched; it is fetched again", shown(image.url))
        self._drop(key)
        return None

    async def _fetch(self, key: str, source: str, sha256: str | None) -> Image:
        part = self._folder / f"{key}.part"
        try:
            with part.open("wb") as file:
                digest = await self._copy(source, file, self._reserve(file))
                os.fsync(file.fileno())
            if sha256 is not None and digest != sha256.lower():
                raise bad(f"The image's SHA-256 is {digest}, not {sha256} as asked for.")
            kind, virtual = await asyncio.to_thread(inspect_disk, part)
            found = part.stat()
            part.replace(self._file(key))
        except OSError as error:
            raise DriverError("PlatformError", f"The image cannot be stored: {error.strerror or error}.") from error
        finally:
            part.unlink(missing_ok=True)
        image = Image(
            url=source,
            sha256=digest,
            size=found.st_size,
            virtual_size=virtual,
            format=kind,
            modified_ns=found.st_mtime_ns,
            used_at=self._now(),
        )
        self._remember(key, image)
        return image

    def _reserve(self, file: BinaryIO) -> Callable[[int], None]:
        """Take the blocks of a file before its bytes come: two downloads cannot count on the same room."""
        held = 0

        def reserve(size: int) -> None:
            nonlocal held
            if size > held:
                step = max(size, held + _STEP) if held else size
                self._make_room(step - held, besides=held)
                os.posix_fallocate(file.fileno(), 0, step)
                held = step

        return reserve

    async def _copy(self, source: str, file: BinaryIO, reserve: Callable[[int], None]) -> str:
        """Write the source into the file and return its SHA-256."""
        parts = split(source)
        if parts.scheme in ("http", "https"):
            return await self._fetcher.fetch(source, file, reserve)
        if parts.scheme not in ("", "file"):
            raise bad(f"The image's address begins with {parts.scheme}:, not http: or https:.")
        return await asyncio.to_thread(self._copy_local, Path(unquote(parts.path)), file, reserve)

    def _copy_local(self, path: Path, file: BinaryIO, reserve: Callable[[int], None]) -> str:
        path = path.resolve()
        if not any(path.is_relative_to(folder) for folder in self._local) or not path.is_file():
            raise bad("The image's address is not one that nodes may read; give an http or https address.")
        reserve(path.stat().st_size)
        digest = hashlib.sha256()
        with path.open("rb") as reader:
            while data := reader.read(_CHUNK):
                digest.update(data)
                file.write(data)
        return digest.hexdigest()

    def _make_room(self, size: int, *, besides: int) -> None:
        """Drop images that nobody uses, the longest unused first, until `size` more bytes fit beside those held."""
        held = self.all()
        order = sorted(held, key=lambda key: held[key].used_at)
        total = besides + sum(image.size for image in held.values())
        while not self._fits(size, total):
            victim = next((key for key in order if self._file(key).stat().st_nlink == 1), None)
            if victim is None:
                raise DriverError("PlatformError", "The node has no room for the image now; try another node.")
            order.remove(victim)
            total -= held[victim].size
            self._drop(victim)

    def _fits(self, size: int, total: int) -> bool:
        return size <= self._free_bytes(self._folder) - self._keep_free and total + size <= self._limit

    def _remember(self, key: str, image: Image) -> None:
        write_whole(self._folder / f"{key}.json", msgspec.json.encode(image), durable=False)

    def _drop(self, key: str) -> None:
        (self._folder / f"{key}.json").unlink(missing_ok=True)
        self._file(key).unlink(missing_ok=True)

    def _file(self, key: str) -> Path:
        return self._folder / f"{key}.img"


def inspect_disk(path: Path) -> tuple[Format, int]:
    """The format of a disk image and the size of its disk. Raises DriverError for what may not or cannot be used.

    The header is read here: letting a tool guess the format of a stranger's file would let it name files of the node.
    """
    with path.open("rb") as file:
        head = file.read(104)
    size = path.stat().st_size
    if head[:4] == _QCOW2 and len(head) >= 80:
        return "qcow2", _qcow2_size(path, head)
    if not head:
        raise bad("The image is empty.")
    if head.lstrip()[:1] == b"<":
        raise bad("The image's address answers with a web page, not with a disk image.")
    packed = {b"\x1f\x8b": "gzip", b"\xfd7zXZ": "xz", b"BZh": "bzip2", b"(\xb5/\xfd": "zstd", b"PK\x03\x04": "zip"}
    for magic, name in packed.items():
        if head.startswith(magic):
            raise bad(f"The image is packed with {name}; offer it unpacked, as qcow2 or raw.")
    if head[:4] in (b"KDMV", b"vhdx", b"cone"):
        raise bad("The image is of another kind of hypervisor; offer it as qcow2 or raw.")
    if size % 512:
        raise bad("The image is neither qcow2 nor a raw disk: its size is no multiple of 512 bytes.")
    return "raw", size


def _qcow2_size(path: Path, head: bytes) -> int:
    version = int.from_bytes(head[4:8], "big")
    backing = int.from_bytes(head[8:16], "big")
    features = int.from_bytes(head[72:80], "big") if version >= 3 else 0
    if version not in (2, 3):
        raise bad(f"The image is qcow2 of version {version}; offer version 2 or 3.")
    if backing or features & 4:
        raise bad("The image refers to another file; offer one that is complete in itself.")
    if int.from_bytes(head[32:36], "big"):
        raise bad("The image is encrypted.")
    return int.from_bytes(head[24:32], "big")


def _hash_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
