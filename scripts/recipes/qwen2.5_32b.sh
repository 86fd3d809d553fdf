#!/usr/bin/env bash
# Qwen2.5 32B: 6 nodes x 8 GPUs of 80 GB. Four nodes train, two sample.
# Expected: 55 GiB of a training GPU; a refit in 0.7 s (plan). An iteration has 1,024 responses of at most 1,024 + 3,072 tokens, in steps of 256.
# Training TP 8 x PP 2 x DP 2: tensor parallelism within a node, the pipeline across nodes. Embedding and head count as a layer each, so that a stage
# has 32 of the 64 layers and one of the two large matrices.
# Rollout 8 replicas of TP 2: 33 GB of weights a GPU.
model=qwen2.5_32b
nodes=6
flags=(
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 2 --sequence-parallel
    --transformer-overrides account_for_embedding_in_pipeline_split true account_for_loss_in_pipeline_split true
    --rollout-world-size 16 --rollout-tensor-parallel-size 2
    --prompts-per-iteration 1024 --samples-per-prompt 1 --global-batch-size 256 --ppo-epochs 1
    --micro-batch-size 16 --max-tokens-per-micro-batch 8192
    --max-prompt-length 1024 --max-response-length 3072
    --recompute-granularity full
    --vllm-overrides gpu_memory_utilization 0.85
)
. "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
