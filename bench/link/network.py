"""Emulate two nodes on one machine: network namespaces with a slow link between them.

The namespaces have no names: the kernel removes one, with its interfaces and limits, when no
process is inside or holds it open. Nothing is left behind, however the bench ends.
"""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from runtime.errors import UserError

NODES = 2
LINKS = ("shared", "rails")
NEW_NETWORK = 0x40000000  # CLONE_NEWNET of <sched.h>; os.unshare and os.setns need Python 3.12
BURST = "128kb"  # more than one packet: veth passes on up to 64 KiB at once
QUEUE = 1 << 26  # bytes that may wait for the link: TCP's windows fit, nothing is dropped
SHORT = ("u16", "0x0000", "0xff00", "at", "2")
"""tc's match for packets of less than 256 bytes, which get priority.

Behind a full queue, acknowledgements would wait for tenths of a second, as in no real switch, and
TCP would send late or resend."""
TRUNK = "trunk"
CURRENT = "/proc/thread-self/ns/net"
WITHOUT_ROOT = "unshare --user --map-root-user --net"


class NetworkError(UserError):
    """This machine lacks or forbids something that emulated nodes need; the message names it."""


class Namespace:
    """A network namespace that lives until it is closed and no process is inside."""

    def __init__(self) -> None:
        with open(CURRENT, "rb", buffering=0) as outside:
            _call("unshare", NEW_NETWORK)
            try:
                self._file = os.open(CURRENT, os.O_RDONLY)
            finally:
                _call("setns", outside.fileno(), NEW_NETWORK)
        self.run("ip", "link", "set", "lo", "up")

    @property
    def path(self) -> str:
        """Path of a file through which processes of the same user can ``enter``."""
        return f"/proc/{os.getpid()}/fd/{self._file}"

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Move the calling thread, and the processes it starts, into the namespace."""
        with open(CURRENT, "rb", buffering=0) as outside:
            _call("setns", self._file, NEW_NETWORK)
            try:
                yield
            finally:
                _call("setns", outside.fileno(), NEW_NETWORK)

    def run(self, *command: str) -> str:
        """Run a command inside and return its output. Raises NetworkError if it fails."""
        with self.inside():
            process = subprocess.run(command, capture_output=True, text=True, check=False)
        if process.returncode:
            raise NetworkError(f"`{' '.join(command)}` failed: {process.stderr.strip()}")
        return process.stdout

    def close(self) -> None:
        """Close the handle that keeps the namespace alive."""
        os.close(self._file)


class Network:
    """Two nodes of ``ranks_per_node`` ranks; a context manager.

    Without rails the ranks of a node share its namespace, and all ranks share the link's rate. With
    rails every rank has its own namespace and link, plugged into its node's bridge; between the
    bridges each rank may send at the rate, whatever the destination.

    Raises NetworkError if permission is lacking, or iproute2 or a kernel module is missing.
    """

    def __init__(self, *, rails: bool, ranks_per_node: int = 4) -> None:
        self.rails = rails
        self.ranks_per_node = ranks_per_node
        self.size = NODES * ranks_per_node
        self.interface = "rail" if rails else TRUNK

    def __enter__(self) -> "Network":
        check_permission()
        with ExitStack() as open_files:
            self._nodes = [_new_namespace(open_files) for _ in range(NODES)]
            _connect(self._nodes[0], TRUNK, self._nodes[1], TRUNK)
            rank_nodes = [self._nodes[rank // self.ranks_per_node] for rank in range(self.size)]
            self._ranks = rank_nodes
            if self.rails:
                self._ranks = [_new_namespace(open_files) for _ in range(self.size)]
                for node in self._nodes:
                    node.run("ip", "link", "add", "switch", "type", "bridge")
                    node.run("ip", "link", "set", TRUNK, "master", "switch")
                    node.run("ip", "link", "set", "switch", "up")

            for rank, (node, namespace) in enumerate(zip(rank_nodes, self._ranks, strict=True)):
                if self.rails:
                    _connect(node, f"port{rank}", namespace, self.interface)
                    node.run("ip", "link", "set", f"port{rank}", "master", "switch")
                if self.rails or rank % self.ranks_per_node == 0:
                    address = f"{self.address(rank)}/24"
                    namespace.run("ip", "address", "add", address, "dev", self.interface)
            self._open_files = open_files.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._open_files.close()

    def address(self, rank: int) -> str:
        """Return the IPv4 address of a rank; without rails, this is its node's address."""
        host = rank if self.rails else rank // self.ranks_per_node
        return f"10.77.0.{1 + host}"

    def path(self, rank: int) -> str:
        """Return the path of a rank's namespace, for ``enter``."""
        return self._ranks[rank].path

    def limit(self, rate: str | None) -> None:
        """Limit the link, or each rail, to a rate in tc's notation, in both directions.

        None removes the limit.

        Raises NetworkError if tc does not know the rate, or the kernel lacks htb or u32.
        """
        for index, node in enumerate(self._nodes):
            if "noqueue" not in node.run("tc", "qdisc", "show", "dev", TRUNK):
                node.run("tc", "qdisc", "delete", "dev", TRUNK, "root")
            if rate is None:
                continue
            node.run("tc", "qdisc", "add", "dev", TRUNK, "root", "handle", "1:", "htb")
            ranks = range(index * self.ranks_per_node, (index + 1) * self.ranks_per_node)
            self._limit_class(node, 1, rate, SHORT)
            addresses = dict.fromkeys(map(self.address, ranks))
            for number, address in enumerate(addresses, start=2):
                self._limit_class(node, number, rate, ("ip", "src", f"{address}/32"))

    def crossed(self) -> tuple[int, int]:
        """Return the bytes sent to node 1 and to node 0 so far, as the interfaces count them."""
        sent_bytes = []
        for node in self._nodes:
            with node.inside():
                lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
            for line in lines:
                interface, _, counts = line.partition(":")
                if interface.strip() == TRUNK:
                    sent_bytes.append(int(counts.split()[8]))
        return sent_bytes[0], sent_bytes[1]

    @staticmethod
    def _limit_class(node: Namespace, number: int, rate: str, match: Sequence[str]) -> None:
        class_id = f"1:{number}"
        prio = str(number)
        bucket = ["htb", "rate", rate, "burst", BURST, "cburst", BURST]
        bucket += ["quantum", "65536", "prio", prio]  # without a quantum htb warns that it guessed
        node.run("tc", "class", "add", "dev", TRUNK, "parent", "1:", "classid", class_id, *bucket)
        queue = ("handle", f"{number + 1}:", "bfifo", "limit", str(QUEUE))
        node.run("tc", "qdisc", "add", "dev", TRUNK, "parent", class_id, *queue)
        chosen = ("protocol", "ip", "prio", prio, "u32", "match", *match, "flowid", class_id)
        node.run("tc", "filter", "add", "dev", TRUNK, "parent", "1:", *chosen)


