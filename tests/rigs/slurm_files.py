"""The size of the rig's Slurm, and the files that its daemons read."""

import os
import pwd
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path

from tests.rigs.s3 import free_port

# cred_expire=5: a requeued job waits for its credential to expire, 2 minutes by default. ReturnToService=2:
# a node that comes back is used again. KillWait=5: seconds from TERM to KILL when a job is cut off.
# Memory is given away as cores are: 1000 MB of 4000 to a job that asks for none.
# MessageTimeout and BatchStartTimeout: on a busy machine a daemon may take longer than the default of 10 s to answer;
# srun then fails to start a rank, or a job is taken for lost.
CONF = """\
ClusterName=rig
FirstJobId={first_job}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerNode=1000
GresTypes=gpu
SlurmdParameters=config_overrides
ReturnToService=2
RequeueExit=75
MessageTimeout=30
BatchStartTimeout=60
SlurmdTimeout=30
KillWait=5
MinJobAge=600
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True, kw_only=True)
class SlurmConfig:
    """Size and timeouts of the cluster. `gpus_per_node`: of type h100, which are only names. `first_job`: the number of
    its first job; 0: by the worker of pytest."""

    num_nodes: int = 2
    cpus_per_node: int = 2
    gpus_per_node: int = 0
    first_job: int = 0
    start_seconds: float = 120.0
    stop_seconds: float = 15.0

    def __post_init__(self) -> None:
        if self.num_nodes < 1 or self.cpus_per_node < 1:
            raise ValueError(f"a cluster has at least 1 node of 1 CPU, got {self.num_nodes} x {self.cpus_per_node}")

    @property
    def node_names(self) -> list[str]:
        return [f"n{i + 1}" for i in range(self.num_nodes)]


def write_files(folder: Path, config: SlurmConfig) -> None:
    """slurm.conf, munge's key and the daemons' folders, in an empty folder."""
    (folder / "state").mkdir()
    for name in config.node_names:
        (folder / f"spool-{name}").mkdir()
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    controller_port, *node_ports = (free_port() for _ in range(1 + config.num_nodes))
    gpus = f"Gres=gpu:h100:{config.gpus_per_node} " if config.gpus_per_node else ""
    nodes = "\n".join(
        f"NodeName={name} NodeHostName=rig-{name} NodeAddr=127.0.0.1 Port={port} "
        f"CPUs={config.cpus_per_node} RealMemory=4000 {gpus}State=UNKNOWN"
        for name, port in zip(config.node_names, node_ports, strict=True)
    )
    text = CONF.format(
        host=socket.gethostname().split(".")[0],
        controller_port=controller_port,
        user=pwd.getpwuid(os.getuid()).pw_name,
        folder=folder,
        nodes=nodes,
        first_job=config.first_job or _first_job(os.environ.get("PYTEST_XDIST_WORKER", "gw0")),
    )
    (folder / "slurm.conf").write_text(text)
    for number in range(config.gpus_per_node):
        (folder / f"gpu{number}").touch()
    if gpus:
        (folder / "gres.conf").write_text(f"Name=gpu Type=h100 File={folder}/gpu[0-{config.gpus_per_node - 1}]\n")


def search_path() -> str:
    """PATH with the daemons' folders."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


def _first_job(worker: str) -> int:
    """Numbers that no other cluster on this machine comes to at the same time: a job's number decides at which port its
    ranks meet, and a port that another job takes first makes a try crash."""
    return 1 + 1000 * int(worker.removeprefix("gw") or 0)
