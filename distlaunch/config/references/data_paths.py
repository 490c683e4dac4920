"""Which values of a config are paths of data, as far as that can be seen without calling the data function."""

from __future__ import annotations

from distlaunch.base.errors import Problem
from distlaunch.config.read.tree import texts_in
from distlaunch.config.run import RunConfig


def data_paths(config: RunConfig) -> dict[str, str]:
    """Keys within `data.args` -> texts with a slash that are no URL, whether or not there is such a file."""
    return {
        Problem(key, "").dotted: text
        for key, text in texts_in(config.data.args, ("data", "args"))
        if "/" in text and "://" not in text and "\n" not in text
    }
