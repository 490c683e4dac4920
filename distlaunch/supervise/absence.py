"""Which tasks of a script have not come, as far as it can be known: TensorFlow's tasks open their ports."""

from __future__ import annotations

from distlaunch.cluster.ports import listening_ports
from distlaunch.plan.train import LaunchPlan
from distlaunch.supervise.state import Standing


def find_absent(plan: LaunchPlan, standing: Standing) -> list[str]:
    """Who has not opened its port, while others have and wait for it. Nobody, if nobody has: the script needs none."""
    has_servers = any(task.serves for task in plan.tasks)
    expected = {
        str(task.task): int(task.address.rpartition(":")[2])
        for task in plan.tasks
        # a coordinator opens none, and a task that was started again may be about to
        if task.address and task.serves == has_servers and str(task.task) in set(standing.alive) - standing.restarted
    }
    absent = set(expected.values()) - listening_ports()
    return [name for name, port in expected.items() if port in absent] if len(absent) < len(expected) else []
