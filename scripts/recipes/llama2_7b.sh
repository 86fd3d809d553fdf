#!/usr/bin/env bash
# Llama-2 7B: 2 nodes x 8 GPUs of 80 GB. One node trains, one samples.
# Expected: 57 GiB of a training GPU; a refit in 0.3 s (plan). An iteration has 1,024 responses of at most 1,024 + 1,024 tokens, in steps of 256.
# Training TP 4 x DP 2: at TP 4 alone the optimizer of actor and critic leaves no room for activations; two data-parallel ranks share it, and a
# tensor-parallel group stays within half a node.
# Rollout 8 replicas of TP 1: 13.5 GB of weights each; whole engines sample more tokens than halves of four.
# 32 KV heads and no grouped queries: a token's cache is 512 KiB, four times that of Llama-3.1 8B, hence the shorter responses.
model=llama2_7b
nodes=2
flags=(
    --tensor-model-parallel-size 4 --sequence-parallel
    --rollout-world-size 8 --rollout-tensor-parallel-size 1
    --prompts-per-iteration 1024 --samples-per-prompt 1 --global-batch-size 256 --ppo-epochs 1
    --micro-batch-size 16 --max-tokens-per-micro-batch 8192
    --max-prompt-length 1024 --max-response-length 1024
    --recompute-granularity selective
    --vllm-overrides gpu_memory_utilization 0.85
)
. "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
