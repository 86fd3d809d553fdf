#!/usr/bin/env bash
# Qwen2.5 7B: 2 nodes x 8 GPUs of 80 GB. One node trains, one samples.
# Expected: 63 GiB of a training GPU; a refit in 0.3 s (plan). An iteration has 1,024 responses of at most 1,024 + 3,072 tokens, in steps of 256.
# Training TP 4 x DP 2: 28 heads and 4 KV heads divide by 4, not by 8; two data-parallel ranks share the optimizer.
# Rollout 8 replicas of TP 1: 15 GB of weights each. The vocabulary of 152,064 makes logits, not weights, the largest buffer of a micro-batch.
model=qwen2.5_7b
nodes=2
flags=(
    --tensor-model-parallel-size 4 --sequence-parallel
    --rollout-world-size 8 --rollout-tensor-parallel-size 1
    --prompts-per-iteration 1024 --samples-per-prompt 1 --global-batch-size 256 --ppo-epochs 1
    --micro-batch-size 16 --max-tokens-per-micro-batch 8192
    --max-prompt-length 1024 --max-response-length 3072
    --recompute-granularity selective
    --vllm-overrides gpu_memory_utilization 0.85
)
. "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
