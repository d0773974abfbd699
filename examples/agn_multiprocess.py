"""AGN and DiLoCo over two processes of two devices each, by `jax.distributed` and `jax.shard_map`.

The training of agn_pmap.py with one seed, and its numbers but for rounding. Without a process id it
starts itself twice on this machine, and waits for both. On two machines start it on each, with a process
id and the address of the first:

    python examples/agn_multiprocess.py [--timeout SECONDS] [--out FILE.png]
    python examples/agn_multiprocess.py --process-id 0 --coordinator HOST:PORT
"""

import argparse
import pathlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
from agn_pmap import AXIS, METHODS, REPLICAS, report, train
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

PROCESSES = 2


def launch(arguments: list[str], timeout: float) -> None:
    """Runs this file in each process, and prints what process 0 says.

    Raises:
      SystemExit: If a process failed or hung, after printing what it said; the others are ended.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [sys.executable, "-u", __file__, *arguments, "--coordinator", address, "--process-id"]
    with tempfile.TemporaryDirectory() as folder:
        logs = [pathlib.Path(folder) / f"{index}" for index in range(PROCESSES)]
        children = []
        try:
            for index, log in enumerate(logs):
                with log.open("w") as stream:
                    children.append(
                        subprocess.Popen([*command, str(index)], stdout=stream, stderr=stream)
                    )
            deadline = time.monotonic() + timeout
            while None in (codes := [child.poll() for child in children]):
                if any(codes) or time.monotonic() > deadline:
                    break
                time.sleep(0.1)
        finally:
            for child in children:
                child.kill()
                child.wait()
        # The first to fail takes the others with it; if all still run, they hang.
        failed = [index for index, code in enumerate(codes) if code]
        hanging = [index for index, code in enumerate(codes) if code is None]
        for index in failed or hanging:
            how = f"failed with exit code {codes[index]}" if failed else f"hung for {timeout:g} s"
            print(f"Process {index} {how}:\n{logs[index].read_text()}", file=sys.stderr)
        if failed or hanging:
            sys.exit(1)
        # Gloo tells of its connections on stdout.
        said = (line for line in logs[0].read_text().splitlines() if not line.startswith("[Gloo]"))
        print(*said, sep="\n")


def on_replicas(function: Callable[..., Any], donate_argnums: tuple[int, ...] = ()) -> Any:
    """Maps a function over all devices of all processes, along a leading axis."""

    def on_replica(*arguments: Any) -> Any:
        results = function(*jax.tree.map(lambda x: x[0], arguments))
        return jax.tree.map(lambda x: x[None], results)

    mesh = Mesh(jax.devices(), AXIS)
    mapped = jax.shard_map(on_replica, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS))
    return jax.jit(mapped, donate_argnums=donate_argnums)


def main() -> None:
    """Starts the processes, or is one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--process-id", type=int)
    parser.add_argument("--coordinator", help="HOST:PORT of process 0")
    parser.add_argument("--timeout", type=float, default=300, help="in seconds")
    parser.add_argument("--out", default="agn_multiprocess.png")
    chosen = parser.parse_args()
    if chosen.process_id is None:
        launch(sys.argv[1:], chosen.timeout)
        return
    if chosen.coordinator is None:
        parser.error("--process-id needs --coordinator")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", REPLICAS // PROCESSES)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(chosen.coordinator, PROCESSES, chosen.process_id)
    results = {method: train(method, on_replicas, seeds=1) for method in METHODS}
    if jax.process_index() == 0:
        report(results, 1, chosen.out)


if __name__ == "__main__":
    main()
