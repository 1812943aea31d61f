"""BlockPool: the blocks of the key-value cache, their users, and the computed beginnings of texts that they hold."""

import collections
from typing import Dict, Hashable, List, Optional, Sequence, Tuple

# Content of a full block: salt, number of the content before it (0 at the start), its tokens.
_Content = Tuple[Hashable, int, Tuple[int, ...]]


class BlockPool:
    """Hands out blocks of the cache, and finds blocks that already hold the beginning of a prompt.

    The key of a token depends on all tokens before it and on the adapter. So a full block is identified by its content:
    the salt (the adapter, its version, the request's own salt), the content of the block before it, and its tokens.
    Each content has a number, and a dictionary leads from (salt, number of the content before, tokens) to the block. It
    compares these themselves and not only their hash, so no collision exposes the keys of another text. Hash
    chains over blocks are from vLLM (Kwon et al., Efficient Memory Management for LLM Serving with PagedAttention,
    2023).

    Only full blocks are shared, and full blocks are not written to. A full block without users keeps its
    content until the block is needed: the least recently used one goes first. A block goes before the block
    that its text continues, whose users include its own, since it is freed first.

    The pool is not locked: calls must not overlap.

    Attributes:
        hits (int): Blocks from share(), which did not have to be computed.
        evictions (int): Contents that were dropped because a block was needed.
    """

    def __init__(self, num_blocks: int, block_size: int):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.hits = self.evictions = 0
        self._free = list(range(num_blocks))[::-1]
        self._users = [0] * num_blocks
        # Full blocks without users, in the order of their eviction.
        self._unused: "collections.OrderedDict[int, None]" = collections.OrderedDict()
        self._block_of: Dict[_Content, int] = {}
        self._content_of: Dict[int, _Content] = {}
        self._number_of: Dict[int, int] = {}
        self._numbers = 0

    @property
    def blocks_free(self) -> int:
        """Number of empty blocks."""
        return len(self._free)

    @property
    def blocks_cached(self) -> int:
        """Number of unused blocks whose content is kept."""
        return len(self._unused)

    @property
    def blocks_available(self) -> int:
        """Number of blocks that allocate() can return: the free and the cached ones."""
        return len(self._free) + len(self._unused)

    def users(self, block: int) -> int:
        """Returns the number of requests that use a block."""
        return self._users[block]

    def allocate(self, count: int = 1) -> List[int]:
        """Returns ``count`` blocks to write to, at most blocks_available, for one user."""
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
        """Frees the blocks of a request, given in the order of its text. Full blocks keep their content."""
        for block in reversed(blocks):
            self._users[block] -= 1
            if self._users[block] == 0:
                if block in self._content_of:
                    self._unused[block] = None
                else:
                    self._free.append(block)

    def find(self, salt: Hashable, tokens: Sequence[int], common: int = 0, common_salt: Hashable = None) -> List[int]:
        """Returns the full blocks with this salt that hold the beginning of a text, in order, without taking them.

        Blocks that end within the first ``common`` tokens have the salt ``common_salt``. They never include the last
        token, which must be computed for the next one.
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
        """Makes a request a user of blocks from find()."""
        for block in blocks:
            self._users[block] += 1
            self._unused.pop(block, None)
        self.hits += len(blocks)

    def fill(self, block: int, before: Optional[int], salt: Hashable, tokens: Sequence[int]) -> int:
        """Records the content of a user's block that is now full; returns the block to use from now on.

        If another block already holds the same, the given one becomes free and the other is shared in its place.
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
        """Drops the contents of all unused blocks."""
        while self._unused:
            self._give_up()

    def _give_up(self) -> None:
        block, _ = self._unused.popitem(last=False)
        del self._block_of[self._content_of.pop(block)], self._number_of[block]
        self._free.append(block)
