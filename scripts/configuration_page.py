"""Writes docs/configuration.md from the dataclasses, so that the page and the program cannot disagree.

python scripts/configuration_page.py            writes the page
python scripts/configuration_page.py --check    exit code 1 where the page is not what the program says
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
import textwrap
from pathlib import Path

from megatron_ppo import config as config_module
from megatron_ppo.config import Config

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"

HEAD = """# Configuration

The default in the dataclass, then the YAML file of `--config`, then the command line:

    torchrun --nproc-per-node 4 -m megatron_ppo train --config run.yaml --tensor-model-parallel-size 2 --lr 1e-6

A YAML file has one mapping a section, or flat field names, or both:

```yaml
parallel:
  tensor_model_parallel_size: 2
lr: 1e-6
```

An unknown key is refused with file, line and the nearest valid name. The resolved configuration is written to `RUN_DIR/config.yaml`; giving
that file to `--config` repeats the run. Names are unique, so flags need no section: `--micro-batch-size 4`.

## Rules between fields

They are checked on every rank before any process group or model exists; all faults are printed at once, each with its numbers and a remedy.

| rule | why |
|---|---|
| world size = TP x PP x CP x DP + rollout_world_size | training ranks come first; DP is what is left |
| rollout_world_size = replicas x rollout_tensor_parallel_size | each replica is one vLLM engine |
| both tensor-parallel sizes divide the attention heads, and divide the key/value heads or are multiples of them | heads stay whole |
| layers divide by PP x virtual PP | every chunk has the same number |
| prompts_per_iteration x samples_per_prompt is a multiple of global_batch_size | whole optimizer steps |
| global_batch_size is a multiple of DP | whole shares |
| max_prompt_length + max_response_length <= the model's positions | no response is cut short silently |
| gae needs a critic; grpo and rloo have none, and need samples_per_prompt >= 2 | |
| there is a reward, a reward_model_path, or both | |
| critic_path and reward_model_path have the vocabulary and tokenizer of model_path | they read the policy's token ids |

Counters of the learning-rate schedule are optimizer steps: `train_iters x ppo_epochs x (responses of an iteration / global_batch_size)`.
"""


def help_texts(section: type) -> dict[str, str]:
    """The string under each field of a dataclass."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    assert isinstance(node, ast.ClassDef)
    texts: dict[str, str] = {}
    for field, text in zip(node.body, node.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            assert isinstance(field.target, ast.Name)
            texts[field.target.id] = str(text.value.value)
    return texts


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for section in dataclasses.fields(Config):
        kind = getattr(config_module, str(section.type))
        texts = help_texts(kind)
        parts.append(f"\n## {section.name}\n\n{kind.__doc__}\n\n| field | default | meaning |\n|---|---|---|\n")
        for field in dataclasses.fields(kind):
            value = getattr(section.default, field.name)  # type: ignore[union-attr]
            shown = "" if value in ("", [], {}) else f"`{str(value).lower() if isinstance(value, bool) else value}`"
            parts.append(f"| `{field.name}` | {shown} | {' '.join(texts[field.name].split()).replace('|', chr(92) + '|')} |\n")
    return "".join(parts)


def main() -> int:
    """Write or check the page; the exit code."""
    if "--check" in sys.argv[1:]:
        if not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != page():
            print(f"{PAGE.name} is out of date: run python scripts/configuration_page.py", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
