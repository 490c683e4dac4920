"""The config that `distlaunch init` writes."""

STARTER = """\
# One run of distlaunch. Check it: distlaunch validate FILE. Run it: distlaunch train FILE.
# Any value can be changed for one run: --set train.epochs=10 --set strategy.kind=one_device
# Completion in editors: run `distlaunch schema > distlaunch.schema.json` and begin this file with the line
# `# yaml-language-server: $schema=distlaunch.schema.json`

model:
  # A function that returns a Keras model: package.module:function, or path/to/file.py:function.
  function: distlaunch.workloads.images:cnn
  args: {l2: 0.0}

data:
  # A function that returns the training and validation data.
  function: distlaunch.workloads.images:fashion_mnist
  args: {source: auto}
  global_batch: 64        # examples in one step, over all replicas together
  shuffle: true
  remainder: keep         # or drop: what happens to a smaller last batch

compile:
  optimizer: {name: adam, args: {learning_rate: 1e-3}}
  loss: sparse_categorical_crossentropy
  metrics: [accuracy]

train:
  loop: fit               # or custom: an explicit step, yours with `step:`
  epochs: ${EPOCHS:2}     # the environment variable EPOCHS, or 2
  # callbacks:
  #   - {name: EarlyStopping, args: {monitor: val_loss, patience: 2}}

validation:
  every_epochs: 1

# This part picks how the work is distributed; results stay the same.
strategy:
  kind: mirrored          # one_device, mirrored, multi_worker_mirrored
  # replicas: 2           # default: every GPU, or 2 virtual CPU devices

# With multi_worker_mirrored: how many processes.
# cluster:
#   workers: 2

checkpoint:
  every_epochs: 1
  keep: 3

seed: 0
# export: [keras]         # what to write at the end: saved_model, keras, weights, tflite
"""
