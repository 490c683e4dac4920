"""Tests of which log lines are noise of the frameworks and which are worth reading."""

from __future__ import annotations

import pytest

from distlaunch.agent.log_noise import is_noise

NOISE = [
    "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR",
    "I0000 00:00:1795240329.869498    9928 port.cc:153] oneDNN custom operations are on.",
    "I0000 00:00:1795240329.870654    9928 cudart_stub.cc:31] Could not find cuda drivers on your machine",
    "W0000 00:00:1795240335.322145    9928 dataset.cc:997] Input of GeneratorDatasetOp::Dataset will not be optimized",
    "I0000 00:00:1795240332.559787   10015 coordination_service.h:529] /job:worker/replica:0/task:0 has connected",
    "E0000 00:00:1795240332.493765    9928 cuda_platform.cc:52] failed call to cuInit: INTERNAL: CUDA error",
    "E0000 00:00:1795240332.493765    9928 computation_placer.cc:177] computation placer already registered.",
    "E0000 00:00:1795240354.095574   10040 ring_alg.cc:291] Aborting RingReduce with UNAVAILABLE: Socket closed",
    "To enable the following instructions: AVX2 AVX512F FMA, in other operations, rebuild TensorFlow",
    "2026-11-02 12:00:00.123456: I tensorflow/core/platform/cpu_feature_guard.cc:210] This TensorFlow binary",
    "2026-11-02 12:00:00.123456: W external/local_xla/xla/tsl/framework/cpu_allocator_impl.cc:83] Allocation",
    "2026-11-02 12:00:00.123456: E external/local_xla/xla/stream_executor/cuda/cuda_fft.cc:477] "
    "Unable to register cuFFT factory: Attempting to register factory for plugin cuFFT",
    "WARNING:tensorflow:5 out of the last 5 calls to <function f at 0x7f> triggered tf.function retracing.",
    "INFO:tensorflow:Enabled multi-worker collective ops with available devices",
    "/job:worker/replica:0/task:1",
    "Additional GRPC error information from remote target /job:worker/replica:0/task:1 while calling /x:",
    ':UNKNOWN:Error received from peer  {grpc_status:14, grpc_message:"recvmsg:Connection reset by peer"}',
    "\t [[{{node CollectiveReduceV2}}]] [Op:__inference_call_1896]",
    "[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1",
    "[Gloo] Rank [Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1",
    "    @     0x7fa79f640634  absl::lts_20260107::log_internal::LogMessage::SendToLog()",
]
WORTH_READING = [
    "hello",
    "epoch 1: loss 0.5",
    "ValueError: no",
    "F0000 00:00:1795240332.493765    9928 check.cc:12] Check failed: x > 0",
    "E0000 00:00:1795240332.493765    9928 bfc.cc:12] OOM when allocating tensor",
    "2026-11-02 12:00:00.123456: E tensorflow/core/x.cc:1] something new is wrong",
    "2026-11-02 12:00:00.123456: I my_module/train.py:210] my own line in this style",
    "UserWarning: the loss is not what you think",
    "I am a line that begins with I",
]


@pytest.mark.parametrize("line", NOISE)
def test_noise(line: str) -> None:
    assert is_noise(line)


@pytest.mark.parametrize("line", WORTH_READING)
def test_worth_reading(line: str) -> None:
    assert not is_noise(line)
