"""megatron-core's own ``megatron.core.resharding`` on the same weights: ``swap_model_weights`` over gloo, between two ``GPTModel``.

It knows Megatron models only, so the rollout side is a ``GPTModel`` too (as many replicas, data-parallel to each other), and it wants one
default process group over all ranks and both models on every rank: a rank that is no part of one side gets a module without parameters
there. Therefore it runs in a launch of its own, which takes turns with the other one. Times compare as they stand: the bytes are those of
the same network, with the vocabulary padded alike.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from refit_methods import Run, Traffic, measure, peak_allocated_bytes
from refit_model import DTYPE, Mesh, fill, wrong_blocks
from torch import Tensor, nn

from megatron_ppo import device
from megatron_ppo.families import NetworkShape
from megatron_ppo.resharding.layout import RankLayout
from megatron_ppo.resharding.megatron_layout import padded_vocab_size, training_layouts
from megatron_ppo.resharding.megatron_mesh import MegatronParallel, stage_layers

_TIMEOUT = timedelta(minutes=10)


class MegatronRank:
    """One rank of a case. All methods are called on all ranks at once."""

    def __init__(self, rank: int, num_ranks: int, mesh: Mesh, network: NetworkShape) -> None:
        device.prepare_megatron()
        address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        warnings.filterwarnings("ignore", message="No device id is provided", category=UserWarning)  # of the barrier; gloo has no devices
        store = dist.TCPStore(*address, is_master=rank == 0, wait_for_workers=False, timeout=_TIMEOUT)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=_TIMEOUT)
        self._rank, self._network, self._is_source = rank, network, rank < mesh.num_training
        multiple = mesh.parallel.make_vocab_size_divisible_by
        rollout = MegatronParallel(tensor_model_parallel_size=mesh.rollout_tp, make_vocab_size_divisible_by=multiple)
        rows = {padded_vocab_size(network, sizes) for sizes in (mesh.parallel, rollout)}
        if len(rows) != 1:
            raise ValueError(f"megatron-core's resharding needs one padded vocabulary on both sides, not {sorted(rows)} rows")
        source_groups = _groups(range(mesh.num_training), mesh.parallel, rank)
        target_groups = _groups(range(mesh.num_training, num_ranks), rollout, rank)
        groups = source_groups if self._is_source else target_groups
        sizes = mesh.parallel if self._is_source else rollout
        model = _gpt_model(network, sizes, groups)
        empty = _EmptyModel(model.config, groups)
        self._models = (model, empty) if self._is_source else (empty, model)
        side = range(mesh.num_training) if self._is_source else range(mesh.num_training, num_ranks)
        self._layout = training_layouts(network, sizes, len(side))[rank - side.start]
        self._parameters: dict[str, Tensor] = {name: tensor.data for name, tensor in model.named_parameters()}
        self._service = _counting_service()
        self._fill()

    def run(self, method: str) -> Run:
        """Run the transfer between two barriers over all ranks."""
        return measure(self._swap, dist.barrier)

    def traffic(self, method: str) -> Traffic:
        """What the last run moved here."""
        return Traffic(self._service.bytes_sent, self._service.bytes_received)

    def extra_memory(self, method: str) -> int:
        """Peak of the tensor memory that a run allocates here, in bytes. The first run also plans."""
        return peak_allocated_bytes(self._swap)

    def check(self, method: str) -> list[str]:
        """Run on parameters that are all NaN, and name the blocks that did not arrive bit for bit."""
        if not self._is_source:
            for tensor in self._parameters.values():
                tensor.fill_(float("nan"))
        self.run(method)
        return [f"rank {self._rank}, {method}: {name}" for name in wrong_blocks(self._layout, self._network, self._parameters)]

    def _swap(self) -> None:
        from megatron.core.resharding.refit import swap_model_weights

        self._service.bytes_sent = self._service.bytes_received = 0
        swap_model_weights(*self._models, self._service)

    def _fill(self) -> None:
        _check_shapes(self._layout, self._parameters)
        if self._is_source:
            with torch.no_grad():
                fill(self._layout, self._network, self._parameters)


class _EmptyModel(nn.Module):
    """Stands for the other side's model on a rank that holds no part of it."""

    def __init__(self, config: Any, groups: Any) -> None:
        super().__init__()
        self.config, self.pg_collection = config, groups


