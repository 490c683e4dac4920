"""GPUs and ports of this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from distlaunch.base.errors import ConfigError, UsageError
from distlaunch.cli.validate import command as validate
from distlaunch.cluster import gpus
from distlaunch.cluster.gpus import GpuMeter, GpuUse, find_gpus, share_gpus
from distlaunch.cluster.machine import Machine
from distlaunch.cluster.ports import find_holder, pick_ports, reserve_ports
from distlaunch.config.run import RunConfig
from distlaunch.jobs import job
from distlaunch.jobs.choose_run import JobRequest
from distlaunch.verify.trials import plan_trials
from tests.parity.cases import case
from tests.unit.config_files import BASE, write_models
from tests.unit.fake_nvml import (
    DRIVER_NOT_LOADED,
    PART_BYTES,
    VERSION_MISMATCH,
    FakeGpu,
    FakeNvml,
    write_package,
)

GPUS = [FakeGpu("GPU-1111-aa", ["MIG-aaaa", None, "", "MIG-bbbb"]), FakeGpu("GPU-2222-bb"), FakeGpu("GPU-3333-cc")]


SELECTIONS = [
    (None, ("MIG-aaaa", "MIG-bbbb", "1", "2")),
    ("", ()),
    (" ", ()),
    ("-1", ()),
    ("x", ()),
    ("NoDevFiles", ()),
    ("1,2", ("1", "2")),
    ("1,-1,2", ("1",)),
    ("1,,2", ("1",)),
    ("2,1,7,0", ("2", "1")),
    ("7", ()),
    ("\u00b2", ()),
    ("GPU-2222, MIG-bbbb", ("GPU-2222", "MIG-bbbb")),
    ("GPU-2222-bb,GPU-9999,1", ("GPU-2222-bb",)),
    ("MIG-GPU-1111-aa/1/0,MIG-cccc", ("MIG-GPU-1111-aa/1/0",)),
]


@pytest.mark.parametrize(("selected", "expected"), SELECTIONS)
def test_every_command_counts_the_same_gpus(
    selected: str | None,
    expected: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    driver: Callable[[FakeNvml], FakeNvml],
) -> None:
    monkeypatch.chdir(tmp_path)
    library = driver(FakeNvml(GPUS))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if selected is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", selected)
    write_models(tmp_path)
    Path("run.yaml").write_text(f"{BASE}strategy: {{kind: mirrored}}\n".replace("64", "12"))
    assert find_gpus(os.environ) == expected
    assert library.open == 0
    replicas = len(expected) or 2  # without GPUs two parts of the CPU
    told = CliRunner().invoke(validate, ["run.yaml"]).stdout
    words = f"{replicas} replica" + "s" * (replicas > 1)
    assert told == f"run.yaml: ok (strategy mirrored, {words}, global batch 12)\n"
    one_device = JobRequest("run.yaml", ("strategy.kind=one_device",))
    planned, choice = job.plan(one_device, Machine.here())  # `train` executes this object
    assert planned.tasks[0].env.get("CUDA_VISIBLE_DEVICES") == (expected[0] if expected else None)
    (trial,) = plan_trials(choice.config, ("mirrored",), (2,), len(find_gpus(os.environ)))
    assert trial.verdict == ("cannot run" if len(expected) == 1 else ""), "in `verify`"
    workers = max(2, len(expected))
    shared = (
        f"strategy.kind=multi_worker_mirrored --set cluster.workers={workers} --set data.global_batch={12 * workers}"
    )
    told = CliRunner().invoke(validate, ["run.yaml", "--set", *shared.split()])
    if len(expected) == 1:
        assert told.exit_code == 2
        assert f"2 workers do not fit on 1 GPU ({expected[0]})" in told.stderr
    else:
        assert told.exit_code == 0
    if expected:
        too_many = f"strategy.replicas={len(expected) + 1}"
        assert CliRunner().invoke(validate, ["run.yaml", "--set", too_many]).exit_code == 2
        with pytest.raises(ConfigError, match="replicas"):
            job.plan(JobRequest("run.yaml", (too_many,)), Machine.here())


NO_DRIVER = ("libnvidia-ml.so.of-no-driver", "libcuda.so.of-no-driver")
WITHOUT_AN_ANSWER = [(None, ()), ("0,GPU-1", ("0", "GPU-1")), ("-1", ())]


def _environ(selected: str | None) -> dict[str, str]:
    return {} if selected is None else {"CUDA_VISIBLE_DEVICES": selected}


def _set_libraries(monkeypatch: pytest.MonkeyPatch, nvml: str | None, cuda: str | None, devices_at: Path) -> None:
    monkeypatch.setattr(gpus, "LIBRARY", nvml)
    monkeypatch.setattr(gpus, "CUDA", cuda)
    monkeypatch.setattr(gpus, "DEVICES", f"{devices_at.relative_to('/')}/nvidia[0-9]*")


@pytest.mark.parametrize("selected", [None, "", "-1", "0,1,2", "GPU-x", "MIG-aaa", "abc", "0,-1,1"])
def test_without_a_driver_there_are_no_gpus(
    selected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driver: Any
) -> None:
    """Whatever the variable says: TensorFlow finds none."""
    monkeypatch.chdir(tmp_path)
    driver(FakeNvml(GPUS))
    _set_libraries(monkeypatch, *NO_DRIVER, tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in _environ(selected).items():
        monkeypatch.setenv(name, value)
    assert find_gpus(os.environ) == ()
    write_models(tmp_path)
    Path("run.yaml").write_text(f"{BASE}strategy: {{kind: mirrored}}\n".replace("64", "12"))
    told = CliRunner().invoke(validate, ["run.yaml"]).stdout
    assert told == "run.yaml: ok (strategy mirrored, 2 replicas, global batch 12)\n"
    two_workers = ("--set", "strategy.kind=multi_worker_mirrored", "--set", "cluster.workers=2")
    assert CliRunner().invoke(validate, ["run.yaml", *two_workers]).exit_code == 0


@pytest.mark.parametrize(("selected", "expected"), WITHOUT_AN_ANSWER)
def test_a_container_without_nvml(
    selected: str | None, expected: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driver: Any
) -> None:
    """CUDA and the devices are there, and nobody to ask: the variable is believed; devices alone are not enough."""
    driver(FakeNvml(GPUS))
    (tmp_path / "nvidia0").touch()
    _set_libraries(monkeypatch, NO_DRIVER[0], None, tmp_path)
    assert find_gpus(_environ(selected)) == expected
    gpus.query_driver.cache_clear()
    _set_libraries(monkeypatch, *NO_DRIVER, tmp_path)
    assert find_gpus(_environ(selected)) == ()


@pytest.mark.parametrize(("selected", "expected"), WITHOUT_AN_ANSWER)
def test_a_driver_that_hangs(
    selected: str | None, expected: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, driver: Any
) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(gpus, "QUERY_TIMEOUT_S", 0.01)
    library = driver(FakeNvml(GPUS, on_init=go_on.wait))
    assert find_gpus(_environ(selected)) == expected
    go_on.set()
    for thread in threading.enumerate():
        if thread.name == "nvml":
            thread.join()
    assert library.open == 0


@pytest.mark.parametrize("selected", [None, "0"])
@pytest.mark.parametrize(
    "library",
    [
        FakeNvml(),
        FakeNvml(GPUS, on_init=DRIVER_NOT_LOADED),
        FakeNvml(GPUS, on_init=VERSION_MISMATCH),
        FakeNvml([FakeGpu("GPU-1"), FakeGpu("GPU-2", lost=True)]),
    ],
    ids=["no GPUs", "not loaded", "of another version", "a lost GPU"],
)
def test_a_driver_without_gpus(selected: str | None, library: FakeNvml, driver: Any) -> None:
    driver(library)
    assert find_gpus(_environ(selected)) == ()
    assert library.open == 0


def test_a_driver_from_before_mig(driver: Any) -> None:
    driver(FakeNvml(GPUS, without=["nvmlDeviceGetMaxMigDeviceCount"]))
    assert find_gpus({}) == ("0", "1", "2")


@pytest.mark.parametrize(
    ("selected", "expected"),
    [
        (None, GpuUse(None, 300 + 2 * PART_BYTES)),
        ("0", GpuUse(40.0, 100)),
        ("0,1", GpuUse(60.0, 300)),
        ("GPU-b", GpuUse(80.0, 200)),
        ("MIG-2", GpuUse(None, PART_BYTES)),
        ("", None),
    ],
)
def test_the_use_of_the_selected_gpus_is_measured(selected: str | None, expected: GpuUse | None, driver: Any) -> None:
    library = driver(
        FakeNvml(
            [
                FakeGpu("GPU-a", percent=40, used_bytes=100),
                FakeGpu("GPU-b", percent=80, used_bytes=200),
                FakeGpu("GPU-c", ["MIG-1", "MIG-2"]),
            ]
        )
    )
    meter = GpuMeter({} if selected is None else {gpus.VISIBLE: selected})
    for _ in range(2):
        found = meter.read()
        for thread in [thread for thread in threading.enumerate() if thread.name == "nvml"]:
            thread.join(10)
    assert found == expected
    assert library.open == 0


def test_a_driver_that_hangs_stops_no_measurement(driver: Any) -> None:
    answers, goes_on = threading.Event(), threading.Event()
    library = driver(FakeNvml([FakeGpu("GPU-a", percent=40, used_bytes=100)]))
    meter = GpuMeter({})
    library.on_init = lambda: (answers.set(), goes_on.wait(30))
    assert meter.read() is None
    assert answers.wait(10)
    assert meter.read() is None, "the driver has not answered"
    goes_on.set()
    for thread in [thread for thread in threading.enumerate() if thread.name == "nvml"]:
        thread.join(10)


def test_a_real_process_asks_the_driver(tmp_path: Path) -> None:
    write_models(tmp_path)
    (tmp_path / "run.yaml").write_text(f"{BASE}strategy: {{kind: mirrored}}\n".replace("64", "12"))
    environ = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    environ |= write_package(tmp_path / "driver", "[FakeGpu('GPU-1', ['MIG-a', None, 'MIG-b']), FakeGpu('GPU-2')]")
    argv = [sys.executable, "-m", "distlaunch", "validate", "run.yaml"]
    told = subprocess.run(argv, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert told.stdout == "run.yaml: ok (strategy mirrored, 3 replicas, global batch 12)\n", told.stderr


@pytest.mark.usefixtures("virtual_devices")
@pytest.mark.parametrize(("selected", "warns"), [(None, True), ("0", True), ("", False)])
def test_a_run_that_computes_on_the_cpu_beside_gpus_says_so(
    selected: str | None, warns: bool, driver: Callable[[FakeNvml], FakeNvml], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from distlaunch.base.events import Event, Notice
    from distlaunch.base.process import Process
    from distlaunch.base.run_dir import RunDir
    from distlaunch.cluster.spec import Task
    from distlaunch.training.session import Session

    if selected is None:
        monkeypatch.delenv(gpus.VISIBLE, raising=False)
    else:
        monkeypatch.setenv(gpus.VISIBLE, selected)
    driver(FakeNvml(GPUS[1:]))
    config, events = RunConfig.model_validate(case()), list[Event]()
    Session.build(config, RunDir(tmp_path), Task("worker", 0), Process(events.append, lambda: False))
    told = [event.message for event in events if isinstance(event, Notice) and event.level == "warning"]
    number = "2 GPUs" if selected is None else "1 GPU"
    assert any(f"the driver has {number}, but TensorFlow sees none" in each for each in told) == warns


@pytest.mark.parametrize(
    ("gpus", "workers", "per_worker", "expected"),
    [
        ("", 2, None, [(), ()]),
        ("0123", 2, None, [("0", "1"), ("2", "3")]),
        ("012", 2, None, [("0",), ("1",)]),
        ("0123", 2, 1, [("0",), ("1",)]),
    ],
)
def test_shares(gpus: str, workers: int, per_worker: int | None, expected: list[tuple[str, ...]]) -> None:
    assert share_gpus(list(gpus), workers, per_worker) == expected


@pytest.mark.parametrize(("gpus", "workers", "per_worker"), [("0", 2, None), ("012", 2, 2)])
def test_too_few_gpus(gpus: str, workers: int, per_worker: int | None) -> None:
    with pytest.raises(UsageError, match="do not fit on"):
        share_gpus(list(gpus), workers, per_worker)


def test_picked_ports_are_held_for_those_who_share() -> None:
    held = pick_ports(3)
    assert len(set(held.numbers)) == 3
    with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
        stranger.bind(("", held.numbers[0]))
    with socket.socket() as task:
        task.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        task.bind(("", held.numbers[0]))
        task.listen()
        held.release()
        socket.create_connection(("127.0.0.1", held.numbers[0])).close()


def test_nobody_is_given_a_port_that_is_held() -> None:
    """Processes that pick at the same time share the sockets' option, by which the kernel lets them share a port."""
    code = "import sys; from distlaunch.cluster.ports import pick_ports; held = pick_ports(200); print(*held.numbers); "
    code += "sys.stdout.flush(); sys.stdin.read()"
    picking = [
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    try:
        numbers = [number for each in picking if each.stdout is not None for number in each.stdout.readline().split()]
    finally:
        for each in picking:
            each.communicate("")
    assert len(numbers) == len(set(numbers)) == 800


def test_a_port_server_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("", 0))
        wanted = free.getsockname()[1]
    monkeypatch.setenv("PORTSERVER_ADDRESS", str(tmp_path / "server"))
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "server"))
        server.listen()

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                assert connection.recv(100).strip() == str(os.getpid()).encode()
                connection.sendall(f"{wanted}\n".encode())

        with ThreadPoolExecutor(1) as one:
            answered = one.submit(answer)
            held = pick_ports(1)
            answered.result(10)
    assert held.numbers == (wanted,)
    held.release()


def test_a_busy_port_is_named_with_its_holder() -> None:
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as a left-over worker does
        holder.bind(("", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(UsageError, match=f"port {port} is in use by process {os.getpid()}"):
            reserve_ports([port])
        assert find_holder(port) is not None
    reserve_ports([port]).release()
