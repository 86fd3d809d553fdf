"""Hugging Face roles: actor, critic, reference, reward model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from other_models import make_other
from safetensors.torch import load_file, save_file
from torch import Tensor
from toy_models import make_toy
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig, LlamaForSequenceClassification

from megatron_ppo.roles.actor_critic import ActorCritic, Critic
from megatron_ppo.roles.reference import ReferenceRole
from megatron_ppo.roles.reward import RewardRole
from megatron_ppo.roles.sampling import draw
from megatron_ppo.types import MicroBatch, RoleOutput, Sampling

FP32 = torch.float32


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy(tmp_path_factory.mktemp("models") / "policy")


@pytest.fixture(scope="module")
def tied_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy(tmp_path_factory.mktemp("models") / "tied", "qwen3", tied=True)


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy(tmp_path_factory.mktemp("models") / "reward", score_head=True, seed=3)


def batch_of(*sequences: list[int], length: int | None = None, filler: int = 0) -> MicroBatch:
    """Right-padded rows; every label but the first token's is trained on."""
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    width = length or int(lengths.max())
    tokens = torch.tensor([sequence + [filler] * (width - len(sequence)) for sequence in sequences])
    labels = torch.nn.functional.pad(tokens[:, 1:], (0, 1))
    mask = torch.arange(width)[None, :] < lengths[:, None] - 1
    return MicroBatch(tokens=tokens, labels=labels, loss_mask=mask, rows=torch.arange(len(sequences)), lengths=lengths)


def output_of(role: ActorCritic, batch: MicroBatch, **options: float) -> RoleOutput:
    output = role(batch, **options)
    assert isinstance(output, RoleOutput)
    return output


def needed(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


# -- actor ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.3])
def test_b32_log_probs_and_entropy_are_of_logits_over_temperature(policy: Path, temperature: float) -> None:
    actor, batch = ActorCritic.from_folder(policy, dtype=FP32), batch_of([1, 5, 9, 3], [4, 4, 8, 120])
    distribution = AutoModelForCausalLM.from_pretrained(policy)(batch.tokens).logits.double() / temperature
    output = output_of(actor, batch, temperature=temperature, with_entropy=True)
    expected = torch.distributions.Categorical(logits=distribution)
    torch.testing.assert_close(needed(output.log_probs).double(), expected.log_prob(batch.labels), atol=1e-5, rtol=0)
    torch.testing.assert_close(needed(output.entropy).double(), expected.entropy(), atol=1e-5, rtol=0)
    assert needed(output.log_probs).dtype == FP32 and output.values is None
    assert output_of(actor, batch).entropy is None


def test_padding_and_company_change_nothing(policy: Path) -> None:
    actor = ActorCritic.from_folder(policy, dtype=FP32, critic="shared")
    torch.nn.init.normal_(actor.score.weight)
    alone = output_of(actor, batch_of([1, 5, 9, 3]), with_entropy=True)
    padded = output_of(actor, batch_of([1, 5, 9, 3], [7] * 9, length=16, filler=99), with_entropy=True)
    for one, other in [(alone.log_probs, padded.log_probs), (alone.entropy, padded.entropy), (alone.values, padded.values)]:
        # the last position's label is padding
        torch.testing.assert_close(needed(one)[0, :3], needed(other)[0, :3], atol=2e-6, rtol=1e-6)


def test_gradients_reach_trunk_and_heads(policy: Path) -> None:
    actor = ActorCritic.from_folder(policy, dtype=FP32, critic="shared")
    output = output_of(actor, batch_of([1, 5, 9, 3]), with_entropy=True)
    (needed(output.log_probs).sum() + needed(output.entropy).sum() + needed(output.values).sum()).backward()
    without = [name for name, p in actor.named_parameters() if p.grad is None or not p.grad.any()]
    # the value head starts at 0, so it moves first, and the trunk moves for the policy's sake
    assert without == []


def test_what_a_model_does_behind_its_head_is_in_the_log_probs(tmp_path: Path) -> None:
    """Gemma 2 caps its logits, Granite divides them: training and sampling see the distribution that transformers gives."""
    for kind in ("gemma2", "granite"):
        folder = make_other(tmp_path / kind, kind)
        actor, batch = ActorCritic.from_folder(folder, dtype=FP32), batch_of([1, 5, 9, 3, 17, 4])
        with torch.no_grad():
            log_probs = AutoModelForCausalLM.from_pretrained(folder)(batch.tokens).logits.log_softmax(-1)
        expected = log_probs.gather(-1, batch.labels[..., None])[..., 0]
        torch.testing.assert_close(needed(output_of(actor, batch).log_probs), expected, atol=1e-5, rtol=0)
        (response,) = actor.generate([[1, 5, 9]], Sampling(4, greedy=True), [0])
        with torch.no_grad():
            whole = AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([[1, 5, 9, *response.token_ids]])).logits[0, 2:-1]
        assert response.token_ids == whole.argmax(-1).tolist()
        assert response.log_probs == pytest.approx(whole.log_softmax(-1).amax(-1).tolist(), abs=1e-5)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_mixtures_of_experts_as_actor_critic_and_reward_model(family: str, tmp_path: Path) -> None:
    """Against transformers, padding included; gradients reach routers and stacked experts."""
    policy, reward = make_toy(tmp_path / "policy", family), make_toy(tmp_path / "reward", family, score_head=True, seed=3)
    actor, batch = ActorCritic.from_folder(policy, dtype=FP32, critic="shared"), batch_of([1, 5, 9, 3], [7] * 9, length=16, filler=99)
    output = output_of(actor, batch)
    logits = AutoModelForCausalLM.from_pretrained(policy)(torch.tensor([[1, 5, 9, 3]])).logits
    expected = logits.log_softmax(-1)[0, :3].gather(-1, torch.tensor([[5], [9], [3]]))[:, 0]
    torch.testing.assert_close(needed(output.log_probs)[0, :3], expected, atol=1e-5, rtol=0)
    (needed(output.log_probs).sum() + needed(output.values).sum()).backward()
    silent = [name for name, p in actor.named_parameters() if p.grad is None or not p.grad.any()]
    assert silent == []
    weight = load_file(reward / "model.safetensors")["score.weight"]
    critic, single = Critic.from_folder(reward, dtype=FP32), batch_of([7, 8, 9, 2])
    assert torch.equal(critic.score.weight, weight)
    classifier = AutoModelForSequenceClassification.from_pretrained(reward)
    scores = RewardRole.from_folder(reward, dtype=FP32).compute_scores(single)
    assert float(scores[0]) == pytest.approx(classifier(single.tokens).logits[0, 0].item(), abs=1e-5)
    assert float(critic.compute_values(single)[0, 3].detach()) == pytest.approx(float(scores[0]), abs=1e-5)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_a_checkpoint_that_lacks_an_experts_tensor_is_refused_by_name(family: str, tmp_path: Path) -> None:
    folder = make_toy(tmp_path, family, num_layers=1)
    tensors = load_file(folder / "model.safetensors")
    gone = next(name for name in tensors if ".experts.1." in name)
    del tensors[gone]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"lack 1 weight.*{re.escape(gone)}"):
        ActorCritic.from_folder(folder, dtype=FP32)