def _check_shapes(layout: RankLayout, parameters: dict[str, Tensor]) -> None:
    found = {name: tuple(tensor.shape) for name, tensor in parameters.items()}
    if found != layout.shapes:
        raise RuntimeError(f"GPTModel has other parameters than the layout: {set(found.items()) ^ set(layout.shapes.items())}")


def _counting_service() -> Any:
    """megatron-core's gloo service, which also counts what it is given."""
    from megatron.core.resharding.copy_services.gloo_copy_service import GlooCopyService

    class Counting(GlooCopyService):
        bytes_sent = bytes_received = 0

        def submit_send_with_id(self, task_id: int, src_tensor: Tensor, dest_rank: int) -> None:
            self.bytes_sent += src_tensor.nbytes
            super().submit_send_with_id(task_id, src_tensor, dest_rank)

        def submit_recv_with_id(self, task_id: int, dest_tensor: Tensor, src_rank: int) -> None:
            self.bytes_received += dest_tensor.nbytes
            super().submit_recv_with_id(task_id, dest_tensor, src_rank)

    return Counting()


def _groups(ranks: range, sizes: MegatronParallel, rank: int) -> Any:
    """The process groups of one side's mesh: all ranks make all of them, and keep those that they are in."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    tp, pp = sizes.tensor_model_parallel_size, sizes.pipeline_model_parallel_size
    dp = len(ranks) // (tp * pp)

    def place(stage: int, replica: int, shard: int) -> int:
        return ranks.start + (stage * dp + replica) * tp + shard

    tensor = _new_groups([[place(p, d, t) for t in range(tp)] for p in range(pp) for d in range(dp)], rank)
    pipeline = _new_groups([[place(p, d, t) for p in range(pp)] for d in range(dp) for t in range(tp)], rank)
    data = _new_groups([[place(p, d, t) for d in range(dp)] for p in range(pp) for t in range(tp)], rank)
    alone = _new_groups([[member] for member in ranks], rank)
    return ProcessGroupCollection(
        tp=tensor, pp=pipeline, dp=data, dp_cp=data, cp=alone, ep=alone, expt_tp=tensor, expt_dp=data, embd=alone, pos_embd=alone
    )


def _new_groups(members: Sequence[Sequence[int]], rank: int) -> dist.ProcessGroup | None:
    made = [(rank in ranks, dist.new_group(list(ranks))) for ranks in members]
    return next((group for mine, group in made if mine), None)


def _gpt_model(network: NetworkShape, sizes: MegatronParallel, groups: Any) -> Any:
    """The chunk of this rank, with weights that are all zero."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    stage, stages = groups.pp.rank(), sizes.pipeline_model_parallel_size
    assert len({len(chunks[0]) for chunks in stage_layers(network.num_layers, sizes)}) == 1
    model_parallel_cuda_manual_seed(1, tp_rank=groups.tp.rank(), ep_rank=0, etp_rank=groups.tp.rank())
    init: Callable[[Tensor], Tensor] = nn.init.zeros_
    config = TransformerConfig(
        num_layers=network.num_layers,
        hidden_size=network.hidden_size,
        num_attention_heads=network.num_attention_heads,
        num_query_groups=network.num_key_value_heads,
        kv_channels=network.head_dim,
        ffn_hidden_size=network.intermediate_size,
        tensor_model_parallel_size=sizes.tensor_model_parallel_size,
        pipeline_model_parallel_size=stages,
        params_dtype=DTYPE,
        pipeline_dtype=DTYPE,
        bf16=True,
        init_method=init,
        output_layer_init_method=init,
        embedding_init_method=init,
        use_cpu_initialization=True,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        normalization="RMSNorm",
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        cuda_graph_scope=[],
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=padded_vocab_size(network, sizes),
        max_sequence_length=128,
        pre_process=stage == 0,
        post_process=stage == stages - 1,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        pg_collection=groups,
    )
