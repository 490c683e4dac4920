"""Explains why a trial deviates and how to fix it, as far as the numbers, the training step and the data show it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from distlaunch.base.judge import NOISE_FACTOR, SHARP, Judgement, is_loss, log_in_words, words_of_logs
from distlaunch.base.plural import joined, listed
from distlaunch.base.run_files.trial_records import ModelFacts, Record, Series
from distlaunch.verify.trials import PlannedTrial

_CLOSE = 0.02  # the relative tolerance within which a ratio counts as an integer multiple


def explain(planned: PlannedTrial, judgement: Judgement, trial: Record, reference: Record) -> tuple[str, ...]:
    """Return the causes of a deviation that the numbers or data show, each with its remedy."""
    facts = reference.facts
    causes: list[str] = []
    if trial.shards and planned.processes > 1:
        causes.append(
            "the data pipeline itself takes a shard of the examples for each worker, so the batches differ from those "
            "of one device, and shards may differ in length; remove the call of shard(): every worker already gets "
            "its rows of the same global batches"
        )
    elif on_replicas(planned):
        causes = _of_replicas(planned.replicas or 1, judgement, trial.series, reference.series, facts)
    if random := random_data(facts):
        causes.append(random)
    elif trial.examples and not trial.shards and trial.examples != reference.examples:
        causes = [
            "the data function returned different examples in this process than in the reference's process: seed its "
            "random generators, for example np.random.default_rng(0)"
        ]
    elif reference.noise_source == "none":
        causes.append(
            "two runs on one device give different numbers too: the model or its step draws random numbers that do not "
            "depend on Keras's seed; use keras.random with a keras.random.SeedGenerator that is an attribute of the "
            "model"
        )
    return tuple(causes)


def random_data(facts: ModelFacts) -> str:
    """Describe a data pipeline that is not reproducible; empty if it is."""
    if facts.random_ops:
        return (
            f"the data pipeline draws different random numbers in each run ({', '.join(facts.random_ops)}): "
            "use tf.random.stateless_* operations with a seed computed from the example's number"
        )
    if facts.other_examples:
        return (
            "the data pipeline returns different examples each time it is read: create its random generator with the "
            "same seed at the start of each pass, for example np.random.default_rng(0)"
        )
    return ""


def dense_embeddings(layers: Sequence[str]) -> str:
    """Explain why a trial on a mesh differs from one device, but not from one device with dense gradients.

    Args:
        layers: the names of Embedding layers; empty if other code looks up rows of a variable.
    """
    what = named("Embedding", layers) if layers else "rows that are looked up"
    return (
        f"{what}: gradients are dense on a mesh, while Keras's optimizers on one TensorFlow device update only the "
        "rows that occur, as documented; the trial is equal to one device with dense gradients"
    )


_REMEDY = (
    "use context.average(...), which divides the sum over the rows by the global batch, for means, and "
    "context.regularization() for the model's own losses"
)


def _of_replicas(replicas: int, judgement: Judgement, trial: Series, reference: Series, facts: ModelFacts) -> list[str]:
    causes: list[str] = []
    if judgement.metrics and not (judgement.losses or judgement.gradients_differ or judgement.weights_differ):
        return [_wrong_metric(judgement, replicas, trial, reference)]
    is_keras_step = facts.own_step.endswith(".train_step")
    if is_keras_step and (what := _scaled(replicas, reference, trial)):
        causes.append(
            f"{facts.own_step}: the first step's {what.replace('large', 'small')}: its loss is a sum over rows, but "
            "gradients are averaged over replicas; divide the loss by the number of rows in the batch"
        )
    elif facts.own_step and not is_keras_step and (what := _scaled(replicas, trial, reference)):
        causes.append(
            f"{facts.own_step}: the first step's {what}: its loss is a mean over the rows of one replica, and these "
            f"means are summed; {_REMEDY}"
        )
    elif facts.own_step and not is_keras_step and (added := _adds_own_losses(replicas, trial, reference, facts)):
        causes.append(
            f"{facts.own_step}: the first step's {added} is too large by {replicas - 1} times the model's own losses "
            f"(regularisation): each replica adds them in full, and the replicas' losses are summed; {_REMEDY}"
        )
    if facts.mixes_rows:
        causes.append(
            f"the {facts.mixes_rows} combines several examples: its value for a batch differs from its values for the "
            "parts of the batch that the replicas have; train on a mesh, where it gets the whole batch"
        )
    return causes


def _scaled(replicas: int, trial: Series, reference: Series) -> str:
    """Name the values of the first step that are too large by a factor equal to the number of replicas."""
    found: list[str] = []
    # only in the first step do trial and reference have equal weights
    pairs = zip(trial.gradients[0], reference.gradients[0], strict=False) if trial.gradients else ()
    if any(_is_multiple(own, expected, replicas) for own, expected in pairs):
        found.append("gradients")
    losses = [name for name in reference.logs[0] if is_loss(name)]
    found += [
        name for name in losses if _is_multiple(trial.logs[0].get(name, math.nan), reference.logs[0][name], replicas)
    ]
    is_one = len(found) == 1 and found != ["gradients"]
    return f"{joined(found)} {'is' if is_one else 'are'} {replicas} times too large" if found else ""


def _adds_own_losses(replicas: int, trial: Series, reference: Series, facts: ModelFacts) -> str:
    """Return the name of the first loss to which each replica adds the model's own losses in full, or ""."""
    for name in filter(is_loss, reference.logs[0]):
        surplus = trial.logs[0].get(name, math.nan) - reference.logs[0][name]
        if _is_multiple(surplus + facts.own_losses, facts.own_losses, replicas):
            return name
    return ""


