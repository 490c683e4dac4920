"""Broken configs: what is written, where the mistake is, and words of the message that help."""

# ruff: noqa: E501 (one row a mistake)

from __future__ import annotations

from dataclasses import dataclass

from tests.unit.config_files import BASE

MODEL = "model: {function: 'models.py:net'}\n"


@dataclass(frozen=True)
class Broken:
    """Config with a mistake.

    Attributes:
        line: line that the message must name; None if there is no line.
        key: part of the key that the message must name.
        words: texts that the message must contain.
    """

    id: str
    text: str | bytes
    line: int | None
    key: str
    words: tuple[str, ...]


def below(extra: str, line: int, key: str, *words: str, id: str) -> Broken:
    """A mistake in lines after a good beginning of five lines; `line` counts from the first of them."""
    return Broken(id, BASE + extra, line + 5, key, words)


def data(extra: str, key: str, *words: str, id: str) -> Broken:
    """A mistake in a line added to `data:`."""
    return Broken(id, BASE + f"  {extra}\n", 6, key, words)


YAML = [
    Broken("empty", "", None, "", ("empty", "distlaunch init")),
    Broken("only comments", "# nothing\n# at all\n", None, "", ("empty", "distlaunch init")),
    Broken("only a marker", "---\n", None, "", ("empty",)),
    Broken("a list", "- model\n- data\n", 1, "", ("a list of 2", "expected `key: value`")),
    Broken("a word", "mirrored\n", 1, "", ("'mirrored'", "expected `key: value`")),
    Broken("utf-16", "model: x\n".encode("utf-16"), None, "", ("UTF-16", "save it as UTF-8")),
    Broken("latin-1", b"# caf\xe9\nmodel: x\n", 1, "", ("not UTF-8", "0xe9", "save the file as UTF-8")),
    Broken("nul byte", b"model: x\nname: a\0b\n", 2, "", ("NUL",)),
    Broken("nul escape", BASE + 'runs_dir: "a\\0b"\n', 6, "runs_dir", ("NUL", "remove it")),
    Broken("control character", b"model: x\nname: \x07\n", 2, "", ("control character (0x07)", "remove it")),
    Broken("huge", b"#" * (1 << 20) + b"\nmodel: x\n", None, "", ("1 MiB", "right file")),
    Broken("two documents", BASE + "---\nmodel: x\n", 6, "", ("second document", "one config in a file")),
    Broken("tab", "model:\n\tfunction: a:b\n", 2, "", ("a tab", "spaces")),
    Broken("duplicate key", BASE + "  global_batch: 32\n", 6, "data.global_batch", ("in line 5", "remove one")),
    Broken("duplicate section", BASE + "data:\n  global_batch: 32\n", 6, "data", ("in line 3", "remove one")),
    Broken("python tag", BASE + "seed: !!python/object:os.system x\n", 6, "", ("!!python/object:os.system", "tags are not")),
    Broken("own tag", BASE + "name: !secret x\n", 6, "", ("!secret", "tags are not supported")),
    Broken("unknown alias", BASE + "  args: *defaults\n", 6, "", ("*defaults has no anchor", "quote text")),
    Broken("recursive alias", BASE + "  args: &a {x: *a}\n", 6, "", ("inside its own anchor",)),
    Broken("merge of a scalar", BASE + "  <<: 3\n", 6, "data.<<", ("expected a mapping",)),
    Broken("deep brackets", BASE + "name: " + "[" * 10_000 + "\n", 6, "", ("nested deeper than 60",)),
    Broken("deep mappings", BASE + "name: " + "{a: " * 10_000 + "\n", 6, "", ("nested deeper than 60",)),
    Broken("open bracket", BASE + "export: [keras\ntrain: {}\n", 6, "", ("not closed", "']'")),
    Broken("open quote", BASE + 'name: "run\ntrain: {}\n', 6, "", ("quote", "not closed")),
    Broken("indentation", BASE + "train:\n  epochs: 3\n   loop: fit\n", 8, "", ("indentation",)),
    Broken("colon in a value", BASE + "name: a: b\n", 6, "", ("': ' needs quotes",)),
    Broken("at sign", BASE + "name: @here\n", 6, "", ("cannot begin with '@'", "quotes")),
    Broken("no colon", BASE + "train\nseed: 0\n", None, "", ("expected `key: value`",)),
    Broken("key is true", BASE + "train: {true: 3}\n", 6, "train", ("the key true", "quotes")),
    Broken("key is a list", BASE + "train: {[a]: 3}\n", 6, "", ("a key must be a word, not a list",)),
    Broken("number beyond 64 bits", BASE + f"seed: {10**30}\n", 6, "seed", ("beyond 64 bits", "smaller")),
    Broken("variable not set", BASE + "seed: ${NOT_SET_HERE}\n", 6, "seed", ("NOT_SET_HERE is not set", "default")),
    Broken("variable not closed", BASE + "runs_dir: ${HOME\n", 6, "runs_dir", ("expected ${NAME}", "$${")),
    below("runs_dir: ${RUNS:-runs}\n", 1, "runs_dir", "'${RUNS:-runs}'; write ${RUNS:runs}", "${RUNS: -runs}", id="default as in a shell"),
    below("runs_dir: ${env:RUNS}\n", 1, "runs_dir", "write ${RUNS} for the environment variable RUNS", id="env: before a variable"),
    Broken("billion laughs", BASE + "x0: &x0 [a, a]\n" + "".join(
        f"x{n}: &x{n} [{', '.join([f'*x{n - 1}'] * 9)}]\n" for n in range(1, 9)), None, "", ("50,000",)),
    Broken("long chain of merges", BASE + "y0: &y0 {a: 1}\n" + "".join(
        f"y{n}: &y{n} {{<<: *y{n - 1}}}\n" for n in range(1, 300)), None, "", ("deeper than 60",)),
]  # fmt: skip

