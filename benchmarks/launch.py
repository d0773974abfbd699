"""Start several processes on this machine that train together with `jax.distributed`."""

import pathlib
import socket
import subprocess
import sys
import tempfile
import time

import jax


def launch(script: str, arguments: list[str], processes: int, timeout: float) -> None:
    """Runs a script in each of several processes, and prints what process 0 says.

    Raises:
      SystemExit: If a process failed or hung, after printing what it said; the others are ended.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [sys.executable, "-u", script, *arguments, "--coordinator", address, "--process-id"]
    with tempfile.TemporaryDirectory() as folder:
        logs = [pathlib.Path(folder) / f"{index}" for index in range(processes)]
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


def join(coordinator: str, processes: int, index: int, devices: int) -> None:
    """Makes this one of several processes, with so many virtual devices each."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, processes, index)
