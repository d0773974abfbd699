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

_TESTS = pathlib.Path(__file__).parent
# Characters of what a worker wrote, at its end.
_SHOWN = 6000


def run_workers(script, *arguments, processes=2, devices=2, timeout=180):
    """Runs `script ADDRESS PROCESSES INDEX *arguments` in several processes at a time.

    The workers meet by `jax.distributed.initialize(ADDRESS, PROCESSES, INDEX)`, over loopback. They find
    this checkout's optperm and the helpers of the tests, and are as strict about dtypes and ranks.

    Args:
      script: The worker's file.
      *arguments: Further arguments, for all workers the same.
      processes: How many.
      devices: CPU devices of each.
      timeout: Seconds until the workers count as hanging.

    Returns:
      What each worker wrote, standard output and standard error together.

    Fails the test, with what the workers wrote, once one of them fails, or if they hang; no worker
    outlives the call.
    """
    command = [sys.executable, str(script), f"127.0.0.1:{free_port()}", str(processes)]
    settings = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "JAX_NUMPY_DTYPE_PROMOTION": "strict",
        "JAX_NUMPY_RANK_PROMOTION": "raise",
        "PYTHONPATH": os.pathsep.join(
            [str(pathlib.Path(optperm.__file__).parents[1]), str(_TESTS)]
        ),
        "PYTHONUNBUFFERED": "1",
        "XLA_FLAGS": xla_flags(),
    }
    workers = []
    with tempfile.TemporaryDirectory() as folder:
        logs = [pathlib.Path(folder, str(index)) for index in range(processes)]
        try:
            for index, log in enumerate(logs):
                each = [*command, str(index), *map(str, arguments)]
                with log.open("w") as stream:
                    workers.append(
                        subprocess.Popen(each, env=settings, stdout=stream, stderr=stream)
                    )
            codes = _wait(workers, time.monotonic() + timeout)
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
        wrote = [log.read_text() for log in logs]
    if any(code != 0 for code in codes):
        reports = [
            f"worker {index} of {script}: {_state(code, timeout)}\n{said[-_SHOWN:]}"
            for index, (code, said) in enumerate(zip(codes, wrote, strict=True))
        ]
        pytest.fail("\n".join(reports), pytrace=False)
    return wrote


def xla_flags():
    """Those that the tests were started with, without the devices of their own process."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    return " ".join(f for f in flags if "xla_force_host_platform_device_count" not in f)


def free_port():
    """A port of loopback that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait(workers, deadline):
    """Exit codes, None for a worker that still runs: at the first failure, or at the deadline."""
    while True:
        codes = [worker.poll() for worker in workers]
        if None not in codes or any(codes) or time.monotonic() > deadline:
            return codes
        time.sleep(0.05)


def _state(code, timeout):
    return f"still ran, {timeout} s at most" if code is None else f"exit code {code}"
