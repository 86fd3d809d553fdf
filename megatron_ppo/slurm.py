"""Where the ranks of a Slurm step meet, read from the variables that ``srun`` gives every task. Pure functions of an environment.

torchrun tells its ranks an address and a port. Slurm tells them which nodes a step has, and that is enough where rank 0 runs on the first
of them. In a heterogeneous step Slurm numbers the tasks across the components in their order but sorts the union of their nodes by name, so
that the first name may belong to another component: the list of the first component is what counts (seen with Slurm 22.05). No command of
Slurm's is run.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping

_FIRST_PORT, _NUM_PORTS = 20000, 10000
"""Below the ports that Linux gives to outgoing connections (32768 on)."""
_PORTS_A_JOB = 16
"""Steps of one job that run side by side take ports of their own; two jobs of one node differ in their numbers."""


def hosts(node_list: str) -> Iterator[str]:
    """The names in Slurm's short form, in order: ``gpu[01-02,07],login`` gives gpu01, gpu02, gpu07, login."""
    for entry in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", node_list):
        parts = re.split(r"\[([^\]]*)\]", entry)  # text, numbers, text, numbers, ..., text
        choices = [list(_numbers(part)) if index % 2 else [part] for index, part in enumerate(parts)]
        yield from map("".join, itertools.product(*choices))


def _numbers(ranges: str) -> Iterator[str]:
    """``01-03,7`` gives 01, 02, 03, 7."""
    for piece in ranges.split(","):
        first, _, last = piece.partition("-")
        yield from (str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1))


def rank0_host(environ: Mapping[str, str]) -> str:
    """Name of the node that runs task 0 of this step.

    Raises:
        ValueError: the environment does not say it, or says what task 0 knows to be wrong (a step whose tasks were placed by hand).
    """
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    if not nodes:
        raise ValueError(
            "MASTER_ADDR is not set, nor SLURM_STEP_NODELIST, from which it would follow: start the program with torchrun or srun, "
            "or export it: the name of the node of rank 0"
        )
    of_step = list(hosts(nodes))
    first = next((host for group in _components(environ) for host in hosts(group) if host in of_step), of_step[0])
    here = environ.get("SLURMD_NODENAME", first)
    if environ.get("SLURM_PROCID") == "0" and here != first:
        raise ValueError(f"rank 0 runs on {here}, but the first node of this step is {first}: export MASTER_ADDR={here} before srun")
    return first


def _components(environ: Mapping[str, str]) -> Iterator[str]:
    """Node lists of the components of a heterogeneous job; sbatch and srun spell the variable differently."""
    for number in range(int(environ.get("SLURM_HET_SIZE", "0"))):
        names = (f"SLURM_JOB_NODELIST_{word}_GROUP_{number}" for word in ("HET", "PACK"))
        yield from itertools.islice((environ[name] for name in names if name in environ), 1)


def step_port(environ: Mapping[str, str]) -> int:
    """A port that follows from the numbers of job and step, alike on every task. ``ValueError`` where there is no job number."""
    job, step = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_STEP_ID", "0")
    if not (job.isdigit() and step.isdigit()):
        raise ValueError(
            "MASTER_PORT is not set, nor SLURM_JOB_ID, from which it would follow: start the program with torchrun or srun, or export it"
        )
    return _FIRST_PORT + (_PORTS_A_JOB * int(job) + int(step)) % _NUM_PORTS
