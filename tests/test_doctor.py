"""``python -m megatron_ppo doctor``: a whole page of a healthy launch, a whole page of a broken environment, and single findings."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from spawn import run_ranks
from toy_models import make_toy
from train_support import Processes, make_inputs, tiny_flags

from megatron_ppo import doctor_links
from megatron_ppo.config import Config
from megatron_ppo.doctor_checks import check_disk, check_environment, check_network, check_versions
from megatron_ppo.doctor_links import Link, choose_links
from megatron_ppo.doctor_model import check_configuration, check_model
from megatron_ppo.doctor_page import Finding, from_json, run_check, to_json
from megatron_ppo.verify_ranks import policy_only
from megatron_ppo.world import close_world, init_world

DOCTOR = ("-m", "megatron_ppo", "doctor", "--disk-mib", "8")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model, tokenizer and prompts of the quickstart."""
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.mark.slow
def test_the_page_of_a_healthy_launch(inputs: Path, tmp_path: Path) -> None:
    """Under torchrun with the flags of train: every section is there, every pair of meshes has a rate, exit code 0."""
    flags = tiny_flags(inputs, tmp_path / "run", rollout_world_size=1)
    with Processes(tmp_path / "log") as processes:
        processes.torchrun(3, [*DOCTOR, "--json", *flags])
        assert processes.wait(240.0) == 0, processes.output()
        page = {section.title: {f.name: f for f in section.findings} for section in from_json(processes.stdout())}
    titles = ["versions", "imports", "GPUs", "host", "environment", "network", "disk", "configuration", "model and tokenizer"]
    assert list(page) == [*titles, "links between ranks"]
    assert {f.value for f in page["imports"].values()} == {"works"}
    links = page["links between ranks"]
    assert set(links) == {"training - rollout", "data bus", "inside training"}
    assert all("GB/s" in link.value and link.status == "ok" for link in links.values())
    assert "dp 2" in page["configuration"]["ranks"].value
    assert not (tmp_path / "run").exists(), "the run folder is not made"
    assert not list(tmp_path.glob(".doctor-*"))


@pytest.mark.slow
def test_the_page_of_a_broken_environment(tmp_path: Path) -> None:
    """Ranks cannot meet, the wrong apex is in the way, vLLM does not import: the page is whole, and keeps secrets."""
    for package, text in (("apex", ""), ("vllm", "raise ImportError('planted: a library is missing')")):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(text)
    secrets = {
        "WANDB_API_KEY": "hidden-one",
        "HF_TOKEN": "hidden-two",
        "RAY_PASSWORD": "hidden-three",
        "SLURM_JWT": "hidden-five",
        "RAY_JOB_HEADERS": "hidden-six",
        "HF_ENDPOINT": "https://me:hidden-four@hub",
    }
    path = f"{tmp_path}:{Path(__file__).parent.parent}"
    environment = {"GLOO_SOCKET_IFNAME": "nosuch0", "PYTHONPATH": path, "MASTER_ADDR": "no-such-host.invalid", **secrets}
    with Processes(tmp_path / "log", environment) as processes:
        processes.start([*DOCTOR, "--run-dir", str(tmp_path / "run")])
        assert processes.wait(240.0) == 1, processes.output()
        text = processes.stdout()
    assert "hidden" not in text and "WANDB_API_KEY" not in text and "https://***@hub" in text
    assert text.count("\n!! apex ") == 1 and "-> pip uninstall apex" in text
    assert "planted: a library is missing" in text
    assert "is not NVIDIA Apex" in text, "megatron-core's import says why it fails"
    assert "nosuch0: no such interface here" in text
    assert "no-such-host.invalid" in text
    assert "\n!! launch " in text or "\n!! links " in text, text
    assert "\ndoctor: " in text.rstrip().splitlines()[-7:][0] or "doctor: " in text


def test_each_node_of_a_mesh_has_a_link() -> None:
    """Training on nodes a and b, rollout on b and c: one rank a mesh and node speaks."""
    nodes = ["a", "a", "b", "b", "b", "c"]
    links, num_wanted = choose_links(range(3), range(3, 6), nodes)
    assert num_wanted == len(links)
    pairs = {(link.name, link.first, link.second) for link in links}
    across = {("training - rollout", 0, 3), ("training - rollout", 0, 5), ("training - rollout", 2, 3)}
    inside = {("inside training", 0, 2), ("inside rollout", 3, 5)}
    assert pairs == across | inside | {("data bus", 3, 0), ("data bus", 5, 0)}


