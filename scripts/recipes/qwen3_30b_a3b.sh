#!/usr/bin/env bash
# Qwen3 30B-A3B: 6 nodes x 8 GPUs of 80 GB. Four nodes train, two sample.
# Expected: 57 GiB of a training GPU; a refit in 0.6 s (plan). An iteration has 1,024 responses of at most 1,024 + 3,072 tokens, in steps of 256.
# Training TP 2 x PP 2 x DP 8 with EP 8: 16 of the 128 experts a GPU, whole (expert TP 1), two copies of the experts share their optimizer.
# TP 2, as 3 billion active parameters in layers 2,048 wide leave little to share, and there are 4 KV heads.
# Rollout 8 replicas of TP 2: 31 GB of weights a GPU, 64 whole experts on each (enable_expert_parallel): slices of experts 768 wide would be slow.
model=qwen3_30b_a3b
nodes=6
flags=(
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --expert-model-parallel-size 8 --sequence-parallel
    --transformer-overrides expert_tensor_parallel_size 1
    --rollout-world-size 16 --rollout-tensor-parallel-size 2
    --prompts-per-iteration 1024 --samples-per-prompt 1 --global-batch-size 256 --ppo-epochs 1
    --micro-batch-size 16 --max-tokens-per-micro-batch 8192
    --max-prompt-length 1024 --max-response-length 3072
    --recompute-granularity full
    --vllm-overrides gpu_memory_utilization 0.85 enable_expert_parallel true
)
. "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
