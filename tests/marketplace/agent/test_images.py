"""The cache of images: what strangers offer is checked, fetched once, and given up when there is no room."""

from __future__ import annotations

import asyncio
import hashlib
import struct
from pathlib import Path
from typing import Any

import httpx2
import pytest

from marketplace.agent.drivers.base import DriverError
from marketplace.agent.images import ImageStore, inspect_disk
from marketplace.agent.wire import DesiredImage

SECTOR = b"\0" * 512
URL = "https://images.example/a.img"


def qcow2(*, size: int = 1 << 30, backing: int = 0, version: int = 3, crypt: int = 0, features: int = 0) -> bytes:
    head = struct.pack(">4sIQIIQI", b"QFI\xfb", version, backing, 9 if backing else 0, 16, size, crypt)
    return head.ljust(72, b"\0") + struct.pack(">Q", features) + b"\0" * 24


class Site:
    """A server of images."""

    def __init__(self, content: bytes = SECTOR * 4) -> None:
        self.content = content
        self.asked: list[str] = []
        self.status = 200
        self.location = ""

    async def __call__(self, request: httpx2.Request) -> httpx2.Response:
        self.asked.append(str(request.url))
        await asyncio.sleep(0)
        if self.location:
            where, self.location = self.location, ""
            return httpx2.Response(302, headers={"location": where})
        return httpx2.Response(self.status, content=self.content)


@pytest.fixture
def site() -> Site:
    return Site()


def store(folder: Path, site: Site, **more: Any) -> ImageStore:
    fields: dict[str, Any] = {"now": lambda: 1, "private": True, "keep_free": 0, **more}
    return ImageStore(folder, transport=httpx2.MockTransport(site), **fields)


def get(images: ImageStore, url: str = URL, sha256: str | None = None, max_bytes: int = 1 << 40) -> Path:
    return asyncio.run(images.get(url, sha256=sha256, max_bytes=max_bytes))[0]


def refusal(images: ImageStore, url: str = URL, **more: Any) -> str:
    with pytest.raises(DriverError) as caught:
        get(images, url, **more)
    assert caught.value.cause == "BadImage"
    return caught.value.message


def test_an_image_is_fetched_once(tmp_path: Path, site: Site) -> None:
    images = store(tmp_path, site)
    assert get(images).read_bytes() == site.content
    assert get(store(tmp_path, site)).read_bytes() == site.content
    assert site.asked == [URL]


def test_those_who_ask_meanwhile_get_the_same_one(tmp_path: Path, site: Site) -> None:
    images = store(tmp_path, site)

    async def many() -> set[Path]:
        found = await asyncio.gather(*(images.get(URL, sha256=None, max_bytes=1 << 40) for _ in range(8)))
        return {path for path, _ in found}

    assert len(asyncio.run(many())) == 1
    assert len(site.asked) == 1


def test_an_image_that_was_removed_or_changed_is_fetched_again(tmp_path: Path, site: Site) -> None:
    images = store(tmp_path, site)
    file = get(images)
    file.unlink()
    assert get(images).read_bytes() == site.content
    file.write_bytes(b"x" * len(site.content))
    assert get(images).read_bytes() == site.content
    file.write_bytes(site.content)  # the same content at another time is the same image
    assert get(images).read_bytes() == site.content
    assert len(site.asked) == 3


def test_a_wrong_digest_is_refused_and_not_kept(tmp_path: Path, site: Site) -> None:
    images = store(tmp_path, site)
    right = hashlib.sha256(site.content).hexdigest()
    assert f"is {right}, not {'0' * 64}" in refusal(images, sha256="0" * 64)
    assert list(tmp_path.iterdir()) == []
    assert get(images, sha256=right).exists()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "empty"),
        (b"<!DOCTYPE html>", "web page"),
        (b"\x1f\x8b" + SECTOR, "packed with gzip"),
        (b"\xfd7zXZ" + SECTOR, "packed with xz"),
        (b"KDMV" + SECTOR, "another kind of hypervisor"),
        (b"x" * 700, "no multiple of 512"),
        (qcow2(backing=104), "refers to another file"),
        (qcow2(features=4), "refers to another file"),
        (qcow2(crypt=1), "encrypted"),
        (qcow2(version=9), "version 9"),
    ],
)
def test_what_cannot_or_may_not_be_used_is_refused_with_a_reason(
    tmp_path: Path, site: Site, content: bytes, why: str
) -> None:
    site.content = content
    assert why in refusal(store(tmp_path, site))


