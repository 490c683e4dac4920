import atexit
import os
import sys
import threading

import keras
import numpy as np
import tensorflow as tf

HOOKS = os.environ["HOOKS"]
argv = sys.orig_argv  # `sys.argv` is this file's
program = argv[argv.index("-m") + 1] if "-m" in argv else next(word for word in argv if word.endswith(".py"))[:-3]
command = os.path.basename(program.replace(".", "/")) + ".py"
words = [argv[argv.index(word) + 1] for word in ("--mode", "--task") if word in argv]


def hook():
    print("told by a hook")
    open(os.path.join(HOOKS, " ".join([command, *words])), "x").close()


atexit.register(hook)
threading.Thread(target=threading.Event().wait).start()  # it is no daemon


def model(made="well"):
    if made == "of nothing":
        return None
    if made == "with a hook that hangs":
        atexit.register(threading.Event().wait)
        raise LookupError(made)
    return keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])


def add(x, y):
    if tf.reduce_sum(x) > 1e9:
        y += 1
    return x, y


def data():
    x = np.random.default_rng(0).normal(size=(64, 3)).astype("float32")
    return {"train": (x, x.sum(1, keepdims=True)), "validation": (x, x.sum(1, keepdims=True))}


def check(y):
    tf.debugging.assert_greater(y, 1e9, message="y is small")  # check
    return y


def bad_step(context, batch):
    x, y = batch
    if tf.reduce_sum(x) > 1e9:
        y += 1
    y = check(y)  # bad_step
    return step(context, (x, y))


def wrong_step(context, batch):
    x, y = batch
    if tf.reduce_sum(x) > 1e9:
        y += 1
    return {}["loss"]  # wrong_step


def step(context, batch):
    x, y = batch
    if tf.reduce_sum(x) > 1e9:
        y += 1
    with tf.GradientTape() as tape:
        predictions = context.model(x, training=True)
        loss = context.average(context.per_example_loss(y, predictions))
    context.apply(tape, loss)
    context.model.compute_metrics(x, y, predictions)
    return {"loss": loss}
