"""Actor, critic, reference and reward model on megatron-core: one class, told apart by its head.

    tokens [b, T] -> embedding -> decoder layers of this pipeline chunk -> hidden states [T, b, H] (sent on, unless last)
                                                                            |-> output_layer -> log_probs, entropy
                                                                            '-> value_head   -> values

The network is what Megatron's GPTModel is, from the same parts and with the same parameter names
(``decoder.layers.0...``), so that schedules, DDP, ``finalize_model_grads`` and checkpoints of megatron-core take it as it
is. Parameters are made in ``params_dtype``: no Float16Module is needed around it. Training and eval mode compute the same
(dropout is off). Loading weights is ``resharding/``'s, pipeline schedules are ``backends/megatron.py``'s, the generation
loop is ``megatron_generate.py``'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron_ppo import device
from megatron_ppo.config import Config
from megatron_ppo.families import Head, NetworkShape
from megatron_ppo.roles.base import ActorRole, CriticRole, RewardModelRole, new_value_head
from megatron_ppo.roles.logits import gather_vocab, log_probs_and_entropy
from megatron_ppo.roles.megatron_config import padded_vocab_size, rope_inverse_frequencies, transformer_config
from megatron_ppo.roles.megatron_spec import block_spec, context_parallel_whole
from megatron_ppo.types import Completion, MicroBatch, RoleOutput, Sampling

device.prepare_megatron()

from megatron.core import tensor_parallel  # noqa: E402  the stand-ins must be there first
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding  # noqa: E402
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding  # noqa: E402
from megatron.core.models.common.language_module.language_module import LanguageModule  # noqa: E402
from megatron.core.transformer.enums import ModelType  # noqa: E402
from megatron.core.transformer.module import MegatronModule  # noqa: E402
from megatron.core.transformer.transformer_block import TransformerBlock  # noqa: E402


class MegatronActorCritic(LanguageModule, ActorRole, CriticRole, RewardModelRole):
    """One pipeline chunk of a role. Needs megatron's ``parallel_state`` to be initialised.

    Under context parallelism ``forward`` takes and gives this rank's part of each row
    (``megatron_spec.context_parallel_part``); T must be a multiple of 2 x CP, and under sequence parallelism the part a
    multiple of TP.
    """

    def __init__(
        self,
        network: NetworkShape,
        config: Config,
        *,
        head: Head,
        pre_process: bool = True,
        post_process: bool = True,
        vp_stage: int | None = None,
    ) -> None:
        super().__init__(config=transformer_config(network, config))
        self.model_type = ModelType.encoder_or_decoder
        self.head = head
        self.pre_process, self.post_process, self.vp_stage = pre_process, post_process, vp_stage
        self.vocab_size = network.vocab_size
        self.padded_vocab_size = padded_vocab_size(
            network.vocab_size, config.model.make_vocab_size_divisible_by, self.config.tensor_model_parallel_size
        )
        self.share_embeddings_and_output_weights = network.tied and self.has_lm_head

        if pre_process:
            self.embedding = LanguageModelEmbedding(
                self.config,
                vocab_size=self.padded_vocab_size,
                max_sequence_length=config.max_model_len,
                position_embedding_type="rope",
                tp_group=self.pg_collection.tp,
            )
        self.rotary_pos_emb = self._rotary_embedding(network)
        self.decoder = TransformerBlock(
            self.config,
            block_spec(self.config, vp_stage, self.pg_collection.pp.rank()),
            pre_process=pre_process,
            post_process=post_process,
            pg_collection=self.pg_collection,
            vp_stage=vp_stage,
        )
        self.output_layer: tensor_parallel.ColumnParallelLinear | None = None
        self.value_head: nn.Linear | None = None
        if post_process:
            self._add_heads(config.training.seed)
        if self.has_lm_head and (pre_process or post_process):
            self.setup_embeddings_and_output_layer()

    @property
    def has_lm_head(self) -> bool:
        """Whether the role gives log-probs."""
        return self.head in ("lm", "lm+value")

    @property
    def has_value_head(self) -> bool:
        """Whether the role gives values (or scores)."""
        return self.head != "lm"

    def _rotary_embedding(self, network: NetworkShape) -> RotaryEmbedding:
        """megatron's module, with the frequencies that the Hugging Face config asks for."""
        rotary = RotaryEmbedding(
            kv_channels=network.head_dim,
            rotary_percent=1.0,
            rotary_base=network.rope_theta,
            use_cpu_initialization=True,
            cp_group=self.pg_collection.cp,
        )
        rotary.inv_freq = rope_inverse_frequencies(network).to(device.device())
        return rotary

    def _add_heads(self, seed: int) -> None:
        if self.has_lm_head:
            self.output_layer = tensor_parallel.ColumnParallelLinear(
                self.config.hidden_size,
                self.padded_vocab_size,
                config=self.config,
                init_method=self.config.init_method,
                bias=False,
                skip_bias_add=False,
                gather_output=False,
                skip_weight_param_allocation=self.pre_process and self.share_embeddings_and_output_weights,
                tp_group=self.pg_collection.tp,
            )
        if self.has_value_head:
            self.value_head = _value_head(self.config.hidden_size, self.config.params_dtype, seed)

    # -- the roles' interface -----------------------------------------------------------------------------------------

    def forward(self, batch: MicroBatch, *, temperature: float = 1.0, with_entropy: bool = False) -> RoleOutput | Tensor:
        """What the head gives for every position, fp32 [b, T]: log_probs (and entropy) of ``batch.labels``, values or both.

        The score head gives its scores as ``values``. A chunk that is not the last returns hidden states [T, b, H] instead.
        """
        hidden = self.run_network(batch.tokens)
        if not self.post_process:
            return hidden
        log_probs = entropy = values = None
        if self.output_layer is not None:
            logits, _ = self.output_layer(hidden, weight=self._shared_weight())  # [T, b, V / TP]
            log_probs, entropy = log_probs_and_entropy(
                logits,
                batch.labels.transpose(0, 1),
                temperature=temperature,
                vocab_size=self.vocab_size,
                group=self.pg_collection.tp,
                with_entropy=with_entropy,
            )
            log_probs = log_probs.transpose(0, 1).contiguous()
            entropy = entropy.transpose(0, 1).contiguous() if entropy is not None else None
        if self.value_head is not None:
            values = self._values(hidden)
        return RoleOutput(log_probs=log_probs, entropy=entropy, values=values)

    def compute_values(self, batch: MicroBatch) -> Tensor:
        """Values [b, T] fp32 (hidden states, on a chunk that is not the last). ``RuntimeError`` without a value head."""
        if not self.has_value_head:
            raise RuntimeError(f"a role with head {self.head!r} has no values")
        if not self.post_process:
            return self.run_network(batch.tokens)
        return self._values(self.run_network(batch.tokens))

    def compute_scores(self, batch: MicroBatch) -> Tensor:
        """Scores [b] fp32 at the last real token of each row (hidden states, on a chunk that is not the last)."""
        values = self.compute_values(batch)
        return self.scores_at_last_token(values, batch.lengths) if self.post_process else values

    def scores_at_last_token(self, values: Tensor, lengths: Tensor) -> Tensor:
        """[b] out of this context-parallel rank's part of the values [b, T]: the entry ``lengths - 1`` of each whole row."""
        whole = context_parallel_whole(values, 1, self.pg_collection.cp)
        return whole.gather(1, lengths[:, None] - 1).squeeze(1)

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]) -> list[Completion]:
        """One response to each prompt: a plain loop without a cache, the oracle for inference engines
        (``megatron_generate.py``).

        For a pipeline stage with one chunk; a stage with several passes them all to ``megatron_generate.generate``.
        """
        from megatron_ppo.roles.megatron_generate import generate  # it imports this class

        return generate([self], prompts, sampling, seeds)

    # -- the network --------------------------------------------------------------------------------------------------

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor | None] | None) -> None:
        """Hidden states from the stage before, given by megatron's schedules (in a list of one)."""
        self.decoder.set_input_tensor(input_tensor[0] if isinstance(input_tensor, list) else input_tensor)

    def run_network(self, tokens: Tensor) -> Tensor:
        """Everything but the heads: tokens [b, T] -> hidden states [T (/ TP under sequence parallelism), b, H].

        A chunk that is not the first takes hidden states from ``set_input_tensor``, not from ``tokens``.
        """
        length = tokens.shape[1]
        if self.config.sequence_parallel and length % self.config.tensor_model_parallel_size:
            raise ValueError(
                f"sequence_parallel cuts a row of {length} tokens into tensor_model_parallel_size = "
                f"{self.config.tensor_model_parallel_size} parts: pad it to a multiple"
            )
        hidden = self.embedding(input_ids=tokens, position_ids=None) if self.pre_process else None
        rotary = self.rotary_pos_emb(length * self.config.context_parallel_size)
        return self.decoder(hidden_states=hidden, attention_mask=None, rotary_pos_emb=rotary)

    def next_token_logits(self, hidden: Tensor, lengths: Tensor) -> Tensor:
        """Logits [b, V] fp32 of the token after each row, whole and the same on every rank of the last stage. No gradient.

        ``hidden`` is what ``run_network`` gave, ``lengths`` [b] the real tokens of each whole row.
        """
        assert self.output_layer is not None
        whole = context_parallel_whole(self._whole_hidden(hidden), 0, self.pg_collection.cp)
        last = whole[lengths - 1, torch.arange(lengths.shape[0], device=lengths.device)]
        weight = self._shared_weight()
        logits = nn.functional.linear(last, weight if weight is not None else self.output_layer.weight)
        return gather_vocab(logits, self.vocab_size, self.pg_collection.tp).float()

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[tuple[int, int, int], ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """megatron's sharded checkpoint entries; LanguageModule's version expects an output layer, which a critic lacks."""
        parent = LanguageModule if self.has_lm_head else MegatronModule
        return parent.sharded_state_dict(self, prefix, sharded_offsets, metadata)

    def _shared_weight(self) -> Tensor | None:
        """The embedding as output matrix, in a tied model; None where the output layer has its own."""
        return self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None

    def _whole_hidden(self, hidden: Tensor) -> Tensor:
        """[T, b, H] with the sequence-parallel parts put together.

        Every rank of the tensor-parallel group then computes the same from it, so that the gradient is cut, not added up.
        """
        if not self.config.sequence_parallel:
            return hidden
        return tensor_parallel.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False, group=self.pg_collection.tp)

    def _values(self, hidden: Tensor) -> Tensor:
        assert self.value_head is not None
        values = nn.functional.linear(self._whole_hidden(hidden).float(), self.value_head.weight.float())  # [T, b, 1]
        return values.squeeze(-1).transpose(0, 1).contiguous()


def _value_head(hidden_size: int, dtype: torch.dtype, seed: int) -> nn.Linear:
    layer = nn.Linear(hidden_size, 1, bias=False, dtype=dtype, device=device.device())
    with torch.no_grad():
        layer.weight.copy_(new_value_head(hidden_size, seed))
    return layer
