// What the host hands to the kernel of multi_lora_slot_write.
#pragma once

#include <cstdint>

namespace mindlora {

struct MultiLoraSlotWriteTiling {
    uint64_t block;  // elements of a slot: maxRank * (K + N)
    uint64_t count;  // elements that are written: rank * (K + N)
    uint32_t slots;
    uint32_t rank;
    uint32_t tile;  // elements that a core moves at a time
    uint32_t unit;  // elements: each core has a multiple of them
};

}  // namespace mindlora
