"""`Model.fit` on several workers or on parameter servers, as TensorFlow's tutorials have it. Keras 3 cannot do it.

With TF_USE_LEGACY_KERAS=1 and the package tf_keras it runs as it is.
"""

import os

import numpy as np
import tensorflow as tf

resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
with_servers = "ps" in resolver.cluster_spec().jobs
if with_servers and resolver.task_type in ("worker", "ps"):
    os.environ["GRPC_FAIL_FAST"] = "use_caller"
    tf.distribute.Server(resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id).join()

if with_servers:
    strategy = tf.distribute.ParameterServerStrategy(resolver)
else:
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
data = tf.data.Dataset.from_tensor_slices((x, x.sum(axis=1, keepdims=True))).repeat().batch(16)
with strategy.scope():
    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    model.compile(optimizer="sgd", loss="mse")
history = model.fit(data, epochs=2, steps_per_epoch=5, verbose=0)
print("losses", [f"{loss:.3f}" for loss in history.history["loss"]], flush=True)
