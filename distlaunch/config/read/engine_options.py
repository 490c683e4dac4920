"""Makes the section `engine` from the options of `distlaunch run`, which has no config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from distlaunch.base.errors import ConfigError, Problem
from distlaunch.config.engines.base import EngineSection
from distlaunch.config.read.load import load_mapping
from distlaunch.config.read.overrides import split
from distlaunch.config.references.sites import STAND_IN


def load_engine(
    hosts: str | None, hostfile: str | None, overrides: Sequence[str], environ: Mapping[str, str]
) -> EngineSection:
    """Check the options as a section of a config, and return the section.

    Args:
        hosts: the value of `--hosts`, separated by commas.
        hostfile: the value of `--hostfile`, relative to the working directory.
        overrides: `engine.interface=ib0` and the like.

    Raises:
        ConfigError: holds every problem that was found.
    """
    for text in overrides:
        _check_override(text)
    given: dict[str, Any] = {"--hosts": hosts, "--hostfile": hostfile}
    named = [option for option, value in given.items() if value is not None]
    section: dict[str, Any] = {"kind": "ssh"} if named else {}
    if hosts is not None:
        section["hosts"] = [text.strip() for text in hosts.split(",")]
    if hostfile is not None:
        section["hostfile"] = hostfile
    # the other sections of the config have defaults
    rest = {"model": {"function": STAND_IN}, "data": {"function": STAND_IN, "global_batch": 1}}
    environ = {
        name: value for name, value in environ.items() if name != "TF_CONFIG"
    }  # TF_CONFIG describes another cluster
    try:
        return load_mapping({**rest, "engine": section}, overrides, environ).config.engine
    except ConfigError as error:
        source = " and ".join(named) or None
        raise ConfigError([_of_options(problem, source) for problem in error.problems]) from None


def _check_override(text: str) -> None:
    try:
        key, _ = split(text)
    except ValueError:  # `load_mapping` reports it when it applies the override
        return
    if key[0] != "engine" or len(key) == 1:
        message = "a script has no config, so only keys of engine can be set, such as engine.interface=ib0"
        raise ConfigError(Problem(key, message, f"--set {text}"))


def _of_options(problem: Problem, source: str | None) -> Problem:
    if not (problem.source or "").startswith("config"):
        return problem
    is_option = source == "--hosts" and problem.key[:2] == ("engine", "hosts")
    return problem._replace(source=source, key=() if is_option else problem.key)
