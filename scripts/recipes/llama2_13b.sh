#!/usr/bin/env bash
# Llama-2 13B: 3 nodes x 8 GPUs of 80 GB. Two nodes train, one samples.
# Expected: 53 GiB of a training GPU; a refit in 0.3 s (plan). An iteration has 1,024 responses of at most 1,024 + 1,024 tokens, in steps of 256.
# Training TP 8 x DP 2: one node holds a copy, the second one halves the optimizer's share.
# Rollout 4 replicas of TP 2: 13 GB of weights a GPU; 40 KV heads make a token's cache 800 KiB, which TP 2 halves on each GPU.
model=llama2_13b
nodes=3
flags=(
    --tensor-model-parallel-size 8 --sequence-parallel
    --rollout-world-size 8 --rollout-tensor-parallel-size 2
    --prompts-per-iteration 1024 --samples-per-prompt 1 --global-batch-size 256 --ppo-epochs 1
    --micro-batch-size 16 --max-tokens-per-micro-batch 8192
    --max-prompt-length 1024 --max-response-length 1024
    --recompute-granularity selective
    --vllm-overrides gpu_memory_utilization 0.85
)
. "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