SCHEMA = [
    Broken("no model", "data: {function: 'models.py:data', global_batch: 8}\n", None, "model", ("missing", "top of the file")),
    Broken("no global batch", MODEL + "data:\n  function: models.py:data\n", 2, "data.global_batch",
           ("missing", "whole number of at least 1", "below `data:`")),
    Broken("empty section", BASE + "train:\n", 6, "train", ("nothing (null)", "remove the line")),
    below("epochs: 3\n", 1, "epochs", "unknown key", "did you mean train.epochs?", id="key in the wrong section"),
    below("strateggy: {kind: mirrored}\n", 1, "strateggy", "did you mean 'strategy'?", id="misspelt section"),
    data("shufle: true", "data.shufle", "unknown key", "did you mean 'shuffle'?", id="misspelt key"),
    data("shuffle: off", "data.shuffle", "'off' (text)", "write true or false", id="off is text"),
    data("batched: yes", "data.batched", "'yes' (text)", "expected true, false, or null", id="yes is text"),
    data("shuffle: 0", "data.shuffle", "got 0", "at least 1", id="shuffle 0"),
    data("remainder: kep", "data.remainder", "'keep', 'drop'", "did you mean 'keep'?", id="misspelt choice"),
    data("train_examples: 1_000", "data.train_examples", "write 1000", id="underscores"),
    data("train_examples: 1e3", "data.train_examples", "a decimal number", "write 1000", id="float for int"),
    data("train_examples: 12:30", "data.train_examples", "'12:30' (text)", "whole number", id="not sexagesimal"),
    data("class_weight: {cat: 1.0}", "data.class_weight", "'cat'", "whole number", id="class weight by name"),
    data("class_weight: {0: .inf}", "data.class_weight[0]", "inf", "a number", id="infinite class weight"),
    data("args: [auto]", "data.args", "a list of 1", "mapping of arguments", id="args as a list"),
    data("map: pair", "data.map", "package.module:function", id="map without a module"),
    below("train:\n  epochs:3\n", 1, "train", "a space after the colon: `epochs: 3`", id="no space after a colon"),
    below("validation: false\n", 1, "validation", "write null for none", id="validation false"),
    below("engine: {kind: ssh}\n", 1, "engine", "`kind: ssh` without hosts", "USER@HOST:PORT", id="ssh without hosts"),
    below("engine:\n  kind: ssh\n  hosts:\n    - a\n    - b slot=2\n", 5, "engine.hosts[1]", "got 'slot=2' after b", "slots=N", id="misspelt slots"),
    below("engine:\n  kind: ssh\n  hosts: [a, u@a]\n", 3, "engine.hosts[1]", "got a twice", "slots=N", id="a host twice"),
    below("engine:\n  hosts: [a]\n", 2, "engine.hosts", "unknown key", "it belongs to `kind: ssh`", id="hosts without a kind"),
    below("engine:\n  kind: ssh\n  hosts: [a]\n  hostfile: x\n", 4, "engine.hostfile", "got both", "remove one", id="hosts and a hostfile"),
    below("engine:\n  kind: ssh\n  hosts: [a]\ncluster:\n  isolate: true\n", 5, "cluster.isolate", "has tasks on several hosts", "remove one", id="several hosts without a network"),
    below("engine:\n  folder: here\n", 2, "engine.folder", "got 'here'", "an absolute path", id="relative folder of hosts"),
    below("engine:\n  kind: slurm\n  time: 1h\n", 3, "engine.time", "got '1h'", "'H:MM:SS'", id="time limit"),
    below("engine: {kind: slurm, time: 2}\n", 1, "engine.time", "120 s before its time limit", "grace_s", id="no time before the end"),
    below("engine: {kind: slurm, gpus: a100}\n", 1, "engine.gpus", "got 'a100'", "TYPE:NUMBER", id="GPUs without a number"),
    below("engine: {kind: slurm, account: 12}\n", 1, "engine.account", "'12'", id="account as a number"),
    below("engine: {kind: slurm, mem: 64 GB}\n", 1, "engine.mem", "'64G'", id="memory of a node"),
    below("engine:\n  kind: slurm\n  flags: [--exclusive, --part=x]\n", 3, "engine.flags[1]", "use engine.partition", id="a flag with a key"),
    below("engine: {kind: slurm, flags: [--array=0-3]}\n", 1, "engine.flags[0]", "several times", id="an array of jobs"),
    below("engine: {kind: slurm, srun: [container]}\n", 1, "engine.srun[0]", "expected one option", id="no option of srun"),
    below("cluster: {workers: 4}\nstrategy: {kind: multi_worker_mirrored}\nengine: {kind: slurm, nodes: 2}\n", 3, "engine.nodes", "use 4", id="too few nodes"),
    below("train: {epochs: 0}\n", 1, "train.epochs", "got 0", "at least 1", id="no epochs"),
    below("train: {epochs: '3'}\n", 1, "train.epochs", "'3' (text)", "without quotes", id="number in quotes"),
    below("train: {epochs: true}\n", 1, "train.epochs", "true", "whole number", id="true for a number"),
    below("train: {epochs: [3]}\n", 1, "train.epochs", "a list of 1", "whole number", id="list for a number"),
    below("train: {epochs: 2026-01-01}\n", 1, "train.epochs", "'2026-01-01' (text)", id="dates are text"),
    below("train:\n  callbacks: [EarlyStopping]\n", 2, "train.callbacks[0]", "write {name: EarlyStopping}", id="callback as text"),
    below("train:\n  callbacks:\n    - nam: EarlyStopping\n", 3, "train.callbacks[0].nam", "did you mean 'name'?",
          id="misspelt key in a list"),
    below("train:\n  callbacks:\n    - {name: EarlyStopping, patience: 3}\n", 3, "train.callbacks[0].patience",
          "an argument of EarlyStopping, write `args: {patience: 3}`", id="argument of a callback"),
    below("train:\n  callbacks:\n    - {EarlyStopping: {patience: 3}}\n", 3, "train.callbacks[0].EarlyStopping",
          "write {name: EarlyStopping, args: {patience: 3}}", id="callback as a key"),
    below("train: {steps_per_call: fast}\n", 1, "train.steps_per_call", "'auto'", "whole number", id="int or auto"),
    below("strategy: mirrored\n", 1, "strategy", "'mirrored'", "kind: mirrored", id="strategy as text"),
    below("strategy: {}\n", 1, "strategy", "missing 'kind'", "'mirrored'", id="strategy without kind"),
    below("strategy:\n  kind: miror\n", 2, "strategy.kind", "'miror'", "did you mean 'mirrored'?", id="misspelt kind"),
    below("strategy:\n  kind: 3\n", 2, "strategy.kind", "got 3", "'mirrored'", id="kind is a number"),
    below("strategy:\n  kind: mirrored\n  workers: 2\n", 3, "strategy.workers", "cluster.workers", id="workers of the strategy"),
    below("strategy:\n  kind: mirrored\n  replicas: -1\n", 3, "strategy.replicas", "at least 1", "'auto'", id="negative replicas"),
    below("strategy:\n  kind: jax\n", 1, "strategy.mesh", "missing", "{batch: 4, model: 2}", id="mesh missing"),
    below("strategy:\n  kind: jax\n  mesh: {batch: two}\n", 3, "strategy.mesh.batch", "'two'", "whole number", id="size as text"),
    below("cluster: {start_timeout_s: .inf}\n", 1, "cluster.start_timeout_s", "inf", "above 0", id="infinite timeout"),
    below("cluster: {stop_timeout_s: .nan}\n", 1, "cluster.stop_timeout_s", "nan", id="timeout is no number"),
    below("restarts: {backoff_s: .nan}\n", 1, "restarts.backoff_s", "nan", "at least 0", id="no number to wait"),
    below("cluster: {ports: [70000]}\n", 1, "cluster.ports[0]", "from 1 to 65535", id="port too large"),
    below("name: a/b\n", 1, "name", "'a/b'", "letters, digits", id="name with a slash"),
    below("name: ${NOT_SET_HERE:12}\n", 1, "name", 'quotes if it is text: "${NOT_SET_HERE:12}"', id="name is a number of a variable"),
    below("name: 3\n", 1, "name", "quotes", id="name is a number"),
    below("seed: -1\n", 1, "seed", "from 0 to", id="negative seed"),
    below("export: keras\n", 1, "export", "write [keras]", id="text for a list"),
    below("export: [kera]\n", 1, "export[0]", "did you mean 'keras'?", id="misspelt in a list"),
    below("compile:\n  optimizer: [adam]\n", 2, "compile.optimizer", "a list of 1", "{name: ..., args: {...}}", id="optimizer list"),
    below("compile:\n  optimizer: {name: adam, arg: {}}\n", 2, "compile.optimizer.arg", "did you mean 'args'?", id="arg"),
    below("compile:\n  optimizer: {name: adam, learning_rate: 0.1}\n", 2, "compile.optimizer.learning_rate",
          "an argument of adam, write `args: {learning_rate: 0.1}`", id="argument of an optimizer"),
    below("compile:\n  optimizer: {adam: {learning_rate: 0.1, betas: [0.1]}}\n", 2, "compile.optimizer.adam",
          "write {name: adam, args: {learning_rate: 0.1, betas: [...]}}", id="optimizer as a key"),
    below("compile:\n  optimizer: {adam: }\n", 2, "compile.optimizer.adam", "write {name: adam}", id="optimizer as an empty key"),
    data("sizes: 3", "data.sizes", "an argument of models.py:data, write `args: {sizes: 3}`", id="argument of data"),
    below("compile:\n  loss: {a: {nam: c}}\n", 2, "compile.loss.a.nam", "did you mean 'name'?", id="loss of an output"),
    below("compile:\n  loss: {name: mse, arg: {}}\n", 2, "compile.loss.arg", "did you mean 'args'?", id="arg of a loss"),
    below("compile:\n  metrics: [{}]\n", 2, "compile.metrics[0].name", "missing", id="metric without a name"),
    below("compile:\n  metrics:\n    out: [3]\n", 3, "compile.metrics.out[0]", "got 3", id="metric of an output"),
    below("compile:\n  loss: 3\n", 2, "compile.loss", "got 3", "a loss such as", id="loss is a number"),
    below("compile:\n  metrics: accuracy\n", 2, "compile.metrics", "write [accuracy]", id="metrics as text"),
]  # fmt: skip

