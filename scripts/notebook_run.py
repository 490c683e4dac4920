"""A run inside a notebook: the cells of one, as a script. Also runs as it is: `python scripts/notebook_run.py`.

Editors show each `# %%` as a cell; `jupytext --to ipynb scripts/notebook_run.py` makes a notebook of it.
"""

# %% One run: two copies of the model, in this process. Any config file or dict will do.
import numpy as np

from distlaunch.notebook import train
from distlaunch.workloads.images import fashion_mnist

config = {
    "name": "notebook",
    "model": {"function": "distlaunch.workloads.images:mlp"},
    "data": {
        "function": "distlaunch.workloads.images:fashion_mnist",
        "args": {"source": "shipped"},
        "global_batch": 64,
        "train_examples": 2000,
    },
    "compile": {
        "optimizer": {"name": "Adam", "args": {"learning_rate": 0.003}},
        "loss": {"name": "SparseCategoricalCrossentropy", "args": {"from_logits": True}},
        "metrics": ["accuracy"],
    },
    "train": {"epochs": 2},
    "strategy": {"kind": "mirrored", "replicas": 2},
}

first = train(config)

# %% What came of it: a value of each epoch, by name.
for name, values in first.history.items():
    print(f"{name:<14}", *(f"{value:.4f}" for value in values))

# %% The model is a Keras model on one device.
images, labels = fashion_mnist(source="shipped")["validation"]
logits = first.model.predict(images[:500], verbose=0)
print(f"{np.mean(np.argmax(logits, axis=-1) == labels[:500]):.0%} of 500 images are recognised")

# %% Go on from the run's checkpoint, for two more epochs, on one device.
# On CPU, begin with the strategy that needs most devices: TensorFlow cannot get more of them later.
second = train(first.run_dir, ["strategy.kind=one_device", "train.epochs=4"])

# %% The history is that of the whole run.
print(f"{len(second.history['loss'])} epochs, loss {first.history['loss'][0]:.3f} to {second.history['loss'][-1]:.3f}")
print(f"in {second.run_dir}")
