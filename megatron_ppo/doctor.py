"""``python -m megatron_ppo doctor``: a page about this machine, this environment and this configuration, to paste into a bug report.

It takes the flags of ``train``. Under torchrun or srun, with the same flags, it also measures the launch: one rank a node looks at its
host, then all ranks come together as in ``train`` (``init_world``), and every pair of meshes is measured. Otherwise it looks at this host
alone, and starts a few ranks here to see whether they reach one another.

    exit code 0   nothing is broken
              1   something is; it is marked with !! and named again at the end, with a remedy
              2   a flag is wrong

Nothing that a check meets ends the page: its error is a finding. Variables whose name speaks of a key, token, secret or password are
neither printed nor named, and logins inside of addresses are struck out.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ppo import doctor_checks
from megatron_ppo.doctor_page import Finding, Section, from_json, run_check, summary, to_json, worst

if TYPE_CHECKING:
    from megatron_ppo.config import Config

PROGRAM = "megatron_ppo doctor"
_RESULT_FILE = "MEGATRON_PPO_DOCTOR_RESULT"
"""Set in the ranks that doctor itself has started: where their rank 0 leaves the section about links."""
_LINKS = "links between ranks"
_COMPARED = ("versions", "environment")
"""Sections that ought to be the same on all nodes."""
_NODES_WAIT = timedelta(minutes=10)
_STAND_IN = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 2,
    "num_key_value_heads": 2, "intermediate_size": 64, "vocab_size": 128, "max_position_embeddings": 8192,
}  # fmt: skip
"""A config.json for the rules of the launch to read where the user names no model; no network is built of it."""


@dataclass(frozen=True)
class Options:
    """Doctor's own flags."""

    num_ranks: int | None = None
    """Ranks to start on this machine. Default: the smallest launch that the sizes admit. Under a launcher: its ranks."""
    json: bool = False
    """Print the page as JSON."""
    disk_mib: int = 256
    """Size of the file that is written into the run folder, read, and removed."""


def main(arguments: Sequence[str]) -> int:
    """``python -m megatron_ppo doctor``; the exit code."""
    try:
        from megatron_ppo.config_io import parse_command
    except ImportError as error:  # a package that the command line needs: the page says which
        return _page_without_flags(error)
    options, config = parse_command(arguments, Options(), program=PROGRAM)
    if options.disk_mib < 1:
        print(f"{PROGRAM}: disk_mib = {options.disk_mib} must be at least 1", file=sys.stderr)
        return 2
    if _RESULT_FILE in os.environ:
        return _run_started_rank(config, Path(os.environ[_RESULT_FILE]))
    launched = "RANK" in os.environ or "SLURM_PROCID" in os.environ
    return _run_launched(options, config) if launched else _run_alone(options, config, arguments)


class Page:
    """Sections as they are made; as text each is printed at once, so that a check that hangs can be told."""

    def __init__(self, *, as_json: bool, quiet: bool = False) -> None:
        self.sections: list[Section] = []
        self._as_json = as_json
        self._quiet = quiet
        if not (as_json or quiet):
            now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
            print(f"{PROGRAM}, {now}, host {platform.node()}", flush=True)

    def add(self, section: Section) -> None:
        """Take a section, unless it is empty."""
        if section.findings:
            self.sections.append(section)
            if not (self._as_json or self._quiet):
                print(section.to_text(), flush=True)

    def end(self) -> int:
        """Print what is left to print; the exit code."""
        if not self._quiet:
            print(to_json(self.sections) if self._as_json else summary(self.sections), flush=True)
        return int(bool(worst(self.sections, "broken")))


def _page_without_flags(error: ImportError) -> int:
    page = Page(as_json=False)
    _look_at_host(page, num_nodes=1)
    remedy = "bash scripts/setup.sh, or pip install -e . with the extra cpu or gpu"
    page.add(Section("configuration", [Finding("command line", f"{type(error).__name__}: {error}", "broken", remedy)]))
    return page.end()


def _look_at_host(page: Page, *, num_nodes: int) -> None:
    page.add(run_check("versions", doctor_checks.check_versions))
    page.add(run_check("imports", doctor_checks.check_imports))
    page.add(run_check("GPUs", doctor_checks.check_gpus))
    page.add(run_check("host", doctor_checks.check_host))
    page.add(run_check("environment", doctor_checks.check_environment))
    page.add(run_check("network", lambda: doctor_checks.check_network(num_nodes)))


def _look_at_configuration(page: Page, options: Options, config: Config, num_ranks: int | None) -> None:
    page.add(run_check("disk", lambda: doctor_checks.check_disk(Path(config.logging.run_dir), options.disk_mib)))
    page.add(run_check("configuration", lambda: _check_configuration(config, num_ranks)))
    page.add(run_check("model and tokenizer", lambda: _check_model(config)))


def _check_configuration(config: Config, num_ranks: int | None) -> list[Finding]:
    from megatron_ppo.doctor_model import check_configuration  # imports torch and more: an error of theirs is a finding

    return check_configuration(config, num_ranks)


def _check_model(config: Config) -> list[Finding]:
    from megatron_ppo.doctor_model import check_model

    return check_model(config)


# -- without a launcher -----------------------------------------------------------------------------------------------


def _run_alone(options: Options, config: Config, arguments: Sequence[str]) -> int:
    page = Page(as_json=options.json)
    _look_at_host(page, num_nodes=1)
    _look_at_configuration(page, options, config, options.num_ranks)
    page.add(run_check(_LINKS, lambda: _start_ranks(page, options, config, arguments)))
    return page.end()


