"""The helper that runs tests in several processes ends them all, and says what went wrong."""

import subprocess
import time

import processes
import pytest

pytestmark = pytest.mark.programs


def write_worker(folder, body):
    script = folder / "worker.py"
    script.write_text(
        f"import os, sys, time\naddress, count, index, *rest = sys.argv[1:]\n{body}\n"
    )
    return script


def test_every_worker_gets_its_arguments_and_devices(tmp_path):
    body = "print(index, count, *rest, os.environ['JAX_NUM_CPU_DEVICES'], address)"
    script = write_worker(tmp_path, body)
    wrote = [said.split() for said in processes.run_workers(script, "a", processes=3, devices=4)]
    assert [words[:4] for words in wrote] == [[str(i), "3", "a", "4"] for i in range(3)]
    assert len({words[4] for words in wrote}) == 1


@pytest.mark.parametrize(
    ("last", "timeout", "says"),
    [
        ("sys.exit('it broke')", 60, "exit code 1\nit broke"),
        ("time.sleep(60)", 1, "still ran, 1 s"),
    ],
)
def test_no_worker_outlives_a_failure(tmp_path, monkeypatch, last, timeout, says):
    """One fails, or hangs, while another would go on: both end at once."""
    started = []

    class Recorded(subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Recorded)
    script = write_worker(tmp_path, f"if index == '1': {last}\ntime.sleep(60)")
    began = time.monotonic()
    with pytest.raises(pytest.fail.Exception, match=says):
        processes.run_workers(script, timeout=timeout)
    assert time.monotonic() - began < 30
    assert len(started) == 2
    assert all(worker.returncode is not None for worker in started)
