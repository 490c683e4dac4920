import os
import random
import signal

import numpy as np


class Photos:
    def __len__(self):
        return 20

    def __getitem__(self, index):
        if index == 7:
            raise ValueError("broken image")
        if index == 8:
            raise SystemExit
        if index == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        if index == 10:
            return lambda: 0
        if index == 11 and not os.path.exists("was_here"):
            open("was_here", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return np.full(3, index), {"pid": os.getpid(), "text": "ä", "drawn": [random.random(), np.random.normal()]}
