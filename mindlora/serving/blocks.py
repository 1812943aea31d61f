"""BlockPool: the blocks of the key-value cache, who uses them, and which hold a beginning that was computed before."""

import collections
from typing import Dict, Hashable, List, Optional, Sequence, Tuple

# What a full block holds: salt, number of the content before it (0 at the start), its tokens.
_Content = Tuple[Hashable, int, Tuple[int, ...]]


class BlockPool:
    """Hands out blocks of the cache, and finds those that hold the beginning of a prompt already.

    The key of a token depends on all tokens before it and on the adapter. So a full block is known by its content:
    the salt (the adapter, its version, what the request asks for), the content of the block before it, and its tokens.
    Each content has a number, and a dictionary leads from (salt, number of the content before, tokens) to the block. It
    compares these themselves and not their hash alone, so no collision shows anyone the keys of another text. Hash
    chains over blocks are from vLLM (Kwon et al., Efficient Memory Management for LLM Serving with PagedAttention,
    2023).

    Only full blocks are shared, and nothing writes to a full block. A full block that nobody uses any more keeps its
    content until the block is needed: the one that was used least recently goes first. A block goes before the block
    that its text continues, as users of the one use the other too, and give it back first.

    The pool is not locked: calls must not overlap.

    Attributes:
        hits (int): Blocks that share() gave and that did not have to be computed.
        evictions (int): Contents that were given up because a block was needed.
    """

    def __init__(self, num_blocks: int, block_size: int):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.hits = self.evictions = 0
        self._free = list(range(num_blocks))[::-1]
        self._users = [0] * num_blocks
        # Full blocks without users, in the order in which they are given up.
        self._unused: "collections.OrderedDict[int, None]" = collections.OrderedDict()
        self._block_of: Dict[_Content, int] = {}
        self._content_of: Dict[int, _Content] = {}
        self._number_of: Dict[int, int] = {}
        self._numbers = 0

    @property
    def blocks_free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def blocks_cached(self) -> int:
        """Blocks that nobody uses and whose content is kept."""
        return len(self._unused)

    @property
    def blocks_available(self) -> int:
        """Blocks that allocate() can give: the free and the cached ones."""
        return len(self._free) + len(self._unused)

    def users(self, block: int) -> int:
        """Returns how many requests use a block."""
        return self._users[block]

    def allocate(self, count: int = 1) -> List[int]:
        """Returns ``count`` blocks to write to, at most blocks_available, which nobody else uses."""
        if count > self.blocks_available:
            raise IndexError(f"{count} blocks were asked for, and {self.blocks_available} are available.")
        while len(self._free) < count:
            self._give_up()
            self.evictions += 1
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._users[block] = 1
        return blocks

    def free(self, blocks: Sequence[int]) -> None:
        """Takes back the blocks of a request, in the order of its text. The full ones keep their content."""
        for block in reversed(blocks):
            self._users[block] -= 1
            if self._users[block] == 0:
                if block in self._content_of:
                    self._unused[block] = None
                else:
                    self._free.append(block)

    def find(self, salt: Hashable, tokens: Sequence[int], common: int = 0, common_salt: Hashable = None) -> List[int]:
        """Returns the full blocks with this salt that hold the beginning of a text, in order, without taking them.

        Blocks that end within the first ``common`` tokens have the salt ``common_salt``. The last token is never among
        them: it must be computed for what follows it.
        """
        size = self.block_size
        number = 0
        blocks: List[int] = []
        for start in range(0, len(tokens) - size, size):
            of_block = common_salt if start + size <= common else salt
            block = self._block_of.get((of_block, number, tuple(tokens[start : start + size])))
            if block is None:
                break
            blocks.append(block)
            number = self._number_of[block]
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Makes a request one of the users of blocks that find() gave."""
        for block in blocks:
            self._users[block] += 1
            self._unused.pop(block, None)
        self.hits += len(blocks)

    def fill(self, block: int, before: Optional[int], salt: Hashable, tokens: Sequence[int]) -> int:
        """Says what a block of one user holds, now that it is full; returns the block to use from now on.

        If another block holds the same already, the given one becomes free and the other is shared in its place.
        ``before``, the block before it, is full too; None at the start of a text. Only this ``salt`` will find it.
        """
        content = (salt, 0 if before is None else self._number_of[before], tuple(tokens))
        other = self._block_of.get(content)
        if other is None:
            self._numbers += 1
            self._block_of[content] = block
            self._content_of[block] = content
            self._number_of[block] = self._numbers
            return block
        self.free([block])
        self._users[other] += 1
        self._unused.pop(other, None)
        return other

    def forget(self) -> None:
        """Gives up the contents of all blocks that nobody uses."""
        while self._unused:
            self._give_up()

    def _give_up(self) -> None:
        block, _ = self._unused.popitem(last=False)
        del self._block_of[self._content_of.pop(block)], self._number_of[block]
        self._free.append(block)
