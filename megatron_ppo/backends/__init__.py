"""HOW roles are distributed and trained (``megatron``), and how a replica generates (``vllm``, ``hf``)."""
