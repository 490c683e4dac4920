"""Tests of the hosts that gRPC reaches without a proxy, given the environment of a task."""

from __future__ import annotations

import json

import pytest

from distlaunch.base.protocol import JAX_COORDINATOR
from distlaunch.cluster.proxies import direct_paths

LOOPBACK = "localhost,127.0.0.1,::1"
TF_CONFIG = json.dumps(
    {"cluster": {"worker": ["10.0.0.1:70", "10.0.0.2:71", "10.0.0.1:72"], "ps": ["[fd00::7]:5", "node:3"]}}
)


@pytest.mark.parametrize("name", ["http_proxy", "https_proxy", "grpc_proxy"])
def test_a_proxy_is_passed_by(name: str) -> None:
    assert direct_paths({name: "http://proxy:3128"})["no_grpc_proxy"] == LOOPBACK


@pytest.mark.parametrize("environ", [{}, {"no_proxy": "a"}, {"http_proxy": ""}, {"HTTP_PROXY": "http://proxy"}])
def test_nothing_is_set_without_a_proxy_that_is_used(environ: dict[str, str]) -> None:
    assert direct_paths({**environ, "TF_CONFIG": TF_CONFIG}) == {}


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"no_proxy": ".corp, 10.0.0.0/8"}, ".corp,10.0.0.0/8,"),
        ({"NO_PROXY": ".corp"}, ".corp,"),
        ({"no_grpc_proxy": "mine", "no_proxy": ".corp"}, "mine,"),
        ({"no_grpc_proxy": "", "no_proxy": ".corp"}, ""),
        ({"no_proxy": "127.0.0.1,localhost,::1"}, None),
    ],
)
def test_the_users_exceptions_stay(given: dict[str, str], kept: str | None) -> None:
    hosts = direct_paths({"http_proxy": "http://proxy:3128", **given})["no_grpc_proxy"]
    assert hosts == ("127.0.0.1,localhost,::1" if kept is None else kept + LOOPBACK)


def test_each_host_of_the_job_is_named_once() -> None:
    environ = {"https_proxy": "http://proxy:3128", "TF_CONFIG": TF_CONFIG, JAX_COORDINATOR: "[fd00::1]:9"}
    assert direct_paths(environ)["no_grpc_proxy"] == f"{LOOPBACK},fd00::1,10.0.0.1,10.0.0.2,fd00::7,node"


@pytest.mark.parametrize("text", ["{", "[]", '{"cluster": 3}', '{"cluster": {"worker": 3}}', "null"])
def test_a_broken_tf_config_is_left_to_its_reader(text: str) -> None:
    assert direct_paths({"http_proxy": "http://proxy", "TF_CONFIG": text})["no_grpc_proxy"] == LOOPBACK
