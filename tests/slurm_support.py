"""A real Slurm cluster of two nodes on this machine, for one test: own folder, ports and munge key, no systemd. Test support only.

    node 127.0.0.1   partition one    } partition both
    node 127.0.0.2   partition two    }

The nodes are two slurmd of one host, named by loopback addresses, so that a node's name can be connected to as on a real cluster.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from spawn import free_port
from train_support import Processes

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "sinfo")
NODES = ("127.0.0.1", "127.0.0.2")
_EXECUTE = "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])"
_START_UP_S = 60.0

CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
# A job that is queued again waits until credentials of its first start have expired.
AuthInfo=socket={folder}/munge.sock,cred_expire=5
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
# A busy machine: a job that saves past its time limit is left to it.
OverTimeLimit=10
SchedulerParameters=bf_interval=1,sched_interval=1
SlurmdParameters=config_overrides
NodeName={nodes[0]} NodeHostname={host} Port={ports[1]} CPUs=8 State=UNKNOWN
NodeName={nodes[1]} NodeHostname={host} Port={ports[2]} CPUs=8 State=UNKNOWN
PartitionName=one Nodes={nodes[0]} MaxTime=60 State=UP
PartitionName=two Nodes={nodes[1]} MaxTime=60 State=UP
PartitionName=both Nodes={nodes[0]},{nodes[1]} Default=YES MaxTime=60 State=UP
"""


def missing_programs() -> list[str]:
    """Of Slurm and munge, what is not installed (Debian: slurmctld slurmd slurm-client munge)."""
    return [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]


def _path() -> str:
    return f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin"


class Cluster:
    """Started by ``with``; at its end the daemons and everything that they started are gone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        configuration = folder / "slurm.conf"
        host, user = socket.gethostname().partition(".")[0], pwd.getpwuid(os.getuid()).pw_name
        ports = [free_port() for _ in range(3)]
        configuration.write_text(CONFIGURATION.format(folder=folder, host=host, user=user, ports=ports, nodes=NODES), encoding="utf-8")
        (folder / "state").mkdir()
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        self._processes = Processes(folder / "daemons", {"SLURM_CONF": str(configuration), "PATH": _path()})

    def __enter__(self) -> Cluster:
        self._processes.__enter__()
        files = {"key-file": "munge.key", "socket": "munge.sock", "pid-file": "munged.pid", "log-file": "munged.log", "seed-file": "seed"}
        # --force: the folder of a test lies in /tmp, which others may write to
        self._start("munged", "--foreground", "--force", *(f"--{name}={self.folder / file}" for name, file in files.items()))
        self._until((self.folder / "munge.sock").exists, "munged listens")
        self._start("slurmctld", "-D")
        for node in NODES:
            self._start("slurmd", "-D", "-N", node)
        self._until(lambda: self.ask("sinfo", "-h", "-p", "both", "-o", "%D %T") == "2 idle", "both nodes are idle")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # slurmstepd, which looks after a step that still runs, is left with two variables, of which this is one.
        mark = f"SLURM_CONF={self.folder / 'slurm.conf'}".encode()
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):  # another user's, or gone in the meantime
                if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                    os.kill(int(entry.name), signal.SIGKILL)
        self._processes.__exit__(kind, error, trace)

    def submit(self, *arguments: str, **environment: str) -> Job:
        """``sbatch ARGUMENTS`` from the root of the repository. The script starts with this environment and ``environment``."""
        output = self.folder / "job-%j.out"
        return Job(self, int(self.ask("sbatch", "--parsable", "--output", str(output), *arguments, **environment)))

    def ask(self, *command: str, **environment: str) -> str:
        """Standard output of a command of Slurm's. ``AssertionError`` where it fails."""
        number = self._start(*command, **environment)
        code = self._processes.wait(_START_UP_S, number)
        assert code == 0, f"{' '.join(command)} ended with {code}: {self._processes.output(number)}"
        return self._processes.stdout(number).strip()

    def _start(self, *command: str, **environment: str) -> int:
        self._processes.start(["-c", _EXECUTE, *command], **environment)
        return len(self._processes.started) - 1

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        self._processes.wait_until(condition, what, _START_UP_S)


class Job:
    """A job that was submitted."""

    def __init__(self, cluster: Cluster, number: int) -> None:
        self.number = number
        self._cluster = cluster

    def field(self, name: str) -> str:
        """A field of ``scontrol show job``, such as JobState, Restarts or ExitCode; of a heterogeneous job its first component's."""
        shown = self._cluster.ask("scontrol", "--oneliner", "show", "job", str(self.number)).splitlines()[0]
        return dict(pair.split("=", 1) for pair in shown.split() if "=" in pair)[name]

    def output(self) -> str:
        """What script and ranks have written, over all starts of the job."""
        file = self._cluster.folder / f"job-{self.number}.out"
        return file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""

    def signal(self, name: str) -> None:
        """Send a signal to all steps, as ``--signal`` does before the time limit; the script does not get it."""
        self._cluster.ask("scancel", "--signal", name, str(self.number))

    def run_time_minutes(self) -> int:
        """Whole minutes since the job's last start."""
        hours, minutes, _ = map(int, self.field("RunTime").rpartition("-")[2].split(":"))
        return 60 * hours + minutes

    def set_time_limit(self, minutes: int) -> None:
        """Of a job that waits or runs."""
        self._cluster.ask("scontrol", "update", f"JobId={self.number}", f"TimeLimit={minutes}")

    def wait_until(self, condition: Callable[[], bool], what: str, timeout_s: float) -> None:
        """Poll. ``AssertionError`` with the job's output where it takes longer, or the job fails meanwhile."""
        until = time.monotonic() + timeout_s
        while not condition():
            state = self.field("JobState")
            ended = state not in ("PENDING", "RUNNING", "COMPLETING", "REQUEUED", "COMPLETED", "CONFIGURING")
            assert not ended and time.monotonic() < until, f"{what}: not so in state {state}; output:\n{self.output()}"
            time.sleep(1)

    def wait(self, timeout_s: float) -> None:
        """Until the job has ended well."""
        self.wait_until(lambda: self.field("JobState") == "COMPLETED", f"job {self.number} completes", timeout_s)
