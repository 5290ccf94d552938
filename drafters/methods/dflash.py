"""`dflash`: a block of slots, each guessing the token at its own position.

The block is the anchor and a mask for each token that follows; the anchor's slot has nothing to
guess. Slots see each other but not each other's tokens, so the law of a depth is the same below
every node. Source: DFlash (arXiv 2602.06036, ICML 2026).
"""

from typing import ClassVar

from drafters.block import BlockDrafter, BlockOptions
from drafters.registry import register


@register
class DFlashDrafter(BlockDrafter[BlockOptions]):
    """DFlash for one target.

    Args:
        config: resolved options.
        shape: of the target.
    """

    name: ClassVar[str] = "dflash"
    schema = BlockOptions
    lead: ClassVar[int] = 1