def test_the_size_of_the_disk_counts_and_not_that_of_the_file(tmp_path: Path, site: Site) -> None:
    site.content = qcow2(size=20 << 30)
    images = store(tmp_path, site)
    assert refusal(images, max_bytes=10 << 30) == "The image needs a disk of 20.0 GiB; the rental has 10.0 GiB."
    assert inspect_disk(get(images, max_bytes=20 << 30)) == ("qcow2", 20 << 30)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/a",
        "http://169.254.169.254/latest/meta-data",
        "http://10.1.2.3/a",
        "http://[::1]/a",
        "http://[fe80::1]/a",
    ],
)
def test_addresses_inside_the_providers_network_are_refused(tmp_path: Path, site: Site, url: str) -> None:
    assert "not a public one" in refusal(store(tmp_path, site, private=False), url)
    site.location = url
    assert "not a public one" in refusal(store(tmp_path, site, private=False), "http://192.88.99.1/a")
    assert len(site.asked) == 1, "the redirection was not followed"


def test_an_address_that_does_not_serve_an_image_is_explained_without_its_secrets(tmp_path: Path, site: Site) -> None:
    site.status = 404
    message = refusal(store(tmp_path, site), "https://user:pw@images.example/a.img?token=secret")
    assert message == "The image at https://images.example/a.img cannot be fetched: the server answers 404."
    for where in ("http://[2001:db8::7]:8080/a.img", "https://Images.example:8443/b/a.img"):
        named = where.replace("://", "://user:p%40w@") + "?token=secret"
        assert (
            refusal(store(tmp_path, site), named) == f"The image at {where} cannot be fetched: the server answers 404."
        )
    torn = "The image's address [2001:db8::7/a.img is none: Invalid IPv6 URL."
    assert refusal(store(tmp_path, site), "http://user:pw@[2001:db8::7/a.img?token=secret") == torn
    site.location = "http://[2001:db8::7/a.img"
    assert refusal(store(tmp_path, site)) == f"The image at {URL} is redirected to what is no address."
    assert "begins with ftp" in refusal(store(tmp_path, site), "ftp://images.example/a")


def test_files_of_the_node_are_only_those_that_its_operator_names(tmp_path: Path, site: Site) -> None:
    inside, outside = tmp_path / "library", tmp_path / "elsewhere"
    for folder in (inside, outside):
        folder.mkdir()
        (folder / "a.img").write_bytes(SECTOR)
    (inside / "link.img").symlink_to(outside / "a.img")
    images = store(tmp_path / "cache", site, local=(inside,))
    assert get(images, str(inside / "a.img")).read_bytes() == SECTOR
    assert get(images, f"file://{inside}/a.img").read_bytes() == SECTOR
    for path in (outside / "a.img", inside / "link.img", inside / "../elsewhere/a.img", Path("/etc/shadow")):
        assert "not one that nodes may read" in refusal(images, str(path))


def test_the_longest_unused_image_makes_room_and_one_in_use_does_not(tmp_path: Path, site: Site) -> None:
    ticks = iter(range(100))
    images = store(tmp_path / "cache", site, limit=3 * len(site.content), now=lambda: next(ticks))
    first, second, third = (get(images, f"https://images.example/{n}") for n in range(3))
    (tmp_path / "base.img").hardlink_to(first)
    assert get(images, "https://images.example/3").exists()
    assert first.exists()
    assert not second.exists()
    assert third.exists()


def test_without_room_the_rental_fails_and_nothing_is_left(tmp_path: Path, site: Site) -> None:
    images = store(tmp_path, site, free_bytes=lambda path: 100)
    with pytest.raises(DriverError, match="no room for the image") as caught:
        get(images)
    assert caught.value.cause == "PlatformError"
    assert list(tmp_path.iterdir()) == []


def test_downloads_at_once_do_not_count_on_the_same_room(tmp_path: Path, site: Site) -> None:
    def free(folder: Path) -> int:
        return 3 * len(site.content) - sum(path.stat().st_size for path in folder.iterdir() if path.suffix != ".json")

    images = store(tmp_path, site, free_bytes=free, limit=1 << 40)

    async def many() -> list[Any]:
        wanted = (images.get(f"https://images.example/{n}", sha256=None, max_bytes=1 << 40) for n in range(5))
        return await asyncio.gather(*wanted, return_exceptions=True)

    failed = [one for one in asyncio.run(many()) if isinstance(one, DriverError)]
    assert len(failed) == 2
    assert sum(path.stat().st_size for path in tmp_path.glob("*.img")) == 3 * len(site.content)


def test_images_are_kept_ready_and_those_that_cannot_be_had_are_named(tmp_path: Path, site: Site) -> None:
    images = store(tmp_path, site, private=False)
    wanted = [
        DesiredImage(url="http://user:pw@10.0.0.1:8080/b.img?token=t"),
        DesiredImage(url="https://192.88.99.1/a.img"),
    ]
    problems = asyncio.run(images.keep_ready(wanted))
    assert problems == [
        "http://10.0.0.1:8080/b.img: The image's address http://10.0.0.1:8080/b.img is not a public one.",
    ]
    assert [image.url for image in images.all().values()] == ["https://192.88.99.1/a.img"]