def test_colocated_ranks_have_links_inside_only() -> None:
    assert choose_links(range(4), range(4), ["a"] * 4)[0] == [Link("inside both meshes", 0, 3)]
    assert choose_links(range(1), range(1), ["a"])[0] == []


def test_the_number_of_links_has_a_limit() -> None:
    nodes = [str(rank) for rank in range(400)]
    links, num_wanted = choose_links(range(200), range(200, 400), nodes)
    assert len(links) < num_wanted


def rank_with_a_bad_link(rank: int, world_size: int, folder: str) -> list[Finding]:
    """Rank 0 cannot pull from the bus."""
    doctor_links._MESSAGE_BYTES = 2**20  # what is measured does not matter here
    if rank == 0:
        doctor_links._over_bus = planted_error
    config = policy_only(Config().replace(model_path=folder, rollout_backend="hf", max_prompt_length=8, max_response_length=8))
    world = init_world(config, needs_data=False)
    found = doctor_links.measure_links(world)
    close_world(world)
    return found


def planted_error(*_: object) -> dict[str, float]:
    raise RuntimeError("planted: no route to host")


def test_a_bad_link_is_a_finding_and_the_others_are_measured(tmp_path: Path) -> None:
    folder = make_toy(tmp_path / "model", "llama")
    found, *others = run_ranks(rank_with_a_bad_link, 3, str(folder), timeout_s=280)
    assert others == [[], []]
    broken = [finding for finding in found if finding.status == "broken"]
    assert [finding.name for finding in broken] == ["data bus"]
    assert "rank 0: RuntimeError: planted: no route to host" in broken[0].value and broken[0].remedy
    assert [f.name for f in found if f.status == "ok"] == ["training - rollout", "inside training"]


def test_a_tokenizer_of_another_model_is_broken(inputs: Path, tmp_path: Path) -> None:
    """The tokenizer has ids that the network lacks; the weights are a finding of their own."""
    small = make_toy(tmp_path / "small", "llama", vocab_size=8)
    config = Config().replace(
        model_path=str(small), tokenizer_path=str(inputs / "model"), prompt_data=str(inputs / "prompts.jsonl"), reward="length"
    )
    found = {finding.name: finding for finding in check_model(config)}
    assert found["weights"].status == "ok"
    assert found["tokenizer"].status == "broken" and "belongs to another model" in found["tokenizer"].value


def test_a_model_folder_without_weights_is_broken(inputs: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((inputs / "model" / "config.json").read_text())
    found = {finding.name: finding.status for finding in check_model(Config().replace(model_path=str(tmp_path)))}
    assert found == {"weights": "broken", "tokenizer": "broken"}


def test_rules_of_the_launch_are_findings(inputs: Path) -> None:
    config = Config().replace(model_path=str(inputs / "model"), tensor_model_parallel_size=2, rollout_world_size=1)
    found = check_configuration(config, 8)
    assert {finding.status for finding in found} == {"broken"} and "world size 8" in found[0].value


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """/proc takes no files, whoever asks. A folder that does not exist yet is measured where it would be made."""
    assert check_disk(Path("/proc/run"), 1)[-1].status == "broken"
    assert {finding.status for finding in check_disk(tmp_path / "a" / "b", 1)} <= {"ok", "note"}
    assert list(tmp_path.iterdir()) == []


def test_a_check_that_raises_is_a_finding() -> None:
    section = run_check("disk", lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    assert section.findings[0].status == "broken" and "ZeroDivisionError" in section.findings[0].value
    assert from_json(to_json([section])) == [section]
    assert "!! check" in section.to_text()


def test_names_and_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loopback MASTER_ADDR is fine on its own host and a fault elsewhere."""
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "^docker,nosuch")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MY_SECRET", "x")
    monkeypatch.setenv("NCCL_SECRET", "x")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    names = {finding.name: finding.value for finding in check_environment()}
    assert names["NCCL_DEBUG"] == "INFO" and "NCCL_SECRET" not in names and "MY_SECRET" not in names
    found = [finding for finding in check_network(1) if finding.status == "broken"]
    assert [finding.name for finding in found] == ["NCCL_SOCKET_IFNAME"] and "nosuch" in found[0].value
    monkeypatch.setenv("GROUP_RANK", "1")
    assert "MASTER_ADDR" in {finding.name for finding in check_network(2) if finding.status == "broken"}


def test_versions_name_the_flavour_of_vllm() -> None:
    found = {finding.name: finding for finding in check_versions()}
    assert found["vllm"].value.startswith("vllm") and found["python"].status == "ok"
    assert json.dumps([finding.value for finding in found.values()])
    assert os.path.basename(found["python"].value.split()[1]).startswith("python")
