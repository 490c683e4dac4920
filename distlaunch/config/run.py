"""The whole config of a run."""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
import zlib
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PrivateAttr, create_model

from distlaunch.base.errors import UsageError
from distlaunch.base.run_dir import check_run_name
from distlaunch.base.secret_mask import MASKED_ENV, REFERENCES_ENV
from distlaunch.config.backend import Backend
from distlaunch.config.base import (
    Arguments,
    Finite,
    FunctionRef,
    Positive,
    PositiveMinutes,
    PositiveSeconds,
    Section,
    Words,
)
from distlaunch.config.cluster import Cluster, WorkerRange
from distlaunch.config.engines import Engine
from distlaunch.config.engines.local import Auto
from distlaunch.config.secrets import Secrets
from distlaunch.config.strategies import Strategy
from distlaunch.config.strategies.base import OneDeviceSection


class Model(Section):
    """The model: a function that returns a Keras model."""

    function: FunctionRef
    args: Arguments


class TfdsSource(Section):
    """A dataset of tensorflow-datasets, read from a prepared directory unless `download` is true."""

    neutral_keys: ClassVar[frozenset[str]] = frozenset({"data_dir", "download"})

    name: str
    """Name as in `tfds.load`, e.g. `mnist` or `mnist:3.0.1`."""
    train: str = "train"
    """The split for training, also as an expression such as `train[:90%]`."""
    validation: str | None = "test"
    """The split for validation, also as an expression such as `train[90%:]`. null: no validation."""
    data_dir: str | None = None
    download: bool = False
    """True: the dataset may be downloaded. False: the network is never used."""


