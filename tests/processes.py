"""Tests in several processes: each runs a worker script, with virtual devices of its own."""

import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time

import pytest

import optperm

PROCESSES, DEVICES = 2, 2  # devices of each process


def run_workers(script, *arguments):
    """Run `script ADDRESS PROCESSES INDEX *arguments` in two processes; return what each has written.

    They meet by `jax.distributed.initialize(ADDRESS, PROCESSES, INDEX)`, over loopback. They find this
    checkout's optperm and the helpers of the tests, and are as strict about dtypes and ranks. The test
    fails once one of them fails, or if they hang; no worker outlives the call.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    paths = [pathlib.Path(optperm.__file__).parents[1], pathlib.Path(__file__).parent]
    settings = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(DEVICES),
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "JAX_NUMPY_DTYPE_PROMOTION": "strict",
        "JAX_NUMPY_RANK_PROMOTION": "raise",
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "PYTHONUNBUFFERED": "1",
        "XLA_FLAGS": xla_flags(),
    }
    workers, codes, deadline = [], [None], time.monotonic() + 180
    with tempfile.TemporaryDirectory() as folder:
        logs = [pathlib.Path(folder, str(index)) for index in range(PROCESSES)]
        try:
            for index, log in enumerate(logs):
                given = map(str, (script, address, PROCESSES, index, *arguments))
                with log.open("w") as stream:
                    out = {"stdout": stream, "stderr": stream}
                    workers.append(subprocess.Popen([sys.executable, *given], env=settings, **out))
            while None in codes and not any(codes) and time.monotonic() < deadline:
                time.sleep(0.05)
                codes = [worker.poll() for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
        wrote = [log.read_text() for log in logs]
    if any(code != 0 for code in codes):
        ends = zip(codes, wrote, strict=True)
        says = [f"exit code {code} (None if it still ran):\n{said[-6000:]}" for code, said in ends]
        pytest.fail("\n".join(f"A worker of {script}: {each}" for each in says), pytrace=False)
    return wrote


def xla_flags():
    """Return the flags that the tests were started with, without the devices of their own process."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    return " ".join(f for f in flags if "xla_force_host_platform_device_count" not in f)