# -- sampling ---------------------------------------------------------------------------------------------------------


def test_b32_log_prob_of_a_draw() -> None:
    """The case's numbers: logits [2, 1, 0], token 0, T 0.5."""
    logits, generator = torch.tensor([2.0, 1.0, 0.0]), torch.Generator().manual_seed(0)
    draws = [draw(logits, Sampling(1, temperature=0.5), generator) for _ in range(50)]
    assert next(log_prob for token, log_prob in draws if token == 0) == pytest.approx(-0.14293, abs=1e-5)
    assert draw(logits, Sampling(1, temperature=0.5, greedy=True), generator) == (0, pytest.approx(-0.40761, abs=1e-5))


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(1), [0.1, 0.2, 0.3, 0.4, 0.0]),
        (Sampling(1, temperature=0.5), [1 / 30, 4 / 30, 9 / 30, 16 / 30, 0.0]),
        (Sampling(1, top_k=2), [0.0, 0.0, 3 / 7, 4 / 7, 0.0]),
        (Sampling(1, top_p=0.75), [0.0, 2 / 9, 3 / 9, 4 / 9, 0.0]),
        (Sampling(1, top_p=1e-9), [0.0, 0.0, 0.0, 1.0, 0.0]),
        (Sampling(1, top_k=3, top_p=0.75), [0.0, 0.0, 3 / 7, 4 / 7, 0.0]),  # of the three left, two hold 7/9 > 0.75
    ],
)
def test_draws_follow_the_cut_distribution(sampling: Sampling, expected: list[float]) -> None:
    logits, generator = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.0]).log(), torch.Generator().manual_seed(1)
    num_draws = 4000
    draws = [draw(logits, sampling, generator) for _ in range(num_draws)]
    for token, probability in enumerate(expected):
        hits = [log_prob for drawn, log_prob in draws if drawn == token]
        assert len(hits) / num_draws == pytest.approx(probability, abs=4 * (probability * (1 - probability) / num_draws) ** 0.5)
        if hits:
            assert set(hits) == {hits[0]} and hits[0] == pytest.approx(torch.tensor(probability).log().item(), abs=1e-6)


def test_generation_leaves_mode_and_global_randomness_alone(policy: Path) -> None:
    actor = ActorCritic.from_folder(policy, dtype=FP32).train()
    state = torch.get_rng_state()
    actor.generate([[1, 2]], Sampling(3), [1])
    assert actor.training and torch.equal(state, torch.get_rng_state())


# -- critic -----------------------------------------------------------------------------------------------------------


