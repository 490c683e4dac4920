"""Recognizes lines that libraries log for their own developers. They are written to log files but not shown."""

from __future__ import annotations

import functools
import re

_PATTERNS = (
    # absl and glog: `I0000 00:00:1718000000.000000   12 file.cc:52] text`. Errors are shown unless known as harmless.
    r"[IW]\d{4} \d{2}:\d{2}:[\d.]+\s+\d+ \S+\.(?:cc|h|cu|py):\d+\]",
    # TensorFlow's own: `2026-11-02 12:00:00.123456: I tensorflow/core/...] text`
    r"\d{4}-\d{2}-\d{2} \d{2}:\d{2}:\d{2}[.,]\d+: [IW] (?:tensorflow|external|third_party|xla)/",
    r"WARNING: All log messages before absl::InitializeLog\(\)",
    r"To enable the following instructions: ",
    r"To enable them in other operations, rebuild TensorFlow",
    r"(?:INFO|WARNING):(?:tensorflow|absl):",
    # a coordinator's messages about workers that died; the launcher reports them in one sentence
    r"ERROR:tensorflow:(?:Worker|Remote function on worker) /job:worker",
    r"ERROR:tensorflow:Cluster update failed with error",
    r"This could happen if the remote target has been disconnected from the client",
    r"/job:\w+/replica:\d+/task:\d+$",
    r"Additional GRPC error information from remote target ",
    r":?[A-Z_]+:Error received from peer ",
    r"The error could be from a previous operation\. Restart your program to reset\.",
    r"\s*\[\[\{\{node ",
    r"\*\*\* Check failure stack trace: \*\*\*|\s+@\s+0x[0-9a-f]+ ",
    r"(?:\[Gloo\] |Rank |\d+ )+is connected to \d+ peer ranks",
    # libjpeg's messages about a damaged image; the image is reported with the name of its example
    r"Improper call to JPEG library in state \d+$",
    r"Skipping registering GPU devices\.\.\.",
    r"Please refer to the guide at https://www\.tensorflow\.org/install/gpu",
)
_HARMLESS_ERRORS = (
    r"failed call to cuInit",
    r"computation placer already registered",
    r"Unable to register cu(?:DNN|BLAS|FFT) (?:plugin )?factory",
    r"Attempting to register factory for plugin cu(?:DNN|BLAS|FFT)",
    r"Could not (?:find cuda drivers|load dynamic library)",
    r"Cannot dlopen some GPU libraries",
    r"kernel driver does not appear to be running",
    r"retrieving CUDA diagnostic information",
    r"Aborting RingReduce with",
    r"Failed to (?:register|remove) function remotely",
    r"context_distributed_manager\.cc:\d+\] .*(?:failed to connect|Socket closed|Connection reset)",
    r"BaseCollectiveExecutor::StartAbort",
    r"(?:CollectiveGather|RingGather|RingReduce) .*abort",
    r"TF-TRT Warning: Could not find TensorRT",
)
# the beginning of a line of TensorFlow's C++ code; such a line is noise if it contains one of `_HARMLESS_ERRORS`
_NATIVE = r"[IWE]\d{4} \d{2}:\d{2}:|\d{4}-\d{2}-\d{2} \d{2}:\d{2}:\d{2}[.,]\d+: [IWE] "


def is_noise(line: str) -> bool:
    """Return True if a line is useless to the user as long as nothing fails."""
    noise, native, harmless = _compiled()
    return bool(noise.match(line)) or bool(native.match(line) and harmless.search(line))


@functools.cache
def _compiled() -> tuple[re.Pattern[str], ...]:
    """Return the compiled patterns. They are compiled when first used, so that agents start faster."""
    # the first two are matched at the beginning of a line
    return re.compile("|".join(_PATTERNS)), re.compile(_NATIVE), re.compile("|".join(_HARMLESS_ERRORS))
