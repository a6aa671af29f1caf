"""Several "nodes" on one computer: a command on all of them under torchrun, with a slow link between the nodes.

A node is a network, UTS and PID namespace: it has its own address, its own host name and its own processes. The
nodes lie in one outer namespace with a bridge, so runs at the same time do not see each other, and nothing is left
behind: when this process ends, however it ends, the kernel ends all processes inside and removes the links. Ranks of
one node reach each other without the slow link. Linux, util-linux and iproute2 are needed; an ordinary user also
needs user namespaces. Latency is that of the computer.

Example:
    python scripts/emulate_nodes.py --ranks 2 --slow-link 1gbit -- scripts/bench_prefill.py --input-len 512
    python scripts/emulate_nodes.py --nodes 4 --ranks 1 -- -m dsa_engine generate --prompt Hello --max-tokens 8
    python scripts/emulate_nodes.py --lose cut --lose-at tokens: --lost-node 1 -- scripts/bench_prefill.py
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import FrameType

INSIDE = "--inside"  # first argument of the process that runs in the outer namespace
NETWORK = "10.77.0"  # in the outer namespace only
PORT = "29500"
START = Path(__file__).resolve().parents[1] / "docs" / "clusters" / "start.sh"
OWN_PROCESSES = ("--pid", "--fork", "--mount-proc", "--kill-child=KILL")
TOOLS = ("unshare", "setpriv", "ip", "tc", "mount", "sh", "hostname", "sysctl")


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2, help="number of nodes, 1 to 64 (default 2)")
    parser.add_argument("--ranks", type=int, default=1, help="processes on each node (default 1)")
    rate = "bandwidth of each node's link, per direction, as tc writes it: 100mbit, 1gbit (default 1gbit)"
    parser.add_argument("--slow-link", metavar="RATE", default="1gbit", help=rate)
    backends = "c10d orders the nodes by their host names (default); static by their numbers, as docs/clusters/start.sh"
    parser.add_argument("--rdzv-backend", choices=("c10d", "static"), default="c10d", help=backends)
    lose = "lose a node: cut its link, or kill all its processes at once"
    parser.add_argument("--lose", choices=("cut", "kill"), help=lose)
    parser.add_argument("--lose-at", metavar="TEXT", default="", help="lose it when a line of any output has this text")
    parser.add_argument("--lost-node", type=int, metavar="N", help="its number (default: the last)")
    parser.add_argument("command", nargs="+", help="after --: a script, or -m and a module, with its arguments")
    args = parser.parse_args(arguments)
    if not 1 <= args.nodes <= 64 or args.ranks < 1:
        parser.error("--nodes must be 1 to 64, and --ranks at least 1")
    if not re.fullmatch(r"\d+(\.\d+)?[kmg]?(bit|bps)", args.slow_link):
        parser.error(f"--slow-link must be a rate of tc, such as 100mbit or 1gbit, not {args.slow_link!r}")
    if args.lost_node is None:
        args.lost_node = args.nodes - 1
    if not 0 <= args.lost_node < args.nodes:
        parser.error(f"--lost-node must be 0 to {args.nodes - 1}")
    if bool(args.lose) != bool(args.lose_at):
        parser.error("--lose and --lose-at belong together")
    return args


def outer_namespace() -> list[str]:
    """The words before a command that start it as the first process of a network of its own."""
    # If this process is killed, so is that first process (setpriv), and with it all others (--kill-child).
    words = ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "--uts", "--mount", *OWN_PROCESSES]
    return words if os.geteuid() == 0 else [*words, "--user", "--map-root-user"]


def why_not() -> str:
    """What is missing here to start nodes; empty if nothing is."""
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"not installed: {', '.join(missing)} (packages util-linux and iproute2)"
    tried = "mount -t tmpfs nodes /run && ip link add bridge type bridge && ip netns add m && ip link add v type veth "
    tried += "peer name eth0 netns m && tc qdisc add dev v root tbf rate 1gbit burst 1mb latency 1s"
    done = subprocess.run([*outer_namespace(), "sh", "-c", tried], capture_output=True, text=True)
    return f"network namespaces are not permitted here: {done.stderr.strip()}" if done.returncode else ""


def run_outside(arguments: list[str]) -> int:
    """Starts this script again in the outer namespace, and passes signals on."""
    parse(arguments)
    if reason := why_not():
        print(f"error: {reason}", file=sys.stderr)
        return 2
    command = [*outer_namespace(), sys.executable, str(Path(__file__).resolve()), INSIDE, *arguments]
    # Its own group: Ctrl-C in a terminal reaches it once, from here.
    inside = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)

    def pass_on(number: int, frame: FrameType | None) -> None:
        os.killpg(inside.pid, number)  # unshare ignores it

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, pass_on)
    status = inside.wait()
    return status if status >= 0 else 128 - status


class Nodes:
    """The nodes of a run, in the outer namespace."""

    def __init__(self, args: argparse.Namespace):
        self._args = args
        self._processes: list[subprocess.Popen[str]] = []
        self._lost = threading.Event()

    def connect(self) -> None:
        """Makes the bridge, and for each node a namespace with a link to it; names resolve in all of them."""
        _do("mount -t tmpfs nodes /run")
        _do("ip link set lo up")
        _do("ip link add bridge type bridge")
        _do("ip link set bridge up")
        hosts = ["127.0.0.1 localhost"]
        # The bucket holds two of the packets that TCP hands to a link at once.
        slow = f"root tbf rate {self._args.slow_link} burst 128kb latency 200ms"
        for number in range(self._args.nodes):
            name, link = f"node-{number}", f"link{number}"
            hosts.append(f"{NETWORK}.{number + 1} {name}")
            _do(f"ip netns add {name}")
            _do(f"ip link add {link} type veth peer name eth0 netns {name}")
            _do(f"ip link set {link} master bridge up")
            _do(f"ip -n {name} link set lo up")
            _do(f"ip -n {name} addr add {NETWORK}.{number + 1}/24 dev eth0")
            _do(f"ip -n {name} link set eth0 up")
            _do(f"tc qdisc add dev {link} {slow}")
            # As docs/CLUSTERS.md advises: torchrun waits for a node that is cut off until the kernel gives up.
            _do(f"ip netns exec {name} sysctl -qw net.ipv4.tcp_retries2=6")
            _do(f"tc -n {name} qdisc add dev eth0 {slow}")
        Path("/run/hosts").write_text("\n".join(hosts) + "\n")
        _do("mount --bind /run/hosts /etc/hosts")

    def start(self) -> None:
        for number in range(self._args.nodes):
            name = f"node-{number}"
            words = ["ip", "netns", "exec", name, "unshare", "--uts", *OWN_PROCESSES]
            words += ["sh", "-c", 'hostname "$0" && exec "$@"', name]
            environment = os.environ | {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0"}
            nodes, ranks = str(self._args.nodes), str(self._args.ranks)
            if self._args.rdzv_backend == "static":
                environment |= {"NODES": nodes, "NUMBER": str(number), "FIRST_HOST": "node-0", "RANKS": ranks}
                environment |= {"PORT": PORT, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
                environment.setdefault("OMP_NUM_THREADS", "1")
                words += ["sh", str(START)]
            else:
                words += [sys.executable, "-m", "torch.distributed.run", "--nnodes", nodes, "--nproc-per-node", ranks]
                words += f"--rdzv-backend c10d --rdzv-id nodes --rdzv-endpoint node-0:{PORT}".split()
            process = subprocess.Popen(
                [*words, *self._args.command],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
            self._processes.append(process)

    def wait(self) -> int:
        """Prints what the nodes print, each line after the node's name, until all have ended; returns the first exit
        status that is not 0, of the nodes that were not lost."""
        readers = [threading.Thread(target=self._read, args=(number,)) for number in range(len(self._processes))]
        for reader in readers:
            reader.start()
        for number, process in enumerate(self._processes):
            while process.poll() is None and not self._is_lost(number):
                time.sleep(0.05)
        if self._lost.is_set():  # a node behind a cut link would wait for the others
            self._processes[self._args.lost_node].kill()
        statuses = [process.wait() for number, process in enumerate(self._processes) if not self._is_lost(number)]
        for reader in readers:
            reader.join()
        return next((status for status in statuses if status), 0)

    def _is_lost(self, number: int) -> bool:
        return self._lost.is_set() and number == self._args.lost_node

    def _read(self, number: int) -> None:
        output = self._processes[number].stdout
        assert output is not None
        for line in output:
            print(f"node-{number}: {line}", end="", flush=True)
            if self._args.lose and self._args.lose_at in line and not self._lost.is_set():
                lost = self._args.lost_node
                self._lost.set()
                if self._args.lose == "cut":
                    _do(f"ip link set link{lost} down")
                else:
                    self._processes[lost].kill()  # unshare takes its first process with it, and that all others
                print(f"emulate_nodes: node-{lost} is lost ({self._args.lose})", flush=True)

    def end(self) -> None:
        """Ends what still runs: with an interrupt, then by force."""
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and any(process.poll() is None for process in self._processes):
            time.sleep(0.05)
        for process in self._processes:
            process.kill()


def _do(command: str) -> None:
    subprocess.run(command.split(), check=True)


def run_inside(arguments: list[str]) -> int:
    def interrupted(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupted)
    nodes = Nodes(parse(arguments))
    nodes.connect()
    try:
        nodes.start()
        return nodes.wait()
    finally:
        nodes.end()


if __name__ == "__main__":
    words = sys.argv[1:]
    sys.exit(run_inside(words[1:]) if words[:1] == [INSIDE] else run_outside(words))