class Preprocessing(Section):
    """A Keras layer before the model, such as a `TextVectorization`."""

    function: FunctionRef
    """Gets the inputs of the training split in batches, a `tf.data.Dataset`, and returns the layer, adapted to them."""
    args: Arguments

    @property
    def key(self) -> str:
        """The name of the layer's file in a run. It changes with the function and its arguments."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:12]


class Data(Section):
    """The data: a function that returns the splits, or a name of tensorflow-datasets."""

    neutral_keys: ClassVar[frozenset[str]] = frozenset({"skip_limit", "threads", "processes"})

    function: FunctionRef | None = None
    args: Arguments
    tfds: TfdsSource | None = None
    map: FunctionRef | None = None
    """Applied to each example of every split, after loading: `def f(x, y): return x, y`."""
    augment: FunctionRef | None = None
    """Applied to each training example, after `map`: `def f(x, y, seed): return x, y`. `seed` is optional; it is meant
    for random numbers, and differs for each epoch and example.
    """
    preprocessing: Preprocessing | None = None
    """Converts the inputs of each batch for the model. The layer is made once for a run, kept in its directory, and
    part of a SavedModel, which therefore takes the output of the data function.
    """
    global_batch: Positive | None = None
    """Examples per step, over all replicas. null: the batch size of a `keras.utils.PyDataset`."""
    batched: bool | None = None
    """True: the function's tf.data pipelines yield global batches, in their own order; `shuffle` has no effect then.
    False: they yield examples. null: examples too, and a pipeline that seems to yield batches is an error.
    """
    shuffle: bool | Positive = True
    """True: over all examples if they can be read by index; for tf.data pipelines, a buffer of 10,000 examples, or as
    many as fit into `shuffle_buffer_bytes`. A number: a buffer of this many examples.
    """
    shuffle_buffer_bytes: Positive = 256_000_000
    """Largest size of the buffer of `shuffle: true` in each process, in bytes of examples before `map`."""
    on_error: Literal["stop", "skip"] = "stop"
    """Reaction to a training example that cannot be read or mapped. `stop`: the run fails. `skip`: the next example
    takes its place, and the run reports it.
    """
    skip_limit: Positive = 100
    """With `on_error: skip`, the number of different examples that each process may skip before the run fails."""
    sharding: Literal["rows", "function", "shuffled"] = "rows"
    """Assignment of training examples to workers. `rows`: the function returns the same in every process, which then
    reads its own rows of each batch. `function`: the function gets `context` and returns this worker's own examples.
    `shuffled` (parameter_server): each worker draws from all examples, in its own order.
    """
    streams: Positive | None = None
    """Number of streams, for files that can only be read from the start. The function is called once for each, with a
    `context` that contains the stream's number, and each stream gives an equal part of every batch. Workers share the
    streams.
    """
    threads: Positive | None = None
    """Number of examples that each process reads and maps at the same time; null: one per available core."""
    processes: Positive | None = None
    """Number of processes that each task uses to read the examples of an object with `__getitem__`, instead of threads.
    Only one thread at a time can run Python code. null: threads.
    """
    remainder: Literal["keep", "drop"] = "keep"
    """Keep or drop a last batch that is smaller than the others."""
    class_weight: Annotated[
        dict[int, Finite] | None, Words("a mapping of classes to weights, such as {0: 1.0, 1: 2.5}")
    ] = None
    """Weight of each class in the loss; classes that are not listed have weight 1."""
    train_examples: Positive | None = None
    """Use only the first N examples for training."""
    validation_examples: Positive | None = None

    @property
    def batch(self) -> int:
        """The global batch size, once it is known: for a `keras.utils.PyDataset`, after it has been read."""
        assert self.global_batch is not None, "known from the config or the data"
        return self.global_batch

    @property
    def gives_context(self) -> bool:
        """True if the function gets a `context` that tells which worker or stream it is called for."""
        return self.sharding == "function" or self.streams is not None

    @property
    def is_mapped_by_tensorflow(self) -> bool:
        """Whether TensorFlow processes the data, whatever the data function returns."""
        keys = (self.map, self.augment, self.preprocessing, self.streams, self.tfds)
        return any(key is not None for key in keys)


class Component(Section):
    """A Keras object by name, with arguments: `{name: Adam, args: {learning_rate: 0.001}}`."""

    name: str
    args: Arguments


Named = Annotated[str | Component, Words("a name such as 'adam', or {name: ..., args: {...}}")]


class MetricComponent(Component):
    """A metric by name, with arguments."""

    additive: bool | None = None
    """True if the metric's state after some rows is the sum of its states after parts of these rows. null: distlaunch
    tests this for every metric that is not part of Keras.
    """


NamedMetric = Annotated[str | MetricComponent, Words("a name such as 'accuracy', or {name: ..., args: {...}}")]


class OptimizerComponent(Section):
    """An optimizer by name, with arguments; without a name, new arguments for the model's own optimizer."""

    name: str | None = None
    args: Arguments


class Compile(Section):
    """Arguments of Keras `compile`. If the model's function compiles the model, these arguments replace its own."""

    neutral_keys: ClassVar[frozenset[str]] = frozenset({"jit_compile"})

    optimizer: (
        Annotated[str | OptimizerComponent, Words("a name such as 'adam', or {name: ..., args: {...}}")] | None
    ) = None
    """A name of `keras.optimizers`, or `package.module:function` that returns an optimizer. Without a name, the
    arguments apply to the optimizer with which the model's function compiles the model. null: that optimizer, or
    `rmsprop`.
    """
    loss: Annotated[
        Named | list[Named] | dict[str, Named] | None,
        # in this order: `{name: mse}` is a loss, not a mapping with an output named `name`
        Field(union_mode="left_to_right"),
        Words("a loss such as 'mse' or {name: ..., args: {...}}, a list of losses, or a mapping of outputs to losses"),
    ] = None
    """A name of `keras.losses`, or `package.module:function` (y_true, y_pred) -> loss of each example."""
    loss_weights: list[Finite] | dict[str, Finite] | None = None
    metrics: Annotated[
        list[NamedMetric] | dict[str, list[NamedMetric]] | None,
        Words("a list of metrics, such as [accuracy], or a mapping of outputs to such lists"),
    ] = None
    weighted_metrics: Annotated[
        list[NamedMetric] | dict[str, list[NamedMetric]] | None,
        Words("a list of metrics, such as [accuracy], or a mapping of outputs to such lists"),
    ] = None
    jit_compile: bool | None = None
    """True: XLA is used. On CPU it makes some models slower (convolutions: 1.6 to 2.4 times). null: the model's
    setting, or off."""