def test_b25_critic_from_a_tied_policy(tied_policy: Path) -> None:
    batch, source = batch_of([1, 5, 9, 3], [2, 2, 2]), load_file(tied_policy / "model.safetensors")
    shared, separate = (
        ActorCritic.from_folder(tied_policy, dtype=FP32, critic="shared"),
        Critic.from_folder(tied_policy, dtype=FP32),
    )
    for role, trunk in [(shared, shared.model.base_model), (separate, separate.trunk)]:
        for name, parameter in trunk.named_parameters():
            assert torch.equal(parameter, source[f"model.{name}"])
        assert role.score.weight.shape == (1, 64)
        assert role.score.weight.data_ptr() != trunk.embed_tokens.weight.data_ptr()
        assert role.compute_values(batch).shape == (2, 4) and role.compute_values(batch).dtype == FP32
    assert "lm_head.weight" not in dict(separate.named_parameters())


def test_b25_critic_takes_a_reward_models_head_exactly(reward_model: Path, policy: Path) -> None:
    weight = load_file(reward_model / "model.safetensors")["score.weight"]
    critic, batch = Critic.from_folder(reward_model, dtype=FP32), batch_of([1, 5, 9, 3])
    assert torch.equal(critic.score.weight, weight)
    hidden = critic.trunk(batch.tokens).last_hidden_state
    torch.testing.assert_close(critic.compute_values(batch), (hidden * weight[0]).sum(-1), atol=1e-5, rtol=0)
    assert not Critic.from_folder(policy, dtype=FP32).compute_values(batch).any()


def test_a_policy_alone_has_no_values(policy: Path) -> None:
    with pytest.raises(RuntimeError, match="no value head"):
        ActorCritic.from_folder(policy, dtype=FP32).compute_values(batch_of([1, 2]))
    with pytest.raises(ValueError, match='critic="none"'):
        ActorCritic(AutoModelForCausalLM.from_pretrained(policy), score_weight=torch.zeros(1, 64))


# -- reference --------------------------------------------------------------------------------------------------------


def test_reference_is_frozen_and_shares_nothing(policy: Path) -> None:
    actor, batch = ActorCritic.from_folder(policy, dtype=FP32).train(), batch_of([1, 5, 9, 3])
    reference = ReferenceRole.copy_of(actor)
    before = output_of(reference, batch).log_probs
    shared = {p.untyped_storage().data_ptr() for p in actor.parameters()} & {p.untyped_storage().data_ptr() for p in reference.parameters()}
    assert not shared and not any(p.requires_grad for p in reference.parameters()) and not needed(before).requires_grad
    with torch.no_grad():
        for parameter in actor.parameters():
            parameter.add_(1.0)
    assert torch.equal(needed(output_of(reference, batch).log_probs), needed(before))
    assert not any(module.training for module in reference.train().modules())
    assert actor.training and all(p.requires_grad for p in actor.parameters())
    (generated,), (expected,) = (
        role.generate([[1, 2]], Sampling(3), [1]) for role in (reference, ActorCritic.from_folder(policy, dtype=FP32))
    )
    assert generated.token_ids == expected.token_ids


# -- reward model -----------------------------------------------------------------------------------------------------


def test_b78_scores_are_read_at_the_last_real_token(reward_model: Path) -> None:
    """Whatever the padding is (the end-of-sequence id too), and however many rows run along; equal to transformers on the bare sequence."""
    role, sequence = RewardRole.from_folder(reward_model, dtype=FP32), [7, 8, 9, 2]
    classifier = AutoModelForSequenceClassification.from_pretrained(reward_model)
    expected = classifier(torch.tensor([sequence])).logits[0, 0].item()
    for length, filler, others in [(4, 0, 0), (8, 0, 0), (8, 2, 0), (8, 9, 3), (12, 2, 3)]:
        scores = role.compute_scores(batch_of(sequence, *[[5] * (2 + i) for i in range(others)], length=length, filler=filler))
        assert scores.shape == (1 + others,) and scores.dtype == FP32
        assert float(scores[0]) == pytest.approx(expected, abs=1e-5)


def test_b25_reward_model_without_a_score_head_is_refused(policy: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"score\.weight.*not a reward model"):
        RewardRole.from_folder(policy, dtype=FP32)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 130}
    LlamaForSequenceClassification(LlamaConfig(num_labels=2, **sizes)).save_pretrained(tmp_path / "two")
    with pytest.raises(ValueError, match=r"\[2, 64\].*more than one label"):
        RewardRole.from_folder(tmp_path / "two", dtype=FP32)


def test_reward_model_is_frozen(reward_model: Path) -> None:
    role = RewardRole.from_folder(reward_model, dtype=FP32).train()
    assert not any(p.requires_grad for p in role.parameters()) and not any(module.training for module in role.modules())
    assert not role(batch_of([1, 2])).requires_grad


def test_an_incomplete_checkpoint_is_refused(policy: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(policy)
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "model.layers.1.mlp.up_proj.weight"}
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ValueError, match=r"lacks 1 weight.*layers\.1\.mlp\.up_proj"):
        ActorCritic.from_folder(tmp_path, dtype=FP32)
    with pytest.raises(ValueError, match=r"no config\.json"):
        ActorCritic.from_folder(tmp_path / "nowhere", dtype=FP32)
