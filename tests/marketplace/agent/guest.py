"""A small bootable disk for tests: a Debian kernel, busybox and dropbear, and an init that reads a NoCloud seed.

It does by hand what cloud-init does with the parts of a seed that matter here: keys and phone_home of the vendor's
data, and a user-data that is a script. Everything comes from Debian packages; the kernel's is unpacked, not installed.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path

KERNEL = Path(os.environ.get("HEADRACE_TEST_KERNEL", "/var/cache/headrace/kernel"))
_CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "headrace-tests"
_NEEDED = {
    "qemu-system-x86_64": "qemu-system-x86",
    "qemu-img": "qemu-utils",
    "busybox": "busybox-static",
    "cpio": "cpio",
    "dropbear": "dropbear-bin",
    "dropbearkey": "dropbear-bin",
    "syslinux": "syslinux",
    "mcopy": "mtools",
    "ssh": "openssh-client",
}
_MODULES = """
drivers/virtio/virtio_ring drivers/virtio/virtio drivers/virtio/virtio_pci_modern_dev
drivers/virtio/virtio_pci_legacy_dev drivers/virtio/virtio_pci net/core/failover drivers/net/net_failover
drivers/net/virtio_net drivers/block/virtio_blk drivers/cdrom/cdrom fs/isofs/isofs drivers/acpi/button
drivers/input/evdev
"""  # in this order: each needs those before it
_FOLDERS = "bin sbin etc/dropbear proc sys dev run tmp root/.ssh mnt/seed lib/modules usr/bin usr/sbin"
_ARGUMENTS = (
    "console=ttyS0 quiet loglevel=3 mitigations=off nokaslr tsc=reliable no_timer_check random.trust_cpu=on panic=-1"
)
_INIT = r"""#!/bin/sh
export PATH=/bin:/sbin:/usr/bin:/usr/sbin
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev
mkdir -p /dev/pts; mount -t devpts devpts /dev/pts; mount -t tmpfs tmpfs /run
for m in /lib/modules/*.ko; do insmod $m || echo "insmod $m failed" >/dev/console; done
ip link set lo up; ip link set eth0 up; ip addr add 10.0.2.15/24 dev eth0; ip route add default via 10.0.2.2
for d in /dev/vd*; do [ -b $d ] && mount -t iso9660 -o ro $d /mnt/seed 2>/dev/null && break; done
S=/mnt/seed
IID=$(sed -n 's/^.*"instance-id": *"\([^"]*\)".*/\1/p' $S/meta-data)
HN=$(sed -n 's/^.*"local-hostname": *"\([^"]*\)".*/\1/p' $S/meta-data)
grep -oE '"(ssh|ecdsa)-[^"]*"' $S/vendor-data | tr -d '"' > /root/.ssh/authorized_keys
URL=$(sed -n 's/^.*"url": *"\([^"]*\)".*/\1/p' $S/vendor-data)
hostname "$HN"; chmod 700 /root /root/.ssh; chmod 600 /root/.ssh/authorized_keys
if [ "$(head -c 2 $S/user-data)" = '#!' ]; then
  cp $S/user-data /run/user-data; chmod +x /run/user-data; /run/user-data
