"""The command line: ``python -m megatron_ppo COMMAND``. ``train`` runs on all ranks, under torchrun or srun."""

from __future__ import annotations

import difflib
import gc
import importlib
import sys
from collections.abc import Sequence

COMMANDS = {
    "train": ("megatron_ppo.run", "train a policy; start it on all ranks with torchrun or srun"),
    "verify": ("megatron_ppo.verify", "prove that weights reach vLLM bit for bit, on the meshes of a configuration"),
    "convert": ("megatron_ppo.conversion", "Hugging Face folder to distributed checkpoint and back; on one machine, without GPU"),
    "doctor": ("megatron_ppo.doctor", "a page about this machine and configuration for a bug report; under a launcher also its links"),
    "plan": ("megatron_ppo.planner", "meshes, memory and seconds of a launch, without running it; --search GPUS, --refit"),
}
"""Name -> (module whose ``main(arguments) -> exit code`` runs it, one line of help). Modules are imported when they are asked for."""

HELP = """usage: python -m megatron_ppo COMMAND [--config FILE] [flags]

commands:
{commands}

`python -m megatron_ppo COMMAND --help` lists its flags, by section.
Example, 4 ranks on this machine, of which the last two sample:
  torchrun --nproc-per-node 4 -m megatron_ppo train --config run.yaml --tensor-model-parallel-size 2 --rollout-world-size 2"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(HELP.format(commands="\n".join(f"  {name:<8} {text}" for name, (_, text) in COMMANDS.items())))
        return 0 if arguments else 2
    command, *rest = arguments
    if command not in COMMANDS:
        near = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f"; did you mean {near[0]}?" if near else f"; there is: {', '.join(COMMANDS)}"
        print(f"megatron_ppo: unknown command {command!r}{hint}", file=sys.stderr)
        return 2
    name, _ = COMMANDS[command]
    gc.disable()  # a fifth of an import's time: it makes many objects and no garbage
    module = importlib.import_module(name)
    if command != "train":  # which imports its frameworks as it starts up, and enables it before its loop
        gc.enable()
    return int(module.main(rest))


if __name__ == "__main__":
    sys.exit(main())
