"""A custom loop on MultiWorkerMirroredStrategy, written as TensorFlow's tutorials have it: it knows TF_CONFIG alone.

`--kill-at STEP`: worker 1 kills itself there in the first attempt. Goes on from its checkpoints.
`--preemptible DIRECTORY`: TensorFlow's handler saves there when SIGTERM comes, and exits with 42.
"""

import argparse
import json
import os
import signal

import numpy as np
import tensorflow as tf

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--kill-at", type=int)
parser.add_argument("--preemptible")
args = parser.parse_args()

strategy = tf.distribute.MultiWorkerMirroredStrategy()
task = json.loads(os.environ["TF_CONFIG"])["task"]
GLOBAL_BATCH = 8 * strategy.num_replicas_in_sync

x = np.random.default_rng(0).normal(size=(GLOBAL_BATCH * 4, 4)).astype("float32")
y = x.sum(axis=1, keepdims=True)


def make_dataset(context):
    data = tf.data.Dataset.from_tensor_slices((x, y)).repeat()
    data = data.shard(context.num_input_pipelines, context.input_pipeline_id)
    return data.batch(context.get_per_replica_batch_size(GLOBAL_BATCH))


with strategy.scope():
    weights = tf.Variable(tf.zeros([4, 1]))
    step_count = tf.Variable(0, dtype=tf.int64)
checkpoint = tf.train.Checkpoint(weights=weights, step=step_count)
# each task has a directory of its own, as all must take part in saving
directory = os.path.join(
    args.preemptible or os.environ["DISTLAUNCH_RUN_DIR"], "saved", f"{task['type']}-{task['index']}"
)
manager = tf.train.CheckpointManager(checkpoint, directory, max_to_keep=1)
if args.preemptible:
    handler = tf.distribute.experimental.PreemptionCheckpointHandler(
        tf.distribute.cluster_resolver.TFConfigClusterResolver(),
        checkpoint,
        directory,
        termination_config=tf.distribute.experimental.TerminationConfig(grace_period=0),
    )
    # what the handler of worker 0 has saved is all there is
    checkpoint.restore(tf.train.latest_checkpoint(os.path.join(args.preemptible, "saved", "worker-0")))
else:
    checkpoint.restore(manager.latest_checkpoint)
first = int(step_count.numpy())


@tf.function
def train_step(iterator):
    def replica_step(batch):
        inputs, targets = batch
        with tf.GradientTape() as tape:
            errors = tf.reduce_sum(tf.square(inputs @ weights - targets), axis=1)
            loss = tf.nn.compute_average_loss(errors, global_batch_size=GLOBAL_BATCH)
        gradient = tape.gradient(loss, weights)
        context = tf.distribute.get_replica_context()
        total = context.all_reduce(tf.distribute.ReduceOp.SUM, gradient)
        weights.assign_sub(0.05 * total)
        return loss

    losses = strategy.run(replica_step, args=(next(iterator),))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)


iterator = iter(strategy.distribute_datasets_from_function(make_dataset))
print(f"{strategy.num_replicas_in_sync} replicas, from step {first}", flush=True)
for step in range(first + 1, args.steps + 1):
    if args.preemptible:
        step_count.assign(step)
        loss = float(handler.run(train_step, iterator).numpy())
    else:
        loss = float(train_step(iterator).numpy())
        step_count.assign(step)
        manager.save()
    print(f"step {step} loss {loss:.4f}", flush=True)
    if step == args.kill_at and task["index"] == 1 and os.environ["DISTLAUNCH_ATTEMPT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
print("done", flush=True)
