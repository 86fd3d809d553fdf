"""PPO for language models on Megatron-Core, launched by torchrun or srun."""

__version__ = "0.1.0"
