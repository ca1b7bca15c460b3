"""A real Slurm on one machine.

A controller and a daemon per virtual node, with GPUs that are only names.

python -m tests.slurm.cluster start FOLDER [--nodes 2] [--gpu a100] [--gpus 8]
    prints the line that a shell needs to use it, export SLURM_CONF=FOLDER/slurm.conf
python -m tests.slurm.cluster stop FOLDER

Needs root, Debian's slurm-wlm and nothing that runs already; every file and process is FOLDER's
own.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

from runtime.errors import UserError
from tests.starts import ended, free_port
from tools.common.arguments import parser_for, positive
from train.run import exit_status

CONF = """\
ClusterName=virtual
SlurmctldHost={host}({network}.254)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/%n.pid
SlurmdSpoolDir={folder}/%n
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
GresTypes=gpu
ReturnToService=2
SlurmdTimeout=20
JobRequeue=1
KillWait=5
# As sites have it: what no node or limit of the partition can take is refused,
# and does not wait for ever.
EnforcePartLimits=ALL
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
# A requeued job is held for as long as a credential is valid, two minutes by default.
AuthInfo=cred_expire=5
SchedulerParameters=bf_interval=2,sched_interval=2,batch_sched_delay=0
"""
NODE = """\
NodeName={name} NodeAddr={network}.{number} Port={port} Gres=gpu:{kind}:{gpus} \
CPUs=128 Sockets=2 CoresPerSocket=64 RealMemory=1000000
"""
PARTITIONS = """\
PartitionName=gpu Nodes=ALL Default=YES MaxTime=7-0 PriorityTier=1 GraceTime=30
PartitionName=urgent Nodes=ALL MaxTime=1-0 PriorityTier=2
"""
# A namespace of mounts and one of host names for each node: its daemon and its tasks are on a
# machine of that name.
START = (
    'hostname "$0"; mount --bind "$1/hosts" /etc/hosts; exec slurmd -D -N "$0" -f "$1/slurm.conf"'
)


PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "sinfo", "squeue")
"""Programs of slurm-wlm that a cluster and its users start."""


class VirtualError(UserError):
    """The virtual cluster cannot be started here."""


def missing():
    """Say what this machine lacks for a virtual cluster; empty if nothing."""
    programs = [name for name in (*PROGRAMS, "unshare") if shutil.which(name) is None]
    if programs:
        return f"there is no {', '.join(programs)} (Debian: apt-get install slurm-wlm)"
    if os.geteuid() != 0:
        return "virtual nodes need root, for host names and addresses of their own"
    try:
        subprocess.run(["unshare", "--mount", "--uts", "true"], check=True, capture_output=True)
    except subprocess.CalledProcessError as error:
        return f"namespaces are closed here ({error.stderr.decode().strip()})"
    return ""


def write_configuration(folder, nodes, kinds, gpus):
    """Write slurm.conf, gres.conf, hosts and devices into ``folder``; return the nodes' names."""
    names = [f"node{number}" for number in range(1, nodes + 1)]
    for sub in ("state", *names):
        (folder / sub).mkdir(parents=True, exist_ok=True)
    port = free_port()
    network = "127.0.1"
    conf = CONF.format(
        host=socket.gethostname().split(".")[0], network=network, port=port, folder=folder
    )
    generic = "AutoDetect=off\n"
    for number, name in enumerate(names, 1):
        kind = kinds[(number - 1) * len(kinds) // nodes]
        conf += NODE.format(
            name=name, network=network, number=number, port=free_port(), kind=kind, gpus=gpus
        )
        generic += f"NodeName={name} Name=gpu Type={kind} File={folder}/gpu[0-{gpus - 1}]\n"
    (folder / "slurm.conf").write_text(conf + PARTITIONS)
    (folder / "gres.conf").write_text(generic)
    for number in range(gpus):
        if not (folder / f"gpu{number}").exists():
            os.mknod(folder / f"gpu{number}", 0o600 | 0o020000, os.makedev(1, 3))  # /dev/null
    hosts = [f"{network}.{number} {name}\n" for number, name in enumerate(names, 1)]
    (folder / "hosts").write_text(Path("/etc/hosts").read_text() + "".join(hosts))
    return names


def start(folder, nodes=2, kinds=("a100",), gpus=8):
    """Start a cluster in an empty or new folder, and wait until its nodes are idle.

    Raises:
        VirtualError: something is missing, the folder's cluster was not stopped, or a node is not
            up within 30 s.
    """
    folder = folder.resolve()
    if (folder / "pids").exists():
        raise VirtualError(
            f"{folder} holds a cluster that was not stopped; stop it, or name another folder"
        )
    if why := missing():
        raise VirtualError(f"no virtual cluster: {why}")
    names = write_configuration(folder, nodes, kinds, gpus)
    _launch(folder, "controller", ["slurmctld", "-D", "-i", "-f", f"{folder}/slurm.conf"])
    for name in names:
        boot(folder, name)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        environment = {**os.environ, "SLURM_CONF": f"{folder}/slurm.conf"}
        result = ended(["sinfo", "-h", "-o", "%T %D"], inherited=environment)
        if f"idle {nodes}" in result.stdout:
            return
        time.sleep(0.2)
    stop(folder)
    raise VirtualError(
        f"the nodes are not idle after 30 s: {result.stdout or result.stderr}; look at "
        f"{folder}/daemons.log"
    )


def boot(folder, name):
    """Start the daemon of a node."""
    folder = folder.resolve()
    command = ["unshare", "--mount", "--uts", "--propagation", "private", "bash", "-c"]
    _launch(folder, name, [*command, START, name, str(folder)])


def _launch(folder, name, command):
    environment = {**os.environ, "SLURM_CONF": f"{folder}/slurm.conf"}
    with (folder / "daemons.log").open("ab") as log:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    with (folder / "pids").open("a") as pids:
        pids.write(f"{name} {process.pid}\n")


def _pids(folder):
    if not (folder / "pids").exists():
        raise VirtualError(
            f"{folder} holds no virtual cluster; name the folder that it was started in"
        )
    lines = (folder / "pids").read_text().splitlines()
    return {name: int(pid) for name, pid in map(str.split, lines)}


def kill(folder, name):
    """Kill all processes of a node at once, its daemon and whatever its jobs started."""
    its = os.readlink(f"/proc/{_pids(folder)[name]}/ns/uts")
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.readlink(process / "ns" / "uts") == its:
                os.kill(int(process.name), signal.SIGKILL)


def stop(folder):
    """End the daemons of a folder, and whatever their jobs left running."""
    conf = f"{folder.resolve()}/slurm.conf"
    pids = _pids(folder)
    with suppress(FileNotFoundError, subprocess.TimeoutExpired):
        environment = {**os.environ, "SLURM_CONF": conf}
        subprocess.run(
            ["scancel", "--full", "--signal=KILL", "--user=root"],
            env=environment,
            check=False,
            timeout=30,
        )
    for pid in pids.values():
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            names = (process / "environ").read_bytes().split(b"\0")
            if f"SLURM_CONF={conf}".encode() in names and any(
                name.startswith(b"SLURM_JOB_ID=") for name in names
            ):
                os.kill(int(process.name), signal.SIGKILL)
    (folder / "pids").unlink()


@contextmanager
def virtual_cluster(folder, nodes=2, kinds=("a100",), gpus=8):
    """Start a cluster and stop it at the end of the block.

    Yields the environment of Slurm's commands.
    """
    start(folder, nodes, kinds, gpus)
    try:
        yield {**os.environ, "SLURM_CONF": f"{folder.resolve()}/slurm.conf"}
    finally:
        stop(folder)


def main(argv):
    """Start or stop a cluster."""
    parser = parser_for("python -m tests.slurm.cluster", __doc__)
    parser.add_argument("action", choices=("start", "stop"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--nodes", type=positive, default=2)
    parser.add_argument(
        "--gpu", nargs="+", default=["a100"], help="names of the GPUs, each of as many nodes"
    )
    parser.add_argument("--gpus", type=positive, default=8, help="GPUs per node")
    args = parser.parse_args(argv)
    if args.action == "stop":
        stop(args.folder)
        return
    start(args.folder, args.nodes, args.gpu, args.gpus)
    print(f"export SLURM_CONF={args.folder.resolve()}/slurm.conf")


if __name__ == "__main__":
    sys.exit(exit_status(main, sys.argv[1:]))
