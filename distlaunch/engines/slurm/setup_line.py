"""`python -m distlaunch.engines.slurm.setup_line RUN NUMBER`: prints a line of `engine.setup` with its secrets.

The batch script itself must not contain secrets, since Slurm keeps a copy of it. It gets lines with secrets from this
module.
"""

from __future__ import annotations

import os
import sys

from distlaunch.base.errors import ConfigError
from distlaunch.base.run_dir import RunDir
from distlaunch.config.read.load import load_resolved
from distlaunch.engines.slurm.script import section_of


def main() -> None:
    run, number = RunDir(sys.argv[1]), int(sys.argv[2])
    try:
        config = load_resolved(run.config, {**run.secrets(), **os.environ})
    except ConfigError as error:
        raise SystemExit(f"distlaunch: {error}") from None
    print(section_of(config).setup[number])


if __name__ == "__main__":
    main()
