"""The smallest configuration that passes its own checks, for tests of the launch. Test support only."""

from __future__ import annotations

import json
from pathlib import Path

from megatron_ppo.config import Config


def two_by_two(folder: str, *, tensor_parallel: int = 1) -> Config:
    """Two training ranks, two rollout ranks; ``folder`` gets what the configuration's checks read."""
    architecture = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "vocab_size": 130,
        "max_position_embeddings": 2048,
    }
    prompts = Path(folder) / "prompts.jsonl"
    if not prompts.exists():
        (Path(folder) / "config.json").write_text(json.dumps(architecture))
        prompts.write_text('{"prompt": "a", "answer": "b"}\n')
    return Config().replace(
        model_path=folder,
        prompt_data=str(prompts),
        reward="length",
        rollout_world_size=2,
        rollout_tensor_parallel_size=tensor_parallel,
        tensor_model_parallel_size=2,
        global_batch_size=8,
        prompts_per_iteration=8,
        samples_per_prompt=1,
    )
