"""Starts `megatron_ppo train` on a Ray cluster, or on this machine alone: one actor a rank.

    python scripts/train_ray.py --config run.yaml --run-dir runs/mine --num-training-ranks 2 [any flag of train]

It takes the flags of `train` and those of `megatron_ppo/ray_launch.py`. RAY_ADDRESS or --ray-address names a cluster.
"""

import sys

from megatron_ppo.ray_launch import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
