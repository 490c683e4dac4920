"""Tests of the notation of hosts, of the placement of tasks, and of the message when ssh does not start an agent."""

from __future__ import annotations

from pathlib import Path

import pytest

from distlaunch.base.errors import UsageError
from distlaunch.cluster.hosts import EXAMPLE, Host, hostfile_problems, hosts_problems, parse_host, place_tasks
from distlaunch.cluster.spec import ClusterSpec, Place, Task, places_of
from distlaunch.config.engines.ssh import Ssh
from distlaunch.engines.remote.addresses import at, ports_to_try
from distlaunch.engines.remote.ssh_errors import explain, is_busy
from distlaunch.engines.ssh import ssh_command


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("a", Host("a")),
        ("b slots=2", Host("b", slots=2)),
        ("user@c:2222", Host("c", "user", 2222)),
        ("10.0.0.7", Host("10.0.0.7")),
        ("u@[fe80::1]:22 slots=8 python=/usr/bin/python3", Host("fe80::1", "u", 22, 8, "/usr/bin/python3")),
        ("node-1.example.org   folder=/data/project", Host("node-1.example.org", folder="/data/project")),
    ],
)
def test_a_host_is_read(text: str, host: Host) -> None:
    assert parse_host(text) == host


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("-oProxyCommand=evil", "got '-oProxyCommand=evil'; expected HOST"),
        ("a:b", "got 'a:b'; expected HOST"),
        ("a:70000", "got the port 70000 in 'a:70000'; expected 1 to 65535"),
        ("a;reboot", "got 'a;reboot'; expected HOST"),
        ("a slots=0", "got slots=0 for a; expected a whole number from 1 to 10000"),
        ("a slots=10001", "expected a whole number from 1 to 10000"),
        ("a slots=two", "got slots=two for a"),
        ("a cores=2", "got 'cores=2' after a; expected HOST"),
        ("a python=python3", "got python=python3 for a; expected an absolute path"),
    ],
)
def test_what_is_no_host_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=r".") as error:
        parse_host(text)
    assert message in str(error.value)


def test_each_wrong_host_is_named() -> None:
    slots = "got slots=x for b; expected a whole number from 1 to 10000"
    assert [*hosts_problems(["a", "b slots=x", "", "u@a", "c"])] == [
        (1, slots),
        (2, f"got an empty text; {EXAMPLE}"),
        (3, "got a twice; write it once, with slots=N for N workers"),
    ]
    assert not [*hosts_problems(["a:1", "a:2"])]


def test_a_hostfile_is_checked_with_its_lines(tmp_path: Path) -> None:
    file = tmp_path / "hosts.txt"
    file.write_text("# two hosts\na slots=2\n\nb slots=x  # wrong\na slots=2\n")
    assert hostfile_problems(str(file)) == [
        f"{file}:4: got slots=x for b; expected a whole number from 1 to 10000",
        f"{file}:5: got a twice; write it once, with slots=N for N workers",
    ]
    file.write_text("# none\n")
    assert "names no host" in hostfile_problems(str(file))[0]
    assert "No such file" in hostfile_problems(str(tmp_path / "missing"))[0]


@pytest.mark.parametrize(
    ("jobs", "slots", "expected"),
    [
        ({"worker": 3}, [1, 1, 1], [0, 1, 2]),
        ({"worker": 3}, [2, 2], [0, 0, 1]),
        ({"worker": 2}, [1, 1, 1], [0, 1]),
        ({"worker": 2, "ps": 3, "chief": 1}, [1, 1], [0, 1, 0, 1, 0, 0]),
        ({}, [1], []),
    ],
)
def test_workers_fill_the_slots_in_order(jobs: dict[str, int], slots: list[int], expected: list[int]) -> None:
    assert place_tasks(jobs, slots, [f"h{number}" for number in range(len(slots))]) == expected


def test_too_few_slots_are_told_with_what_there_is() -> None:
    with pytest.raises(UsageError, match=r"^4 workers need 4 slots, but the hosts have 3 \(a: 2, b: 1\);"):
        place_tasks({"worker": 4}, [2, 1], ["a", "b"])


def test_each_task_has_the_place_of_its_address() -> None:
    cluster = ClusterSpec({"worker": ("a:1", "b:1"), "ps": ("a:2",), "chief": ("a:3",)})
    places = [Place("a", "a:1"), Place("b", "b:1"), Place("a", "a:2"), Place("a", "a:3"), Place("a")]
    tasks = [*cluster.tasks, Task("evaluator", 0)]
    found = places_of(tasks, places, cluster)
    assert [place.address for place in found.values()] == ["a:3", "a:1", "b:1", "a:2", ""]
    assert list(found) == tasks


def test_nothing_of_the_job_is_on_the_command_line() -> None:
    command = ssh_command(parse_host("me@c:2222"), Ssh(kind="ssh", hosts=["c"]))
    assert command[0] == "ssh"
    assert command[-3:-1] == ["--", "c"]
    assert command[-1].endswith("-P -m distlaunch.agent.remote")
    assert "BatchMode=yes" in command


@pytest.mark.parametrize("num_ports", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("count", [2, 3, 8])
def test_all_ports_are_tried_with_few_connections(num_ports: int, count: int) -> None:
    ports = range(num_ports)
    tried = [ports_to_try(ports, number, count) for number in range(count)]
    assert all(tried)
    assert {port for some in tried for port in some} == set(ports)
    assert sum(map(len, tried)) == max(num_ports, count)


def test_addresses_of_both_families() -> None:
    assert at("10.0.0.1", 5) == "10.0.0.1:5"
    assert at("fd00::1", 5) == "[fd00::1]:5"


@pytest.mark.parametrize(
    ("stderr", "said"),
    [
        ("Host key verification failed.", "ssh does not know its host key"),
        ("@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.", "ssh-keygen -R c"),
        ("me@c: Permission denied (publickey).", "permission denied; ssh must log in without a password"),
        ("ssh: Could not resolve hostname c: Name or service not known", "there is no host with this name"),
        ("ssh: connect to host c port 22: Connection refused", "no ssh server answers"),
        ("ssh: connect to host c port 22: No route to host", "cannot be reached from here"),
        ("bash: line 1: /opt/py: No such file or directory", "there is no Python at /opt/py"),
        ("bash: line 1: exec: /opt/py: not found", "there is no Python at /opt/py"),
        ("/opt/py: Error while finding module specification for 'distlaunch.agent.remote' "
         "(ModuleNotFoundError: No module named 'distlaunch')", "distlaunch is not installed for /opt/py"),
        ("unknown option -P\nusage: /opt/py", "older than Python 3.11"),
        ("something else", "ssh ended with exit code 255: something else"),
        ("", "without a message"),
    ],
)  # fmt: skip
def test_why_an_agent_did_not_start(stderr: str, said: str) -> None:
    assert said in explain(stderr, 255, target="me@c", name="c", python="/opt/py")


def test_a_server_that_takes_no_more_logins_is_tried_again() -> None:
    assert is_busy("kex_exchange_identification: Connection closed by remote host")
    assert not is_busy("me@c: Permission denied (publickey).")
