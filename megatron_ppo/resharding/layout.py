"""How a rank's parameters lie in the model: blocks of canonical tensors. Pure data, no framework, no communication.

A canonical tensor has the Hugging Face name and the unsharded shape of a weight. Each side (megatron, vLLM, ...) describes each of its
ranks as a list of blocks; where a source block and a destination block of one canonical tensor overlap, bytes travel (``plan.py``).

    canonical  model.layers.3.self_attn.k_proj.weight [256, 512]     rows 0..128
        |  source block (training rank 2)                            decoder.layers.1.self_attention.linear_qkv.weight rows 512..640
        |  destination block (rollout rank 1)                        model.layers.3.self_attn.qkv_proj.weight rows 1024..1152
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

Range = tuple[int, int]
"""Half-open index range (start, stop) along one dim."""
Ranges = tuple[Range, ...]
"""One range a dim."""


@dataclass(frozen=True, slots=True)
class Block:
    """A box of one canonical tensor and the box of one local parameter that holds it, equal in shape dim by dim.

    The local box may have further dims of extent 1 in front: a parameter that stacks canonical tensors, as engines do with experts.
    """

    name: str
    """Canonical name."""
    canonical: Ranges
    """Box in the canonical tensor."""
    parameter: str
    """Local parameter name."""
    local: Ranges
    """Box in the local parameter."""

    def __post_init__(self) -> None:
        if self.local is not self.canonical and not _equal_in_shape(self.canonical, self.local):
            raise ValueError(
                f"block of {self.name}: canonical box {self.canonical} and box {self.local} of {self.parameter} differ in shape"
            )

    @property
    def num_elements(self) -> int:
        """Elements in the box."""
        count = 1
        for start, stop in self.canonical:
            count *= stop - start
        return count


@dataclass(frozen=True)
class RankLayout:
    """All that one rank holds. Rows that exist only locally (vocabulary padding) belong to no block."""

    blocks: tuple[Block, ...]
    shapes: dict[str, tuple[int, ...]]
    """Local parameter name -> local shape, padding included."""


def box_shape(ranges: Ranges) -> tuple[int, ...]:
    """Extent along each dim."""
    return tuple([stop - start for start, stop in ranges])


def _equal_in_shape(canonical: Ranges, local: Ranges) -> bool:
    lead = len(local) - len(canonical)
    return box_shape(local) == (1,) * lead + box_shape(canonical) if lead else box_shape(local) == box_shape(canonical)


def shifted(box: Ranges, origin: Ranges, target: Ranges) -> Ranges:
    """``box``, a part of ``origin``, at the same place in ``target``, which may have further dims in front."""
    if box == origin:
        return target
    lead = len(target) - len(origin)
    return target[:lead] + tuple([(t + a - o, t + b - o) for (a, b), (o, _), (t, _) in zip(box, origin, target[lead:], strict=True)])


def view(tensor: Tensor, ranges: Ranges) -> Tensor:
    """The box as a view that shares storage."""
    for dim, (start, stop) in enumerate(ranges):
        tensor = tensor.narrow(dim, start, stop - start)
    return tensor
