"""Where the tasks of a run are started. An engine is a file of this folder, a config class and a line in the table."""

from __future__ import annotations

from collections.abc import Mapping

from distlaunch.config.references.sites import named_files
from distlaunch.config.run import RunConfig
from distlaunch.config.tf_config import tf_config_cluster
from distlaunch.engines.base import Engine
from distlaunch.engines.given_cluster import GivenClusterEngine
from distlaunch.engines.local import LocalEngine

ENGINES: dict[str, Engine] = {"local": LocalEngine()}


def engine_of(config: RunConfig, environ: Mapping[str, str]) -> Engine:
    """The engine that the config names; `auto`: the cluster that TF_CONFIG describes, else this machine.

    Raises ConfigError if its settings are wrong.
    """
    if config.engine.kind == "ssh":
        from distlaunch.engines.ssh import ssh_engine  # what it needs costs the other engines nothing

        return ssh_engine(config.engine, named_files(config))
    if config.engine.kind != "auto":
        return ENGINES[config.engine.kind]
    given = tf_config_cluster(config, environ)
    return ENGINES["local"] if given is None else GivenClusterEngine(given)
