// What the host hands to the kernel of nf4_dequantize.
#pragma once

#include <cstdint>

namespace mindlora {

struct Nf4DequantizeTiling {
    uint64_t columns;    // of a row of W
    uint32_t rowBlocks;  // blocks of a row
    uint32_t blocks;     // of all rows
    uint32_t tile;       // blocks that a core decodes at a time; a group is a whole number of tiles
    uint32_t unit;       // blocks: each core has a multiple of them
    float table[16];     // the value of each code
};

}  // namespace mindlora
