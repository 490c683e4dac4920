"""A real Slurm on the hosts of the lab."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

from lab import Job, Lab

PROGRAMS = {"slurmctld": "slurmctld", "slurmd": "slurmd", "srun": "slurm-client", "munged": "munge"}
_CONF = """
ClusterName=lab
SlurmctldHost=host0
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,batch_sched_delay=0,sched_min_interval=0
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=20
MailProg=/bin/true
GresTypes=gpu
NodeName=host[1-3] CPUs=2 RealMemory=4000 Gres=gpu:2 State=UNKNOWN
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
PartitionName=all Nodes=host[1-3] Default=YES MaxTime=1:00:00 GraceTime=60 State=UP
PartitionName=urgent Nodes=host[1-3] MaxTime=1:00:00 PriorityTier=9 PreemptMode=OFF State=UP
"""


def wait_until(condition: Callable[[], object], seconds: float = 60) -> None:
    """Wait for a condition that no event reports."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"not within {seconds} s"
        time.sleep(0.05)


class Slurm:
    """Its daemons live as long as the hosts do."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self._folder = lab.folder / "slurm"
        (self._folder / "state").mkdir(parents=True)
        (self._folder / "munge").mkdir(mode=0o755)
        key = self._folder / "munge" / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        self._conf = self._folder / "slurm.conf"
        self._conf.write_text(_CONF.format(folder=self._folder))
        # GPUs for Slurm only: their devices are empty files
        (self._folder / "gres.conf").write_text(f"Name=gpu File={self._folder}/gpu[0-1]\n")
        for gpu in ("gpu0", "gpu1"):
            (self._folder / gpu).touch()
        munge = self._folder / "munge"
        self._daemon(0, "munged", "--force", "-S", f"{munge}/socket", f"--key-file={key}", f"--pid-file={munge}/pid",
                     f"--log-file={munge}/log", f"--seed-file={munge}/seed", "--num-threads=2")  # fmt: skip
        self._daemon(0, "slurmctld", "-c", "-f", str(self._conf))
        for number in (1, 2, 3):
            self._daemon(number, "slurmd", "-N", lab.names[number], "-f", str(self._conf))
        # returns when the nodes are there
        self.run("srun", "-N3", "true").end(60)

    def run(self, *words: str) -> Job:
        """A command on the login host."""
        return self.lab.run(0, words, SLURM_CONF=str(self._conf))

    def distlaunch(self, *words: str) -> Job:
        """A command of distlaunch on the login host."""
        return self.run(sys.executable, "-c", "from distlaunch.cli.main import main; main()", *words)

    def train(self, *words: str) -> list[str]:
        """Return the command `distlaunch train`, to be used in a command of Slurm."""
        return [sys.executable, "-c", "from distlaunch.cli.main import main; main()", "train", *words]

    def _daemon(self, number: int, *words: str) -> None:
        # it goes into the background by itself
        job = self.lab.run(number, words)
        assert job.end(20) == 0, job.output
