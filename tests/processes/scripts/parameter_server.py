"""A custom loop with ClusterCoordinator, written as TensorFlow's tutorials have it: all tasks run this file."""

import os
import sys

import numpy as np
import tensorflow as tf

resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
if resolver.task_type in ("worker", "ps"):
    os.environ["GRPC_FAIL_FAST"] = "use_caller"
    server = tf.distribute.Server(
        resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id, protocol="grpc", start=True
    )
    server.join()

strategy = tf.distribute.ParameterServerStrategy(
    resolver, variable_partitioner=tf.distribute.experimental.partitioners.FixedShardsPartitioner(2)
)
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
with strategy.scope():
    weights = tf.Variable(tf.zeros([4, 1]))
    steps = tf.Variable(0, dtype=tf.int64)


def make_dataset():
    x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
    return tf.data.Dataset.from_tensor_slices((x, x.sum(axis=1, keepdims=True))).repeat().batch(16)


@tf.function
def train_step(iterator):
    def replica_step(batch):
        inputs, targets = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(inputs @ tf.convert_to_tensor(weights) - targets))
        # a variable in parts cannot be differentiated as a whole
        gradients = tape.gradient(loss, weights.variables)
        for part, gradient in zip(weights.variables, gradients, strict=True):
            part.assign_sub(0.05 * gradient)
        steps.assign_add(1)
        return loss

    return strategy.run(replica_step, args=(next(iterator),))


per_worker = iter(coordinator.create_per_worker_dataset(make_dataset))
for epoch in range(int(sys.argv[1]) if len(sys.argv) > 1 else 3):
    losses = [coordinator.schedule(train_step, args=(per_worker,)) for _ in range(10)]
    coordinator.join()
    print(f"epoch {epoch} loss {np.mean(coordinator.fetch(losses)):.4f}", flush=True)
print(f"{len(weights.variables)} shards, {int(steps.numpy())} steps", flush=True)