_RECORDING_CALLBACKS = frozenset(
    {
        *("BackupAndRestore", "CSVLogger", "ModelCheckpoint", "OrbaxCheckpoint"),
        *("ProgbarLogger", "RemoteMonitor", "TensorBoard"),
    }
)
"""Callbacks of Keras that only record the training."""


class Callback(Section):
    """A Keras callback by name, or a class or function of your own that returns one."""

    name: str
    """A name of `keras.callbacks`, `package.module:Name` or `path/file.py:Name`."""
    args: Arguments
    """`${run_dir}` is replaced by the run directory. Relative paths of Keras's callbacks start there."""
    tasks: Literal["auto", "all", "chief"] = "auto"
    """`auto`: Keras's callbacks that write files run on the chief, all others on every task."""

    @property
    def only_records(self) -> bool:
        """True if the callback does not affect the numbers."""
        return self.name.removeprefix("keras.callbacks.") in _RECORDING_CALLBACKS


class Train(Section):
    """The training loop."""

    neutral_keys: ClassVar[frozenset[str]] = frozenset({"steps_per_call", "on_nonfinite", "log_every_steps", "check"})

    loop: Literal["fit", "custom"] = "fit"
    """`fit`: like Keras `fit`. `custom`: an explicit step, the reference step or your own (`step`)."""
    step: FunctionRef | None = None
    """With `loop: custom`: your step function, `def step(context, batch)`; on jax `def step(context, state, batch)`."""
    epochs: Positive = 1
    steps_per_epoch: Positive | None = None
    """Number of steps of an epoch. null: all batches of the data."""
    steps_per_call: Positive | Literal["auto"] = "auto"
    """Steps per graph call. `auto`: as many as take about half a second; 1 if a callback watches each batch."""
    callbacks: Annotated[list[Callback], Words("a list of callbacks, such as [{name: TerminateOnNaN}]")] = Field(
        default_factory=list
    )
    on_nonfinite: Literal["fail", "warn"] = "fail"
    """Reaction to a loss, or a weight to be saved, that is nan or infinite. `fail`: the run fails and reports the step.
    `warn`: it warns once and continues. Metrics and validation only cause a warning.
    """
    log_every_steps: Positive | None = None
    """Number of steps between two reports of progress. null: about two reports each second."""
    check: Literal["auto", "strict", "off"] = "auto"
    """Comparison of the first steps with Keras on one device, by a process on an idle core. `auto`: a deviation is a
    warning. `strict`: training waits for the comparison, and a deviation ends the run. `off`: no comparison.
    """


class Validation(Section):
    """Evaluation on the validation split during training."""

    every_epochs: Positive = 1
    steps: Positive | None = None
    """Number of steps of a validation. null: the whole split, every example counted once."""


_ASYNC_FIELD: dict[str, Any] = {
    "async": (bool, Field(True, description="Write while training continues; false: training waits for the commit."))
}
_Async = create_model(
    "_Async", __base__=Section, **_ASYNC_FIELD
)  # `async` is a keyword, so no class body can declare it


class Best(Section):
    """The checkpoint of the epoch with the best value, which is kept in addition to the newest ones."""

    metric: str
    """A value at the end of an epoch, such as `val_accuracy` or `loss`."""
    mode: Literal["max", "min"]
    """Take the highest or the lowest value as the best."""