def _start_ranks(page: Page, options: Options, config: Config, arguments: Sequence[str]) -> list[Finding]:
    """Start ranks on this host and read what they have measured."""
    from megatron_ppo.resharding.megatron_mesh import smallest_world_size
    from megatron_ppo.verify import launch_here

    faults = [finding for title, finding in worst(page.sections, "broken") if title == "configuration"]
    if faults:
        return [Finding("links", "not measured: the configuration above does not fit together", "note")]
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "links.json"
        if config.model.model_path:
            num_ranks = options.num_ranks or smallest_world_size(config)
        else:
            num_ranks = options.num_ranks or 2
            (Path(folder) / "config.json").write_text(json.dumps(_STAND_IN), encoding="utf-8")
            arguments = ["--model-path", folder, "--rollout-backend", "hf", "--rollout-world-size", "1"]
        os.environ[_RESULT_FILE] = str(result)
        try:
            code = launch_here("doctor", arguments, num_ranks)
        finally:
            del os.environ[_RESULT_FILE]
        if not result.is_file():
            what = f"{num_ranks} ranks on this host ended with code {code} before anything was measured"
            return [Finding("links", what, "broken", "what they printed on standard error says why")]
        (section,) = from_json(result.read_text(encoding="utf-8"))
    return [
        Finding("where", f"{num_ranks} ranks on this host alone; under torchrun or srun, with the flags of train: across hosts"),
        *section.findings,
    ]


def _run_started_rank(config: Config, result: Path) -> int:
    """A rank that another doctor has started: links only."""
    section = run_check(_LINKS, lambda: _measure(config))
    if os.environ["LOCAL_RANK"] == "0":
        result.write_text(to_json([section]), encoding="utf-8")
    return 0


# -- under a launcher -------------------------------------------------------------------------------------------------


def _run_launched(options: Options, config: Config) -> int:
    """This rank's part. The first rank of each node looks at its host; rank 0 prints the page, and how other nodes differ from its own."""
    from megatron_ppo.world import read_launch

    try:
        launch = read_launch(os.environ)
    except ValueError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2
    is_first = launch.global_rank == 0
    page = Page(as_json=options.json, quiet=not is_first)
    if launch.local_rank == 0:
        _look_at_host(page, num_nodes=_num_nodes(launch.world_size))
        _look_at_configuration(page, options, config, launch.world_size)
    page.add(run_check(_LINKS, lambda: _measure(config, page)))
    return page.end()


def _num_nodes(world_size: int) -> int:
    """Nodes of the launch, as torchrun or Slurm says."""
    if "LOCAL_WORLD_SIZE" in os.environ:
        return -(-world_size // int(os.environ["LOCAL_WORLD_SIZE"]))
    return int(os.environ.get("SLURM_STEP_NUM_NODES") or os.environ.get("SLURM_NNODES") or 1)


def _measure(config: Config, page: Page | None = None) -> list[Finding]:
    """Come together with all ranks, exchange the pages of the nodes, measure. Findings on rank 0 only."""
    from megatron_ppo.doctor_links import describe_failure, measure_links
    from megatron_ppo.verify_ranks import policy_only
    from megatron_ppo.world import close_world, init_world

    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"  # a link that does not come up is an error to catch, not the end of the process
    try:
        world = init_world(policy_only(config).replace(distributed_timeout_minutes=1), needs_data=False)
    except ValueError as error:
        return [Finding("launch", str(error), "broken", "choose sizes that fit; `python -m megatron_ppo plan` proposes some")]
    except (RuntimeError, OSError) as error:
        return [describe_failure(error)]
    try:
        found = [] if page is None else _compare_nodes(world.store, world.global_rank, world.world_size, page)
        return found + measure_links(world)
    finally:
        close_world(world)


def _compare_nodes(store: object, global_rank: int, world_size: int, page: Page) -> list[Finding]:
    """On rank 0: what other nodes have found broken, and where their versions or variables differ from this node's."""
    import torch.distributed as dist

    assert isinstance(store, dist.Store)
    store.set(f"doctor/page/{global_rank}", to_json(page.sections))
    if global_rank != 0:
        return []
    store.wait([f"doctor/page/{rank}" for rank in range(world_size)], _NODES_WAIT)
    pages = {rank: from_json(store.get(f"doctor/page/{rank}").decode()) for rank in range(1, world_size)}
    found: list[Finding] = []
    for rank, sections in pages.items():
        if not sections:
            continue  # not the first of its node
        found += [
            dataclasses.replace(f, name=f"rank {rank}'s node", value=f"{title}: {f.name}: {f.value}")
            for title, f in worst(sections, "broken")
        ]
        found += _differences(rank, page.sections, sections)
    return found


def _differences(rank: int, own: Sequence[Section], others: Sequence[Section]) -> list[Finding]:
    """Versions that differ are a fault; variables may have reasons to, those that name the process always do."""
    per_process = ("RANK", "LOCAL_", "GROUP_", "ROLE_", "SLURM_", "TORCHELASTIC_", "HOSTNAME", "CUDA_VISIBLE", "GLOO_SOCKET", "NCCL_SOCKET")
    found: list[Finding] = []
    for title in _COMPARED:
        here, there = ({f.name: f.value for s in sections if s.title == title for f in s.findings} for sections in (own, others))
        for name in sorted(here.keys() | there.keys()):
            if here.get(name) == there.get(name) or name.startswith(per_process) or name == "system":
                continue
            value = f"{name}: {there.get(name, 'absent')} there, {here.get(name, 'absent')} on rank 0's"
            if title == "versions":
                found.append(Finding(f"rank {rank}'s node", value, "broken", "install the same environment on all nodes"))
            else:
                found.append(Finding(f"rank {rank}'s node", value, "note", "export it on all nodes, or on none"))
    return found
