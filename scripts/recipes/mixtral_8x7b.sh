#!/usr/bin/env bash
# Mixtral 8x7B: 6 nodes x 8 GPUs of 80 GB. Four nodes train, two sample.
# Expected: 62 GiB of a training GPU; a refit in 0.5 s (plan). An iteration has 1,024 responses of at most 1,024 + 3,072 tokens, in steps of 256.
# Training TP 2 x PP 4 x DP 4 with EP 8: a stage is a node, which holds each expert once and whole (expert TP 1), so that tokens travel to experts
# inside a node. 97% of the parameters are experts: they decide, hence PP 4 rather than PP 2.
# Rollout 4 replicas of TP 4: 23 GB of weights a GPU, a slice of every expert on each.
model=mixtral_8x7b
nodes=6
flags=(
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --expert-model-parallel-size 8 --sequence-parallel
    --transformer-overrides expert_tensor_parallel_size 1
    --rollout-world-size 16 --rollout-tensor-parallel-size 4
    --prompts-per-iteration 1024 --samples-per-prompt 1 --global-batch-size 256 --ppo-epochs 1
    --micro-batch-size 16 --max-tokens-per-micro-batch 8192
    --max-prompt-length 1024 --max-response-length 3072
    --recompute-granularity full
    --vllm-overrides gpu_memory_utilization 0.85
)
. "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
