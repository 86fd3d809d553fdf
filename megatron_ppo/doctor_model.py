"""What doctor looks at in a configuration: the equations of the launch, and whether model, tokenizer and prompts belong together."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_ppo.config import Config
from megatron_ppo.config_checks import faults
from megatron_ppo.doctor_page import Finding
from megatron_ppo.generic_network import describe_network
from megatron_ppo.prompts import load_prompts
from megatron_ppo.resharding.hf_checkpoint import HFCheckpoint, check_heads
from megatron_ppo.resharding.megatron_mesh import smallest_world_size
from megatron_ppo.tokenizer import check_same_tokenizer, check_vocabulary, load_tokenizer, refuse_remote_code, stop_token_ids

_SENTENCE = "The quick brown fox, 12 + 34 = 46.\n"


def check_configuration(config: Config, num_ranks: int | None) -> list[Finding]:
    """Every equation of ``train``. ``num_ranks``: of the launch; None: the smallest that the sizes admit.

    Rules on data are left out where no prompts are named.
    """
    if not config.model.model_path:
        return [
            Finding(
                "model_path",
                "not given",
                "note",
                "give --model-path and the flags of train: then sizes, model and tokenizer are checked too",
            )
        ]
    size = smallest_world_size(config) if num_ranks is None else num_ranks
    found = faults(config, size, needs_data=bool(config.data.prompt_data))
    if found:
        return [Finding("rule", fault, "broken", "") for fault in found]
    sizes = ", ".join(f"{name} {number}" for name, number in config.mesh_sizes(size).items())
    return [Finding("ranks", f"{size}{' (the smallest launch)' if num_ranks is None else ''}: {sizes}"), Finding("rules", "all hold")]


def check_model(config: Config) -> list[Finding]:
    """Weights on disk against config.json, then the tokenizer against the network and the prompts."""
    if not config.model.model_path:
        return []
    folder = Path(config.model.model_path)
    found: list[Finding] = []
    for name, check in {"weights": _weights, "tokenizer": _tokenizer}.items():
        with _warnings() as warned:
            try:
                found += check(config, folder)
            except (ValueError, OSError) as error:
                found.append(Finding(name, str(error), "broken"))
        found += [Finding(name, text, "note") for text in warned]
    return found


def _weights(config: Config, folder: Path) -> Iterator[Finding]:
    refuse_remote_code(folder, config.model.trust_remote_code)
    checkpoint = HFCheckpoint(folder)
    check_heads(checkpoint, describe_network(checkpoint.config), "lm", head_required=False)
    yield Finding("weights", f"{checkpoint.config.get('model_type')}, {len(checkpoint.shapes)} tensors, all there and of the right shapes")


def _tokenizer(config: Config, folder: Path) -> Iterator[Finding]:
    tokenizer = load_tokenizer(config)
    vocab_size = describe_network(folder).vocab_size
    prompts = load_prompts(config, tokenizer).prompts if config.data.prompt_data else ()
    check_vocabulary(tokenizer, prompts, vocab_size)
    stops = sorted(stop_token_ids(tokenizer, folder, config))
    yield Finding("tokenizer", f"{type(tokenizer).__name__}, {tokenizer.vocab_size} tokens; the model has {vocab_size}")
    kind = "chat template" if tokenizer.has_chat_template else "no chat template"
    yield Finding("special ids", f"begin {tokenizer.bos_token_id}, a response ends at {stops}, {kind}")
    if not stops:
        yield Finding("special ids", "nothing ends a response but its length", "note", "set --stop-token-ids")
    ids = tokenizer.encode(_SENTENCE, add_bos=False)
    yield Finding("a sentence", f"{len(ids)} tokens: {ids[:12]}{' ...' if len(ids) > 12 else ''}")
    for other in (config.model.critic_path, config.model.reward_model_path):
        if other is not None:
            check_same_tokenizer(tokenizer, Path(other), prompts, config)
            yield Finding("same tokenizer", other)
    if prompts:
        lengths = [len(prompt.token_ids) for prompt in prompts]
        yield Finding("prompts", f"{len(prompts)} usable, {min(lengths)} to {max(lengths)} tokens")


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """What the project's own loggers warn of inside the block, instead of on standard error."""
    texts: list[str] = []

    class Keep(logging.Handler):
        """Keeps texts."""

        def emit(self, record: logging.LogRecord) -> None:
            texts.append(record.getMessage())

    logger, handler = logging.getLogger("megatron_ppo"), Keep(logging.WARNING)
    propagates, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield texts
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagates
