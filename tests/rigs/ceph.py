"""A real Ceph RADOS Gateway on loopback, for tests: the S3 store that on-premises clusters use.

One monitor, one manager, one OSD that keeps its objects in memory, one gateway. Needs the programs (Debian: ceph-mon,
ceph-mgr, ceph-osd, radosgw, ceph-common), but no systemd and no containers; starts in about 13 s on two cores. Unlike
moto, it checks signatures and the checksums of uploads.
"""

import http.client
import os
import secrets
import shutil
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tests.rigs.s3 import free_port

PROGRAMS = (
    *("ceph-mon", "ceph-mgr", "ceph-osd", "radosgw"),
    *("ceph", "ceph-authtool", "monmaptool", "radosgw-admin"),
)
START_SECONDS = 120.0
STOP_SECONDS = 10.0
POLL_SECONDS = 0.1
LOG_TAIL_LINES = 30

# cephx stays on: without it radosgw never completes its handshake. memstore: only logs are written to disk.
CONF = """\
[global]
fsid = {fsid}
mon host = [v2:127.0.0.1:{mon_port}/0,v1:127.0.0.1:{mon_old_port}/0]
public addr = 127.0.0.1
cluster addr = 127.0.0.1
keyring = {folder}/keyring
run dir = {folder}
admin socket = {folder}/$name.asok
pid file = {folder}/$name.pid
log file = {folder}/$name.log
mon data = {folder}/mon
mgr data = {folder}/mgr
osd data = {folder}/osd
crash dir = {folder}
mon cluster log file = {folder}/cluster.log
mon allow pool size one = true
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 1
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
osd objectstore = memstore
memstore device bytes = 4294967296
rgw frontends = beast endpoint=127.0.0.1:{gateway_port}
"""


@dataclass(frozen=True, kw_only=True)
class Gateway:
    """The endpoint, one user's keys, and `admin`, which runs `radosgw-admin` with these words."""

    endpoint: str
    access_key: str
    secret_key: str = field(repr=False)
    admin: Callable[..., object] = field(repr=False)


def missing_programs() -> list[str]:
    """The programs that are not installed here (daemons may be outside a user's PATH)."""
    return [name for name in PROGRAMS if shutil.which(name, path=_search_path()) is None]


@contextmanager
def ceph_gateway(folder: Path) -> Iterator[Gateway]:
    """Starts the four daemons with all their files in the new `folder`, yields once S3 answers, and stops them by
    pid."""
    with ceph_cluster(folder) as cluster:
        yield cluster.gateway()


@contextmanager
def ceph_cluster(folder: Path) -> Iterator["CephCluster"]:
    """As `ceph_gateway`, for those who kill the gateway and start it again."""
    if missing := missing_programs():
        raise FileNotFoundError(f"Ceph is not installed: no {', '.join(missing)} on PATH")
    cluster = CephCluster(folder)
    try:
        cluster.start()
        yield cluster
    except BaseException as error:
        error.add_note(cluster.log_tail())
        raise
    finally:
        cluster.stop()