CHECKS = [
    below("strategy: {kind: jax, mesh: {batch: 0}}\n", 1, "strategy.mesh.batch", "got 0", "at least 1", id="mesh of size 0"),
    below("strategy: {kind: jax, mesh: {batch: 2}, layout: auto}\n", 1, "strategy.layout", "an axis 'model'", id="auto without its axis"),
    below("strategy: {kind: jax, mesh: {a: -1, b: -1}}\n", 1, "strategy.mesh.b", "one axis only", id="two filled axes"),
    below("strategy:\n  kind: jax\n  mesh: {batch: 2}\n  layout:\n    'a(': [~]\n", 5, "strategy.layout.a(",
          "not a regular expression", id="regular expression"),
    below("strategy:\n  kind: jax\n  mesh: {batch: 2, model: 2}\n  layout:\n    kernel: [~, modl]\n", 5, "layout.kernel[1]",
          "did you mean 'model'?", id="unknown axis"),
    below("strategy:\n  kind: jax\n  mesh: {model: 2}\n  layout:\n    kernel: [model, model]\n", 5, "layout.kernel",
          "each axis at most once", id="axis used twice"),
    below("strategy:\n  kind: dtensor\n  mesh: {batch: 2}\n  input_layout: [bach]\n", 4, "strategy.input_layout[0]",
          "did you mean 'batch'?", id="unknown input axis"),
    below("cluster:\n  workers: 2\n", 2, "cluster.workers", "one_device runs in one process", id="workers of one device"),
    below("strategy: {kind: jax, mesh: {batch: 4}}\ncluster:\n  workers: 3\n", 3, "cluster.workers",
          "got 3, which cannot share the mesh's 4 devices equally; use 1, 2 or 4", id="workers of a mesh"),
    below(f"strategy: {{kind: jax, mesh: {{model: {2**40}}}}}\n", 1, "strategy.mesh",
          "1,099,511,627,776 virtual CPU devices", "at most 1,024", id="a mesh that fills the memory"),
    below(f"strategy: {{kind: parameter_server}}\ncluster:\n  ps: 1\n  workers: {10**9}\n", 4, "cluster.workers",
          "1,000,000,002 processes", "at most 10,000", id="workers that fill the memory"),
    below("strategy: {kind: dtensor, mesh: {batch: 4}}\ncluster:\n  workers: 2\n  ports: [4000]\n", 4, "cluster.ports",
          "expected 2", id="ports of a mesh"),
    below("cluster:\n  ps: 1\n", 2, "cluster.ps", "has no parameter servers", id="ps without parameter_server"),
    below("cluster: {hosting: in_process}\n", 1, "cluster.hosting", "only parameter_server", id="hosting"),
    below("precision: float16\n", 1, "precision", "'float16'", "mixed_float16", id="precision"),
    below("strategy: {kind: parameter_server}\ncluster: {workers: 2, ps: 1}\nprecision: mixed_float16\n", 3, "precision",
          "several workers", "mixed_bfloat16", id="workers without one scale"),
    below("strategy: {kind: parameter_server}\n", 1, "strategy.kind", "at least 1", "ps: 1", id="no parameter server"),
    below("strategy: {kind: multi_worker_mirrored}\ncluster:\n  workers: 2\n  ports: [4000]\n", 4, "cluster.ports",
          "got 1; expected 2", id="too few ports"),
    below("strategy: {kind: multi_worker_mirrored}\ncluster:\n  workers: 2\n  ports: [4000, 4000]\n", 4, "cluster.ports[1]",
          "4000 2 times", id="port twice"),
    below("strategy: {kind: parameter_server}\ncluster:\n  workers: 2\n  ps: 1\n  ports: [4000, 4001, 4002]\n", 5, "cluster.ports",
          "got 3; expected 4, one for each of 2 workers, 1 ps and the chief", id="no port for the chief"),
    below("cluster: {ports: [4000]}\n", 1, "cluster.ports", "needs none", id="ports of one process"),
    below("strategy:\n  kind: parameter_server\n  partitioner: {kind: min_size, num_shards: 2}\ncluster: {ps: 1}\n", 3,
          "strategy.partitioner.num_shards", "'min_shard_bytes', 'max_shards'", id="partitioner argument"),
    below("strategy:\n  kind: parameter_server\n  partitioner: {kind: fixed_shards}\ncluster: {ps: 1}\n", 3,
          "strategy.partitioner", "missing 'num_shards'", id="partitioner needs"),
    Broken("no source", MODEL + "data:\n  global_batch: 8\n", 2, "data", ("`function:` or `tfds:`",)),
    data("tfds: {name: mnist}", "data.tfds", "both", "remove one", id="two sources"),
    Broken("arguments of tfds", MODEL + "data:\n  tfds: {name: mnist}\n  args: {a: 1}\n  global_batch: 8\n", 4, "data.args",
           ("without 'function'",)),
    Broken("batched and shuffled", BASE + "  batched: true\n  shuffle: 100\n", 7, "data.shuffle", ("write `shuffle: false`",)),
    Broken("shuffled without shuffling", BASE + "  sharding: shuffled\n  shuffle: false\nstrategy: {kind: parameter_server}\ncluster: {ps: 1}\n", 6,
           "data.sharding", ("`shuffle: false` keeps the order", "write 'rows'")),
    Broken("shuffled batches", BASE + "  sharding: shuffled\n  batched: true\nstrategy: {kind: parameter_server}\ncluster: {ps: 1}\n", 6,
           "data.sharding", ("`batched: true` keeps the order", "write 'rows'")),
    data("class_weight: {0: -1.0}", "data.class_weight[0]", "at least 0", id="negative weight"),
    Broken("no step left", BASE + "  train_examples: 10\n  remainder: drop\n", 6, "data.train_examples", ("at least 64", "keep")),
    below("train:\n  step: models.py:step\n", 2, "train.step", "loop: custom", id="step without loop"),
    below("train: {loop: custom}\ncompile:\n  optimizer: adam\n", 2, "compile.loss", "needs a loss", id="loop without loss"),
    below("checkpoint: {every_epochs: null}\n", 1, "checkpoint", "would be lost", id="no checkpoint"),
    below("train:\n  callbacks:\n    - {name: BackupAndRestore}\n", 3, "train.callbacks[0].name", "use `checkpoint:`", id="backup"),
    below("train:\n  callbacks:\n    - name: EarlyStoping\n", 3, "train.callbacks[0].name", "'EarlyStopping'", id="callback name"),
    below("compile:\n  optimizer: admm\n", 2, "compile.optimizer", "did you mean 'adam'?", id="optimizer name"),
    below("compile:\n  loss: {out: mze}\n", 2, "compile.loss.out", "did you mean 'mse'?", id="loss by output"),
    below("compile:\n  metrics: [acuracy]\n", 2, "compile.metrics[0]", "did you mean 'accuracy'?", id="metric name"),
    below("compile:\n  metrics:\n    - {name: accuracy, args: {threshold: 0.3}}\n", 3, "compile.metrics[0].args",
          "`args` for 'accuracy'", "BinaryAccuracy, CategoricalAccuracy or SparseCategoricalAccuracy", id="arguments of accuracy"),
    below("compile:\n  weighted_metrics: {out: [{name: ce, additive: true}]}\n", 2, "weighted_metrics.out[0].additive",
          "BinaryCrossentropy", id="additive crossentropy"),
    below("compile:\n  optimizer: {name: SGD, args: {learning_rate: 0}}\n", 2, "args.learning_rate", "above 0", id="rate 0"),
    below("compile:\n  optimizer: {name: SGD, args: {learning_rate: '1e-3'}}\n", 2, "args.learning_rate", "without quotes",
          id="rate in quotes"),
    below("compile:\n  optimizer: {args: {learning_rate: -1}}\n", 2, "args.learning_rate", "above 0", id="rate of the model's optimizer"),
    below("compile:\n  optimizer: {name: SGD, args: {learning_rate: CosineDecay}}\n", 2, "args.learning_rate",
          "write {name: CosineDecay, args: {...}}", id="schedule as text"),
    below("compile:\n  optimizer: {name: SGD, args: {learning_rate: {name: CosinDecay, args: {}}}}\n", 2,
          "args.learning_rate.name", "did you mean 'CosineDecay'?", id="schedule name"),
    below("compile:\n  optimizer: {name: SGD, args: {learning_rate: {name: CosineDecay, decay_steps: 5}}}\n", 2,
          "args.learning_rate.decay_steps", "`args: {decay_steps: ...}`", id="argument of a schedule"),
    below("compile:\n  optimizer: {name: SGD, args: {learning_rate: {CosineDecay: {decay_steps: 5}}}}\n", 2,
          "args.learning_rate.CosineDecay", "a schedule such as {name: CosineDecay", id="schedule as a key"),
    below("compile:\n  optimizer: {name: SGD, args: {learning_rate: {name: CosineDecay}}}\n", 2, "args.learning_rate",
          "{name: CosineDecay, args: {...}}", id="schedule without arguments"),
    below("train:\n  callbacks:\n    - {name: LearningRateScheduler, args: {schedule: 'models.py:net'}}\n", 3,
          "train.callbacks[0].args.schedule", "needs a function", "returns the callback", id="function in a config"),
    below("train:\n  callbacks:\n    - {name: LambdaCallback, args: {on_epoch_end: 'models.py:net'}}\n", 3,
          "train.callbacks[0].args.on_epoch_end", "needs a function", id="function of a hook in a config"),
]  # fmt: skip

