#!/usr/bin/env bash
# Qwen3 235B-A22B: 40 nodes x 8 GPUs of 80 GB. 32 nodes train, eight sample.
# Expected: 51 GiB of a training GPU; a refit in 1.2 s (plan). An iteration has 1,024 responses of at most 1,024 + 3,072 tokens, in steps of 512.
# Training TP 4 x PP 16 x DP 4 with EP 8: a stage has two nodes; each holds the 128 experts once, 16 whole ones a GPU, so that tokens travel to experts
# inside a node. TP 4, as there are 4 KV heads. Embedding and head count as a layer each: 94 + 2 layers are six a
# stage. Steps of 512 responses keep the bubble of 16 stages at 12%.
# Rollout 8 replicas of TP 8: 59 GB of weights a GPU do not fit with fewer; the 4 KV heads are there twice, experts are whole (16 a GPU).
model=qwen3_235b_a22b
nodes=40
flags=(
    --tensor-model-parallel-size 4 --pipeline-model-parallel-size 16 --expert-model-parallel-size 8 --sequence-parallel
    --transformer-overrides expert_tensor_parallel_size 1 account_for_embedding_in_pipeline_split true account_for_loss_in_pipeline_split true
    --rollout-world-size 64 --rollout-tensor-parallel-size 8
    --prompts-per-iteration 1024 --samples-per-prompt 1 --global-batch-size 512 --ppo-epochs 1
    --micro-batch-size 16 --max-tokens-per-micro-batch 4096
    --max-prompt-length 1024 --max-response-length 3072
    --recompute-granularity full
    --vllm-overrides gpu_memory_utilization 0.92 enable_expert_parallel true
)
. "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