class CephCluster:
    """The daemons, and what they have in the folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.conf, self.keyring = self.folder / "ceph.conf", self.folder / "keyring"
        self.mon_port, self.gateway_port = free_port(), free_port()
        self._daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Starts the daemons in order: each one needs those before it."""
        fsid = str(uuid.uuid4())
        self._write_conf(fsid)
        self._start_monitor(fsid)
        self._add_key("mgr.a", "mon", "allow profile mgr", "osd", "allow *")
        self._start("ceph-mgr", "-i", "a")
        self._start_osd()
        self._add_key("client.rgw.a", "mon", "allow rwx", "osd", "allow rwx", "mgr", "allow rw")
        self.start_gateway()

    def start_gateway(self) -> None:
        """Starts the last of the daemons, and waits until it answers."""
        self._start("radosgw", "-n", "client.rgw.a")
        self._wait_for(self._gateway_answers)

    def kill_gateway(self) -> None:
        """SIGKILL: its port is closed from now on."""
        daemon = self._daemons.pop()
        daemon.kill()
        daemon.wait()

    def gateway(self) -> Gateway:
        """Makes a user, whose keys it returns with the endpoint."""
        access_key, secret_key = secrets.token_hex(10), secrets.token_hex(20)
        keys = ["--access-key", access_key, "--secret-key", secret_key]
        admin = partial(self._run, "radosgw-admin", "-n", "client.rgw.a")
        admin("user", "create", "--uid=test", "--display-name=test", *keys)
        endpoint = f"http://127.0.0.1:{self.gateway_port}"
        return Gateway(endpoint=endpoint, access_key=access_key, secret_key=secret_key, admin=admin)

    def stop(self) -> None:
        """Stops the gateway first, because it depends on the others. Nothing in memory needs a slow shutdown."""
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._daemons.clear()

    def log_tail(self) -> str:
        """The last lines of every daemon's log."""
        parts = []
        for path in sorted(self.folder.glob("*.log")):
            lines = path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
            parts.append("\n".join([f"--- {path.name}", *lines]))
        return "\n".join(parts)

    def _write_conf(self, fsid: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in ("mon", "mgr", "osd"):
            (self.folder / name).mkdir()
        self.conf.write_text(
            CONF.format(
                fsid=fsid,
                folder=self.folder,
                mon_port=self.mon_port,
                mon_old_port=free_port(),
                gateway_port=self.gateway_port,
            )
        )

    def _start_monitor(self, fsid: str) -> None:
        keyring, monmap = str(self.keyring), str(self.folder / "monmap")
        every = [word for who in ("mon", "osd", "mgr", "mds") for word in ("--cap", who, "allow *")]
        self._run("ceph-authtool", "--create-keyring", keyring, "--gen-key", "-n", "mon.", "--cap", "mon", "allow *")
        self._run("ceph-authtool", keyring, "--gen-key", "-n", "client.admin", *every)
        (host_line,) = [line for line in self.conf.read_text().splitlines() if line.startswith("mon host")]
        addresses = host_line.partition("= ")[2]
        self._run("monmaptool", "--create", "--fsid", fsid, "--addv", "a", addresses, monmap)
        self._run("ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap, "--keyring", keyring)
        self._start("ceph-mon", "-i", "a")

    def _start_osd(self) -> None:
        identity = str(uuid.uuid4())
        self._run("ceph", "osd", "new", identity)
        self._add_key("osd.0", "mon", "allow profile osd", "mgr", "allow profile osd", "osd", "allow *")
        self._run("ceph-osd", "--mkfs", "-i", "0", "--osd-uuid", identity)
        self._start("ceph-osd", "-i", "0")

    def _add_key(self, name: str, *capabilities: str) -> None:
        key = self._run("ceph", "auth", "get-or-create", name, *capabilities)
        with self.keyring.open("a") as file:
            file.write(key)

    def _run(self, program: str, *arguments: str) -> str:
        words = [program, *arguments] if program == "monmaptool" else [program, *arguments, "--conf", str(self.conf)]
        environment = os.environ | {"PATH": _search_path()}
        done = subprocess.run(
            words, env=environment, capture_output=True, text=True, timeout=START_SECONDS, check=False
        )
        if done.returncode != 0:
            raise RuntimeError(f"{program} {arguments[0]} ended with {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def _start(self, program: str, *arguments: str) -> None:
        with (self.folder / f"start-{program}.log").open("wb") as log:
            self._daemons.append(
                subprocess.Popen(
                    [program, "--foreground", "--conf", str(self.conf), *arguments],
                    env=os.environ | {"PATH": _search_path()},
                    cwd=self.folder,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    def _wait_for(self, predicate: Callable[[], bool]) -> None:
        deadline, pause = time.monotonic() + START_SECONDS, threading.Event()
        while not predicate():
            gone = [daemon.args for daemon in self._daemons if daemon.poll() is not None]
            if gone:
                raise RuntimeError(f"daemon ended by itself: {gone}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"Ceph's gateway does not answer after {START_SECONDS:.0f} s")
            pause.wait(POLL_SECONDS)

    def _gateway_answers(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.gateway_port, timeout=5)
        try:
            connection.request("GET", "/")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()


def _search_path() -> str:
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
