"""Reasons why a job cannot start on a host are reported in seconds, for all hosts at once, each with a remedy."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from lab import Lab
from test_training import HOSTS, write_config

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

_OTHER_VERSION = """#!/bin/sh
exec {python} -P -c 'import distlaunch, runpy
distlaunch.__version__ = "0.0.1"
runpy.run_module("distlaunch.agent.remote", run_name="__main__")'
"""
_WITHOUT_DISTLAUNCH = """#!/bin/sh
shift
exec {python} -I -S -P "$@"
"""
_TOO_OLD = """#!/bin/sh
echo "unknown option -P" >&2
exit 2
"""


def _script(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(text.format(python=sys.executable))
    path.chmod(0o755)
    return str(path)


def _refused(lab: Lab, tmp_path: Path, own_disk: Path, hosts: list[str], **engine: object) -> str:
    settings = {"kind": "ssh", "hosts": hosts, **engine}
    config = write_config(tmp_path, own_disk, "refused", engine=settings, cluster={"workers": len(hosts)})
    job = lab.start("train", config)
    assert job.end(60) == 2, job.output
    assert "Traceback" not in job.output
    # nothing was begun
    assert not (own_disk / "refused").exists()
    assert job.output.startswith("connecting to ")
    return job.output.partition("\n")[2]


@pytest.mark.short
def test_all_hosts_that_cannot_be_used_are_named_at_once(lab: Lab, tmp_path: Path, own_disk: Path) -> None:
    other = _script(tmp_path, "other-python", _OTHER_VERSION)
    hosts = ["host1", "nobody.invalid", "host2:2222", "daemon@host3", f"10.77.0.12 python={other}"]
    with (lab.folder / "known_hosts").open("a") as file:
        key = (lab.folder / "known_hosts").read_text().splitlines()[2].split()[1:]
        file.write(f"[host2]:2222 {' '.join(key)}\n")
    said = _refused(lab, tmp_path, own_disk, hosts)
    assert "nobody.invalid: there is no host with this name" in said
    assert "host2:2222: no ssh server answers" in said
    assert "host3: permission denied; ssh must log in without a password" in said
    assert "host1" not in said


def test_what_is_wrong_with_python_is_said(lab: Lab, tmp_path: Path, own_disk: Path) -> None:
    without = _script(tmp_path, "without", _WITHOUT_DISTLAUNCH)
    old = _script(tmp_path, "old", _TOO_OLD)
    said = _refused(
        lab, tmp_path, own_disk, ["host1 python=/nowhere/python", f"host2 python={without}", f"host3 python={old}"]
    )
    assert "host1: there is no Python at /nowhere/python" in said
    assert f"host2: distlaunch is not installed for {without}" in said
    assert f"host3: {old} is older than Python 3.11" in said


@pytest.mark.short
def test_another_version_and_other_code_are_refused(lab: Lab, tmp_path: Path, own_disk: Path) -> None:
    other = _script(tmp_path, "other-python", _OTHER_VERSION)
    project, copy = tmp_path / "project", tmp_path / "copy"
    for folder, text in ((project, "a = 1\n"), (copy, "a = 2\n")):
        folder.mkdir()
        (folder / "model.py").write_text(text)
    settings = {"kind": "ssh", "hosts": [f"host1 python={other}", f"host2 folder={copy}", "host3 folder=/nowhere"]}
    config = write_config(tmp_path, own_disk, "refused", engine=settings)
    job = lab.start("train", config, folder=project)
    assert job.end(60) == 2, job.output
    assert "host1: it has distlaunch 0.0.1 (protocol 1), this machine has" in job.output
    assert "host2: its code differs from this machine's in 1 file: model.py" in job.output
    assert "host3: No such file or directory: /nowhere" in job.output


def test_an_unknown_host_key_is_never_accepted(lab: Lab, tmp_path: Path, own_disk: Path) -> None:
    known = lab.folder / "known_hosts"
    before = known.read_text()
    known.write_text("\n".join(line for line in before.splitlines() if not line.startswith("host2,")) + "\n")
    try:
        said = _refused(lab, tmp_path, own_disk, HOSTS)
    finally:
        known.write_text(before)
    assert "host2: ssh does not know its host key; connect once by hand (`ssh host2`)" in said


@pytest.mark.short
def test_hosts_that_cannot_reach_each_other_are_named(lab: Lab, tmp_path: Path, own_disk: Path) -> None:
    lab.cut(2, 3)
    said = _refused(lab, tmp_path, own_disk, HOSTS)
    assert f"host2 cannot reach host3 at {lab.address(3)}:" in said
    assert "host1 cannot reach" not in said


def test_an_interface_that_is_not_there_is_refused(lab: Lab, tmp_path: Path, own_disk: Path) -> None:
    said = _refused(lab, tmp_path, own_disk, HOSTS, interface="ib0")
    assert "host1: engine.interface: got 'ib0'; it has eth0 (10.77.0.11)" in said


def test_the_doctor_shows_each_host(lab: Lab, tmp_path: Path, own_disk: Path) -> None:
    config = write_config(tmp_path, own_disk, "healthy")
    job = lab.start("doctor", config)
    assert job.end(60) == 0, job.output
    assert "host2  10.77.0.12" in job.output
    assert "ok: 3 hosts can be used and reach each other" in job.output
    # what is wrong is said as at a start
    lab.cut(2, 3)
    ill = lab.start("doctor", config)
    assert ill.end(60) == 2
    assert "host2 cannot reach host3" in ill.output