def _wrong_metric(judgement: Judgement, replicas: int, trial: Series, reference: Series) -> str:
    names = [name for name, _ in judgement.metrics]
    summed = any(
        _is_multiple(trial.logs[0].get(name, math.nan), reference.logs[0].get(name, math.nan), replicas)
        for name in names
    )
    how = f"{replicas} times too large" if summed else "not the value for the whole batch"
    return (
        f"{log_in_words(names)}: {how}, while loss, gradients and weights are equal: the values that replicas compute "
        "from their own rows cannot be summed or averaged; use a keras.metrics.Metric that accumulates sums and "
        "counts, or return context.average(...) from the step"
    )


def _is_multiple(own: float, expected: float, factor: int) -> bool:
    return factor > 1 and expected != 0 and abs(own / expected - factor) < _CLOSE * factor


def on_replicas(planned: PlannedTrial) -> bool:
    """Return True if there are several replicas, each with a part of the batch."""
    return planned.config.strategy.has_replicas and (planned.replicas or 1) > 1


def weight_within_noise(judgement: Judgement) -> str:
    """Explain why a final weight deviates visibly in a trial that is judged equal; return "" if none does."""
    worst = judgement.worst
    if worst is None or worst.deviation <= SHARP / NOISE_FACTOR:
        return ""
    other = [f"{value:.1e}" for value in worst.other_gradients[:1]]
    noise = f"and by {worst.noise:.1e} between runs on one device that differ only in rounding"
    found = f"{worst.name} deviates by {worst.deviation:.1e}, {noise}"
    if not worst.only_rounding:
        return f"{found}: rounding errors have grown to this size"
    beside = f"{worst.gradient:.1e} in the first step, {', '.join(other)} in another run" if other else ""
    beside = beside or f"{worst.gradient:.1e} in the first step"
    return f"{found}: its gradient is only rounding ({beside}; the norm of all gradients is {worst.gradients:.1e})"


def unexplained(judgement: Judgement, first: str) -> str:
    """Describe a deviation without a known cause.

    Args:
        first: a clause that names the first layer that deviates; empty if unknown.
    """
    logs = [name for name, _ in (*judgement.losses, *judgement.metrics)]
    found = words_of_logs(logs) + (["the gradients"] if judgement.gradients_differ else [])
    what = joined(found) or "the final weights"
    verb = "deviates" if len(logs) == 1 and not judgement.gradients_differ else "deviate"
    since = "" if judgement.first_step is None else f" from step {judgement.first_step} on"
    worst = judgement.worst
    weight = f"the weight that deviates most is {worst.name}" if worst is not None and judgement.weights_differ else ""
    return "; ".join(filter(None, (f"unexplained: {what} {verb}{since}", first, weight)))


def named(what: str, names: Sequence[str]) -> str:
    """Return `layer a`, or `layers a, b`."""
    shown = listed(names, 6)
    plural = {"random layer": "random layers", "class": "classes", "variable": "variables"}
    return f"{plural.get(what, what) if len(names) > 1 else what} {shown}"
