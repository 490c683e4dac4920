import base64
import json
import os
import sys
from urllib.parse import quote

import keras
import numpy as np

NAMES = []


def show(value):
    coded = base64.b64encode(value.encode()).decode()
    pair = base64.b64encode(b"user:" + value.encode()).decode()
    for out in (sys.stdout, sys.stderr):
        print(value, json.dumps(value), quote(value), quote(value, safe=""), coded, pair, file=out)


def model(token, api_key, password, **others):
    for name in NAMES:
        show(os.environ[name])
    for value in (token, api_key, password, os.environ["TRACKER"], *others.values()):
        show(value)
    print(dict(os.environ))
    inputs = keras.Input((6,))
    return keras.Model(inputs, keras.layers.Dense(1)(inputs))


def printing(fail=False):
    for name in NAMES:
        show(os.environ.get(name, ""))
    print(dict(os.environ), file=sys.stderr)
    if fail:
        raise ValueError("refused: " + " ".join(os.environ.get(name, "") for name in NAMES))
    return data()


def failing():
    return printing(fail=True)


def dying():
    printing()
    sys.stdout.flush()
    os._exit(3)


def data(fail=False):
    if fail:
        raise ValueError("refused: " + " ".join(os.environ[name] for name in NAMES))
    x = np.ones((16, 6), np.float32)
    return {"train": (x, x[:, :1]), "validation": (x, x[:, :1])}
