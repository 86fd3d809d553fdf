#!/usr/bin/env bash
# Llama-3.1 405B: 72 nodes x 8 GPUs: 64 nodes of 80 GB train, eight nodes of 141 GB sample.
# Expected: 45 GiB of a training GPU; a refit in 2.0 s (plan). An iteration has 1,024 responses of at most 1,024 + 3,072 tokens, in steps of 512.
# Training TP 8 x PP 32 x DP 2: 126 layers, embedding and head are 128, four a stage. PP 16 x DP 4 on the same GPUs would need half as much memory
# again, and idle as long: the bubble depends on PP x DP here, and steps of 512 rather than 256 responses halve it to 12%.
# Rollout 8 replicas of TP 8, one KV head a GPU. In bfloat16 a GPU holds 102 GB of weights, which no GPU of 80 GB can, and a replica may not
# straddle nodes: the rollout nodes have GPUs of 141 GB. As a job of two partitions:
#   PARTITION=h100 ROLLOUT_PARTITION=h200 bash scripts/recipes/llama3.1_405b.sh slurm
model=llama3.1_405b
nodes=72
plan_flags=(--gpu-memory-gib 80 --rollout-gpu-memory-gib 139)  # 139 GiB: what a GPU of 141 GB has
flags=(
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 32 --sequence-parallel
    --transformer-overrides account_for_embedding_in_pipeline_split true account_for_loss_in_pipeline_split true
    --rollout-world-size 64 --rollout-tensor-parallel-size 8
    --prompts-per-iteration 1024 --samples-per-prompt 1 --global-batch-size 512 --ppo-epochs 1
    --micro-batch-size 16 --max-tokens-per-micro-batch 4096
    --max-prompt-length 1024 --max-response-length 3072
    --recompute-granularity full
    --vllm-overrides gpu_memory_utilization 0.85
)
. "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
