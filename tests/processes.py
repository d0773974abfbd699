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
# Seconds until workers count as hanging, and characters that are shown of what one wrote at its end.
_LIMIT, _SHOWN = 180, 6000


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
    workers = []
    with tempfile.TemporaryDirectory() as folder:
        logs = [pathlib.Path(folder, str(index)) for index in range(PROCESSES)]
        try:
            for index, log in enumerate(logs):
                given = map(str, (script, address, PROCESSES, index, *arguments))
                with log.open("w") as stream:
                    command = [sys.executable, *given]
                    out = {"stdout": stream, "stderr": stream}
                    workers.append(subprocess.Popen(command, env=settings, **out))
            codes = _wait(workers)
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
        wrote = [log.read_text() for log in logs]
    if any(code != 0 for code in codes):
        states = ["still ran" if code is None else f"exit code {code}" for code in codes]
        ends = [f"{state}\n{said[-_SHOWN:]}" for state, said in zip(states, wrote, strict=True)]
        pytest.fail("\n".join(f"A worker of {script}: {end}" for end in ends), pytrace=False)
    return wrote


def xla_flags():
    """Return the flags that the tests were started with, without the devices of their own process."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    return " ".join(f for f in flags if "xla_force_host_platform_device_count" not in f)


def _wait(workers):
    """Wait until all have ended, one has failed, or the time is over; return the exit codes, or None."""
    deadline = time.monotonic() + _LIMIT
    while True:
        codes = [worker.poll() for worker in workers]
        if None not in codes or any(codes) or time.monotonic() > deadline:
            return codes
        time.sleep(0.05)