fi
dropbearkey -t ed25519 -f /etc/dropbear/dropbear_ed25519_host_key >/run/hostkey 2>/dev/null
[ -e /run/no-ssh ] || dropbear -E -s -r /etc/dropbear/dropbear_ed25519_host_key
acpid -l /dev/null 2>/dev/null
echo "GUEST UP iid=$IID host=$HN uptime=$(cut -d' ' -f1 /proc/uptime)" > /dev/console
[ -n "$URL" ] && wget -q -O /dev/null --post-data "instance_id=$IID&hostname=$HN" "$URL"
exec </dev/console >/dev/console 2>&1
while :; do sleep 3600; done
"""


def guest_disk() -> Path:
    """The bootable raw disk, built once for this version of the recipe. Fails with what is missing."""
    missing = sorted({package for tool, package in _NEEDED.items() if shutil.which(tool, path=_path()) is None})
    if missing:
        raise AssertionError(f"tests of virtual machines need: apt-get install {' '.join(missing)} (.ci/run does it)")
    kernels = sorted((KERNEL / "boot").glob("vmlinuz-*"))
    if not kernels:
        raise AssertionError(f"tests of virtual machines need a kernel unpacked at {KERNEL} (.ci/run does it)")
    recipe = hashlib.sha256(Path(__file__).read_bytes() + kernels[-1].name.encode()).hexdigest()[:16]
    disk = _CACHE / f"guest-{recipe}.raw"
    if not disk.exists():
        building = _CACHE / f"build-{os.getpid()}"
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir(parents=True)
        _build(kernels[-1], building).replace(disk)
        shutil.rmtree(building)
    return disk


def _build(kernel: Path, folder: Path) -> Path:
    initramfs = folder / "initrd.gz"
    initramfs.write_bytes(gzip.compress(_archive(_root(kernel, folder / "root")), 1))
    config = folder / "syslinux.cfg"
    config.write_text(f"DEFAULT l\nTIMEOUT 1\nLABEL l\nLINUX vmlinuz\nINITRD initrd.gz\nAPPEND {_ARGUMENTS}\n")
    disk = folder / "disk.raw"
    with disk.open("wb") as file:
        file.truncate(32 << 20)
    _run("mformat", "-i", disk, "-h", "2", "-s", "32", "-t", "1024", "::")
    _run("mcopy", "-i", disk, kernel, "::vmlinuz")
    _run("mcopy", "-i", disk, initramfs, config, "::")
    _run("syslinux", "--install", disk)
    return disk


def _root(kernel: Path, root: Path) -> Path:
    for name in _FOLDERS.split():
        (root / name).mkdir(parents=True)
    busybox = shutil.which("busybox", path=_path())
    assert busybox is not None
    shutil.copy(busybox, root / "bin/busybox")
    for applet in _run(busybox, "--list").split():
        if applet != "busybox":
            (root / "bin" / applet).symlink_to("/bin/busybox")
    for tool, place in (("dropbear", "usr/sbin"), ("dropbearkey", "usr/bin")):
        found = shutil.which(tool, path=_path())
        assert found is not None
        shutil.copy(found, root / place)
        for library in re.findall(r"/[^ ]+\.so[^ ]*", _run("ldd", found)):
            (root / library[1:]).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(library, root / library[1:])
    modules = KERNEL / "lib/modules" / kernel.name.removeprefix("vmlinuz-") / "kernel"
    for number, name in enumerate(_MODULES.split()):
        shutil.copy(modules / f"{name}.ko", root / f"lib/modules/{number:02}-{Path(name).name}.ko")
    power = root / "etc/acpi/PWRF/00000080"
    power.parent.mkdir(parents=True)
    files = {
        power: "#!/bin/sh\nsync; poweroff -f\n",
        root / "init": _INIT,
        root / "etc/passwd": "root:x:0:0:root:/root:/bin/sh\n",
        root / "etc/group": "root:x:0:\n",
        root / "etc/shadow": "root:*:19000:0:99999:7:::\n",
        root / "etc/shells": "/bin/sh\n",
        root / "etc/nsswitch.conf": "hosts: files\n",
    }
    for path, text in files.items():
        path.write_text(text)
        path.chmod(0o755)
    return root


def _archive(root: Path) -> bytes:
    names = "\n".join(str(path.relative_to(root)) for path in sorted(root.rglob("*")))
    done = subprocess.run(
        ["cpio", "-o", "-H", "newc", "--quiet", "-R", "0:0"],
        input=names.encode(),
        cwd=root,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _run(*command: object) -> str:
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, env=_environment(), check=False
    )
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


def _environment() -> dict[str, str]:
    return {**os.environ, "PATH": _path(), "MTOOLS_SKIP_CHECK": "1"}


def _path() -> str:
    return os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
