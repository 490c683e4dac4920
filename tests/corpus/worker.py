"""A process of a job that trains models of the corpus: `python -m tests.corpus.worker RESULTS.json NAME...`.

TF_CONFIG says which process it is, STRATEGY which strategy, as the sections of a config.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from distlaunch.config.run import RunConfig
from distlaunch.strategies.factory import create
from distlaunch.strategies.variables import is_seed
from tests.corpus.compare import config_of
from tests.parity.train_case import PreparedCase


def main() -> None:
    results, *names = sys.argv[1:]
    job = json.loads(os.environ["STRATEGY"])
    config = RunConfig.model_validate({**config_of(names[0], {"kind": "one_device"}), **job})
    strategy = create(config)
    records: dict[str, Any] = {}
    for name in names:
        record = PreparedCase(config_of(name, job["strategy"]), strategy, config=config).train()
        weights = [value for key, value in record["weights"].items() if not is_seed(key)]
        records[name] = {"epochs": record["epochs"], "weights": weights}
    if strategy.is_chief:
        Path(results).write_text(json.dumps(records))
    strategy.leave()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
