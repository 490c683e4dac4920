"""Fixtures for all tests: golden files and virtual devices."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings

from distlaunch.base.compat import Range, installed
from distlaunch.cluster.machine import Machine
from distlaunch.cluster.settings import kept_variables

# what of the machine's speed must not decide: deadlines, and how fast examples are drawn
_EVEN_IF_SLOW = settings(
    deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
)
_SHRINKS_NOTHING = (Phase.explicit, Phase.generate)  # which may take minutes
settings.register_profile(
    "quick", _EVEN_IF_SLOW, max_examples=40, derandomize=True, database=None, phases=_SHRINKS_NOTHING
)
settings.register_profile("thorough", _EVEN_IF_SLOW, max_examples=2_000, print_blob=True)
settings.load_profile("quick")  # unless --hypothesis-profile says otherwise

# a shell starts background jobs, and so perhaps these tests, with Ctrl-C ignored, and `nohup` with SIGHUP; what they
# start must not inherit that
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# container images often set this; several hundred processes would then each compile distlaunch anew
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ.pop("COLUMNS", None)  # output of commands goes to pipes, and must not depend on a terminal's width

# the comparison of the first steps with one device has its own tests; the others would only wait for it
os.environ["DISTLAUNCH_CHECK"] = "off"
# so has the page that each run leaves
os.environ["DISTLAUNCH_REPORT"] = "off"

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cold", action="store_true", help="start each process of the launcher's afresh")
    parser.addoption("--regenerate", action="store_true", help="write the golden files anew instead of comparing")


_COLD = "DISTLAUNCH_TESTS_COLD"
# half of what a task on JAX costs here is the time that XLA takes to make its small programs fast
_COMPILES_QUICKLY = "--xla_backend_optimization_level=0"
# saves as much again; a later XLA does not know this flag, and ends a process in whose environment it is
_COMPILES_MORE_QUICKLY = "--xla_cpu_use_fusion_emitters=false"
_KNOW_THE_FLAG = {"jax": Range((0, 10), (0, 11)), "tensorflow": Range((2, 21), (2, 22))}


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--cold"):
        os.environ[_COLD] = "1"
    elif "XLA_FLAGS" not in os.environ:
        versions = {package: installed(package) for package in _KNOW_THE_FLAG}
        known = all(_KNOW_THE_FLAG[package].includes(version) for package, version in versions.items() if version)
        os.environ["XLA_FLAGS"] = f"{_COMPILES_QUICKLY} {_COMPILES_MORE_QUICKLY}" if known else _COMPILES_QUICKLY


def is_cold() -> bool:
    """Return whether processes must be started as users start them, and not forked."""
    return _COLD in os.environ


@contextlib.contextmanager
def _tensorflow_as_in_tasks() -> Iterator[None]:
    """Let TensorFlow round in this process as in the tasks of a launcher, if it is imported within this context.

    It reads these variables once. Otherwise, on a CPU for which it leaves oneDNN off, the references of the parity
    tests would compute convolutions with another library than the jobs that are compared with them.
    """
    own = {n: value for n, value in kept_variables(Machine.here().hardware).items() if n not in os.environ}
    os.environ.update(own)
    try:
        yield
    finally:
        for name in own:
            del os.environ[name]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    with _tensorflow_as_in_tasks():  # many modules of tests import it
        return (yield)


# tracing makes millions of objects that live on: collected at Python's usual 700, they are looked at again and again
gc.set_threshold(50_000, 20, 100)


@pytest.fixture(autouse=True, scope="module")
def _what_is_there_is_not_collected() -> None:
    """Exclude the objects of earlier tests from garbage collections; examining them took a quarter of the time."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Return a function that compares a text with a file of tests/golden; it fails if the file is missing."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--regenerate"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        assert path.is_file(), f"{path} is missing; run pytest with --regenerate and look at what it writes"
        assert text == path.read_text()

    return compare


@pytest.fixture(scope="session")
def virtual_devices() -> None:
    """Eight CPU devices. They must exist before TensorFlow's first operation, so all tests that run one need this."""
    with _tensorflow_as_in_tasks():
        from distlaunch.strategies.devices import virtual_cpus

        virtual_cpus(8)