class Checkpoint(_Async):
    """When the state is saved, and how many checkpoints are kept. At least one of the intervals must be set."""

    is_neutral: ClassVar[bool] = True

    every_epochs: Positive | None = 1
    every_steps: Positive | None = None
    every_minutes: PositiveMinutes | None = None
    """Minutes between two checkpoints, by the chief's clock. They count from the last checkpoint, whichever interval
    caused it.
    """
    every: Literal["auto"] | None = None
    """`auto`: checkpoints are saved at the interval that loses the least time, given how often the run has failed and
    what a checkpoint costs. `every_steps` is then the upper bound of the interval.
    """
    keep: Positive = 3
    best: Best | None = None

    @property
    def beside_training(self) -> bool:
        """True if training continues while a checkpoint is written: `async`."""
        return getattr(self, "async")


AUTO_RESTARTS = 3
"""`restarts.max: auto` for jobs that are expected to lose tasks: with parameter servers, or with a range of workers."""


class Restarts(Section):
    """Restarts after failures that may not happen again (a killed process, a lost peer)."""

    is_neutral: ClassVar[bool] = True

    max: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    """Maximum number of times that a job is restarted from its last checkpoint. `auto`: 3 for parameter_server, and if
    `cluster.workers` is a range; 0 otherwise.
    """
    window_s: PositiveSeconds | None = None
    """Count only restarts within this many seconds; null: all."""
    backoff_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Time to wait before the first restart. Each further restart in a row waits twice as long as the one before, up to
    5 minutes.
    """


ExportFormat = Literal["saved_model", "keras", "weights", "tflite"]

TrackerName = Literal["wandb", "mlflow", "trackio", "tensorboard"]

RUN_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$"


def as_run_name(text: str) -> str:
    """Return a valid name of runs that resembles the name of a file or folder.

    A name with letters beyond ASCII ends in a checksum, so that `größe` and `grüße` are two runs.
    """
    text = unicodedata.normalize("NFC", text)
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", plain).lstrip("._-")
    if text.isascii():
        return name[:200] or "run"
    return f"{name[:190].rstrip('-') or 'run'}-{zlib.crc32(text.encode(errors='surrogatepass')):08x}"


class RunConfig(Section):
    """The complete config of one run. Unknown keys are errors."""

    neutral_keys: ClassVar[frozenset[str]] = frozenset({"name", "runs_dir", "resume", "export", "tracking"})

    name: (
        Annotated[
            str,
            Field(pattern=RUN_NAME),
            Words("at most 200 ASCII letters, digits, '.', '_' and '-', beginning with a letter or digit"),
        ]
        | None
    ) = None
    """Name of the run directory. null: the config file's name."""
    runs_dir: str = "runs"
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    determinism: bool = False
    """True: the same seed gives results that are equal bit by bit on the same machine, and some operations become
    slower.
    """
    precision: Literal["float32", "mixed_bfloat16", "mixed_float16"] | None = None
    """Keras's dtype policy for the layers that the model's function creates. Mixed: they compute in 16 bits and keep
    their weights in 32; `mixed_float16` scales the loss, so that small gradients do not become zero. null: Keras's own,
    float32 unless the model's function sets another.
    """
    synchronize_batch_norm: bool = False
    """Make Keras's BatchNormalization use the statistics of the whole batch, as on one device, and not those of the
    rows of each replica.
    """
    resume: Literal["never", "auto"] = "never"
    """`auto`: like `train --resume`: continue the newest unfinished run of this name; start one if there is none."""
    model: Model
    data: Data
    compile: Compile | None = None
    train: Train = Field(default_factory=Train)
    validation: Validation | None = Field(default_factory=Validation)
    strategy: Strategy = Field(default_factory=lambda: OneDeviceSection(kind="one_device"))
    cluster: Cluster = Field(default_factory=Cluster)
    engine: Engine = Field(default_factory=Auto)
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    restarts: Restarts = Field(default_factory=Restarts)
    export: list[ExportFormat] = Field(default_factory=list)
    """Formats to export after training, each checked by loading it in a clean process."""
    tracking: list[TrackerName] = Field(default_factory=list)
    """Trackers that get the values of the run. Server, project and keys come from the trackers' own environment
    variables.
    """

    _folder: Path | None = PrivateAttr(default=None)
    _modules_folder: Path | None = PrivateAttr(default=None)
    _secrets: Secrets = PrivateAttr(default=Secrets())

    @property
    def folder(self) -> Path | None:
        """The folder of the config's file, from which relative paths start; None for the current directory."""
        return self._folder

    @property
    def modules_folder(self) -> Path | None:
        """The folder that is searched for modules before the current directory; None if there is none."""
        return self._modules_folder

    def __eq__(self, other: object) -> bool:
        """Return whether all values are the same, wherever the config's file is."""
        return isinstance(other, RunConfig) and self.__dict__ == other.__dict__

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def in_folder(self, folder: Path | None) -> RunConfig:
        """Return a copy that belongs to a file in this folder."""
        config = self.model_copy()
        config._folder = folder
        return config

    def with_modules_in(self, folder: Path | None) -> RunConfig:
        """Return a copy with modules from this folder."""
        config = self.model_copy()
        config._modules_folder = folder
        return config

    @property
    def secrets(self) -> Secrets:
        """References that secret values of the config come from."""
        return self._secrets

    def with_secrets(self, secrets: Secrets) -> RunConfig:
        """Return a copy whose secret values come from these references."""
        config = self.model_copy()
        config._secrets = secrets
        return config

    def changed(self, plain: dict[str, Any]) -> RunConfig:
        """Return a copy with other values, in the form of `to_plain`.

        Raises:
            ValidationError: a value is not valid.
        """
        config = RunConfig.model_validate(plain)
        config._folder, config._modules_folder, config._secrets = self._folder, self._modules_folder, self._secrets
        return config

    def with_model_of(self, other: RunConfig) -> RunConfig:
        """Return a copy with the model of another config, its precision and the layer before it."""
        data = self.data.model_copy(update={"preprocessing": other.data.preprocessing})
        config = self.model_copy(update={"model": other.model, "precision": other.precision, "data": data})
        config._secrets = self._secrets.replaced_at((("model",), ("data", "preprocessing")), other._secrets)
        return config

    def backend_of(self, job: str) -> Backend:
        """Return the Keras backend of the tasks of a job."""
        # an evaluator runs on one TensorFlow device, which can read the checkpoints of every strategy
        return "tensorflow" if job == "evaluator" else self.strategy.backend

    def check_name(self, given: str | None) -> None:
        """Raise UsageError if the run has no name, or if `--name` is not a valid one."""
        if given is not None:
            check_run_name(given, "--name")
        elif self.name is None:
            message = "--name: a config that is read from a pipe has no file name that could name the run"
            raise UsageError(f"{message}; add --name NAME, or `name: NAME` to the config")

    @property
    def max_restarts(self) -> int:
        """Largest number of restarts of a job from its last checkpoint."""
        if self.restarts.max != "auto":
            return self.restarts.max
        expects_losses = self.strategy.has_coordinator or isinstance(self.cluster.workers, WorkerRange)
        return AUTO_RESTARTS if expects_losses else 0

    def with_workers(self, number: int) -> RunConfig:
        """Return a copy with another number of workers."""
        return self.model_copy(update={"cluster": self.cluster.model_copy(update={"workers": number})})

    def to_plain(self) -> dict[str, Any]:
        """Return all values, including defaults, as plain data for YAML. Class weights keep their numbers as keys."""
        return self.model_dump(mode="python")

    def to_public(self) -> dict[str, Any]:
        """Return plain data without secrets, for checkpoints and records, which users copy and publish."""
        return self._secrets.public(self.to_plain())

    def task_environ(self) -> dict[str, str]:
        """Return the variables that a task needs to read the config from the run's files, and to mask its output."""
        found = dict(self._secrets.variables)
        if found:
            found[REFERENCES_ENV] = ",".join(found)
        if values := self._secrets.values(self.to_plain()):
            found[MASKED_ENV] = json.dumps(values)
        return found
