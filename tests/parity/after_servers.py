"""Creates strategies in a process that hosts parameter servers, and prints why that fails."""

from __future__ import annotations

from distlaunch.base.errors import UsageError
from distlaunch.config.cluster import Cluster
from distlaunch.config.strategies.mesh import DTensorSection
from distlaunch.config.strategies.parameter_server import ParameterServerSection
from distlaunch.config.strategies.replicas import MirroredSection
from distlaunch.strategies.devices import virtual_cpus
from distlaunch.strategies.factory import implementation

if __name__ == "__main__":
    virtual_cpus(2)
    servers = Cluster.model_validate({"workers": 1, "ps": 1, "hosting": "in_process"})
    implementation(ParameterServerSection)(ParameterServerSection(kind="parameter_server"), servers)
    for section in (
        MirroredSection.model_validate({"kind": "mirrored", "replicas": 2}),
        DTensorSection.model_validate({"kind": "dtensor", "mesh": {"data": 2}}),
    ):
        try:
            implementation(section)(section, Cluster())
        except UsageError as error:
            print(error)
    implementation(ParameterServerSection)(ParameterServerSection(kind="parameter_server"), servers)
