"""Vocab-parallel log-probs and entropy against closed forms, float64 references and one another."""

import math
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from spawn import run_ranks

from megatron_ppo.roles import logits as module
from megatron_ppo.roles.logits import gather_vocab, log_probs_and_entropy


def both(logits, labels, temperature=1.0, vocab_size=None, group=None):
    size = vocab_size if vocab_size is not None else logits.shape[-1]
    return log_probs_and_entropy(logits, labels, temperature=temperature, vocab_size=size, group=group, with_entropy=True)


def test_b32_temperature_divides_the_logits():
    log_probs, _ = both(torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0]), temperature=0.5)
    assert log_probs.item() == pytest.approx(-0.14293, abs=1e-5)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
def test_b32_temperature_zero_is_refused(temperature):
    with pytest.raises(ValueError, match="temperature must be above 0"):
        both(torch.zeros(1, 3), torch.tensor([0]), temperature=temperature)


def test_b103_padding_columns_are_no_tokens():
    log_probs, entropy = both(torch.zeros(2, 32256), torch.tensor([0, 32000]), vocab_size=32001)
    assert log_probs.tolist() == pytest.approx([-10.373522] * 2, abs=1e-5)
    assert entropy.tolist() == pytest.approx([math.log(32001)] * 2, abs=1e-5)


def test_b103_minus_infinity_has_finite_entropy_and_gradient():
    logits = torch.tensor([[0.0, 0.0, -torch.inf]], requires_grad=True)
    log_probs, entropy = both(logits, torch.tensor([0]))
    (log_probs + entropy).sum().backward()
    assert entropy.item() == pytest.approx(0.693147, abs=1e-6)
    assert torch.isfinite(logits.grad).all()


def test_b102_bf16_logits_are_computed_in_fp32_and_independently_of_the_split():
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(6, 32001, generator=generator)).bfloat16()
    labels = torch.randint(32001, (6,), generator=generator)
    log_probs, _ = both(logits, labels)
    exact = logits.double().log_softmax(-1).gather(-1, labels[:, None]).squeeze(-1)
    assert log_probs.dtype == torch.float32
    assert (log_probs - exact).abs().max() < 1e-4
    assert (log_probs <= 0).all()
    rows = torch.cat([both(logits[i : i + 2], labels[i : i + 2])[0] for i in range(0, 6, 2)])
    assert torch.equal(rows, log_probs)


def test_gradients_equal_autograd_in_float64():
    generator = torch.Generator().manual_seed(1)
    start, labels = torch.randn(2, 5, 9, generator=generator), torch.randint(7, (2, 5), generator=generator)
    coefficients = torch.randn(2, 2, 5, generator=generator)
    ours, exact = start.clone().requires_grad_(), start.double().requires_grad_()
    log_probs, entropy = both(ours, labels, temperature=0.7, vocab_size=7)
    (coefficients[0] * log_probs + coefficients[1] * entropy).sum().backward()
    table = (exact[..., :7] / 0.7).log_softmax(-1)
    expected = coefficients[0] * table.gather(-1, labels[..., None]).squeeze(-1) - coefficients[1] * (table.exp() * table).sum(-1)
    expected.sum().backward()
    assert (ours.grad - exact.grad).abs().max() < 1e-6
    assert (ours.grad[..., 7:] == 0).all()


def test_chunks_do_not_change_a_bit(monkeypatch):
    generator = torch.Generator().manual_seed(2)
    logits, labels = torch.randn(11, 50, generator=generator), torch.randint(50, (11,), generator=generator)
    results = []
    for chunk_size in (1024, 4, 1):
        monkeypatch.setattr(module, "CHUNK_SIZE", chunk_size)
        leaf = logits.clone().requires_grad_()
        log_probs, entropy = both(leaf, labels)
        (log_probs + 0.1 * entropy).sum().backward()
        results.append((log_probs.detach(), entropy.detach(), leaf.grad))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="do not fit together"):
        both(torch.zeros(2, 3, 5), torch.zeros(3, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="do not hold a vocabulary of 6"):
        both(torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64), vocab_size=6)


def split_rank(rank, world_size):
    """Log-probs, entropy and gradient of a vocabulary of 10 in four shards of 4: the last shard is all padding."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    generator = torch.Generator().manual_seed(3)
    whole, labels = torch.randn(10, 16, generator=generator), torch.arange(10)
    shard = whole[:, 4 * rank : 4 * rank + 4].clone().requires_grad_()
    log_probs, entropy = both(shard, labels, temperature=1.3, vocab_size=10, group=dist.group.WORLD)
    (log_probs + 0.5 * entropy).sum().backward()
    rows = gather_vocab(shard.detach(), 10, dist.group.WORLD)
    dist.destroy_process_group()
    return log_probs.detach(), entropy.detach(), shard.grad, torch.equal(rows, whole[:, :10])


def test_b103_split_vocabulary_equals_whole():
    ranks = run_ranks(split_rank, 4, timeout_s=60)
    generator = torch.Generator().manual_seed(3)
    whole = torch.randn(10, 16, generator=generator).requires_grad_()
    log_probs, entropy = both(whole, torch.arange(10), temperature=1.3, vocab_size=10)
    (log_probs + 0.5 * entropy).sum().backward()
    for result in ranks:
        assert (result[0] - log_probs).abs().max() < 1e-6
        assert (result[1] - entropy).abs().max() < 1e-6
        assert result[3]
    assert (torch.cat([result[2] for result in ranks], dim=-1) - whole.grad).abs().max() < 1e-6
