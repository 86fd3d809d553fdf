"""Cases of configuration, numerics and logging with the very numbers in which people met them, across the files that take part."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from launch_config import two_by_two

from megatron_ppo.learning_curve import read_metrics
from megatron_ppo.metrics import MetricsWriter
from megatron_ppo.ppo import policy_loss
from megatron_ppo.roles.logits import log_probs_and_entropy
from megatron_ppo.run_folder import LaunchRecord, RunFolder


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"tensor_model_parallel_size": 4, "rollout_world_size": 2}, "tensor_model_parallel_size"),
        ({"tensor_model_parallel_size": 2, "rollout_world_size": 4, "rollout_tensor_parallel_size": 4}, "rollout_tensor_parallel_size"),
    ],
)
def test_b99_six_heads_do_not_divide_by_four_on_either_mesh(tmp_path: Path, fields: dict[str, int], name: str) -> None:
    """B99: both numbers, and the sizes that would do."""
    config = two_by_two(str(tmp_path))
    architecture = json.loads((tmp_path / "config.json").read_text()) | {
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "hidden_size": 96,
    }
    (tmp_path / "config.json").write_text(json.dumps(architecture))
    with pytest.raises(ValueError, match=rf"6 attention heads are not a multiple of {name} = 4; it may be one of \[1, 2, 3, 6\]"):
        config.replace(**fields).validate(6)


def test_b102_the_ratio_of_an_unchanged_policy_is_one_whatever_the_micro_batch() -> None:
    """B102: bf16 logits of 32,001 tokens, scored row by row as old log-probs and all at once in the update; 256 columns are padding."""
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(6, 5, 32256, generator=generator)).bfloat16()
    labels = torch.randint(32001, (6, 5), generator=generator)

    def log_probs(rows: slice) -> torch.Tensor:
        found, _ = log_probs_and_entropy(logits[rows], labels[rows], temperature=1.0, vocab_size=32001, group=None, with_entropy=False)
        return found

    old = torch.cat([log_probs(slice(row, row + 1)) for row in range(6)])
    new = log_probs(slice(None))
    assert (new.exp() - old.exp()).abs().max() < 1e-6 and ((new - old).exp() - 1).abs().max() < 1e-6
    loss = policy_loss(new, old, torch.ones(6, 5), torch.ones(6, 5, dtype=torch.bool), clip_low=0.2, clip_high=0.2)
    assert (loss.loss + 1).abs().max() < 1e-6 and not loss.clipped.any()


def test_b105_iterations_after_the_checkpoint_are_recorded_once(tmp_path: Path) -> None:
    """B105: a crash after iteration 7, resumed from the checkpoint after 5: the records of 5 to 7 are those that were made again."""
    config = two_by_two(str(tmp_path)).replace(run_dir=str(tmp_path / "run"), train_iters=10, loggers=["tensorboard"])

    def launch(going_on_after: int | None, iterations: range) -> None:
        folder = RunFolder(config)
        folder.begin(LaunchRecord("a", "auto"), going_on_after)
        writer = MetricsWriter(config, first_iteration=iterations.start)
        for iteration in iterations:
            writer.log(iteration, {"reward/mean": float(iterations.start)})
            writer.log_samples([{"iteration": iteration, "response": "x"}])
        writer.close()
        folder.close()

    launch(None, range(8))
    launch(5, range(5, 10))
    expected = [(iteration, 0.0 if iteration < 5 else 5.0) for iteration in range(10)]
    assert [(record["iteration"], record["reward/mean"]) for record in read_metrics(tmp_path / "run")] == expected
    samples = (tmp_path / "run" / "samples.jsonl").read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in samples] == list(range(10))

    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == expected