REFERENCES = [
    Broken("unknown function", BASE.replace("models.py:net", "models.py:nett"), 2, "model.function", ("did you mean 'net'?",)),
    Broken("unknown file", BASE.replace("models.py:net", "model.py:net"), 2, "model.function", ("did you mean 'models.py'?",)),
    Broken("unknown module", BASE.replace("models.py:net", "nowhere.at_all:net"), 2, "model.function", ("no module named 'nowhere'",)),
    Broken("unknown submodule", BASE.replace("models.py:net", "json.decodr:net"), 2, "model.function", ("did you mean 'decoder'?",)),
    Broken("unknown name in a module", BASE.replace("models.py:net", "json.decoder:JSONDecodr"), 2, "model.function",
           ("did you mean 'JSONDecoder'?",)),
    Broken("syntax error", BASE.replace("models.py:net", "broken.py:net"), 2, "model.function", ("broken.py, line 2", "correct it")),
    Broken("a value", BASE.replace("models.py:net", "models.py:LIMIT"), 2, "model.function", ("is a value", "line 41")),
    Broken("async", BASE.replace("models.py:net", "models.py:later"), 2, "model.function", ("async",)),
    Broken("missing argument", BASE.replace("models.py:net", "models.py:needs"), 2, "model.function", ("missing 'width'", "width: ...")),
    data("args: {sorce: auto}", "data.args.sorce", "did you mean 'source'?", id="unknown argument"),
    data("augment: models.py:bare", "data.augment", "(x, y)", id="augment without arguments"),
    data("map: models.py:bare", "data.map", "use `augment:` for random changes", id="map with a seed"),
    data("augment: models.py:four", "data.augment", "(x, y)", id="augment with four arguments"),
    data("map: models.py:one\n  batched: true", "data.map", "`.map(...)`", id="map of batches"),
    data("augment: models.py:one\n  batched: true", "data.augment", "`.map(...)`", id="augment of batches"),
    below("train:\n  loop: custom\n  step: models.py:one\n", 3, "train.step", "(context, batch)", id="step with one argument"),
    below("train:\n  loop: custom\n  step: models.py:step\nstrategy: {kind: jax, mesh: {batch: 2}}\n", 3, "train.step",
          "(context, state, batch)", id="TensorFlow's step on jax"),
    data("preprocessing: {function: models.py:one, args: {z: 1}}", "data.preprocessing.args.z", "takes 'x'",
         id="preprocessing argument"),
    data("preprocessing: {function: models.py:none}", "data.preprocessing.function", "def none(inputs)",
         id="preprocessing without inputs"),
    below("strategy: {kind: mirrored, mesh: {batch: 2}}\n", 1, "strategy.mesh", "belongs to `kind: dtensor` or `kind: jax`", id="key of another strategy"),
    below("train:\n  callbacks:\n    - {name: 'models.py:net', args: {unit: 3}}\n", 3, "train.callbacks[0].args.unit",
          "did you mean 'units'?", id="callback argument"),
    below("compile:\n  loss: models.py:nett\n", 2, "compile.loss", "did you mean 'net'?", id="loss function"),
    below("compile:\n  optimizer: 'a:b:c'\n", 2, "compile.optimizer", "expected 'package.module:name'", id="two colons"),
]  # fmt: skip

ALL = [*YAML, *SCHEMA, *CHECKS, *REFERENCES]
