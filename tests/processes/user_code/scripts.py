import os
import signal
import sys

import numpy as np

from distlaunch.base.errors import ConfigError, UsageError
from distlaunch.notebook import train

CONFIG = sys.argv[1]


def refused(*arguments):
    try:
        train(*arguments)
    except (ConfigError, UsageError) as error:
        print(error)


refused(CONFIG)
refused({"model": {"function": "distlaunch.workloads.regression:linear"}, "data": {"global_batch": 0}})
first = train(CONFIG, ["strategy.kind=mirrored", "strategy.replicas=3", "name=first"], "elsewhere")
print(first.status, first.run_dir.relative_to(os.getcwd()), first.model.predict(np.ones((4, 2)), verbose=0).shape)
refused(CONFIG, ["strategy.kind=mirrored", "strategy.replicas=4", "data.global_batch=4", "name=greedy"])

for step in (4, 9):
    name = f"stopped-{step}"
    options = ["strategy.kind=one_device", f"name={name}", "resume=auto", "train.epochs=4"]
    callback = "train.callbacks=[{name: '%s/stop.py:Stop', args: {step: %d}}]" % (os.getcwd(), step)
    stopped = train(CONFIG, [*options, callback])
    print(stopped.status, len(stopped.history["loss"]), signal.getsignal(signal.SIGINT) is signal.default_int_handler)
    again = train(CONFIG, options)
    same = {key: np.allclose(values, first.history[key][:4], rtol=1e-4) for key, values in again.history.items()}
    print(again.status, again.run_dir == stopped.run_dir, same, {len(values) for values in again.history.values()})