def enter(path: str) -> None:
    """Move the calling thread, and everything that it starts later, into a namespace."""
    with open(path, "rb", buffering=0) as file:
        _call("setns", file.fileno(), NEW_NETWORK)


def check_permission() -> None:
    """Check that this machine can emulate the nodes.

    Raises NetworkError if it is not Linux, iproute2 is missing, or this process may not make
    network namespaces.
    """
    if not Path(CURRENT).exists():
        raise NetworkError(
            "the link bench needs Linux network namespaces, but this system has none; run it on"
            " Linux"
        )
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise NetworkError(
                f"the link bench needs {tool} on the PATH; install iproute2 (apt-get install"
                " iproute2)"
            )
    try:
        Namespace().close()
    except PermissionError as error:
        raise NetworkError(
            "the link bench makes network namespaces and limits the link between them, for which "
            f"it needs CAP_SYS_ADMIN and CAP_NET_ADMIN, but the system refused ({error.strerror}); "
            "run it as root, or, if unprivileged user namespaces are allowed, put "
            f"`{WITHOUT_ROOT}` before the command"
        ) from error


def prepare_machine() -> None:
    """Check the permission, and set the environment of the ranks.

    Raises NetworkError as ``check_permission`` does.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # otherwise torch would warn that the namespaces have no name server
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    check_permission()


def _new_namespace(files: ExitStack) -> Namespace:
    namespace = Namespace()
    files.callback(namespace.close)
    return namespace


def _call(name: str, *arguments: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), name)


def _connect(first: Namespace, first_name: str, second: Namespace, second_name: str) -> None:
    """Connect two namespaces by a pair of veth interfaces, both up."""
    peer = ("peer", "name", second_name, "netns", second.path)
    first.run("ip", "link", "add", first_name, "type", "veth", *peer)
    first.run("ip", "link", "set", first_name, "up")
    second.run("ip", "link", "set", second_name, "up")
