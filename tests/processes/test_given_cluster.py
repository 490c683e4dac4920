"""A cluster of parameter servers that is started by hand, with TF_CONFIG alone saying how large it is."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import portpicker
import pytest
from tiny_job import LOSSES, command, environment, kill_all, losses, write_job


@pytest.mark.slow
def test_parameter_servers_without_cluster_ps(tmp_path: Path) -> None:
    write_job(tmp_path, strategy={"kind": "parameter_server"})
    jobs = {"chief": 1, "worker": 1, "ps": 2}
    cluster = {job: [f"127.0.0.1:{portpicker.pick_unused_port()}" for _ in range(n)] for job, n in jobs.items()}
    processes = []
    try:
        for job, addresses in cluster.items():
            for index in range(len(addresses)):
                text = json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})
                pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
                words = [*command(), "train", "job.yaml"]
                processes.append(subprocess.Popen(words, cwd=tmp_path, env=environment(TF_CONFIG=text), **pipes))
        for process in processes:
            out, _ = process.communicate(timeout=100)
            assert process.returncode == 0, out
    finally:
        for process in processes:
            kill_all(process.pid)
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
    assert losses(tmp_path) == LOSSES
